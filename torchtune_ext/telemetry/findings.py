"""The readings of the report (one number per curve), and its findings (likely problems)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from torchtune_ext.telemetry.panels import Panel
from torchtune_ext.telemetry.report_header import RunStatus

READING_DIVISOR = 10  # a reading is the mean over 1 / READING_DIVISOR of the steps
# These sections matter only if a problem occurs, so they are folded while no finding concerns them.
FOLDED_SECTIONS = ("Trainer/engine mismatch", "Speed", "Machine")
_MAX_ZERO_VARIANCE = 0.5  # fraction of zero-variance groups above which a finding reports it
_MAX_TRUNCATED = 0.2  # fraction of samples truncated at the token limit
_MIN_ESS = 0.9
_MIN_RISE = 0.05  # least rise of the reward, absolute and relative to its first reading
_SLOW_FACTOR = 3  # a slow step takes more than _SLOW_FACTOR times the median
# Only phases of every step. An evaluation or a checkpoint would make its step look slow.
_PHASES = ("sample", "pack", "train", "publish")
_MAX_EFFECT_ERROR = 0.5  # largest deviation of an update's reproduced fraction from 1

# Each row: a metric, whether it counts one step (else the run so far), noun, section, sentence.
_SKIPPED_TEXT = "{} skipped: invalid, or too long for the engine; the log names each."
_COUNTERS = (
    ("groups/infra_failed", True, "sample", "Learning",
     "{} not graded: the grader or environment raised or crashed."),
    ("groups/timed_out", True, "sample", "Learning", "{} exceeded the grader's deadline."),
    ("problems/skipped", False, "problem", "Learning", _SKIPPED_TEXT),
    ("eval/skipped", False, "held-out problem", "Learning", _SKIPPED_TEXT),
    ("engines/restarts", False, "time", "Machine", "The engine was restarted {}."),
    ("engines/retired", False, "engine", "Machine", "{} failed too often and was retired."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """The first and the latest value of a curve. Its legend and its tile show the same number."""

    first: float  # mean of the first values
    last: float  # mean of as many last values
    since: int  # first step that `last` averages
    until: int  # last step that `last` averages; equal to `since` for a single value


# The label of a tile and its metrics; the tile shows the first metric that the run has.
_TILES = (
    ("Reward", "reward/mean"),
    ("Held-out reward", "eval/reward_sampled", "eval/reward_greedy"),
    ("Negative log-likelihood", "loss/nll"),
    ("Completion length, tokens", "length/mean"),
    ("Entropy, nats", "loss/entropy"),
    ("Mismatch, nats", "canary/mean_abs", "mismatch/mean_abs"),
    ("Sampled tokens/s", "speed/sampled_tokens_s"),
    ("Step time", "time/step"),
    ("Token reduction ρ", "pack/rho"),
)


def read_curves(
    series: Mapping[str, Sequence[float | None]], steps: Sequence[int], panels: Sequence[Panel]
) -> dict[str, Reading]:
    """Returns the reading of each metric in `series`, whose values are not all None."""
    newest = {metric for panel in panels if panel.uses_latest for metric, _ in panel.series}
    return {name: read_curve(steps, values, name in newest) for name, values in series.items()}


def read_curve(steps: Sequence[int], values: Sequence[float | None], newest: bool = False) -> Reading:
    """Returns the means of a curve's first and last tenth.

    Args:
        steps: the step of each value.
        values: the values, not all None.
        newest: whether to take the first and the newest value instead of means.
    """
    # If fewer than half of the steps have a value (evaluations), a mean would reach too far back.
    points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    number = 1 if newest or 2 * len(points) < len(steps) else max(1, round(len(steps) / READING_DIVISOR))
    first, last = points[:number], points[-number:]
    return Reading(fmean(v for _, v in first), fmean(v for _, v in last), last[0][0], last[-1][0])


def make_tiles(curves: Mapping[str, Reading], panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Returns the tiles at the top of the report: label, metric, reading, unit and note of each."""
    units = {metric: panel.unit for panel in panels for metric, _ in panel.series}
    last = {name: reading.last for name, reading in curves.items()}
    chosen = []
    for label, *metrics in _TILES:
        metric = next((metric for metric in metrics if metric in last), None)
        if metric is None:
            continue
        sampled = metric == "eval/reward_sampled" and {"eval/low", "eval/high"} <= last.keys()
        note = f"95% interval {last['eval/low']:.3g} to {last['eval/high']:.3g}" if sampled else ""
        unit = units.get(metric, "")
        chosen.append({"label": label, "metric": metric, "reading": curves[metric], "unit": unit, "note": note})
    return chosen


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that the report shows, in one sentence."""

    text: str
    section: str  # the section of the curves that it concerns, or ""


def collect_findings(
    records: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Reading],
    panels: Sequence[Panel],
    config: Mapping[str, Any],
    state: RunStatus,
) -> list[Finding]:
    """Returns the findings, beginning with the reason that the run stopped.

    Args:
        records: the metrics of each step.
        curves: the reading of each metric.
        panels: the panels of the report.
        config: the settings of the run; `max_mismatch` limits the trainer/engine mismatch.
        state: how far the run came.
    """
    first = {name: reading.first for name, reading in curves.items()}
    last = {name: reading.last for name, reading in curves.items()}
    notices = []
    if state.kind == "stopped":
        # An SFT warm-up lacks this key: it always starts from step 0.
        resume_hint = " Resume it with resume_from_checkpoint=True." if "resume_from_checkpoint" in config else ""
        text = f"The run ended at step {state.step:,} of {state.total:,}: it crashed or was stopped.{resume_hint}"
        notices.append(Finding(text, ""))
    notices += nonfinite_findings(records, panels)
    for name, is_per_step, noun, section, text in _COUNTERS:
        # A counter of the whole run may restart at 0 when the run resumes, so its maximum counts.
        if number := int((sum if is_per_step else max)(record.get(name) or 0 for record in records)):
            notices.append(Finding(text.format(_pluralize(number, noun)), section))
    notices += _zero_variance_findings(records) + _learning_findings(first, last)
    notices += _mismatch_findings(first, last, config)
    return notices + _slow_step_findings(records)


def nonfinite_findings(records: Sequence[Mapping[str, Any]], panels: Sequence[Panel]) -> list[Finding]:
    """Returns a finding for each metric that was NaN or infinite at some step."""
    sections = {metric: panel.section for panel in panels for metric, _ in panel.series}
    broken: dict[str, list[int]] = {}
    for record in records:
        for name in record.get("nonfinite", ()):
            broken.setdefault(name, []).append(record["step"])
    text = "{} was not finite at {}, first at step {}."
    return [
        Finding(text.format(name, _pluralize(len(steps), "step"), steps[0]), sections.get(name, ""))
        for name, steps in broken.items()
    ]


def _zero_variance_findings(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    # A teacher gives a gradient without rewards.
    steps = [r["step"] for r in records if r.get("groups/used") == 0 and r.get("loss/kl_teacher") is None]
    if not steps:
        return []
    text = (
        f"{_pluralize(len(steps), 'step')} had only zero-variance groups, so the rewards gave no gradient, first at step "
        f"{steps[0]:,}: check the grader, raise samples_per_prompt, or set refill_rounds."
    )
    return [Finding(text, "Learning")]


def _learning_findings(first: Mapping[str, float], last: Mapping[str, float]) -> list[Finding]:
    texts = []
    zero_variance = last.get("groups/no_signal", 0.0)
    share = zero_variance / (zero_variance + last.get("groups/used", 0.0)) if zero_variance else 0.0
    if share > _MAX_ZERO_VARIANCE:
        texts.append(
            f"{share:.0%} of the latest groups are zero-variance groups: their problems are too easy or too hard."
        )
    then, now = first.get("reward/mean", 0.0), last.get("reward/mean", 0.0)
    # A reward that rises while the solved fraction does not rise is a sign of reward hacking.
    solved = next((name for name in ("eval/solved_sampled", "reward/solved") if name in last), None)
    if solved and now - then > max(_MIN_RISE, _MIN_RISE * abs(then)) and last[solved] <= first[solved]:
        shares = f"but the fraction of solved problems did not rise ({first[solved]:.1%}, then {last[solved]:.1%})"
        texts.append(
            f"The reward rose from {then:.3g} to {now:.3g}, {shares}: check the best samples for reward hacking."
        )
    truncated = last.get("length/truncated", 0.0)
    if truncated > _MAX_TRUNCATED:
        texts.append(f"{truncated:.0%} of the latest samples were truncated at sampling.max_tokens.")
    return [Finding(text, "Learning") for text in texts]


def _mismatch_findings(
    first: Mapping[str, float], last: Mapping[str, float], config: Mapping[str, Any]
) -> list[Finding]:
    texts, limit = [], last.get("canary/limit") or config.get("max_mismatch")
    # In asynchronous training, stale tokens also differ by later updates of the policy. Only tokens
    # of staleness 0 are compared with the limit.
    name = "mismatch/mean_abs_staleness_0" if "async/staleness_mean" in last else "mismatch/mean_abs"
    if name in last and isinstance(limit, int | float):
        then, now = first[name], last[name]
        if now > 0.9 * limit or now > max(2 * then, limit / 10):
            texts.append(
                f"The trainer/engine mismatch is {now:.3g} nats (first {then:.3g}); the limit without the margin for "
                f"chance is {limit:.2g} nats."
            )
    share = last.get("mismatch/ess", 1.0)
    if share < _MIN_ESS:
        texts.append(f"The importance weights reduce the effective sample size to {share:.0%} of the tokens.")
    for name, what in (("canary/update_applied", "the last step"), ("canary/adapter_applied", "the adapter")):
        effect = last.get(name, 1.0)
        if abs(effect - 1) > _MAX_EFFECT_ERROR:
            texts.append(f"The engine reproduces {effect:.0%} of the log-prob change of {what}.")
    return [Finding(text, "Trainer/engine mismatch") for text in texts]


def _slow_step_findings(records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    # The first step is excluded: it compiles and fills caches.
    trained = [record for record in records if record.get("time/train")][1:]
    steps = {record["step"]: {phase: record.get(f"time/{phase}") or 0.0 for phase in _PHASES} for record in trained}
    seconds = {step: sum(phases.values()) for step, phases in steps.items()}
    median_s = median(seconds.values()) if seconds else 0.0
    slow = [step for step in steps if seconds[step] > _SLOW_FACTOR * median_s]
    if not slow:
        return []
    longest = max(slow, key=lambda step: seconds[step])
    # The phase that exceeds its own median most; the longest phase may be long in every step.
    phase = max(_PHASES, key=lambda name: steps[longest][name] - median(phases[name] for phases in steps.values()))
    text = (
        f"{_pluralize(len(slow), 'step')} took more than {_SLOW_FACTOR} times the median of {median_s:.1f} s. The longest "
        f"is step {longest:,} with {seconds[longest]:.1f} s; the phase {phase} accounts for most of the excess."
    )
    return [Finding(text, "Speed")]


def _pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
