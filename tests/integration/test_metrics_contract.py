"""What runs write, what the report draws and what docs/reference/metrics.md explains are the same names; and a step is all of its phases."""

import gzip
import json
from itertools import pairwise

import pytest
import torch

from helpers import recipe_runs as runs
from helpers.metric_names import documented, drawn, known_as
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.panels import panels_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MEASURED = (
    "reward/outcome_*",
    "reward/speedup",
    "reward/gflops",
    "reward/peak_share",
    "reward/spread",
    "reward/speedup_spread",
    "stage/*",
    "stage/moves",
    "time/bench",
    "bench/noisy",
    "bench/cache_hits",
    "archive/cells",
    "archive/best_speedup",
)

# No run here writes these names, for the reason beside them.
ELSEWHERE = {
    "loss/*": "a loss of one's own",
    "loss/environment_nll": "an environment, with loss.environment_coef (tests/unit/training/test_environment_loss.py)",
    **dict.fromkeys(("problems/skipped", "eval/skipped"), "a task with problems that cannot be used"),
    "selection/*": "a task that chooses its problems",
    **dict.fromkeys(MEASURED, "a task whose programs are timed"),
} | ({} if torch.cuda.is_available() else {"memory/gpu_gib": "a GPU"})

# A run that samples ahead writes these names in a step that trains on tokens of several versions. Whether there is such a step
# depends on what the engine samples at the moment of a publication.
AT_TIMES = {
    "loss/clip_fraction_staleness_*",
    "loss/masked_fraction_staleness_*",
    "loss/kl_teacher_staleness_*",
    "mismatch/mean_abs_staleness_*",
}

WARMUP = """
output_dir: warmup
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
"""


@pytest.fixture(scope="module")
def warmup(full_workspace):
    """A warm-up of four updates. It needs no engine."""
    (full_workspace / "warmup.yaml").write_text(WARMUP)
    runs.run(full_workspace, "warmup_sft", config="warmup.yaml")
    return full_workspace / "warmup"


@pytest.fixture(scope="module")
def async_run(full_workspace):
    """A run of three steps whose own engine samples ahead, with the model that it begins with as a teacher beside the rewards."""
    teacher = ["teacher.model_dir=model", "loss.teacher_coef=0.5", "loss.entropy_target=9.0"]
    runs.run(full_workspace, "grpo_async", "output_dir=async", "staleness=1", *teacher)
    return full_workspace / "async"


@pytest.fixture(scope="module")
def all_runs(full_workspace, kl_run, lora_workspace, async_run, warmup, talks_workspace):
    """Runs that write, between them, all that there is: on all weights, with a reference, on adapters, of conversations, ahead,
    supervised."""
    in_turns = (full_workspace / "reference", kl_run, lora_workspace / "reference", talks_workspace / "run")
    return [*in_turns, async_run, warmup]


# A sum of two details, beside the phases: the seconds that a step waited for groups.
NO_PHASES = {"time/step", "time/wait_for_rollouts"}


def written(run):
    return {name for line in read_metrics(run / "metrics.jsonl") for name in line} - {"step"}


def test_written_metrics_are_all_plotted_and_documented(all_runs, repo_root):
    explained = documented(repo_root / "docs" / "reference" / "metrics.md")
    for run in all_runs:
        names = written(run)
        assert [name for name in sorted(names) if known_as(name, explained) is None] == []
        assert [panel.title for panel in panels_for(names) if panel.section == "Other"] == []


def test_plotted_or_documented_metrics_are_all_written(all_runs, repo_root):
    names = set().union(*map(written, all_runs))
    for known in (documented(repo_root / "docs" / "reference" / "metrics.md"), drawn()):
        metrics = {known_as(name, known) for name in names}
        assert known - metrics - AT_TIMES == ELSEWHERE.keys()
        assert known >= AT_TIMES


def ends(run):
    """When the last line of each step was written, by the wall clock of TensorBoard's events, which nothing here computes with."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {event.step: event.wall_time for event in events.Scalars("time/step")}


def test_step_phases_add_up_to_step_time(full_workspace):
    """The steps between the ends of the first and of the last, together. An end is late by the write of its line, a part of
    `time/log` of the next step, so the difference of two ends is wrong by one such write at most."""
    run = full_workspace / "reference"
    lines = {line["step"]: line for line in read_metrics(run / "metrics.jsonl") if line["step"] > 0}
    phases = {step: {n: v for n, v in line.items() if n.startswith("time/")} for step, line in lines.items()}
    late = max(seconds["time/log"] for seconds in phases.values())
    end, counted, passed = ends(run), 0.0, 0.0
    for before, step in pairwise(sorted(phases)):
        counted += sum(v for name, v in phases[step].items() if name.count("/") == 1 and name not in NO_PHASES)
        passed += end[step] - end[before]
    assert passed > 0.2 and abs(counted - passed) <= max(0.02 * passed, late), (counted, passed, late)


def test_phase_details_do_not_exceed_phase_time(all_runs):
    """Parts that report their own seconds use a clock of their own: hence the millisecond."""
    for run in all_runs:
        for line in read_metrics(run / "metrics.jsonl"):
            for phase in {name.rpartition("/")[0] for name in line if name.count("/") == 2}:
                details = [value for name, value in line.items() if name.startswith(f"{phase}/")]
                assert min(details) >= 0.0 and sum(details) <= line[phase] + 1e-3, (run.name, line["step"], phase)


def test_a_speed_is_tokens_over_seconds(all_runs):
    for run in all_runs:
        for line in read_metrics(run / "metrics.jsonl"):
            for name, tokens, phase in (
                ("sampled", "length/tokens", "step" if "async/staleness_mean" in line else "sample/generate"),
                ("trained", "pack/tokens", "train"),
            ):
                if tokens in line:
                    assert line[f"speed/{name}_tokens_s"] * line[f"time/{phase}"] == pytest.approx(
                        line[tokens], rel=1e-9
                    )


def test_the_wait_for_groups_is_two_details(all_runs, async_run):
    for run in all_runs:
        for line in read_metrics(run / "metrics.jsonl"):
            ahead = run == async_run and line["step"] > 0
            assert ("time/wait_for_rollouts" in line) == ahead
            if ahead:
                details = [line.get(f"time/sample/{part}", 0.0) for part in ("generate", "grade")]
                assert line["time/wait_for_rollouts"] == pytest.approx(sum(details), abs=1e-12)


def test_profile_trace_contains_phases_and_operators(kl_run):
    (path,) = (kl_run / "profile").iterdir()
    assert path.name == "step_000002_rank_0.json.gz"
    with gzip.open(path, "rt") as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert {"sample", "sample/generate", "train", "train/backward", "train/optimizer", "publish", "aten::mm"} <= names
