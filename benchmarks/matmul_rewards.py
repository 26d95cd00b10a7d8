"""Rewards after normalization by group: the published tiers against the tiers of measured/matmul.

    python benchmarks/matmul_rewards.py --out docs/how_to/matmul_rewards.png

Nothing is trained or timed. Two groups of 16 programs are graded by each kind of reward (measured/matmul/rewards.py) and get
advantages as in a run of `preset: grpo` (pipeline/advantages.py: reward minus group mean, over the group's standard deviation).
The groups differ in one program: it is as fast as the naive program in the first, and has 549 GFLOPS, the best speed that the
paper reports, in the second. The frequency of each outcome is an assumption: a model that mostly fails. The speed of the naive
program and the peak are assumptions, too, and the first printed line states them. The second table and the lower plots show
some distances for other speeds of that one program.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from torchtune_ext.measured.matmul.rewards import REWARD_KINDS, program_reward
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem, Score

NAIVE, PEAK = 2.0, 1000.0  # GFLOPS of the naive program on one core, and of all cores together
FASTEST = 549.0  # GFLOPS, the best that was published
SLOW, OTHER = "ok, naive speed", "ok, the one that differs"
# Outcome -> number of programs, from the worst. One more program, OTHER, makes 16.
SHARES = {
    "format": 1,
    "forbidden": 1,
    "compile_error": 4,
    "timeout": 1,
    "runtime_error": 1,
    "wrong_result": 5,
    SLOW: 2,
}
SIZE = sum(SHARES.values()) + 1
# The distances that a model needs: from the worst failure to the best, from not compiling to compiling, and from a
# wrong number to a right one.
DISTANCES = {
    "wrong result above format": ("format", "wrong_result"),
    "wrong result above compile error": ("compile_error", "wrong_result"),
    "right but slow above wrong result": ("wrong_result", SLOW),
}
SPEEDS = (NAIVE, 8.0, 32.0, 128.0, FASTEST, PEAK)
COLORS = {"published": "#D55E00", "log_speedup": "#0072B2", "peak_share": "#009E73"}


def rewards(kind: str, fastest: float) -> dict[str, float]:
    """Return the reward of each outcome. `fastest` is the speed of the program OTHER, in GFLOPS."""

    def success(gflops: float) -> float:
        speed = SimpleNamespace(gflops=gflops, speedup=gflops / NAIVE, roofline_fraction=gflops / PEAK)
        return program_reward("ok", speed, kind)

    values = {outcome: program_reward(outcome, kind=kind) for outcome in SHARES if outcome != SLOW}
    return values | {SLOW: success(NAIVE), OTHER: success(fastest)}


def advantages(kind: str, fastest: float) -> dict[str, float]:
    """Return the advantage of each outcome in the group."""
    of = rewards(kind, fastest)
    outcomes = [outcome for outcome, count in (SHARES | {OTHER: 1}).items() for _ in range(count)]
    answer = Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    samples = tuple(Sample(answer, outcome=Score(of[outcome], {})) for outcome in outcomes)
    group = Group(Problem("dgemm", (), None), np.zeros(1, np.int32), samples)
    ((group,), _) = assign_advantages([group], AdvantageConfig())
    return {outcome: sample.advantage for outcome, sample in zip(outcomes, group.samples, strict=True)}


def distance(kind: str, name: str, fastest: float) -> float:
    """Return the difference in advantage between the two outcomes of a line of DISTANCES."""
    worse, better = DISTANCES[name]
    values = advantages(kind, fastest)
    return values[better] - values[worse]


def outcomes_table() -> str:
    """Return the reward of each outcome, and its advantage without and with the fastest program."""
    heads = [
        f"{kind}: {word}" for kind in REWARD_KINDS for word in ("reward", f"{NAIVE:g} GFLOPS", f"{FASTEST:g} GFLOPS")
    ]
    lines = [f"| outcome | of {SIZE} | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    columns = {
        kind: (rewards(kind, FASTEST), advantages(kind, NAIVE), advantages(kind, FASTEST)) for kind in REWARD_KINDS
    }
    for outcome, count in (SHARES | {OTHER: 1}).items():
        cells = []
        for of, without, with_it in columns.values():
            cells += [f"{of[outcome]:.3g}", f"{without[outcome]:+.2f}", f"{with_it[outcome]:+.2f}"]
        lines.append(f"| {outcome} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def distances_table(speeds: Sequence[float] = SPEEDS) -> str:
    """Return the distances by the speed of the fastest program."""
    heads = [f"{speed:g} GFLOPS" for speed in speeds]
    lines = [f"| distance in advantage | reward | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for name in DISTANCES:
        for kind in REWARD_KINDS:
            cells = [f"{distance(kind, name, speed):.2f}" for speed in speeds]
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Plot both tables."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(8.6, 5.8), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.15, 1])
    outcomes = [*SHARES, OTHER]
    places = range(len(outcomes))
    axes = above.subplots(1, len(REWARD_KINDS), sharex=True, sharey=True)
    for axis, kind in zip(axes, REWARD_KINDS, strict=True):
        without, with_it = advantages(kind, NAIVE), advantages(kind, FASTEST)
        axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        for place, outcome in zip(places, outcomes, strict=True):
            axis.plot([without[outcome], with_it[outcome]], [place, place], color="0.85", linewidth=1, zorder=0)
        plain = {"linestyle": "none", "marker": "o", "markersize": 5, "color": COLORS[kind]}
        axis.plot([without[name] for name in outcomes], places, **plain, markerfacecolor="white")
        axis.plot([with_it[name] for name in outcomes], places, **plain)
        axis.set_title(kind, color=COLORS[kind], fontweight="bold")
        axis.set_xlabel("advantage")
    axes[0].set_yticks(places, [name.replace("_", " ") for name in outcomes])
    above.suptitle(
        f"a group of {SIZE} programs: one has {NAIVE:g} GFLOPS, like the naive program (open), or {FASTEST:g} (filled)"
    )
    curve = np.geomspace(SPEEDS[0], SPEEDS[-1], 60)
    axes = below.subplots(1, len(DISTANCES), sharey=True)
    for axis, name in zip(axes, DISTANCES, strict=True):
        for kind in REWARD_KINDS:
            axis.plot(curve, [distance(kind, name, speed) for speed in curve], color=COLORS[kind], label=kind)
        axis.axvline(FASTEST, color="0.8", linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        axis.set_xticks(SPEEDS[:-1], [f"{speed:g}" for speed in SPEEDS[:-1]])
        axis.minorticks_off()
        axis.set_title(name)
        axis.set_xlabel("GFLOPS of the one that differs")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("distance in advantage")
    axes[-1].legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="path of the plot, for instance docs/how_to/matmul_rewards.png")
    args = parser.parse_args()
    print(f"Naive program {NAIVE:g} GFLOPS, peak {PEAK:g}; the one that differs has {NAIVE:g} or {FASTEST:g}.\n")
    print(f"{outcomes_table()}\n\n{distances_table()}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw(args.out)


if __name__ == "__main__":
    main()
