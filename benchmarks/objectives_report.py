"""Tables and plots of `objectives.py`.

Their inputs are metrics.jsonl of each run and the final weights, measured again (objectives_measure.py).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import matplotlib
import numpy as np

from torchtune_ext.telemetry.metrics import read_metrics

matplotlib.use("agg")
matplotlib.rcParams.update({"font.size": 8, "savefig.dpi": 144, "axes.spines.top": False, "axes.spines.right": False})

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

# 97.5% quantiles of Student's t by degrees of freedom, from 1; above 15 the value of 15, which is wider
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
LAST_STEPS = 10  # of which shares and lengths are the mean
STARTED = ("eval/reward_sampled", "eval/reward_greedy", "eval/pass_at_8")
CLIPPING = ("loss/clip_fraction", "loss/masked_fraction")
WINDOW = 5  # steps of the moving mean
REFERENCE = "grpo"
COLORS = {  # Okabe and Ito's color-blind safe palette
    "grpo": "#000000",
    "clip_higher": "#56B4E9",
    "dapo": "#0072B2",
    "atr_grpo 0.005": "#F5C710",
    "atr_grpo 0.02": "#E69F00",
    "atr_grpo 0.1": "#D55E00",
    "gspo": "#CC79A7",
    "cispo": "#009E73",
    "dr_grpo": "#8C564B",
    "length 0.3": "#999999",
    "maxrl": "#7F3C8D",
    "parts": "#A5AA99",
    "gdpo": "#3969AC",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One training of the comparison."""

    method: str
    updates: int  # optimizer updates on the samples of one step
    seed: int
    folder: Path
    words: tuple[str, ...]  # key=value that make the method, and what it is tried on
    staleness: int = 0  # versions between the policy that began a sample and the one that it trains

    @property
    def done(self) -> bool:
        return (self.folder / "done").is_file()


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one run."""

    run: Run
    values: dict[str, float]  # column -> value
    rewards: list[float]  # mean reward of every step's samples


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95% interval (Student's t); nan for one value."""
    if len(values) < 2:
        return values[0], math.nan
    return mean(values), T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))


def read(run: Run, start: Path) -> Result:
    lines = read_metrics(run.folder / "metrics.jsonl")
    last, steps = lines[-1], lines[1:]
    measured = run.folder / "measured.json"
    if not measured.is_file():
        # Imported after the runs, since torch and transformers take half a GB.
        from objectives_measure import measure

        measured.write_text(json.dumps(measure(run.folder, last["step"], start)))
    values = {
        "sampled": last["eval/reward_sampled"],
        "greedy": last["eval/reward_greedy"],
        "pass@8": last["eval/pass_at_8"],
        **json.loads(measured.read_text()),
        **{name: mean_over_steps(steps, name) for name in CLIPPING},
        "tokens": mean(line["length/mean"] for line in steps[-LAST_STEPS:]),
        "s/step": sorted(_learning_s(line) for line in steps)[len(steps) // 2],
    }
    return Result(run, values, [line["reward/mean"] for line in steps])


def mean_over_steps(steps: list[dict[str, float]], name: str) -> float:
    """Return the mean over steps with an update (not all groups zero-variance); nan without any."""
    values = [line[name] for line in steps if name in line]
    return mean(values) if values else math.nan


def _learning_s(line: dict[str, float]) -> float:
    """Return the seconds of a step without its evaluation and its checkpoint."""
    return line["time/step"] - line.get("time/eval", 0.0) - line.get("time/save", 0.0)


def group_results(results: list[Result], updates: int) -> dict[str, list[Result]]:
    """Return method -> its runs by seed, in the order of the plan."""
    methods: dict[str, list[Result]] = {}
    for result in results:
        if result.run.updates == updates:
            methods.setdefault(result.run.method, []).append(result)
    return methods


COLUMNS = {
    "sampled": ("sampled", 3),
    "greedy": ("greedy", 3),
    "pass@8": ("pass@8", 3),
    "entropy": ("entropy, nats/token", 3),
    "KL": ("KL to initial policy, nats/answer", 2),
    "loss/clip_fraction": ("`loss/clip_fraction`", 4),
    "loss/masked_fraction": ("`loss/masked_fraction`", 4),
    "tokens": ("tokens/answer", 2),
    "s/step": ("s/step", 2),
}
DIFFERENCES = ("sampled", "greedy", "pass@8", "entropy", "KL")


def table(methods: dict[str, list[Result]]) -> str:
    """Return the table: mean over seeds ± half of the 95% interval."""
    rows = [["method", "seeds", *(head for head, _ in COLUMNS.values())]]
    for method, results in methods.items():
        cells = [cell([r.values[name] for r in results], digits) for name, (_, digits) in COLUMNS.items()]
        rows.append([method, str(len(results)), *cells])
    return markdown(rows)


def paired_differences(methods: dict[str, list[Result]]) -> str:
    """Return paired_differences differences to grpo."""
    base = {r.run.seed: r.values for r in methods.get("grpo", [])}
    rows = [["method - grpo", "seeds", *(COLUMNS[name][0] for name in DIFFERENCES)]]
    for method, results in methods.items():
        pairs = [(r.values, base[r.run.seed]) for r in results if r.run.seed in base]
        if method == "grpo" or not pairs:
            continue
        cells = [cell([a[name] - b[name] for a, b in pairs], COLUMNS[name][1], "+") for name in DIFFERENCES]
        rows.append([method, str(len(pairs)), *cells])
    return markdown(rows)


def cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Format the mean ± half of the 95% interval; the mean alone for one value."""
    center, half = interval(values)
    return f"{center:{sign}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def markdown(rows: list[list[str]]) -> str:
    """Format a Markdown table; the first row has the titles."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def report(results: list[Result]) -> str:
    """Return the tables, in Markdown."""
    first = read_metrics(results[0].run.folder / "metrics.jsonl")[0]
    start = ", ".join(f"{key.removeprefix('eval/')} {first[key]:.3f}" for key in STARTED)
    parts = [f"After the warm-up: {start}."]
    for updates in sorted({result.run.updates for result in results}):
        methods = group_results(results, updates)
        parts += [f"{updates} update{'s' if updates > 1 else ''} a batch:", table(methods), paired_differences(methods)]
    return "\n\n".join(parts) + "\n"


def band(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return steps, the mean over seeds of the smoothed reward, and its 95% interval."""
    length = min(len(r.rewards) for r in results)
    window = min(WINDOW, length)
    curves = np.array([np.convolve(r.rewards[:length], np.ones(window) / window, "valid") for r in results])
    center, half = zip(*(interval(list(column)) for column in curves.T), strict=True)
    steps, center, half = np.arange(window, length + 1), np.array(center), np.nan_to_num(half)
    return steps, center, center - half, center + half


def draw_curves(methods: dict[str, list[Result]], updates: int, path: Path) -> None:
    """Plot one panel for each method, with grpo's curve in the background."""
    names = [name for name in methods if name != REFERENCE] or [REFERENCE]
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.1 * columns, 1.75 * rows + 0.4), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        shown = {REFERENCE: methods.get(REFERENCE, []), name: methods[name]}
        for label, results in shown.items():
            if results:
                steps, center, low, high = band(results)
                axis.fill_between(steps, low, high, color=COLORS[label], alpha=0.18, linewidth=0)
                axis.plot(steps, center, color=COLORS[label], linewidth=1.3, label=label)
        axis.set_title(name, color=COLORS[name], fontweight="bold")
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.supxlabel("step")
    figure.supylabel("reward of the samples")
    updates_said = "1 update a batch (on-policy)" if updates == 1 else f"{updates} updates a batch"
    figure.suptitle(f"{updates_said}; black: grpo; bands: 95% over seeds; moving mean of {WINDOW} steps")
    save(figure, path)


def draw_finals(methods: dict[str, list[Result]], path: Path) -> None:
    """Plot final held-out accuracy against clip fraction and KL to the start; small dots are seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for axis, key, label in (
        (axes[0], "loss/clip_fraction", "clipped share of the labels (loss/clip_fraction)"),
        (axes[1], "KL", "KL to the initial policy, nats an answer"),
    ):
        for name, results in methods.items():
            x, y = ([r.values[column] for r in results] for column in (key, "sampled"))
            axis.scatter(x, y, s=8, color=COLORS[name], alpha=0.45, linewidths=0)
            axis.scatter(np.mean(x), np.mean(y), s=46, color=COLORS[name], label=name, edgecolors="white", zorder=3)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_xscale("symlog", linthresh=1e-3)
    axes[0].set_xlim(left=0)
    axes[0].set_ylabel("held-out accuracy, sampled")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def draw(results: list[Result], folder: Path) -> None:
    """Write curves_u*.png and finals_u*.png."""
    for updates in sorted({result.run.updates for result in results}):
        methods = group_results(results, updates)
        several = {name: runs for name, runs in methods.items() if len(runs) > 1} or methods
        draw_curves(several, updates, folder / f"curves_u{updates}.png")
        if updates > 1:
            draw_finals(several, folder / f"finals_u{updates}.png")
