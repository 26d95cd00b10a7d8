"""Synchronous against asynchronous training on two cores, with answers of very different lengths: seconds and accuracy.

    python benchmarks/async_vs_sync.py --out runs/async_vs_sync [--repeats 3] [--grpo max_steps=60 ...]

`grpo/tiny_arithmetic` on few long sums among many short ones: half of the answers have up to 6 tokens, one in a hundred has
30 or more. Four arms train on the same questions: staleness 0 (sync) and 1 (async), with one core for the engine and its client
and the other for trainer and graders, and with both cores for all. On a CPU the engine computes in one thread, so only
the trainer can use both cores, and it uses both while the engine is idle. Repeat i has the seed i; its arms run one after the
other. Completed runs are read, not repeated.

Seconds are the seconds of the steps, without start-up. Accuracy is the mean reward of 5 steps; an asynchronous run measures the
previous policy. The target accuracy is the highest accuracy that every arm of the repeat reaches. The trainer is compared where
each side has a core, by `time/train` per packed token, without the first step and the last, which has no concurrent generation.
Concurrent generation costs "serving" (the trainer's threads other than its main thread: requests, graders; with both cores also
the second training thread), the graders on the trainer's core, the interpreter lock, caches and memory.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import psutil
from objectives import tune

from torchtune_ext.telemetry.metrics import read_metrics

LEVELS = "task.level={3: 6, 8: 1, 9: 1}"
# The model of this warm-up is large enough to give the trainer work.
WARM_UP = ("--config", "warmup/tiny_fp8", "num_problems=24000", LEVELS)
TRAINING = ("evaluation.task=null", "checkpoints.every=1000000")  # neither takes time away from the steps
TRAINING += ("prompts_per_step=64", "updates_per_step=4", "max_steps=60", LEVELS)
TRAINING += ("sampling.max_tokens=128", "engine.max_model_len=192")
SYNC_PINNED, ASYNC_PINNED = "sync, one core each", "async, one core each"
SYNC, ASYNC = "sync, both cores", "async, both cores"
ARMS = {SYNC_PINNED: (0, True), ASYNC_PINNED: (1, True), SYNC: (0, False), ASYNC: (1, False)}  # staleness; a core each?
SAMPLER = "torchtune_ext.sampling.client_process"  # the engine's process is a fork of it
POLL_S = 0.5  # seconds between two looks at the clocks of a run
LIMIT_S = 3600.0  # seconds after which a run is given up
SMOOTH = 5  # steps of the moving mean of the reward


@dataclass(frozen=True, slots=True)
class Run:
    """Measurements of one training run."""

    steps: list[dict[str, float]]  # its metrics, a record for each step
    busy: dict[str, float]  # side -> its CPU seconds in a second, from the second step to the last but one

    def mean(self, name: str) -> float:
        return fmean(step.get(name, 0.0) for step in self.steps)

    def train_us(self) -> float:
        """Return the training time per packed token, in microseconds."""
        inner = self.steps[1:-1]
        return 1e6 * sum(step["time/train"] for step in inner) / sum(step["pack/tokens"] for step in inner)

    def seconds(self, steps: int | None = None) -> float:
        return sum(step["time/step"] for step in self.steps[:steps])

    def accuracies(self) -> list[float]:
        """Return the moving mean of the reward; its first value covers the first `SMOOTH` steps."""
        ends = range(SMOOTH, len(self.steps) + 1)
        return [fmean(step["reward/mean"] for step in self.steps[end - SMOOTH : end]) for end in ends]

    def seconds_to(self, accuracy: float) -> float:
        return self.seconds(SMOOTH + next(i for i, value in enumerate(self.accuracies()) if value >= accuracy))


COLUMNS: dict[str, tuple[str, Callable[[Run], float]]] = {  # title -> how to write it, and what
    "time of all steps, s": (".1f", lambda run: run.seconds()),
    "accuracy in the first steps": (".3f", lambda run: run.accuracies()[0]),
    "accuracy in the last steps": (".3f", lambda run: run.accuracies()[-1]),
    "tokens": (".1f", lambda run: run.mean("length/mean")),
    "tokens of the longest": (".0f", lambda run: run.mean("length/max")),
    "waiting for rollouts, s/step": (".3f", lambda run: run.mean("time/sample")),
    "training, s/step": (".3f", lambda run: run.mean("time/train")),
    "µs/token": (".0f", Run.train_us),
    "serving, CPU s/step": (".3f", lambda run: run.busy["serving"] * run.mean("time/step")),
    "busy cores: engine and client": (".2f", lambda run: run.busy["engine"]),
    "busy cores: trainer": (".2f", lambda run: run.busy["trainer"]),
    "mean staleness": (".2f", lambda run: run.mean("async/staleness_mean")),
    "max staleness": (".0f", lambda run: max(step.get("async/staleness_max", 0.0) for step in run.steps)),
    "dropped tokens": (".0f", lambda run: run.steps[-1].get("async/dropped_tokens", 0.0)),
}


def cpu_seconds(pid: int, engine_core: int | None) -> dict[str, float]:
    """Return CPU seconds of the engine, of trainer and graders, and of the trainer's threads except its main one.

    Pins the engine's threads to `engine_core`. Raises psutil.Error or ProcessLookupError if a process exits during the
    reading.
    """
    trainer = psutil.Process(pid)
    children = trainer.children(recursive=True)
    engines = [child.pid for child in children if SAMPLER in child.cmdline()]
    spent = {"engine": 0.0, "trainer": sum(trainer.cpu_times()[:2])}
    spent["serving"] = sum(thread.user_time + thread.system_time for thread in trainer.threads() if thread.id != pid)
    for child in children:
        of_engine = os.getsid(child.pid) in engines  # the client begins a session, and the engine is in it
        spent["engine" if of_engine else "trainer"] += sum(child.cpu_times()[:2])
        if of_engine and engine_core is not None:
            for thread in child.threads():
                os.sched_setaffinity(thread.id, {engine_core})
    return spent


def train(arm: str, repeat: int, folder: Path, model: Path, settings: Sequence[str]) -> None:
    """Run the recipe, sample its CPU clocks and write busy.json. Raise RuntimeError if the run fails."""
    staleness, pinned = ARMS[arm]
    cores = sorted(os.sched_getaffinity(0))[:2]
    own = cores[:1] if pinned else cores
    words = [f"output_dir={folder}", f"model_dir={model}", f"staleness={staleness}", f"seed={repeat}", *settings]
    recipe = [sys.executable, "-m", "torchtune_ext", "run", "grpo_async", "--config", "grpo/tiny_arithmetic"]
    recipe += [*words, f"task.seed={100 + repeat}"]
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    if pinned:
        env["OMP_NUM_THREADS"] = "1"
    else:
        env.pop("OMP_NUM_THREADS", None)  # the recipe leaves a core to the concurrent engine
    readings: dict[int, tuple[float, dict[str, float]]] = {}  # steps that are over -> the first reading then
    shutil.rmtree(folder, ignore_errors=True)  # what a run left that was stopped
    log, metrics, deadline = folder.with_suffix(".log"), folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    with log.open("w") as out:
        recipe = ["taskset", "--cpu-list", ",".join(map(str, own)), *recipe]
        process = subprocess.Popen(recipe, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            # If a process has just exited, the next reading replaces this one.
            with suppress(psutil.Error, ProcessLookupError):
                spent = cpu_seconds(process.pid, cores[1] if pinned else None)
                done = metrics.read_text().count('"time/step"') if metrics.exists() else 0
                readings.setdefault(done, (time.monotonic(), spent))
    finally:
        process.kill()  # after the limit or Ctrl-C, and its engine ends with it; else it has ended
        status = process.wait(60)
    if status:
        raise RuntimeError(f"{arm}, repeat {repeat}: exit status {status} (the limit is {LIMIT_S:.0f} s), see {log}")
    window = [readings[done] for done in sorted(readings) if 0 < done < max(readings)]
    if max(readings) < SMOOTH or len(window) < 2 or not window[-1][1]["engine"] > window[0][1]["engine"]:
        raise RuntimeError(f"{arm}, repeat {repeat}: too few steps, or no engine was seen: raise max_steps")
    (begin, before), (end, after) = window[0], window[-1]
    (folder / "busy.json").write_text(json.dumps({key: (after[key] - before[key]) / (end - begin) for key in before}))


def spread(values: Sequence[float], form: str, middle: float | None = None) -> str:
    """Format the median, or `middle`, with the smallest and the largest value."""
    return f"{median(values) if middle is None else middle:{form}} ({min(values):{form}}..{max(values):{form}})"


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Format the ratio of the medians, with the smallest and the largest ratio within one repeat."""
    return spread([a / b for a, b in zip(above, below, strict=True)], ".3f", median(above) / median(below))


def report(runs: dict[str, list[Run]]) -> str:
    """Return the tables. `runs`: arm -> its runs, one per repeat."""
    goals = [min(max(run.accuracies()) for run in repeat) for repeat in zip(*runs.values(), strict=True)]
    took = {arm: [run.seconds() for run in arm_runs] for arm, arm_runs in runs.items()}
    reached = {arm: [run.seconds_to(goals[i]) for i, run in enumerate(arm_runs)] for arm, arm_runs in runs.items()}
    rows = [["arm", "time to target accuracy, s", *COLUMNS], ["---"] * (2 + len(COLUMNS))]
    for arm, arm_runs in runs.items():
        cells = [spread([value(run) for run in arm_runs], form) for form, value in COLUMNS.values()]
        rows.append([arm, spread(reached[arm], ".1f"), *cells])
    rows += [[], ["speedup", "all steps", "to target accuracy"], ["---"] * 3]
    for fast, slow in ((ASYNC_PINNED, SYNC_PINNED), (ASYNC_PINNED, SYNC), (ASYNC, SYNC)):
        rows.append([f"{fast} over {slow}", ratio(took[slow], took[fast]), ratio(reached[slow], reached[fast])])
    lines = [f"| {' | '.join(cells)} |" if cells else "" for cells in rows]
    costs = ratio(*([run.train_us() for run in runs[arm]] for arm in (ASYNC_PINNED, SYNC_PINNED)))
    lines += ["", f"Concurrent generation makes training on a token take {costs} times as long, one core each."]
    return "\n".join([*lines, f"Target accuracy by repeat: {', '.join(f'{goal:.3f}' for goal in goals)}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async_vs_sync"))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm, with the seeds 0, 1, ...")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise ValueError("cores=1: too few; expected one for each side. Fix: allow two (taskset)")
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
            steps = [line for line in read_metrics(folder / "metrics.jsonl") if "time/step" in line]
            runs[arm].append(Run(steps, json.loads((folder / "busy.json").read_text())))
            print(f"{folder.name}: {runs[arm][-1].seconds():.0f} s", flush=True)
    print(report(runs))


if __name__ == "__main__":
    main()
