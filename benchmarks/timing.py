"""Repeatability of measured speeds, on a quiet machine and next to a process that reads memory.

    python benchmarks/timing.py [--minutes 10] [--programs 30] [--size 256] [--cores 1]

Programs of different speeds (matrix products: loop orders, blocks, unrolled rows) are timed at random times, at least twice
each. The table says how well two rounds of measurements agree on the order of the programs (Spearman's rank correlation), and
how far measurements of one program lie apart: the standard deviation as a share of the mean, and half of the range, which
grows with the number of rounds; the median over the programs for each. Then a third of the programs are timed again next to a
process that streams through memory, on the same core and on another core. A disturbed measurement must be flagged as disturbed,
or lie within 2% of the quiet measurement (by its ratio to the reference); and no two programs that differ by 10% may change
order among the unflagged measurements. The exit status is 1 if a check fails.
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from contextlib import contextmanager
from statistics import median

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # see Timer

import numpy as np

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.kernels import Dgemm
from torchtune_ext.measured.machine import LOCK_TIMEOUT_S, choose_cores, lock_cores, machine_fingerprint, usable_cores
from torchtune_ext.measured.timing import ProgramTimer, Timing

CLOSE, APART = 0.02, 0.10
ORDERS = ("ijk", "ikj", "jik", "kij")
TEMPLATE = """
#define MIN(a, b) ((a) < (b) ? (a) : (b))
void dgemm(int m, int n, int k, const double *restrict A, const double *restrict B, double *restrict C) {{
    for (int i = 0; i < m * n; i++)
        C[i] = 0;
    for (int ii = 0; ii < m; ii += {block})
    for (int kk = 0; kk < k; kk += {block})
    for (int jj = 0; jj < n; jj += {block})
        {loops}
            C[i * n + j] += A[i * k + l] * B[l * n + j];
}}
"""
LOOPS = {
    "i": "for (int i = ii; i < MIN(ii + {block}, m); i++)",
    "j": "for (int j = jj; j < MIN(jj + {block}, n); j++)",
    "k": "for (int l = kk; l < MIN(kk + {block}, k); l++)",
}


def programs(count: int) -> dict[str, str]:
    """Return name -> program, with many speeds."""
    sources = {}
    for block in (4, 8, 12, 16, 24, 32, 48, 64, 96, 128):
        for order in ORDERS:
            loops = "\n        ".join(LOOPS[letter] for letter in order)
            sources[f"{order}_{block}"] = TEMPLATE.format(block=block, loops=loops.format(block=block))
    names = random.Random(0).sample(sorted(sources), min(count, len(sources)))
    return {name: sources[name] for name in names}


def spearman(a: list[float], b: list[float]) -> float:
    """Return Spearman's rank correlation."""
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1) / np.mean(values))


def half_range(values: list[float]) -> float:
    return (max(values) - min(values)) / 2 / median(values)


def is_flagged(timing: Timing) -> bool:
    """Whether the measurement itself is flagged as unreliable."""
    return timing.disturbed_fraction > 0 or timing.is_noisy or not timing.is_narrow


def stream(core: int) -> None:
    """Read and write memory forever."""
    os.sched_setaffinity(0, {core})
    a, b = np.ones(1 << 23), np.ones(1 << 23)
    while True:
        np.copyto(a, b)


@contextmanager
def neighbor(core: int | None):
    """Run a process that streams through memory on a core; None: no process."""
    if core is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=stream, args=(core,), daemon=True)
    process.start()
    time.sleep(2.0)  # until it has its arrays
    try:
        yield
    finally:
        process.kill()
        process.join()


def measure(
    timer: ProgramTimer, libraries: dict[str, bytes], seconds: float, rng: random.Random
) -> dict[str, list[Timing]]:
    """Time programs in random order for the given time, each at least twice."""
    timings: dict[str, list[Timing]] = {name: [] for name in libraries}
    end = time.monotonic() + seconds
    while time.monotonic() < end or min(map(len, timings.values())) < 2:
        for name in rng.sample(list(libraries), len(libraries)):
            timings[name].append(timer.time_library(libraries[name]))
    return timings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--programs", type=int, default=30)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for one timing")
    parser.add_argument("--cores", type=int, nargs=1, help="the core to time on")
    args = parser.parse_args()
    usable, rng = sorted(usable_cores()), random.Random(1)
    cores = choose_cores(args.cores, 1)
    print(machine_fingerprint(), f"timed on core {cores[0]}", sep=", ", flush=True)
    wrong = []
    with lock_cores(cores, LOCK_TIMEOUT_S), Checker(Dgemm(args.size), cores=cores) as checker:
        libraries = {}
        for name, source in programs(args.programs).items():
            verdict = checker.check_source(source)
            if verdict.outcome != "ok":
                raise RuntimeError(f"{name}: {verdict.outcome}: {verdict.note}")
            libraries[name] = checker.compile_naive(Program(args.size, source)).read_bytes()
        with ProgramTimer(checker, args.budget) as timer:
            quiet = measure(timer, libraries, 60 * args.minutes, rng)
            first, second = ([timings[i].speedup for timings in quiet.values()] for i in (0, -1))
            times = [[t.seconds for t in timings] for timings in quiet.values()]
            ratios = [[t.speedup for t in timings] for timings in quiet.values()]
            own, ratio = (median(map(deviation, each)) for each in (times, ratios))
            own_range, ratio_range = (median(map(half_range, each)) for each in (times, ratios))
            correlation = spearman(first, second)
            rounds = min(map(len, quiet.values()))
            speeds = sorted(median(t.gflops for t in timings) for timings in quiet.values())
            print(f"{len(libraries)} programs of {speeds[0]:.2g} to {speeds[-1]:.2g} GFLOPS, {rounds} rounds and more")
            print(
                "| rank correlation, first and last round | time: deviation | time: half range | ratio: deviation | "
                "ratio: half range | flagged |"
            )
            print("| --- | --- | --- | --- | --- | --- |")
            share = np.mean([is_flagged(t) for timings in quiet.values() for t in timings])
            print(
                f"| {correlation:.4f} | {own:.2%} | {own_range:.2%} | {ratio:.2%} | {ratio_range:.2%} | {share:.0%} |\n"
            )
            wrong += [] if correlation >= 0.95 else ["the rank correlation is below 0.95"]
            wrong += [] if ratio < CLOSE else ["the ratio spreads by 2% or more"]
            wrong += [] if own < 0.05 else ["the time spreads by 5% or more"]
            print("| neighbor | measurements | flagged | within 2% | unflagged and wrong | changed ranks |")
            print("| --- | --- | --- | --- | --- | --- |")
            some = {name: libraries[name] for name in list(libraries)[:: max(1, len(libraries) // 10)]}
            for where, core in (
                ("the same core", cores[0]),
                ("another core", min(set(usable) - set(cores), default=None)),
            ):
                if core is None:
                    print(f"| {where} | not available | | | | |")
                    continue
                with neighbor(core):
                    beside = {name: timer.time_library(library) for name, library in some.items()}
                known = {name: median(t.speedup for t in quiet[name]) for name in some}
                flagged = {name for name, t in beside.items() if is_flagged(t)}
                close = {name for name, t in beside.items() if abs(t.speedup / known[name] - 1) <= CLOSE}
                neither = sorted(set(some) - flagged - close)
                sure = {name: t.speedup for name, t in beside.items() if name not in flagged}
                swapped = [
                    (a, b) for a in sure for b in sure if known[a] > (1 + APART) * known[b] and sure[a] < sure[b]
                ]
                print(
                    f"| {where} | {len(some)} | {len(flagged)} | {len(close)} | {len(neither)} | {len(swapped)} |",
                    flush=True,
                )
                wrong += [f"{where}: {neither} are neither flagged nor right"] if neither else []
                wrong += [f"{where}: {swapped} changed places"] if swapped else []
    print("\n".join(wrong))
    return 1 if wrong else 0


class Program(Dgemm):
    """The kernel with another program as its naive program, to compile it without another check."""

    def __init__(self, size: int, source: str) -> None:
        super().__init__(size)
        self.naive = source


if __name__ == "__main__":
    sys.exit(main())
