"""GRPO on measured speed: GFLOPS of the sampled programs, by curriculum and reward.

python benchmarks/matmul.py --out runs/matmul --seeds 3                           # learns: a warm-up and a run for each seed
python benchmarks/matmul.py --out runs/matmul --compare sqd none --seeds 5        # a staged curriculum against none
python benchmarks/matmul.py --out runs/matmul --compare sqd log_speedup none --seeds 5   # and one reward against the other

`none` is the unchanged config: all techniques from the beginning, rewarded by the fraction of the roofline. Each variant
is compared with the last named variant.

A maximum of noisy measurements is biased upwards. So the printed speeds are measured again after the runs of a seed: the
programs that the model sampled at its first step, before any update, and at its last step, the fastest programs of each
archive, the fastest of 40 programs of the generator of the warm-up, the naive program and numpy's OpenBLAS, in random
order, each in `REPEATS` rounds. A wrong program has 0 GFLOPS. Nothing else should run on the machine.
Completed runs are read, not repeated. Intervals are Student's t over the seeds, which are compared in pairs: the variants of
one seed start from the same model.
"""

import argparse
import itertools
import json
import math
import os
import random
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

# Threads of numpy's BLAS would spin on the timed core. numpy reads this once, at import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from learning import tune
from objectives_report import interval

from torchtune_ext.measured.check import (
    Checker,
    extract_code,
)
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.machine import LOCK_TIMEOUT_S, choose_cores, lock_cores, machine_fingerprint, usable_cores
from torchtune_ext.measured.matmul.archive import ARCHIVE_FILE, Archive
from torchtune_ext.measured.matmul.programs import ProgramFamily
from torchtune_ext.measured.timing import ProgramTimer
from torchtune_ext.pipeline.groups import Sample
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

STAGES = "[none, loop_order, blocking, vectorization, all]"
VARIANTS = {
    "none": [],
    "sqd": [f"task.stages={STAGES}"],
    "log_speedup": ["task.reward=log_speedup"],
    "published": ["task.reward=published"],
}
BEST = 3  # programs of an archive that are measured again
GENERATED = 40  # programs of the generator
ATTEMPTS, REPEATS = 3, 2  # for a timing that was disturbed; rounds over all programs
BUDGET_S = 1.0
NAIVE, NUMPY = "naive", "OpenBLAS"


@dataclass(frozen=True, slots=True)
class Programs:
    """Sampled sources of one run; None for an answer without a program or with a wrong program."""

    first: list[str | None]
    last: list[str | None]
    best: list[str]
    cells: int


def programs_of(run: Path) -> Programs:
    paths = rollout_paths(run)
    steps = [paths[min(paths)], paths[max(paths)]]
    first, last = (
        [_correct_source(s) for g in read_rollouts(path) for s in g.samples if s.score is not None] for path in steps
    )
    archive = Archive.loads((run / ARCHIVE_FILE).read_text())
    best = [entry.source for entry in sorted(archive, key=lambda entry: -entry.speedup_low)[:BEST]]
    return Programs(first, last, best, len(archive))


def _correct_source(sample: Sample) -> str | None:
    return extract_code(sample.text) if sample.score.parts["outcome_ok"] else None


class Remeasurement:
    """Measure programs again, together and without other load."""

    def __init__(self, size: int) -> None:
        self.kernel = Dgemm(size)
        self.checker = Checker(self.kernel, cores=choose_cores(None, 1))
        with lock_cores(self.checker.cores, LOCK_TIMEOUT_S):
            self.timer = ProgramTimer(self.checker, budget_s=BUDGET_S)

    def close(self) -> None:
        self.timer.close()

    def gflops(self, sources: set[str], seed: int) -> dict[str, float]:
        """Return source -> GFLOPS: the median of the rounds, 0.0 for a wrong program."""
        speeds: dict[str, list[float]] = {source: [] for source in (*sources, NUMPY)}
        for _ in range(REPEATS):
            order = list(speeds)
            random.Random(seed).shuffle(order)
            for source in order:
                speeds[source].append(self._once(source))
        return {source: median(values) for source, values in speeds.items()}

    def _once(self, source: str) -> float:
        if source == NUMPY:
            return self._numpy()
        verdict, library = self.checker.check_with_library(source, is_source=True)
        if verdict.outcome != "ok":
            return 0.0
        for _ in range(ATTEMPTS):
            try:
                with lock_cores(self.checker.cores, LOCK_TIMEOUT_S):
                    timing = self.timer.time_library(library)
            except ChildFailed:
                return 0.0
            if not timing.is_noisy:
                break
        return timing.gflops

    def _numpy(self) -> float:
        """Measure one thread of OpenBLAS in this process, on the timed cores."""
        size, (a, b) = self.kernel.timed, (self.timer.rng.random(2 * [self.kernel.timed["m"]]) for _ in range(2))
        with lock_cores(self.checker.cores, LOCK_TIMEOUT_S):
            os.sched_setaffinity(0, self.checker.cores)
            try:
                a @ b
                seconds = median(timeit.repeat(lambda: a @ b, number=1, repeat=50))
            finally:
                os.sched_setaffinity(0, usable_cores() - set(self.checker.cores) or usable_cores())
        return self.kernel.operations(size) / seconds / 1e9


def mean_gflops(samples: Sequence[str | None], speeds: dict[str, float]) -> float:
    return fmean(0.0 if source is None else speeds[source] for source in samples)


def correct_fraction(samples: Sequence[str | None]) -> float:
    return fmean(source is not None for source in samples)


def generated(count: int) -> list[str]:
    """Return correct single-threaded programs of the generator of the warm-up."""
    family = ProgramFamily(seed=1, broken=0.0)
    programs = (family[i] for i in itertools.count())
    of_one_thread = (each.source for each in programs if "#pragma omp" not in each.source)
    return list(itertools.islice(of_one_thread, count))


def measure(runs: dict[str, Path], seed: int, size: int, out: Path) -> dict[str, dict[str, float]]:
    """Measure the samples of all runs of one seed once, together, and store the numbers in a file."""
    if out.is_file():
        # A file of an earlier commit has other names.
        old = {"times": "speedup", "right before": "correct before", "right after": "correct after"}
        runs_of_file = json.loads(out.read_text()).items()
        return {name: {old.get(key, key): value for key, value in run.items()} for name, run in runs_of_file}
    held = {name: programs_of(run) for name, run in runs.items()}
    again = Remeasurement(size)
    try:
        sources = {again.kernel.naive, *generated(GENERATED)}
        for each in held.values():
            sources |= {source for source in (*each.first, *each.last, *each.best) if source is not None}
        speeds = again.gflops(sources, seed)
    finally:
        again.close()
    results = {}
    for name, each in held.items():
        seconds = float((runs[name] / "seconds").read_text())
        before, after = mean_gflops(each.first, speeds), mean_gflops(each.last, speeds)
        results[name] = {
            "before": before,
            "after": after,
            "speedup": after / before if before else math.inf,
            "correct before": correct_fraction(each.first),
            "correct after": correct_fraction(each.last),
            "best": max(speeds[source] for source in each.best),
            "generated": max(speeds[source] for source in generated(GENERATED)),
            NAIVE: speeds[again.kernel.naive],
            NUMPY: speeds[NUMPY],
            "cells": float(each.cells),
            "warm-up minutes": float((out.parent / f"warmup_{seed}" / "seconds").read_text()) / 60,
            "minutes": seconds / 60,
        }
    out.write_text(json.dumps(results, indent=1))
    return results


def row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"


def comparison_rows(results: dict[int, dict[str, dict[str, float]]], names: Sequence[str]) -> list[str]:
    """Print for each figure both variants and whether their difference is significant."""
    lines = [row(["figure", *names, f"{names[1]} - {names[0]}", "verdict"]), "| --- " * (len(names) + 3) + "|"]
    for figure in ("best", "cells", "after", "correct after"):
        values = {name: [each[name][figure] for each in results.values()] for name in names}
        cells = ["{:.3g} ± {:.2g}".format(*interval(values[name])) for name in names]
        mean, half = interval([b - a for a, b in zip(values[names[0]], values[names[1]], strict=True)])
        verdict = "more" if mean > half else "less" if -mean > half else "not significant"
        lines.append(row([figure, *cells, f"{mean:+.3g} ± {half:.2g}", verdict]))
    return lines


@dataclass(frozen=True, slots=True)
class Settings:
    out: Path
    config: str
    size: int
    threads: int
    warmup: tuple[str, ...]
    grpo: tuple[str, ...]


def runs_of(seed: int, variants: Sequence[str], settings: Settings) -> dict[str, Path]:
    """Run a warm-up, then each variant from its model, one at a time."""
    warm = settings.out / f"warmup_{seed}"
    tune(warm, settings.threads, "warmup_sft", "--config", "warmup/tiny_matmul", f"seed={seed}", *settings.warmup)
    runs = {}
    for name in variants:
        runs[name] = settings.out / f"{name}_{seed}"
        words = [f"seed={seed}", f"model_dir={warm}/model", *VARIANTS[name], *settings.grpo]
        tune(runs[name], settings.threads, "grpo_full", "--config", settings.config, *words)
    return runs


def main(words: list[str] | None = None) -> dict[int, dict[str, dict[str, float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/matmul"))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--compare", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--config", default="grpo/tiny_matmul")
    parser.add_argument("--size", type=int, default=256, help="of the product")
    parser.add_argument("--threads", type=int, default=2, help="OMP_NUM_THREADS of the trainer")
    parser.add_argument("--warmup", nargs="*", default=[], help="key=value for the warm-ups")
    parser.add_argument("--grpo", nargs="*", default=[], help="key=value for the GRPO runs")
    args = parser.parse_args(words)
    settings = Settings(args.out, args.config, args.size, args.threads, tuple(args.warmup), tuple(args.grpo))
    variants = args.compare or ["none"]
    print(f"{machine_fingerprint()}; products of {args.size}, one thread\n", flush=True)
    results: dict[int, dict[str, dict[str, float]]] = {}
    for seed in range(args.seeds):
        runs = runs_of(seed, variants, settings)
        results[seed] = measure(runs, seed, args.size, args.out / f"{'_'.join(variants)}_{seed}.json")
        if seed == 0:
            figures = list(results[0][variants[0]])
            print(row(["seed", "variant", *figures]), "| --- " * (len(figures) + 2) + "|", sep="\n")
        for name in variants:
            print(row([seed, name, *results[seed][name].values()]), flush=True)
    if args.seeds > 1:
        *others, base = variants
        for name in others:
            print("", *comparison_rows(results, (base, name)), sep="\n")
        # A curriculum starts with a stage that permits only slow programs, so its own gain says little.
        mean, half = interval([each[base]["speedup"] for each in results.values()])
        print(f"\n{base}: {mean:.2f} ± {half:.2f} times the GFLOPS sampled before, over {args.seeds} seeds")
    return results


if __name__ == "__main__":
    main()
