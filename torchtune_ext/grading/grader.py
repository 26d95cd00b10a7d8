"""Grades texts. When a grader fails, the outcome says so; no reward is invented for the text.

kind             what happened                                                     score   trained on
"scored"         the task's grader returned a Score, also for a wrong answer        yes     yes
"policy_failed"  the grader returned a Score whose parts["failed"] is not 0: the    yes     yes
                 text holds no answer to grade
"infra_failed"   the grader raised, crashed, or returned no finite number           None    no, kept out of the baseline
"timed_out"      the grader was still busy after the deadline, and was killed       None    no, kept out of the baseline

Graders run in worker processes that can be killed at any moment, also inside C code that holds the interpreter lock
(a regular expression that backtracks for ever). A worker has one text (or one group) at a time, so a worker that dies
loses no other text. A round trip takes about 0.1 ms, so handing over several texts at once would gain little.
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
from torchtune_ext.run.parent import environment
from torchtune_ext.tasks.task import Problem, Score, Task

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0  # seconds that a worker has to import the module of the task
# The kernel may deliver a Ctrl-C to any thread, but Python acts on it only in the main thread. So a wait of the main
# thread wakes up after this many seconds, and Python can act.
WAKE_S = 1.0
MAX_START_FAILURES = 3  # workers that may fail to start, one after the other, before the Grader gives up
_LOST = (EOFError, OSError, pickle.UnpicklingError)  # the errors that this process sees when a worker ends


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of grading one text."""

    kind: str  # "scored", "policy_failed", "infra_failed" or "timed_out"
    score: Score | None  # None when the infrastructure failed or timed out
    cause: str  # the error, for the log; "" when there is a score


@dataclass(frozen=True, slots=True)
class GraderConfig:
    """The node `grader:` of a recipe."""

    workers: int = 1  # number of processes that grade
    timeout_s: float = 10.0  # seconds for one text

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"grader.workers={self.workers} must be at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"grader.timeout_s={self.timeout_s} must be more than 0 seconds")


class Grader:
    """Grades texts with `task.grade` in `workers` processes, each text within `timeout_s` seconds.

    If the task defines `grade_group(problem, texts)`, because its grader compares texts, whole groups can be handed in.
    The same time limit then holds for a group.

    The task is sent by cloudpickle, so its class may be defined in the user's copied recipe (`__main__`). The processes
    start at once, import torch only if the task does, and end with this process or with `close`.

    Raises:
        ValueError: a setting is out of range, or the task cannot be pickled.
        RuntimeError: the workers cannot start.
    """

    def __init__(self, task: Task, workers: int = 1, timeout_s: float = 10.0):
        config = GraderConfig(workers, timeout_s)
        try:
            payload = cloudpickle.dumps(task)
        except Exception as error:
            # Pickling runs code of the task, which may raise any error.
            raise ValueError(
                f"task {type(task).__name__} cannot be sent to a grading process: {type(error).__name__}: {error}. "
                "Keep open files, locks and models out of its attributes"
            ) from error
        self.compares = hasattr(task, "grade_group")  # whether the texts of a problem are graded together
        self._config = config
        self._hello = pickle.dumps((list(sys.path), payload))
        self._lock = threading.Lock()  # guards `_queue` and `_ended`
        self._queue: deque[_Item] = deque()
        self._ended: Exception | None = None  # the reason why no more texts are accepted
        self._bell, self._listener = socket.socketpair()
        self._listener.setblocking(False)
        # Only one thread starts the workers and talks to them. The kernel kills the workers when this thread ends, so
        # the thread lives as long as this object.
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=[started], name="grading", daemon=True)
        self._thread.start()
        started.result(timeout=START_DEADLINE_S)

    def submit(self, problem: Problem, text: str) -> "Future[Outcome]":
        """Hands in a text and returns at once. A slow text delays others only if no other worker is free."""
        return self._submit(problem, (text,), together=False)

    def submit_group(self, problem: Problem, texts: Sequence[str]) -> "Future[list[Outcome]]":
        """Hands in all texts of a problem at once, for a task with `grade_group`, and returns at once.

        The result is one outcome for each text, in the same order.
        """
        return self._submit(problem, tuple(texts), together=True)

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """Returns one outcome for each (problem, text), in the same order."""
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
        """Wakes the thread that runs `_serve`."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # The socket is full of earlier rings, so the thread will wake up anyway, or the thread has ended.
            pass

    def _end(self, reason: Exception) -> None:
        """Records why no more texts are accepted. Only the first reason counts."""
        with self._lock:
            self._ended = self._ended or reason

    def _serve(self, started: Future) -> None:
        """Runs in the thread: gives texts to free workers, takes answers, and replaces workers that fail."""
        self._workers: list[_Worker] = []
        self._start_failures = 0  # workers that failed to start since the last one that started
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
        except Exception as error:
            # Whatever the error is, everyone who waits for an outcome has to get it.
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
        """Gives items of the queue to workers that are free."""
        for slot, worker in enumerate(self._workers):
            while worker.ready and worker.item is None:
                with self._lock:
                    if not self._queue:
                        return
                    item = self._queue.popleft()
                if item.future.cancelled():
                    # Without this call, a wait for several futures would never count the canceled one as done.
                    item.future.set_running_or_notify_cancel()
                    continue
                if not worker.take(item, self._config.timeout_s):
                    with self._lock:
                        self._queue.appendleft(item)
                    # The worker died while it had no text. The text is back in the queue.
                    self._replace(slot)
                    break

    def _wait(self) -> None:
        """Waits until a worker answers, a deadline passes, or the bell rings, and deals with what happened."""
        busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        left_s = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if busy else None
        answered = set(wait([self._listener, *(worker.connection for worker in busy)], timeout=left_s))
        if self._listener in answered:
            self._listener.recv(1 << 16)
        for slot, worker in enumerate(self._workers):
            failure = None
            if worker.connection in answered:
                failure = worker.receive()
            # The worker may have answered after `wait` returned, so the connection is polled before the worker is
            # blamed.
            elif worker in busy and time.monotonic() >= worker.deadline and not worker.connection.poll():
                cause = f"no answer within {worker.allowed_s:g} s; the process was killed"
                failure = Outcome("timed_out", None, cause)
            if failure is not None:
                self._fail(slot, failure)

    def _fail(self, slot: int, failure: Outcome) -> None:
        """Deals with a worker that failed: replaces it, and gives the failure as the outcome of the texts that it had.

        Raises:
            RuntimeError: the worker says that it cannot start with this task, or too many workers failed to start.
        """
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
    """Returns the results of the futures, in their order.

    If this is interrupted, the other futures are canceled. A worker still finishes the text that it has, but nobody
    gets the outcome.
    """
    left = set(futures)
    try:
        # This waits for all futures at once. If it woke up for each of thousands, it would take the interpreter lock
        # from the thread that serves the workers.
        while left:
            left = concurrent.futures.wait(left, timeout=WAKE_S).not_done
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


@dataclass(eq=False, slots=True)
class _Item:
    """One text, or the texts of a group."""

    # (problem, texts, together) is pickled by the caller's thread, so that an object that cannot be pickled raises
    # there.
    payload: bytes
    count: int  # number of texts
    together: bool  # True: the texts are graded together by `grade_group`
    future: Future = field(default_factory=Future)


class _Worker:
    """One worker process, as the parent process sees it."""

    def __init__(self, hello: bytes):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-P", worker_process.__file__, str(theirs.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True, env=environment()
            )
            # A worker that is stopped in the middle of a message must not block this process.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, _timeval(START_DEADLINE_S))
            self.connection = Connection(ours.detach())
        self.ready = False  # True: the worker has imported the task
        self.refused = False  # True: the worker has said that it cannot import the task
        self.item: _Item | None = None  # the item that the worker is grading
        self.allowed_s = START_DEADLINE_S  # seconds that the worker has for its next answer
        self.deadline = time.monotonic() + self.allowed_s
        try:
            self.connection.send_bytes(hello)
        except _LOST:
            # The worker died at once. `receive` finds out and reports it.
            pass

    def take(self, item: _Item, timeout_s: float) -> bool:
        """Gives the worker an item. Returns False when the worker is dead."""
        try:
            self.connection.send_bytes(item.payload)
        except _LOST:
            return False
        self.item = item
        self.allowed_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        return True

    def receive(self) -> Outcome | None:
        """Takes one answer. Returns a failure instead when the process has died or cannot start, otherwise None."""
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
        """Gives the outcomes to the future of the item that the worker has."""
        item, self.item = self.item, None
        if item.future.set_running_or_notify_cancel():
            item.future.set_result(outcomes if item.together else outcomes[0])

    def kill(self) -> None:
        """Kills the process and everything that it started (the process leads its own process group), and reaps it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # The process and its group have ended already.
            pass
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
    """Returns a struct timeval of C, which the option SO_RCVTIMEO needs."""
    return int(seconds).to_bytes(8, sys.byteorder) + bytes(8)


def log_failures(outcomes: Sequence[Outcome]) -> None:
    """Logs one line for each kind of failure with its most common causes."""
    for kind in ("infra_failed", "timed_out"):
        causes = Counter(outcome.cause for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("grading: %d of %d texts %s: %s", sum(causes.values()), len(outcomes), kind, common)
