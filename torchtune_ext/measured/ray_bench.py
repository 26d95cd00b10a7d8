"""The same service as `Bench`, on the machines of a Ray cluster: one queue of timings on each of them.

The machines run `ray start --resources='{"bench_host": 1}'`, and on each lives one actor with a `Bench` of its own
(ray_host.py). Which text goes where is decided in dispatch.py. Ray itself lives in a process of its own (ray_process.py); this
file is the trainer's end of it, and does not import Ray.
"""

import inspect
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import cloudpickle

from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.check import require_records
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.results import BenchConfig, BenchError, Result
from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.parent import environment

log = logging.getLogger(__name__)

READY_S = 180.0  # seconds until the first machine is ready; ray_process.py gives up before
RETRY_S = 5.0  # seconds before Ray's process is started again
LOST_S = 600.0  # seconds without any machine after which the service has failed
CLOSE_S = 20.0  # seconds for everything to end in good order
WAKE_S = 1.0  # seconds between two looks at the clock
MAX_PRINTED = 2000  # bytes of what Ray's process has printed, if it ends badly
_LOST = (EOFError, OSError, pickle.UnpicklingError)  # what reading raises when the process has ended
# No message to Ray's makers, no environment that `uv run` would build on each machine, and no warning about either.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayBench:
    """Measures programs on the machines of a Ray cluster that carry a resource. Any thread may use it.

    A machine that joins later, or comes back, is used from then on. What a machine had when it was lost is measured on
    another one, and its future never notices. Everything that this object starts on other machines ends with it.

    Args:
        address: "auto" (the cluster that this machine is part of), or HOST:PORT of its head. This machine must be a member.
        resource: what the machines that measure carry.
        settings: the keywords of each machine's `Bench`. `workers` and `cores` are chosen by each machine if they are not
            given; `cache` is a file on each machine.

    Raises:
        ValueError: a setting is out of range, or Ray is not installed.
        TypeError: `Bench` has no such keyword.
        BenchError: nobody answers at the address, no machine carries the resource, or none of them can measure.
    """

    def __init__(self, address: str = "auto", resource: str = "bench_host", **settings: Any) -> None:
        inspect.signature(Bench).bind(**settings)
        BenchConfig(
            **{key: value for key, value in settings.items() if key in BenchConfig.__dataclass_fields__},
            address=address,
            resource=resource,
        )
        require_records(settings.get("deadlines"), settings.get("limits"))
        if not re.fullmatch(r"auto|[^/\s]+:\d+", address):
            raise Mistake(
                f"bench.address={address!r}: use auto, or HOST:PORT of the cluster's head as 10.0.0.1:6379 (and no ray://: "
                "this machine must be a member of the cluster)"
            )
        if find_spec("ray") is None:
            raise Mistake("bench.address needs Ray: pip install 'torchtune-ext[ray]', here and on each machine")
        self._hello = (address, resource, pickle.dumps(settings), tuple(sys.path))
        self._resource = resource
        self._lock = threading.Lock()  # guards the following
        self._waiting: dict[int, tuple[Future, str | int | None, bytes]] = {}  # texts that are not done, by number
        self._unsaid: deque[tuple] = deque()
        self._next = 0
        self._ended: BenchError | None = None  # why nothing is accepted any more
        self._stats: dict[str, float] = {}
        self._bell, self._listener = socket.socketpair()
        self._listener.setblocking(False)
        self._served_at = time.monotonic()  # when there was a machine last
        self._why_none = ""
        started: Future[None] = Future()
        # The kernel kills the process when the thread that started it ends, so that one lives as long as this object.
        self._thread = threading.Thread(target=self._serve, args=[started], name="bench on Ray", daemon=True)
        self._thread.start()
        try:
            started.result(timeout=READY_S)
        except TimeoutError as error:
            self.close()
            raise BenchError(f"no machine was ready within {READY_S:g} s") from error
        except BaseException:
            self.close()
            raise

    def submit(
        self,
        kernel: Kernel,
        text: str,
        group: str | int | None = None,
        permitted: Collection[str] | None = None,
    ) -> "Future[Result]":
        """Hands in a model's answer and returns at once. Its future can be canceled until its check begins.

        Args:
            group: texts whose speeds will be compared, such as the samples of one prompt. They are measured on one machine.
                If that is lost, the ones that are not done go to another together, to one with the same fingerprint if there is
                any: `Result.fingerprint` says on what each was measured.
            permitted: as in `Bench.submit`.

        The future raises BenchError if no machine could measure it, and says why.

        Raises:
            BenchError: this object is closed, or has failed.
            ValueError: the kernel cannot be pickled.
        """
        try:
            payload = cloudpickle.dumps((kernel, text, permitted))
        except Exception as error:
            # Pickling runs the user's code, which may raise any error.
            raise Mistake(f"kernel {type(kernel).__name__} cannot be pickled: {error}") from error
        future: Future[Result] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            number, self._next = self._next, self._next + 1
            self._waiting[number] = (future, group, payload)
            self._unsaid.append(("submit", number, group, payload))
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        self._ring()
        return future

    def stats(self) -> dict[str, float]:
        """Returns the counters of `Bench.stats`, added over all machines, at most some seconds old.

        And: "machines", "unsent" (texts that wait for a machine), "sent" (to one), "moved" (texts lost with a machine, so far).
        """
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        """Ends all actors and their processes. Futures that are not done raise BenchError. A second call does nothing."""
        self._end(BenchError("the bench is closed"))
        self._ring()
        self._thread.join(timeout=2 * CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _cancel(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is None or self._ended is not None:
                return
            self._unsaid.append(("cancel", number))
        self._ring()

    def _ring(self) -> None:
        """Wakes the thread that runs `_serve`."""
        try:
            self._bell.send(b"!", socket.MSG_DONTWAIT)
        except OSError:
            # The socket is full of earlier rings, so the thread will wake up anyway, or the thread has ended.
            pass

    def _end(self, reason: BenchError) -> None:
        """Records why nothing is accepted any more. Only the first reason counts."""
        with self._lock:
            self._ended = self._ended or reason

    def _serve(self, started: Future) -> None:
        """Runs in the thread: keeps Ray's process, tells it what is to do, and hands out what it says."""
        process = None
        try:
            while self._ended is None:
                process = _Process(self._hello)
                with self._lock:
                    submits = [("submit", number, group, data) for number, (_, group, data) in self._waiting.items()]
                    self._unsaid = deque(submits)
                self._talk(process, started)
                process.end(self._ended is not None)
                if not started.done():
                    self._end(BenchError(self._why_none))
                    started.set_exception(self._ended)
                give_up_at = time.monotonic() + RETRY_S
                while self._ended is None and time.monotonic() < give_up_at:
                    self._check_clock()
                    wait([self._listener], timeout=WAKE_S)
                    self._hush()
        except Exception as error:
            # Whatever the error is, everyone who waits for a result has to get it.
            log.exception("bench on Ray: the thread failed")
            self._end(BenchError(f"the thread that serves the bench has failed: {error!r}"))
        finally:
            self._end(BenchError("the thread that serves the bench has ended"))
            if process is not None:
                process.end(False)
            with self._lock:
                left = [future for future, _, _ in self._waiting.values()]
                self._waiting.clear()
            for future in left:
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._ended)
            if not started.done():
                started.set_exception(self._ended)
            self._bell.close()
            self._listener.close()

    def _talk(self, process: "_Process", started: Future) -> None:
        """Talks to a process until it ends or this object does."""
        while self._ended is None:
            try:
                while True:
                    with self._lock:
                        if not self._unsaid:
                            break
                        message = self._unsaid.popleft()
                    process.connection.send(message)
                if process.connection in wait([self._listener, process.connection], timeout=WAKE_S):
                    self._hear(process.connection.recv(), started)
            except _LOST as error:
                self._why_none = self._why_none or f"Ray's process has ended ({process.epitaph(error)})"
                log.warning("bench on Ray: %s", self._why_none)
                return
            self._hush()
            self._check_clock()

    def _hear(self, message: tuple, started: Future) -> None:
        match message:
            case ("result", number, data):
                self._answer(number, pickle.loads(data), None)
            case ("failed", number, why):
                self._answer(number, None, BenchError(why))
            case ("stats", stats):
                with self._lock:
                    self._stats = stats
                if stats["machines"]:
                    self._served_at, self._why_none = time.monotonic(), ""
            case ("log", level, name, text):
                logging.getLogger(name).log(level, "%s", text)
            case ("ready",):
                if not started.done():
                    started.set_result(None)
            case ("refused", why):
                self._why_none = why

    def _answer(self, number: int, result: Result | None, error: BenchError | None) -> None:
        with self._lock:
            future, _, _ = self._waiting.pop(number, (None, None, None))
        if future is None or not future.set_running_or_notify_cancel():
            return
        future.set_result(result) if error is None else future.set_exception(error)

    def _check_clock(self) -> None:
        """Ends this object when there has been no machine for too long."""
        if time.monotonic() > self._served_at + LOST_S:
            why = self._why_none or "all have gone"
            self._end(BenchError(f"no machine with the resource {self._resource!r} for {LOST_S:g} s: {why}"))

    def _hush(self) -> None:
        """Takes in what was rung."""
        try:
            self._listener.recv(1 << 16)
        except BlockingIOError:
            pass


class _Process:
    """Ray's process, as the trainer sees it."""

    def __init__(self, hello: tuple) -> None:
        ours, theirs = socket.socketpair()
        # Ray prints a page for each machine that is lost. It is read only if this process itself ends badly.
        self._printed = tempfile.TemporaryFile()
        with ours, theirs:
            command = [sys.executable, "-P", "-m", "torchtune_ext.measured.ray_process", str(theirs.fileno())]
            # Ray adds the working directory to sys.path on every machine, where it may be anything.
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**environment(), **SETTINGS},
                cwd="/",
            )
            self.connection = Connection(ours.detach())
        self.connection.send(hello)

    def epitaph(self, error: BaseException) -> str:
        """Says how it ended, with its last words."""
        try:
            cause = f"exit status {self._process.wait(timeout=1.0)}"
        except subprocess.TimeoutExpired:
            cause = type(error).__name__
        self._printed.seek(max(0, self._printed.seek(0, os.SEEK_END) - MAX_PRINTED))
        printed = self._printed.read().decode(errors="replace").strip()
        return f"{cause}; it had printed:\n{printed}" if printed else cause

    def end(self, in_good_order: bool) -> None:
        """Ends the process. In good order, it first has the actors end their own."""
        try:
            if in_good_order:
                self.connection.send(("close",))
                # What it still has to say must not keep it from ending.
                while self.connection.poll(CLOSE_S):
                    self.connection.recv()
        except _LOST:
            # It has ended.
            pass
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._printed.close()
