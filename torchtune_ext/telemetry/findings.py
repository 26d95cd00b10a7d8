"""One number for each curve of the report, and the findings: what a reader should look at first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torchtune_ext.pipeline.evaluation import partly_right
from torchtune_ext.telemetry.heading import State
from torchtune_ext.telemetry.panels import Panel

PART = 10  # a reading is the mean over 1 / PART of the steps
# These curves matter only when something is wrong, so their headings are closed while no finding concerns them.
FOLDED = ("Trainer/engine mismatch", "Speed", "Machine")
_MOST_SILENT = 0.5  # share of groups without a signal, above which it is said
_MOST_CUT = 0.2  # share of samples at the token limit
_LEAST_ESS = 0.9
_RISEN = 0.05  # a reward has risen if it grew by more than this, and by more than this share of itself
_SLOW = 3  # a step is slow if it takes more than so many times the median
# Only what every step does. An evaluation or a checkpoint would make its step look slow.
_PHASES = ("sample", "pack", "train", "publish")
_FAR = 0.5  # the engine may show this share of an update's effect too little or too much

# Each row: a metric, whether it counts one step (else the whole run so far), the noun, the heading, the sentence.
_LEFT_OUT = "{} left out: broken, or too long for the engine; the log names each."
_COUNTS = (
    ("groups/infra_failed", True, "sample", "Learning",
     "{} could not be graded (grader or environment raised or crashed)."),
    ("groups/timed_out", True, "sample", "Learning", "{} kept the grader busy until its deadline."),
    ("problems/skipped", False, "problem", "Learning", _LEFT_OUT),
    ("eval/skipped", False, "held-out problem", "Learning", _LEFT_OUT),
    ("engines/restarts", False, "time", "Machine", "The engine was restarted {}."),
    ("engines/retired", False, "engine", "Machine", "{} failed too often and sampled no more."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """Where a curve began and where it is. Its legend and its tile show the same number."""

    first: float  # mean of the first values
    last: float  # mean of as many values at the end
    since: int  # the first step that `last` averages
    until: int  # the last step that it averages; the same one where it is a single value


# The label of a tile, and what it shows: the first of these metrics that the run has.
_TILES = (
    ("Reward", "reward/mean"),
    ("Held-out accuracy", "eval/accuracy_sampled", "eval/accuracy_greedy"),
    ("Negative log-likelihood", "loss/nll"),
    ("Tokens of a completion", "length/mean"),
    ("Entropy, nats", "loss/entropy"),
    ("Canary, nats", "canary/mean_abs", "mismatch/mean_abs"),
    ("Sampled tokens/s", "speed/sampled_tokens_s"),
    ("Step time", "time/step"),
    ("Token reduction ρ", "pack/rho"),
)


def readings(
    series: Mapping[str, Sequence[float | None]], steps: Sequence[int], panels: Sequence[Panel]
) -> dict[str, Reading]:
    """Reads each curve of `series`: values by metric, one for each step, at least one of them not None."""
    newest = {metric for panel in panels if panel.newest for metric, _ in panel.series}
    return {name: reading_of(steps, values, name in newest) for name, values in series.items()}


def reading_of(steps: Sequence[int], values: Sequence[float | None], newest: bool = False) -> Reading:
    """Reads one curve, of which at least one value is not None: the mean of its last tenth, and of its first.

    Args:
        newest: whether its newest value is the reading, and its first one the beginning.
    """
    # Where fewer than half of the steps have a value, as with evaluations, a mean would reach too far back.
    there = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    sparse = 2 * len(there) < len(steps)
    number = 1 if newest or sparse else max(1, round(len(steps) / PART))
    first, last = there[:number], there[-number:]
    return Reading(fmean(v for _, v in first), fmean(v for _, v in last), last[0][0], last[-1][0])


def tiles(curves: Mapping[str, Reading], panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Returns the tiles at the top of the report: of each a label, a metric, its reading, its unit and a note."""
    units = {metric: panel.unit for panel in panels for metric, _ in panel.series}
    last = {name: reading.last for name, reading in curves.items()}
    chosen = []
    for label, *metrics in _TILES:
        metric = next((metric for metric in metrics if metric in last), None)
        if metric is None:
            continue
        # A mean of partial rewards is no accuracy.
        if metric.startswith("eval/") and partly_right(last):
            label = "Held-out reward"
        sampled = metric == "eval/accuracy_sampled" and {"eval/low", "eval/high"} <= last.keys()
        note = f"95% interval {last['eval/low']:.3g} to {last['eval/high']:.3g}" if sampled else ""
        unit = units.get(metric, "")
        chosen.append({"label": label, "metric": metric, "reading": curves[metric], "unit": unit, "note": note})
    return chosen


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence for the reader."""

    text: str
    section: str  # the heading of the curves that it concerns, "" for none


def findings(
    records: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Reading],
    panels: Sequence[Panel],
    config: Mapping[str, Any],
    state: State,
) -> list[Finding]:
    """Returns what is worth a look, beginning with what stopped the run.

    Args:
        records: the metrics of each step.
        config: the knobs of the run; `max_mismatch` is the limit of the disagreement.
    """
    first = {name: reading.first for name, reading in curves.items()}
    last = {name: reading.last for name, reading in curves.items()}
    notices = []
    if state.kind == "stopped":
        # A warm-up has no such knob: it always begins anew.
        onward = " resume_from_checkpoint=True goes on with it." if "resume_from_checkpoint" in config else ""
        text = f"The run ended at step {state.step:,} of {state.total:,}: it crashed, or was stopped.{onward}"
        notices.append(Finding(text, ""))
    notices += nonfinite(records, panels)
    for name, of_a_step, noun, section, text in _COUNTS:
        # A counter of the whole run may begin again when the run resumes, so its largest value counts, not its last.
        if number := int((sum if of_a_step else max)(record.get(name) or 0 for record in records)):
            notices.append(Finding(text.format(_count(number, noun)), section))
    notices += _learning(first, last) + _agreement(first, last, config)
    return notices + _slow_steps(records)


def nonfinite(records: Sequence[Mapping[str, Any]], panels: Sequence[Panel]) -> list[Finding]:
    """A finding for each metric that was NaN or infinite at some steps."""
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


def _learning(first: Mapping[str, float], last: Mapping[str, float]) -> list[Finding]:
    texts = []
    without = last.get("groups/no_signal", 0.0)
    share = without / (without + last.get("groups/used", 0.0)) if without else 0.0
    if share > _MOST_SILENT:
        texts.append(f"{share:.0%} of the latest groups carry no signal: their problems are too easy, or too hard.")
    then, now = first.get("reward/mean", 0.0), last.get("reward/mean", 0.0)
    # A reward that rises while no more problems are solved is what reward hacking looks like.
    solved = next((name for name in ("eval/solved_sampled", "reward/solved") if name in last), None)
    if solved and now - then > max(_RISEN, _RISEN * abs(then)) and last[solved] <= first[solved]:
        shares = f"the share of solved problems did not ({first[solved]:.1%}, then {last[solved]:.1%})"
        texts.append(
            f"The reward rose from {then:.3g} to {now:.3g}, {shares}: read what the best samples are rewarded for."
        )
    cut = last.get("length/truncated", 0.0)
    if cut > _MOST_CUT:
        texts.append(f"{cut:.0%} of the latest samples hit the token limit (sampling.max_tokens).")
    return [Finding(text, "Learning") for text in texts]


def _agreement(first: Mapping[str, float], last: Mapping[str, float], config: Mapping[str, Any]) -> list[Finding]:
    texts, limit = [], last.get("canary/limit") or config.get("max_mismatch")
    # With an engine that samples ahead, older tokens also differ by what the policy has learned since. Only those of
    # age 0 are held to the limit.
    name = "mismatch/mean_abs_age_0" if "async/age_mean" in last else "mismatch/mean_abs"
    if name in last and isinstance(limit, int | float):
        then, now = first[name], last[name]
        if now > 0.9 * limit or now > max(2 * then, limit / 10):
            texts.append(
                f"Trainer and engine are {now:.3g} nats apart, from {then:.3g} at the beginning; the limit, without the room "
                f"for chance, is {limit:.2g}."
            )
    share = last.get("mismatch/ess", 1.0)
    if share < _LEAST_ESS:
        texts.append(f"The importance weights leave {share:.0%} of the tokens as effective sample size.")
    for name, what in (("canary/update_applied", "the last update"), ("canary/adapter_applied", "the adapter")):
        shown = last.get(name, 1.0)
        if abs(shown - 1) > _FAR:
            texts.append(f"The engine shows {shown:.0%} of the effect of {what}.")
    return [Finding(text, "Trainer/engine mismatch") for text in texts]


def _slow_steps(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    # The first step is left out: it compiles and fills caches.
    there = [record for record in records if record.get("time/train")][1:]
    steps = {record["step"]: {phase: record.get(f"time/{phase}") or 0.0 for phase in _PHASES} for record in there}
    seconds = {step: sum(phases.values()) for step, phases in steps.items()}
    usual = median(seconds.values()) if seconds else 0.0
    slow = [step for step in steps if seconds[step] > _SLOW * usual]
    if not slow:
        return []
    longest = max(slow, key=lambda step: seconds[step])
    # Not the longest phase, which may be long in every step, but the one that exceeds its own median most.
    phase = max(_PHASES, key=lambda name: steps[longest][name] - median(phases[name] for phases in steps.values()))
    text = (
        f"{_count(len(slow), 'step')} took more than {_SLOW} times the median of {usual:.1f} s. The longest "
        f"is step {longest:,}, {seconds[longest]:.1f} s; most of what it took longer is in {phase}."
    )
    return [Finding(text, "Speed")]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
