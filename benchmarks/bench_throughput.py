"""Throughput of compiling and verifying programs: programs per second, time by stage, and the cost of the sandbox.

    python benchmarks/bench_throughput.py [--count 40] [--workers 2] [--starts 100]

The naive program of each kernel, as a checker of `measured` treats what a model wrote: read, compiled with -O3, called on
random sizes and inputs. Each worker is a process with its own checker. "start" is the time from the request for a process
until the process has entered the sandbox and loaded the library. CPU milliseconds remain meaningful on a shared machine:
"here" covers inputs, references and waiting, "children" covers compiler and program. (Inside namespaces, "children" misses
the CPU time of a process that is killed when it ends.)
"""

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

# References are small, and on shared cores the threads of numpy's BLAS wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchtune_ext.measured import verify as verification
from torchtune_ext.measured.check import STAGES, Checker
from torchtune_ext.measured.child import Child, arena_size
from torchtune_ext.measured.kernels import KERNELS, Reduction
from torchtune_ext.measured.sandbox import Limits, SandboxError

PARTS = {  # what verifying consists of: the functions that are timed
    "start": (Child, "__init__"),
    "arrays": (Child, "map_arrays"),
    "calls": (Child, "call"),
    "inputs": (verification, "draw_inputs"),
    "reference": (verification, "compute_expected"),
    "compare": (verification, "find_wrong_output"),
    "end": (Child, "close"),
}


@contextmanager
def timed_parts(spent: Counter) -> Iterator[None]:
    """Inside the block, add the seconds of each part to `spent`."""

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
    """Print the start and stop times of a child. The kinds alternate, so that a disturbance affects all of them."""
    print(f"{'start of a child':36s} {'median ms':>10s} {'90% ms':>8s} {'end ms':>8s}")
    with ExitStack() as stack:
        checkers: dict[str, tuple[Checker, Path]] = {}
        for namespaces in (False, True):
            name = f"{'with' if namespaces else 'without'} namespaces"
            try:
                checker = stack.enter_context(Checker(Reduction(), namespaces=namespaces))
            except SandboxError as error:
                print(f"{name:36s} {error}")
                continue
            checkers[name] = checker, checker.compile_naive(checker.kernel)
        starts: dict[str, list[float]] = {name: [] for name in checkers}
        ends: dict[str, list[float]] = {name: [] for name in checkers}
        for _ in range(count):
            for name, (checker, library) in checkers.items():
                arena_bytes = arena_size(checker.kernel, checker.kernel.timed)
                begin = time.perf_counter()
                child = Child(checker.sandbox, library, checker.kernel, arena_bytes, checker.cores, 1, Limits(), 5.0)
                starts[name].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                child.close()
                ends[name].append(time.perf_counter() - begin)
    for name, seconds in starts.items():
        figures = statistics.median(seconds), sorted(seconds)[int(0.9 * count)], statistics.median(ends[name])
        print(f"{name:36s} {1e3 * figures[0]:10.2f} {1e3 * figures[1]:8.2f} {1e3 * figures[2]:8.2f}", flush=True)


def work(name: str, namespaces: bool | None, count: int, go: Any) -> tuple[float, float, list[float], Counter]:
    """Check `count` programs once all workers are ready.

    Returns:
        The begin and end times, the CPU seconds here and in the children, and the seconds by stage and part.
    """
    spent: Counter = Counter()
    with Checker(KERNELS[name](), namespaces=namespaces) as checker:
        checker.check_source(checker.kernel.naive)
        go.wait()
        before, begin = cpu_seconds(), time.monotonic()
        with timed_parts(spent):
            for number in range(count):
                verdict = checker.check_source(f"/* program {number} */\n{checker.kernel.naive}")
                if verdict.outcome != "ok":
                    raise RuntimeError(f"{name}: {verdict}")
                spent.update({stage: verdict.seconds[stage] for stage in STAGES})
        return begin, time.monotonic(), [now - then for now, then in zip(cpu_seconds(), before, strict=True)], spent


def cpu_seconds() -> list[float]:
    """Return the CPU seconds of this process and of its exited children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return [usage.ru_utime + usage.ru_stime for usage in usages]


def measure_checks(name: str, namespaces: bool | None, count: int, workers: int) -> None:
    """Print one line: programs per second, CPU milliseconds per program, and milliseconds by stage and part."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, context.Pool(workers) as pool:
        go = manager.Barrier(workers)
        done = pool.starmap(work, [(name, namespaces, count, go)] * workers, chunksize=1)
    begins, ends, cpu, spent = zip(*done, strict=True)
    seconds, total = max(ends) - min(begins), count * workers
    own, children = (1e3 * sum(each[i] for each in cpu) / total for i in (0, 1))
    parts = " ".join(f"{1e3 * sum(each[part] for each in spent) / total:9.1f}" for part in (*STAGES[1:], *PARTS))
    print(f"{name:10s} {total / seconds:9.2f} {own:9.1f} {children:9.1f} {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="programs of each kernel")
    parser.add_argument("--workers", type=int, default=2, help="processes of the last tables")
    parser.add_argument("--starts", type=int, default=100, help="processes that are started")
    args = parser.parse_args()
    measure_starts(args.starts)
    for workers in sorted({1, args.workers}):
        for namespaces in (False, None):
            layers = "with namespaces, where they work" if namespaces is None else "without namespaces"
            print(f"\n{workers} at a time, {layers}; milliseconds of one program")
            columns = ("a second", "CPU here", "children", *STAGES[1:], *PARTS)
            print(f"{'kernel':10s} {' '.join(f'{column:>9s}' for column in columns)}", flush=True)
            for name in KERNELS:
                measure_checks(name, namespaces, args.count, workers)


if __name__ == "__main__":
    main()
