"""The parent's view of the process that runs a candidate's function: arrays, calls and clock.

The child shares only the arrays with this process, and only this process can write the inputs. The
child is untrusted, so this process measures the time. The clock starts when all threads of the
child sleep, and stops when all sleep again. The outputs are copied while they sleep, and CPU
seconds between two calls are added to the second call. So neither an early answer nor a thread that
works between calls gains anything.
"""

import fcntl
import math
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from torchtune_ext.measured.kernel import Kernel, Size
from torchtune_ext.measured.sandbox import Limits, Sandbox, SandboxError, clean_environment, exit_cause
from torchtune_ext.run.processes import Closing, closed_on_error

START_TIMEOUT_S = 20.0  # seconds until the sandbox is set up; under load a process may start late
KILL_TIMEOUT_S = 5.0  # seconds until a killed process has exited
BUSY_POLLS = 20  # polls of a child without a pause; later polls are `POLL_S` seconds apart
POLL_S = 50e-6
_MESSAGE_WORDS = 24  # words per message (sandbox.c)
_MESSAGE = struct.Struct(f"<IIQ{_MESSAGE_WORDS}Q")  # kind, number of arrays, message number, words
_MAP_MESSAGE, _CALL_MESSAGE = 1, 2  # message kinds
PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT_BYTES = 64  # alignment of every array
# NaNs that no computation produces. POISON fills the outputs, GUARD the rest of their pages.
POISON = np.frombuffer(struct.pack("<Q", 0x7FF8_0BAD_0BAD_0BAD))
GUARD = np.frombuffer(struct.pack("<Q", 0x7FF8_CA4A_4CA4_A4CA))
_F_SEAL_FUTURE_WRITE = 0x10  # from <linux/fcntl.h>; missing in the module fcntl


class SharedBuffer(Closing):
    """Memory that a child can map, and can write if `writable` is set."""

    def __init__(self, name: str, nbytes: int, writable: bool) -> None:
        self.file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with closed_on_error(self):
            os.ftruncate(self.file, nbytes)
            self.memory = mmap.mmap(self.file, nbytes)
            # If the child could shrink the file, reading it would kill this process. Seals stay.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals | (0 if writable else _F_SEAL_FUTURE_WRITE))
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def close(self) -> None:
        os.close(self.file)


@dataclass(frozen=True, slots=True)
class ArrayPlacement:
    """The position of an array in the arena. The neighboring pages are inaccessible."""

    name: str
    shape: tuple[int, ...]
    is_output: bool
    first_page: int  # byte offset of its pages in the arena
    pages_bytes: int
    start: int  # byte offset of the array in the arena

    @property
    def nbytes(self) -> int:
        return 8 * math.prod(self.shape)


def round_to_pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def arena_size(kernel: Kernel, largest: Size) -> int:
    """Returns the address space for arrays of the largest size and random placement, in bytes."""
    need = sum(round_to_pages(8 * math.prod(shape)) + PAGE_BYTES for shape in kernel.shapes(largest).values())
    return 2 * need + 64 * PAGE_BYTES


def lay_out(
    kernel: Kernel, size: Size, arena_bytes: int, at_end: bool, rng: np.random.Generator
) -> tuple[ArrayPlacement, ...]:
    """Places the arrays at random pages, in random order, separated by inaccessible pages.

    Args:
        at_end: whether arrays end at the end of their last page, up to alignment, so that an access
            after the array faults. Otherwise they start at their first page, so that an access
            before the array faults.
    """
    shapes = kernel.shapes(size)
    nbytes = {p.name: 8 * math.prod(shapes[p.name]) for p in kernel.parameters}
    free = arena_bytes // PAGE_BYTES - sum(round_to_pages(n) // PAGE_BYTES + 1 for n in nbytes.values()) - 1
    # The free pages are divided at random among the gaps before, between and after the arrays.
    cuts = np.sort(rng.integers(0, free + 1, len(nbytes)))
    places, used = {}, 1
    for skipped, index in zip(cuts, rng.permutation(len(nbytes)), strict=True):
        parameter = kernel.parameters[index]
        first = (used + int(skipped)) * PAGE_BYTES
        whole = round_to_pages(nbytes[parameter.name])
        inside = (whole - nbytes[parameter.name]) // ALIGNMENT_BYTES * ALIGNMENT_BYTES if at_end else 0
        places[parameter.name] = ArrayPlacement(
            parameter.name, shapes[parameter.name], parameter.is_output, first, whole, first + inside
        )
        used += whole // PAGE_BYTES + 1
    return tuple(places[parameter.name] for parameter in kernel.parameters)


class ChildFailed(Exception):
    """The candidate's process failed.

    Attributes:
        outcome: "timeout", "runtime_error" or "wrong_result".
        cpu_s: after a timeout, the CPU seconds of all threads of the process.
    """

    def __init__(self, outcome: str, note: str, cpu_s: float = 0.0) -> None:
        super().__init__(note)
        self.outcome, self.cpu_s = outcome, cpu_s


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of the function."""

    seconds: float  # wall time until all threads slept, plus their CPU seconds since the previous call
    cpu_s: float  # CPU seconds of all threads since the previous call
    waited_s: float  # seconds during which the first thread was runnable, but another process had the core
    outputs: Mapping[str, np.ndarray]  # copies of the outputs, made while the process slept


def _thread_state(file: int) -> tuple[bytes, int]:
    """Reads a thread's state and its number of threads (proc_pid_stat(5), fields 3 and 20)."""
    fields = os.pread(file, 1024, 0).rpartition(b") ")[2].split()
    return fields[0], int(fields[17])


class Child(Closing):
    """A sandboxed process that has loaded the library of a candidate.

    Args:
        library: the shared object, whose code may run as soon as it is loaded.
        arena_bytes: bytes of address space for the arrays.
        load_s: timeout for loading, in seconds.

    Raises:
        SandboxError: the process could not be sandboxed.
        ChildFailed: loading fails or times out.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        library: Path,
        kernel: Kernel,
        arena_bytes: int,
        cores: Sequence[int],
        threads: int,
        limits: Limits,
        load_s: float,
    ) -> None:
        self.kernel = kernel
        self.arena_bytes = arena_bytes
        with ExitStack() as files:
            try:
                self._inputs = files.enter_context(closing(SharedBuffer("inputs", arena_bytes, writable=False)))
                self._outputs = files.enter_context(closing(SharedBuffer("outputs", arena_bytes, writable=True)))
                self._stderr_fd = os.memfd_create("errors", os.MFD_CLOEXEC)
                files.callback(os.close, self._stderr_fd)
                self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except (OSError, OverflowError) as error:
                raise SandboxError(f"no room for {2 * arena_bytes / 1e9:.3g} GB of arrays: {error}") from error
            self._files = files.pop_all()
        self._placements: tuple[ArrayPlacement, ...] = ()
        self._message_number = 0  # number of the last message, which the answer repeats
        self._closed = False
        self.pid = 0  # process id of the candidate, set once it is sandboxed
        # The pidfd of that process, and the /proc files of its first thread.
        self._pidfd = self._stat_fd = self._schedstat_fd = -1
        self._idle_ns = 0  # CPU clock of the child when it was last seen asleep
        self._pending_cpu_ns = 0  # CPU time since the last call, added to the next call
        self._process: subprocess.Popen | None = None
        with closed_on_error(self):
            try:
                with child_socket:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                    files = (child_socket.fileno(), self._inputs.file, self._outputs.file)
                    self._process = subprocess.Popen(
                        sandbox.function_command(library, kernel.name, arena_bytes, files, cores, limits),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=self._stderr_fd,
                        pass_fds=files,
                        env=clean_environment(threads),
                        start_new_session=True,
                        cwd="/",
                    )
                # The child sends two unsolicited messages: sandboxed, and library loaded.
                self._arena_address = self._receive(START_TIMEOUT_S)
                self._receive(load_s)
                self._idle_ns = self._wait_until_asleep(load_s)
            except OSError as error:
                raise SandboxError(f"a process could not be started: {error}") from error

    def has_ended(self) -> bool:
        """Returns whether the process has ended, or was closed."""
        return self._closed or self._process is None or self._process.poll() is not None

    def cpu_ns(self) -> int:
        """Returns the CPU nanoseconds that all threads of the child have used so far."""
        # While a thread runs, Linux updates the clock at ticks, about every 4 ms. It is exact once
        # all threads sleep. Python lacks clock_getcpuclockid(3): see `_cpu_ns` in machine.py.
        try:
            return time.clock_gettime_ns(~self.pid << 3 | 2)
        except OSError:
            self._raise_exit()

    def unrequested_cpu_s(self) -> float:
        """Returns the CPU seconds that the child's threads used since the last call."""
        return (self._pending_cpu_ns + self._wait_until_asleep(START_TIMEOUT_S) - self._idle_ns) * 1e-9

    def map_arrays(self, places: Sequence[ArrayPlacement]) -> None:
        """Maps the arrays of the next calls, and fills the rest of their pages with `GUARD`."""
        words = [word for place in places for word in (place.first_page, place.pages_bytes, int(place.is_output))]
        self._pending_cpu_ns += self._wait_until_asleep(START_TIMEOUT_S) - self._idle_ns
        self._send(_MAP_MESSAGE, len(places), words)
        self._receive(START_TIMEOUT_S)
        self._placements = tuple(places)
        for place in self._placements:
            for around in self._guard_regions(place):
                around.view(np.float64)[:] = GUARD
        self._idle_ns = self._wait_until_asleep(START_TIMEOUT_S)

    def call(self, size: Size, inputs: Mapping[str, np.ndarray], deadline_s: float) -> CallResult:
        """Writes the inputs, poisons the outputs, calls the function once, and copies its outputs.

        Raises:
            ChildFailed: the call exceeds `deadline_s` seconds, crashes, sends an unsolicited
                answer, writes outside of its outputs, or changes an input.
        """
        views = {place.name: self._array(place) for place in self._placements}
        for place in self._placements:
            views[place.name][...] = POISON if place.is_output else inputs[place.name]
        arguments = [size[name] for name in self.kernel.size_names] + [
            self._arena_address + place.start for place in self._placements
        ]
        before_ns = self._wait_until_asleep(deadline_s)
        owed_ns = self._pending_cpu_ns + before_ns - self._idle_ns
        ran_before, waited_before = self._scheduled_ns()
        start = time.perf_counter_ns()
        self._send(_CALL_MESSAGE, len(arguments), arguments)
        self._receive(deadline_s)
        while True:
            asleep_ns = self._wait_until_asleep(deadline_s - (time.perf_counter_ns() - start) * 1e-9)
            end = time.perf_counter_ns()
            outputs = {place.name: views[place.name].copy() for place in self._placements if place.is_output}
            # A thread may have woken up during the copy, or its CPU time may have been counted
            # late. If the clock has advanced since, the outputs are copied again.
            if self._is_asleep() and self.cpu_ns() == asleep_ns:
                break
            if end - start > deadline_s * 1e9:
                self._raise_still_running()
        self._check_guards(inputs, views)
        cpu_ns, self._pending_cpu_ns, self._idle_ns = self._pending_cpu_ns + asleep_ns - self._idle_ns, 0, asleep_ns
        ran_now, waited_now = self._scheduled_ns()
        # The first thread may have waited for other threads, so their CPU time is subtracted.
        others_ns = max(0, asleep_ns - before_ns - (ran_now - ran_before))
        waited_ns = max(0, waited_now - waited_before - others_ns)
        return CallResult((end - start + owed_ns) * 1e-9, cpu_ns * 1e-9, waited_ns * 1e-9, outputs)

    def close(self) -> None:
        """Kills the process and its children, and waits for its end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._pidfd >= 0:
            # Inside namespaces, the process is a child of bubblewrap and ends a little later.
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            end.poll(KILL_TIMEOUT_S * 1e3)
            os.close(self._pidfd)
        for file in (self._stat_fd, self._schedstat_fd):
            if file >= 0:
                os.close(file)
        self._files.close()

    def _is_asleep(self) -> bool:
        """Returns whether all threads of the child sleep."""
        try:
            state, threads = _thread_state(self._stat_fd)
            # A zombie: the process has ended, but was not waited for.
            if state in (b"Z", b"X") and threads <= 1:
                self._raise_exit()
            # Most programs have one thread, so the thread list is not needed.
            if state != b"S" or threads == 1:
                return state == b"S"
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                # The file of a thread that has just ended is missing or unreadable.
                with (
                    suppress(FileNotFoundError, ProcessLookupError),
                    open(f"/proc/{self.pid}/task/{thread}/stat", "rb", buffering=0) as file,
                ):
                    if _thread_state(file.fileno())[0] != b"S":
                        return False
            return True
        except (ProcessLookupError, FileNotFoundError):
            self._raise_exit()

    def _scheduled_ns(self) -> tuple[int, int]:
        """Returns the run time and the core wait time of the first thread; 0 without schedstat."""
        if self._schedstat_fd < 0:
            return 0, 0
        try:
            ran, waited = os.pread(self._schedstat_fd, 100, 0).split()[:2]
            return int(ran), int(waited)
        except ProcessLookupError:
            self._raise_exit()

    def _wait_until_asleep(self, deadline_s: float) -> int:
        """Waits until all threads of the child sleep, and returns its CPU clock in ns."""
        end = time.monotonic() + deadline_s
        glances = 0
        while not self._is_asleep():
            if time.monotonic() > end:
                self._raise_still_running()
            glances += 1
            if glances > BUSY_POLLS:
                time.sleep(POLL_S)
        return self.cpu_ns()

    def _send(self, kind: int, count: int, words: Sequence[int]) -> None:
        self._message_number += 1
        padded = [*words, *[0] * (_MESSAGE_WORDS - len(words))]
        # If the child has ended, `_receive` raises the cause.
        with suppress(OSError):
            self._socket.settimeout(START_TIMEOUT_S)
            self._socket.send(_MESSAGE.pack(kind, count, self._message_number, *padded))

    def _receive(self, deadline_s: float) -> int:
        """Waits for the answer to the last message, and returns its first word."""
        self._socket.settimeout(deadline_s)
        try:
            data, extra, _, _ = self._socket.recvmsg(_MESSAGE.size + 1, socket.CMSG_SPACE(12))
        except TimeoutError:
            if not self.pid:
                self._give_up(SandboxError(f"a sandboxed process did not start within {deadline_s:g} s"))
            what = "a call" if self._message_number else "loading the library"
            self._raise_timeout(f"{what} did not end within {deadline_s:g} s")
        except OSError:
            data, extra = b"", []
        if not data:
            self._raise_exit()
        _, _, number, word, *_ = _MESSAGE.unpack(data) if len(data) == _MESSAGE.size else (0, 0, -1, 0)
        if number != self._message_number:
            self._give_up(
                ChildFailed("runtime_error", "it sent an unsolicited answer: it tampers with the measurement")
            )
        if not self.pid:
            # Inside namespaces, the candidate's process is a descendant of the started one. The
            # kernel reports the sender's process id in the namespace of this process.
            self.pid = struct.unpack("iii", extra[0][2])[0]
            try:
                self._pidfd = os.pidfd_open(self.pid)
                folder = f"/proc/{self.pid}/task/{self.pid}"
                self._stat_fd = os.open(f"{folder}/stat", os.O_RDONLY | os.O_CLOEXEC)
                if os.path.exists(f"{folder}/schedstat"):
                    self._schedstat_fd = os.open(f"{folder}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except (ProcessLookupError, FileNotFoundError):
                self._raise_exit()
        return word

    def _raise_exit(self) -> NoReturn:
        """Raises the cause of the child's exit."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._give_up(ChildFailed("runtime_error", "it closed its connection: it tampers with the measurement"))
        output = os.pread(self._stderr_fd, 2000, 0).decode(errors="replace").strip()
        # No code of the candidate runs before the first message.
        if not self.pid:
            self._give_up(SandboxError(f"a process could not be locked in: {output or exit_cause(status)}"))
        # bubblewrap exits with 128 + the number of the signal that ended its child.
        if status > 128:
            status = 128 - status
        by_itself = "it ended the process by itself" + (f" with exit status {status}" if status else "")
        cause = exit_cause(status) if status < 0 else by_itself
        self._give_up(ChildFailed("runtime_error", f"{cause}; its output: {output}" if output else cause))

    def _raise_still_running(self) -> NoReturn:
        self._raise_timeout("its threads still work after the call, until the deadline")

    def _raise_timeout(self, note: str) -> NoReturn:
        self._give_up(ChildFailed("timeout", note, self.cpu_ns() * 1e-9))

    def _give_up(self, failure: ChildFailed | SandboxError) -> NoReturn:
        self.close()
        raise failure from None

    def _array(self, place: ArrayPlacement) -> np.ndarray:
        numbers = self._memory(place)[place.start : place.start + place.nbytes].view(np.float64)
        return numbers.reshape(place.shape)

    def _memory(self, place: ArrayPlacement) -> np.ndarray:
        return self._outputs.bytes if place.is_output else self._inputs.bytes

    def _guard_regions(self, place: ArrayPlacement) -> tuple[np.ndarray, np.ndarray]:
        """Returns the bytes before and after the array in its pages."""
        memory, end = self._memory(place), place.first_page + place.pages_bytes
        return memory[place.first_page : place.start], memory[place.start + place.nbytes : end]

    def _check_guards(self, inputs: Mapping[str, np.ndarray], views: Mapping[str, np.ndarray]) -> None:
        guard = int(GUARD.view(np.uint64)[0])
        for place in self._placements:
            if not place.is_output:
                if not np.array_equal(views[place.name].view(np.uint64), inputs[place.name].view(np.uint64)):
                    self._give_up(ChildFailed("wrong_result", f"it changed its input {place.name}"))
                continue
            before, after = ((around.view(np.uint64) != guard).any() for around in self._guard_regions(place))
            if before or after:
                side = "before" if before else "after"
                self._give_up(ChildFailed("runtime_error", f"it wrote {side} the array {place.name}"))
