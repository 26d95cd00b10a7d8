"""The machine that times: its cores, the engines that use them, one timing at a time on each, and stolen time."""

import errno
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torchtune_ext.run.errors import DeadlineExceeded, UsageError

log = logging.getLogger(__name__)

# An engine's process is a fork of this program, with the same command line.
ENGINE_MODULE = b"torchtune_ext.sampling.client_process"
# For each time that this process keeps off some cores: those that it could run on before.
_saved_affinities: list[frozenset[int]] = []
LOCK_TIMEOUT_S = 600.0  # seconds to wait for another timing on the same cores, or for an engine that computes there
_LOCK_RETRY_S = 0.02
_LOG_AFTER_S = 15.0  # seconds of waiting for a lock until the log says so; most timings take less
_IDLE_WINDOW_S, _IDLE_WINDOWS = (
    0.05,
    2,
)  # an engine is idle after _WINDOWS windows of _WINDOW_S seconds without computing
_BUSY_FRACTION = 0.2  # of one core in a window: below, an engine only looks for work
_POLL_S = 0.2  # seconds between two looks at an engine that computes
_logged_engine_pids: set[int] = set()  # processes of engines that the log has named


def usable_cores() -> frozenset[int]:
    """Returns the cores that this process may run on, with those that it keeps off (`kept_off`)."""
    # Blocks of `kept_off` may nest. The first one saw the cores of the process as they were.
    return _saved_affinities[0] if _saved_affinities else frozenset(os.sched_getaffinity(0))


def engine_cores() -> dict[int, frozenset[int]]:
    """Finds the engines of all users of this machine. Returns the cores that each process may run on, by its id."""
    users = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # A process may have ended, or belong to somebody else.
            with suppress(OSError):
                if ENGINE_MODULE in (folder / "cmdline").read_bytes().split(b"\0"):
                    users[int(folder.name)] = frozenset(os.sched_getaffinity(int(folder.name)))
    return users


def choose_cores(cores: Sequence[int] | None, count: int) -> list[int]:
    """Returns the cores to time on: `cores`, or `count` of those that no engine may use, or the last ones.

    Raises:
        ValueError: there are fewer than `count`, `cores` are not `count`, or one is an engine's or not ours to use.
    """
    usable = sorted(usable_cores())
    if count > len(usable):
        raise UsageError(f"threads={count}, but this process may run on {len(usable)} cores")
    users = engine_cores()
    if cores is None:
        free = sorted(set(usable).difference(*users.values()))
        return (free if len(free) >= count else usable)[-count:]
    if not cores or not set(cores) <= set(usable):
        raise UsageError(f"cores={list(cores)}: use some of {usable}, which this process may run on")
    if len(set(cores)) != count or len(cores) != count:
        raise UsageError(
            f"cores={list(cores)}: threads={count} needs {count} different core{'s' * (count > 1)}; name them, or null to have "
            "them chosen"
        )
    for pid, its_cores in users.items():
        # An engine that may run anywhere has no core of its own.
        if len(its_cores) < (os.cpu_count() or 1) and (shared := its_cores & set(cores)):
            raise UsageError(
                f"cores={list(cores)}: {sorted(shared)} are those of an engine (process {pid}); "
                f"use others of {sorted(set(usable) - its_cores)}, or give the engine others (taskset)"
            )
    return sorted(cores)


@contextmanager
def avoid_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keeps all threads of this process, also those of libraries, off these cores, if it may run on others.

    At the end of the last such block, they may run again wherever they could before.
    """
    usable = usable_cores()
    others = usable - set(cores)
    # The kernel refuses an empty set, so a process that has only these cores stays on them.
    if not others:
        yield
        return
    _saved_affinities.append(usable)
    pin_threads(others)
    try:
        yield
    finally:
        _saved_affinities.pop()
        if not _saved_affinities:
            pin_threads(usable)


def pin_threads(cores: Set[int]) -> None:
    """Lets all threads of this process run only on these cores."""
    # `sched_setaffinity(0, ...)` would move only the thread that calls it.
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def lock_name(core: int) -> str:
    """Returns the abstract socket address (unix(7)) that stands for a core."""
    # Only one socket at a time can be bound to it, whoever the user is. The kernel frees it when its process ends,
    # however that happens, and there is no file that could be left behind or belong to somebody else.
    return f"\0torchtune-ext-core-{core}"


@contextmanager
def lock_cores(cores: Sequence[int], deadline_s: float) -> Iterator[None]:
    """Keeps other processes from timing on these cores. Raises TimeoutError if one still does after `deadline_s`."""
    give_up_at = time.monotonic() + deadline_s
    with ExitStack() as stack:
        # All take their cores in the same order, so no two processes wait for each other.
        for core in sorted(cores):
            lock = stack.enter_context(socket.socket(socket.AF_UNIX))
            log_at = time.monotonic() + _LOG_AFTER_S
            while not _try_bind(lock, lock_name(core)):
                if time.monotonic() > give_up_at:
                    raise DeadlineExceeded(
                        f"core {core} was still used for timing after {deadline_s:g} s, by another process"
                    )
                if time.monotonic() > log_at:
                    # The log says it once: this time is never reached.
                    log_at = give_up_at + 1
                    log.warning("timing on core %d waits until another process no longer times on it", core)
                time.sleep(_LOCK_RETRY_S)
        yield


def _try_bind(lock: socket.socket, name: str) -> bool:
    try:
        lock.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def wait_until_idle(cores: Sequence[int], deadline_s: float) -> float:
    """Waits until no engine that may run on one of these cores computes. Returns the seconds that this took.

    Raises:
        TimeoutError: an engine still computes after `deadline_s` seconds.
    """
    begin = time.monotonic()
    idle_windows = 0
    while users := [pid for pid, its_cores in engine_cores().items() if its_cores & set(cores)]:
        before = _cpu_ns(users)
        time.sleep(_IDLE_WINDOW_S)
        after = _cpu_ns(users)
        used = {pid: after[pid] - before[pid] for pid in before.keys() & after.keys()}
        busiest = max(used, key=used.__getitem__, default=0)
        # An idle engine still looks for work, which takes some CPU time.
        idle_windows = idle_windows + 1 if used.get(busiest, 0) < _BUSY_FRACTION * _IDLE_WINDOW_S * 1e9 else 0
        if idle_windows == _IDLE_WINDOWS:
            break
        if idle_windows:
            continue
        if time.monotonic() - begin > deadline_s:
            raise DeadlineExceeded(
                f"an engine (process {busiest}) still computes on cores {sorted(cores)} after {deadline_s:g} s: "
                "time on cores that it may not use, or give it others (taskset)"
            )
        if busiest not in _logged_engine_pids:
            _logged_engine_pids.add(busiest)
            log.warning("timing on cores %s waits until an engine (process %d) is idle", sorted(cores), busiest)
        time.sleep(_POLL_S)
    return time.monotonic() - begin


def _cpu_ns(engine_pids: Sequence[int]) -> dict[int, int]:
    """Returns the CPU nanoseconds of these engines, each with all processes of the session that it leads."""
    # The workers of an engine are in its session (setsid(2)), and their work is the engine's.
    used = dict.fromkeys(engine_pids, 0)
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process may have ended.
            with suppress(OSError):
                leader = int(name) if int(name) in used else os.getsid(int(name))
                if leader in used:
                    # Python lacks clock_getcpuclockid(3). The kernel's id of a process's CPU clock is ~pid above three
                    # bits, of which 2 asks for the scheduler's count: nanoseconds, where /proc/PID/stat has ticks.
                    used[leader] += time.clock_gettime_ns(~int(name) << 3 | 2)
    return used


def stolen_ticks(cores: Sequence[int]) -> int:
    """Returns the clock ticks (10 ms mostly) for which the host has kept these cores to itself (proc_stat(5))."""
    names = {f"cpu{core}" for core in cores}
    # The eighth number of a line is "steal".
    with open("/proc/stat", encoding="ascii") as file:
        return sum(int(line.split()[8]) for line in file if line.split()[0] in names)


def machine_fingerprint() -> str:
    """Returns what a measured speed depends on, besides the program: processor, cores, kernel."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            # x86 has the name of a model here, ARM only the number of a part.
            if line.startswith(("model name", "CPU part")):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
