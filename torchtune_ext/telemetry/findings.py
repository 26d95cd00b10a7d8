"""One number for each curve of the report, and the findings: what a reader should look at first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torchtune_ext.pipeline.evaluation import has_partial_rewards
from torchtune_ext.telemetry.panels import Panel
from torchtune_ext.telemetry.report_header import RunStatus

READING_DIVISOR = 10  # a reading is the mean over 1 / PART of the steps
# These curves matter only when something is wrong, so their headings are closed while no finding concerns them.
FOLDED_SECTIONS = ("Trainer/engine mismatch", "Speed", "Machine")
_MAX_ZERO_VARIANCE = 0.5  # share of groups without a signal, above which it is said
_MAX_TRUNCATED = 0.2  # share of samples at the token limit
_MIN_ESS = 0.9
_MIN_RISE = 0.05  # a reward has risen if it grew by more than this, and by more than this share of itself
_SLOW_FACTOR = 3  # a step is slow if it takes more than so many times the median
# Only what every step does. An evaluation or a checkpoint would make its step look slow.
_PHASES = ("sample", "pack", "train", "publish")
_MAX_EFFECT_ERROR = 0.5  # the engine may show this share of an update's effect too little or too much

# Each row: a metric, whether it counts one step (else the whole run so far), the noun, the heading, the sentence.
_SKIPPED_TEXT = "{} left out: broken, or too long for the engine; the log names each."
_COUNTERS = (
    ("groups/infra_failed", True, "sample", "Learning",
     "{} could not be graded (grader or environment raised or crashed)."),
    ("groups/timed_out", True, "sample", "Learning", "{} kept the grader busy until its deadline."),
    ("problems/skipped", False, "problem", "Learning", _SKIPPED_TEXT),
    ("eval/skipped", False, "held-out problem", "Learning", _SKIPPED_TEXT),
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


def read_curves(
    series: Mapping[str, Sequence[float | None]], steps: Sequence[int], panels: Sequence[Panel]
) -> dict[str, Reading]:
    """Reads each curve of `series`: values by metric, one for each step, at least one of them not None."""
    newest = {metric for panel in panels if panel.uses_latest for metric, _ in panel.series}
    return {name: read_curve(steps, values, name in newest) for name, values in series.items()}


def read_curve(steps: Sequence[int], values: Sequence[float | None], newest: bool = False) -> Reading:
    """Reads one curve, of which at least one value is not None: the mean of its last tenth, and of its first.

    Args:
        newest: whether its newest value is the reading, and its first one the beginning.
    """
    # Where fewer than half of the steps have a value, as with evaluations, a mean would reach too far back.
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    number = 1 if newest or 2 * len(points) < len(steps) else max(1, round(len(steps) / READING_DIVISOR))
    first, last = points[:number], points[-number:]
    return Reading(fmean(v for _, v in first), fmean(v for _, v in last), last[0][0], last[-1][0])


def make_tiles(curves: Mapping[str, Reading], panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Returns the tiles at the top of the report: of each a label, a metric, its reading, its unit and a note."""
    units = {metric: panel.unit for panel in panels for metric, _ in panel.series}
    last = {name: reading.last for name, reading in curves.items()}
    chosen = []
    for label, *metrics in _TILES:
        metric = next((metric for metric in metrics if metric in last), None)
        if metric is None:
            continue
        # A mean of partial rewards is no accuracy.
        if metric.startswith("eval/") and has_partial_rewards(last):
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


def collect_findings(
    records: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Reading],
    panels: Sequence[Panel],
    config: Mapping[str, Any],
    state: RunStatus,
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
        resume_hint = " resume_from_checkpoint=True goes on with it." if "resume_from_checkpoint" in config else ""
        text = f"The run ended at step {state.step:,} of {state.total:,}: it crashed, or was stopped.{resume_hint}"
        notices.append(Finding(text, ""))
    notices += nonfinite_findings(records, panels)
    for name, is_per_step, noun, section, text in _COUNTERS:
        # A counter of the whole run may begin again when the run resumes, so its largest value counts, not its last.
        if number := int((sum if is_per_step else max)(record.get(name) or 0 for record in records)):
            notices.append(Finding(text.format(_pluralize(number, noun)), section))
    notices += _learning_findings(first, last) + _mismatch_findings(first, last, config)
    return notices + _slow_step_findings(records)


def nonfinite_findings(records: Sequence[Mapping[str, Any]], panels: Sequence[Panel]) -> list[Finding]:
    """A finding for each metric that was NaN or infinite at some steps."""
    sections = {metric: panel.section for panel in panels for metric, _ in panel.series}
    broken: dict[str, list[int]] = {}
    for record in records:
        for name in record.get("nonfinite", ()):
            broken.setdefault(name, []).append(record["step"])
    return [
        Finding(
            f"{name} was not finite at {_pluralize(len(steps), 'step')}, first at step {steps[0]}.",
            sections.get(name, ""),
        )
        for name, steps in broken.items()
    ]


def _learning_findings(first: Mapping[str, float], last: Mapping[str, float]) -> list[Finding]:
    texts = []
    zero_variance = last.get("groups/no_signal", 0.0)
    share = zero_variance / (zero_variance + last.get("groups/used", 0.0)) if zero_variance else 0.0
    if share > _MAX_ZERO_VARIANCE:
        texts.append(f"{share:.0%} of the latest groups carry no signal: their problems are too easy, or too hard.")
    then, now = first.get("reward/mean", 0.0), last.get("reward/mean", 0.0)
    # A reward that rises while no more problems are solved is what reward hacking looks like.
    solved = next((name for name in ("eval/solved_sampled", "reward/solved") if name in last), None)
    if solved and now - then > max(_MIN_RISE, _MIN_RISE * abs(then)) and last[solved] <= first[solved]:
        shares = f"the share of solved problems did not ({first[solved]:.1%}, then {last[solved]:.1%})"
        texts.append(
            f"The reward rose from {then:.3g} to {now:.3g}, {shares}: read what the best samples are rewarded for."
        )
    truncated = last.get("length/truncated", 0.0)
    if truncated > _MAX_TRUNCATED:
        texts.append(f"{truncated:.0%} of the latest samples hit the token limit (sampling.max_tokens).")
    return [Finding(text, "Learning") for text in texts]


def _mismatch_findings(
    first: Mapping[str, float], last: Mapping[str, float], config: Mapping[str, Any]
) -> list[Finding]:
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
    if share < _MIN_ESS:
        texts.append(f"The importance weights leave {share:.0%} of the tokens as effective sample size.")
    for name, what in (("canary/update_applied", "the last update"), ("canary/adapter_applied", "the adapter")):
        effect = last.get(name, 1.0)
        if abs(effect - 1) > _MAX_EFFECT_ERROR:
            texts.append(f"The engine shows {effect:.0%} of the effect of {what}.")
    return [Finding(text, "Trainer/engine mismatch") for text in texts]


def _slow_step_findings(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    # The first step is left out: it compiles and fills caches.
    trained = [record for record in records if record.get("time/train")][1:]
    steps = {record["step"]: {phase: record.get(f"time/{phase}") or 0.0 for phase in _PHASES} for record in trained}
    seconds = {step: sum(phases.values()) for step, phases in steps.items()}
    median_s = median(seconds.values()) if seconds else 0.0
    slow = [step for step in steps if seconds[step] > _SLOW_FACTOR * median_s]
    if not slow:
        return []
    longest = max(slow, key=lambda step: seconds[step])
    # Not the longest phase, which may be long in every step, but the one that exceeds its own median most.
    phase = max(_PHASES, key=lambda name: steps[longest][name] - median(phases[name] for phases in steps.values()))
    text = (
        f"{_pluralize(len(slow), 'step')} took more than {_SLOW_FACTOR} times the median of {median_s:.1f} s. The longest "
        f"is step {longest:,}, {seconds[longest]:.1f} s; most of what it took longer is in {phase}."
    )
    return [Finding(text, "Speed")]


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
