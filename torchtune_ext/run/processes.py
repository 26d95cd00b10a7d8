"""Call an object in processes that can be killed at any time, even in C code that holds the GIL.

kind of failure   event
"raised"          the call raised an error
"died"            the process ended during the call
"killed"          the process was killed by SIGKILL, from the out-of-memory killer or a user
"timed_out"       the call used the CPU most of the time and missed its deadline; its process was
                  killed
"stalled"         as "timed_out", but the call got less than `BUSY_FRACTION` of the time on the CPU
"""

import math
import os
import pickle
import select
import shutil
import signal
import socket
import struct
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
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import cloudpickle

from torchtune_ext.run import worker_process
from torchtune_ext.run.errors import MAX_DURATION_S, RunFailure
from torchtune_ext.run.process_env import copy_environment
from torchtune_ext.run.reaper import ProcessReaper

START_DEADLINE_S = 120.0  # seconds for unpickling the object, including all imports
STARTS_PER_CORE = 8  # more processes on a core have more time, because they import at the same time
RECEIVE_TIMEOUT_S = 10.0  # seconds until the next part of an answer arrives
MAX_ANSWER_BYTES = 1 << 26
MAX_START_FAILURES = 3  # consecutive failed starts after which the pool fails
# Errors in this process when a worker ends.
_CONNECTION_ERRORS = (EOFError, OSError, pickle.UnpicklingError)
CRASH_KINDS = "died", "killed"
BUSY_FRACTION = 0.5  # minimum CPU time of a "timed_out" call, as a fraction of its time limit
_REMOVE_ATTEMPTS = 20  # attempts to remove a folder while a killed process may still write to it


def start_deadline_s(count: int) -> float:
    """Returns the seconds that each of `count` processes has for its start."""
    return START_DEADLINE_S * max(1.0, count / len(os.sched_getaffinity(0)) / STARTS_PER_CORE)


class ProcessPool:
    """Call a pickled object in `count` processes, with a deadline per call.

    The processes end with `close` or with this process. Each process has its own TMPDIR, which is
    removed after any kind of exit.

    Args:
        target: the object, pickled by cloudpickle, so its class may be defined in the recipe
            (`__main__`).
        count: the number of processes.
        name: the purpose of the processes, for messages and thread names: "grading".
        subject: the kind of the object, for messages: "task".
        variables: environment variables to add.
        output: the file to which the output of the processes is appended; None: the processes
            share the output of this process.

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
        self._start_deadline_s = start_deadline_s(count)
        self._start_message, self._variables = pickle.dumps((list(sys.path), target)), dict(variables)
        self._lock = threading.Lock()  # guards `_queue` and `_close_reason`
        self._queue: deque[_Call] = deque()
        self._close_reason: Exception | None = None  # set once the pool rejects calls
        self._grace_s = 0.0  # seconds for processes to exit before they are killed
        self._wakeup_sender, self._wakeup_receiver = socket.socketpair()
        self._wakeup_receiver.setblocking(False)
        # One thread, which runs until `close`, starts all processes (see `die_with_parent`).
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
        """Queue a call and return its future.

        A running call finishes even if its future is canceled. After the pool is closed, this
        method and the pending futures raise the reason.

        Args:
            arguments: the arguments of the call. If they cannot be pickled, the call fails with
                kind "raised".
            timeout_s: seconds for the call, from its start in a process.
            on_failure: makes the result of a failed call from the kind of failure and its cause,
                in the thread of the pool.
            process: the index of the process for the call; None: any process. A process that was
                replaced has lost the state of earlier calls.
            retries: the number of retries in a new process after the process died.

        Returns:
            A future with the result of the call or of `on_failure`.
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
        """Return the process ids, which change when a process is replaced."""
        return [worker.process.pid for worker in self._workers]

    def close(self, reason: Exception, grace_s: float = 0.0) -> None:
        """End the processes. A second call has no effect.

        Args:
            reason: the error that pending futures raise.
            grace_s: seconds after which running processes are killed.
        """
        self._grace_s = max(self._grace_s, grace_s)
        self._set_close_reason(reason)
        self._wake_up()
        # `on_failure` and callbacks of futures run in the pool's thread, which cannot join itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=START_DEADLINE_S)

    def _wake_up(self) -> None:
        # The thread waits for sockets, including this one.
        try:
            self._wakeup_sender.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # The socket is full, so the thread will wake up anyway, or the thread has ended.
            pass

    def _set_close_reason(self, reason: Exception) -> None:
        # Only the first reason counts, because later reasons follow from it.
        with self._lock:
            self._close_reason = self._close_reason or reason

    def _run_loop(self, started: Future) -> None:
        """Run in the thread: assign calls, receive answers, and replace failed processes."""
        self._workers: list[_Worker] = []
        self._start_failures = 0  # failed starts since the last successful start
        self._reaper: ProcessReaper | None = None
        try:
            try:
                # When the trainer is killed, the kernel kills the processes, not their children.
                self._reaper = ProcessReaper()
                self.folder = Path(self._reaper.folder)  # contains the folders of the processes
                self.folder.chmod(0o711)  # other users may traverse it, as in `_Worker`
                # One at a time: if a start fails, the earlier processes are ended below.
                for _ in range(self._count):
                    self._workers.append(self._start_worker())
                self._reaper.set_process_groups([worker.process.pid for worker in self._workers])
            except Exception as error:
                started.set_exception(error)
                raise
            started.set_result(None)
            while self._close_reason is None:
                self._assign()
                self._wait()
        except Exception as error:  # noqa: BLE001 (the pending futures raise it)
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
        return _Worker(self._start_message, self.folder, self._variables, self._output, self._start_deadline_s)

    def _assign(self) -> None:
        # A process has one call at a time, so its crash affects no other call. A round trip takes
        # about 0.1 ms, so batches of calls would gain little.
        for slot, worker in enumerate(self._workers):
            while worker.is_ready and worker.call is None:
                with self._lock:
                    item = next((item for item in self._queue if item.process in (None, slot)), None)
                    if item is None:
                        break
                    self._queue.remove(item)
                if item.future.cancelled():
                    # Only then is a canceled future done for `concurrent.futures.wait`.
                    item.future.set_running_or_notify_cancel()
                    continue
                if not worker.send(item):
                    # The process died before it received the call, so the call is queued again.
                    with self._lock:
                        self._queue.appendleft(item)
                    self._replace(slot)
                    break

    def _wait(self) -> None:
        """Wait for an answer, a deadline or a wake-up, and handle the event."""
        busy = [worker for worker in self._workers if worker.call is not None or not worker.is_ready]
        # A system call cannot wait for 25 days (`require_seconds`).
        left_s = (
            min(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()), MAX_DURATION_S) if busy else None
        )
        # `multiprocessing.connection.wait` does the same, and takes five times as long.
        poll = select.poll()
        for connection in (self._wakeup_receiver, *(worker.connection for worker in busy)):
            poll.register(connection, select.POLLIN)
        answered = {fd for fd, _ in poll.poll(None if left_s is None else math.ceil(1000 * left_s))}
        if self._wakeup_receiver.fileno() in answered:
            self._wakeup_receiver.recv(1 << 16)
        for slot, worker in enumerate(self._workers):
            failure = None
            if worker.connection.fileno() in answered:
                failure = worker.receive()
            # The process may have answered since `wait`, so the connection is polled once more.
            elif worker in busy and time.monotonic() >= worker.deadline and not worker.connection.poll():
                was_busy = worker.cpu_s() - worker.cpu_before_s >= BUSY_FRACTION * worker.time_limit_s
                kind = "timed_out" if was_busy else "stalled"
                failure = kind, f"no answer within {worker.time_limit_s:g} s; the process was killed"
            if failure is not None:
                self._fail(slot, *failure)
            elif worker.is_spent:
                self._replace(slot)

    def _fail(self, slot: int, kind: str, cause: str) -> None:
        """Replace a failed process, and pass the failure to its call.

        Raises:
            RunFailure: processes cannot start.
        """
        worker = self._workers[slot]
        self._start_failures = 0 if worker.is_ready else self._start_failures + 1
        # An object that one process cannot unpickle fails in every process. One crash during a
        # start may be a coincidence, but several in a row are not.
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
        assert self._reaper is not None  # set in `_run_loop`
        self._reaper.set_process_groups([worker.process.pid for worker in self._workers])


@dataclass(eq=False, slots=True)
class _Call:
    payload: bytes  # the arguments
    timeout_s: float
    on_failure: Callable[[str, str], Any]
    process: int | None  # index of the required process; None: any process
    retries: int  # remaining retries after a crash of its process
    future: Future = field(default_factory=Future)

    def finish(self, kind: str, value: Any, cause: str) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = value if kind == "returned" else self.on_failure(kind, cause)
        except Exception as error:  # noqa: BLE001 (the future raises it)
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Worker:
    """The parent's side of one process."""

    def __init__(
        self,
        start_message: bytes,
        folder: Path,
        variables: Mapping[str, str],
        output: Path | None,
        start_deadline_s: float,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        # Code of another user may have a folder in it, and must traverse but not list it.
        self.folder.chmod(0o711)
        variables = {**copy_environment(), **variables, "TMPDIR": str(self.folder)}
        parent_socket, child_socket = socket.socketpair()
        with parent_socket, child_socket:
            # A process of `multiprocessing` would import the trainer's `__main__`, with torch.
            command = [sys.executable, "-P", worker_process.__file__, str(child_socket.fileno()), str(os.getpid())]
            with open(output, "ab") if output is not None else nullcontext() as file:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    pass_fds=[child_socket.fileno()],
                    start_new_session=True,  # no Ctrl-C of the trainer, and `end` kills its children, too
                    env=variables,
                )
            # A process that is stopped in the middle of a message must not block this thread.
            for option, seconds in ((socket.SO_SNDTIMEO, START_DEADLINE_S), (socket.SO_RCVTIMEO, RECEIVE_TIMEOUT_S)):
                parent_socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("qq", int(seconds), 0))  # a timeval
            self.connection = Connection(parent_socket.detach())
        self.is_ready = False  # True: the process has unpickled the object
        self.start_refused = False  # True: the process has reported that it cannot unpickle the object
        self.is_spent = False  # True: the process has requested its replacement
        self.call: _Call | None = None  # the current call of the process
        self._set_deadline(start_deadline_s)
        try:
            self.connection.send_bytes(start_message)
        except _CONNECTION_ERRORS:
            # The process died at once. `receive` reports it.
            pass

    def send(self, item: _Call) -> bool:
        """Send a call to the process. Return False if the process is dead."""
        try:
            self.connection.send_bytes(item.payload)
        except _CONNECTION_ERRORS:
            return False
        self.call = item
        self._set_deadline(item.timeout_s)
        return True

    def receive(self) -> tuple[str, str] | None:
        """Receive one message. Return kind and cause if the process died or cannot start."""
        try:
            # If the code of a call writes to this socket, its data is read as a length.
            data = self.connection.recv_bytes(MAX_ANSWER_BYTES)
        except _CONNECTION_ERRORS as error:
            cause = self._exit_reason(error)
            # Only `end` kills the process, and nothing is received after `end`.
            return "killed" if self.process.returncode == -signal.SIGKILL else "died", cause
        try:
            kind, value, cause, self.is_spent = pickle.loads(data)
        except Exception as error:  # noqa: BLE001 (unpickling runs the code of classes)
            # The real answer may still come, after a write to this socket by the code of a call. It
            # would be read as the answer to the next call, so the process is replaced.
            return "raised", f"the answer cannot be read: {type(error).__name__}: {error}"
        if not self.is_ready:
            self.is_ready, self.start_refused = kind == "ready", kind == "failed"
            return ("raised", cause) if self.start_refused else None
        self.finish(kind, value, cause)
        return None

    def finish(self, kind: str, value: Any, cause: str) -> None:
        # Mark the process as free before callbacks of the future run.
        item, self.call = self.call, None
        assert item is not None
        item.finish(kind, value, cause)

    def end(self, kill_at: float) -> None:
        """Wait for the exit until `kill_at` (monotonic clock), then kill the process group."""
        try:
            self.process.wait(timeout=max(0.0, kill_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        # The process leads its own group, in which its children may outlive it.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the whole group has ended
        self.process.wait(timeout=START_DEADLINE_S)
        remove_folder(self.folder)

    def _set_deadline(self, seconds: float) -> None:
        self.time_limit_s = seconds
        self.deadline = time.monotonic() + seconds
        self.cpu_before_s = self.cpu_s()

    def cpu_s(self) -> float:
        """Return the CPU time of the process in seconds, over all threads."""
        try:
            # Linux's id of a process's CPU clock (pid_to_clockid). Reading /proc takes 50 us.
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
    """Remove a folder in which a recently killed process may still create a file."""
    for _ in range(_REMOVE_ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


class Closing:
    """A resource with `close`, such as an owner of processes; a `with` block closes it."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def closed_on_error(resource: Closing) -> Iterator[None]:
    """Close a resource if the block raises, such as the rest of its constructor."""
    try:
        yield
    except BaseException:
        resource.close()
        raise
