"""What the processes of the service do: `Checking` checks programs, `TimeKeeping` times those that are right.

Both are called in a process of their own (run/processes.py), and keep what a kernel needs from one call to the next. They tell
when they start to work on a program (BEGUN): what a kernel needs first, and what others do on the cores, takes nothing from its
time. Meanwhile they tell that they are still there (WAITING), so that a process which is stopped or hangs is soon found out.
"""

import atexit
import os
import pickle
import shutil
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from torchtune_ext.measured.check import Checker, Deadlines, Verdict
from torchtune_ext.measured.child import ChildFailed
from torchtune_ext.measured.compiler import LIBRARY, Compiler
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.machine import alone_on, wait_until_idle
from torchtune_ext.measured.probe import Wild
from torchtune_ext.measured.results import NOISY
from torchtune_ext.measured.sandbox import Limits, SandboxError
from torchtune_ext.measured.timing import LOCK_S, Timer, Timing
from torchtune_ext.run.worker_process import BEGUN, WAITING

MAX_KERNELS = 8  # kernels for which a process keeps something
TURN_S = 0.03  # between two timings; others who wait for the cores look every 0.02 s whether they are free
SIGN_S = 1.0  # seconds between two signs of life of a process that waits
# What is computed by numpy here must not spread over the cores that are timed on.
VARIABLES = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

Thing = TypeVar("Thing")


@dataclass(frozen=True, slots=True)
class Settings:
    """What all processes of a service know."""

    compiler: Compiler
    optimization: str
    threads: int
    budget_s: float
    namespaces: bool | None
    sandbox: str
    deadlines: Deadlines
    limits: Limits
    check_cores: tuple[int, ...]
    timed_cores: tuple[int, ...]

    def checker(self, kernel: Kernel, cores: tuple[int, ...]) -> Checker:
        return Checker(
            kernel,
            self.compiler,
            self.optimization,
            self.threads,
            cores,
            self.namespaces,
            self.sandbox,
            self.deadlines,
            self.limits,
        )


@dataclass(frozen=True, slots=True)
class Checked:
    """The end of a check."""

    verdict: Verdict
    library: bytes  # compressed; empty if the verdict is not "ok"


@dataclass(frozen=True, slots=True)
class Timed:
    """The end of a timing."""

    outcome: str  # "ok", NOISY, or what a call that failed means
    note: str
    timing: Timing | None  # only if it is "ok"
    seconds: Mapping[str, float]  # "wait": until the cores were idle, free, and their peak known; "time"


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine failed, and nothing is known about the program."""

    cause: str
    is_final: bool  # another attempt would not help


class Kept(Generic[Thing]):
    """Keeps what was made for each of the most recently used kernels."""

    def __init__(self) -> None:
        self._things: OrderedDict[str, Thing] = OrderedDict()
        atexit.register(self.close)

    def __len__(self) -> int:
        return len(self._things)

    def get(self, key: str, make: Callable[[], Thing]) -> Thing:
        if key not in self._things:
            while len(self._things) >= MAX_KERNELS:
                self.drop(next(iter(self._things)))
            self._things[key] = make()
        self._things.move_to_end(key)
        return self._things[key]

    def drop(self, key: str) -> None:
        if key in self._things:
            self._things.pop(key).close()

    def close(self) -> None:
        for key in list(self._things):
            self.drop(key)


# They belong to this process. They cannot be pickled, so they are no part of the objects below.
CHECKERS: "Kept[Checker]" = Kept()
TIMERS: "Kept[OwningTimer]" = Kept()


class Checking:
    """Checks programs on the cores for checks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(
        self, tell: Callable[[str], None], key: str, kernel: bytes, text: str, permitted: tuple[str, ...] | None = None
    ) -> Checked | Failed:
        """Checks the program in a text. `key` tells kernels apart, `kernel` is pickled, `permitted` is as in `Bench.submit`."""
        try:
            os.sched_setaffinity(0, self.settings.check_cores)
            checker = CHECKERS.get(key, lambda: self._checker(kernel))
            tell(BEGUN)
            with checker.checked(text, permitted=permitted) as (verdict, library):
                return Checked(verdict, b"" if library is None else zlib.compress(library.read_bytes(), 1))
        except (SandboxError, OSError) as error:
            CHECKERS.drop(key)
            return _failed(error)

    def _checker(self, kernel: bytes) -> Checker:
        return self.settings.checker(pickle.loads(kernel), self.settings.check_cores)


class TimeKeeping:
    """Times programs, one after the other."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, tell: Callable[[str], None], key: str, kernel: bytes, library: bytes) -> Timed | Failed:
        """Times a library that `Checking` has found right."""
        cores, clock = self.settings.timed_cores, _Clock(tell)

        def alone() -> None:
            # An engine may have begun to compute while this waited for the cores.
            wait_until_idle(cores, LOCK_S, clock.waits)
            clock.begin()

        if not TIMERS:
            # The process that started this one may keep off some of them.
            os.sched_setaffinity(0, {*self.settings.check_cores, *cores})
        try:
            time.sleep(TURN_S)
            wait_until_idle(cores, LOCK_S, clock.waits)
            timer = TIMERS.get(key, lambda: self._timer(kernel, clock))
            folder = timer.checker.sandbox.new_folder()
            try:
                (folder / LIBRARY).write_bytes(zlib.decompress(library))
                (folder / LIBRARY).chmod(0o755)
                timing = timer.time(folder / LIBRARY, alone, clock.waits)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except Wild as error:
            return Timed(NOISY, str(error), None, clock.seconds())
        except ChildFailed as failed:
            return Timed(failed.outcome, str(failed), None, clock.seconds())
        except (SandboxError, OSError) as error:
            TIMERS.drop(key)
            return _failed(error)
        if timing.is_noisy:
            note = (
                f"others disturb the machine: after {self.settings.budget_s:g} s nothing is known of its speed "
                f"(what was timed has an interval of ±{timing.spread:.1%})"
            )
            return Timed(NOISY, note, None, clock.seconds())
        return Timed("ok", "", timing, clock.seconds())

    def _timer(self, kernel: bytes, clock: "_Clock") -> "OwningTimer":
        cores = self.settings.timed_cores
        with alone_on(cores, LOCK_S, clock.waits):
            checker = self.settings.checker(pickle.loads(kernel), cores)
        try:
            return OwningTimer(checker, self.settings.budget_s, clock.waits)
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


class _Clock:
    """How long a program waited, and how long it was worked on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._start, self._begun = time.monotonic(), None
        self._sign_at = self._start

    def waits(self) -> None:
        """Says that it still waits, at most once in SIGN_S seconds."""
        if time.monotonic() > self._sign_at + SIGN_S:
            self._sign_at = time.monotonic()
            self._tell(WAITING)

    def begin(self) -> None:
        self._begun = time.monotonic()
        self._tell(BEGUN)

    def seconds(self) -> dict[str, float]:
        now = time.monotonic()
        begun = now if self._begun is None else self._begun
        return {"wait": begun - self._start, "time": now - begun}


def _failed(error: Exception) -> Failed:
    # After a long wait in vain there is no second one.
    return Failed(f"{type(error).__name__}: {error}", isinstance(error, TimeoutError))
