"""What is wrong with a sweep is said before anything starts: the key, the value and the fix."""

import re
from pathlib import Path

import pytest
import yaml

from helpers import small_sweeps
from helpers.recipe_runs import make_workspace
from torchtune_ext.cli.cli import main
from torchtune_ext.sweep.runner import SweepFolder
from torchtune_ext.sweep.spec import read_sweep

FILE = {
    "command": ["tune", "run", "grpo_full", "--config", "run.yaml", "${args_no_hyphens}"],
    "method": "grid",
    "metric": {"name": "eval/reward_sampled", "goal": "maximize"},
    "parameters": {"optimizer.lr": {"values": [1e-4, 1e-3]}},
}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("sweeps"))


@pytest.fixture
def refusal(workspace, monkeypatch, capsys):
    """Tries a sweep whose file differs from FILE, and returns what is said. Nothing may be left behind."""
    monkeypatch.chdir(workspace)

    def refused(*words, remove=(), **changes):
        given = {key: value for key, value in {**FILE, **changes}.items() if key not in remove}
        Path("s.yaml").write_text(yaml.safe_dump(given))
        with pytest.raises(SystemExit) as ended:
            main(["sweep", "s.yaml", *words])
        assert ended.value.code == 2 and not Path("runs").exists()
        return capsys.readouterr().err

    return refused


def swept(**parameters):
    return {"parameters": {name.replace("__", "."): given for name, given in parameters.items()}}


CASES = [
    ({"metod": "grid"}, "unknown key 'metod'; did you mean method?"),
    ({"method": "griddy"}, "method: griddy: did you mean grid?"),
    ({"method": "custom"}, "method: custom: expected one of grid, random, bayes"),
    ({"metrics": []}, "unknown key 'metrics'; did you mean metric? (`wandb sweep` may know more)"),
    ({"metric": None}, "metric: None: write metric: {name: eval/reward_sampled, goal: maximize}"),
    ({"metric": {"name": "eval/acuracy_sampled"}}, "metric: unknown metric eval/acuracy_sampled of grpo_full; did you mean eval/reward_sampled?"),
    ({"metric": {"name": "eval/reward_sampled", "goal": "max"}}, "write metric: {name: eval/reward_sampled, goal: maximize}"),
    ({"metric": {"name": "eval/reward_sampled", "target": 1}}, "write metric: {name: eval/reward_sampled, goal: maximize}"),
    ({"parameters": {}}, "parameters: needs at least one"),
    ({"parameters": {"optimizer.lr": 0.1}}, "parameters: optimizer.lr: 0.1: write {value: 1}, {values: [1, 2]}, or {min: "),
    (swept(optimizer__lr={"value": []}), "lr"),
    (swept(optimizer__lr={"values": []}), "optimizer.lr: {'values': []}: write {value: 1}"),
    (swept(optimizer__lr={"min": 0, "max": "much"}), "optimizer.lr: {'max': 'much', 'min': 0}: write"),
    (swept(optimizer__lr={"min": 2.0, "max": 1.0}), "with numbers and min < max"),
    (swept(optimizer__lr={"min": 0.1, "max": 1.0}), "method: grid takes"),
    (swept(optimizer__lr={"distribution": "beta"}), "other distributions of W&B are unsupported"),
    (swept(optimizer__lr={"distribution": "log_uniform_values", "min": 0, "max": 1}), "optimizer.lr: {'distribution': 'log_uniform_values'"),
    (swept(optimizer__lr={"values": [1, 2], "probabilities": [0.5, 0.5]}), "'probabilities': [0.5, 0.5]"),
    (swept(seed={"min": 1, "max": 10**12}), "the grid has more than 10,000 points; list fewer values"),
    ({"method": "random", **swept(optimizer__lr={"min": 0.1, "max": 1.0})}, "run_cap is missing: method: random"),
    ({"method": "random", "run_cap": 3, **swept(optimizer__lr={"value": 1})}, "all of them are fixed"),
    ({"run_cap": 0}, "run_cap: 0 must be a whole number, 1 or more"),
    ({"early_terminate": {"type": "median"}}, "early_terminate: {'type': 'median'}: write {type: hyperband, min_iter: 3, eta: 3}"),
    ({"early_terminate": {"type": "hyperband"}}, "write {type: hyperband, min_iter: 3, eta: 3}"),
    ({"early_terminate": {"type": "hyperband", "min_iter": 2, "eta": 1}}, "min_iter >= 1 and eta >= 2"),
    ({"command": "tune run"}, "command: must be a list"),
    ({"command": ["nosuchpython", "-m", "torchtune_ext", "run", "${args_no_hyphens}"]}, "command: program nosuchpython not found"),
    ({"command": ["python", "train.py", "${args_no_hyphens}"]}, "a sweep runs recipes"),
    ({"command": ["python", "train.py", "${args}"]}, "unsupported macro ${args}; expected ${args_no_hyphens}. Fix: use command: [tune, run"),
    ({"command": [*FILE["command"][:5], "--optimizer.lr=0.0001"]}, "expected key=value without dashes: optimizer.lr=0.0001"),
    ({"command": [*FILE["command"], "output_dir=x"]}, "output_dir: the sweep sets the folder of each run"),
    (swept(output_dir={"values": ["a", "b"]}), "output_dir: the sweep sets"),
    # These only the recipe knows.
    (swept(optimizer__lrr={"values": [1, 2]}), "unknown key 'optimizer.lrr': torch.optim.AdamW does not take it; did you mean 'lr'?"),
    (swept(max_step={"values": [1, 2]}), "unknown key 'max_step' in the config; did you mean 'max_steps'?"),
    (swept(sampling__max_token={"values": [1, 2]}), "unknown key 'sampling.max_token' in `sampling:`; did you mean 'max_tokens'"),
    (swept(optimizer__lr={"values": [-1.0, 1e-3]}), "optimizer.lr=-1.0"),
    (swept(loss__clip_low={"values": [3.0, 0.2]}), "loss.clip_low=3.0 must lie in (0, 1]"),
    (swept(samples_per_prompt={"values": [1, 4]}), "samples_per_prompt=1 must be"),
    (swept(prompts_per_step={"value": "${divide:7,${samples_per_prompt}}"}), "${divide:7,4} is not a whole number"),
    ({"command": ["tune", "run", "grpo_ful", "--config", "run.yaml"]}, "grpo_ful"),
    ({"command": ["tune", "run", "grpo_full", "--config", "rum.yaml"]}, "--config rum.yaml: file not found"),
    ({"command": ["tune", "run", "grpo_full", "--config", "warmup/tiny"]}, "is written for warmup_sft"),
]  # fmt: skip


@pytest.mark.parametrize("change, message", CASES, ids=[message[:40] for _, message in CASES])
def test_sweep_file_errors_are_named(refusal, change, message):
    output = refusal(**change)
    assert message in output and output.startswith("error: ") and "Traceback" not in output


def test_sweep_command_arguments_are_checked(refusal):
    assert "--jobs 0: expected 1 or more" in refusal("--jobs", "0")
    assert "'max_steps' is not key=value" in refusal("max_steps")
    assert "optimizer.lr=1: the sweep sets optimizer.lr itself" in refusal("optimizer.lr=1")
    assert "unknown key 'max_step' in the config; did you mean 'max_steps'?" in refusal("--jobs", "1", "max_step=1")
    assert "--job: unknown option. Fix: see torchtune-ext sweep --help" in refusal("--job=2")
    assert "--restart: unknown option" in refusal("--restart")
    assert "--out a=b: " in refusal("--out", "a=b")
    assert "--resume: unknown option" in refusal("--resume")


def test_invalid_sweep_files_are_rejected(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    Path("broken.yaml").write_text("a: [\n")
    for word, message in {
        "tiny_lrr": "file not found from .* did you mean tiny_lr",
        "run.yaml": "unknown key '.*'; expected one of name, description",
        "broken.yaml": "broken.yaml: invalid YAML",
        "letters.py": "invalid YAML|not a sweep",
    }.items():
        with pytest.raises(SystemExit):
            main(["sweep", word])
        assert re.search(message, capsys.readouterr().err)


def test_a_used_folder_and_another_file_are_refused(tmp_path):
    file = small_sweeps.write(tmp_path / "lr.yaml", "parameters: {lr: {values: [0.1, 0.2]}}\n")
    runner, folder = small_sweeps.runner(file, tmp_path / "out", 1, "steps=1")
    assert runner.run()
    folder.close()
    sweep = read_sweep(file)
    began = "out holds a sweep that was started with `torchtune-ext sweep .*/sweep.yaml --seed 0 steps=1`. Fix: resume it with"
    for words, seed in ((["steps=2"], 0), ([], 0), (["steps=1"], 1)):
        with pytest.raises(ValueError, match=began):
            SweepFolder(tmp_path / "out", sweep, words, seed)
    assert [run.state for run in SweepFolder(tmp_path / "out", sweep, ["steps=1"], 0).runs] == ["finished"] * 2
    small_sweeps.write(file, "parameters: {lr: {values: [0.1, 0.3]}}\n")
    with pytest.raises(ValueError, match=began):
        SweepFolder(tmp_path / "out", read_sweep(file), ["steps=1"], 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").touch()
    with pytest.raises(ValueError, match="is not empty, and holds no sweep"):
        SweepFolder(tmp_path / "other", sweep, [], 0)
    (tmp_path / "out" / "sweep.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="damaged .*format 2, expected 1"):
        SweepFolder(tmp_path / "out", sweep, [], 0)
