"""Calls an object in processes that can be killed at any moment, also inside C code that holds the interpreter lock.

kind of failure   what happened
"raised"          the call raised an error
"died"            the process ended during the call
"killed"          the same, by a SIGKILL of the kernel (which frees memory) or of a user
"late"            the call computed for most of its time, did not end by its deadline, and its process was killed
"stalled"         the same, but the machine gave it less than `BUSY` of that time
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import cloudpickle

from torchtune_ext.run import worker_process
from torchtune_ext.run.errors import MAX_DURATION_S, RunFailure
from torchtune_ext.run.process_env import copy_environment
from torchtune_ext.run.reaper import ProcessReaper

START_DEADLINE_S = 120.0  # seconds that a process has to unpickle the object, with all imports
RECEIVE_TIMEOUT_S = 10.0  # seconds that the next part of an answer has to come
MAX_ANSWER_BYTES = 1 << 26
MAX_START_FAILURES = 3  # consecutive failures to start after which no more processes are started
_CONNECTION_ERRORS = (
    EOFError,
    OSError,
    pickle.UnpicklingError,
)  # the errors that this process sees when another one ends
CRASH_KINDS = "died", "killed"
BUSY_FRACTION = 0.5  # fraction of its time that a late call has computed
_REMOVE_ATTEMPTS = 20  # attempts to remove a folder into which a killed process may still write


class ProcessPool:
    """Calls a pickled object in `count` processes, each call within its own deadline.

    The processes end with `close` or with this process. Each has a TMPDIR, which is removed however the process ends.

    Args:
        target: the object, pickled by cloudpickle, so that its class may be defined in the recipe (`__main__`).
        name: what the processes do, for messages and the name of the thread: "grading".
        subject: what the object is, for messages: "task".
        variables: environment variables to add.
        output: the file to which the output of the processes is appended; None: they print where this process does.

    Raises OSError if no process can be started.
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
        self._start_message, self._variables = pickle.dumps((list(sys.path), target)), dict(variables)
        self._lock = threading.Lock()  # guards `_queue` and `_ended`
        self._queue: deque[_Call] = deque()
        self._close_reason: Exception | None = None  # the reason why no more calls are accepted
        self._grace_s = 0.0  # seconds that processes get to end by themselves
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        # The kernel kills a process when the thread that started it ends (`die_with_parent`). So one thread, which
        # lives as long as this object, starts them all.
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run_loop, args=[started], name=name, daemon=True)
        self._thread.start()
        started.result(timeout=START_DEADLINE_S)

    def submit(
        self,
        arguments: tuple,
        timeout_s: float,
        on_failure: Callable[[str, str], Any],
        process: int | None = None,
        retries: int = 0,
    ) -> Future:
        """Queues a call and returns at once, with a future of what the call or `otherwise` returns.

        Args:
            arguments: the arguments of the call. If they cannot be pickled, the call fails with kind "raised".
            timeout_s: seconds for the call, from when a process takes it.
            otherwise: makes the result of a failed call from the kind of failure and its cause, in the serving thread.
            process: the number, from 0, of the process that takes the call; None: any. A process that was replaced
                meanwhile has lost what earlier calls left in it.
            retries: how often the call is repeated in a new process after its process died.

        A process that already has a call finishes it even if its future is canceled. Once no calls are accepted
        anymore, this method and the waiting futures raise the reason.
        """
        item = _Call(b"", timeout_s, on_failure, process, retries)
        try:
            item.payload = cloudpickle.dumps(arguments)
        except Exception as error:  # noqa: BLE001 (pickling runs the code of classes)
            item.finish("raised", None, f"cannot be sent to a {self._name} process: {worker_process.error_line(error)}")
            return item.future
        with self._lock:
            if self._close_reason is not None:
                raise self._close_reason
            self._queue.append(item)
        self._wake_up()
        return item.future

    def pids(self) -> list[int]:
        """Returns the process ids, which change when a process is replaced."""
        return [worker.process.pid for worker in self._workers]

    def close(self, reason: Exception, grace_s: float = 0.0) -> None:
        """Ends the processes, and kills those still alive after `grace_s` seconds. A second call does nothing.

        Futures that are not done raise `reason`.
        """
        self._grace_s = max(self._grace_s, grace_s)
        self._set_close_reason(reason)
        self._wake_up()
        # `otherwise` or a callback of a future, which run in the thread, may call this. A thread cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=START_DEADLINE_S)

    def _wake_up(self) -> None:
        # The thread waits for sockets, and this is one of them.
        try:
            self._wakeup_sender.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # The socket is full of earlier rings, so the thread will wake up anyway. Or the thread has ended.
            pass

    def _set_close_reason(self, reason: Exception) -> None:
        # Only the first reason counts, because later ones follow from it.
        with self._lock:
            self._close_reason = self._close_reason or reason

    def _run_loop(self, started: Future) -> None:
        """Runs in the thread: gives calls to free processes, takes answers, and replaces failed processes."""
        self._workers: list[_Worker] = []
        self._start_failures = 0  # processes that failed to start since the last one that started
        self._reaper: ProcessReaper | None = None
        try:
            try:
                # When the trainer is killed, the kernel kills the processes, but not what they have started.
                self._reaper = ProcessReaper()
                self.folder = Path(self._reaper.folder)  # holds the folders of the processes
                self.folder.chmod(0o711)  # other users may pass through, as in `_Worker`
                # One by one: if a start fails, those before it are ended below.
                for _ in range(self._count):
                    self._workers.append(self._start_worker())
                self._reaper.set_groups([worker.process.pid for worker in self._workers])
            except Exception as error:
                started.set_exception(error)
                raise
            started.set_result(None)
            while self._close_reason is None:
                self._assign()
                self._wait()
        except Exception as error:  # noqa: BLE001 (who waits gets it)
            # Whatever the error is, those who wait for an answer have to get it.
            self._set_close_reason(error)
        finally:
            self._set_close_reason(RuntimeError(f"the thread of the {self._name} processes has ended"))
            with self._lock:
                left = [*(worker.call for worker in self._workers if worker.call is not None), *self._queue]
                self._queue.clear()
            for item in left:
                if item.future.set_running_or_notify_cancel():
                    item.future.set_exception(self._close_reason)
            self._wakeup_sender.close()
            self._wakeup_receiver.close()
            kill_at = time.monotonic() + self._grace_s
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                worker.end(kill_at)
            if self._reaper is not None:
                self._reaper.close()

    def _start_worker(self) -> "_Worker":
        return _Worker(self._start_message, self.folder, self._variables, self._output)

    def _assign(self) -> None:
        # A process has one call at a time, so one that dies loses no other call. A round trip takes about 0.1 ms, so
        # handing over several calls at once would gain little.
        for slot, worker in enumerate(self._workers):
            while worker.is_ready and worker.call is None:
                with self._lock:
                    item = next((item for item in self._queue if item.process in (None, slot)), None)
                    if item is None:
                        break
                    self._queue.remove(item)
                if item.future.cancelled():
                    # `concurrent.futures.wait` counts a canceled future as done only after this call.
                    item.future.set_running_or_notify_cancel()
                    continue
                if not worker.send(item):
                    # The process died before it got the call. So the call is not to blame, and goes back to the queue.
                    with self._lock:
                        self._queue.appendleft(item)
                    self._replace(slot)
                    break

    def _wait(self) -> None:
        """Waits until a process answers, a deadline passes, or the bell rings, and handles what happened."""
        busy = [worker for worker in self._workers if worker.call is not None or not worker.is_ready]
        # A wait may not last 25 days (`require_seconds`).
        left_s = (
            min(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()), MAX_DURATION_S) if busy else None
        )
        answered = set(wait([self._wakeup_receiver, *(worker.connection for worker in busy)], timeout=left_s))
        if self._wakeup_receiver in answered:
            self._wakeup_receiver.recv(1 << 16)
        for slot, worker in enumerate(self._workers):
            failure = None
            if worker.connection in answered:
                failure = worker.receive()
            # The process may have answered after `wait` returned, so the connection is polled before it counts as late.
            elif worker in busy and time.monotonic() >= worker.deadline and not worker.connection.poll():
                kind = (
                    "late" if worker.cpu_s() - worker.cpu_before_s >= BUSY_FRACTION * worker.time_limit_s else "stalled"
                )
                failure = kind, f"no answer within {worker.time_limit_s:g} s; the process was killed"
            if failure is not None:
                self._fail(slot, *failure)
            elif worker.is_spent:
                self._replace(slot)

    def _fail(self, slot: int, kind: str, cause: str) -> None:
        """Replaces a process that failed, and passes the failure to its call. Raises Failure if none can start."""
        worker = self._workers[slot]
        self._start_failures = 0 if worker.is_ready else self._start_failures + 1
        # A process that cannot unpickle the object says so, and another one would fail in the same way. One that died
        # during its start may have had bad luck, but not several in a row.
        if worker.start_refused or self._start_failures == MAX_START_FAILURES:
            cause = f"the {self._name} process died: {cause}" if kind in CRASH_KINDS else cause
            raise RunFailure(f"a {self._name} process could not start with this {self._subject}: {cause}")
        self._replace(slot)
        if worker.call is not None and kind in CRASH_KINDS and worker.call.retries:
            worker.call.retries -= 1
            with self._lock:
                self._queue.appendleft(worker.call)
        elif worker.call is not None:
            worker.finish(kind, None, cause)

    def _replace(self, slot: int) -> None:
        self._workers[slot].connection.close()
        self._workers[slot].end(kill_at=0.0)
        self._workers[slot] = self._start_worker()
        assert self._reaper is not None  # since `__init__`
        self._reaper.set_groups([worker.process.pid for worker in self._workers])


@dataclass(eq=False, slots=True)
class _Call:
    payload: bytes  # the arguments
    timeout_s: float
    on_failure: Callable[[str, str], Any]
    process: int | None  # the number of the process that has to take it; None: any
    retries: int  # how often it may be repeated after its process died
    future: Future = field(default_factory=Future)

    def finish(self, kind: str, value: Any, cause: str) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = value if kind == "returned" else self.on_failure(kind, cause)
        except Exception as error:  # noqa: BLE001 (who waits for the result gets it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Worker:
    """The parent's side of one process."""

    def __init__(self, start_message: bytes, folder: Path, variables: Mapping[str, str], output: Path | None) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        # Code that runs as another user may have a folder in this one. It has to pass through, but need not list it.
        self.folder.chmod(0o711)
        variables = {**copy_environment(), **variables, "TMPDIR": str(self.folder)}
        # In a session of its own, the process does not get the trainer's Ctrl-C, and `end` can kill it with all that it
        # started.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            # A process of `multiprocessing` would import the trainer's `__main__` again (the recipe, with torch).
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
            # A process that is stopped in the middle of a message must not block this thread forever.
            for option, seconds in ((socket.SO_SNDTIMEO, START_DEADLINE_S), (socket.SO_RCVTIMEO, RECEIVE_TIMEOUT_S)):
                ours.setsockopt(socket.SOL_SOCKET, option, _timeval(seconds))
            self.connection = Connection(ours.detach())
        self.is_ready = False  # True: the process has unpickled the object
        self.start_refused = False  # True: the process has said that it cannot unpickle the object
        self.is_spent = False  # True: the process has asked to be replaced
        self.call: _Call | None = None  # the call that the process has
        self._set_deadline(START_DEADLINE_S)
        try:
            self.connection.send_bytes(start_message)
        except _CONNECTION_ERRORS:
            # The process died at once. `receive` reports it.
            pass

    def send(self, item: _Call) -> bool:
        """Gives the process a call. Returns False when the process is dead."""
        try:
            self.connection.send_bytes(item.payload)
        except _CONNECTION_ERRORS:
            return False
        self.call = item
        self._set_deadline(item.timeout_s)
        return True

    def receive(self) -> tuple[str, str] | None:
        """Takes one message. Returns kind and cause if the process died or cannot start, otherwise None."""
        try:
            # What the code of a call writes to this socket would be read as the length of an answer.
            data = self.connection.recv_bytes(MAX_ANSWER_BYTES)
        except _CONNECTION_ERRORS as error:
            cause = self._exit_reason(error)
            # `end` is the only one here that kills, and nothing is received after it.
            return "killed" if self.process.returncode == -signal.SIGKILL else "died", cause
        try:
            kind, value, cause, self.is_spent = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 (unpickling runs the code of classes)
            # Something else may have come in place of the answer. The answer would then be read as the next call's, so
            # the process is replaced.
            return "raised", f"the answer cannot be read: {type(error).__name__}: {error}"
        if not self.is_ready:
            self.is_ready, self.start_refused = kind == "ready", kind == "failed"
            return ("raised", cause) if self.start_refused else None
        self.finish(kind, value, cause)
        return None

    def finish(self, kind: str, value: Any, cause: str) -> None:
        # The process is free before callbacks of the future run.
        item, self.call = self.call, None
        assert item is not None
        item.finish(kind, value, cause)

    def end(self, kill_at: float) -> None:
        """Waits for the end of the process until `kill_at` (monotonic clock), and then kills it and all it started."""
        try:
            self.process.wait(timeout=max(0.0, kill_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        # The process leads its own group, in which what it started may live on after its end.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # The whole group has ended.
            pass
        self.process.wait(timeout=START_DEADLINE_S)
        remove_folder(self.folder)

    def _set_deadline(self, seconds: float) -> None:
        self.time_limit_s = seconds
        self.deadline = time.monotonic() + seconds
        self.cpu_before_s = self.cpu_s()

    def cpu_s(self) -> float:
        """Returns the CPU time that the process has used, all threads together."""
        try:
            # Linux's number of the CPU clock of another process (pid_to_clockid in the kernel); reading /proc takes 50 us.
            return time.clock_gettime((~self.process.pid << 3) | 2)
        except OSError:
            return 0.0

    def _exit_reason(self, error: BaseException) -> str:
        try:
            code = self.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"it closed its connection ({type(error).__name__})"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def remove_folder(folder: Path) -> None:
    """Removes a folder in which a process that was killed a moment ago may still make a file."""
    for _ in range(_REMOVE_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def _timeval(seconds: float) -> bytes:
    # SO_RCVTIMEO takes a struct timeval of C: 8 bytes of seconds and 8 bytes of microseconds.
    return int(seconds).to_bytes(8, sys.byteorder) + bytes(8)


class Closing:
    """What has to be closed, such as the owner of processes: a `with` block does it at its end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def closed_on_error(resource: Closing) -> Iterator[None]:
    """Closes what an error in the block leaves unfinished, such as one in its constructor."""
    try:
        yield
    except BaseException:
        resource.close()
        raise
