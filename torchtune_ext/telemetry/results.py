"""What runs came to, with 95% intervals, and which setting is best.

The mean of several seeds has the t-interval; the interval of one run is over held-out problems. Two settings whose intervals do
not overlap differ: that asks for more than an interval of their difference would, which leaves room for picking the best one of
many.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from torchtune_ext.evaluation import partly_right
from torchtune_ext.telemetry.findings import reading_of
from torchtune_ext.telemetry.heading import flat
from torchtune_ext.telemetry.runs import Run, Setting

ACCURACY, LOW, HIGH = "eval/accuracy_sampled", "eval/low", "eval/high"
GREEDY, REWARD, NLL = "eval/accuracy_greedy", "reward/mean", "loss/nll"
# Runs are compared by the first of these that two of them have, unless a sweep names its own metric.
TARGETS = {
    ACCURACY: "held-out accuracy",
    GREEDY: "held-out accuracy (greedy)",
    REWARD: "mean reward of the last tenth of the steps",
    NLL: "negative log-likelihood of the last tenth of the steps",
}
NAMED = 4  # settings that a sentence names


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95% interval, whose ends are None where nothing says how wide it is."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.value:.3g}" + ("" if self.low is None else f" [{self.low:.3g}, {self.high:.3g}]")


@dataclass(frozen=True, slots=True)
class Target:
    """What runs are compared by."""

    metric: str
    words: str  # "held-out accuracy"
    higher: bool  # More is better.


@dataclass(frozen=True, slots=True)
class Verdict:
    """What each setting came to, by its place, and which one is best."""

    headline: str
    seeds: Mapping[int, Sequence[Estimate]]  # a result for each seed
    means: Mapping[int, Estimate]  # of those settings that have a result
    best: int | None = None
    close: Sequence[int] = ()  # those that may be as good as the best one


# ---------------------------------------------------------------- of one run


def target_of(runs: Sequence[Run], sweeps: Sequence[Mapping[str, Any]]) -> Target | None:
    """Returns what the runs are compared by, or None where they share no number that could tell which one is better."""
    # W&B minimizes where a file says nothing.
    goals = {(sweep["metric"]["name"], sweep["metric"].get("goal") == "maximize") for sweep in sweeps}
    if len(goals) == 1:
        ((metric, higher),) = goals
    else:
        # The reward of a replay is that of the samples which were stored, whatever the settings are.
        replays = any((run.config or {}).get("replay") for run in runs)
        having = {name: [run for run in runs if any(name in record for record in run.records)] for name in TARGETS}
        shared = [
            name for name in TARGETS if len(having[name]) >= min(2, len(runs)) and not (replays and name == REWARD)
        ]
        if not shared:
            return None
        metric, higher = shared[0], shared[0] != NLL
    words = TARGETS.get(metric, metric if metric.startswith("eval/") else f"{metric} of the last tenth of the steps")
    if any(partly_right(record) for run in runs for record in run.records):
        # The mean of such rewards is no share of right answers.
        words = words.replace("accuracy", "reward")
    return Target(metric, words, higher)


def result_of(run: Run, target: Target) -> Estimate | None:
    """Returns what a run came to: its newest evaluation, or the mean over the last tenth of the steps; None where it has
    neither."""
    last = next((record for record in reversed(run.records) if target.metric in record), {})
    value = last.get(target.metric) if target.metric.startswith("eval/") else tail(run, target.metric)
    if value is None:
        return None
    return Estimate(value, last.get(LOW), last.get(HIGH)) if target.metric == ACCURACY else Estimate(value)


def tail(run: Run, metric: str) -> float | None:
    """Returns the mean of a metric over the last tenth of the steps; of what few steps have, the newest value."""
    values = [record.get(metric) for record in run.records]
    return None if set(values) == {None} else reading_of(range(len(values)), values).last


def differently_judged(runs: Sequence[Run], target: Target) -> list[str]:
    """Returns the keys of tasks that make the target another number in some of the runs. Other problems of the same kind, by
    another seed, are as good."""
    tasks = []
    for run in runs:
        if run.config is not None and result_of(run, target) is not None:
            node = (run.config.get("evaluation") or {}) if target.metric.startswith("eval/") else run.config
            tasks.append(dict(flat({"task": node.get("task") or {}})))
    keys = dict.fromkeys(key for task in tasks for key in task if key != "task.seed")
    return [key for key in keys if len({task.get(key) for task in tasks}) > 1]


# ---------------------------------------------------------------- of settings


def mean_of_seeds(seeds: Sequence[Estimate]) -> Estimate:
    """Returns the mean over seeds with its t-interval; of one seed its own number, with the interval over problems. Where
    nothing varies, nothing says how far the mean may be off."""
    if len(seeds) == 1:
        return seeds[0]
    values = [seed.value for seed in seeds]
    mean, half = fmean(values), t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half) if half else Estimate(mean)


def apart(first: Estimate, second: Estimate) -> bool:
    """Tells whether the intervals of both are known and do not overlap."""
    known = first.low is not None and second.low is not None
    return known and (first.high < second.low or second.high < first.low)


def t_quantile(p: float, freedom: float) -> float:
    """Returns the value that Student's t exceeds with probability 1 - p, for 1 degree of freedom or more.

    Neither numpy nor the standard library has it, and of two or three seeds a normal quantile would be half as wide. With
    t = sqrt(v) * tan(x) the density is proportional to cos(x) ** (v - 1), which is bounded.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = np.cos((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)
    return math.sqrt(freedom) * math.tan(np.interp(p, np.cumsum(density) / density.sum(), angles[1:]))


# ---------------------------------------------------------------- which one is better


def verdict_of(runs: Sequence[Run], settings: Sequence[Setting], target: Target | None) -> Verdict:
    """Says which setting is better, and whether that can be told."""
    if target is None:
        return Verdict(
            "Nothing says which one is better: no two runs have a held-out accuracy, a reward or a likelihood.", {}, {}
        )
    seeds = {place: _seeds(setting, runs, target) for place, setting in enumerate(settings)}
    means = {place: mean_of_seeds(results) for place, results in seeds.items() if results}
    if not means:
        return Verdict(f"No run has {target.metric} yet.", seeds, means)
    if keys := differently_judged(runs, target):
        why = f"{', '.join(keys)} differ, so that {target.metric} is not the same number in all of them"
        return Verdict(f"They are not compared: {why}.", seeds, means)
    best = (max if target.higher else min)(means, key=lambda place: means[place].value)
    close = [other for other in means if other != best and not apart(means[other], means[best])]
    most = "highest" if target.higher else "lowest"
    headline = f"{_named([settings[best]])} has the {most} {target.words}, {means[best]}."
    if close:
        headline += (
            f" {_named([settings[other] for other in close])} may be as good: the intervals overlap, or are not known."
        )
    if len(means) > 1 and any(len(seeds[place]) == 1 for place in means):
        headline += " One seed does not tell where another would end."
    return Verdict(headline, seeds, means, best, close)


def _seeds(setting: Setting, runs: Sequence[Run], target: Target) -> list[Estimate]:
    """Returns what each seed of a setting came to. Runs of one seed repeat one draw: they count as one, with their mean."""
    by_seed = defaultdict(list)
    for number in setting.runs:
        if (result := result_of(runs[number], target)) is not None:
            by_seed[str((runs[number].config or {}).get("seed"))].append(result)
    return [repeats[0] if len(repeats) == 1 else Estimate(fmean(each.value for each in repeats))
            for repeats in by_seed.values()]  # fmt: skip


def _named(settings: Sequence[Setting]) -> str:
    if len(settings) > NAMED:
        return f"{len(settings)} others"
    return ", ".join(f"{setting.letter} ({setting.label})" for setting in settings)
