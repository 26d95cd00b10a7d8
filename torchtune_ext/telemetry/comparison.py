"""`torchtune-ext report RUN RUN ...` and `torchtune-ext report SWEEP`: one HTML file that shows several runs together.

comparison = build_comparison([sweep_folder])     # writes sweep_folder/report.html
print(comparison.summary())                       # which setting is better, and what was left out
"""

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtune_ext.run.output import columns
from torchtune_ext.telemetry.excerpts import cut_text, pack, short
from torchtune_ext.telemetry.findings import nonfinite, reading_of
from torchtune_ext.telemetry.page_file import write_page
from torchtune_ext.telemetry.panels import Panel, panels_for
from torchtune_ext.telemetry.results import (
    ACCURACY,
    HIGH,
    LOW,
    REWARD,
    Target,
    Verdict,
    target_of,
    verdict_of,
)
from torchtune_ext.telemetry.runs import Run, Setting, find_runs, is_several, settings_of, short_keys

SCRIPTS = ("charts", "shell", "overlay", "tables", "comparison")  # of the page, in this order
POINTS = 400  # of a curve; where there are more steps, each point is the mean of neighbors
DRAWN = 40  # settings that have curves: the best ones
LONGEST = 400  # characters of a value of a setting
# These curves stand first, in this order, with titles of their own; the panels of all others are folded.
FIRST = {
    ACCURACY: "Held-out accuracy",
    REWARD: "Reward",
    "length/mean": "Completion length",
    "loss/nll": "Negative log-likelihood",
    "loss/total": "Loss",
    "loss/entropy": "Entropy",
    "length/truncated": "Truncated",
    "optim/grad_norm": "Gradient norm",
    "mismatch/mean_abs": "Trainer against sampler",
    "time/step": "Step time",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """This says what was written."""

    path: Path
    num_bytes: int
    runs: int  # in the page
    settings: int  # that the runs are of
    table: str  # of the settings, the best one first
    verdict: str  # which one is best, and which may be as good
    left_out: Sequence[str]  # a sentence for each run that has nothing to show

    def summary(self) -> str:
        """Returns the lines for the terminal."""
        runs = f"{self.runs} run{'s' * (self.runs != 1)} of {self.settings} setting{'s' * (self.settings != 1)}"
        page = f"{self.path}: {self.num_bytes / 2**20:.1f} MiB, {runs}"
        return "\n".join([*self.left_out, "", self.table, "", self.verdict, page])


def build_comparison(paths: Sequence[str | Path], out: str | Path | None = None) -> Comparison:
    """Writes the page of the runs in `paths`.

    Args:
        paths: folders of runs, of sweeps (`sweep.json`), and folders that hold folders of runs.
        out: the page; None: `report.html` in the folder of a sweep, or of runs, if it is the only path; else
            `comparison.html` in the working directory.

    Raises:
        ValueError: a path is no run, a `sweep.json` is damaged, or no run has anything to show.
        OSError: the page cannot be written.
    """
    runs, sweeps, left_out = find_runs(paths)
    keys, settings = settings_of(runs)
    target = target_of(runs, sweeps)
    verdict = verdict_of(runs, settings, target)
    higher = target is None or target.higher
    ranking = sorted(verdict.means, key=lambda place: verdict.means[place].value, reverse=higher)
    ranking += [place for place in range(len(settings)) if place not in verdict.means]
    name = f"{len(runs)} runs"
    if len(paths) == 1:
        name = sweeps[0]["name"] if sweeps else Path(paths[0]).resolve().name
        out = out or (Path(paths[0]) / "report.html" if is_several(paths[0]) else None)
    steps, charts = curves_of(runs, settings, ranking[:DRAWN], target)
    overview = {
        "written": time.time(),
        "notices": [*left_out, *_notices(runs, settings)],
        "target": target and asdict(target),
        "verdict": verdict.headline,
        "best": verdict.best,
        "ranking": ranking,  # the best setting first
        "settings": [
            {
                "letter": setting.letter,
                "label": setting.label,
                "values": [cut_text(value, LONGEST) for value in setting.values.values()],
                "runs": [_named(runs[number]) for number in setting.runs],
                "seeds": len(verdict.seeds.get(place, ())),
                "mean": verdict.means.get(place),
                "close": place in verdict.close,
            }
            for place, setting in enumerate(settings)
        ],
        "keys": list(zip(keys, short_keys(keys), strict=True)),
        "runs": len(runs),
        "steps": steps,
        "charts": charts,
    }
    out = Path(out or "comparison.html")
    num_bytes = write_page(out, name, "comparison", SCRIPTS, {"overview": pack(overview)})
    return Comparison(
        out, num_bytes, len(runs), len(settings), _table(settings, ranking, verdict), verdict.headline, left_out
    )


def _table(settings: Sequence[Setting], ranking: Sequence[int], verdict: Verdict) -> str:
    """Returns what each setting came to, for the terminal."""
    rows = [["", "setting", "result", "95% interval", "seeds"]]
    for place in ranking:
        mean, seeds = verdict.means.get(place), len(verdict.seeds.get(place, ()))
        interval = "-" if mean is None or mean.low is None else f"{mean.low:.4g} to {mean.high:.4g}"
        setting = settings[place]
        rows.append([setting.letter, setting.label, "-" if mean is None else f"{mean.value:.4g}", interval, str(seeds)])
    return columns(rows)


def curves_of(
    runs: Sequence[Run], settings: Sequence[Setting], places: Sequence[int], target: Target | None
) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the common steps and the charts, the most telling ones first, with a line for each setting of `places`.

    Of several runs, a line is their mean, and its band goes from the lowest to the highest. Of one run, the band of held-out
    accuracy is its interval over problems, and no other curve has one.
    """
    every = sorted({record["step"] for run in runs for record in run.records})
    if not every:
        return [], []
    parts = np.array_split(every, min(POINTS, len(every)))
    steps = [int(part[-1]) for part in parts]
    column = {int(step): number for number, part in enumerate(parts) for step in part}

    def values_of(number: int, metric: str) -> np.ndarray:
        sums, counts = np.zeros((2, len(steps)))
        for record in runs[number].records:
            if metric in record:
                sums[column[record["step"]]] += record[metric]
                counts[column[record["step"]]] += 1
        return np.divide(sums, counts, out=np.full(len(steps), np.nan), where=counts > 0)

    def line_of(place: int, metric: str, panel: Panel) -> dict[str, Any] | None:
        members = settings[place].runs
        values = np.stack([values_of(number, metric) for number in members])
        if np.isnan(values).all():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # A step that no run has gives NaN, which is meant.
            mean, band = np.nanmean(values, 0), [np.nanmin(values, 0), np.nanmax(values, 0)]
        if len(members) == 1:
            band = [values_of(members[0], end) for end in (LOW, HIGH)] if metric == ACCURACY else []
        end = np.flatnonzero(~np.isnan(mean))[-1] + 1
        reading = reading_of(steps[:end], _listed(mean[:end]), panel.newest)
        edges = [_listed(edge) for edge in band] or None
        return {"setting": place, "mean": _listed(mean), "band": edges, "reading": reading}

    names = {name for run in runs for record in run.records for name in record} - {"step", "nonfinite", LOW, HIGH}
    first = list(dict.fromkeys([*([target.metric] if target else []), *FIRST]))
    series = [(panel, metric, label) for panel in panels_for(names) for metric, label in panel.series]
    series.sort(key=lambda each: first.index(each[1]) if each[1] in first else len(first))
    charts = []
    for panel, metric, label in series:
        lines = [line for place in places if (line := line_of(place, metric, panel))]
        if not lines or (panel.quiet and not any(value for line in lines for value in line["mean"])):
            continue
        title = panel.title if len(panel.series) == 1 or not label else f"{panel.title}: {label}"
        charts.append({
            "section": "" if metric in first else panel.section, "title": FIRST.get(metric, title), "unit": panel.unit,
            "scale": panel.scale, "zero": panel.zero, "baseline": panel.baseline, "lines": lines,
        })  # fmt: skip
    return steps, charts


def _listed(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else short(float(value), 5) for value in values]


def _named(run: Run) -> str:
    return run.name if run.state.kind == "finished" else f"{run.name} ({run.state.text})"


def _notices(runs: Sequence[Run], settings: Sequence[Setting]) -> list[str]:
    """Says what a reader should know before the curves: broken values, seeds that ended early, settings that are not known."""
    notices = []
    for run in runs:
        notices += [f"{run.name}: {finding.text}" for finding in nonfinite(run.records, ())]
    for setting in settings:
        ends = sorted({runs[number].records[-1]["step"] for number in setting.runs})
        if len(ends) > 1:
            notices.append(
                f"{setting.letter}: its seeds end at different steps ({', '.join(f'{end:,}' for end in ends)})."
            )
    unknown = [run.name for run in runs if run.config is None]
    if unknown:
        notices.append(f"The settings of {', '.join(unknown)} are not known: no run.json, or a damaged one.")
    return notices
