"""Which setting is better, in words, and whether the data can tell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from torchtune_ext.telemetry.compared.intervals import (
    Estimate,
    difference_of_problems,
    difference_of_seeds,
    mean_of_seeds,
)
from torchtune_ext.telemetry.compared.results import Result, Target
from torchtune_ext.telemetry.compared.settings import Setting

NAMED = 4  # settings that a sentence names


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
            told = "unknown" if difference.value else "alike"
        else:
            told = "alike" if difference.low <= 0 <= difference.high else "apart"
        found.append(Pair(other, difference, told))
    return sorted(found, key=lambda pair: abs(pair.difference.value))


def _headline(
    settings: Sequence[Setting], estimates: Sequence[Estimate | None], best: int, pairs: Sequence[Pair], target: Target
) -> str:
    of_best, most = settings[best], "highest" if target.higher else "lowest"
    same = [settings[pair.other] for pair in pairs if not pair.difference.value]
    has = "have" if same else "has"
    told = [f"{_named([of_best, *same])} {has} the {most} {target.words}, {_interval(estimates[best])}."]
    # Of two runs, more is known than of their settings: only the runs may be compared.
    alone = of_best.num_seeds == 1
    for kind, words in (
        ("apart", "is better than"),
        ("alike", "cannot be told apart from"),
        ("unknown", "may be better than"),
    ):
        of_kind = sorted((p for p in pairs if p.told == kind and p.difference.value), key=lambda pair: pair.other)
        if of_kind:
            it = f"Its run {words} {'that' if len(of_kind) == 1 else 'those'} of" if alone else f"It {words}"
            by = f", by {_interval(_signed(of_kind[0].difference, target))}" if len(pairs) == 1 else ""
            more = "; nothing tells how far the difference may be off" if kind == "unknown" else ""
            told.append(f"{it} {_named([settings[pair.other] for pair in of_kind])}{by}{more}.")
    return " ".join(told)


def _notes(
    settings: Sequence[Setting],
    results: Mapping[int, Result],
    pairs: Sequence[Pair],
    there: Sequence[int],
    target: Target,
) -> list[str]:
    counts = {place: len(_values(settings[place], results)) for place in there}
    number, together = len(list(combinations(there, 2))), ""
    if number > 1:
        together = (
            f" Each has the level {100 * (1 - 0.05 / number):.4g}%, so that all {number} pairs hold together at 95% "
            "(Bonferroni)."
        )
    notes = []
    if any(count > 1 for count in counts.values()):
        notes.append("Means of seeds have 95% t-intervals; their differences have Welch's (Biometrika 34, 1947), which do not "
                     f"take the spreads of two settings for equal.{together}")  # fmt: skip
    if all(count == 1 for count in counts.values()):
        if any(pair.difference.known for pair in pairs):
            notes.append("Intervals are over held-out problems; those of differences come from the two standard errors, "
                         f"√(se₁² + se₂²), as if each run had problems of its own.{together}")  # fmt: skip
        notes.append("One seed of each: another seed may end elsewhere, and no interval here holds that. To know, start each "
                     "setting with three seeds.")  # fmt: skip
    elif few := [settings[place].letter for place, count in counts.items() if count == 1]:
        notes.append(f"Of {_and(few)} there is one seed, and nothing tells how far another seed would be from it.")
    if repeated := [setting.letter for setting in settings if setting.num_seeds < len(setting.runs)]:
        notes.append(f"{_and(repeated)}: runs of the same seed count as one, with their mean.")
    if lost := [setting.letter for place, setting in enumerate(settings) if place not in there]:
        notes.append(f"Not compared, for want of {target.metric}: {_and(lost)}.")
    ends = {results[run].steps for place in there for run in settings[place].runs if run in results}
    if len(ends) > 1:
        notes.append(f"The runs end at different steps, {min(ends):,} to {max(ends):,}; each is read at its own end.")
    return notes


def _alone(setting: Setting, estimate: Estimate, target: Target, values: Sequence[Estimate]) -> str:
    spread = f" over {len(values)} seeds" if len(values) > 1 else ""
    first = f"{setting.letter} ({setting.label}): {target.words} {_interval(estimate)}{spread}."
    return f"{first} There is no other setting to compare it with."


def _values(setting: Setting, results: Mapping[int, Result]) -> list[Estimate]:
    """Returns what each seed came to. Runs of the same seed repeat one draw: they count as one, with their mean."""
    of_seed: dict[str, list[Estimate]] = {}
    for run, seed in zip(setting.runs, setting.seeds, strict=True):
        if run in results and (found := results[run].target) is not None:
            of_seed.setdefault(seed, []).append(found)
    return [each[0] if len(each) == 1 else _middle(each) for each in of_seed.values()]


def _middle(repeats: Sequence[Estimate]) -> Estimate:
    value = fmean(each.value for each in repeats)
    if not all(each.known for each in repeats):
        return Estimate(value)
    # They answer the same problems, so that none of them narrows the interval of another.
    return Estimate(value, fmean(each.low for each in repeats), fmean(each.high for each in repeats))


def _plain(values: Sequence[Estimate]) -> list[float]:
    return [each.value for each in values]


def _signed(difference: Estimate, target: Target) -> Estimate:
    """Returns how much better the best one is, whichever way is better."""
    if target.higher or not difference.known:
        return difference if target.higher else Estimate(-difference.value)
    return Estimate(-difference.value, -difference.high, -difference.low)


def _interval(estimate: Estimate) -> str:
    if not estimate.known:
        return _number(estimate.value)
    size = max(abs(estimate.low), abs(estimate.high))
    value, low, high = (_number(each, size) for each in (estimate.value, estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def _number(value: float, size: float = 0.0) -> str:
    """Writes a number. `size`: of what stands beside it, so that both have as many digits behind the point."""
    size = max(abs(value), size)
    if size >= 100 or 0 < size < 0.001:
        return f"{value:.3g}".replace("-", "−")
    if value and abs(value) < 0.0005:
        return "<0.001" if value > 0 else ">−0.001"
    return f"{value:.3f}".replace("-", "−")


def _named(settings: Sequence[Setting]) -> str:
    """Names settings, or says how many they are: a table beside the words has them all."""
    if len(settings) > NAMED:
        return f"{len(settings)} others"
    return _and([f"{setting.letter} ({setting.label})" for setting in settings])


def _and(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
