"""Texts -> outcomes. A grader's failure is an outcome of its own kind, never a number that hides it.

kind             what happened                                                     score   trained on
"scored"         the task's grader returned a Score; a wrong answer is scored too   yes     yes
"policy_failed"  the same, and the grader says that the text holds no answer to    yes     yes
                 grade: Score.parts["failed"] is not 0 (a log can tell the two apart)
"infra_failed"   the grader raised, crashed, or returned no finite number           None    no, kept out of the baseline
"timed_out"      the grader was still busy after the deadline, and was killed       None    no, kept out of the baseline

Graders run in worker processes that can be killed at any moment, also inside C code that holds the interpreter lock
(a regular expression that backtracks for ever). A worker holds one text at a time: what it does to itself concerns no
other, and a round trip takes some 0.1 ms, so there is little to gain from chunks.
"""

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Self

import cloudpickle

from torchtune_ext import grading_worker
from torchtune_ext.grading_worker import FAILED_PART
from torchtune_ext.run.parent import environment
from torchtune_ext.tasks.task import Problem, Score, Task

__all__ = ["FAILED_PART", "Grader", "GraderConfig", "Outcome"]

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0  # for a worker to import the task's module
WAKE_S = (
    1.0  # after which a wait looks whether another thread took a Ctrl-C, which Python acts on in the main one alone
)
MAX_START_FAILURES = 3  # in a row, before `grade` raises
_LOST = (EOFError, OSError, pickle.UnpicklingError)  # how the end of a worker looks from here


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of grading one text."""

    kind: str  # "scored", "policy_failed", "infra_failed" or "timed_out"
    score: Score | None  # None when the infrastructure failed or timed out
    cause: str  # error text for the log, "" when there is a score


@dataclass(frozen=True, slots=True)
class GraderConfig:
    """The node `grader:` of a recipe."""

    workers: int = 1  # processes that grade
    timeout_s: float = 10.0  # seconds for one text

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"grader.workers={self.workers} must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"grader.timeout_s={self.timeout_s} must be more than 0 seconds")


class Grader:
    """Grades texts with `task.grade` in `workers` processes, each item within `timeout_s` seconds.

    The task travels by cloudpickle, so its class may live in the user's copied recipe (`__main__`). The processes start
    at once, import no torch unless the task does, and do not outlive this process or `close`.
    Raises ValueError for a knob out of range or a task that cannot be pickled, RuntimeError when workers cannot start.
    """

    def __init__(self, task: Task, workers: int = 1, timeout_s: float = 10.0):
        config = GraderConfig(workers, timeout_s)
        try:
            payload = cloudpickle.dumps(task)
        except Exception as error:  # pickling runs code of the task's, which may raise anything
            raise ValueError(
                f"task {type(task).__name__} cannot be sent to a grading process: {type(error).__name__}: {error}. "
                "Keep open files, locks and models out of its attributes"
            ) from error
        self.timeout_s = config.timeout_s
        self._hello = pickle.dumps((list(sys.path), payload))
        self._lock = threading.Lock()
        # The kernel ties a worker's life to the *thread* that started it: one that lives as long as this object.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="grading-starter")
        self._closed = False
        self._start_failures = 0  # in a row
        self._workers = [self._start() for _ in range(config.workers)]

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """One outcome for each (problem, text), in their order. Threads may call it; their calls take turns."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the Grader is closed")
            outcomes = self._grade(items)
        _log_failures(outcomes)
        return outcomes

    def close(self) -> None:
        """Kills the workers. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for worker in self._workers:
                worker.kill()
            self._starter.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self) -> "_Worker":
        return self._starter.submit(_Worker, self._hello).result(timeout=START_DEADLINE_S)

    def _grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        queue = deque(range(len(items)))
        try:
            while len(outcomes) < len(items):
                for slot, worker in enumerate(self._workers):
                    if queue and worker.ready and worker.item is None:
                        if worker.take(queue[0], items, self.timeout_s):
                            queue.popleft()
                        else:
                            self._replace(slot)  # it died while idle: nothing of ours was lost
                busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
                left_s = min(worker.deadline for worker in busy) - time.monotonic()
                left_s = min(max(left_s, 0.0), WAKE_S)
                answered = set(wait([worker.connection for worker in busy], timeout=left_s))
                for slot, worker in enumerate(self._workers):
                    failure = None
                    if worker.connection in answered:
                        failure = worker.receive(outcomes)
                    elif worker in busy and time.monotonic() >= worker.deadline:
                        cause = f"no answer within {worker.allowed_s:g} s; the process was killed"
                        failure = Outcome("timed_out", None, cause)
                    if failure is not None:
                        self._blame(worker, failure, outcomes)
                        self._replace(slot)
        finally:
            for slot, worker in enumerate(self._workers):  # only after an exception: no answer may reach the next call
                if worker.item is not None:
                    self._replace(slot)
        return [outcomes[index] for index in range(len(items))]

    def _blame(self, worker: "_Worker", failure: Outcome, outcomes: dict[int, Outcome]) -> None:
        """The failure of a worker belongs to the item it had in hand, or, before it was ready, to the task."""
        if worker.ready:
            self._start_failures = 0
            outcomes[worker.item], worker.item = failure, None
            return
        self._start_failures += 1
        if worker.refused or self._start_failures == MAX_START_FAILURES:
            raise RuntimeError(f"a grading process could not start with this task: {failure.cause}")

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = self._start()


class _Worker:
    """One worker process, as this side sees it."""

    def __init__(self, hello: bytes):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-P", grading_worker.__file__, str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment()
            )
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped worker may not block us in a message
                ours.setsockopt(socket.SOL_SOCKET, option, _timeval(START_DEADLINE_S))
            self.connection = Connection(ours.detach())
        self.ready = False  # has imported the task
        self.refused = False  # says itself why it cannot
        self.item: int | None = None  # what it is grading
        self.allowed_s = START_DEADLINE_S  # for its next answer
        self.deadline = time.monotonic() + self.allowed_s
        try:
            self.connection.send_bytes(hello)
        except _LOST:
            pass  # it died at once; `receive` finds out and reports it

    def take(self, item: int, items: Sequence[tuple[Problem, str]], timeout_s: float) -> bool:
        """Gives it an item; False when it is dead."""
        try:
            self.connection.send_bytes(cloudpickle.dumps(items[item]))
        except _LOST:
            return False
        self.item = item
        self.allowed_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        return True

    def receive(self, outcomes: dict[int, Outcome]) -> Outcome | None:
        """Takes one answer; returns a failure when there is none because the process has died or cannot start."""
        try:
            if not self.ready:
                state, cause = self.connection.recv()
                self.ready, self.refused = state == "ready", state == "failed"
                return Outcome("infra_failed", None, cause) if self.refused else None
            kind, reward, parts, cause = self.connection.recv()
        except _LOST as error:
            return Outcome("infra_failed", None, f"the grading process died: {self._epitaph(error)}")
        score = Score(reward=reward, parts=parts) if kind in ("scored", "policy_failed") else None
        outcomes[self.item], self.item = Outcome(kind, score, cause), None
        return None

    def kill(self) -> None:
        """Kills the process and all that it started (it leads a process group of its own), and reaps it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # already gone, and so is its group
        self.process.wait(timeout=START_DEADLINE_S)
        self.connection.close()

    def _epitaph(self, error: BaseException) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"it closed its connection ({type(error).__name__})"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _timeval(seconds: float) -> bytes:
    """C's struct timeval, as SO_RCVTIMEO takes it."""
    return int(seconds).to_bytes(8, sys.byteorder) + bytes(8)


def _log_failures(outcomes: Sequence[Outcome]) -> None:
    """One line for each kind of failure with its most common causes."""
    for kind in ("infra_failed", "timed_out"):
        causes = Counter(outcome.cause for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("grading: %d of %d texts %s: %s", sum(causes.values()), len(outcomes), kind, common)
