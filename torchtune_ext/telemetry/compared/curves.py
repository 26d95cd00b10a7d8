"""The curves of several runs in common charts: one line for each setting, a band around it, the most telling charts first."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from torchtune_ext.telemetry.compared.runs import OneRun
from torchtune_ext.telemetry.compared.settings import Setting
from torchtune_ext.telemetry.excerpts import short
from torchtune_ext.telemetry.panels import Panel, panels_for
from torchtune_ext.telemetry.readings import readings

# These stand first, in this order, with titles of their own; the panels of all other curves are folded.
FIRST = "First of all"
_FIRST = {
    "eval/accuracy_sampled": "Held-out accuracy",
    "reward/mean": "Reward",
    "length/mean": "Completion length",
    "loss/nll": "Negative log-likelihood",
    "loss/total": "Loss",
    "loss/entropy": "Entropy",
    "length/truncated": "Truncated",
    "optim/grad_norm": "Gradient norm",
    "mismatch/mean_abs": "Trainer against sampler",
    "time/step": "Step time",
}
ACCURACY, LOW, HIGH = "eval/accuracy_sampled", "eval/low", "eval/high"


@dataclass(frozen=True, slots=True)
class Line:
    """What a setting did, at each of the common steps; None where no run of it has a value."""

    setting: int
    mean: list[float | None]
    low: list[float | None] | None  # the lower edge of its band; None: it has none
    high: list[float | None] | None
    reading: dict[str, Any]  # as of the report of one run


@dataclass(frozen=True, slots=True)
class Overlay:
    """One chart."""

    panel: Panel
    metric: str
    lines: list[Line]


class Columns:
    """The metrics of runs as arrays over common steps. Where there are more than `points` steps, neighbors share a column,
    which has the mean of what a run has there, and the last of their steps."""

    def __init__(self, runs: Sequence[OneRun], points: int):
        self.runs = runs
        every = sorted({record["step"] for run in runs for record in run.records})
        parts = np.array_split(np.arange(len(every)), min(points, len(every))) if every else []
        self.steps = [every[part[-1]] for part in parts]
        self.steps_each = max(map(len, parts), default=1)
        self._column = {every[i]: number for number, part in enumerate(parts) for i in part}

    def length(self, run: int) -> int:
        """Returns how many columns there are up to the end of a run."""
        records = self.runs[run].records
        return self._column[records[-1]["step"]] + 1 if records else 0

    def of(self, run: int, metric: str) -> np.ndarray:
        """Returns the values of a metric of a run, NaN where it has none."""
        sums, counts = np.zeros(len(self.steps)), np.zeros(len(self.steps))
        for record in self.runs[run].records:
            value = record.get(metric)
            if isinstance(value, int | float):
                sums[self._column[record["step"]]] += value
                counts[self._column[record["step"]]] += 1
        return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def band_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns mean, lowest and highest of runs [R, S] at each of S steps, over the runs that have a value there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # A step that no run has gives NaN, which is meant.
        return np.nanmean(values, 0), np.nanmin(values, 0), np.nanmax(values, 0)


def overlays(columns: Columns, settings: Sequence[Setting], metric: str | None = None) -> list[Overlay]:
    """Returns the charts in the order of their weight. `metric`: what the runs are compared by, which comes first."""
    names = {name for run in columns.runs for record in run.records for name, value in record.items()
             if name not in ("step", "nonfinite", LOW, HIGH) and isinstance(value, int | float)}  # fmt: skip
    every = [(panel, name, label) for panel in panels_for(names) for name, label in panel.series]
    first = list(dict.fromkeys([*([metric] if metric else []), *_FIRST]))
    every.sort(key=lambda each: first.index(each[1]) if each[1] in first else len(first))
    charts = []
    for panel, name, label in every:
        lines = [
            line for number, setting in enumerate(settings) if (line := _line(columns, number, setting, name, panel))
        ]
        if not lines or (panel.quiet and not any(value for line in lines for value in line.mean)):
            continue
        title = panel.title if len(panel.series) == 1 or not label else f"{panel.title}: {label}"
        section = FIRST if name in first else panel.section
        # What a panel of one run says of its curves together says little of one of them.
        note = "Of problems that are never trained on." if name == ACCURACY else ""
        charts.append(Overlay(replace(panel, section=section, title=_FIRST.get(name, title), note=note), name, lines))
    return charts


def _line(columns: Columns, number: int, setting: Setting, metric: str, panel: Panel) -> Line | None:
    values = np.stack([columns.of(run, metric) for run in setting.runs])
    if np.isnan(values).all():
        return None
    mean, low, high = band_of(values)
    if len(setting.runs) == 1:
        (run,) = setting.runs
        low, high = (columns.of(run, LOW), columns.of(run, HIGH)) if metric == ACCURACY else (None, None)
        if low is not None and (np.isnan(low).all() or np.isnan(high).all()):
            low = high = None
    # A reading is the mean of a part of the setting's own steps, which may be fewer than those of the page.
    own = max(columns.length(run) for run in setting.runs)
    there = {metric: [None if np.isnan(value) else float(value) for value in mean[:own]]}
    reading = readings(there, columns.steps[:own], [replace(panel, series=((metric, ""),))])[metric]
    listed = _listed(mean)
    return Line(number, listed, None if low is None else _listed(low), None if high is None else _listed(high),
                asdict(reading) | {"first": short(reading.first), "last": short(reading.last)})  # fmt: skip


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else short(float(value), 5) for value in values]


def chart_record(chart: Overlay) -> dict[str, Any]:
    """Returns what the page needs of a chart."""
    panel = chart.panel
    kept = ("section", "title", "note", "unit", "scale", "zero", "baseline")
    return {name: getattr(panel, name) for name in kept} | {
        "metric": chart.metric, "lines": [asdict(line) for line in chart.lines]
    }  # fmt: skip


def seeds_missing(runs: Sequence[OneRun], setting: Setting) -> Mapping[int, int] | None:
    """Returns, of a setting whose runs end at different steps, how many of them there are up to which step; else None."""
    ends = [runs[number].records[-1]["step"] for number in setting.runs if runs[number].records]
    if len(set(ends)) < 2:
        return None
    return {end: sum(other >= end for other in ends) for end in sorted(set(ends))}
