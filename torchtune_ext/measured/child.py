"""The process that runs a candidate's function, seen from outside: its arrays, its calls, and its clock.

The child shares only the arrays with this process, and only this process can write the inputs. What the child says may be a
lie, so the clock is read here. It starts when all threads of the child sleep, and stops when all sleep again. The results are
copied while they sleep, and CPU seconds that were used between two calls are added to the second. So neither an early answer
nor a thread that works between the calls gains anything.
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

START_TIMEOUT_S = 20.0  # seconds until the sandbox is locked in; under load a process may start late
KILL_TIMEOUT_S = 5.0  # seconds until a killed process is gone
BUSY_POLLS = 20  # looks at a child without a pause between them; the later ones are `GLANCE_S` seconds apart
POLL_S = 50e-6
_MESSAGE_WORDS = 24  # of a message (sandbox.c)
_MESSAGE = struct.Struct(f"<IIQ{_MESSAGE_WORDS}Q")  # kind, count of arrays, number, words
_MAP_MESSAGE, _CALL_MESSAGE = 1, 2  # the kinds
PAGE_BYTES = mmap.PAGESIZE
ALIGNMENT_BYTES = 64  # bytes; every array starts at an address that this divides
# NaNs with a payload that no computation produces. One fills the outputs before a call, one the rest of their pages.
POISON = np.frombuffer(struct.pack("<Q", 0x7FF8_0BAD_0BAD_0BAD))
GUARD = np.frombuffer(struct.pack("<Q", 0x7FF8_CA4A_4CA4_A4CA))
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, which the module fcntl lacks


class SharedBuffer(Closing):
    """Memory that a child can map, and write if it is `writable`."""

    def __init__(self, name: str, nbytes: int, writable: bool) -> None:
        self.file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with closed_on_error(self):
            os.ftruncate(self.file, nbytes)
            self.memory = mmap.mmap(self.file, nbytes)
            # If the child could shrink the file, this process would be killed when it reads what is gone. Nobody can undo
            # a seal.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals | (0 if writable else _F_SEAL_FUTURE_WRITE))
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def close(self) -> None:
        os.close(self.file)


@dataclass(frozen=True, slots=True)
class ArrayPlacement:
    """Where an array lies in the arena. The pages before and after its own cannot be touched."""

    name: str
    shape: tuple[int, ...]
    is_output: bool
    first_page: int  # offset of its pages in bytes
    pages_bytes: int
    start: int  # offset of the array

    @property
    def nbytes(self) -> int:
        return 8 * math.prod(self.shape)


def round_to_pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def arena_size(kernel: Kernel, largest: Size) -> int:
    """Returns the bytes of address space for arrays of the largest size, with room to lie in other places."""
    need = sum(round_to_pages(8 * math.prod(shape)) + PAGE_BYTES for shape in kernel.shapes(largest).values())
    return 2 * need + 64 * PAGE_BYTES


def lay_out(
    kernel: Kernel, size: Size, arena_bytes: int, at_end: bool, rng: np.random.Generator
) -> tuple[ArrayPlacement, ...]:
    """Puts the arrays at random pages, in random order, with pages between them that cannot be touched.

    Args:
        at_end: an array ends where its last page ends, as far as its alignment allows, so that a step behind it is seen.
            Otherwise it starts where its first page starts, so that a step before it is seen.
    """
    shapes = kernel.shapes(size)
    nbytes = {p.name: 8 * math.prod(shapes[p.name]) for p in kernel.parameters}
    free = arena_bytes // PAGE_BYTES - sum(round_to_pages(n) // PAGE_BYTES + 1 for n in nbytes.values()) - 1
    # The free pages are divided at random among the gaps before, between and behind the arrays.
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
        cpu_s: in a timeout, the CPU seconds of all threads of the process.
    """

    def __init__(self, outcome: str, note: str, cpu_s: float = 0.0) -> None:
        super().__init__(note)
        self.outcome, self.cpu_s = outcome, cpu_s


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of the function."""

    seconds: float  # until all threads slept, and the CPU seconds that they used between the call before and this one
    cpu_s: float  # CPU seconds of all threads since the call before
    waited_s: float  # seconds for which the first thread wanted to run, but another process had the core
    outputs: Mapping[str, np.ndarray]  # copies of the results, made while the process slept


def _thread_state(file: int) -> tuple[bytes, int]:
    """Reads the state of a thread and the number of threads from its file `stat` (proc_pid_stat(5), fields 3 and 20)."""
    fields = os.pread(file, 1024, 0).rpartition(b") ")[2].split()
    return fields[0], int(fields[17])


class Child(Closing):
    """A locked-in process that has loaded the library of a candidate.

    Args:
        sandbox: how to lock it in.
        library: the shared object, whose code may run as soon as it is loaded.
        kernel: what it should compute.
        arena_bytes: address space for the arrays.
        cores: the cores that it runs on.
        threads: the threads that OpenMP may use.
        limits: what it may use.
        load_s: seconds for loading.

    Raises:
        SandboxError: the process could not be locked in.
        ChildFailed: loading fails, or takes too long.
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
        self._message_number = 0  # of the last message, which the answer repeats
        self._closed = False
        self.pid = 0  # of the process that runs the candidate, as soon as that is locked in
        # A handle of that process, and the kernel's files about its first thread.
        self._pidfd = self._stat_fd = self._schedstat_fd = -1
        self._idle_ns = 0  # its CPU clock when it was last seen asleep
        self._pending_cpu_ns = 0  # what it has used since the last call, and what the next call has to pay for
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
                # It says twice, unasked, that it has come so far: locked in, and with the library loaded.
                self._arena_address = self._receive(START_TIMEOUT_S)
                self._receive(load_s)
                self._idle_ns = self._wait_until_asleep(load_s)
            except OSError as error:
                raise SandboxError(f"a process could not be started: {error}") from error

    def has_ended(self) -> bool:
        """Tells whether the process has ended, or was given up."""
        return self._closed or self._process is None or self._process.poll() is not None

    def cpu_ns(self) -> int:
        """Returns the CPU nanoseconds that all threads of the child have used so far."""
        # Linux counts them at ticks, every 4 ms or so, while a thread runs. The clock is exact once all threads sleep.
        # Python lacks clock_getcpuclockid(3): see `_cpu_ns` of machine.py.
        try:
            return time.clock_gettime_ns(~self.pid << 3 | 2)
        except OSError:
            self._raise_exit()

    def unrequested_cpu_s(self) -> float:
        """Returns the CPU seconds that its threads have used since the last call, for nothing that was asked."""
        return (self._pending_cpu_ns + self._wait_until_asleep(START_TIMEOUT_S) - self._idle_ns) * 1e-9

    def map_arrays(self, places: Sequence[ArrayPlacement]) -> None:
        """Maps the arrays of the next calls, and fills the rest of their pages with `CANARY`."""
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
        """Writes the inputs, poisons the outputs, calls the function once, and copies its results.

        Raises:
            ChildFailed: it does not end within `deadline_s`, crashes, answers what nobody has asked, writes beside its
                outputs, or changes an input.
        """
        views = {place.name: self._array(place) for place in self._placements}
        for place in self._placements:
            views[place.name][...] = POISON if place.is_output else inputs[place.name]
        arguments = [size[name] for name in self.kernel.size_names] + [
            self._arena_address + place.start for place in self._placements
        ]
        before_ns = self._wait_until_asleep(deadline_s)
        owed_ns = self._pending_cpu_ns + before_ns - self._idle_ns
        ran_ns, waited_ns = self._scheduled_ns()
        start = time.perf_counter_ns()
        self._send(_CALL_MESSAGE, len(arguments), arguments)
        self._receive(deadline_s)
        while True:
            asleep_ns = self._wait_until_asleep(deadline_s - (time.perf_counter_ns() - start) * 1e-9)
            end = time.perf_counter_ns()
            outputs = {place.name: views[place.name].copy() for place in self._placements if place.is_output}
            # A thread may have woken up while the results were copied, or the clock may have lagged behind one that was
            # about to sleep. If the clock has moved since, the results are copied again.
            if self._is_asleep() and self.cpu_ns() == asleep_ns:
                break
            if end - start > deadline_s * 1e9:
                self._raise_still_running()
        self._check_guards(inputs, views)
        cpu_ns, self._pending_cpu_ns, self._idle_ns = self._pending_cpu_ns + asleep_ns - self._idle_ns, 0, asleep_ns
        ran_ns, waited_ns = (
            now - earlier for now, earlier in zip(self._scheduled_ns(), (ran_ns, waited_ns), strict=True)
        )
        # While other threads of its own ran, those may have been in the way of the first one. So their time is taken off.
        waited_ns = max(0, waited_ns - max(0, asleep_ns - before_ns - ran_ns))
        return CallResult((end - start + owed_ns) * 1e-9, cpu_ns * 1e-9, waited_ns * 1e-9, outputs)

    def close(self) -> None:
        """Kills the process, and everything that it started, and waits for its end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._pidfd >= 0:
            # Inside namespaces it is a child of bubblewrap and not of this process, and it ends a little later.
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            end.poll(KILL_TIMEOUT_S * 1e3)
            os.close(self._pidfd)
        for file in (self._stat_fd, self._schedstat_fd):
            if file >= 0:
                os.close(file)
        self._files.close()

    def _is_asleep(self) -> bool:
        """Tells whether all threads of the child sleep."""
        try:
            state, threads = _thread_state(self._stat_fd)
            # It has ended, but nobody has waited for it yet.
            if state in (b"Z", b"X") and threads <= 1:
                self._raise_exit()
            # Most programs have one thread, and the kernel's list of the others need not be read.
            if state != b"S" or threads == 1:
                return state == b"S"
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                # A thread that has ended meanwhile has no such file, or one that cannot be read any more.
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
        """Returns for how long the first thread has run, and has waited for a core. Both are 0 if the kernel does not count."""
        if self._schedstat_fd < 0:
            return 0, 0
        try:
            ran, waited = os.pread(self._schedstat_fd, 100, 0).split()[:2]
            return int(ran), int(waited)
        except ProcessLookupError:
            self._raise_exit()

    def _wait_until_asleep(self, deadline_s: float) -> int:
        """Waits until all threads of the child sleep, and returns its CPU clock."""
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
        # If it has ended, who waits for the answer finds out how.
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
                self._give_up(SandboxError(f"a locked-in process did not start within {deadline_s:g} s"))
            what = "a call" if self._message_number else "loading the library"
            self._raise_timeout(f"{what} did not end within {deadline_s:g} s")
        except OSError:
            data, extra = b"", []
        if not data:
            self._raise_exit()
        _, _, number, word, *_ = _MESSAGE.unpack(data) if len(data) == _MESSAGE.size else (0, 0, -1, 0)
        if number != self._message_number:
            self._give_up(
                ChildFailed("runtime_error", "it answered what nobody had asked: it meddles with the measurement")
            )
        if not self.pid:
            # Inside namespaces, the process that runs the candidate is not the one that was started. The kernel says who
            # has sent the message, in the numbers of our namespace.
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
        """Raises how the child has ended."""
        assert self._process is not None
        try:
            status = self._process.wait(timeout=KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._give_up(ChildFailed("runtime_error", "it closed its connection: it meddles with the measurement"))
        output = os.pread(self._stderr_fd, 2000, 0).decode(errors="replace").strip()
        # Nothing of the candidate has run before the first message.
        if not self.pid:
            self._give_up(SandboxError(f"a process could not be locked in: {output or exit_cause(status)}"))
        # bubblewrap exits with 128 and the number of the signal that ended its child.
        if status > 128:
            status = 128 - status
        by_itself = "it ended the process by itself" + (f" with exit status {status}" if status else "")
        cause = exit_cause(status) if status < 0 else by_itself
        self._give_up(ChildFailed("runtime_error", f"{cause}; it said: {output}" if output else cause))

    def _raise_still_running(self) -> NoReturn:
        self._raise_timeout("its threads still work after the call, until its deadline")

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
        """Returns what lies before and behind the array in its pages."""
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
