"""Accuracy gain of GRPO on the tiny model with its interval, over warm-ups x GRPO seeds x threads.

python benchmarks/learning.py --out runs/learning --warmups 0 1 2 3 4 5 6 7 --seeds 0 --threads 1 2

A warm-up and its GRPO run take about ten minutes on two cores; `--jobs 2` runs two at a time. Completed runs are
read, not repeated, so a later call continues or adds runs. The interval of a rise is Student's t over the warm-ups.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from objectives_report import interval

from torchtune_ext.telemetry.metrics import read_metrics

WAYS = ("sampled", "greedy")
HEAD = (
    "warm-up | seed | threads | sampled: before | sampled: after | sampled: gain | greedy: before | greedy: after | "
    "greedy: gain | entropy | worst mismatch | minutes"
)


def tune(folder: Path, threads: int, *args: str) -> None:
    """Run a recipe into `folder`, unless it is complete there. Its output goes to folder.log."""
    seconds = folder / "seconds"
    if seconds.exists():
        return
    begin = time.monotonic()
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        command = [sys.executable, "-m", "torchtune_ext", "run", *args, f"output_dir={folder}"]
        subprocess.run(command, check=True, env=env, stdout=log, stderr=subprocess.STDOUT)
    seconds.write_text(f"{time.monotonic() - begin:.0f}\n")


def learn(out: Path, warmup: int, seed: int, threads: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the results of one warm-up and one GRPO run on its model."""
    warm = out / f"warmup_{warmup}_threads_{threads}"
    tune(warm, threads, "warmup_sft", "--config", "warmup/tiny", f"seed={warmup}", *args.warmup)
    run = out / f"grpo_{warmup}_{seed}_threads_{threads}"
    model = f"model_dir={warm}/model"
    tune(run, threads, "grpo_full", "--config", args.config, f"seed={seed}", model, *args.grpo)
    lines = read_metrics(run / "metrics.jsonl")
    evaluated = [line for line in lines if "eval/reward_sampled" in line]
    result = {"warmup": warmup, "seed": seed, "threads": threads}
    for way in WAYS:
        result[f"{way}/before"], result[f"{way}/after"] = (evaluated[i][f"eval/reward_{way}"] for i in (0, -1))
        result[f"{way}/rise"] = result[f"{way}/after"] - result[f"{way}/before"]
    result["entropy"] = [line["loss/entropy"] for line in lines if "loss/entropy" in line][-1]
    result["mismatch"] = max(line.get("mismatch/mean_abs", 0.0) for line in lines)
    result["minutes"] = sum(float((folder / "seconds").read_text()) for folder in (warm, run)) / 60
    return result


def row(result: dict[str, float]) -> str:
    cells = [str(result[name]) for name in ("warmup", "seed", "threads")]
    for way in WAYS:
        cells += [f"{result[f'{way}/before']:.3f}", f"{result[f'{way}/after']:.3f}", f"{result[f'{way}/rise']:+.3f}"]
    cells += [f"{result['entropy']:.3f}", f"{result['mismatch']:.1e}", f"{result['minutes']:.1f}"]
    return "| " + " | ".join(cells) + " |"


def spread(results: list[dict[str, float]], way: str) -> str:
    """Return the gain over warm-ups. Each warm-up counts with the mean of its runs, which are not independent."""
    by_warmup: dict[int, list[float]] = {}
    for run in results:
        by_warmup.setdefault(run["warmup"], []).append(run[f"{way}/rise"])
    mean, half = interval([statistics.fmean(rises) for rises in by_warmup.values()])
    every = [run[f"{way}/rise"] for run in results]
    return (
        f"{way}: {mean:+.3f} ± {half:.3f} over {len(by_warmup)} warm-ups, so at least {mean - half:+.3f}; runs from "
        f"{min(every):+.3f} to {max(every):+.3f}"
    )


def main(words: list[str] | None = None) -> list[dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--warmups", type=int, nargs="+", default=list(range(8)), help="seeds of the warm-up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of GRPO")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="OMP_NUM_THREADS: sums in another order")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--config", default="grpo/tiny")
    parser.add_argument("--warmup", nargs="*", default=[], help="key=value for the warm-ups")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for the GRPO runs")
    args = parser.parse_args(words)
    results: list[dict[str, float]] = []

    def column(warmup: int, threads: int) -> None:  # one warm-up is made once, and its seeds follow one another
        for seed in args.seeds:
            results.append(learn(args.out, warmup, seed, threads, args))
            print(row(results[-1]), flush=True)

    print(f"| {HEAD} |\n" + "|---" * len(HEAD.split(" | ")) + "|", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(column, *zip(*[(w, t) for w in args.warmups for t in args.threads], strict=True)))
    for way in WAYS:
        print(spread(results, way))
    return results


if __name__ == "__main__":
    main()
