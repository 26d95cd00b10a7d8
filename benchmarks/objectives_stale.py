"""Tables and the plot of `objectives.py --staleness`: how an objective is corrected for samples of an older policy.

A difference is between two runs of one seed, which share questions, sampling seeds, start and warm-up; its interval is
Student's t over the seeds. A cell says "not significant" if its interval includes 0. Of 20 such intervals around a true
difference of 0, one excludes 0 by chance.

In addition to objectives_report.py: the measured staleness of the tokens, since a sample that was still running at a weight
sync has fresher tokens than its group; the engine's log-probs against the log-probs of the trained policy (`mismatch/*`), which
on stale samples is the distance that the policy has moved since; and whether a run collapsed: its reward in the last
`LAST_STEPS` steps is below its reward in the first `LAST_STEPS` steps, or below half of its best.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from statistics import mean

import numpy as np
from objectives_report import LAST_STEPS, Result, Run, band, cell, interval, markdown, mean_over_steps, plt, save
from objectives_report import read as read_common

from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.telemetry.metrics import read_metrics

BASE = "decoupled"
MOVED = ("mismatch/mean_abs", "mismatch/ess")
COLUMNS = {  # name -> title, digits
    "sampled": ("sampled", 3),
    "greedy": ("greedy", 3),
    "reward": ("reward, all steps", 3),
    "entropy": ("entropy, nats/token", 3),
    "KL": ("KL to initial policy, nats/answer", 2),
    "mismatch/mean_abs": ("`mismatch/mean_abs`", 4),
    "mismatch/ess": ("`mismatch/ess`", 3),
    "loss/clip_fraction": ("`loss/clip_fraction`", 4),
    "age": ("token staleness", 2),
    "tokens": ("tokens/answer", 1),
}
DIFFERENCES = ("sampled", "greedy", "reward", "entropy", "KL", "mismatch/mean_abs")
COLORS = {  # Okabe and Ito's color-blind safe palette
    "decoupled": "#000000",
    "interpolated": "#0072B2",
    "TIS": "#009E73",
    "none": "#D55E00",
    "to the sampler": "#E69F00",
}


def read(run: Run, start: Path) -> Result:
    """Read the results of a run; `start`: the model after the warm-up."""
    result, steps = read_common(run, start), read_metrics(run.folder / "metrics.jsonl")[1:]
    more = {name: mean_over_steps(steps, name) for name in MOVED}
    more |= {"reward": mean(result.rewards), "age": token_age(run.folder)}
    return replace(result, values=result.values | more)


def token_age(folder: Path) -> float:
    """Return the mean staleness of the tokens of a run, in policy versions. Step i trains version i - 1."""
    ages = [
        step - 1 - sample.completion.versions
        for step, path in rollout_paths(folder).items()
        for group in read_rollouts(path)
        for sample in group.samples
    ]
    return float(np.concatenate(ages).mean())


def has_collapsed(rewards: Sequence[float]) -> bool:
    """Whether the reward of a run collapsed, as defined above."""
    sums = [mean(rewards[i : i + LAST_STEPS]) for i in range(max(1, len(rewards) - LAST_STEPS + 1))]
    return sums[-1] < max(sums[0], max(sums) / 2)


def table(results: list[Result]) -> str:
    """Return the table: mean over seeds ± half of the 95% interval."""
    rows = [["staleness", "method", "seeds", *(title for title, _ in COLUMNS.values()), "collapsed"]]
    for (age, method), method_results in group_results(results).items():
        cells = [cell([r.values[name] for r in method_results], digits) for name, (_, digits) in COLUMNS.items()]
        lost = sum(has_collapsed(r.rewards) for r in method_results)
        rows.append([str(age), method, str(len(method_results)), *cells, f"{lost} of {len(method_results)}"])
    return markdown(rows)


def differences(results: list[Result], to_age: int | None) -> str:
    """Return paired differences to the decoupled objective at the same staleness, or at staleness `to_age`."""
    methods = group_results(results)
    what = "to decoupled" if to_age is None else f"to decoupled at staleness {to_age}"
    rows = [["staleness", "method", f"seeds, {what}", *(COLUMNS[name][0] for name in DIFFERENCES)]]
    for (age, method), method_results in methods.items():
        beside = (age if to_age is None else to_age, BASE)
        base = {r.run.seed: r.values for r in methods.get(beside, [])}
        pairs = [(r.values, base[r.run.seed]) for r in method_results if r.run.seed in base]
        if pairs and (age, method) != beside:
            cells = [verdict([a[name] - b[name] for a, b in pairs], COLUMNS[name][1]) for name in DIFFERENCES]
            rows.append([str(age), method, str(len(pairs)), *cells])
    return markdown(rows)


def verdict(values: Sequence[float], digits: int) -> str:
    """Format a difference with its interval, and mark an interval that includes 0."""
    center, half = interval(values)
    remark = "one seed" if isnan(half) else "" if abs(center) > half else "not significant"
    return cell(values, digits, "+") + (f", {remark}" if remark else "")


def group_results(results: list[Result]) -> dict[tuple[int, str], list[Result]]:
    """Return (staleness, method) -> its runs by seed, ordered by staleness."""
    methods: dict[tuple[int, str], list[Result]] = {}
    for result in sorted(results, key=lambda result: result.run.staleness):
        methods.setdefault((result.run.staleness, result.run.method), []).append(result)
    return methods


def report(results: list[Result]) -> str:
    """Return the tables, in Markdown."""
    first = read_metrics(results[0].run.folder / "metrics.jsonl")[0]
    start = ", ".join(f"{how} {first[f'eval/reward_{how}']:.3f}" for how in ("sampled", "greedy"))
    parts = [f"After the warm-up: {start}.", table(results), differences(results, None), differences(results, 0)]
    return "\n\n".join(parts) + "\n"


def draw(results: list[Result], folder: Path) -> None:
    """Write stale.png: the training reward, one panel for each staleness."""
    methods = group_results(results)
    ages = sorted({age for age, _ in methods if age}) or [0]
    figure, axes = plt.subplots(
        1, len(ages), figsize=(3.6 * len(ages) + 1.2, 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, age in zip(axes.flat, ages, strict=True):
        lines = {"staleness 0": (methods.get((0, BASE), []), "#999999")}
        lines |= {method: (methods.get((age, method), []), color) for method, color in COLORS.items()}
        for label, (method_results, color) in lines.items():
            if method_results:
                steps, center, low, high = band(method_results)
                axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
                axis.plot(steps, center, color=color, linewidth=1.3, label=label)
        axis.set_title(f"staleness {age}")
        axis.set_xlabel("step")
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0, 0].set_ylabel("reward of the samples")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle("bands: 95% over seeds; moving mean of 5 steps")
    save(figure, folder / "stale.png")
