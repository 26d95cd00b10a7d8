"""Policy objectives side by side: what does a constraint change, on-policy and with four updates on every batch?

    python benchmarks/objectives.py --out runs/objectives --jobs 2 [--seeds 0 1 2 3 4] [--updates 1 4] [--methods grpo ...]

Trains `grpo/tiny_arithmetic` with the presets of `METHODS` from one warm-up, and writes table.md and two plots. Runs that are
there already are read, not repeated, so that it may be stopped at any time and started again.

Held equal: the model that is started from, the questions of a seed and the seeds of their sampling, steps, prompts, samples,
temperature, AdamW with its learning rate, and the clipping of the gradient's norm to 1. A preset brings its loss, advantages,
aggregation and, for dapo, further sampling in place of groups without signal (up to three rounds): its steps draw more
samples, so that it meets other questions from its first such round on. Its penalty on answers near max_tokens is all but idle.

One learning rate for all, because AdamW's step does not change with the scale of the gradients, which is what sets dr_grpo
(no division by the deviation, and by a constant in place of the length) and dapo or cispo (mean over tokens) apart in size;
the clipping of the norm spoils that a little. It was chosen with grpo alone, on other training questions but with the
held-out ones in view. No constant was tuned for any method: they are those of the presets. gspo's interval is 500 times
narrower than grpo's because its ratio is a mean over a completion.

One update a batch is on-policy: every ratio is 1, nothing is clipped, and grpo, clip_higher, atr_grpo and gspo are the same
estimator (all four average over completions). There the others run with the first seed alone, to show it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

METHODS = {
    "grpo": ("preset=grpo",),
    "clip_higher": ("preset=clip_higher",),
    "dapo": ("preset=dapo",),
    "atr_grpo 0.005": ("preset=atr_grpo", "loss.delta=0.005"),
    "atr_grpo 0.02": ("preset=atr_grpo", "loss.delta=0.02"),
    "atr_grpo 0.1": ("preset=atr_grpo", "loss.delta=0.1"),
    "gspo": ("preset=gspo",),
    "cispo": ("preset=cispo",),
    "dr_grpo": ("preset=dr_grpo",),
}
DISTINCT_ON_POLICY = ("grpo", "dapo", "cispo", "dr_grpo")


@dataclass(frozen=True, slots=True)
class Run:
    """One training of the comparison."""

    method: str
    updates: int  # optimizer updates on the samples of one step
    seed: int
    folder: Path

    @property
    def done(self) -> bool:
        return (self.folder / "done").is_file()


def plan(out: Path, methods: list[str], updates: list[int], seeds: list[int]) -> list[Run]:
    """All runs, seed by seed, so that what is finished can be compared at any time."""
    return [
        Run(method, count, seed, out / f"{method.replace(' ', '_')}_u{count}_s{seed}")
        for seed in seeds
        for count in updates
        for method in methods
        if count > 1 or method in DISTINCT_ON_POLICY or seed == seeds[0]
    ]


def tune(log: Path, threads: int, *args: str) -> None:
    """Runs a recipe; its output goes to `log`. Raises CalledProcessError."""
    env = {"GOMP_SPINCOUNT": "10000", **os.environ}  # as scripts/quickstart.sh
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, "-m", "torchtune_ext", "run", *args]
        subprocess.run(command, check=True, env=env, stdout=file, stderr=subprocess.STDOUT)


def train(run: Run, model: Path, threads: int, settings: list[str]) -> bool:
    """Trains unless it is done already. Returns whether it is done now."""
    if run.done:
        return True
    shutil.rmtree(run.folder, ignore_errors=True)
    begin = time.monotonic()
    try:
        tune(
            run.folder / "log.txt", threads,
            *("grpo_full", "--config", "grpo/tiny_arithmetic", f"output_dir={run.folder}", f"model_dir={model}"),
            *(f"seed={run.seed}", f"task.seed={100 + run.seed}", f"updates_per_step={run.updates}"),
            *METHODS[run.method], *settings,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        print(
            f"{run.folder.name}: exit status {error.returncode}, see {run.folder}/log.txt", file=sys.stderr, flush=True
        )
        return False
    (run.folder / "done").touch()
    print(f"{run.folder.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 4], help="optimizer updates on a batch")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, with one OpenMP thread each")
    parser.add_argument("--plots", type=Path, default=None, help="folder of the plots (default: --out)")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    threads = 1 if args.jobs > 1 else 0
    warm = args.out / "warmup"
    if not (warm / "done").is_file():
        tune(args.out / "warmup.txt", threads, "warmup_sft", "--config", "warmup/tiny_arithmetic", f"output_dir={warm}")
        (warm / "done").touch()
    runs = plan(args.out, args.methods, args.updates, args.seeds)
    with ThreadPoolExecutor(args.jobs) as pool:
        done = list(pool.map(lambda run: train(run, warm / "model", threads, args.grpo), runs))

    from objectives_plots import draw  # after the runs: these import torch and transformers
    from objectives_report import read, report

    results = [read(run, warm / "model") for run in runs if run.done]
    if results:
        text = report(results)
        (args.out / "table.md").write_text(text)
        print(text)
        draw(results, args.plots or args.out)
    sys.exit(not all(done))


if __name__ == "__main__":
    main()
