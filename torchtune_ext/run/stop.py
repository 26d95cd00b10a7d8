"""What a run does when it is told to stop.

signal              the run                                                                     exit status
SIGINT (Ctrl-C)     ends at once; a second one, a second later or more, skips the cleanup        130
SIGHUP              ends at once: its terminal is gone                                           129
SIGTERM             goes on to the end of the step and writes a checkpoint, if the step ends     143
                    within the grace time; else it ends when the grace time is over

"Ends" means that `Stopped` is raised in the main thread, so that all parts are closed on the way out. Python runs signal
handlers in the main thread alone, between two of its own instructions: a rank that waits in a collective, in C, would not hear
of the signal. So a thread hears of it too, through the wake-up descriptor that C writes to at once. It keeps the deadlines, and
ends the process itself when the main thread does not react.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
REACTION_S = 5.0  # for the main thread to raise `Stopped` once it shall
CLEANUP_S = 60.0  # for closing all parts after that
AGAIN_S = 1.0  # a Ctrl-C so soon after the first is the same one, sent to us twice
NEVER = float("inf")


class Stopped(KeyboardInterrupt):
    """The run was told to stop. A subclass of KeyboardInterrupt: what treats Ctrl-C right treats this right.

    Attributes:
        signal: which one.
        orderly: whether all ranks left together, at the end of a step.
    """

    def __init__(self, number: signal.Signals, orderly: bool = False):
        super().__init__(number, orderly)  # these arguments: the error is pickled when ranks tell each other of it
        self.signal, self.orderly = number, orderly

    def __str__(self) -> str:
        return f"stopped by {NAMES[self.signal]}"


class StopSignals:
    """Listens to the three signals while it is used as a context manager, in the main thread.

    A signal that the process was started to ignore (nohup, a shell's background job) stays ignored.
    """

    def __init__(self, grace_s: float, standing: Callable[[], str], reaction_s: float = REACTION_S):
        """Args: grace_s: seconds that a step has to end after SIGTERM; standing: says where the run stands and how to go on,
        from any thread; reaction_s: seconds after which a main thread that does not react is given up."""
        self._grace_s, self._standing, self._reaction_s = grace_s, standing, reaction_s
        self.signal: signal.Signals | None = None  # that ends the run
        self._came_at = NEVER  # on time.monotonic()
        self._stepping = False  # SIGTERM waits for the end of a step
        self._saving = False  # a checkpoint is being written: the grace time does not cut it short
        self._agreed = False  # all ranks end with this step: nor what is left to do
        self._closing_at = NEVER  # when the parts began to be closed
        self.raised = False  # whether `Stopped` was raised in the midst of something
        self.speaks = os.environ.get("RANK", "0") == "0"  # of several ranks, one tells the user
        self._handlers: dict[int, Any] = {}  # before ours
        self._thread: threading.Thread | None = None

    # -- the recipe's side --------------------------------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        """Whether this process has had a signal."""
        return self.signal is not None

    def agreed(self, on_any_rank: Callable[[bool], bool]) -> bool:
        """Whether the run ends with this step: one verdict for all ranks, who call this together at the end of each step."""
        self._agreed = on_any_rank(self.requested)
        return self._agreed

    def begin_steps(self) -> None:
        """From now on SIGTERM waits for the end of a step."""
        self._stepping = True

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside, a checkpoint is written. It is whole or absent, so it may take longer than the grace time."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def leave(self) -> None:
        """Ends the run, on every rank, after they have agreed. Raises Stopped."""
        self.begin_cleanup()
        raise Stopped(self.signal or signal.SIGTERM, orderly=True)  # another rank may have had the signal

    def begin_cleanup(self) -> None:
        """From now on no signal interrupts; only a second Ctrl-C still ends the process."""
        self._closing_at = min(self._closing_at, time.monotonic())

    # -- signals ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python takes handlers there alone; a recipe in another thread is ended by its owner
        self._ours, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._handlers = {number: signal.getsignal(number) for number in NAMES}
        for number, handler in list(self._handlers.items()):
            if handler == signal.SIG_IGN:
                del self._handlers[number]
            else:
                signal.signal(number, self._handle)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        _listening.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is None:
            return
        _listening.remove(self)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._wakeup.close()  # the thread reads the end of it
        self._thread.join()
        self._ours.close()

    def _due_at(self) -> float:
        """When the main thread shall raise."""
        if self.signal != signal.SIGTERM or not self._stepping:
            return self._came_at
        return NEVER if self._saving or self._agreed else self._came_at + self._grace_s

    def _note(self, found: signal.Signals) -> None:
        """Called for every signal by the handler and by the thread, in either order."""
        if self.signal is None or (self.signal == signal.SIGTERM and found != signal.SIGTERM):
            self.signal, self._came_at = found, time.monotonic()  # Ctrl-C after SIGTERM: no more waiting

    def _handle(self, number: int, frame: object) -> None:
        """Python's handler, in the main thread."""
        self._note(signal.Signals(number))
        if self._closing_at == NEVER and time.monotonic() >= self._due_at():
            self.begin_cleanup()
            self.raised = True
            raise Stopped(self.signal)

    def _watch(self) -> None:
        """The thread: hears of signals at once and keeps the deadlines."""
        told, called_at = False, NEVER
        while True:
            ready, _, _ = select.select([self._ours], [], [], 0.05 if self.requested else None)
            data = self._ours.recv(256) if ready else b""
            if ready and not data:
                return
            for number in filter(self._handlers.__contains__, data):
                if number == signal.SIGINT == self.signal and time.monotonic() - self._came_at > AGAIN_S:
                    self._end("twice: not all parts were closed")
                self._note(signal.Signals(number))
            now = time.monotonic()
            if self._closing_at != NEVER:
                if self.requested and now > max(self._closing_at, self._came_at) + CLEANUP_S:
                    self._end(f"a part did not close within {CLEANUP_S:g} s")
            elif now >= self._due_at():
                if called_at == NEVER:
                    called_at = now
                    signal.pthread_kill(threading.main_thread().ident, self.signal)  # it raises, now that it shall
                elif now > called_at + self._reaction_s:
                    self._end("in the midst of a call")
            elif self.requested and self.speaks and not told:
                told = True
                _tell(
                    f"SIGTERM: the run ends with this step, if the step ends within {self._grace_s:g} s (stop_grace_s)"
                )

    def _leave_to_parent(self) -> None:
        """In a forked child: its signals are its own, and C would write them into our socket."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._wakeup.close()
        self._ours.close()

    def _end(self, how: str) -> None:
        """Ends the process from this thread; the kernel and the janitor end its children."""
        # The disk that the message asks, or a full pipe, may be the very thing that the main thread is stuck in.
        timer = threading.Timer(2.0, os._exit, [128 + self.signal])
        timer.daemon = True
        timer.start()
        try:
            if self.speaks:
                _tell(f"Stopped by {NAMES[self.signal]}, {how}. {self._standing()}")
        finally:
            os._exit(128 + self.signal)


_listening: list[StopSignals] = []  # in this process, at most one


def _after_fork() -> None:
    while _listening:
        _listening.pop()._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _tell(line: str) -> None:
    """A line on stderr. Not `output.say`: the lock of the bars may be held by a main thread that is stuck."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass
