"""Decides which program is checked or timed next. It starts nothing itself, so that its rules can be tried out by themselves.

Checks run in parallel, timings one after the other. Where both need the same cores, they never run at the same time: checks go
first, since they are short and most programs end there, and a timing begins when all that were begun have ended. A timing
waits for at most `PATIENCE` checks that begin after it could have begun.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

PATIENCE = 64  # about ten seconds of two cores
CHECK, TIME = "check", "time"

Job = TypeVar("Job", bound=Hashable)


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
        self.checking: set[Job] = set()
        self.timing: Job | None = None
        self._passed = 0  # checks that have begun while a timing waited

    def add(self, stage: str, job: Job, first: bool = False) -> None:
        """Lets a job wait for its check or its timing; `first`: before all others, since it has waited already."""
        queue = self.checks if stage == CHECK else self.timings
        if first:
            queue.appendleft(job)
        else:
            queue.append(job)

    def next(self) -> tuple[str, Job] | None:
        """Returns what begins now, and counts it as running; None: nothing. Ask until it is None."""
        if self.checks and len(self.checking) < self.workers and self._may_check():
            job = self.checks.popleft()
            self.checking.add(job)
            self._passed += bool(self.timings)
            return CHECK, job
        if self.timings and self.timing is None and self._may_time():
            self._passed = 0
            self.timing = self.timings.popleft()
            return TIME, self.timing
        return None

    def ended(self, stage: str, job: Job) -> None:
        """What runs of this job has ended, well or not."""
        if stage == CHECK:
            self.checking.remove(job)
        elif self.timing == job:
            self.timing = None
        else:
            raise ValueError(f"{job!r} is not being timed")

    def _may_check(self) -> bool:
        return not self.is_shared or (self.timing is None and not self._is_timings_turn())

    def _may_time(self) -> bool:
        return not self.is_shared or (not self.checking and (not self.checks or self._is_timings_turn()))

    def _is_timings_turn(self) -> bool:
        return bool(self.timings) and self._passed >= PATIENCE
