"""The timing machine: core selection, engine detection, core locks, and steal time."""

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
# For each active `avoid_cores` block: the usable cores of this process before it.
_saved_affinities: list[frozenset[int]] = []
LOCK_TIMEOUT_S = 600.0  # seconds to wait for another timing on the same cores, or for a busy engine on them
_LOCK_RETRY_S = 0.02
_LOG_AFTER_S = 15.0  # seconds of waiting for a lock before a warning; most timings take less
# An engine is idle after _IDLE_WINDOWS windows of _IDLE_WINDOW_S seconds without load.
_IDLE_WINDOW_S, _IDLE_WINDOWS = 0.05, 2
_BUSY_FRACTION = 0.2  # of one core in a window; an engine below it only polls for work
_POLL_S = 0.2  # seconds between two polls of a busy engine
_logged_engine_pids: set[int] = set()  # engine processes that the log has named


def usable_cores() -> frozenset[int]:
    """Returns the cores that this process may run on, including the ones in `avoid_cores`."""
    # Blocks of `avoid_cores` may nest. The first one saved the original cores of the process.
    return _saved_affinities[0] if _saved_affinities else frozenset(os.sched_getaffinity(0))


def engine_cores() -> dict[int, frozenset[int]]:
    """Returns {process id: allowed cores} of the engines of all users of this machine."""
    users = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # A process may have ended, or belong to another user.
            with suppress(OSError):
                if ENGINE_MODULE in (folder / "cmdline").read_bytes().split(b"\0"):
                    users[int(folder.name)] = frozenset(os.sched_getaffinity(int(folder.name)))
    return users


def choose_cores(cores: Sequence[int] | None, count: int) -> list[int]:
    """Returns the cores to time on.

    Args:
        cores: the configured cores. None: cores that no engine may use, or else the last ones.

    Raises:
        UsageError: there are not `count` cores, or a core is unusable or belongs to an engine.
    """
    usable = sorted(usable_cores())
    if count > len(usable):
        raise UsageError(f"threads={count}, but this process may run on {len(usable)} cores. Fix: lower threads")
    users = engine_cores()
    if cores is None:
        free = sorted(set(usable).difference(*users.values()))
        return (free if len(free) >= count else usable)[-count:]
    if not cores or not set(cores) <= set(usable):
        raise UsageError(f"cores={list(cores)}: use some of {usable}, which this process may run on")
    if len(set(cores)) != count or len(cores) != count:
        raise UsageError(
            f"cores={list(cores)}: threads={count} needs {count} different core{'s' * (count > 1)}; name them, or null "
            "to select them automatically"
        )
    for pid, its_cores in users.items():
        # An engine without core affinity has no core of its own.
        if len(its_cores) < (os.cpu_count() or 1) and (shared := its_cores & set(cores)):
            raise UsageError(
                f"cores={list(cores)}: {sorted(shared)} belong to an engine (process {pid}). Fix: "
                f"use cores of {sorted(set(usable) - its_cores)}, or move the engine to other cores (taskset)"
            )
    return sorted(cores)


@contextmanager
def avoid_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keeps all threads of this process, including library threads, off these cores, if possible.

    The end of the outermost block restores the original cores.
    """
    usable = usable_cores()
    others = usable - set(cores)
    # The kernel rejects an empty set, so a process that has only these cores stays on them.
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
    """Pins all threads of this process to these cores."""
    # `sched_setaffinity(0, ...)` would move only the calling thread.
    for thread in os.listdir("/proc/self/task"):
        # A thread may have ended.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)


def lock_name(core: int) -> str:
    """Returns the abstract socket address (unix(7)) that serves as the lock of a core."""
    # Only one socket of any user can be bound to it at a time. The kernel frees the address when
    # its process ends, even after SIGKILL. A lock file could remain, or belong to another user.
    return f"\0torchtune-ext-core-{core}"


@contextmanager
def lock_cores(cores: Sequence[int], deadline_s: float) -> Iterator[None]:
    """Locks these cores against timings of other processes.

    Raises:
        DeadlineExceeded: another process still times on a core after `deadline_s` seconds.
    """
    give_up_at = time.monotonic() + deadline_s
    with ExitStack() as stack:
        # All processes lock their cores in the same order, so no deadlock occurs.
        for core in sorted(cores):
            lock = stack.enter_context(socket.socket(socket.AF_UNIX))
            log_at = time.monotonic() + _LOG_AFTER_S
            while True:
                try:
                    lock.bind(lock_name(core))
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                if time.monotonic() > give_up_at:
                    raise DeadlineExceeded(
                        f"core {core} was still used for timing after {deadline_s:g} s, by another process. Fix: wait, "
                        "or choose other cores"
                    )
                if time.monotonic() > log_at:
                    # This time is never reached, so the warning appears once.
                    log_at = give_up_at + 1
                    log.warning("timing on core %d waits for another process that times on it", core)
                time.sleep(_LOCK_RETRY_S)
        yield


def wait_until_idle(cores: Sequence[int], deadline_s: float) -> float:
    """Waits until all engines that may run on these cores are idle. Returns the seconds waited.

    Raises:
        DeadlineExceeded: an engine is still busy after `deadline_s` seconds.
    """
    begin = time.monotonic()
    idle_windows = 0
    while users := [pid for pid, its_cores in engine_cores().items() if its_cores & set(cores)]:
        before = _cpu_ns(users)
        time.sleep(_IDLE_WINDOW_S)
        after = _cpu_ns(users)
        used = {pid: after[pid] - before[pid] for pid in before.keys() & after.keys()}
        busiest = max(used, key=used.__getitem__, default=0)
        # An idle engine still polls for work, which takes some CPU time.
        idle_windows = idle_windows + 1 if used.get(busiest, 0) < _BUSY_FRACTION * _IDLE_WINDOW_S * 1e9 else 0
        if idle_windows == _IDLE_WINDOWS:
            break
        if idle_windows:
            continue
        if time.monotonic() - begin > deadline_s:
            raise DeadlineExceeded(
                f"an engine (process {busiest}) still computes on cores {sorted(cores)} after {deadline_s:g} s. "
                "Fix: benchmark on cores that the engine may not use, or move the engine to other cores (taskset)"
            )
        if busiest not in _logged_engine_pids:
            _logged_engine_pids.add(busiest)
            log.warning("timing on cores %s waits until an engine (process %d) is idle", sorted(cores), busiest)
        time.sleep(_POLL_S)
    return time.monotonic() - begin


def _cpu_ns(engine_pids: Sequence[int]) -> dict[int, int]:
    """Returns the CPU nanoseconds of each engine, summed over all processes of its session."""
    # The workers of an engine belong to its session (setsid(2)), so their CPU time counts too.
    used = dict.fromkeys(engine_pids, 0)
    for name in os.listdir("/proc"):
        if name.isdigit():
            # A process may have ended.
            with suppress(OSError):
                leader = int(name) if int(name) in used else os.getsid(int(name))
                if leader in used:
                    # Python lacks clock_getcpuclockid(3). A process CPU clock has the id ~pid << 3
                    # plus a type; type 2 counts nanoseconds, and /proc/PID/stat only ticks.
                    used[leader] += time.clock_gettime_ns(~int(name) << 3 | 2)
    return used


def stolen_ticks(cores: Sequence[int]) -> int:
    """Returns the steal time of these cores in clock ticks, mostly 10 ms each (proc_stat(5))."""
    names = {f"cpu{core}" for core in cores}
    # The eighth number of a line is "steal".
    with open("/proc/stat", encoding="ascii") as file:
        return sum(int(line.split()[8]) for line in file if line.split()[0] in names)


def machine_fingerprint() -> str:
    """Returns the machine properties that affect a measured speed: CPU, cores, Linux version."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            # x86 reports a model name, ARM only a part number.
            if line.startswith(("model name", "CPU part")):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
