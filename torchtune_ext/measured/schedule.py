"""Decides which program is checked or timed next. It starts nothing itself, so that its rules can be tried out by themselves.

Checks run in parallel, timings one after the other. A timing is *alone* if no check runs beside it: each one where both need
the same cores, and one that is made again because it was disturbed. For checks may disturb a timing on other cores, too: they
share caches and memory, and two cores of a virtual machine are often one. Checks go first, since they are short and most
programs end there, and a timing that has to be alone begins when all that were begun have ended. It waits for at most
`PATIENCE` checks that begin after it could have begun.
"""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.run.errors import Mistake

PATIENCE = 64  # about ten seconds of two cores
CHECK, TIME = "check", "time"


@dataclass(eq=False, slots=True)
class Job:
    """One program, and all who wait for its result."""

    key: str
    kernel_name: str
    kernel_key: str
    kernel: bytes
    text: str
    permitted: tuple[str, ...] | None
    futures: list[Future]
    library: bytes = b""
    techniques: tuple[str, ...] = ()
    attempts: int = 0
    has_begun: bool = False
    is_timed_again: bool = False  # its timing was disturbed, and is made once more
    seconds: dict[str, float] = field(default_factory=dict)

    def begin(self) -> bool:
        """Marks it as begun: from now on it cannot be canceled. Returns False if everybody has canceled it before."""
        if not self.has_begun:
            self.futures = [future for future in self.futures if future.set_running_or_notify_cancel()]
            self.has_begun = bool(self.futures)
        return self.has_begun


class Schedule:
    """Jobs that wait for their check or their timing, and those that run.

    Args:
        workers: how many checks run at a time.
        is_shared: whether checks run on the cores that are timed on.
    """

    def __init__(self, workers: int, is_shared: bool) -> None:
        self.workers, self.is_shared = workers, is_shared
        self.checks: deque[Job] = deque()
        self.timings: deque[Job] = deque()
        self.again: deque[Job] = deque()  # timings that were disturbed
        self.checking: set[Job] = set()
        self.timing: Job | None = None
        self._is_alone = False  # whether that timing is alone
        self._passed = 0  # checks that have begun while a timing waited to be alone

    def add(self, stage: str, job: Job, first: bool = False) -> None:
        """Lets a job wait for its check or its timing; `first`: before all others, since it has waited already."""
        queue = self.checks if stage == CHECK else self.timings
        if first:
            queue.appendleft(job)
        else:
            queue.append(job)

    def add_again(self, job: Job) -> None:
        """Lets a job whose timing was disturbed wait for another one, alone."""
        self.again.append(job)

    def next(self) -> tuple[str, Job] | None:
        """Returns what begins now, and counts it as running; None: nothing. Ask until it is None."""
        if self.checks and len(self.checking) < self.workers and self._may_check():
            job = self.checks.popleft()
            self.checking.add(job)
            self._passed += self._wants_quiet()
            return CHECK, job
        if self.timing is None and self.timings and (not self.is_shared or self._is_quiet()):
            return TIME, self._begin(self.timings, alone=self.is_shared)
        if self.timing is None and self.again and self._is_quiet():
            return TIME, self._begin(self.again, alone=True)
        return None

    def ended(self, stage: str, job: Job) -> None:
        """What runs of this job has ended, well or not."""
        if stage == CHECK:
            self.checking.remove(job)
        elif self.timing == job:
            self.timing = None
        else:
            raise Mistake(f"{job!r} is not being timed")

    def _begin(self, queue: deque[Job], alone: bool) -> Job:
        self.timing, self._is_alone = queue.popleft(), alone
        if alone:
            self._passed = 0
        return self.timing

    def _may_check(self) -> bool:
        return not (self.timing is not None and self._is_alone) and not self._is_timings_turn()

    def _is_quiet(self) -> bool:
        return not self.checking and (not self.checks or self._is_timings_turn())

    def _is_timings_turn(self) -> bool:
        return self._wants_quiet() and self._passed >= PATIENCE

    def _wants_quiet(self) -> bool:
        return bool(self.again or (self.is_shared and self.timings))


def kernel_key(kernel: Kernel) -> str:
    """Returns a name that tells kernels, and their timed sizes, apart."""
    kind = type(kernel)
    return f"{kind.__module__}.{kind.__qualname__} {kernel.name} {dict(kernel.timed)}"
