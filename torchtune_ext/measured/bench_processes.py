"""What the processes of the service do: they check programs, or time those that are right.

Both functions are called in a process of its own (run/processes.py), and keep what a kernel needs from one call to the next.
"""

import atexit
import os
import pickle
import shutil
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtune_ext.measured.check import Checker
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.compiler import LIBRARY
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.machine import alone_on, wait_until_idle
from torchtune_ext.measured.probe import Wild
from torchtune_ext.measured.results import NOISY, Result, Timing
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.timing import LOCK_S, Timer

MAX_KERNELS = 8  # kernels for which a process keeps something
TURN_S = 0.03  # between two timings; others who wait for the cores look every 0.02 s whether they are free
# What is computed by numpy here must not spread over the cores that are timed on.
VARIABLES = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


MakeChecker = Callable[..., Checker]  # of a kernel and `cores`: all else is given


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine failed, and nothing is known about the program."""

    cause: str
    is_final: bool  # another attempt would not help


class Kept(OrderedDict[str, Any]):
    """What was made for each of the most recently used kernels. It is closed when it goes, and at the end of the process."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.close)

    def made(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self:
            while len(self) >= MAX_KERNELS:
                self.drop(next(iter(self)))
            self[key] = make()
        self.move_to_end(key)
        return self[key]

    def drop(self, key: str) -> None:
        if key in self:
            self.pop(key).close()

    def close(self) -> None:
        for key in list(self):
            self.drop(key)


# They belong to this process.
CHECKERS, TIMERS = Kept(), Kept()


def check_program(
    make: MakeChecker,
    cores: tuple[int, ...],
    key: str,
    kernel: bytes,
    text: str,
    permitted: tuple[str, ...] | None = None,
) -> tuple[Result, bytes] | Failed:
    """Checks the program in a text on these cores, and returns its library, too: compressed, and empty if it is not "ok".

    `key` tells kernels apart, `kernel` is pickled, `permitted` is as in `Bench.submit`.
    """
    try:
        os.sched_setaffinity(0, cores)
        checker = CHECKERS.made(key, lambda: make(pickle.loads(kernel), cores=cores))
        with checker.checked(text, permitted=permitted) as (result, library):
            return result, b"" if library is None else zlib.compress(library.read_bytes(), 1)
    except (SandboxError, OSError) as error:
        CHECKERS.drop(key)
        return _failed(error)


def time_program(
    make: MakeChecker,
    check_cores: tuple[int, ...],
    cores: tuple[int, ...],
    budget_s: float,
    key: str,
    kernel: bytes,
    name: str,
    library: bytes,
) -> Result | Failed:
    """Times a library that `check_program` has found right, of the kernel with this name, on `cores`.

    The seconds of the result are "wait", until the cores were idle, free, and their peak known, and "time".
    """
    start = time.monotonic()
    begun: list[float] = []

    def begin() -> None:
        # An engine may have begun to compute while this waited for the cores.
        wait_until_idle(cores, LOCK_S)
        begun.append(time.monotonic())

    def result(outcome: str, note: str, timing: Timing | None = None) -> Result:
        now = time.monotonic()
        since = begun[0] if begun else now
        return Result(name, outcome, "time", note, timing, {"wait": since - start, "time": now - since})

    if not TIMERS:
        # The process that started this one may keep off some of them.
        os.sched_setaffinity(0, {*check_cores, *cores})
    try:
        time.sleep(TURN_S)
        wait_until_idle(cores, LOCK_S)
        timer = TIMERS.made(key, lambda: _timer(make, pickle.loads(kernel), cores, budget_s))
        folder = timer.checker.sandbox.new_folder()
        try:
            (folder / LIBRARY).write_bytes(zlib.decompress(library))
            (folder / LIBRARY).chmod(0o755)
            timing = timer.time(folder / LIBRARY, begin)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except Wild as error:
        return result(NOISY, str(error))
    except ChildFailed as failed:
        return result(failed.outcome, str(failed))
    except (SandboxError, OSError) as error:
        TIMERS.drop(key)
        return _failed(error)
    if timing.is_noisy:
        note = (
            f"others disturb the machine: after {budget_s:g} s nothing is known of its speed "
            f"(what was timed has an interval of ±{timing.spread:.1%})"
        )
        return result(NOISY, note)
    return result("ok", "", timing)


def _timer(make: MakeChecker, kernel: Kernel, cores: tuple[int, ...], budget_s: float) -> "OwningTimer":
    with alone_on(cores, LOCK_S):
        checker = make(kernel, cores=cores)
    try:
        return OwningTimer(checker, budget_s)
    except ChildFailed as failed:
        # So far only our own programs have run.
        checker.close()
        raise SandboxError(f"a process of ours ended: {failed}") from failed
    except BaseException:
        checker.close()
        raise


class OwningTimer(Timer):
    """A timer whose checker ends with it."""

    def close(self) -> None:
        super().close()
        self.checker.close()


def _failed(error: Exception) -> Failed:
    # After a long wait in vain there is no second one.
    return Failed(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
