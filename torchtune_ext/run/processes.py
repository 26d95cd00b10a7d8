"""Calls an object in processes that can be killed at any moment, also inside C code that holds the interpreter lock.

kind of failure   what happened
"raised"          the call raised an error
"died"            the process ended in the middle of the call
"late"            the call was still busy after its deadline, and its process was killed

A process has one call at a time, so a process that dies loses no other call. It is replaced at once. A round trip takes about
0.1 ms, so handing over several calls at once would gain little.
"""

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle

from torchtune_ext.run import worker_process
from torchtune_ext.run.errors import Failure
from torchtune_ext.run.janitor import Janitor
from torchtune_ext.run.parent import environment

START_DEADLINE_S = 120.0  # seconds that a process has to unpickle the object, with all imports
MAX_START_FAILURES = 3  # processes that may fail to start, one after the other, before all is given up
_LOST = (EOFError, OSError, pickle.UnpicklingError)  # the errors that this process sees when another one ends
_REMOVALS = 20  # attempts to remove a folder into which something that was killed may still write


class Processes:
    """Calls a pickled object in `count` processes, each call within its own deadline.

    The processes start at once, import what the object needs and no more, and end with this process or with `close`. Each has a
    folder for temporary files (its TMPDIR), which goes when the process ends, however it ends, and when the trainer is killed.

    Args:
        target: the object, pickled by cloudpickle, so that its class may be defined in the user's copied recipe (`__main__`).
        count: number of processes.
        name: what they do, for messages and for the name of the thread that serves them: "grading".
        subject: what they are started with, for messages: "task".
        variables: further variables of the environment of the processes.
        output: file that takes what the processes print, behind what is in it. None: they print where this one does.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        target: bytes,
        count: int,
        name: str,
        subject: str,
        variables: Mapping[str, str] = MappingProxyType({}),
        output: Path | None = None,
    ) -> None:
        self._name, self._subject = name, subject
        self._count, self._output = count, output
        self._hello, self._variables = pickle.dumps((list(sys.path), target)), dict(variables)
        self._lock = threading.Lock()  # guards `_queue` and `_ended`
        self._queue: deque[_Item] = deque()
        self._ended: Exception | None = None  # the reason why no more calls are accepted
        self._grace_s = 0.0  # seconds that processes get to end by themselves
        self._bell, self._listener = socket.socketpair()
        self._listener.setblocking(False)
        # Only one thread starts the processes and talks to them. The kernel kills them when this thread ends, so the thread
        # lives as long as this object.
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=[started], name=name, daemon=True)
        self._thread.start()
        started.result(timeout=START_DEADLINE_S)

    def submit(
        self,
        arguments: tuple,
        timeout_s: float,
        otherwise: Callable[[str, str], Any],
        process: int | None = None,
    ) -> Future:
        """Hands in a call and returns at once. A slow call delays others only if no other process is free.

        Args:
            arguments: of the call. They are pickled here, so that an object that cannot be pickled raises here.
            timeout_s: seconds for the call, counted from when a process takes it.
            otherwise: makes the result of a call that failed, from the kind of failure and its cause (the error, how the
                process ended, or how long it had), in the thread that serves all processes.
            process: the number of the process, from 0, that has to take the call; None: any. What an earlier call left in it is
                lost if the process was replaced meanwhile.

        Returns:
            a future of what the call returns, or of what `otherwise` makes of its failure. It can be canceled until it is done.
            The process still finishes the call that it has.

        Raises:
            Exception: the reason why no calls are accepted any more. Futures that were waiting raise it, too.
        """
        item = _Item(cloudpickle.dumps(arguments), timeout_s, otherwise, process)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._queue.append(item)
        self._ring()
        return item.future

    def pids(self) -> list[int]:
        """Returns the process ids. They change when a process is replaced."""
        return [worker.process.pid for worker in self._workers]

    def close(self, reason: Exception, grace_s: float = 0.0) -> None:
        """Ends the processes: closes their connections, and kills those that are still there after `grace_s` seconds.

        Futures that are not done raise `reason`. A second call does nothing.
        """
        self._grace_s = max(self._grace_s, grace_s)
        self._end(reason)
        self._ring()
        # The function that makes a result, or a callback of its future, may be what closes.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=START_DEADLINE_S)

    def _ring(self) -> None:
        """Wakes the thread that runs `_serve`."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # The socket is full of earlier rings, so the thread will wake up anyway, or the thread has ended.
            pass

    def _end(self, reason: Exception) -> None:
        """Records why no more calls are accepted. Only the first reason counts."""
        with self._lock:
            self._ended = self._ended or reason

    def _serve(self, started: Future) -> None:
        """Runs in the thread: gives calls to free processes, takes answers, and replaces processes that fail."""
        self._workers: list[_Worker] = []
        self._start_failures = 0  # processes that failed to start since the last one that started
        self._janitor: Janitor | None = None
        try:
            try:
                # The kernel kills the processes when the trainer is killed, but not what they have started.
                self._janitor = Janitor()
                self.folder = Path(self._janitor.folder)  # those of the processes are in it
                self.folder.chmod(0o711)  # as they are
                self._workers += [self._start() for _ in range(self._count)]
                self._janitor.guard([worker.process.pid for worker in self._workers])
            except Exception as error:
                started.set_exception(error)
                raise
            started.set_result(None)
            while self._ended is None:
                self._assign()
                self._wait()
        except Exception as error:
            # Whatever the error is, everyone who waits for an answer has to get it.
            self._end(error)
        finally:
            self._end(RuntimeError(f"the thread of the {self._name} processes has ended"))
            with self._lock:
                left = [*(worker.item for worker in self._workers if worker.item is not None), *self._queue]
                self._queue.clear()
            for item in left:
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(self._ended)
            self._bell.close()
            self._listener.close()
            kill_at = time.monotonic() + self._grace_s
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                worker.end(kill_at)
            if self._janitor is not None:
                self._janitor.close()

    def _start(self) -> "_Worker":
        return _Worker(self._hello, self.folder, self._variables, self._output)

    def _assign(self) -> None:
        """Gives calls of the queue to processes that are free."""
        for slot, worker in enumerate(self._workers):
            while worker.ready and worker.item is None:
                with self._lock:
                    item = next((item for item in self._queue if item.process in (None, slot)), None)
                    if item is None:
                        break
                    self._queue.remove(item)
                if item.future.cancelled():
                    # Without this call, a wait for several futures would never count the canceled one as done.
                    item.future.set_running_or_notify_cancel()
                    continue
                if not worker.take(item):
                    with self._lock:
                        self._queue.appendleft(item)
                    # The process died while it had no call. The call is back in the queue.
                    self._replace(slot)
                    break

    def _wait(self) -> None:
        """Waits until a process answers, a deadline passes, or the bell rings, and deals with what happened."""
        busy = [worker for worker in self._workers if worker.item is not None or not worker.ready]
        left_s = max(0.0, min(worker.deadline for worker in busy) - time.monotonic()) if busy else None
        answered = set(wait([self._listener, *(worker.connection for worker in busy)], timeout=left_s))
        if self._listener in answered:
            self._listener.recv(1 << 16)
        for slot, worker in enumerate(self._workers):
            failure = None
            if worker.connection in answered:
                failure = worker.receive()
            # The process may have answered after `wait` returned, so the connection is polled before the process is
            # blamed.
            elif worker in busy and time.monotonic() >= worker.deadline and not worker.connection.poll():
                failure = "late", f"no answer within {worker.allowed_s:g} s; the process was killed"
            if failure is not None:
                self._fail(slot, *failure)

    def _fail(self, slot: int, kind: str, cause: str) -> None:
        """Deals with a process that failed: replaces it, and gives the failure to the call that it had.

        Raises:
            RuntimeError: the process says that it cannot start with this object, or too many failed to start.
        """
        worker = self._workers[slot]
        self._start_failures = 0 if worker.ready else self._start_failures + 1
        if worker.refused or self._start_failures == MAX_START_FAILURES:
            cause = f"the {self._name} process died: {cause}" if kind == "died" else cause
            raise Failure(f"a {self._name} process could not start with this {self._subject}: {cause}")
        self._replace(slot)
        if worker.item is not None:
            worker.finish(kind, None, cause)

    def _replace(self, slot: int) -> None:
        self._workers[slot].connection.close()
        self._workers[slot].end(kill_at=0.0)
        self._workers[slot] = self._start()
        self._janitor.guard([worker.process.pid for worker in self._workers])


@dataclass(eq=False, slots=True)
class _Item:
    """One call."""

    payload: bytes  # the arguments
    timeout_s: float
    otherwise: Callable[[str, str], Any]
    process: int | None  # the number of the process that has to take it; None: any
    future: Future = field(default_factory=Future)

    def finish(self, kind: str, value: Any, cause: str) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = value if kind == "returned" else self.otherwise(kind, cause)
        except Exception as error:  # noqa: BLE001 (who waits for the result gets it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Worker:
    """One process, as this one sees it."""

    def __init__(self, hello: bytes, folder: Path, variables: Mapping[str, str], output: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.folder.chmod(0o711)  # what runs as another user has a folder in it, whose name only that one knows
        variables = {**environment(), **variables, "TMPDIR": str(self.folder)}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-P", worker_process.__file__, str(theirs.fileno()), str(os.getpid())]
            with open(output, "ab") if output is not None else nullcontext() as file:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=variables,
                )
            # A process that is stopped in the middle of a message must not block this one.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, _timeval(START_DEADLINE_S))
            self.connection = Connection(ours.detach())
        self.ready = False  # True: the process has unpickled the object
        self.refused = False  # True: the process has said that it cannot unpickle the object
        self.item: _Item | None = None  # the call that the process has
        self._allow(START_DEADLINE_S)
        try:
            self.connection.send_bytes(hello)
        except _LOST:
            # The process died at once. `receive` finds out and reports it.
            pass

    def take(self, item: _Item) -> bool:
        """Gives the process a call. Returns False when the process is dead."""
        try:
            self.connection.send_bytes(item.payload)
        except _LOST:
            return False
        self.item = item
        self._allow(item.timeout_s)
        return True

    def receive(self) -> tuple[str, str] | None:
        """Takes one message. Returns kind and cause of a process that has died or cannot start, otherwise None."""
        try:
            data = self.connection.recv_bytes()
        except _LOST as error:
            return "died", self._epitaph(error)
        try:
            kind, value, cause = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 (unpickling runs the code of classes)
            kind, value, cause = "raised", None, f"the answer cannot be read: {type(error).__name__}: {error}"
        if not self.ready:
            self.ready, self.refused = kind == "ready", kind == "failed"
            return ("raised", cause) if self.refused else None
        self.finish(kind, value, cause)
        return None

    def finish(self, kind: str, value: Any, cause: str) -> None:
        """Ends the call that the process has."""
        item, self.item = self.item, None
        item.finish(kind, value, cause)

    def end(self, kill_at: float) -> None:
        """Waits for the end of the process until `kill_at` (on the monotonic clock). Then it kills the process and everything
        that it started (the process leads its own process group), reaps it, and removes its folder."""
        try:
            self.process.wait(timeout=max(0.0, kill_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # The process and its group have ended already.
            pass
        self.process.wait(timeout=START_DEADLINE_S)
        remove(self.folder)

    def _allow(self, seconds: float) -> None:
        """Gives the process this many seconds for its next message."""
        self.allowed_s = seconds
        self.deadline = time.monotonic() + seconds

    def _epitaph(self, error: BaseException) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"it closed its connection ({type(error).__name__})"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def remove(folder: Path) -> None:
    """Removes a folder in which something that was killed a moment ago may still make a file."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _timeval(seconds: float) -> bytes:
    """Returns a struct timeval of C, which the option SO_RCVTIMEO needs."""
    return int(seconds).to_bytes(8, sys.byteorder) + bytes(8)
