"""`torchtune-ext report RUN RUN ...` and `torchtune-ext report SWEEP`: the curves of several runs in one page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from torchtune_ext.pipeline.evaluation import has_partial_rewards
from torchtune_ext.run.output import format_columns
from torchtune_ext.telemetry.excerpts import elide_text, encode_json, round_digits
from torchtune_ext.telemetry.findings import nonfinite_findings, read_curve
from torchtune_ext.telemetry.html_page import write_page
from torchtune_ext.telemetry.panels import panels_for
from torchtune_ext.telemetry.runs import ComparedRun, find_runs, holds_several_runs, label_runs, shorten_keys

MAX_POINTS = 400  # of a curve; where there are more steps, each point is the mean of neighbors
MAX_CURVE_RUNS = 40  # runs that have curves: the best ones
MAX_BAND_RUNS = 4  # Of more runs, the intervals would hide the lines.
MAX_VALUE_CHARS = 400  # characters of a value of a setting
ACCURACY, INTERVAL_LOW, INTERVAL_HIGH = "eval/accuracy_sampled", "eval/low", "eval/high"
GREEDY_ACCURACY, REWARD, NLL = "eval/accuracy_greedy", "reward/mean", "loss/nll"
# Runs are compared by the first of these that two of them have, unless a sweep names its own metric.
TARGET_METRICS = {
    ACCURACY: "held-out accuracy",
    GREEDY_ACCURACY: "held-out accuracy (greedy)",
    REWARD: "mean reward",
    NLL: "negative log-likelihood",
}
# These curves stand first, in this order, with titles of their own; the panels of all others are folded.
LEADING_CHARTS = {
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

RunResult = tuple[float, float | None, float | None]  # what a run came to, and its 95% interval over held-out problems


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
    metric, words, higher_is_better = choose_target(runs, sweeps)
    results = [run_result(run, metric) for run in runs]
    ranking = sorted(range(len(runs)), key=lambda place: _rank_key(results[place], higher_is_better))
    # A to Z, then A1 to Z1.
    letters = [ascii_uppercase[place % 26] + str(place // 26 or "") for place in range(len(runs))]
    keys, values, labels = label_runs(runs)
    name = f"{len(runs)} runs"
    if len(paths) == 1:
        name = sweeps[0]["name"] if sweeps else Path(paths[0]).resolve().name
        out = out or (Path(paths[0]) / "report.html" if holds_several_runs(paths[0]) else None)
    # Several paths have no one folder that the page belongs to.
    out = Path(out or "comparison.html")
    steps, panels = build_charts(runs, ranking[:MAX_CURVE_RUNS], metric)
    overview = {
        "written": time.time(),
        "state": {"kind": "several", "text": f"{len(runs)} run{'s' * (len(runs) != 1)}"},
        "notices": [{"text": text, "section": ""} for text in [*left_out, *_notices(runs)]],
        "runs": [
            {"letter": letter, "label": label, "name": run.name, "rank": ranking.index(place)}
            for place, (letter, label, run) in enumerate(zip(letters, labels, runs, strict=True))
        ],
        # The page puts the letter of the run before these columns.
        "heads": [*shorten_keys(keys), words, "95% interval", "run"],
        "rows": [
            [
                place,
                *(elide_text(each, MAX_VALUE_CHARS) for each in values[place]),
                *_result_cells(results[place]),
                _run_title(runs[place]),
            ]
            for place in ranking
        ],
        "steps": steps,
        "panels": panels,
        "folded": list({panel["section"] for panel in panels}),
    }
    num_bytes = write_page(out, name, {"overview": encode_json(overview)})
    rows = [(letters[place], labels[place], *_result_cells(results[place])) for place in ranking]
    return Comparison(out, num_bytes, len(runs), format_columns([("", "run", words, "95% interval"), *rows]), left_out)


def choose_target(runs: Sequence[ComparedRun], sweeps: Sequence[Mapping[str, Any]]) -> tuple[str, str, bool]:
    """Returns the metric that runs are compared by, its words, and whether more of it is better."""
    # Sweeps that name different metrics are compared by one of ours. W&B minimizes where a file names no goal.
    goals = {(sweep["metric"]["name"], sweep["metric"].get("goal") == "maximize") for sweep in sweeps}
    if len(goals) == 1:
        ((metric, higher_is_better),) = goals
    else:
        runs_with = {
            name: [run for run in runs if any(name in record for record in run.records)] for name in TARGET_METRICS
        }
        metric = next((name for name in TARGET_METRICS if len(runs_with[name]) >= min(2, len(runs))), REWARD)
        higher_is_better = metric != NLL
    return metric, _metric_labels(TARGET_METRICS, runs).get(metric, metric), higher_is_better


def run_result(run: ComparedRun, metric: str) -> RunResult | None:
    """Returns what a run came to: its newest evaluation, or the mean over the last tenth of the steps."""
    values = [record.get(metric) for record in run.records]
    if set(values) == {None}:
        return None
    last = next(record for record in reversed(run.records) if metric in record)
    # An evaluation is a mean over many problems already. A metric of one step is noisy, so its last tenth is averaged.
    value = last[metric] if metric.startswith("eval/") else read_curve(range(len(values)), values).last
    return (value, last.get(INTERVAL_LOW), last.get(INTERVAL_HIGH)) if metric == ACCURACY else (value, None, None)


def build_charts(
    runs: Sequence[ComparedRun], places: Sequence[int], target: str
) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the common steps and the charts, the most telling ones first, with a line for each run of `places`."""
    # The runs share one axis. Every run is averaged over the same parts of it, so that equal columns are equal steps.
    all_steps = sorted({record["step"] for run in runs for record in run.records})
    parts = np.array_split(all_steps, min(MAX_POINTS, len(all_steps)))
    steps = [int(part[-1]) for part in parts]
    column = {int(step): number for number, part in enumerate(parts) for step in part}

    def values_of(place: int, metric: str) -> list[float | None]:
        sums, counts = np.zeros((2, len(steps)))
        for record in runs[place].records:
            if metric in record:
                sums[column[record["step"]]] += record[metric]
                counts[column[record["step"]]] += 1
        return [
            round_digits(float(total / count), 5) if count else None for total, count in zip(sums, counts, strict=True)
        ]

    # The edges of the interval are a band around the accuracy, not curves of their own.
    names = {name for run in runs for record in run.records for name in record} - {
        "step",
        "nonfinite",
        INTERVAL_LOW,
        INTERVAL_HIGH,
    }
    first, titles = list(dict.fromkeys([target, *LEADING_CHARTS])), _metric_labels(LEADING_CHARTS, runs)
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
            banded = metric == ACCURACY and len(places) <= MAX_BAND_RUNS
            lines.append(
                {
                    "run": place,
                    "raw": values,
                    "band": [values_of(place, edge) for edge in (INTERVAL_LOW, INTERVAL_HIGH)] if banded else None,
                    "reading": read_curve(steps[:end], values[:end], panel.uses_latest),
                }
            )
        # As in the report of one run, a quiet panel is left out while all its values are zero.
        if not lines or (panel.hide_if_zero and not any(value for line in lines for value in line["raw"])):
            continue
        title = panel.title if len(panel.series) == 1 or not label else f"{panel.title}: {label}"
        section = "" if metric in first else panel.section
        chart = replace(panel, section=section, title=titles.get(metric, title), note="", style="line", lead=not charts)
        charts.append(asdict(chart) | {"lines": lines})
    return steps, charts


def _metric_labels(names: Mapping[str, str], runs: Sequence[ComparedRun]) -> dict[str, str]:
    """What our metrics are called. With partial rewards their mean is not the share of right answers, so it is no accuracy."""
    partial = any(has_partial_rewards(record) for run in runs for record in run.records)
    return {metric: words.replace("accuracy", "reward") if partial else words for metric, words in names.items()}


def _rank_key(result: RunResult | None, higher_is_better: bool) -> tuple[bool, float]:
    # The best result comes first, and runs without one last.
    return (True, 0.0) if result is None else (False, -result[0] if higher_is_better else result[0])


def _result_cells(result: RunResult | None) -> tuple[str, str]:
    if result is None:
        return "-", "-"
    value, low, high = result
    return f"{value:.4g}", "-" if low is None else f"{low:.4g} to {high:.4g}"


def _notices(runs: Sequence[ComparedRun]) -> list[str]:
    """What a reader should know before the curves: broken values, and settings that are not known."""
    unknown = [run.name for run in runs if run.config is None]
    return [f"{run.name}: {finding.text}" for run in runs for finding in nonfinite_findings(run.records, ())] + (
        [f"The settings of {', '.join(unknown)} are not known: no run.json, or a damaged one."] if unknown else []
    )


def _run_title(run: ComparedRun) -> str:
    return run.name if run.state.kind == "finished" else f"{run.name} ({run.state.text})"
