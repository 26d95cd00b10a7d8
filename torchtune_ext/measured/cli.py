"""`torchtune-ext bench`: compiles, verifies and times programs in C on this machine, and prints a table."""

import argparse
import math
import os
import re
import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.output import columns

# Where all cores are timed on, threads of numpy's BLAS would spin on them. It reads this once, when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torchtune_ext  # noqa: E402
from torchtune_ext.measured.check import MAX_SOURCE, Checker  # noqa: E402
from torchtune_ext.measured.child import ChildFailed  # noqa: E402
from torchtune_ext.measured.compiler import OPTIMIZATIONS, Compiler  # noqa: E402
from torchtune_ext.measured.kernel import Kernel  # noqa: E402
from torchtune_ext.measured.kernels import KERNELS  # noqa: E402
from torchtune_ext.measured.machine import choose_cores, fingerprint  # noqa: E402
from torchtune_ext.measured.probe import Wild  # noqa: E402
from torchtune_ext.measured.results import Result  # noqa: E402
from torchtune_ext.measured.sandbox import SANDBOXES, SandboxError  # noqa: E402
from torchtune_ext.measured.timing import Timer  # noqa: E402

HEAD = ("program", "kernel", "outcome", "ms", "GFLOPS", "±", "of roofline", "x naive", "±", "")
NOTE = 90  # characters of a note
MAX_BYTES = 4 * MAX_SOURCE  # of a file
NAIVE = "(naive)"  # the row of the kernel's own program
_TELLING = re.compile(r" error: |: undefined reference to ")
_LINKER = re.compile(r"collect2: error: |clang: error: linker command failed")
SHORT_S = 0.3e-3  # a call of nothing takes up to 0.06 ms
NUMPY = "(numpy)"  # the row of its reference: OpenBLAS for products


def cells(name: str, result: Result) -> list[str]:
    """Returns the row of a program, below HEAD."""
    cells = [name, result.kernel, result.outcome]
    if (t := result.timing) is None:
        return [*cells, *[""] * 6, shortened(result.note)]
    cells += [f"{1e3 * t.seconds:.3g}", f"{t.gflops:.3g}", f"{t.spread:.1%}"]
    # One block gives no interval.
    cells += [f"{t.peak_share:.1%}", f"{t.ratio:.2f}", f"{t.ratio_spread:.1%}" if t.ratio_spread else "?"]
    if t.is_noisy:
        return [*cells, "noisy: somebody else was at work, and the naive program felt it, too"]
    if t.disturbed:
        return [*cells, f"disturbed: somebody else was at work beside {t.disturbed:.0%} of it"]
    if t.seconds < SHORT_S and name != NUMPY:
        return [*cells, "short: much of it is the call itself; a larger --size has less of that"]
    return [*cells, "" if t.is_narrow else "wide: its intervals are not within 2% after the budget"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="a program in C; - reads it from standard input")
    parser.add_argument(
        "--problem", choices=KERNELS, help="the kernel; without it, the one whose function the file has"
    )
    parser.add_argument("--size", type=int, help="length of each side (number of numbers for reduction) that is timed")
    parser.add_argument("--repeat", type=int, default=1, help="how often each program is timed (1)")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for one timing (10)")
    parser.add_argument("--threads", type=int, default=1, help="threads that a program may use (1)")
    parser.add_argument("--cores", help="cores to time on, as 2,3; without it, those that no engine uses")
    # Also `--optimization -O2`: for argparse that is two options, of which the first says nothing.
    parser.add_argument(
        "-O",
        "--optimization",
        nargs="?",
        const="-O3",
        default="-O3",
        type=_level,
        metavar="LEVEL",
        help="-O0 to -O3 (-O3)",
    )
    parser.add_argument("--compiler", help="gcc or clang, or a path")
    parser.add_argument(
        "--sandbox", default="floor", choices=SANDBOXES, help="none: programs of people you trust (floor)"
    )
    parser.add_argument("--exploits", action="store_true", help="run the programs that attack the benchmark instead")


def main(args: argparse.Namespace) -> int:
    """Returns 0 if every program was ok (with --exploits: ended as expected), 1 if not, 2 if nothing could be measured."""
    try:
        return _measure(args)
    except BrokenPipeError:
        # Nobody reads on, as with `| head`. Python would complain once more when it empties its buffer at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (ValueError, SandboxError, Wild, OSError, MemoryError) as error:
        print(f"torchtune-ext bench: {str(error).strip() or type(error).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchtune-ext bench: stopped", file=sys.stderr)
        return 130


def _measure(args: argparse.Namespace) -> int:
    for name, value in (("repeat", args.repeat), ("threads", args.threads), ("budget", args.budget)):
        if not 0 < value < math.inf:
            raise Mistake(f"--{name} {value} must be more than 0, and finite")
    if args.optimization not in OPTIMIZATIONS:
        raise Mistake(f"--optimization {args.optimization}: use {', '.join(OPTIMIZATIONS)}")
    if args.size is not None and args.size < 1:
        raise Mistake(f"--size {args.size} must be at least 1")
    numbers = None if args.cores is None else _numbers(args.cores)
    cores = choose_cores(numbers, args.threads)
    compiler = Compiler.find(args.compiler)
    if args.exploits:
        return _attack(compiler, cores)
    if not args.files:
        raise Mistake("no program: name at least one file, such as examples/dgemm_blocked.c")
    programs = [_program(file, args) for file in args.files]
    print(
        f"{fingerprint()}; {compiler.version}; {args.optimization}, timed on core {', '.join(map(str, cores))}",
        flush=True,
    )
    rows: list[tuple[str, Result]] = []
    with ExitStack() as stack:
        settings = {"optimization": args.optimization, "threads": args.threads, "cores": cores, "sandbox": args.sandbox}
        checkers = {
            name: stack.enter_context(Checker(kernel, compiler, **settings))
            for name, kernel in {kernel.name: kernel for _, _, kernel in programs}.items()
        }
        for kernel, checker in checkers.items():
            timer = stack.enter_context(Timer(checker, args.budget))
            rows.append((NAIVE, _measured(checker.kernel.naive, checker, timer)))
            rows.append((NUMPY, Result(kernel, "ok", "time", timing=timer.time_numpy())))
            for name, source, its in programs:
                if its.name == kernel:
                    rows += [(name, _measured(source, checker, timer)) for _ in range(args.repeat)]
            probe = timer.probe
            print(f"{kernel}: roofline {probe.peak_gflops:.4g} GFLOPS, {probe.peak_gbytes_s:.3g} GB/s", flush=True)
    print(columns([HEAD, *(cells(name, result) for name, result in rows)]), flush=True)
    return 0 if all(result.outcome == "ok" for _, result in rows) else 1


def _measured(source: str, checker: Checker, timer: Timer) -> Result:
    with checker.checked(source, extracted=True) as (result, library):
        try:
            return result if library is None else replace(result, timing=timer.time(library))
        except ChildFailed as failed:
            return Result(checker.kernel.name, failed.outcome, "time", str(failed))


def _attack(compiler: Compiler, cores: Sequence[int]) -> int:
    """Runs the programs that attack the benchmark. A checkout has them among its tests, a package has none."""
    runner = Path(torchtune_ext.__file__).parents[1] / "tests" / "helpers" / "exploits.py"
    if not runner.is_file():
        raise Mistake(
            "--exploits: the programs that attack the benchmark are in tests/exploits of the repository, not in the package: "
            "clone it, and say `pip install -e .` there"
        )
    return runpy.run_path(str(runner))["attack"](compiler, cores)


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise Mistake(f"--cores {text!r}: write numbers with commas between them, as 2,3")
    return [int(number) for number in text.split(",")]


def _level(word: str) -> str:
    """Returns "-O2" for "2", "O2" and "-O2"."""
    return f"-O{word.removeprefix('-').removeprefix('O')}"


def _program(file: str, args: argparse.Namespace) -> tuple[str, str, Kernel]:
    """Returns the name of a program, its source, and its kernel: the named one, or the one whose function it defines."""
    where = "standard input" if file == "-" else file
    try:
        with open(0 if file == "-" else file, "rb", closefd=file != "-") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise Mistake(f"{where} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise Mistake(f"{where} is empty")
    if len(data) > MAX_BYTES or b"\0" in data:
        raise Mistake(f"{where} is no program in C: it is {'too long' if len(data) > MAX_BYTES else 'no text'}")
    source = data.decode(errors="replace")
    names = (
        [args.problem] if args.problem else [each for each in KERNELS if re.search(rf"\bvoid\s+{each}\s*\(", source)]
    )
    if len(names) != 1:
        raise Mistake(
            f"{where} defines {' and '.join(names) or 'none'} of {', '.join(KERNELS)}; say which with --problem"
        )
    kernel = KERNELS[names[0]]
    return Path(where).name, source, kernel() if args.size is None else kernel(args.size)


def shortened(note: str) -> str:
    """Returns the line of a note that says most, as much as fits behind the table.

    A compiler names a function, or warns, before it comes to the error.
    """
    lines = note.split("\n")
    # The linker gives the reason before it says that it has failed.
    errors = (line for line in lines if _TELLING.search(line) and not _LINKER.match(line))
    line = next(errors, lines[0])
    return line if len(line) <= NOTE else f"{line[: NOTE - 1]}…"
