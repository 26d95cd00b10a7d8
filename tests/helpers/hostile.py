"""Runs programs that attack the benchmark, and looks at what they leave behind."""

import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.tasks.measured.check import Checker, Deadlines
from torchtune_ext.tasks.measured.exploits import Exploit
from torchtune_ext.tasks.measured.kernels import KERNELS

# A program that should not end is given little time, and every other one more than it needs on a machine that is shared.
PATIENT = Deadlines(screen_s=30.0, compile_s=60.0, load_s=30.0, verify_s=120.0)
SHORT = Deadlines(screen_s=30.0, compile_s=60.0, load_s=2.0, verify_s=3.0)
SLACK_S = 30.0  # what starting, killing and cleaning up may add under load
END_S = 10.0  # until a process that was killed is gone from the list


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one program."""

    name: str
    outcome: str
    stage: str
    note: str
    seconds: float
    allowed_s: float  # the deadlines together
    left: tuple[str, ...]  # processes, files and mounts that it left behind
    peak_bytes: int  # most bytes that its folder held


def run_all(programs: Sequence[Exploit], namespaces: bool, screened: bool) -> tuple[list[Result], int]:
    """Checks programs one after the other.

    Returns:
        The results, and the largest memory that any child has used so far, in bytes.
    """
    results = []
    for kernel in sorted({each.kernel for each in programs}):
        with Checker(KERNELS[kernel](), namespaces=namespaces, screened=screened) as checker:
            for each in programs:
                if each.kernel == kernel:
                    results.append(run_one(each, checker, screened))
        if checker.sandbox.folder.exists():
            raise AssertionError(f"{checker.sandbox.folder} is left")
    return results, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def run_one(program: Exploit, checker: Checker, screened: bool) -> Result:
    """Checks one program and compares the machine before and after."""
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
    """Returns what a program could leave behind: its processes, its files, and mounts."""
    folder = str(checker.sandbox.folder)
    found = {f"process {pid}" for pid in processes(folder)}
    found |= {f"file {path}" for path in checker.sandbox.folder.rglob("*")}
    for place in ("/tmp", "/dev/shm", "/var/tmp"):
        names = os.listdir(place) if os.path.isdir(place) else []
        found |= {f"file {place}/{name}" for name in names if is_ours(Path(place, name))}
    found |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines()}
    return found


def processes(folder: str) -> list[int]:
    """Returns the processes that were started from the sandbox's folder, and their children by fork."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if folder.encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue  # it has ended
    return found


def is_ours(path: Path) -> bool:
    """Whether a file is one that an exploit writes, or belongs to a user that only a sandbox uses."""
    try:
        return path.name.startswith("torchtune-ext-exploit") or 61184 <= path.lstat().st_uid < 65520
    except OSError:
        return False


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Yields a list whose only number is the largest size of the folder while the block ran."""
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
