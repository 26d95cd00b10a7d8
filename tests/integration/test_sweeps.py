"""Sweeps: every file is one for W&B, its commands start runs, and runs of agents and of `torchtune-ext sweep` keep to themselves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from helpers import recipe_runs as runs
from torchtune_ext.cli.cli import main
from torchtune_ext.run.folder import read_record
from torchtune_ext.sweep.check import check_sweep
from torchtune_ext.sweep.search import next_point
from torchtune_ext.sweep.spec import read_sweep, sweep_files
from torchtune_ext.telemetry.metrics import read_metrics

SCHEMA = Path(sys.prefix) / "wandb_sweeps" / "sweeps" / "config" / "schema.json"
FILES = sweep_files()
# What makes a run of the tiny config a matter of seconds; none of it is a parameter of a sweep that varies.
SHORT = ["max_steps=1", "evaluation.task.count=4", "rollouts.deadline_s=120"]


@pytest.fixture(scope="session")
def warmed_up(tmp_path_factory):
    """A folder with the model that the tiny configs begin with, hardly warmed up."""
    folder = tmp_path_factory.mktemp("tiny")
    runs.run(folder, "warmup_sft", "num_problems=64", "task.count=64", "schedule.warmup=1", config="warmup/tiny")
    return folder


def points_of(name):
    """The file of a sweep, and what is known of its points before the first result."""
    sweep = read_sweep(FILES[name])
    return sweep, [next_point(sweep, 0, number) for number in range(1 if sweep.method == "bayes" else sweep.num_runs)]


def test_shipped_sweeps_cover_clip_lr_samples_staleness():
    assert list(FILES) == ["sweeps/tiny_clip", "sweeps/tiny_lr", "sweeps/tiny_samples", "sweeps/tiny_staleness"]
    sweep, points = points_of("sweeps/tiny_lr")
    assert sweep.num_runs == 8 and 1.0e-3 in [point["optimizer.lr"] for point in points]


@pytest.mark.skipif(not SCHEMA.is_file(), reason="W&B's schema is not here: `make test` brings it")
@pytest.mark.parametrize("name", FILES)
def test_every_file_is_one_for_wandb(name):
    given = yaml.safe_load(FILES[name].read_text())
    checker = jsonschema.FormatChecker()
    checker.checks("float")(lambda value: isinstance(value, float))
    checker.checks("integer")(lambda value: isinstance(value, int))
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text()), format_checker=checker)
    assert not list(validator.iter_errors(given))
    assert list(validator.iter_errors(given | {"metod": "grid"}))


@pytest.mark.parametrize("name", FILES)
def test_sweep_points_all_fit_their_recipe(name, warmed_up, monkeypatch):
    monkeypatch.chdir(warmed_up)
    sweep, points = points_of(name)
    for point in points:
        cfg = check_sweep(sweep, point, [], Path("out"))
        assert cfg.output_dir == "out/run" and cfg.max_steps == point["max_steps"]


@pytest.mark.parametrize("name", FILES)
def test_files_are_listed_and_printed(name, capsys):
    assert main(["sweeps"]) == 0
    assert f"{name}  " in capsys.readouterr().out
    assert main(["sweeps", name.removeprefix("sweeps/")]) == 0
    assert capsys.readouterr().out == FILES[name].read_text()


class Agents:
    """W&B's own agent, without its server: it makes the command and the environment of a run, and starts the run."""

    def __init__(self, monkeypatch):
        agent = pytest.importorskip("wandb.wandb_agent")
        monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
        # The agent sets these; they go with the test.
        for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_DIR"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        self._class = agent.Agent

    def start(self, name, run_id, number, *further):
        """Starts one run of a sweep, as `wandb agent` does when the server asks for it. Returns its process."""
        sweep, points = points_of(name)
        agent = self._class(None, None, sweep_id="sweep123")
        agent._sweep_command = [*sweep.command, *further]
        args = {key: {"value": value} for key, value in points[number].items()}
        agent._command_run({"run_id": run_id, "program": "tune", "args": args})
        assert os.environ["WANDB_RUN_ID"] == run_id
        return agent._run_processes[run_id]


def ended_well(process, seconds=400):
    assert process.wait(timeout=seconds) == 0


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.parametrize(
    "pair", [("sweeps/tiny_lr", "sweeps/tiny_samples"), ("sweeps/tiny_clip", "sweeps/tiny_staleness")], ids=str
)
def test_concurrent_agent_runs_do_not_interfere(pair, warmed_up, monkeypatch, capfd):
    monkeypatch.chdir(warmed_up)
    agents = Agents(monkeypatch)
    # All of one folder of the config: two agents on one machine.
    ids = [f"{name.rpartition('_')[2]}{i}" for i, name in enumerate(pair)]
    started = [
        agents.start(name, run_id, -1, *SHORT, "output_dir=runs/side") for name, run_id in zip(pair, ids, strict=True)
    ]
    for process in started:
        ended_well(process)
    assert sorted(path.name for path in Path("runs/side").iterdir() if path.name in ids) == sorted(ids)
    for run_id, name in zip(ids, pair, strict=True):
        folder = Path("runs/side", run_id)
        record = read_record(folder)
        assert record["id"] == record["name"] == run_id and record["config"]["output_dir"] == str(folder)
        assert not list(folder.glob("old-*")) and (folder / "checkpoints" / "step_000001").is_dir()
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [0, 1]
        sweep, points = points_of(name)
        for each in sweep.varied_parameters:
            node = record["config"]
            for key in each.name.split("."):
                node = node[key]
            assert node == points[-1][each.name]
    output = capfd.readouterr().out
    assert all(f"files:     runs/side/{run_id};" in output for run_id in ids)
    if pair[0] != "sweeps/tiny_clip":
        return
    # An agent that is started again with the same id goes on.
    words = [*SHORT, "max_steps=2", "resume_from_checkpoint=True", "output_dir=runs/side"]
    ended_well(agents.start(pair[0], ids[0], -1, *words))
    assert f"from step 1 of run {ids[0]}" in capfd.readouterr().out
    assert [line["step"] for line in read_metrics(f"runs/side/{ids[0]}/metrics.jsonl")] == [0, 1, 2]


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_every_command_of_every_file_starts_a_run(name, warmed_up, monkeypatch):
    monkeypatch.chdir(warmed_up)
    agents = Agents(monkeypatch)
    for number in range(len(points_of(name)[1])):
        ended_well(agents.start(name, f"{name.rpartition('_')[2]}{number}", number, *SHORT, "output_dir=runs/all"))


@pytest.mark.long
def test_killed_sweep_resumes_and_completes(warmed_up):
    words = ["rates.yaml", "prompts_per_step=8", "evaluation.task.count=8", "checkpoints.every=1", "evaluation.every=1"]
    sweep = yaml.safe_load(FILES["sweeps/tiny_lr"].read_text())
    sweep["parameters"] = {"optimizer.lr": {"values": [1e-3, 2e-3, 3e-3]}, "max_steps": {"value": 6}}
    (warmed_up / "rates.yaml").write_text(yaml.safe_dump(sweep))
    command = [sys.executable, "-m", "torchtune_ext", "sweep", *words]
    environment = runs.environment() | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    process = subprocess.Popen(command, cwd=warmed_up, env=environment)
    out = warmed_up / "runs" / "sweeps" / "rates"
    deadline = time.monotonic() + 300
    while not (out / "run_02" / "checkpoints" / "step_000002").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, cwd=warmed_up, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((out / "sweep.json").read_text())
    assert [run["state"] for run in record["runs"]] == ["finished"] * 3
    for run in record["runs"]:
        folder = out / run["id"]
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(7))
        assert not list(folder.glob("old-*"))
        starts = (folder / "output.log").read_text().count("engine:    starting")
        assert starts == (2 if run["id"] == "run_02" else 1)
    assert (
        "3 runs, 2 left" in done.stdout
        and "run_02 (2 of 3) resumes" in done.stdout
        and "held-out reward  95% interval" in done.stdout
        and (out / "report.html").is_file()
    )
