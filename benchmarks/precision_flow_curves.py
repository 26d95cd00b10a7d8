"""Learning curves of `precision_flow.py`: one run per precision flow, answer length and seed."""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from objectives import tune
from objectives_report import interval, plt, save

from torchtune_ext.telemetry.metrics import read_metrics

COLORS = {"bf16": "#000000", "fp8_rollout": "#D55E00", "fp8_unified": "#0072B2"}  # Okabe and Ito's
WINDOW = 5  # steps of the moving mean
LAST_STEPS = 10  # of which mismatch and length are the mean
COLUMNS = {  # title -> metric
    "sampled": "eval/reward_sampled",
    "greedy": "eval/reward_greedy",
    "mean \\|d\\| / 1e-3": "mismatch/mean_abs",
    "k3 / 1e-4": "mismatch/k3",
    "max \\|d\\|": "mismatch/max_abs",
    "tokens": "length/mean",
    "grad norm": "optim/grad_norm",
}
UNITS = {"mean \\|d\\| / 1e-3": 1e-3, "k3 / 1e-4": 1e-4}


@dataclass(frozen=True, slots=True)
class Run:
    """One training of the comparison."""

    flow: str
    level: int
    seed: int
    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / "done").is_file()

    def lines(self) -> list[dict[str, float]]:
        return read_metrics(self.folder / "metrics.jsonl")


def train_all(
    out: Path,
    levels: Mapping[int, str],
    seeds: Sequence[int],
    model: Path,
    threads: int,
    jobs: int,
    settings: list[str],
) -> list[Run]:
    """Return all runs, seed by seed; train the missing ones."""
    runs = [
        Run(flow, level, seed, out / f"{flow}_{name}_s{seed}")
        for seed in seeds
        for level, name in levels.items()
        for flow in COLORS
    ]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: train(run, model, threads, settings), runs))
    return runs


def train(run: Run, model: Path, threads: int, settings: list[str]) -> None:
    made_with = "\n".join(settings)
    if run.done:
        if (kept := (run.folder / "done").read_text()) != made_with:
            sys.exit(f"{run.folder} was trained with --grpo {kept.split()}, not {settings}. Fix: set another --out")
        return
    shutil.rmtree(run.folder, ignore_errors=True)
    begin = time.monotonic()
    try:
        tune(
            run.folder / "log.txt", threads, "grpo_full", "--config", "grpo/tiny_fp8",
            f"output_dir={run.folder}", f"model_dir={model}", f"precision={run.flow}", f"task.level={run.level}",
            f"seed={run.seed}", f"task.seed={100 + run.seed}", *settings,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        print(f"{run.folder.name}: exit status {error.returncode}, see {run.folder}/log.txt", file=sys.stderr)
        return
    (run.folder / "done").write_text(made_with)
    print(f"{run.folder.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def values(run: Run) -> dict[str, float]:
    """Return the results of a run: its last evaluation, and means over its last steps."""
    lines = run.lines()
    facts = {}
    for title, metric in COLUMNS.items():
        if metric.startswith("eval/"):
            facts[title] = lines[-1][metric]
        else:
            facts[title] = mean(line[metric] for line in lines[-LAST_STEPS:] if metric in line) / UNITS.get(title, 1.0)
    return facts


def report(runs: Sequence[Run], levels: Mapping[int, str]) -> str:
    """Return means over seeds ± half of the 95% interval (Student's t), and paired accuracy differences to bf16."""
    runs = [run for run in runs if run.done]
    lines = ["| answers | flow | seeds | start | " + " | ".join(COLUMNS) + " | sampled - bf16 | greedy - bf16 |"]
    lines.append("|---" * (len(COLUMNS) + 6) + "|")
    for level, name in levels.items():
        at = {(run.flow, run.seed): (run, values(run)) for run in runs if run.level == level}
        for flow in COLORS:
            mine = {seed: entry for (f, seed), entry in at.items() if f == flow}
            if not mine:
                continue
            start = mean(run.lines()[0]["eval/reward_sampled"] for run, _ in mine.values())
            cells = [_pm([facts[title] for _, facts in mine.values()]) for title in COLUMNS]
            for title in ("sampled", "greedy"):
                pairs = [facts[title] - at["bf16", s][1][title] for s, (_, facts) in mine.items() if ("bf16", s) in at]
                cells.append("" if flow == "bf16" else _pm(pairs, sign=True))
            lines.append(f"| {name} | {flow} | {len(mine)} | {start:.3f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pm(numbers: Sequence[float], sign: bool = False) -> str:
    if not numbers:
        return ""
    center, half = interval(list(numbers))
    digits = 3 if abs(center) < 10 else 1
    return f"{center:{'+' if sign else ''}.{digits}f} ± {half:.{digits}f}"


def draw(runs: Sequence[Run], levels: Mapping[int, str], path: Path) -> None:
    """Plot reward and mismatch over the steps: a column of panels per length, a thin line per seed."""
    figure, axes = plt.subplots(2, len(levels), figsize=(8.4, 5.0), sharex=True, squeeze=False, layout="constrained")
    for column, (level, name) in enumerate(levels.items()):
        for row, (metric, label) in enumerate((("reward/mean", "reward"), ("mismatch/mean_abs", "mean |d log-prob|"))):
            axis = axes[row, column]
            for flow in COLORS:
                curves = [_smoothed(run, metric) for run in runs if run.done and (run.flow, run.level) == (flow, level)]
                if not curves:
                    continue
                size = min(map(len, curves))
                stack = np.array([curve[:size] for curve in curves])
                steps = np.arange(WINDOW, WINDOW + size)
                axis.plot(steps, stack.T, color=COLORS[flow], linewidth=0.5, alpha=0.4)
                axis.plot(steps, stack.mean(0), color=COLORS[flow], linewidth=1.6, label=flow)
            axis.grid(alpha=0.25, linewidth=0.5)
            axis.set_ylim(bottom=0)
            if column == 0:
                axis.set_ylabel(label)
        axes[0, column].set_title(f"{name} answers")
    axes[0, 0].legend(frameon=False)
    figure.supxlabel(f"step (moving mean of {WINDOW}; thin: seeds)")
    save(figure, path)


def _smoothed(run: Run, metric: str) -> np.ndarray:
    series = [line[metric] for line in run.lines() if metric in line]
    return np.convolve(series, np.ones(WINDOW) / WINDOW, "valid")
