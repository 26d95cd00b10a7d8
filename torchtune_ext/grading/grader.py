"""Texts -> outcomes. A grader's failure is an outcome of its own kind, never a number that hides it.

kind             what happened                                                     score   trained on
"scored"         the task's grader returned a Score; a wrong answer is scored too   yes     yes
"policy_failed"  the same, and the grader says that the text holds no answer to    yes     yes
                 grade: Score.parts["failed"] is not 0 (a log can tell the two apart)
"infra_failed"   the grader raised, crashed, or returned no finite number           None    no, kept out of the baseline
"timed_out"      the grader was still busy after the deadline, and was killed       None    no, kept out of the baseline

Graders run in worker processes that can be killed at any moment, also inside C code that holds the interpreter lock
(a regular expression that backtracks for ever). A worker holds one text (or one group) at a time: what it does to itself
concerns no other, and a round trip takes some 0.1 ms, so there is little to gain from chunks.
"""

import concurrent.futures
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
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Self

import cloudpickle

from torchtune_ext.grading import worker_process
from torchtune_ext.grading.worker_process import FAILED_PART
from torchtune_ext.run.parent import environment
from torchtune_ext.tasks.task import Problem, Score, Task

__all__ = ["FAILED_PART", "Grader", "GraderConfig", "Outcome", "log_failures", "results"]

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0  # for a worker to import the task's module
# Python acts on a Ctrl-C in the main thread alone, but the kernel may give it to another: so often a wait looks for one.
WAKE_S = 1.0
MAX_START_FAILURES = 3  # in a row, before the Grader gives up
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
    """Grades texts with `task.grade` in `workers` processes, each text within `timeout_s` seconds.

    Where the task defines `grade_group(problem, texts)`, for a judge that compares, whole groups can be handed in, each within
    the same time.

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
        self.compares = hasattr(task, "grade_group")  # texts of a problem are graded together
        self._config = config
        self._hello = pickle.dumps((list(sys.path), payload))
        self._lock = threading.Lock()  # of the queue and of what ended it
        self._queue: deque[_Item] = deque()
        self._ended: Exception | None = None  # why nothing is taken any more
        self._bell, self._listener = socket.socketpair()
        self._listener.setblocking(False)
        # One thread alone has to do with the workers. The kernel ties their lives to it, and it lives as long as this object.
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=[started], name="grading", daemon=True)
        self._thread.start()
        started.result(timeout=START_DEADLINE_S)

    def submit(self, problem: Problem, text: str) -> "Future[Outcome]":
        """Hands a text in and returns at once. One that is slow delays only those that find no other worker free."""
        return self._submit(problem, (text,), together=False)

    def submit_group(self, problem: Problem, texts: Sequence[str]) -> "Future[list[Outcome]]":
        """The same of all texts of a problem at once, for a task with `grade_group`; one outcome for each, in their order."""
        return self._submit(problem, tuple(texts), together=True)

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """One outcome for each (problem, text), in their order."""
        futures = [self.submit(problem, text) for problem, text in items]
        outcomes = results(futures)
        log_failures(outcomes)
        return outcomes

    def close(self) -> None:
        """Kills the workers. A second call does nothing."""
        self._end(RuntimeError("the Grader is closed"))
        self._ring()
        self._thread.join(timeout=START_DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, problem: Problem, texts: tuple[str, ...], together: bool) -> Future:
        item = _Item(cloudpickle.dumps((problem, texts, together)), len(texts), together)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._queue.append(item)
        self._ring()
        return item.future

    def _ring(self) -> None:
        """Wakes the thread that serves."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            pass  # it has not answered the last hundreds of rings yet, or has ended

    def _end(self, reason: Exception) -> None:
        with self._lock:
            self._ended = self._ended or reason

    def _serve(self, started: Future) -> None:
        """The life of the thread: gives texts to workers that are free, takes answers, replaces workers that fail."""
        self._workers: list[_Worker] = []
        self._start_failures = 0  # in a row
        try:
            try:
                for _ in range(self._config.workers):
                    self._workers.append(_Worker(self._hello))
            except Exception as error:
                started.set_exception(error)
                raise
            started.set_result(None)
            while self._ended is None:
                self._assign()
                self._wait()
        except Exception as error:  # whatever it is, those who wait for outcomes have to hear of it
            self._end(error)
        finally:
            self._end(RuntimeError("the thread that grades has ended"))
            with self._lock:
                left = [*(worker.item for worker in self._workers if worker.item is not None), *self._queue]
                self._queue.clear()
            for item in left:
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(self._ended)
            self._bell.close()
            self._listener.close()
            for worker in self._workers:
                worker.kill()

    def _assign(self) -> None:
        for slot, worker in enumerate(self._workers):
            while worker.ready and worker.item is None:
                with self._lock:
                    if not self._queue:
                        return
                    item = self._queue.popleft()
                if item.future.cancelled():
                    item.future.set_running_or_notify_cancel()  # those who wait for several hear of it
                    continue
                if not worker.take(item, self._config.timeout_s):
                    with self._lock:
                        self._queue.appendleft(item)
                    self._replace(slot)  # it died while idle: nothing of ours was lost
                    break

    def _wait(self) -> None:
        """Until a worker answers, a deadline passes, or the bell rings."""
        busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        left_s = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if busy else None
        answered = set(wait([self._listener, *(worker.connection for worker in busy)], timeout=left_s))
        if self._listener in answered:
            self._listener.recv(1 << 16)
        for slot, worker in enumerate(self._workers):
            failure = None
            if worker.connection in answered:
                failure = worker.receive()
            # It may have answered since, while this thread was kept from looking.
            elif worker in busy and time.monotonic() >= worker.deadline and not worker.connection.poll():
                cause = f"no answer within {worker.allowed_s:g} s; the process was killed"
                failure = Outcome("timed_out", None, cause)
            if failure is not None:
                self._fail(slot, failure)

    def _fail(self, slot: int, failure: Outcome) -> None:
        """The failure of a worker belongs to the item it had in hand, or, before it was ready, to the task."""
        worker = self._workers[slot]
        self._start_failures = 0 if worker.ready else self._start_failures + 1
        if worker.refused or self._start_failures == MAX_START_FAILURES:
            raise RuntimeError(f"a grading process could not start with this task: {failure.cause}")
        self._replace(slot)
        if worker.item is not None:
            worker.answer([failure] * worker.item.count)

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        self._workers[slot] = _Worker(self._hello)


def results(futures: Sequence[Future]) -> list:
    """What the futures come to, in their order. Where this is interrupted, the rest is cancelled: what a worker has in hand it
    finishes for nobody."""
    left = set(futures)
    try:
        # All at once: to wake up for each of thousands would take the interpreter from the thread that serves.
        while left:
            left = concurrent.futures.wait(left, timeout=WAKE_S).not_done
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


@dataclass(eq=False, slots=True)
class _Item:
    """One text, or the texts of a group."""

    payload: bytes  # (problem, texts, together), pickled where it was handed in, so that what cannot be raises there
    count: int  # of texts
    together: bool
    future: Future = field(default_factory=Future)


class _Worker:
    """One worker process, as this side sees it."""

    def __init__(self, hello: bytes):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-P", worker_process.__file__, str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment()
            )
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a stopped worker may not block us in a message
                ours.setsockopt(socket.SOL_SOCKET, option, _timeval(START_DEADLINE_S))
            self.connection = Connection(ours.detach())
        self.ready = False  # has imported the task
        self.refused = False  # says itself why it cannot
        self.item: _Item | None = None  # what it is grading
        self.allowed_s = START_DEADLINE_S  # for its next answer
        self.deadline = time.monotonic() + self.allowed_s
        try:
            self.connection.send_bytes(hello)
        except _LOST:
            pass  # it died at once; `receive` finds out and reports it

    def take(self, item: _Item, timeout_s: float) -> bool:
        """Gives it an item; False when it is dead."""
        try:
            self.connection.send_bytes(item.payload)
        except _LOST:
            return False
        self.item = item
        self.allowed_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        return True

    def receive(self) -> Outcome | None:
        """Takes one answer; returns a failure when there is none because the process has died or cannot start."""
        try:
            if not self.ready:
                state, cause = self.connection.recv()
                self.ready, self.refused = state == "ready", state == "failed"
                return Outcome("infra_failed", None, cause) if self.refused else None
            answers = self.connection.recv()
        except _LOST as error:
            return Outcome("infra_failed", None, f"the grading process died: {self._epitaph(error)}")
        self.answer([_outcome(*answer) for answer in answers])
        return None

    def answer(self, outcomes: list[Outcome]) -> None:
        """Ends the item that it has in hand."""
        item, self.item = self.item, None
        if item.future.set_running_or_notify_cancel():
            item.future.set_result(outcomes if item.together else outcomes[0])

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


def _outcome(kind: str, reward: float, parts: dict[str, float], note: str, cause: str) -> Outcome:
    score = Score(reward, parts, note) if kind in ("scored", "policy_failed") else None
    return Outcome(kind, score, cause)


def _timeval(seconds: float) -> bytes:
    """C's struct timeval, as SO_RCVTIMEO takes it."""
    return int(seconds).to_bytes(8, sys.byteorder) + bytes(8)


def log_failures(outcomes: Sequence[Outcome]) -> None:
    """Logs one line for each kind of failure with its most common causes."""
    for kind in ("infra_failed", "timed_out"):
        causes = Counter(outcome.cause for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("grading: %d of %d texts %s: %s", sum(causes.values()), len(outcomes), kind, common)
