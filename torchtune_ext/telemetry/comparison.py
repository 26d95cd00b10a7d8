"""`torchtune-ext report RUN RUN ...` and `torchtune-ext report SWEEP`: one HTML file that shows several runs together.

comparison = build_comparison([sweep_folder])     # writes sweep_folder/report.html
print(comparison.summary())                       # which setting is better, and what was left out
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtune_ext.telemetry.compared.curves import Columns, chart_record, overlays, seeds_missing
from torchtune_ext.telemetry.compared.results import (
    Result,
    Target,
    differently_judged,
    result_of,
    row_of,
    target_of,
    unit_of,
    unstarted_row,
)
from torchtune_ext.telemetry.compared.runs import Found, OneRun, find_runs, is_several
from torchtune_ext.telemetry.compared.samples import SampleLimits, shared_samples
from torchtune_ext.telemetry.compared.settings import Setting, settings_of, short_keys, shown
from torchtune_ext.telemetry.compared.sweep_file import Point, Sweep
from torchtune_ext.telemetry.compared.verdict import Verdict, estimates_of, verdict_of
from torchtune_ext.telemetry.excerpts import pack, short
from torchtune_ext.telemetry.page_file import page_of, write_page

SCRIPTS = ("charts", "shell", "rollouts", "overlay", "tables", "scatter", "comparison")  # of the page, in this order
_LONGEST = 400  # characters of a value in a table


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """This says how much a page of several runs carries."""

    points: int = 400  # of a curve; where there are more steps, each point is the mean of neighbors
    shown: int = 8  # So many settings are drawn when the page opens; a click draws others.
    curves: int = 40  # So many settings have curves at all: the best ones.
    keys: int = 200  # So many of the settings that differ are in the table.
    samples: SampleLimits = field(default_factory=SampleLimits)


@dataclass(frozen=True, slots=True)
class Comparison:
    """This says what was written."""

    path: Path
    num_bytes: int
    runs: int  # So many are in the page.
    settings: int  # So many settings they are of.
    verdict: str  # which one is better, and whether that can be told
    left_out: tuple[str, ...]  # a sentence for each run that has nothing to show

    def summary(self) -> str:
        """Returns the lines for the terminal."""
        runs = f"{self.runs} run{'s' * (self.runs != 1)} of {self.settings} setting{'s' * (self.settings != 1)}"
        first = f"{self.path}: {self.num_bytes / 2**20:.1f} MiB, {runs}"
        return "\n".join([first, *self.left_out, self.verdict])


def build_comparison(
    paths: Sequence[str | Path], out: str | Path | None = None, limits: ComparisonLimits | None = None
) -> Comparison:
    """Writes the page of the runs in `paths`.

    Args:
        paths: folders of runs, of sweeps (`sweep.json`), and folders that hold folders of runs.
        out: the page; None: `report.html` in the folder of a sweep, or of runs, if it is the only path; else
            `comparison.html` in the working directory.
        limits: how much the page carries.

    Raises:
        FileNotFoundError: a path does not exist, or no run has anything to show.
        ValueError: a path is no run, a run is named twice, or a file is of another format.
        OSError: the page cannot be written.
    """
    limits = limits or ComparisonLimits()
    found = find_runs(paths)
    keys, settings = settings_of(found.runs)
    target = target_of(found.runs, found.sweeps)
    results = {number: result_of(run, target) for number, run in enumerate(found.runs)}
    verdict = verdict_of(settings, results, target, differently_judged(found.runs, settings, target))
    if out is None:
        out = Path(paths[0]) / "report.html" if len(paths) == 1 and is_several(paths[0]) else Path("comparison.html")
    overview = _overview(found, keys, settings, target, results, verdict, limits)
    overview["name"] = _name(paths, found)
    ranked = _ranked(range(len(settings)), estimates_of(settings, results), target)
    samples, told = shared_samples(found.runs, [settings[place] for place in ranked], limits.samples)
    overview["samples"] = told
    page = page_of(overview["name"], "comparison", SCRIPTS, {"overview": pack(overview), "problems": pack(samples)})
    write_page(Path(out), page)
    left_out = tuple(found.left_out)
    return Comparison(Path(out), len(page.encode()), len(found.runs), len(settings), verdict.headline, left_out)


def _name(paths: Sequence[str | Path], found: Found) -> str:
    if len(paths) == 1:
        return found.sweeps[0].name if found.sweeps else Path(paths[0]).resolve().name
    names = [run.name for run in found.runs]
    return " · ".join(names) if sum(map(len, names)) <= 80 else f"{len(names)} runs"


def _overview(
    found: Found,
    keys: Sequence[str],
    settings: Sequence[Setting],
    target: Target | None,
    results: Mapping[int, Result],
    verdict: Verdict,
    limits: ComparisonLimits,
) -> dict[str, Any]:
    """Collects all that the page shows but the samples."""
    runs = found.runs
    estimates = estimates_of(settings, results)
    drawn = _drawn(settings, estimates, target, limits.curves)
    columns = Columns(runs, limits.points)
    charts = overlays(columns, [settings[place] for place in drawn], target and target.metric)
    ends = short_keys(keys)
    of_run = {run: place for place, setting in enumerate(settings) for run in setting.runs}
    return {
        "written": time.time(),
        "notices": [*found.left_out, *_notices(runs, settings)],
        "steps": columns.steps,
        "steps_each": columns.steps_each,
        "settings": [
            {
                "letter": setting.letter,
                "label": setting.label,
                "runs": [runs[run].name for run in setting.runs],
                "seeds": setting.num_seeds,
                "estimate": None if estimate is None else {name: short(end) for name, end in asdict(estimate).items()},
            }
            for setting, estimate in zip(settings, estimates, strict=True)
        ],
        "drawn": drawn,
        "shown": _shown(drawn, settings, estimates, target, limits.shown),
        "charts": [chart_record(chart) for chart in charts],
        "target": None if target is None else asdict(target) | {"unit": unit_of(target.metric)},
        "verdict": {
            "headline": verdict.headline,
            "notes": verdict.notes,
            "best": verdict.best,
            "pairs": [
                {"other": pair.other, "told": pair.told} | {name: short(end) for name, end in asdict(pair.difference).items()}
                for pair in verdict.pairs
            ],
        },
        "keys": [[key, ends[key]] for key in keys[: limits.keys]],
        "more_keys": max(0, len(keys) - limits.keys),
        "values": [[_value(setting.values.get(key)) for key in keys[: limits.keys]] if setting.values else None
                   for setting in settings],
        "rows": _rows(found, of_run, results),
        "sweeps": [_sweep(sweep, runs, of_run, results) for sweep in found.sweeps],
    }  # fmt: skip


def _drawn(settings: Sequence[Setting], estimates: Sequence, target: Target | None, number: int) -> list[int]:
    """Returns the settings that have curves, in their own order: the best ones where there are too many."""
    return sorted(_ranked(list(range(len(settings))), estimates, target)[:number])


def _shown(
    drawn: Sequence[int], settings: Sequence, estimates: Sequence, target: Target | None, number: int
) -> list[int]:
    # One or two more than the number are no reason to hide any.
    return list(drawn) if len(drawn) <= number + 2 else sorted(_ranked(drawn, estimates, target)[:number])


def _ranked(places: Sequence[int], estimates: Sequence, target: Target | None) -> list[int]:
    sign = -1 if target is None or target.higher else 1
    return sorted(places, key=lambda i: (estimates[i] is None, sign * estimates[i].value if estimates[i] else 0))


def _rows(found: Found, of_run: Mapping[int, int], results: Mapping[int, Result]) -> list[dict[str, Any]]:
    """Returns a row for each run, those of a sweep in its order, with those that wait or failed before their first step."""
    rows = {run.path: _row(run, number, of_run[number], results[number]) for number, run in enumerate(found.runs)}
    ordered = []
    for sweep in found.sweeps:
        ordered += [rows.pop(point.folder, None) or _unstarted(point) for point in sweep.points]
    return [*ordered, *rows.values()]


def _unstarted(point: Point) -> dict[str, Any]:
    return unstarted_row(point) | {
        "run": None, "name": point.id, "setting": None, "seed": None, "state": point.state,
        "state_text": point.state.replace("_", " "), "cause": point.cause[:_LONGEST],
        "parameters": ", ".join(f"{key} {shown(value)}" for key, value in point.parameters.items()),
    }  # fmt: skip


def _row(run: OneRun, number: int, setting: int, result: Result) -> dict[str, Any]:
    state, text, cause = run.state.kind, run.state.text, ""
    if run.point is not None:
        state, text, cause = run.point.state, run.point.state.replace("_", " "), run.point.cause
    seed = None if run.config is None else run.config.get("seed")
    return row_of(result) | {
        "run": number, "name": run.name, "setting": setting, "seed": None if seed is None else shown(seed),
        "state": state, "state_text": text, "cause": cause[:_LONGEST],
    }  # fmt: skip


def _sweep(
    sweep: Sweep, runs: Sequence[OneRun], of_run: Mapping[int, int], results: Mapping[int, Result]
) -> dict[str, Any]:
    """Returns the points of a sweep, each with its value and its interval, for the scatter of each parameter."""
    numbers = {run.path: number for number, run in enumerate(runs)}
    swept = sweep.swept()
    points = []
    for point in sweep.points:
        number = numbers.get(point.folder)
        known = None if number is None else results[number].target
        points.append({
            "id": point.id, "run": number, "setting": None if number is None else of_run[number], "state": point.state,
            "value": short(point.value), "cause": point.cause[:_LONGEST],
            "low": short(known.low) if known else None, "high": short(known.high) if known else None,
            "parameters": {key: _value(point.parameters.get(key), raw=True) for key in swept},
        })  # fmt: skip
    ends = short_keys(list(swept))
    return {
        "name": sweep.name,
        "method": sweep.method,
        "metric": sweep.metric,
        "goal": sweep.goal,
        "axes": [{"key": key, "label": ends[key], "axis": axis} for key, axis in swept.items()],
        "points": points,
        "best": sweep.best.id if sweep.best else None,
    }


def _value(value: Any, raw: bool = False) -> Any:
    if raw and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return shown(value, _LONGEST)


def _notices(runs: Sequence[OneRun], settings: Sequence[Setting]) -> list[str]:
    """Says what a reader should know before the curves: broken values, seeds that ended early, versions that differ."""
    told = []
    for run in runs:
        broken: dict[str, int] = {}
        for record in run.records:
            for name in record.get("nonfinite", ()):
                broken[name] = broken.get(name, 0) + 1
        if broken:
            what = ", ".join(f"{name} at {count} step{'s' * (count > 1)}" for name, count in list(broken.items())[:4])
            told.append(f"{run.name}: not finite: {what}{' and more' if len(broken) > 4 else ''}.")
    for setting in settings:
        if ends := seeds_missing(runs, setting):
            spans = "; ".join(f"{count} to step {end:,}" for end, count in ends.items())
            told.append(f"{setting.letter}: its seeds end at different steps ({spans}). Behind the end of one, mean and band "
                        "are of the others.")  # fmt: skip
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in (run.process.get("versions") or {}).items():
            versions.setdefault(name, set()).add(str(version))
    if differ := [f"{name} {', '.join(sorted(found))}" for name, found in versions.items() if len(found) > 1]:
        told.append(f"The runs were made with different versions: {'; '.join(differ)}.")
    unknown = [run.name for run in runs if run.config is None]
    if unknown:
        told.append(f"The settings of {', '.join(unknown)} are not known: no run.json, or a damaged one.")
    return told
