"""Real runs with Weights & Biases, offline, read back with W&B's own reader."""

import json
import math
import shlex
import subprocess

import pytest

from helpers import recipe_runs as runs
from helpers import wandb_reader
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.sinks.tables import COLUMNS, clean_text

pytest.importorskip("wandb")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTED = """
from letters import Letters
from torchtune_ext.tasks.task import Score

class Noted(Letters):
    def grade(self, problem, text):
        score = super().grade(problem, text)
        return Score(score.reward, score.parts, f"<b>{problem.id}</b> \\ud800")
"""
WATCHED = [
    "output_dir=watched",
    "task._component_=noted.Noted",
    "logging.to=[wandb]",
    "logging.project=letters",
    "logging.samples_every=1",
]
WARMUP = """
output_dir: ???
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer}
task: {_component_: letters.Letters}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
num_problems: 32
batch_problems: 8
schedule: {warmup: 1}
log_every: 1
logging: {to: [wandb]}
"""
FAULTY = """
import torch

class Faulty(torch.optim.AdamW):
    made = 0

    def step(self, closure=None):
        self.made += 1
        if self.made == 3:
            raise RuntimeError("no such luck")
        return super().step(closure)
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = runs.make_workspace(tmp_path_factory.mktemp("wandb"))
    (folder / "noted.py").write_text(NOTED)
    (folder / "faulty.py").write_text(FAULTY)
    (folder / "warmup.yaml").write_text(WARMUP)
    return folder


@pytest.fixture(scope="module")
def watched(workspace, served):
    """A run of two steps, and its third step as a resumed run."""
    runs.run(workspace, "grpo_full", *WATCHED, served, "max_steps=2", typed=True)
    first = json.loads((workspace / "watched" / "run.json").read_text())["process"]
    more = ["max_steps=3", "resume_from_checkpoint=True"]
    runs.run(workspace, "grpo_full", *WATCHED, served, *more)
    return (
        workspace / "watched",
        wandb_reader.starts(workspace / "watched", 2),
        [*WATCHED, served, "max_steps=2"],
        first,
    )


def test_scalars_are_those_of_metrics_jsonl(watched):
    run_dir, (first, second), *_ = watched
    history = {**first.history, **second.history}
    lines = {line.pop("step"): line for line in read_metrics(run_dir / "metrics.jsonl")}
    assert list(first.history) == [0, 1, 2] and list(second.history) == [3] and list(lines) == [0, 1, 2, 3]
    for step, line in lines.items():
        assert line.pop("nonfinite", []) == [] and history[step].keys() == line.keys()
        # W&B's file has float64 in decimals.
        assert all(math.isclose(history[step][name], value, rel_tol=1e-12) for name, value in line.items())


def test_wandb_resumed_run_keeps_id_folder_and_config(watched):
    run_dir, starts, typed, process = watched
    record = json.loads((run_dir / "run.json").read_text())
    for one in starts:
        assert one.whole["run_id"] == record["id"] and one.whole["project"] == "letters"
        assert one.whole["name"] == "watched" and one.whole["exit_code"] == 0
    config = starts[0].whole["config"]
    # As it was resolved, and as the user wrote it.
    assert config["task"]["_component_"] == "noted.Noted" and config["sampling"]["max_tokens"] == 12
    assert config["max_grad_norm"] == 1.0, "a default"
    assert config["process"]["command"] == process["command"] and process["command"].endswith("max_steps=2")
    assert process["command"].endswith(shlex.join(typed))
    assert starts[1].whole["config"]["max_steps"] == 3


def test_wandb_step_has_its_own_sample_table(watched):
    run_dir, (first, second), *_ = watched
    tables = {**first.tables, **second.tables}
    assert sorted(tables) == [f"samples/step_{step:06d}" for step in (1, 2, 3)]
    for step, path in rollout_paths(run_dir).items():
        groups = {group.problem.id: group for group in read_rollouts(path)}
        table = tables[f"samples/step_{step:06d}"]
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in table["data"]]
        assert table["columns"] == COLUMNS and len(rows) == 12, "three groups of four samples"
        for row in rows:
            group = groups[row["problem"]]
            sample = next(
                s
                for s in group.samples
                if clean_text(s.text) == row["completion"] and math.isclose(s.score.reward, row["reward"], rel_tol=1e-5)
            )
            assert math.isclose(row["advantage"], sample.advantage, rel_tol=1e-5)
            assert row["note"] == f"<b>{row['problem']}</b> ?" and row["outcome"] == "scored"
            assert row["step"] == step and group.problem.messages[0]["content"] in row["prompt"]


def test_no_file_of_the_run_is_uploaded(watched):
    assert all(one.artifacts == {} for one in watched[1])


def test_a_crash_is_a_failure_for_wandb(workspace):
    output = runs.run(
        workspace,
        "warmup_sft",
        "output_dir=crash",
        "optimizer._component_=faulty.Faulty",
        ok=False,
        config="warmup.yaml",
    )
    (start,) = wandb_reader.starts(workspace / "crash", 1)
    assert "no such luck" in output
    assert start.whole["exit_code"] == 1 and start.whole["state"] == "failed"
    assert sorted(start.history) == [1, 2]


@pytest.mark.rest
def test_two_ranks_are_one_run_of_an_agent(workspace):
    """The agent's variables name the run. Only rank 0 speaks with W&B."""
    done = subprocess.run(
        runs.command("warmup_sft", "output_dir=ranks", ranks=2, config="warmup.yaml"), cwd=workspace, text=True,
        env={**runs.environment(), "WANDB_PROJECT": "theirs", "WANDB_RUN_ID": "agent7"}, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    files = sorted((workspace / "ranks").rglob("*.wandb"))
    assert [path.name for path in files] == ["run-agent7.wandb"], files
    start = wandb_reader._start(files[0].parent)
    assert (
        start.whole["project"] == "theirs" and start.whole["exit_code"] == 0 and sorted(start.history) == [1, 2, 3, 4]
    )
