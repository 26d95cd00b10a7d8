"""How many programs are compiled and verified in a second, where does the time go, and what does the sandbox cost?

    python benchmarks/bench_throughput.py [--count 40] [--workers 2] [--starts 100]

The naive program of each kernel, as a checker of `tasks/measured` treats what a model wrote: read, compiled with -O3, called on
sizes and inputs that nobody knows. Each copy is a little different, though nothing is kept. "start" is the time from the
request for a process to the moment it has locked itself in and loaded the library. Where other work runs, compare the lines.
"""

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

# References are small, and where cores are shared, threads of numpy's BLAS wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchtune_ext.tasks.measured import verify as verification  # noqa: E402
from torchtune_ext.tasks.measured.arena import arena_size  # noqa: E402
from torchtune_ext.tasks.measured.check import STAGES, Checker  # noqa: E402
from torchtune_ext.tasks.measured.child import Child  # noqa: E402
from torchtune_ext.tasks.measured.kernel import Kernel  # noqa: E402
from torchtune_ext.tasks.measured.kernels import KERNELS, Reduction  # noqa: E402
from torchtune_ext.tasks.measured.sandbox import SandboxError  # noqa: E402

PARTS = {  # what verifying consists of: the functions that are timed
    "start": (Child, "__init__"),
    "arrays": (Child, "place"),
    "calls": (Child, "call"),
    "inputs": (verification, "draw_inputs"),
    "reference": (verification, "compare"),
    "end": (Child, "close"),
}


@contextmanager
def timed_parts(spent: Counter) -> Iterator[None]:
    """Adds to `spent` the seconds that each part takes, inside of the block."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - begin

        return run

    before = {name: getattr(owner, key) for name, (owner, key) in PARTS.items()}
    for name, (owner, key) in PARTS.items():
        setattr(owner, key, timed(name, before[name]))
    try:
        yield
    finally:
        for name, (owner, key) in PARTS.items():
            setattr(owner, key, before[name])


def measure_starts(count: int) -> None:
    print(f"{'start of a child':28s} {'median ms':>10s} {'90% ms':>8s} {'end ms':>8s}")
    for namespaces in (False, True):
        name = "with namespaces" if namespaces else "without namespaces"
        try:
            checker = Checker(Reduction(), namespaces=namespaces)
        except SandboxError as error:
            print(f"{name:28s} {error}")
            continue
        kernel, starts, ends = checker.kernel, [], []
        arena_bytes = arena_size(kernel, kernel.timed)
        with checker, checker.checked(kernel.naive, extracted=True) as (_, library):
            for _ in range(count):
                begin = time.perf_counter()
                child = Child(checker.sandbox, library, kernel, arena_bytes, checker.cores, 1, checker.limits, 5.0)
                starts.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                child.close()
                ends.append(time.perf_counter() - begin)
        starts.sort()
        figures = statistics.median(starts), starts[int(0.9 * count)], statistics.median(ends)
        print(f"{name:28s} {1e3 * figures[0]:10.2f} {1e3 * figures[1]:8.2f} {1e3 * figures[2]:8.2f}", flush=True)


def measure_checks(kernel: Kernel, namespaces: bool | None, count: int, workers: int) -> None:
    """Prints one line: programs a second, and the mean milliseconds of each stage and of each part of verifying."""
    sources = [f"/* program {number} */\n{kernel.naive}" for number in range(count)]
    spent: Counter = Counter()
    with Checker(kernel, namespaces=namespaces) as checker, ThreadPoolExecutor(workers) as pool:
        list(pool.map(checker.check_source, sources[:workers]))
        with timed_parts(spent):
            begin = time.monotonic()
            verdicts = list(pool.map(checker.check_source, sources))
            seconds = time.monotonic() - begin
    if bad := [verdict for verdict in verdicts if verdict.outcome != "ok"]:
        raise RuntimeError(f"{kernel.name}: {bad[0]}")
    stages = [1e3 * statistics.fmean(verdict.seconds[stage] for verdict in verdicts) for stage in STAGES[1:]]
    parts = [1e3 * spent[name] / count for name in PARTS]
    columns = " ".join(f"{value:9.1f}" for value in (*stages, *parts))
    print(f"{kernel.name:10s} {workers:7d} {count / seconds:9.2f} {columns}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="programs of each kernel")
    parser.add_argument("--workers", type=int, default=2, help="threads of the last table; the one before has one")
    parser.add_argument("--starts", type=int, default=100, help="processes that are started")
    args = parser.parse_args()
    measure_starts(args.starts)
    for workers in sorted({1, args.workers}):
        for namespaces in (False, None):
            print(
                f"\n{workers} at a time, {'with namespaces, where they work' if namespaces is None else 'without namespaces'}"
            )
            names = " ".join(f"{name:>9s}" for name in (*STAGES[1:], *PARTS))
            print(f"{'kernel':10s} {'workers':>7s} {'a second':>9s} {names}   (ms each)")
            for kernel in KERNELS.values():
                measure_checks(kernel(), namespaces, args.count, workers)


if __name__ == "__main__":
    main()
