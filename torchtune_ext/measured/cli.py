"""`torchtune-ext bench`: compile, verify and time C programs on this machine, and print a table."""

import argparse
import os
import re
from pathlib import Path

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import format_columns

# On timed cores, threads of numpy's BLAS would spin. BLAS reads this variable once, at its import.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.kernel import Kernel, validate_kernel
from torchtune_ext.measured.kernels import KERNELS
from torchtune_ext.measured.machine import machine_fingerprint
from torchtune_ext.measured.results import Result

COLUMN_TITLES = ("program", "kernel", "outcome", "ms", "GFLOPS", "±", "of roofline", "x naive", "±", "")
NAIVE_ROW = "(naive)"  # the row of the kernel's own program
FENCE = "`" * 40  # longer than any fence inside a program
MIN_CALL_S = 0.3e-3  # an empty call takes up to 0.06 ms


def table_row(name: str, result: Result) -> list[str]:
    """Returns the cells of a program, one per title of COLUMN_TITLES."""
    cells = [name, result.kernel, result.outcome]
    if (t := result.timing) is None:
        return [*cells, *[""] * 7]
    cells += [f"{1e3 * t.seconds:.3g}", f"{t.gflops:.3g}", f"{t.relative_ci:.1%}"]
    # One block yields no confidence interval.
    cells += [f"{t.roofline_fraction:.1%}", f"{t.speedup:.2f}", f"{t.speedup_ci:.1%}" if t.speedup_ci else "?"]
    if t.disturbed_fraction:
        return [*cells, f"disturbed: other processes were active during {t.disturbed_fraction:.0%} of its blocks"]
    if t.seconds < MIN_CALL_S:
        return [*cells, "short: call overhead is a large share; use a larger --size"]
    return [*cells, "" if t.is_narrow else "wide: the 95% intervals exceed 2% after the budget"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="C program that defines the function of one kernel")
    parser.add_argument("--size", type=int, help="timed size: length of each side (reduction: number of elements)")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds per timing (10)")
    parser.add_argument("--threads", type=int, default=1, help="threads that a program may use (1)")
    parser.add_argument(
        "--cores",
        type=parse_cores,
        help="cores to time on, e.g. 2,3; default: cores that no engine may use, else the last",
    )
    parser.add_argument("--compiler", help="gcc, clang, or a path")


def main(args: argparse.Namespace) -> int:
    """Returns 0 if every program is ok, else 1.

    Raises:
        UsageError: an argument is invalid.
        RunFailure: the machine cannot measure.
    """
    programs = [_read_program(Path(file), args.size) for file in args.files]
    kernels = {kernel.name: kernel for _, _, kernel in programs}
    rows = [(NAIVE_ROW, kernel.naive, kernel) for kernel in kernels.values()] + programs
    settings = {"threads": args.threads, "cores": args.cores, "compiler": args.compiler, "budget_s": args.budget}
    with Bench(**settings) as bench:
        print(f"{machine_fingerprint()}; timed on core {', '.join(map(str, bench.timed_cores))}", flush=True)
        futures = [bench.submit(kernel, f"{FENCE}c\n{source}\n{FENCE}") for _, source, kernel in rows]
        results = [future.result() for future in futures]
    named_results = [(name, result) for (name, *_), result in zip(rows, results, strict=True)]
    print(format_columns([COLUMN_TITLES, *(table_row(name, result) for name, result in named_results)]))
    print("".join(f"\n{name}: {result.note}\n" for name, result in named_results if result.note), end="", flush=True)
    return 0 if all(result.outcome == "ok" for result in results) else 1


def parse_cores(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _read_program(file: Path, size: int | None) -> tuple[str, str, Kernel]:
    """Returns the file name of a program, its source, and the kernel whose function it defines."""
    try:
        source = file.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}. Fix: name a C program") from error
    names = [each for each in KERNELS if re.search(rf"\bvoid\s+{each}\s*\(", source)]
    if len(names) != 1:
        raise UsageError(
            f"{file} defines {' and '.join(names) or 'none'} of {', '.join(KERNELS)}; expected exactly one of them"
        )
    kind = KERNELS[names[0]]
    kernel = kind() if size is None else kind(size)
    validate_kernel(kernel)
    return file.name, source, kernel
