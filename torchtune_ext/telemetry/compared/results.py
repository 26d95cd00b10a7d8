"""What each run came to: its accuracies with their intervals, its reward, what it took; and what the runs are compared by."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torchtune_ext.evaluation import partly_right
from torchtune_ext.telemetry.compared.curves import ACCURACY, HIGH, LOW
from torchtune_ext.telemetry.compared.intervals import Estimate
from torchtune_ext.telemetry.compared.runs import OneRun
from torchtune_ext.telemetry.compared.settings import Setting
from torchtune_ext.telemetry.compared.sweep_file import Point, Sweep
from torchtune_ext.telemetry.excerpts import short
from torchtune_ext.telemetry.panels import PANELS, panels_for
from torchtune_ext.telemetry.readings import PART

GREEDY, REWARD, NLL = "eval/accuracy_greedy", "reward/mean", "loss/nll"
# Runs are compared by the first of these that two of them have, unless a sweep names its own metric.
_TARGETS = ((ACCURACY, "last held-out accuracy"), (GREEDY, "last held-out accuracy (greedy)"),
            (REWARD, "mean reward of the last tenth of the steps"),
            (NLL, "negative log-likelihood of the last tenth of the steps"))  # fmt: skip
_FEWER = ("loss/", "mismatch/", "time/", "memory/", "length/truncated")  # Of these, less is better.


@dataclass(frozen=True, slots=True)
class Target:
    """What runs are compared by."""

    metric: str
    words: str  # "last held-out accuracy"
    higher: bool  # More is better.


@dataclass(frozen=True, slots=True)
class Result:
    """What one run came to; None where it has no such number."""

    best: Estimate | None  # the best held-out accuracy; of several evaluations the best one flatters the run
    best_step: int | None
    last: Estimate | None  # the newest held-out accuracy
    last_step: int | None
    reward: float | None  # mean over the last tenth of the steps
    steps: int
    seconds: float | None  # of the steps alone
    tokens: int | None  # that were sampled
    target: Estimate | None  # what the run is compared by


def target_of(runs: Sequence[OneRun], sweeps: Sequence[Sweep]) -> Target | None:
    """Returns what the runs are compared by, or None where they share no number that could tell which one is better."""
    goals = {(sweep.metric, sweep.goal) for sweep in sweeps}
    if len(goals) == 1:
        ((metric, goal),) = goals
        words = {ACCURACY: "held-out accuracy", GREEDY: "held-out accuracy (greedy)"}.get(metric, metric)
        return Target(metric, _honest(words, runs), goal != "minimize")
    for metric, words in _TARGETS:
        if metric == REWARD and any((run.config or {}).get("replay") for run in runs):
            continue  # it is that of the samples which were stored, whatever the settings are
        if sum(_has(run, metric) for run in runs) >= min(2, len(runs)):
            return Target(metric, _honest(words, runs), not metric.startswith(_FEWER))
    return None


def _honest(words: str, runs: Sequence[OneRun]) -> str:
    """Speaks of rewards where their mean is no share of right answers."""
    partial = any(partly_right(record) for run in runs for record in run.records)
    return words.replace("accuracy", "reward") if partial else words


def differently_judged(runs: Sequence[OneRun], settings: Sequence[Setting], target: Target | None) -> list[str]:
    """Returns which settings make the target another number in the runs that have it: the problems, or the grader. Other
    problems of the same kind, by another seed, are as good."""
    if target is None:
        return []
    having = [setting for setting in settings if any(_target(runs[run], target) for run in setting.runs)]
    judges = ["task"]
    if target.metric.startswith("eval/"):
        # An evaluation of a model has its problems in `task`.
        models = any(not runs[run].records for setting in having for run in setting.runs)
        judges = ["evaluation.task", "task"] if models else ["evaluation.task"]
    values: dict[str, set[str]] = {}
    for setting in having:
        for key, value in setting.values.items():
            values.setdefault(key, set()).add(repr(value))
    return [key for key, found in values.items() if len(found) > 1 and not key.endswith(".seed")
            and any(f"{key}.".startswith(f"{judge}.") for judge in judges)]  # fmt: skip


def result_of(run: OneRun, target: Target | None) -> Result:
    """Reads the results of a run."""
    evaluations = _accuracies(run, ACCURACY)
    best = max(evaluations, key=lambda each: each[1].value, default=None)
    last = evaluations[-1] if evaluations else None
    seconds = sum(record.get("time/step") or 0.0 for record in run.records)
    tokens = sum(record.get("length/tokens") or 0 for record in run.records)
    return Result(
        best=best and best[1],
        best_step=best and best[0],
        last=last and last[1],
        last_step=last and last[0],
        reward=_tail(run, REWARD),
        steps=run.records[-1]["step"] if run.records else 0,
        seconds=(seconds or None) if run.point is None or run.point.seconds is None else run.point.seconds,
        tokens=int(tokens) or None,
        target=_target(run, target) if target else None,
    )


def row_of(result: Result) -> dict[str, Any]:
    """Returns the result as the page reads it."""
    return {name: _short(value) for name, value in asdict(result).items()}


def unit_of(metric: str) -> str:
    """Returns the unit of a metric, as of the panel that draws it."""
    return next((panel.unit for panel in panels_for([metric]) if panel in PANELS or panel.series), "")


def unstarted_row(point: Point) -> dict[str, Any]:
    """Returns the row of a run of a sweep that has no metrics: it waits, or failed before its first step."""
    empty = Result(None, None, None, None, None, 0, point.seconds, None, _alone(point.value))
    return row_of(empty)


def _target(run: OneRun, target: Target) -> Estimate | None:
    if run.point is not None and run.point.state == "failed":
        return None  # What it had before it failed is not what its setting came to.
    evaluations = _accuracies(run, target.metric)
    if run.point is not None and run.point.value is not None:
        # What the sweep wrote down counts.
        written = Estimate(run.point.value, run.point.low, run.point.high)
        same = [each for _, each in evaluations[-1:] if abs(each.value - written.value) <= 1e-6]
        return same[0] if same and not written.known else written
    if evaluations:
        return evaluations[-1][1]
    return _alone(_tail(run, target.metric))


def _accuracies(run: OneRun, metric: str) -> list[tuple[int, Estimate]]:
    """Returns the evaluations of a run: those of its steps, or the one that `evaluate` made of a model."""
    if metric not in (ACCURACY, GREEDY):
        return []
    if run.records:
        return [(record["step"], _estimate(record, metric)) for record in run.records
                if isinstance(record.get(metric), int | float)]  # fmt: skip
    for name, found in run.evaluation.items():
        greedy = name == "greedy"
        if isinstance(found, dict) and _finite(found.get("mean")) is not None and greedy == (metric == GREEDY):
            return [(0, Estimate(found["mean"], _finite(found.get("low")), _finite(found.get("high"))))]
    return []


def _estimate(record: Any, metric: str) -> Estimate:
    # Of the greedy samples no interval is written.
    low, high = (_finite(record.get(name)) for name in (LOW, HIGH)) if metric == ACCURACY else (None, None)
    return Estimate(record[metric], low, high)


def _tail(run: OneRun, metric: str) -> float | None:
    """Returns the mean over the last tenth of the steps that have the metric."""
    values = [record[metric] for record in run.records if isinstance(record.get(metric), int | float)]
    number = max(1, round(len(run.records) / PART)) if 2 * len(values) >= len(run.records) else 1
    return sum(values[-number:]) / len(values[-number:]) if values else None


def _has(run: OneRun, metric: str) -> bool:
    return bool(_accuracies(run, metric)) or any(isinstance(record.get(metric), int | float) for record in run.records)


def _alone(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(value)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return short(value) if isinstance(value, float) else value
