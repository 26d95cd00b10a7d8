"""What a run says of bad problems, of a grader that fails, and when it goes on: real recipe, real engine."""

import json
import shutil

import pytest

from helpers import recipe_runs as runs
from helpers.forked_runs import refused
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROWS = '''
import os
from letters import Letters

class Rows(Letters):
    """Row 3 is broken, as long as there is no file `mended`, and row 5 is too long for the engine."""

    def __init__(self, count=8):
        super().__init__(count)

    def __getitem__(self, index):
        if index == 3 and not os.path.exists("mended"):
            raise KeyError("answer")
        problem = super().__getitem__(index)
        if index == 5:
            problem.messages[0]["content"] = "Go on. " * 100
        return problem


class Failing(Letters):
    """Fails on every text of a run, and on none that is graded before one begins."""

    def grade(self, problem, text):
        if not os.path.exists("failing/run.json"):
            return super().grade(problem, text)
        print("DEBUG from grade")
        return problem.solution[text]
'''
WARMUP = """
output_dir: warmup
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer}
task: {_component_: rows.Rows}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
num_problems: 8
batch_problems: 4
row_tokens: 128
schedule: {warmup: 1}
"""
BROKEN, LONG = "index 3: KeyError: 'answer' (rows.py:", "'letters-5' (index 5): its prompt has "
EVAL = "evaluation={every: 2, task: {_component_: rows.Rows, count: 5}}"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with tasks that have bad rows, or a grader that fails."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("silent"))
    (folder / "rows.py").write_text(ROWS)
    return folder


@pytest.fixture(scope="module")
def failed(workspace, served):
    """What a run says that was told to go on where nothing is, and whose grader fails on every text."""
    args = ["output_dir=failing", "evaluation.task=null", "max_steps=6", "task._component_=rows.Failing"]
    return runs.run(workspace, "grpo_full", *args, served, "resume_from_checkpoint=True", ok=False)


def problems_of(run_dir):
    """The problems of each step, in their order."""
    return {step: [group.problem.id for group in read_rollouts(path)] for step, path in rollout_paths(run_dir).items()}


def test_bad_problem_is_reported_and_stays_skipped(workspace, served):
    """Eight rows, four a step: after two steps each has been met. Then row 3 is mended, which the run does not look at again."""
    args = ["task._component_=rows.Rows", EVAL, served]
    output = runs.run(workspace, "grpo_full", "output_dir=rows", "max_steps=4", *args)
    assert output.count(BROKEN) == 2, "once of the training rows, once of the held-out ones"
    assert output.count(LONG) == 1
    assert "1 problem is excluded from the 5 problems of Rows: " + BROKEN in output
    lines = {line["step"]: line for line in runs.metrics(workspace / "rows")}
    assert [lines[step]["problems/skipped"] for step in (2, 3, 4)] == [2.0, 2.0, 2.0]
    assert [lines[step]["eval/skipped"] for step in (0, 2, 4)] == [1.0, 1.0, 1.0]

    runs.run(workspace, "grpo_full", "output_dir=again", "max_steps=2", *args)
    (workspace / "mended").touch()
    try:
        output = runs.run(
            workspace, "grpo_full", "output_dir=again", "max_steps=4", "resume_from_checkpoint=True", *args
        )
    finally:
        (workspace / "mended").unlink()
    assert problems_of(workspace / "again") == problems_of(workspace / "rows")
    assert {len(problems) for problems in problems_of(workspace / "rows").values()} == {4}
    assert not {"letters-3", "letters-5"} & set(sum(problems_of(workspace / "again").values(), []))
    assert BROKEN not in output and LONG not in output
    assert [line["problems/skipped"] for line in runs.metrics(workspace / "again")[2:]] == [2.0, 2.0, 2.0]


def test_task_without_valid_problem_fails_before_engine_start(workspace):
    """It is output before the engine starts."""
    output = refused(workspace, "grpo_full", "output_dir=none", "sampling.max_tokens=127")
    assert (
        "allows a prompt length of 1 in engine.max_model_len=128, but the 64 measured prompts of task have " in output
    )
    assert "tokens. Fix: set engine.max_model_len=" in output
    assert not (workspace / "none" / "engine.log").exists()


def test_warmup_bad_problem_is_skipped(workspace):
    (workspace / "warmup.yaml").write_text(WARMUP)
    output = runs.run(workspace, "warmup_sft", config="warmup.yaml")
    assert "2 problems are excluded from the 8 problems of Rows: " + BROKEN in output
    assert "; 'letters-5' (index 5): its text has " in output and "tokens, more than row_tokens=128" in output
    assert "model:     warmup/model, in Hugging Face format: train it with model_dir=warmup/model\n" in output


def test_failing_grader_ends_run_and_keeps_checkpoint(workspace, failed):
    assert (
        "the grader has failed on every text of steps 1 to 2, so nothing is learned. The first failure: problem "
        in failed
    )
    assert "infra_failed: AttributeError: 'Problem' object has no attribute 'solution' (rows.py:" in failed
    assert "no text was graded" in failed
    assert (
        "The run was at step 2 of 6. The newest checkpoint is failing/checkpoints/step_000001; resume from there"
        in failed
    )
    kept = [path.name for path in (workspace / "failing" / "checkpoints").glob("step_*")]
    assert "step_000001" in kept and "step_000002" not in kept
    assert (workspace / "failing" / "grader.log").read_text() == "DEBUG from grade\n" * 32
    assert "DEBUG" not in failed


def test_resume_reports_start_step_changes_and_finished_run(workspace, served, failed):
    assert "resume_from_checkpoint: no checkpoint in failing, so the run starts at its first step" in failed
    shutil.copytree(workspace / "failing", workspace / "going_on")
    run_id = json.loads((workspace / "going_on" / "run.json").read_text())["id"]
    again = ["output_dir=going_on", "evaluation.task=null", served, "resume_from_checkpoint=True"]
    again += ["updates_per_step=1", "schedule.decay=linear"]
    output = runs.run(
        workspace, "grpo_full", *again, "max_steps=2", "optimizer.lr=1e-4", "seed=7", "preset=dapo", typed=True
    )
    # The second of two updates, though the first step had made two.
    assert runs.metrics(workspace / "going_on")[-1]["optim/lr"] == pytest.approx(5e-5)
    assert f"resume:    from step 1 of run {run_id}, started " in output
    changed = "\n".join(line for line in output.splitlines() if line.startswith("changed:"))
    for words in (
        "optimizer.lr 0.001 -> 0.0001",
        "seed 0 -> 7",
        "preset grpo -> dapo",
        "max_steps 6 -> 2",
        "task._component_ rows.Failing -> letters.Letters",
    ):
        assert f"changed:   {words}" in changed
    assert "output_dir" not in changed and "resume_from_checkpoint" not in changed
    for label in ("model", "device", "objective", "problems", "files", "engine", "done", "report", "extend"):
        assert f"\n{label + ':':<11}" in "\n" + output, label
    assert "engine:    ready after " in output
    assert "model:     going_on/checkpoints/step_000002, a model in Hugging Face format\n" in output
    process = json.loads((workspace / "going_on" / "run.json").read_text())["process"]
    assert process["command"].endswith("preset=dapo") and process["folder"] == str(workspace)
    assert process["versions"]["torchtune"].startswith("0.6.1")

    output = runs.run(workspace, "grpo_full", *again, "max_steps=2")
    assert "step 2 >= max_steps=2: nothing to do\ndone:      2 of 2 steps\n" in output
    assert "engine:" not in output, "nothing was started"
