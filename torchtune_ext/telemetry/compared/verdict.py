"""Which setting is better, in words, and whether the data can tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torchtune_ext.telemetry.compared.intervals import (
    Estimate,
    difference_of_problems,
    difference_of_seeds,
    mean_of_seeds,
)
from torchtune_ext.telemetry.compared.results import ACCURACY, Result, Target
from torchtune_ext.telemetry.compared.settings import Setting


@dataclass(frozen=True, slots=True)
class Pair:
    """The best setting and another one."""

    other: int  # the place of the other setting
    difference: Estimate  # best minus other
    told: str  # "apart", "alike" or "unknown"


@dataclass(slots=True)
class Verdict:
    """What is said of the settings together."""

    headline: str
    notes: list[str] = field(default_factory=list)  # what the headline rests on, and what it does not claim
    best: int | None = None  # the place of the best setting
    pairs: list[Pair] = field(default_factory=list)


def estimates_of(settings: Sequence[Setting], results: Mapping[int, Result]) -> list[Estimate | None]:
    """Returns what each setting came to: of several runs their mean with its t-interval, of one run its own number with the
    interval over problems; None where no run of it has the target."""
    found: list[Estimate | None] = []
    for setting in settings:
        values = _values(setting, results)
        if not values:
            found.append(None)
        else:
            found.append(values[0] if len(values) == 1 else mean_of_seeds([each.value for each in values]))
    return found


def verdict_of(
    settings: Sequence[Setting], results: Mapping[int, Result], target: Target | None, differ: Sequence[str] = ()
) -> Verdict:
    """Says which setting is better.

    Args:
        settings: the settings of the page.
        results: of each run that has some, by its place.
        target: what they are compared by; None: they share nothing.
        differ: settings that make the target another number, as `differently_judged` finds them.
    """
    if target is None:
        return Verdict(
            "Nothing says which one is better: no two runs have a held-out accuracy, a reward or a likelihood."
        )
    estimates = estimates_of(settings, results)
    there = [place for place, estimate in enumerate(estimates) if estimate is not None]
    if not there:
        return Verdict(f"No run has {target.metric} yet.")
    if len(there) == 1:
        return Verdict(_alone(settings[there[0]], estimates[there[0]], target, _values(settings[there[0]], results)))
    if differ:
        return Verdict(
            f"They are not compared: {_and(differ)} {'differs' if len(differ) == 1 else 'differ'}, so that "
            f"{target.metric} is not the same number in all of them."
        )
    pick = max if target.higher else min
    best = pick(there, key=lambda place: estimates[place].value)
    pairs = _pairs(settings, results, best, there, target)
    words = _headline(settings, estimates, best, pairs, target)
    return Verdict(words, _notes(settings, results, pairs, there, target), best, pairs)


def _pairs(
    settings: Sequence[Setting], results: Mapping[int, Result], best: int, there: Sequence[int], target: Target
) -> list[Pair]:
    number = len(list(combinations(there, 2)))
    mine = _values(settings[best], results)
    found = []
    for other in there:
        if other == best:
            continue
        theirs = _values(settings[other], results)
        if len(mine) == len(theirs) == 1:
            difference = difference_of_problems(mine[0], theirs[0], number)
        else:
            difference = difference_of_seeds(_plain(mine), _plain(theirs), number)
        if not difference.known:
            told = "unknown"
        else:
            told = "alike" if difference.low <= 0 <= difference.high else "apart"
        found.append(Pair(other, difference, told))
    return sorted(found, key=lambda pair: abs(pair.difference.value))


def _headline(
    settings: Sequence[Setting], estimates: Sequence[Estimate | None], best: int, pairs: Sequence[Pair], target: Target
) -> str:
    named = {
        kind: [settings[pair.other].letter for pair in pairs if pair.told == kind]
        for kind in ("apart", "alike", "unknown")
    }
    first = f"{settings[best].letter} ({settings[best].label}) has the {'highest' if target.higher else 'lowest'} {target.words}, "
    first += f"{_interval(estimates[best])}."
    if len(pairs) == 1:
        (pair,) = pairs
        apart = {
            "apart": f"It is better than {settings[pair.other].letter}, by {_interval(_signed(pair.difference, target))}.",
            "alike": f"It cannot be told apart from {settings[pair.other].letter}: "
                     f"the difference is {_interval(_signed(pair.difference, target))}.",
            "unknown": f"Whether it is better than {settings[pair.other].letter} cannot be said: the difference is "
                       f"{_number(abs(pair.difference.value))}, and nothing tells how far it may be off.",
        }  # fmt: skip
        return f"{first} {apart[pair.told]}"
    told = []
    if named["apart"]:
        told.append(f"It is better than {_and(named['apart'])}.")
    if named["alike"]:
        told.append(f"It cannot be told apart from {_and(named['alike'])}.")
    if named["unknown"]:
        told.append(f"Whether it is better than {_and(named['unknown'])} cannot be said.")
    return " ".join([first, *told])


def _notes(
    settings: Sequence[Setting],
    results: Mapping[int, Result],
    pairs: Sequence[Pair],
    there: Sequence[int],
    target: Target,
) -> list[str]:
    counts = {place: len(_values(settings[place], results)) for place in there}
    level = "95%" if len(there) == 2 else f"{100 * (1 - 0.05 / len(list(combinations(there, 2)))):.4g}%"
    pairwise = "" if len(there) == 2 else (
        f" They are of the level {level}, so that all {len(list(combinations(there, 2)))} pairs hold together at 95% (Bonferroni)."
    )  # fmt: skip
    notes = []
    if any(count > 1 for count in counts.values()):
        notes.append("Across seeds: t-intervals, of differences Welch's (Biometrika 34, 1947), which do not take the spreads "
                     f"of two settings for equal.{pairwise}")  # fmt: skip
    if all(count == 1 for count in counts.values()):
        if target.metric == ACCURACY and any(pair.difference.known for pair in pairs):
            notes.append("Intervals are over held-out problems, of the difference from the two standard errors "
                         f"(√(se₁² + se₂²)), as if each had problems of its own.{pairwise}")  # fmt: skip
        notes.append("One run of each: another seed may end elsewhere, and no interval here holds that. Start each setting "
                     "with two or three seeds to know.")  # fmt: skip
    elif few := [settings[place].letter for place, count in counts.items() if count == 1]:
        notes.append(f"Of {_and(few)} there is one run, whose seed nothing tells the spread of.")
    lost = [setting.letter for place, setting in enumerate(settings) if place not in there]
    if lost:
        notes.append(
            f"{_and(lost)} {'has' if len(lost) == 1 else 'have'} no {target.metric} and {'is' if len(lost) == 1 else 'are'} not compared."
        )
    ends = {results[run].steps for place in there for run in settings[place].runs if run in results}
    if len(ends) > 1:
        notes.append(
            f"The runs ended at different steps ({min(ends):,} to {max(ends):,}); each is read at its own end."
        )
    return notes


def _alone(setting: Setting, estimate: Estimate, target: Target, values: Sequence[Estimate]) -> str:
    spread = f" over {len(values)} seeds" if len(values) > 1 else ""
    return f"{setting.letter} ({setting.label}): {target.words} {_interval(estimate)}{spread}. There is no other setting to compare with."


def _values(setting: Setting, results: Mapping[int, Result]) -> list[Estimate]:
    return [results[run].target for run in setting.runs if run in results and results[run].target is not None]


def _plain(values: Sequence[Estimate]) -> list[float]:
    return [each.value for each in values]


def _signed(difference: Estimate, target: Target) -> Estimate:
    """Returns how much better the best one is, whichever way is better."""
    if target.higher or not difference.known:
        return difference if target.higher else Estimate(-difference.value)
    return Estimate(-difference.value, -difference.high, -difference.low)


def _interval(estimate: Estimate) -> str:
    text = _number(estimate.value)
    return f"{text} [{_number(estimate.low)}, {_number(estimate.high)}]" if estimate.known else text


def _number(value: float) -> str:
    size = abs(value)
    text = f"{value:.3f}" if size < 100 and (size >= 0.001 or size == 0) else f"{value:.3g}"
    return text.replace("-", "−")


def _and(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
