"""Stop a run gracefully on a signal.

signal            effect                                                           exit status
SIGINT (Ctrl-C)   ends at once; a second Ctrl-C after at least 1 s skips cleanup   130
SIGHUP            ends at once, because the terminal is closed                     129
SIGTERM           finishes the step and writes a checkpoint if the step ends       143
                  within the grace time; otherwise ends after the grace time

"Ends" means that `RunStopped` is raised in the main thread, so the stack unwinds and
all components are closed. If the main thread does not react, a second thread ends the process.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torchtune_ext.run.process_env import rank_and_world_size

SIGNAL_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
REACTION_S = 5.0  # seconds for the main thread to raise `RunStopped` when it is due
CLEANUP_S = 60.0  # seconds for closing all components
REPEAT_WINDOW_S = 1.0  # seconds in which terminal and launcher may both deliver one Ctrl-C
NEVER = float("inf")
# The files of Python's weak collections, whose callbacks run when an object is finalized.
WEAK_COLLECTION_FILES = {
    method.__code__.co_filename for method in (weakref.WeakValueDictionary.__init__, weakref.WeakSet.__init__)
}


class RunStopped(KeyboardInterrupt):
    """A signal stopped the run. Code that handles Ctrl-C correctly also handles this error.

    Attributes:
        signal: the signal that stopped the run.
        at_step_end: whether all ranks stopped together at the end of a step.
    """

    def __init__(self, number: signal.Signals, at_step_end: bool = False):
        # Ranks send this error to each other, and pickle needs the arguments in the base class.
        super().__init__(number, at_step_end)
        self.signal, self.at_step_end = number, at_step_end

    def __str__(self) -> str:
        return f"stopped by {SIGNAL_NAMES[self.signal]}"


class StopSignals:
    """Handles the three signals while it is active as a context manager in the main thread."""

    def __init__(self, grace_s: float, status_message: Callable[[], str], reaction_s: float = REACTION_S):
        """Initialize without handlers; `with` installs them.

        Args:
            grace_s: seconds in which a step must end after SIGTERM.
            status_message: returns a text with the progress of the run and how to resume it. Any
                thread may call it.
            reaction_s: seconds for the main thread to react before the second thread ends the
                process.
        """
        self._grace_s, self.status_message, self._reaction_s = grace_s, status_message, reaction_s
        self.signal: signal.Signals | None = None  # the signal that ends the run
        self._received_at = NEVER  # the time.monotonic() of the signal
        self.waits_for_step = False  # True: SIGTERM waits for the end of the step
        # The grace time interrupts neither a checkpoint nor a step after which all ranks stop.
        self._saving = self._ranks_agreed = False
        self._must_retry = False  # True: the handler could not raise `RunStopped` and must be called again
        self._cleanup_started_at = NEVER  # the time.monotonic() at the start of the cleanup
        self.exit_status = 0  # the exit status of the process after the recipe (`training.recipe_runner`)
        self.raised_by_handler = False  # whether the signal handler raised `RunStopped`, at an arbitrary point
        self.prints_messages = rank_and_world_size()[0] == 0  # only rank 0 prints messages
        self._previous_handlers: dict[int, Any] = {}  # the signal handlers before ours
        self._thread: threading.Thread | None = None

    # -- the recipe's side --------------------------------------------------------------------------------------------

    @property
    def stop_requested(self) -> bool:
        """Return whether this process has received a signal."""
        return self.signal is not None

    def agree_to_stop(self, on_any_rank: Callable[[bool], bool]) -> bool:
        """Decide on all ranks together whether the run stops after this step."""
        self._ranks_agreed = on_any_rank(self.stop_requested)
        return self._ranks_agreed

    def defer_sigterm(self) -> None:
        """Defer SIGTERM to the end of the step from now on."""
        self.waits_for_step = True

    @contextmanager
    def protect_save(self) -> Iterator[None]:
        """Mark the block in which a checkpoint is written."""
        # The grace time does not interrupt it, because a partial checkpoint would be useless.
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def raise_stopped(self) -> None:
        """Raise RunStopped on every rank, after the ranks have agreed to stop."""
        self.begin_cleanup()
        # This rank has no signal if only another rank received a signal.
        raise RunStopped(self.signal or signal.SIGTERM, at_step_end=True)

    def begin_cleanup(self) -> None:
        """Start the cleanup. No signal interrupts it, but a second Ctrl-C ends the process."""
        self._cleanup_started_at = min(self._cleanup_started_at, time.monotonic())

    # -- signals ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> "StopSignals":
        # Only the main thread may have signal handlers. The owner of another one stops its recipe.
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers only in the main thread, between two bytecode instructions. A rank in
        # a collective runs C code and would not react. But Python's C handler immediately writes
        # the signal number to the wake-up descriptor, which a second thread reads.
        self._wakeup_reader, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # A signal that the process ignores from its start (nohup, background job) stays ignored.
        before = {number: signal.getsignal(number) for number in SIGNAL_NAMES}
        self._previous_handlers = {number: each for number, each in before.items() if each != signal.SIG_IGN}
        for number in self._previous_handlers:
            signal.signal(number, self._handle)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()
        _active.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is None:
            return
        _active.remove(self)
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        # The thread returns when this end of the socket is closed.
        self._wakeup.close()
        self._thread.join()
        self._wakeup_reader.close()

    def _raise_deadline(self) -> float:
        """Return the time.monotonic() at which the main thread must raise `RunStopped`."""
        if self.signal != signal.SIGTERM or not self.waits_for_step:
            return self._received_at
        return NEVER if self._saving or self._ranks_agreed else self._received_at + self._grace_s

    def _record_signal(self, new: signal.Signals) -> signal.Signals:
        """Record a signal and return the signal that ends the run."""
        # The handler and the thread both call this for every signal. Ctrl-C or SIGHUP replaces
        # SIGTERM, so the run no longer waits for the end of the step.
        if self.signal is None or (self.signal == signal.SIGTERM and new != signal.SIGTERM):
            self.signal, self._received_at = new, time.monotonic()
        return self.signal

    def _handle(self, number: int, frame: FrameType | None) -> None:
        final_signal = self._record_signal(signal.Signals(number))
        if self._cleanup_started_at == NEVER and time.monotonic() >= self._raise_deadline():
            # Python prints and ignores errors that are raised in a finalizer.
            if _in_finalizer(frame):
                self._must_retry = True
                return
            self.begin_cleanup()
            self.raised_by_handler = True
            raise RunStopped(final_signal)

    def _watch(self) -> None:
        """Run in the second thread: read the signals and enforce the deadlines."""
        announced, called_at, own_signals = False, NEVER, []
        while True:
            ready, _, _ = select.select([self._wakeup_reader], [], [], 0.05 if self.stop_requested else None)
            data = self._wakeup_reader.recv(256) if ready else b""
            if ready and not data:
                return
            # The descriptor receives the numbers of all signals with a Python handler.
            for number in filter(self._previous_handlers.__contains__, data):
                # A signal that this thread has sent does not count as a second Ctrl-C.
                if number in own_signals:
                    own_signals.remove(number)
                    continue
                if number == signal.SIGINT == self.signal and time.monotonic() - self._received_at > REPEAT_WINDOW_S:
                    self._force_exit("pressed twice: not all components were closed")
                self._record_signal(signal.Signals(number))
            now = time.monotonic()
            if self._cleanup_started_at != NEVER:
                if self.stop_requested and now > max(self._cleanup_started_at, self._received_at) + CLEANUP_S:
                    self._force_exit(f"a component did not close within {CLEANUP_S:g} s")
            elif now >= self._raise_deadline():
                if now > called_at + self._reaction_s:
                    self._force_exit("while a call did not return")
                elif called_at == NEVER or self._must_retry:
                    called_at, self._must_retry = min(called_at, now), False
                    # Run the handler again in the main thread, where it now raises.
                    main = threading.main_thread().ident
                    assert self.signal is not None and main is not None
                    own_signals.append(self.signal)
                    signal.pthread_kill(main, self.signal)
            elif self.stop_requested and self.prints_messages and not announced:
                announced = True
                _print_stderr(
                    f"SIGTERM: the run stops after this step, if the step ends within {self._grace_s:g} s (stop_grace_s)"
                )

    def _detach_in_child(self) -> None:
        # A forked child inherits our handlers and our socket, which would receive its signals.
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._wakeup.close()
        self._wakeup_reader.close()

    def _force_exit(self, how: str) -> None:
        """End the process from this thread. The kernel and the reaper end its children."""
        assert self.signal is not None
        # The disk or a full pipe may block the main thread, and this message as well.
        timer = threading.Timer(2.0, os._exit, [128 + self.signal])
        timer.daemon = True
        timer.start()
        try:
            if self.prints_messages:
                _print_stderr(f"Stopped by {SIGNAL_NAMES[self.signal]}, {how}. {self.status_message()}")
        finally:
            os._exit(128 + self.signal)


_active: list[StopSignals] = []  # the active handlers of this process, at most one


def _in_finalizer(frame: FrameType | None) -> bool:
    """Return whether a frame or one of its callers is `__del__` or in a weak collection."""
    while frame is not None and not (
        frame.f_code.co_name == "__del__" or frame.f_code.co_filename in WEAK_COLLECTION_FILES
    ):
        frame = frame.f_back
    return frame is not None


def _after_fork() -> None:
    while _active:
        _active.pop()._detach_in_child()


os.register_at_fork(after_in_child=_after_fork)


def _print_stderr(line: str) -> None:
    # `output.print_text` needs the lock of the progress bars, which a blocked main thread may hold.
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
