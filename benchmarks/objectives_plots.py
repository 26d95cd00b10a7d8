"""Plots of `objectives.py`: learning curves beside grpo's, and what is gained against what is clipped and moved."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from objectives_report import Result, grouped, interval

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"font.size": 8, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
)

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

WINDOW = 5  # steps of the moving mean
REFERENCE = "grpo"
COLOURS = {  # Okabe and Ito's, told apart by color-blind readers too
    "grpo": "#000000",
    "clip_higher": "#56B4E9",
    "dapo": "#0072B2",
    "atr_grpo 0.005": "#F5C710",
    "atr_grpo 0.02": "#E69F00",
    "atr_grpo 0.1": "#D55E00",
    "gspo": "#CC79A7",
    "cispo": "#009E73",
    "dr_grpo": "#8C564B",
}


def band(results: Sequence[Result]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, mean over seeds of the smoothed reward, and its 95% interval."""
    length = min(len(r.rewards) for r in results)
    window = min(WINDOW, length)
    curves = np.array([np.convolve(r.rewards[:length], np.ones(window) / window, "valid") for r in results])
    center, half = zip(*(interval(list(column)) for column in curves.T), strict=True)
    steps, center, half = np.arange(window, length + 1), np.array(center), np.nan_to_num(half)
    return steps, center, center - half, center + half


def draw_curves(methods: dict[str, list[Result]], updates: int, path: Path) -> None:
    """One panel for each method, with grpo's curve behind it."""
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
                axis.fill_between(steps, low, high, color=COLOURS[label], alpha=0.18, linewidth=0)
                axis.plot(steps, center, color=COLOURS[label], linewidth=1.3, label=label)
        axis.set_title(name, color=COLOURS[name], fontweight="bold")
        axis.grid(alpha=0.25, linewidth=0.5)
    figure.supxlabel("step")
    figure.supylabel("reward of the samples")
    updates_said = "1 update a batch (on-policy)" if updates == 1 else f"{updates} updates a batch"
    figure.suptitle(f"{updates_said}; black: grpo; bands: 95% over seeds; moving mean of {WINDOW} steps")
    save(figure, path)


def draw_finals(methods: dict[str, list[Result]], path: Path) -> None:
    """Held-out accuracy at the end against the share that was clipped, and against the KL moved; small dots are seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True, layout="constrained")
    for axis, key, label in (
        (axes[0], "loss/clip_fraction", "clipped share of the labels (loss/clip_fraction)"),
        (axes[1], "KL", "KL to the initial policy, nats an answer"),
    ):
        for name, results in methods.items():
            x, y = ([r.values[column] for r in results] for column in (key, "sampled"))
            axis.scatter(x, y, s=8, color=COLOURS[name], alpha=0.45, linewidths=0)
            axis.scatter(np.mean(x), np.mean(y), s=46, color=COLOURS[name], label=name, edgecolors="white", zorder=3)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_xscale("symlog", linthresh=1e-3)
    axes[0].set_xlim(left=0)
    axes[0].set_ylabel("held-out accuracy, sampled")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(results: list[Result], folder: Path) -> None:
    """Writes curves_u*.svg and finals_u*.svg."""
    for updates in sorted({result.run.updates for result in results}):
        methods = grouped(results, updates)
        several = {name: runs for name, runs in methods.items() if len(runs) > 1} or methods
        draw_curves(several, updates, folder / f"curves_u{updates}.svg")
        if updates > 1:
            draw_finals(several, folder / f"finals_u{updates}.svg")
