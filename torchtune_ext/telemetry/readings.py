"""One number for each curve of the report: its legend and its tile show the same one, and say which steps it averages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from torchtune_ext.evaluation import partly_right
from torchtune_ext.telemetry.panels import Panel

PART = 10  # A reading is the mean over a tenth of the steps.


@dataclass(frozen=True, slots=True)
class Reading:
    """This says where a curve began and where it is."""

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
    ("Mismatch, nats", "mismatch/mean_abs"),
    ("Sampled tokens/s", "speed/sampled_tokens_s"),
    ("Step time", "time/step"),
    ("Token reduction ρ", "pack/rho"),
)


def readings(
    series: Mapping[str, Sequence[float | None]], steps: Sequence[int], panels: Sequence[Panel]
) -> dict[str, Reading]:
    """Reads each curve: the mean of its last values, a tenth of the steps, and of as many at its beginning.

    The newest value is the reading where a mean would mislead: of counters and settings (`Panel.newest`), and of what fewer
    than half of the steps have, as evaluations.

    Args:
        series: values by metric, one for each step, at least one of each not None.
        steps: the steps of the run.
        panels: all that the report draws.
    """
    newest = {metric for panel in panels if panel.newest for metric, _ in panel.series}
    return {name: reading_of(steps, values, name in newest) for name, values in series.items()}


def reading_of(steps: Sequence[int], values: Sequence[float | None], newest: bool = False) -> Reading:
    """Reads one curve, of which at least one value is not None. `newest`: its newest value is the reading."""
    there = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    sparse = 2 * len(there) < len(steps)
    number = 1 if newest or sparse else max(1, round(len(steps) / PART))
    first, last = there[:number], there[-number:]
    return Reading(fmean(v for _, v in first), fmean(v for _, v in last), last[0][0], last[-1][0])


def tiles(curves: Mapping[str, Reading], panels: Sequence[Panel]) -> list[dict[str, str]]:
    """Returns the numbers at the top of the report that the run has: for each a label, the metric, its unit as of the panel
    that draws it, and a note, the interval of an accuracy."""
    units = {metric: panel.unit for panel in panels for metric, _ in panel.series}
    last = {name: reading.last for name, reading in curves.items()}
    chosen = []
    for label, *metrics in _TILES:
        metric = next((metric for metric in metrics if metric in last), None)
        if metric is None:
            continue
        if metric.startswith("eval/") and partly_right(last):
            label = "Held-out reward"
        sampled = metric == "eval/accuracy_sampled" and {"eval/low", "eval/high"} <= last.keys()
        note = f"95% interval {last['eval/low']:.3g} to {last['eval/high']:.3g}" if sampled else ""
        chosen.append({"label": label, "metric": metric, "unit": units.get(metric, ""), "note": note})
    return chosen
