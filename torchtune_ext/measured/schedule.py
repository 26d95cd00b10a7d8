"""Decides which program is checked or timed next. It starts nothing itself, so that its rules can be tried out by themselves.

Checks run in parallel, timings one after the other. A timing is *alone* if no check runs beside it: each one where both need
the same cores, and one that is made again because it was disturbed. For checks may disturb a timing on other cores, too: they
share caches and memory, and two cores of a virtual machine are often one. Checks go first, since they are short and most
programs end there, and a timing that has to be alone begins when all that were begun have ended. It waits for at most
`PATIENCE` checks that begin after it could have begun.
"""

from collections import deque
from typing import Generic, TypeVar

PATIENCE = 64  # about ten seconds of two cores
CHECK, TIME = "check", "time"

Job = TypeVar("Job")


class Schedule(Generic[Job]):
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

    def next(self) -> tuple[str, Job] | None:
        """Returns what begins now, and counts it as running; None: nothing. Ask until it is None."""
        wants_quiet = bool(self.again or (self.is_shared and self.timings))
        is_its_turn = wants_quiet and self._passed >= PATIENCE
        is_timing_alone = self.timing is not None and self._is_alone
        if self.checks and len(self.checking) < self.workers and not is_timing_alone and not is_its_turn:
            job = self.checks.popleft()
            self.checking.add(job)
            self._passed += wants_quiet
            return CHECK, job
        is_quiet = not self.checking and (not self.checks or is_its_turn)
        for queue, alone in ((self.timings, self.is_shared), (self.again, True)):
            if self.timing is None and queue and (is_quiet or not alone):
                self.timing, self._is_alone = queue.popleft(), alone
                self._passed = 0 if alone else self._passed
                return TIME, self.timing
        return None

    def ended(self, stage: str, job: Job) -> None:
        """What runs of this job has ended, well or not."""
        if stage == CHECK:
            self.checking.remove(job)
        else:
            self.timing = None
