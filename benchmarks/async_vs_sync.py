"""What does sampling while the trainer works gain over taking turns, on two cores, with answers of very different lengths?

    python benchmarks/async_vs_sync.py --out runs/async_vs_sync [--repeats 3] [--grpo max_steps=60 ...]

`grpo/tiny_arithmetic` on few long sums among many short ones: half of the answers have 2 to 5 tokens, one in a hundred has
more than 20. Four arms train on the same questions with as many samples: staleness 0 (sync) and 1 (async), with one core for
the engine and the other for the trainer and its graders, and with both cores for all of them. On a CPU the engine computes
in one thread, so that only the trainer can use two cores for one computation. Repeat i has the seed i; the arms of a repeat
follow one another, in another order in each. Runs that have ended are not made again.

Seconds are from the beginning of the first step to the end of the last, without start-up. Accuracy is the mean reward of 5
steps: of the policy that sampled, in an asynchronous run the one before. The one to reach is the highest that every arm of
the repeat reaches. The trainer's steps are compared where each side has a core: seconds of `time/train` for a packed token,
without the first step, which loads libraries, and the last one, which has no producer beside it. What a producer costs there
is the work of the engine's client and of the graders on the trainer's core, the interpreter's lock, and caches and memory.
"""

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import psutil
from objectives import tune
from tiny_runs import command, environment

from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

LEVELS = "task.level={3: 6, 8: 1, 9: 1}"
WARM_UP = (
    "--config",
    "warmup/tiny_fp8",
    "num_problems=24000",
    LEVELS,
)  # its model is large enough to give the trainer work
TRAINING = (
    *("evaluation.task=null", "checkpoints.every=1000000"),  # neither takes time away from the steps
    *("prompts_per_step=64", "updates_per_step=4", "max_steps=60", LEVELS),
    *("sampling.max_tokens=128", "engine.max_model_len=192"),
)
ARMS = {  # name -> staleness, and whether each side has one core
    "sync, a core each": (0, True),
    "async, a core each": (1, True),
    "sync, both cores": (0, False),
    "async, both cores": (1, False),
}
SYNC_PINNED, ASYNC_PINNED, SYNC, ASYNC = ARMS
POLL_S = 0.5  # seconds between two looks at the clocks of a run
LIMIT_S = 3600.0  # seconds after which a run is given up
SMOOTH = 5  # steps of the moving mean of the reward


@dataclass(frozen=True, slots=True)
class Run:
    """What a training left behind."""

    steps: list[dict[str, float]]  # its metrics, a record for each step
    busy: dict[str, float]  # side -> its CPU seconds in a second, from the second step to the last but one
    lengths: list[int]  # tokens of the completions of the first step, ascending

    def mean(self, name: str) -> float:
        return fmean(step.get(name, 0.0) for step in self.steps)

    def train_us(self) -> float:
        """Microseconds of training for a packed token."""
        inner = self.steps[1:-1]
        return 1e6 * sum(step["time/train"] for step in inner) / sum(step["pack/tokens"] for step in inner)

    def seconds(self, steps: int | None = None) -> float:
        return sum(step["time/step"] for step in self.steps[:steps])

    def accuracies(self) -> list[float]:
        """The moving mean of the reward; the first one is that of the first `SMOOTH` steps."""
        rewards = [step["reward/mean"] for step in self.steps]
        return [fmean(rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(rewards) + 1)]

    def seconds_to(self, accuracy: float) -> float:
        """Seconds until the moving mean is first as high as this. Raises StopIteration where it never is."""
        return self.seconds(SMOOTH + next(i for i, value in enumerate(self.accuracies()) if value >= accuracy))


def cpu_seconds(pid: int, engine_core: int | None) -> dict[str, float]:
    """CPU seconds of the sides of a run until now. Keeps the engine's threads on `engine_core`, unless it is None.

    Returns:
        "engine"; "trainer": its process with the graders; "serving": the threads of the trainer beside the main one.

    Raises:
        psutil.Error, OSError: a process or a thread has ended meanwhile.
    """
    trainer = psutil.Process(pid)
    children = trainer.children(recursive=True)
    engines = [child.pid for child in children if "torchtune_ext.sampling.core_process" in child.cmdline()]
    spent = {"engine": 0.0, "trainer": sum(trainer.cpu_times()[:2])}
    spent["serving"] = sum(thread.user_time + thread.system_time for thread in trainer.threads() if thread.id != pid)
    for child in children:
        of_engine = os.getsid(child.pid) in engines  # the engine begins a session, and its own children are in it
        spent["engine" if of_engine else "trainer"] += sum(child.cpu_times()[:2])
        if of_engine and engine_core is not None:
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {engine_core})
    return spent


def train(arm: str, repeat: int, folder: Path, model: Path, settings: Sequence[str]) -> None:
    """Runs the recipe and reads its clocks meanwhile; leaves busy.json in its folder.

    Raises:
        RuntimeError: the run failed, took too long, or was over before its engine was seen at work.
    """
    staleness, pinned = ARMS[arm]
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = cores[:1] if pinned else cores
    words = [f"output_dir={folder}", f"model_dir={model}", f"staleness={staleness}", f"seed={repeat}", *settings]
    recipe = command("grpo_async", *words, f"task.seed={100 + repeat}", config="grpo/tiny_arithmetic")
    env = environment() | {"OMP_NUM_THREADS": str(len(own)), "GOMP_SPINCOUNT": "10000"}  # as scripts/quickstart.sh
    readings: dict[int, tuple[float, dict[str, float]]] = {}  # steps that are over -> the first reading then
    log, metrics, deadline = folder.with_suffix(".log"), folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    with log.open("w") as out:
        taskset = ["taskset", "--cpu-list", ",".join(map(str, own))]
        process = subprocess.Popen([*taskset, *recipe], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            with suppress(psutil.Error, OSError):  # a process has ended meanwhile: the next reading is as good
                spent = cpu_seconds(process.pid, cores[1] if pinned else None)
                done = metrics.read_text().count('"time/step"') if metrics.exists() else 0
                readings.setdefault(done, (time.monotonic(), spent))
    finally:
        process.terminate()  # after a deadline or Ctrl-C, and its engine ends with it; else it has ended
        status = process.wait(120)
    if status:
        raise RuntimeError(f"{arm}, repeat {repeat}: exit status {status} (the limit is {LIMIT_S:.0f} s), see {log}")
    window = [readings[done] for done in sorted(readings) if 0 < done < max(readings)]
    if len(window) < 2 or not window[-1][1]["engine"] > window[0][1]["engine"]:
        raise RuntimeError(f"{arm}, repeat {repeat}: no engine was seen at work between two steps, raise max_steps")
    (begin, before), (end, after) = window[0], window[-1]
    (folder / "busy.json").write_text(
        json.dumps({side: (after[side] - before[side]) / (end - begin) for side in before})
    )


def read(folder: Path) -> Run:
    steps = [line for line in read_metrics(folder / "metrics.jsonl") if "time/step" in line]
    first = read_rollouts(next(iter(rollout_paths(folder).values())))
    lengths = sorted(len(sample.completion.tokens) for group in first for sample in group.samples)
    return Run(steps, json.loads((folder / "busy.json").read_text()), lengths)


def spread(values: Sequence[float], form: str, middle: float | None = None) -> str:
    """The median, or `middle`, with the smallest and the largest value."""
    return f"{median(values) if middle is None else middle:{form}} ({min(values):{form}}..{max(values):{form}})"


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The ratio of the medians, with the smallest and the largest ratio of two runs of one repeat."""
    return spread([a / b for a, b in zip(above, below, strict=True)], ".3f", median(above) / median(below))


def report(runs: dict[str, list[Run]]) -> str:
    """The tables. `runs`: those of each arm, one for each repeat."""
    goals = [min(max(run.accuracies()) for run in repeat) for repeat in zip(*runs.values(), strict=True)]
    steps = {arm: [run.seconds() for run in found] for arm, found in runs.items()}
    reached = {
        arm: [run.seconds_to(goal) for run, goal in zip(found, goals, strict=True)] for arm, found in runs.items()
    }
    head = "arm | seconds, all steps | to the accuracy | accuracy at the end | waits for samples, s/step | trains, s/step | "
    head += "us/token | cores busy: engine | trainer | of it, serving | age, mean | max | tokens thrown away"
    table, faster = (
        [head, "|".join("---" for _ in head.split(" | "))],
        ["times faster | all steps | to the accuracy", "---|---|---"],
    )
    for arm, found in runs.items():
        cells = [arm, spread(steps[arm], ".1f"), spread(reached[arm], ".1f")]
        cells += [spread([run.accuracies()[-1] for run in found], ".3f")]
        cells += [spread([run.mean(f"time/{phase}") for run in found], ".3f") for phase in ("sample", "train")]
        cells += [spread([run.train_us() for run in found], ".0f")]
        cells += [spread([run.busy[side] for run in found], ".2f") for side in ("engine", "trainer", "serving")]
        cells += [spread([run.mean("async/age_mean") for run in found], ".2f")]
        for name in ("async/age_max", "async/dropped_tokens"):
            cells.append(f"{max(step.get(name, 0.0) for run in found for step in run.steps):.0f}")
        table.append(" | ".join(cells))
    for fast, slow in ((ASYNC_PINNED, SYNC_PINNED), (ASYNC_PINNED, SYNC), (ASYNC, SYNC), (SYNC, SYNC_PINNED)):
        faster.append(
            f"{fast}, over {slow} | {ratio(steps[slow], steps[fast])} | {ratio(reached[slow], reached[fast])}"
        )
    lengths = runs[SYNC_PINNED][0].lengths
    quantiles = [f"{share}% up to {lengths[share * (len(lengths) - 1) // 100]}" for share in (50, 75, 90, 99, 100)]
    costs = ratio(*([run.train_us() for run in runs[arm]] for arm in (ASYNC_PINNED, SYNC_PINNED)))
    begun = spread([run.accuracies()[0] for run in runs[SYNC_PINNED]], ".3f")
    lines = [*(f"| {line} |" for line in table), "", *(f"| {line} |" for line in faster), ""]
    lines += [f"Training on a token takes {costs} times as long with a producer as without, a core each."]
    lines += [f"The accuracy to reach: {', '.join(f'{goal:.3f}' for goal in goals)}; in the first steps {begun}."]
    return "\n".join([*lines, f"Tokens of a completion in the first step: {', '.join(quantiles)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async_vs_sync"))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm, with the seeds 0, 1, ...")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("this process may use one core: allow it two (taskset), one for each side")
    warm = args.out / "warmup"
    if not (warm / "done").is_file():
        tune(args.out / "warmup.txt", 1, "warmup_sft", *WARM_UP, f"output_dir={warm}")
        (warm / "done").touch()
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for repeat in range(args.repeats):
        for arm in random.Random(repeat).sample(list(ARMS), len(ARMS)):
            folder = args.out / f"{arm.replace(',', '').replace(' ', '_')}_{repeat}"
            if not (folder / "busy.json").is_file():
                train(arm, repeat, folder, warm / "model", [*TRAINING, *args.grpo])
            runs[arm].append(read(folder))
            print(f"{folder.name}: {runs[arm][-1].seconds():.0f} s", flush=True)
    print(report(runs))


if __name__ == "__main__":
    main()
