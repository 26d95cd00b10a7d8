"""Problem selection near the policy's level: accuracy gain at equal samples and at equal seconds.

    python benchmarks/selection.py --out runs/selection [--problems clue] [--seeds 0 1 2 3 4] [--steps 100]

A small model is warmed up on problems of several levels, and trained on all of them: with uniform levels (`none`), with more
problems from levels with reward variance (`NearLevel`), and with uniform levels where zero-variance groups are sampled again
(`refill`, as in DAPO). Held-out questions cover all levels equally, and are the same for all arms. The problems are worked
arithmetic of eight levels, from 7+5= to long expressions, or the puzzles of the quickstart, whose four sizes are the levels,
32 of them per step. Curves are read where an arm has as many samples, or as many seconds of steps (without evaluation), as
`none` at its end. Each seed has its own warm-up. Completed runs are read, not repeated.
"""

import argparse
import itertools
import json
from collections import defaultdict
from pathlib import Path

from learning import tune
from objectives_report import interval

from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.telemetry.metrics import read_metrics

CONFIGS = {"arithmetic": "tiny_arithmetic", "clue": "tiny"}
# Eight levels need more examples than the single level of the config.
WARMUP = {"arithmetic": ["task.level=[1,2,3,4,5,6,7,8]", "num_problems=192000"], "clue": []}
LEVELS = {
    "arithmetic": [{"level": level} for level in range(1, 9)],
    "clue": [
        {"size": {"suspects": suspects, "weapons": 2, "rooms": rooms, "clues": ["direct"]}}
        for suspects in (2, 3)
        for rooms in (2, 3)
    ],
}
TASKS = {
    "arithmetic": "torchtune_ext.tasks.arithmetic.Arithmetic",
    "clue": "torchtune_ext.tasks.temporal_clue.TemporalClue",
}
# Overrides: held-out questions, room for the longest answers, as many groups per update as the config.
WORDS = {
    "arithmetic": [
        *(
            "~task.level",
            "evaluation.task.level=[1,2,3,4,5,6,7,8]",
            "sampling.max_tokens=32",
            "engine.max_model_len=96",
        ),
    ],
    "clue": [
        *("~task.size", "evaluation.task.size={suspects: [2,3], weapons: 2, rooms: [2,3], clues: [direct]}"),
        *("prompts_per_step=32", "updates_per_step=1"),
    ],
}
ARMS = {"none": ["task.floor=1.0"], "selection": [], "refill": ["task.floor=1.0", "refill_rounds=2"]}
SAMPLES = 8  # of a problem
EVERY = {"arithmetic": 10, "clue": 20}  # steps between two evaluations


def run(out: Path, problems: str, arm: str, seed: int, steps: int) -> Path:
    """Return the folder of a run; run it if it is missing."""
    warm, folder = out / f"warmup_{seed}", out / f"{arm}_{seed}"
    config, levels = CONFIGS[problems], json.dumps(LEVELS[problems]).replace('"', "")
    tune(warm, 1, "warmup_sft", "--config", f"warmup/{config}", f"seed={seed}", *WARMUP[problems])
    words = ["--config", f"grpo/{config}", f"model_dir={warm}/model", f"seed={seed}", f"max_steps={steps}"]
    words += ["task._component_=torchtune_ext.tasks.selection.NearLevel", "~task.seed"]
    words += [f"task.task={TASKS[problems]}", "task.settings={seed: 2}", f"task.levels={levels}"]
    words += [f"evaluation.every={EVERY[problems]}", "evaluation.task.count=512"]
    tune(folder, 1, "grpo_full", *words, *WORDS[problems], *ARMS[arm])
    return folder


def curve(folder: Path) -> list[tuple[int, float, float]]:
    """Return (samples, seconds of the steps, held-out accuracy) at each evaluation."""
    points, samples, seconds = [], 0, 0.0
    for line in read_metrics(folder / "metrics.jsonl"):
        if line["step"]:
            samples += round(SAMPLES * (line["groups/used"] + line["groups/no_signal"]))
            seconds += line["time/step"] - line.get("time/eval", 0.0)
        if "eval/reward_sampled" in line:
            points.append((samples, seconds, line["eval/reward_sampled"]))
    return points


def at(points: list[tuple[int, float, float]], column: int, place: float) -> float:
    """Return the accuracy at a point of a curve, by linear interpolation, clamped at its end."""
    for before, after in itertools.pairwise(points):
        if before[column] <= place <= after[column]:
            share = (place - before[column]) / max(1e-9, after[column] - before[column])
            return before[2] + share * (after[2] - before[2])
    return points[-1][2]


def signals(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (groups with reward variance, groups) by level, and in total."""
    counts = defaultdict(lambda: (0, 0))
    for path in rollout_paths(folder).values():
        for group in read_rollouts(path):
            for name in (group.problem.id.partition("/")[0], "all"):
                counts[name] = counts[name][0] + group.has_nonzero_advantage, counts[name][1] + 1
    return counts


def spread(values: list[float]) -> str:
    """Format the mean with Student's 95% interval over seeds."""
    mean, half = interval(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--problems", choices=CONFIGS, default="arithmetic")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    runs = {(seed, arm): run(args.out, args.problems, arm, seed, args.steps) for seed in args.seeds for arm in ARMS}
    folders = {arm: [runs[seed, arm] for seed in args.seeds] for arm in ARMS}
    curves = {arm: [curve(folder) for folder in each] for arm, each in folders.items()}
    print(
        "| arm | accuracy before | at equal samples | minus none | at equal time | minus none | "
        "groups with nonzero variance |"
    )
    print("|---|---|---|---|---|---|---|")
    counts = {arm: [signals(folder) for folder in each] for arm, each in folders.items()}
    for arm, runs in curves.items():
        cells = [spread([points[0][2] for points in runs])]
        for column in (0, 1):
            ends = [(points[-1][column], points[-1][2]) for points in curves["none"]]
            values = [at(points, column, place) for points, (place, _) in zip(runs, ends, strict=True)]
            cells += [spread(values), spread([value - base for value, (_, base) in zip(values, ends, strict=True)])]
        cells.append(spread([each["all"][0] / each["all"][1] for each in counts[arm]]))
        print(f"| {arm} | " + " | ".join(cells) + " |")
    levels = sorted(name for name in counts["none"][0] if name != "all")
    print("\n| groups with nonzero variance (share of all groups) | " + " | ".join(levels) + " |")
    print("|---|" + "---|" * len(levels))
    for arm in ARMS:
        cells = []
        for level in levels:
            good, count, everything = (
                sum(x) for x in zip(*((*c[level], c["all"][1]) for c in counts[arm]), strict=True)
            )
            cells.append(f"{good / max(1, count):.2f} ({count / everything:.2f})")
        print(f"| {arm} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
