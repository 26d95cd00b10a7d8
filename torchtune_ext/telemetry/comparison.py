"""`torchtune-ext report RUN RUN ...` and `torchtune-ext report SWEEP`: the curves of several runs in one page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from torchtune_ext.pipeline.evaluation import partly_right
from torchtune_ext.run.output import columns
from torchtune_ext.telemetry.excerpts import cut_text, pack, short
from torchtune_ext.telemetry.findings import nonfinite, reading_of
from torchtune_ext.telemetry.page_file import write_page
from torchtune_ext.telemetry.panels import panels_for
from torchtune_ext.telemetry.runs import Run, differences, find_runs, is_several, short_keys

POINTS = 400  # of a curve; where there are more steps, each point is the mean of neighbors
DRAWN = 40  # runs that have curves: the best ones
BANDS = 4  # Of more runs, the intervals would hide the lines.
LONGEST = 400  # characters of a value of a setting
ACCURACY, LOW, HIGH = "eval/accuracy_sampled", "eval/low", "eval/high"
GREEDY, REWARD, NLL = "eval/accuracy_greedy", "reward/mean", "loss/nll"
# Runs are compared by the first of these that two of them have, unless a sweep names its own metric.
TARGETS = {
    ACCURACY: "held-out accuracy",
    GREEDY: "held-out accuracy (greedy)",
    REWARD: "mean reward",
    NLL: "negative log-likelihood",
}
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
    "mismatch/mean_abs": "Trainer/engine mismatch",
    "time/step": "Step time",
}

Result = tuple[float, float | None, float | None]  # what a run came to, and its 95% interval over held-out problems


@dataclass(frozen=True, slots=True)
class Comparison:
    """The page that was written, and its table for the terminal."""

    path: Path
    num_bytes: int
    runs: int  # in the page
    table: str  # what each run came to, the best one first
    left_out: Sequence[str]  # a sentence for each run that has nothing to show

    def summary(self) -> str:
        """The lines for the terminal."""
        page = f"{self.path}: {self.num_bytes / 2**20:.1f} MiB, {self.runs} run{'s' * (self.runs != 1)}"
        return "\n".join([*self.left_out, "", self.table, "", page])


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
    metric, words, higher = target_of(runs, sweeps)
    results = [result_of(run, metric) for run in runs]
    ranking = sorted(range(len(runs)), key=lambda place: _rank(results[place], higher))
    # A to Z, then A1 to Z1.
    letters = [ascii_uppercase[place % 26] + str(place // 26 or "") for place in range(len(runs))]
    keys, values, labels = differences(runs)
    name = f"{len(runs)} runs"
    if len(paths) == 1:
        name = sweeps[0]["name"] if sweeps else Path(paths[0]).resolve().name
        out = out or (Path(paths[0]) / "report.html" if is_several(paths[0]) else None)
    # Several paths have no one folder that the page belongs to.
    out = Path(out or "comparison.html")
    steps, panels = curves_of(runs, ranking[:DRAWN], metric)
    overview = {
        "written": time.time(),
        "state": {"kind": "several", "text": f"{len(runs)} run{'s' * (len(runs) != 1)}"},
        "notices": [{"text": text, "section": ""} for text in [*left_out, *_notices(runs)]],
        "runs": [
            {"letter": letter, "label": label, "name": run.name, "rank": ranking.index(place)}
            for place, (letter, label, run) in enumerate(zip(letters, labels, runs, strict=True))
        ],
        # The page puts the letter of the run before these columns.
        "heads": [*short_keys(keys), words, "95% interval", "run"],
        "rows": [
            [place, *(cut_text(each, LONGEST) for each in values[place]), *_cells(results[place]), _named(runs[place])]
            for place in ranking
        ],
        "steps": steps,
        "panels": panels,
        "folded": list({panel["section"] for panel in panels}),
    }
    num_bytes = write_page(out, name, {"overview": pack(overview)})
    rows = [(letters[place], labels[place], *_cells(results[place])) for place in ranking]
    return Comparison(out, num_bytes, len(runs), columns([("", "run", words, "95% interval"), *rows]), left_out)


def target_of(runs: Sequence[Run], sweeps: Sequence[Mapping[str, Any]]) -> tuple[str, str, bool]:
    """Returns the metric that runs are compared by, its words, and whether more of it is better."""
    # Sweeps that name different metrics are compared by one of ours. W&B minimizes where a file names no goal.
    goals = {(sweep["metric"]["name"], sweep["metric"].get("goal") == "maximize") for sweep in sweeps}
    if len(goals) == 1:
        ((metric, higher),) = goals
    else:
        having = {name: [run for run in runs if any(name in record for record in run.records)] for name in TARGETS}
        metric = next((name for name in TARGETS if len(having[name]) >= min(2, len(runs))), REWARD)
        higher = metric != NLL
    return metric, _words(TARGETS, runs).get(metric, metric), higher


def result_of(run: Run, metric: str) -> Result | None:
    """Returns what a run came to: its newest evaluation, or the mean over the last tenth of the steps."""
    values = [record.get(metric) for record in run.records]
    if set(values) == {None}:
        return None
    last = next(record for record in reversed(run.records) if metric in record)
    # An evaluation is a mean over many problems already. A metric of one step is noisy, so its last tenth is averaged.
    value = last[metric] if metric.startswith("eval/") else reading_of(range(len(values)), values).last
    return (value, last.get(LOW), last.get(HIGH)) if metric == ACCURACY else (value, None, None)


def curves_of(runs: Sequence[Run], places: Sequence[int], target: str) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the common steps and the charts, the most telling ones first, with a line for each run of `places`."""
    # The runs share one axis. Every run is averaged over the same parts of it, so that equal columns are equal steps.
    every = sorted({record["step"] for run in runs for record in run.records})
    parts = np.array_split(every, min(POINTS, len(every)))
    steps = [int(part[-1]) for part in parts]
    column = {int(step): number for number, part in enumerate(parts) for step in part}

    def values_of(place: int, metric: str) -> list[float | None]:
        sums, counts = np.zeros((2, len(steps)))
        for record in runs[place].records:
            if metric in record:
                sums[column[record["step"]]] += record[metric]
                counts[column[record["step"]]] += 1
        return [short(float(total / count), 5) if count else None for total, count in zip(sums, counts, strict=True)]

    # The edges of the interval are a band around the accuracy, not curves of their own.
    names = {name for run in runs for record in run.records for name in record} - {"step", "nonfinite", LOW, HIGH}
    first, titles = list(dict.fromkeys([target, *FIRST])), _words(FIRST, runs)
    series = [(panel, metric, label) for panel in panels_for(names) for metric, label in panel.series]
    series.sort(key=lambda each: first.index(each[1]) if each[1] in first else len(first))
    charts = []
    for panel, metric, label in series:
        lines = []
        for place in places:
            values = values_of(place, metric)
            # A run that ended early has no values behind `end`. They must not count when its last tenth is taken, nor
            # make its curve look sparse.
            if (end := max((i + 1 for i, value in enumerate(values) if value is not None), default=0)) == 0:
                continue
            band = (
                [values_of(place, edge) for edge in (LOW, HIGH)]
                if metric == ACCURACY and len(places) <= BANDS
                else None
            )
            lines.append(
                {
                    "run": place,
                    "raw": values,
                    "band": band,
                    "reading": reading_of(steps[:end], values[:end], panel.newest),
                }
            )
        # As in the report of one run, a quiet panel is left out while all its values are zero.
        if not lines or (panel.quiet and not any(value for line in lines for value in line["raw"])):
            continue
        title = panel.title if len(panel.series) == 1 or not label else f"{panel.title}: {label}"
        section = "" if metric in first else panel.section
        chart = replace(panel, section=section, title=titles.get(metric, title), note="", style="line", lead=not charts)
        charts.append(asdict(chart) | {"lines": lines})
    return steps, charts


def _words(names: Mapping[str, str], runs: Sequence[Run]) -> dict[str, str]:
    """What our metrics are called. With partial rewards their mean is not the share of right answers, so it is no accuracy."""
    partial = any(partly_right(record) for run in runs for record in run.records)
    return {metric: words.replace("accuracy", "reward") if partial else words for metric, words in names.items()}


def _rank(result: Result | None, higher: bool) -> tuple[bool, float]:
    # The best result comes first, and runs without one last.
    return (True, 0.0) if result is None else (False, -result[0] if higher else result[0])


def _cells(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "-", "-"
    value, low, high = result
    return f"{value:.4g}", "-" if low is None else f"{low:.4g} to {high:.4g}"


def _notices(runs: Sequence[Run]) -> list[str]:
    """What a reader should know before the curves: broken values, and settings that are not known."""
    unknown = [run.name for run in runs if run.config is None]
    return [f"{run.name}: {finding.text}" for run in runs for finding in nonfinite(run.records, ())] + (
        [f"The settings of {', '.join(unknown)} are not known: no run.json, or a damaged one."] if unknown else []
    )


def _named(run: Run) -> str:
    return run.name if run.state.kind == "finished" else f"{run.name} ({run.state.text})"
