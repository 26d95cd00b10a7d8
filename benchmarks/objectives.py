"""Compare policy objectives, on-policy and with four updates on every batch.

    python benchmarks/objectives.py --out runs/objectives --jobs 2 [--seeds 0 1 2 3 4] [--updates 1 4] [--methods grpo ...]
    python benchmarks/objectives.py --staleness 1 4 --jobs 2    # instead: corrections for stale samples

Trains `grpo/tiny_arithmetic` with the presets of `METHODS` from one warm-up, and writes table.md and two plots. Completed runs
are read, not repeated, so the script may be interrupted and restarted.

Held equal: the initial model, the questions of a seed and their sampling seeds, steps, prompts, samples, temperature, AdamW
with its learning rate, and gradient clipping to a norm of 1. A preset sets its loss, advantages, aggregation and, for dapo,
up to three rounds that replace zero-variance groups: its steps draw more samples, so it sees other questions from the first
such round. Its penalty on answers near max_tokens has almost no effect here.

All methods share one learning rate, because AdamW's step does not depend on the scale of the gradients, and dr_grpo (no
division by the standard deviation, a constant in place of the length) and dapo or cispo (mean over tokens) differ from grpo in
that scale; norm clipping breaks this slightly. The rate was chosen with grpo alone, on other training questions but with the
held-out questions in view. No constant was tuned for any method: all are the presets' constants. gspo's interval is 500 times
narrower than grpo's because its ratio is a mean over a completion.

One update a batch is on-policy: every ratio is 1, nothing is clipped, and grpo, clip_higher, atr_grpo and gspo are the same
estimator (all four average over completions). In that case the other methods run with the first seed only, as a check.

`--staleness` trains on samples of an older policy instead, with the objectives of `CORRECTIONS`: one loss with several
corrections for stale samples, or none. With `staleness=K prefetch_steps=K` every group is exactly K versions older
than the policy that trains on it, except the groups of the first K steps. Questions are sums of 12 to 16 digits; a worked
solution has 29 to 46 characters, and each must be right. A second, short warm-up turns half of the solutions into
guesses: 40 steps suffice to
unlearn guessing. Everything else is held equal, also clipping, advantages and aggregation. The baseline, staleness 0, has
one method: there the proximal policy is the sampler's, and all methods are equal up to rounding. The learning rate was
chosen with seed 0, so that staleness 0 learns and 4 without a correction is worse. Tables, plot: objectives_stale.py.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import objectives_report
import objectives_stale
from objectives_report import Run

PARTS = "advantage.parts.accuracy=1.0", "advantage.parts.failed=-0.5"
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
    "length 0.3": ("preset=grpo", "advantage.length_coef=0.3"),
    "maxrl": ("preset=maxrl",),
    # The parts of gdpo as a weighted sum, and as in its paper.
    "parts": ("preset=grpo", *PARTS),
    "gdpo": ("preset=gdpo", *PARTS),
}
DISTINCT_ON_POLICY = ("grpo", "dapo", "cispo", "dr_grpo", "length 0.3", "maxrl", "parts", "gdpo")
# Folder -> key=value. Each warm-up continues from the model of the previous one.
WARM_UPS: dict[str, tuple[str, ...]] = {"warmup": ()}

CORRECTIONS = {
    "decoupled": (),
    "interpolated": ("loss.old=interpolated",),
    "TIS": ("loss.importance=tis",),
    "none": ("loss.importance=none",),
    # Standard PPO, clipped around the sampling policy: the baseline of AReaL's decoupled objective.
    "to the sampler": ("loss.importance=none", "loss.old=sampler"),
}
AT_STALENESS_0 = "decoupled"
STALE_UPDATES = 4
LEVEL = "task.level=10"
STALE = ("preset=decoupled_ppo", LEVEL, "sampling.max_tokens=64", "engine.max_model_len=128")
STALE += ("optimizer.lr=2.0e-4", "schedule.warmup=20", "max_steps=40", "evaluation.every=1000")
STALE_WARM_UPS = {
    "sums": (LEVEL, "task.guessed=0.0"),
    "warmup": (LEVEL, "task.seed=11", "num_problems=9600", "optimizer.lr=5.0e-4", "schedule.warmup=20"),
}


def plan(out: Path, methods: list[str], updates: list[int], seeds: list[int]) -> list[Run]:
    """Return all runs, seed by seed, so that completed seeds can be compared at any time."""
    return [
        Run(method, count, seed, out / f"{method.replace(' ', '_')}_u{count}_s{seed}", METHODS[method])
        for seed in seeds
        for count in updates
        for method in methods
        if count > 1 or method in DISTINCT_ON_POLICY or seed == seeds[0]
    ]


def plan_stale(out: Path, methods: list[str], staleness: list[int], seeds: list[int]) -> list[Run]:
    """Return all off-policy runs, seed by seed, each seed with its baseline of staleness 0."""
    runs = []
    for seed in seeds:
        for method, age in [(AT_STALENESS_0, 0), *((method, age) for age in staleness for method in methods)]:
            words = (*STALE, *CORRECTIONS[method], f"staleness={age}", f"prefetch_steps={age}")
            folder = out / f"{method.replace(' ', '_')}_k{age}_s{seed}"
            runs.append(Run(method, STALE_UPDATES, seed, folder, words, age))
    return runs


def tune(log: Path, threads: int, *args: str) -> None:
    """Run a recipe with its output in `log`. Raise CalledProcessError on failure."""
    env = dict(os.environ)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        command = [sys.executable, "-m", "torchtune_ext", "run", *args]
        subprocess.run(command, check=True, env=env, stdout=file, stderr=subprocess.STDOUT)


def warm_up(out: Path, threads: int, stages: dict[str, tuple[str, ...]]) -> Path:
    """Make the missing warm-up models, each from the previous one. Return the last model."""
    config, model = ("--config", "warmup/tiny_arithmetic"), None
    for name, words in stages.items():
        if not (out / name / "done").is_file():
            begun = (f"model_dir={model}",) if model else ()
            tune(out / f"{name}.txt", threads, "warmup_sft", *config, *words, *begun, f"output_dir={out / name}")
            (out / name / "done").touch()
        model = out / name / "model"
    return model


def train(run: Run, model: Path, threads: int, settings: list[str]) -> bool:
    """Train unless the run is complete. Return whether the run is complete now."""
    if run.done:
        return True
    shutil.rmtree(run.folder, ignore_errors=True)
    begin = time.monotonic()
    try:
        tune(
            run.folder / "log.txt", threads,
            *("grpo_async" if run.staleness else "grpo_full", "--config", "grpo/tiny_arithmetic"),
            *(f"output_dir={run.folder}", f"model_dir={model}"),
            *(f"seed={run.seed}", f"task.seed={100 + run.seed}", f"updates_per_step={run.updates}"),
            *run.words, *settings,
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
    parser.add_argument("--staleness", type=int, nargs="+", default=[], help="staleness values for CORRECTIONS, from 1")
    parser.add_argument("--methods", nargs="+", default=None, help="some of METHODS, or of CORRECTIONS")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, with one OpenMP thread each")
    parser.add_argument("--plots", type=Path, default=None, help="folder of the plots (default: --out)")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for every GRPO run")
    args = parser.parse_args()
    known = list(CORRECTIONS if args.staleness else METHODS)
    methods = args.methods or known
    if not set(methods) <= set(known) or min(args.staleness, default=1) < 1:
        parser.error(f"--methods {' '.join(methods)}: expected {', '.join(known)}; --staleness must be 1 or more")
    threads = 1 if args.jobs > 1 else 0
    if args.staleness:
        out = args.out / "stale"
        runs, stages = plan_stale(out, methods, args.staleness, args.seeds), STALE_WARM_UPS
    else:
        out = args.out
        runs, stages = plan(out, methods, args.updates, args.seeds), WARM_UPS
    model = warm_up(out, threads, stages)
    with ThreadPoolExecutor(args.jobs) as pool:
        done = list(pool.map(lambda run: train(run, model, threads, args.grpo), runs))

    tables = objectives_stale if args.staleness else objectives_report
    results = [tables.read(run, model) for run in runs if run.done]
    if results:
        text = tables.report(results)
        (out / "table.md").write_text(text)
        print(text)
        tables.draw(results, args.plots or out)
    sys.exit(not all(done))


if __name__ == "__main__":
    main()
