"""`torchtune-ext report RUN RUN ...` and `torchtune-ext report SWEEP`: several runs in one page."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np

from torchtune_ext.run.output import format_columns
from torchtune_ext.telemetry.excerpts import elide_text, encode_json, round_digits
from torchtune_ext.telemetry.findings import nonfinite_findings, read_curve
from torchtune_ext.telemetry.html_page import write_page
from torchtune_ext.telemetry.panels import panels_for
from torchtune_ext.telemetry.runs import ComparedRun, find_runs, holds_several_runs, label_runs, shorten_keys

MAX_POINTS = 400  # per curve; with more steps, each point is the mean of neighboring steps
MAX_CURVE_RUNS = 40  # the best runs have curves
MAX_BAND_RUNS = 4  # with more runs, the intervals would hide the lines
MAX_VALUE_CHARS = 400  # of a config value
HELD_OUT, INTERVAL_LOW, INTERVAL_HIGH = "eval/reward_sampled", "eval/low", "eval/high"
HELD_OUT_GREEDY, REWARD, NLL = "eval/reward_greedy", "reward/mean", "loss/nll"
# Runs are compared by the metric of a sweep, or the first of these that at least two runs have.
TARGET_METRICS = {
    HELD_OUT: "held-out reward",
    HELD_OUT_GREEDY: "held-out reward (greedy)",
    REWARD: "mean reward",
    NLL: "negative log-likelihood",
}
# These curves come first, in this order and with these titles. All other panels are folded.
LEADING_CHARTS = {
    HELD_OUT: "Held-out reward",
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

# A run's target metric, and the ends of its 95% interval over held-out problems.
RunResult = tuple[float, float | None, float | None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The page that was written, and its table for the terminal."""

    path: Path
    num_bytes: int
    runs: int  # number of runs in the page
    table: str  # results of the runs, best run first
    skipped_runs: Sequence[str]  # one sentence per run that the page leaves out

    def summary(self) -> str:
        """Returns the lines for the terminal."""
        page = f"{self.path}: {self.num_bytes / 2**20:.1f} MiB, {self.runs} run{'s' * (self.runs != 1)}"
        return "\n".join([*self.skipped_runs, "", self.table, "", page])


def build_comparison(paths: Sequence[str | Path], out: str | Path | None = None) -> Comparison:
    """Writes the comparison page of the runs in `paths`.

    Args:
        paths: folders of runs, of sweeps (`sweep.json`), and folders that hold folders of runs.
        out: the file to write; None: `report.html` in the only path if it is a sweep or holds runs,
            else `comparison.html` in the working directory.

    Raises:
        UsageError: a path is not a run, a `sweep.json` is damaged, or no run has metrics.
        OSError: the page cannot be written.
    """
    runs, sweeps, skipped_runs = find_runs(paths)
    metric, words, higher_is_better = choose_target(runs, sweeps)
    results = [run_result(run, metric) for run in runs]
    ranking = sorted(range(len(runs)), key=lambda place: _rank_key(results[place], higher_is_better))
    # The letters run from A to Z, then from A1 to Z1.
    letters = [ascii_uppercase[place % 26] + str(place // 26 or "") for place in range(len(runs))]
    keys, values, labels = label_runs(runs)
    name = f"{len(runs)} runs"
    if len(paths) == 1:
        name = sweeps[0]["name"] if sweeps else Path(paths[0]).resolve().name
        out = out or (Path(paths[0]) / "report.html" if holds_several_runs(paths[0]) else None)
    # Several paths have no common folder for the page.
    out = Path(out or "comparison.html")
    steps, panels = build_charts(runs, ranking[:MAX_CURVE_RUNS], metric)
    overview = {
        "written": time.time(),
        "state": {"kind": "several", "text": f"{len(runs)} run{'s' * (len(runs) != 1)}"},
        "notices": [{"text": text, "section": ""} for text in [*skipped_runs, *_notices(runs)]],
        "runs": [
            {"letter": letter, "label": label, "name": run.name, "rank": ranking.index(place)}
            for place, (letter, label, run) in enumerate(zip(letters, labels, runs, strict=True))
        ],
        # The page shows the run's letter before these columns.
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
    table = format_columns([("", "run", words, "95% interval"), *rows])
    return Comparison(out, num_bytes, len(runs), table, skipped_runs)


def choose_target(runs: Sequence[ComparedRun], sweeps: Sequence[Mapping[str, Any]]) -> tuple[str, str, bool]:
    """Returns the metric to compare runs by, its label, and whether higher is better."""
    # Sweeps that name different metrics are compared by one of TARGET_METRICS. Without a goal W&B
    # minimizes.
    goals = {(sweep["metric"]["name"], sweep["metric"].get("goal") == "maximize") for sweep in sweeps}
    if len(goals) == 1:
        ((metric, higher_is_better),) = goals
    else:
        # How many runs have each metric.
        counts = Counter(name for run in runs for name in {name for record in run.records for name in record})
        metric = next((name for name in TARGET_METRICS if counts[name] >= min(2, len(runs))), REWARD)
        higher_is_better = metric != NLL
    return metric, TARGET_METRICS.get(metric, metric), higher_is_better


def run_result(run: ComparedRun, metric: str) -> RunResult | None:
    """Returns a run's newest evaluation, or the metric's mean over the last tenth of the steps."""
    values = [record.get(metric) for record in run.records]
    if set(values) == {None}:
        return None
    last = next(record for record in reversed(run.records) if metric in record)
    # An evaluation is a mean over many problems. A metric of one step is noisy, so it is averaged.
    value = last[metric] if metric.startswith("eval/") else read_curve(range(len(values)), values).last
    return (value, last.get(INTERVAL_LOW), last.get(INTERVAL_HIGH)) if metric == HELD_OUT else (value, None, None)


def build_charts(
    runs: Sequence[ComparedRun], places: Sequence[int], target: str
) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the common steps, and the charts with a line for each run of `places`."""
    # The runs share one step axis. Every run is averaged over the same ranges of steps.
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
        pairs = zip(sums, counts, strict=True)
        return [round_digits(float(total / count), 5) if count else None for total, count in pairs]

    names = {name for run in runs for record in run.records for name in record}
    # The ends of the interval are drawn as a band around the mean, not as curves.
    names -= {"step", "nonfinite", INTERVAL_LOW, INTERVAL_HIGH}
    first = list(dict.fromkeys([target, *LEADING_CHARTS]))
    series = [(panel, metric, label) for panel in panels_for(names) for metric, label in panel.series]
    series.sort(key=lambda each: first.index(each[1]) if each[1] in first else len(first))
    charts = []
    for panel, metric, label in series:
        lines = []
        for place in places:
            values = values_of(place, metric)
            # A run that ended early has no values after `end`. The missing values must not shift
            # its last tenth, nor make its curve look sparse.
            if (end := max((i + 1 for i, value in enumerate(values) if value is not None), default=0)) == 0:
                continue
            banded = metric == HELD_OUT and len(places) <= MAX_BAND_RUNS
            lines.append(
                {
                    "run": place,
                    "raw": values,
                    "band": [values_of(place, edge) for edge in (INTERVAL_LOW, INTERVAL_HIGH)] if banded else None,
                    "reading": read_curve(steps[:end], values[:end], panel.uses_latest),
                }
            )
        # As in the report of one run, a panel with `hide_if_zero` needs a value other than zero.
        if not lines or (panel.hide_if_zero and not any(value for line in lines for value in line["raw"])):
            continue
        title = panel.title if len(panel.series) == 1 or not label else f"{panel.title}: {label}"
        section = "" if metric in first else panel.section
        chart = replace(
            panel, section=section, title=LEADING_CHARTS.get(metric, title), note="", style="line", lead=not charts
        )
        charts.append(asdict(chart) | {"lines": lines})
    return steps, charts


def _rank_key(result: RunResult | None, higher_is_better: bool) -> tuple[bool, float]:
    # The best result comes first, and runs without a result last.
    return (True, 0.0) if result is None else (False, -result[0] if higher_is_better else result[0])


def _result_cells(result: RunResult | None) -> tuple[str, str]:
    if result is None:
        return "-", "-"
    value, low, high = result
    return f"{value:.4g}", "-" if low is None else f"{low:.4g} to {high:.4g}"


def _notices(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns the warnings above the curves: nonfinite metrics, and runs without settings."""
    notices = [f"{run.name}: {finding.text}" for run in runs for finding in nonfinite_findings(run.records, ())]
    if unknown := [run.name for run in runs if run.config is None]:
        notices.append(f"The settings of {', '.join(unknown)} are unknown: run.json is missing or damaged.")
    return notices


def _run_title(run: ComparedRun) -> str:
    return run.name if run.state.kind == "finished" else f"{run.name} ({run.state.text})"
