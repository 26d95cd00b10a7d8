"""What does sampling while the trainer works gain over taking turns, on two cores, with answers of very different lengths?

    python benchmarks/async_vs_sync.py --out runs/async_vs_sync [--repeats 3] [--grpo max_steps=60 ...]

`grpo/tiny_async` from a model that was warmed up on few puzzles: it does not end some of its answers for a long time. Four arms
train on the same puzzles with the same number of samples: staleness 0 (sync) and 1 (async), once with one core for the engine
and the other one for the trainer with its graders, and once with both cores for all of them. On a CPU the engine computes in
one thread in every arm, so that only the trainer can use two cores for one computation. Repeat i has the seed i. The arms of
a repeat follow one another, in another order in each. Runs that have ended are not made again.

Seconds are from the beginning of the first step to the end of the last, without start-up. Accuracy is the mean reward of the
samples, over 5 steps; the puzzles are endless, so each sample is of one that no step had before. It is that of the policy
that sampled, which in an asynchronous run is the one before. The accuracy to reach is the highest that all arms of a repeat
reach. The trainer's step is compared between the two arms with a core each: seconds of `time/train` for a packed token, in the steps
with a producer beside them (not the last one, and not the first, which loads libraries).
"""

import argparse
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import psutil
from objectives import tune
from tiny_runs import command, environment

from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths

WARM_UP = ("num_problems=1400",)
TRAINING = (
    *("evaluation.task=null", "checkpoints.every=1000000"),  # neither takes time away from the steps
    *("prompts_per_step=32", "updates_per_step=2", "max_steps=60", "sampling.max_tokens=128"),
)
ENGINE = "torchtune_ext.sampling.core_process"
POLL_S = 0.25  # seconds between two looks at the clocks of a run
LIMIT_S = 3600.0  # seconds after which a run is given up
SMOOTH = 5  # steps of the moving mean of the reward


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to use the two cores."""

    staleness: int
    pinned: bool  # True: one core for each side

    @property
    def name(self) -> str:
        return f"{'async' if self.staleness else 'sync'}, {'a core each' if self.pinned else 'both cores'}"

    @property
    def folder(self) -> str:
        return self.name.replace(", ", "_").replace(" ", "_")


ARMS = [Arm(staleness, pinned) for pinned in (True, False) for staleness in (0, 1)]
SYNC_PINNED, ASYNC_PINNED, SYNC, ASYNC = ARMS


@dataclass(frozen=True, slots=True)
class Run:
    """What a training left behind."""

    steps: list[dict[str, float]]  # its metrics, a record for each step
    busy: dict[str, float]  # side -> CPU seconds in a second; the window ends where the last step begins
    lengths: list[int]  # tokens of the completions of the first step, ascending

    def total(self, name: str, begin: int = 0, end: int | None = None) -> float:
        return sum(step[name] for step in self.steps[begin:end])

    def mean(self, name: str) -> float:
        return fmean(step.get(name, 0.0) for step in self.steps)

    @property
    def seconds(self) -> float:
        return self.total("time/step")

    @property
    def train_s_per_token(self) -> float:
        return self.total("time/train", 1, -1) / self.total("pack/tokens", 1, -1)

    @property
    def accuracies(self) -> list[float]:
        """The moving mean of the reward; the first one is that of the first `SMOOTH` steps."""
        rewards = [step["reward/mean"] for step in self.steps]
        return [fmean(rewards[end - SMOOTH : end]) for end in range(SMOOTH, len(rewards) + 1)]

    def seconds_to(self, accuracy: float) -> float:
        """Seconds until the moving mean is first as high as this. Raises StopIteration where it never is."""
        reached = next(i for i, value in enumerate(self.accuracies) if value >= accuracy)
        return self.total("time/step", 0, reached + SMOOTH)


def cpu_seconds(pid: int, engine_core: int | None) -> dict[str, float]:
    """CPU seconds of the sides of a run until now, by /proc. Keeps all threads of the engine on `engine_core`, unless it is None.

    Returns:
        "engine"; "trainer": its process with the graders; "serving": the threads of the trainer beside the main one.

    Raises:
        psutil.Error, ProcessLookupError: a process or a thread has ended meanwhile.
    """
    trainer = psutil.Process(pid)
    children = trainer.children(recursive=True)
    engines = [child.pid for child in children if ENGINE in child.cmdline()]
    main = next(thread for thread in trainer.threads() if thread.id == pid)
    spent = {"engine": 0.0, "trainer": sum(trainer.cpu_times()[:2])}
    spent["serving"] = spent["trainer"] - main.user_time - main.system_time
    for child in children:
        of_engine = os.getsid(child.pid) in engines  # the engine begins a session, and its own children are in it
        spent["engine" if of_engine else "trainer"] += sum(child.cpu_times()[:2])
        if of_engine and engine_core is not None:
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {engine_core})
    return spent


def train(arm: Arm, repeat: int, folder: Path, model: Path, settings: Sequence[str]) -> None:
    """Runs the recipe and reads its clocks meanwhile; leaves busy.json in its folder.

    Raises:
        RuntimeError: the run failed, took too long, or was over before its engine was seen at work.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = cores[:1] if arm.pinned else cores
    words = [f"output_dir={folder}", f"model_dir={model}", f"staleness={arm.staleness}", f"seed={repeat}"]
    recipe = command("grpo_async", *words, f"task.seed={100 + repeat}", *settings, config="grpo/tiny_async")
    env = environment() | {"OMP_NUM_THREADS": str(len(own)), "GOMP_SPINCOUNT": "10000"}  # as scripts/quickstart.sh
    readings: dict[int, tuple[float, dict[str, float]]] = {}  # steps that are over -> the first reading then
    log, metrics = folder.with_suffix(".log"), folder / "metrics.jsonl"
    with log.open("w") as out:
        taskset = ["taskset", "--cpu-list", ",".join(map(str, own))]
        process = subprocess.Popen([*taskset, *recipe], env=env, stdout=out, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            with suppress(
                psutil.Error, ProcessLookupError
            ):  # a process has ended meanwhile: the next reading is as good
                spent = cpu_seconds(process.pid, cores[1] if arm.pinned else None)
                done = metrics.read_text().count('"time/step"') if metrics.exists() else 0
                readings.setdefault(done, (time.monotonic(), spent))
    finally:
        process.terminate()  # it has ended, but for a deadline or Ctrl-C; the engine goes with it
        status = process.wait(60)
    if status:
        raise RuntimeError(f"{arm.name}, repeat {repeat}: exit status {status}, see {log}")
    window = [readings[done] for done in sorted(readings) if 0 < done < max(readings)]
    if len(window) < 2 or not window[-1][1]["engine"] > window[0][1]["engine"]:
        raise RuntimeError(
            f"{arm.name}, repeat {repeat}: too short to be measured (raise max_steps), or without an engine"
        )
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


def ratio(above: Sequence[float], below: Sequence[float], form: str = ".2f") -> str:
    """The ratio of the medians, with the smallest and the largest ratio of two runs of one repeat."""
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    return spread(pairs, form, median(above) / median(below))


def report(runs: dict[Arm, list[Run]]) -> str:
    """The tables. `runs`: those of each arm, one for each repeat."""
    repeats = list(zip(*runs.values(), strict=True))
    targets = [min(max(run.accuracies) for run in repeat) for repeat in repeats]
    reached = {
        arm: [run.seconds_to(goal) for run, goal in zip(found, targets, strict=True)] for arm, found in runs.items()
    }
    columns: dict[str, Callable[[Arm], str]] = {
        "arm": lambda arm: arm.name,
        "seconds, all steps": lambda arm: spread([run.seconds for run in runs[arm]], ".0f"),
        "to the accuracy": lambda arm: spread(reached[arm], ".0f"),
        "accuracy at the end": lambda arm: spread([run.accuracies[-1] for run in runs[arm]], ".3f"),
        "waits for samples, s/step": lambda arm: spread([run.mean("time/sample") for run in runs[arm]], ".2f"),
        "trains, s/step": lambda arm: spread([run.mean("time/train") for run in runs[arm]], ".2f"),
        "cores busy: engine": lambda arm: spread([run.busy["engine"] for run in runs[arm]], ".2f"),
        "trainer": lambda arm: spread([run.busy["trainer"] for run in runs[arm]], ".2f"),
        "of it, serving": lambda arm: spread([run.busy["serving"] for run in runs[arm]], ".2f") if arm.pinned else "",
        "age, mean": lambda arm: spread([run.mean("async/age_mean") for run in runs[arm]], ".2f"),
        "age, max": lambda arm: f"{max(step.get('async/age_max', 0.0) for run in runs[arm] for step in run.steps):.0f}",
        "tokens thrown away": lambda arm: (
            f"{sum(run.steps[-1].get('async/dropped_tokens', 0.0) for run in runs[arm]):.0f}"
        ),
    }
    lines = [" | ".join(columns), "|".join("---" for _ in columns)]
    lines += [" | ".join(cell(arm) for cell in columns.values()) for arm in runs]
    lines += ["", "how many times faster | all steps | to the accuracy", "---|---|---"]
    for fast, slow in ((ASYNC_PINNED, SYNC_PINNED), (ASYNC, SYNC), (ASYNC_PINNED, SYNC), (SYNC, SYNC_PINNED)):
        steps = ratio([run.seconds for run in runs[slow]], [run.seconds for run in runs[fast]])
        lines.append(f"{fast.name} / {slow.name} | {steps} | {ratio(reached[slow], reached[fast])}")
    tables = "\n".join(f"| {line} |" if line else "" for line in lines)
    lengths = runs[SYNC][0].lengths
    at = {f"{share:.0%}": lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.75, 0.9, 0.99, 1.0)}
    cost = ratio(*([1e6 * run.train_s_per_token for run in runs[arm]] for arm in (ASYNC_PINNED, SYNC_PINNED)), ".3f")
    return f"""{tables}

A trained token takes {cost} times as long with a producer beside the trainer as without, a core each.
The accuracy to reach: {", ".join(f"{goal:.3f}" for goal in targets)}, from {spread([run.accuracies[0] for run in runs[SYNC]], ".3f")}.
Tokens of a completion, first step of the first repeat: {", ".join(f"{share} up to {tokens}" for share, tokens in at.items())}."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async_vs_sync"))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm, of the seeds 0, 1, ...")
    parser.add_argument("--warmup", nargs="*", default=[], help="key=value for the warm-up")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("this process may use one core: it takes two, one for each side")
    warm = args.out / "warmup"
    if not (warm / "model").is_dir():
        words = ("warmup_sft", "--config", "warmup/tiny", f"output_dir={warm}", *WARM_UP, *args.warmup)
        tune(args.out / "warmup.txt", 1, *words)
    for repeat in range(args.repeats):
        for arm in random.Random(repeat).sample(ARMS, len(ARMS)):
            folder = args.out / f"{arm.folder}_{repeat}"
            if not (folder / "busy.json").is_file():
                train(arm, repeat, folder, warm / "model", [*TRAINING, *args.grpo])
            print(f"{folder.name}: {read(folder).seconds:.0f} s", flush=True)
    found = {arm: [read(args.out / f"{arm.folder}_{repeat}") for repeat in range(args.repeats)] for arm in ARMS}
    print(report(found))


if __name__ == "__main__":
    main()
