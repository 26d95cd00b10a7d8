"""What runs came to, with 95% intervals, and which setting is better, if that can be told.

Of several seeds, a mean has the t-interval and a difference of two means Welch's (Biometrika 34, 1947), which does not take the
spread of two settings for equal. Of one run, the interval is over held-out problems; the standard errors of two runs add up,
which is rather too wide, since runs fail on the same problems.

Where m pairs are looked at, each interval is of the level 1 - 0.05 / m (Bonferroni), so that all of them hold together in 95
of 100 cases; only then the pair that looks best may be picked.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev, variance
from typing import Any

import numpy as np

from torchtune_ext.evaluation import Z, partly_right
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
    """What each setting came to, by its place, and which one is better."""

    headline: str
    seeds: Mapping[int, Sequence[Estimate]]  # a result for each seed
    means: Mapping[int, Estimate]  # of those settings that have a result
    best: int | None = None
    leads: Mapping[int, Estimate] = field(default_factory=dict)  # how much worse than the best one each other one is


def word_of(lead: Estimate) -> str:
    """Returns what may be said of a setting beside the best one: "worse", "tie" or "unknown"."""
    if lead.low is None:
        return "unknown" if lead.value else "tie"
    return "worse" if lead.low > 0 else "tie"


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
    """Returns the mean over seeds with its t-interval; of one seed its own number, with the interval over problems."""
    if len(seeds) == 1:
        return seeds[0]
    values = [seed.value for seed in seeds]
    return _around(fmean(values), t_quantile(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def difference(first: Sequence[Estimate], second: Sequence[Estimate], pairs: int = 1) -> Estimate:
    """Returns the mean of `first` minus that of `second`: with Welch's interval where both have several seeds, with that over
    problems where both have one. `pairs`: how many differences are looked at together."""
    value = fmean(each.value for each in first) - fmean(each.value for each in second)
    upper = 1 - 0.05 / (2 * pairs)
    if len(first) == len(second) == 1:
        widths = [0.0 if each.low is None else each.high - each.low for each in (first[0], second[0])]
        half = NormalDist().inv_cdf(upper) * math.hypot(*widths) / (2 * Z) if all(widths) else 0.0
        return _around(value, half)
    if min(len(first), len(second)) < 2:
        return Estimate(value)
    a, b = (variance([each.value for each in seeds]) / len(seeds) for seeds in (first, second))
    if not a + b:
        return Estimate(value)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    return _around(value, t_quantile(upper, freedom) * math.sqrt(a + b))


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
    pairs = math.comb(len(means), 2)
    leads = {}
    for other in means:
        if other != best:
            first, second = (best, other) if target.higher else (other, best)
            leads[other] = difference(seeds[first], seeds[second], pairs)
    headline = _headline(settings, target, means, best, leads)
    if leads and any(len(seeds[place]) == 1 for place in means):
        headline += " One seed does not tell where another would end."
    return Verdict(headline, seeds, means, best, leads)


def _seeds(setting: Setting, runs: Sequence[Run], target: Target) -> list[Estimate]:
    """Returns what each seed of a setting came to. Runs of one seed repeat one draw: they count as one, with their mean."""
    by_seed = defaultdict(list)
    for number in setting.runs:
        if (result := result_of(runs[number], target)) is not None:
            by_seed[str((runs[number].config or {}).get("seed"))].append(result)
    return [repeats[0] if len(repeats) == 1 else Estimate(fmean(each.value for each in repeats))
            for repeats in by_seed.values()]  # fmt: skip


def _headline(
    settings: Sequence[Setting], target: Target, means: Mapping[int, Estimate], best: int, leads: Mapping[int, Estimate]
) -> str:
    most = "highest" if target.higher else "lowest"
    sentences = [f"{_named([settings[best]])} has the {most} {target.words}, {means[best]}."]
    for word, beginning in (("worse", "Better than"), ("tie", "Tied with"), ("unknown", "Perhaps better than")):
        others = [other for other, lead in leads.items() if word_of(lead) == word]
        if others:
            by = f", by {leads[others[0]]}" if len(leads) == 1 else ""
            sentences.append(f"{beginning} {_named([settings[other] for other in others])}{by}.")
    return " ".join(sentences)


def _named(settings: Sequence[Setting]) -> str:
    if len(settings) > NAMED:
        return f"{len(settings)} others"
    return ", ".join(f"{setting.letter} ({setting.label})" for setting in settings)


def _around(value: float, half: float) -> Estimate:
    """Where nothing varies, nothing says how far the value may be off."""
    return Estimate(value, value - half, value + half) if half else Estimate(value)
