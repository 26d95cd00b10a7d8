"""What a reader of the report should look at first, and which of its headings each finding concerns.

Curves of which nothing is found stay folded where they only matter then (`FOLDED`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torchtune_ext.telemetry.heading import State
from torchtune_ext.telemetry.panels import Panel

FOLDED = ("Agreement", "Speed", "Machine")  # These headings are closed while no finding concerns them.
_MOST_SILENT = 0.5  # share of groups without a signal, above which it is said
_MOST_CUT = 0.2  # share of samples at the token limit
_LEAST_ESS = 0.9
_RISEN = 0.05  # Of a reward, and as a share of what it was: above it the reward has risen.
_SLOW = 3  # A step that takes this many times the median is far beyond it,
_LOST = 0.05  # and said so where what such steps took beyond it is more than this share of all seconds.
_PHASES = ("sample", "pack", "train", "publish")  # of every step; some also evaluate or save
_FAR = 0.5  # The engine shows the last update less, or more, by this share of its effect.
_ALIKE = 2 / 3  # Where this share of the groups without a signal is of one kind, only that kind is named.


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the reader."""

    text: str
    section: str  # the heading of the curves that it concerns, "" for none


@dataclass(frozen=True, slots=True)
class Silent:
    """This says why the latest groups without a signal have none, and counts them."""

    easy: int = 0  # All samples have the highest reward that the page knows.
    hard: int = 0  # All samples have the lowest one.
    alike: int = 0  # All samples are the same text, with a reward between.
    other: int = 0  # Their texts differ, with the same reward between.
    highest: float = 1.0
    lowest: float = 0.0


_CAUSES = {
    "easy": ("too easy: every sample has the highest reward of the run, {highest:.4g}",
             "take harder problems (task), or sample others in their place (refill_rounds)"),
    "hard": ("too hard: every sample has the lowest reward of the run, {lowest:.4g}",
             "take easier problems (task), more samples_per_prompt, or a warm-up on this task, and look at some texts: would "
             "the grader pay for a right one?"),
    "alike": ("answered alike: all samples of a group are the same text",
              "raise sampling.temperature or loss.entropy_coef, or lower optimizer.lr"),
    "other": ("graded alike: the texts differ, their rewards do not", "let the grader tell more texts apart"),
}  # fmt: skip


def findings(
    records: Sequence[Mapping[str, Any]],
    panels: Sequence[Panel],
    config: Mapping[str, Any],
    state: State,
    silent: Silent | None = None,
) -> list[Finding]:
    """Returns what is worth a look, beginning with what stopped the run.

    Args:
        records: the metrics of each step; the last tenth of them are "the latest".
        panels: all that the report draws.
        config: the knobs of the run; `max_mismatch` is the limit of the disagreement.
        state: how far the run came.
        silent: what the latest groups without a signal are like; None: the page has no rollouts of them.
    """
    notices = []
    if state.kind == "stopped":
        # A warm-up has no such knob: it begins anew.
        onward = " resume_from_checkpoint=True goes on with it." if "resume_from_checkpoint" in config else ""
        text = f"The run ended at step {state.step:,} of {state.total:,}: it crashed, or was stopped.{onward}"
        notices.append(Finding(text, ""))
    notices += nonfinite(records, panels) + _learning(records, silent)
    return notices + _agreement(records, config) + _engine(records) + _slow_steps(records)


def nonfinite(records: Sequence[Mapping[str, Any]], panels: Sequence[Panel]) -> list[Finding]:
    """Returns a finding for each metric that was NaN or infinite at some steps."""
    sections = {metric: panel.section for panel in panels for metric, _ in panel.series}
    broken: dict[str, list[int]] = {}
    for record in records:
        for name in record.get("nonfinite", ()):
            broken.setdefault(name, []).append(record["step"])
    return [
        Finding(
            f"{name} was not finite at {_count(len(steps), 'step')}, first at step {steps[0]}.", sections.get(name, "")
        )
        for name, steps in broken.items()
    ]


def _learning(records: Sequence[Mapping[str, Any]], silent: Silent | None) -> list[Finding]:
    notices = []
    infra = sum(record.get("groups/infra_failed") or 0 for record in records)
    if infra:
        text = f"{_count(int(infra), 'sample')} could not be graded (grader or environment raised, hung or crashed)."
        notices.append(Finding(text, "Learning"))
    for name, kind in (("problems/skipped", "problem"), ("eval/skipped", "held-out problem")):
        # The metric counts from the beginning of the run, and is not written while it is 0.
        skipped = max((record.get(name) or 0 for record in records), default=0)
        if skipped:
            text = f"{_count(int(skipped), kind)} left out: broken, or too long for the engine; the log names each."
            notices.append(Finding(text, "Learning"))
    without, groups = _recent(records, "groups/no_signal"), _recent(records, "groups/used")
    if without is not None and without > _MOST_SILENT * (without + (groups or 0.0)):
        share = f"{without / (without + (groups or 0.0)):.0%} of the latest groups carry no signal"
        notices.append(Finding(f"{share}{_cause(silent)}", "Learning"))
    then, now = _early(records, "reward/mean"), _recent(records, "reward/mean")
    solved = [(_early(records, name), _recent(records, name)) for name in ("eval/solved_sampled", "reward/solved")]
    before, after = next((pair for pair in solved if None not in pair), (None, None))
    if None not in (after, then, now) and now - then > max(_RISEN, _RISEN * abs(then)) and after <= before:
        shares = f"the share of solved problems did not ({before:.1%}, then {after:.1%})"
        text = f"The reward rose from {then:.3g} to {now:.3g}, {shares}: read what the best samples are rewarded for."
        notices.append(Finding(text, "Learning"))
    cut = _recent(records, "length/truncated")
    if cut is not None and cut > _MOST_CUT:
        notices.append(
            Finding(f"{cut:.0%} of the latest samples hit the token limit (sampling.max_tokens).", "Learning")
        )
    return notices


def _cause(silent: Silent | None) -> str:
    """Ends the sentence on groups without a signal: why they have none, and the knob."""
    if silent is None:
        return ": their problems are too easy, or too hard."
    counts = {kind: getattr(silent, kind) for kind in _CAUSES}
    total = sum(counts.values())
    if not total:
        return "."
    most = max(counts, key=counts.__getitem__)
    kinds = [most] if counts[most] >= _ALIKE * total else [kind for kind, count in counts.items() if count]
    sentences = []
    for kind in kinds:
        cause, advice = _CAUSES[kind]
        if counts[kind] == total:
            who = "They are"
        elif len(kinds) == 1:
            who = "Most of them are"
        else:
            who = f"{counts[kind]} of {total} {'is' if counts[kind] == 1 else 'are'}"
        sentences.append(f"{who} {cause.format(highest=silent.highest, lowest=silent.lowest)}; {advice}.")
    return f". {' '.join(sentences)}"


def _agreement(records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[Finding]:
    notices, limit = [], _recent(records, "canary/limit") or config.get("max_mismatch")
    # Older tokens differ by what the policy has learned since, and only those of age 0 are held to the limit.
    ahead = any(record.get("async/age_mean") is not None for record in records)
    name = "mismatch/mean_abs_age_0" if ahead else "mismatch/mean_abs"
    now, first = _recent(records, name), _early(records, name)
    if now is not None and isinstance(limit, int | float):
        near, drifts = now > 0.9 * limit, first is not None and now > max(2 * first, limit / 10)
        if near or drifts:
            notices.append(Finding(f"Trainer and engine are {now:.3g} nats apart, from {first:.3g} at the beginning; "
                                   f"the limit, without the room for chance, is {limit:.2g}.", "Agreement"))  # fmt: skip
    share = _recent(records, "mismatch/ess")
    if share is not None and share < _LEAST_ESS:
        notices.append(
            Finding(f"The importance weights leave {share:.0%} of the tokens as effective sample size.", "Agreement")
        )
    for name, what in (("canary/update_applied", "the last update"), ("canary/adapter_applied", "the adapter")):
        shown = _recent(records, name)
        if shown is not None and abs(shown - 1) > _FAR:
            notices.append(Finding(f"The engine shows {shown:.0%} of the effect of {what}.", "Agreement"))
    return notices


def _engine(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    notices = []
    restarts = max((record.get("engines/restarts") or 0 for record in records), default=0)
    if restarts:
        notices.append(Finding(f"The engine was restarted {_count(int(restarts), 'time')}.", "Machine"))
    retired = max((record.get("engines/retired") or 0 for record in records), default=0)
    if retired:
        notices.append(Finding(f"{_count(int(retired), 'engine')} failed too often and sampled no more.", "Machine"))
    counted = [
        record["engine/preemptions"] for record in _latest(records) if record.get("engine/preemptions") is not None
    ]
    # A process that goes on with the run counts from zero again, so the count may fall.
    more = sum(max(0, after - before) for before, after in zip(counted, counted[1:], strict=False))
    if more:
        notices.append(Finding(f"{_count(int(more), 'request')} left the engine's cache in the latest steps and were done "
                             "again: it is short of memory for keys and values.", "Machine"))  # fmt: skip
    return notices


def _slow_steps(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """The first step compiles and fills caches, and counts for nothing."""
    steps = [
        (record.get("step"), {phase: record.get(f"time/{phase}") or 0.0 for phase in _PHASES}) for record in records
    ]
    steps = [(step, phases) for step, phases in steps if any(phases.values())][1:]
    if not steps:
        return []
    usual = {phase: median(phases[phase] for _, phases in steps) for phase in _PHASES}
    typical = median(sum(phases.values()) for _, phases in steps)
    slow = [(step, phases) for step, phases in steps if sum(phases.values()) > _SLOW * typical]
    lost = sum(sum(phases.values()) - typical for _, phases in slow)
    if lost <= _LOST * sum(sum(phases.values()) for _, phases in steps):
        return []
    step, longest = max(slow, key=lambda each: sum(each[1].values()))
    phase = max(_PHASES, key=lambda name: longest[name] - usual[name])
    text = (
        f"{_count(len(slow), 'step')} took more than {_SLOW} times the median of {typical:.1f} s, {lost:.0f} s beyond it in "
        f"all. The longest is step {step:,}, {sum(longest.values()):.1f} s; most of what it took longer is in {phase}."
    )
    return [Finding(text, "Speed")]


def _latest(records: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return records[-max(1, len(records) // 10) :]


def _recent(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return _mean(_latest(records), name)


def _early(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Returns the mean over as many steps at the beginning; step 0 is only an evaluation."""
    there = [record for record in records if record.get(name) is not None]
    return _mean(there[: max(1, len(records) // 10)], name)


def _mean(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
