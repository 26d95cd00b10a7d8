"""Run programs that attack the benchmark, and check for leftovers."""

import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from helpers.exploits import Exploit
from helpers.stencil import KERNELS
from torchtune_ext.measured.check import Checker, Deadlines
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.compiler import Compiler
from torchtune_ext.measured.probe import UnstableMachine
from torchtune_ext.measured.timing import ProgramTimer, Timing

# A program that should not end gets a short deadline; every other program gets enough time for a shared machine.
PATIENT = Deadlines(screen_s=30.0, compile_s=60.0, load_s=30.0, verify_s=120.0)
SHORT = Deadlines(screen_s=30.0, compile_s=60.0, load_s=2.0, verify_s=3.0)
BUDGET_S = 1.5  # seconds for one timing
CALM_TRIES, CALM_S = 3, 1.0  # retries on a noisy machine, and the pause in seconds
# Fraction by which the same loop may be faster at another address in memory: 0.04 was observed. The attacks aim at a third
# (single precision) or a multiple (skipped or uncounted work).
MOVED = 0.10
SLACK_S = 30.0  # allowance for start, kill and cleanup under load
END_S = 10.0  # until a killed process leaves the process list


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one program."""

    name: str
    outcome: str
    stage: str
    note: str
    seconds: float
    allowed_s: float  # sum of the deadlines
    left: tuple[str, ...]  # leftover processes, files and mounts
    peak_bytes: int  # peak size of its folder
    # For timed programs: the speedup over the naive program, and its upper bound.
    speed: tuple[float, float] | None = None


def run_all(
    programs: Sequence[Exploit],
    namespaces: bool,
    screened: bool,
    compiler: str | None = None,
    optimization: str = "-O3",
    timed: bool = False,
) -> tuple[list[Result], int]:
    """Check programs one after the other. `timed`: also time attacks that pass.

    Returns:
        The results, and the peak memory of any child so far, in bytes.
    """
    results = []
    for kernel in sorted({each.kernel for each in programs}):
        make = partial(
            Checker,
            KERNELS[kernel](),
            Compiler.find(compiler),
            optimization,
            namespaces=namespaces,
            with_screen=screened,
        )
        with make() as checker:
            own = {each.name: run_one(each, checker, screened) for each in programs if each.kernel == kernel}
            checker.deadlines = PATIENT
            passed = [each for each in programs if each.name in own and own[each.name].outcome == "ok"]
            if timed and (attacks := [each for each in passed if each.attack != "none"]):
                for name, speed in speeds(attacks, partial(make, deadlines=PATIENT)).items():
                    own[name] = replace(own[name], speed=speed)
            results += own.values()
        if checker.sandbox.folder.exists():
            raise AssertionError(f"{checker.sandbox.folder} was not removed")
    return results, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def speeds(programs: Sequence[Exploit], make: Callable[[], Checker]) -> dict[str, tuple[float, float]]:
    """Time correct programs.

    Each program does the work of the naive program and more, so its true speedup is at most the naive program's speedup over
    itself. The bound is the upper end of that interval plus `MOVED`. The lower end of the program's own interval is compared
    with the bound.
    So a false alarm on an honest machine requires two errors in opposite directions.

    Returns:
        name -> (lower end, bound). A program that a timed call finds wrong has 0. NaN if this machine is too noisy
        for timings.
    """
    for _ in range(CALM_TRIES):
        try:
            with ProgramTimer(make(), BUDGET_S) as timer:
                return _speeds(programs, timer)
        except UnstableMachine:
            time.sleep(CALM_S)
    return {each.name: (math.nan, math.nan) for each in programs}


def _speeds(programs: Sequence[Exploit], timer: ProgramTimer) -> dict[str, tuple[float, float]]:
    ratios = {}
    honest = timing_of(timer.kernel.naive, timer)
    most = honest.speedup * (1 + honest.speedup_ci) * (1 + MOVED)
    for each in programs:
        try:
            timing = timing_of(each.source, timer)
            ratios[each.name] = timing.speedup * (1 - timing.speedup_ci), most
        except ChildFailed:
            ratios[each.name] = 0.0, most
    return ratios


def timing_of(source: str, timer: ProgramTimer) -> Timing:
    verdict, library = timer.checker.check_with_library(source, is_source=True)
    if verdict.outcome != "ok":
        raise ChildFailed(verdict.outcome, verdict.note)
    return timer.time_library(library)


def run_one(program: Exploit, checker: Checker, screened: bool) -> Result:
    """Check one program and compare the machine before and after."""
    outcomes = program.outcomes if screened else program.outcomes_behind
    checker.deadlines = SHORT if outcomes == ("timeout",) else PATIENT
    before = traces(checker)
    start = time.monotonic()
    with watched(checker.sandbox.folder) as peak:
        verdict = checker.check_source(program.source)
    seconds = time.monotonic() - start
    left = traces(checker) - before
    end = time.monotonic() + END_S
    while left and time.monotonic() < end:
        time.sleep(0.05)
        left = traces(checker) - before
    d = checker.deadlines
    # The compiler runs twice: once to preprocess, which belongs to the screen.
    allowed_s = d.screen_s + d.compile_s + d.load_s + d.verify_s
    return Result(
        program.name, verdict.outcome, verdict.stage, verdict.note, seconds, allowed_s, tuple(sorted(left)), peak[0]
    )


def traces(checker: Checker) -> set[str]:
    """Return possible leftovers of a program: processes, files and mounts."""
    folder = str(checker.sandbox.folder)
    entries = {f"process {pid}" for pid in processes(folder)}
    entries |= {f"file {path}" for path in checker.sandbox.folder.rglob("*")}
    for place in ("/tmp", "/dev/shm", "/var/tmp"):
        names = os.listdir(place) if os.path.isdir(place) else []
        entries |= {f"file {place}/{name}" for name in names if is_ours(Path(place, name))}
    entries |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines()}
    return entries


def processes(folder: str) -> list[int]:
    """Return the processes that were started from the sandbox's folder, and their forks."""
    pids = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                line = (process / "cmdline").read_bytes()
                if folder.encode() in line and b"reaper.py" not in line:
                    pids.append(int(process.name))
            except OSError:
                continue  # it has ended
    return pids


def is_ours(path: Path) -> bool:
    """Whether an exploit wrote a file, or a sandbox user owns it."""
    try:
        return path.name.startswith("torchtune-ext-exploit") or 61184 <= path.lstat().st_uid < 65520
    except OSError:
        return False


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Yield a one-element list with the peak size of the folder during the block."""
    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], size_of(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue  # it is gone
    return total
