"""The process that runs a candidate's function, seen from outside: its arrays, its calls, and its clock.

The child shares only the arrays with this process. Inputs are mapped so that nobody but this process can ever write them.
Everything that the child says may be a lie, so it decides nothing: the clock is read here, the results are copied here, and
every CPU second that the child uses after the clock was read is added to the time. So an answer that comes too early gains
nothing: either the copy is incomplete, or the work was done while the clock ran.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from torchtune_ext.tasks.measured.kernel import Kernel, Size
from torchtune_ext.tasks.measured.sandbox import (
    Limits,
    Sandbox,
    SandboxError,
    clean_environment,
    exit_cause,
)

PAGE = mmap.PAGESIZE
ALIGNMENT = 64  # bytes; every array starts at an address that this divides
START_S = 20.0  # seconds until the sandbox is locked in; under load a process may start late
END_S = 5.0  # seconds until a killed process is gone
QUIET_S = 50e-6  # how long a child is watched after a call
QUIET_NS = (
    20_000  # CPU nanoseconds it may use meanwhile: for the end of its `write`, the start of its `read`, and to sleep
)
# NaNs with a payload that no computation produces: one is the content of outputs before a call, one lies around arrays.
POISON = np.frombuffer(struct.pack("<Q", 0x7FF8_0BAD_0BAD_0BAD))
CANARY = np.frombuffer(struct.pack("<Q", 0x7FF8_CA4A_4CA4_A4CA))
_MESSAGE = struct.Struct("<IIQ24Q")
_READY, _LOADED, _PLACE, _CALL, _DONE = range(1, 6)
_F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>; not in the module fcntl


class ChildFailed(Exception):
    """The candidate's process failed.

    Attributes:
        outcome: "timeout", "runtime_error" or "wrong_result".
    """

    def __init__(self, outcome: str, note: str) -> None:
        super().__init__(note)
        self.outcome = outcome


class _Shared:
    """Memory that a child can map. `writable`: the child may write it."""

    def __init__(self, name: str, nbytes: int, writable: bool) -> None:
        self.file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, nbytes)
        self.memory = mmap.mmap(self.file, nbytes)
        # A file that shrinks would kill this process when it looks. Seals are for ever.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals | (0 if writable else _F_SEAL_FUTURE_WRITE))
        self.bytes = np.frombuffer(self.memory, np.uint8)

    def close(self) -> None:
        os.close(self.file)


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in the arena. Around its pages is memory that cannot be touched."""

    name: str
    shape: tuple[int, ...]
    is_output: bool
    first_page: int  # offset of its pages in bytes
    pages_bytes: int
    start: int  # offset of the array

    @property
    def nbytes(self) -> int:
        return 8 * math.prod(self.shape)


def pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def arena_size(kernel: Kernel, largest: Size) -> int:
    """Returns how many bytes of address space arrays of the largest size need, with room to lie elsewhere."""
    need = sum(pages(8 * math.prod(shape)) + PAGE for shape in kernel.shapes(largest).values())
    return 2 * need + 64 * PAGE


def lay_out(kernel: Kernel, size: Size, arena_bytes: int, at_end: bool, rng: np.random.Generator) -> tuple[Place, ...]:
    """Puts the arrays at random pages, in random order, with pages between them that cannot be touched.

    at_end: an array ends where its last page ends (as far as its alignment allows), so that a step too far is seen;
    otherwise it starts where its first page starts, so that a step before it is seen.
    """
    shapes = kernel.shapes(size)
    nbytes = {p.name: 8 * math.prod(shapes[p.name]) for p in kernel.parameters}
    free = arena_bytes // PAGE - sum(pages(n) // PAGE + 1 for n in nbytes.values()) - 1
    if free < 0:
        raise ValueError(f"arrays of size {dict(size)} do not fit into an arena of {arena_bytes} bytes")
    cuts = np.sort(rng.integers(0, free + 1, len(nbytes)))  # the free pages are dealt out before, between and after
    places, used = {}, 1
    for skipped, index in zip(cuts, rng.permutation(len(nbytes)), strict=True):
        parameter = kernel.parameters[index]
        first = (used + int(skipped)) * PAGE
        whole = pages(nbytes[parameter.name])
        inside = (whole - nbytes[parameter.name]) // ALIGNMENT * ALIGNMENT if at_end else 0
        places[parameter.name] = Place(
            parameter.name, shapes[parameter.name], parameter.is_output, first, whole, first + inside
        )
        used += whole // PAGE + 1
    return tuple(places[parameter.name] for parameter in kernel.parameters)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the function."""

    seconds: (
        float  # from the request until its process sleeps, and what CPU it used before the request and after the answer
    )
    cpu_s: float  # CPU seconds of all its threads since the last call
    outputs: Mapping[str, np.ndarray]  # copies of its results, made while the process slept


class Child:
    """A locked-in process that has loaded the library of a candidate.

    Args:
        sandbox: how to lock it in.
        library: the shared object; its code runs as soon as it is loaded.
        kernel: what it should compute.
        arena_bytes: address space for the arrays.
        cores: the cores that it runs on.
        threads: how many threads OpenMP may use.
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
        self._inputs = _Shared("inputs", arena_bytes, writable=False)
        self._outputs = _Shared("outputs", arena_bytes, writable=True)
        self._places: tuple[Place, ...] = ()
        self._number = 0  # of the last message
        self._closed = False
        self._pidfd = -1  # of the process that runs the candidate
        self._process: subprocess.Popen | None = None
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
                files = (theirs.fileno(), self._inputs.file, self._outputs.file)
                self._process = subprocess.Popen(
                    sandbox.run_function(library, kernel.name, arena_bytes, files, cores, limits),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    pass_fds=files,
                    env=clean_environment(threads),
                    start_new_session=True,
                    cwd="/",
                )
            self._arena = self._receive(_READY, START_S, locked_in=False)
            self._receive(_LOADED, load_s)
            self._idle_ns = self.cpu_ns()
        except OSError as error:
            self.close()
            raise SandboxError(f"a process could not be started: {error}") from error
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process that runs the candidate (inside of namespaces it is not the one that was started)."""
        return self._pid

    def cpu_ns(self) -> int:
        """Returns the CPU nanoseconds that all threads of the child have used so far."""
        try:
            return time.clock_gettime_ns(~self._pid << 3 | 2)
        except OSError:
            self._fail()

    def place(self, places: Sequence[Place]) -> None:
        """Maps the arrays of the next calls, and fills the rest of their pages."""
        words = [word for place in places for word in (place.first_page, place.pages_bytes, int(place.is_output))]
        self._send(_PLACE, len(places), words)
        self._receive(_DONE, START_S)
        self._places = tuple(places)
        for place in self._places:
            memory = self._memory(place)
            memory[place.first_page : place.first_page + place.pages_bytes].view(np.float64)[:] = CANARY
        self._idle_ns = self.cpu_ns()

    def call(self, size: Size, inputs: Mapping[str, np.ndarray], deadline_s: float) -> Call:
        """Writes the inputs, poisons the outputs, calls the function once, and copies its results.

        The time of a call ends when the process uses no CPU any more. What its threads do between two calls is added to it,
        so that work which is done before the request or after the answer gains nothing.

        Raises:
            ChildFailed: it does not end within `deadline_s`, crashes, says something that nobody asked, writes beside its
                outputs, or changes an input.
        """
        views = {place.name: self._array(place) for place in self._places}
        for place in self._places:
            views[place.name][...] = POISON if place.is_output else inputs[place.name]
        arguments = [size[name] for name in self.kernel.size_names] + [
            self._arena + place.start for place in self._places
        ]
        before_ns = self.cpu_ns()
        start = time.perf_counter_ns()
        self._send(_CALL, len(arguments), arguments)
        self._receive(_DONE, deadline_s)
        while True:
            end, end_ns = time.perf_counter_ns(), self.cpu_ns()
            outputs = {place.name: views[place.name].copy() for place in self._places if place.is_output}
            time.sleep(QUIET_S)
            quiet_ns = self.cpu_ns()
            if quiet_ns - end_ns <= QUIET_NS:
                break
            if (end - start) * 1e-9 > deadline_s:
                self.close()
                raise ChildFailed("timeout", f"its threads still work {deadline_s:g} s after the call began")
        self._require_untouched(inputs, views)
        other_ns = before_ns - self._idle_ns + quiet_ns - end_ns
        cpu_ns, self._idle_ns = quiet_ns - self._idle_ns, quiet_ns
        return Call((end - start + other_ns) * 1e-9, cpu_ns * 1e-9, outputs)

    def close(self) -> None:
        """Kills the process, and everything that it started, and waits for its end. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._socket.close()
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
        if self._pidfd >= 0:
            # Inside of namespaces it is no child of ours, and ends a little later than bubblewrap, which is.
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            end.poll(END_S * 1e3)
            os.close(self._pidfd)
        self._inputs.close()
        self._outputs.close()
        os.close(self._errors)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, kind: int, count: int, words: Sequence[int]) -> None:
        self._number += 1
        padded = [*words, *[0] * (24 - len(words))]
        try:
            self._socket.settimeout(START_S)
            self._socket.send(_MESSAGE.pack(kind, count, self._number, *padded))
        except OSError:
            # It has ended. Waiting for its answer finds out how.
            pass

    def _receive(self, kind: int, deadline_s: float, locked_in: bool = True) -> int:
        """Waits for a message of the child and returns its word."""
        self._socket.settimeout(deadline_s)
        try:
            data, extra, _, _ = self._socket.recvmsg(_MESSAGE.size + 1, socket.CMSG_SPACE(12))
        except TimeoutError:
            what = "loading the library" if kind == _LOADED else "a call"
            self.close()
            if not locked_in:
                raise SandboxError(f"a locked-in process did not start within {deadline_s:g} s") from None
            raise ChildFailed("timeout", f"{what} did not end within {deadline_s:g} s") from None
        except OSError:
            data, extra = b"", []
        if not data:
            self._fail(locked_in)
        found = _MESSAGE.unpack(data) if len(data) == _MESSAGE.size else (0, 0, 0, 0)
        if found[0] != kind or (kind == _DONE and found[2] != self._number):
            self.close()
            raise ChildFailed("runtime_error", "it answered what nobody had asked: it meddles with the measurement")
        if kind == _READY:
            # The kernel says who the sender is, in the numbers of this process's namespace.
            self._pid = struct.unpack("iii", extra[0][2])[0]
            try:
                self._pidfd = os.pidfd_open(self._pid)
            except ProcessLookupError:
                self._fail()
        return found[3]

    def _fail(self, locked_in: bool = True) -> NoReturn:
        """Raises what the end of the process means."""
        try:
            status = self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.close()
            raise ChildFailed("runtime_error", "it closed its connection: it meddles with the measurement") from None
        said = os.pread(self._errors, 2000, 0).decode(errors="replace").strip()
        self.close()
        if not locked_in:
            raise SandboxError(f"a process could not be locked in: {said or exit_cause(status)}")
        if status > 128:
            status = 128 - status  # bubblewrap's way to say that a signal ended its child
        cause = (
            exit_cause(status)
            if status < 0
            else "it ended the process by itself" + (f" with exit status {status}" if status else "")
        )
        raise ChildFailed("runtime_error", f"{cause}; it said: {said}" if said else cause)

    def _array(self, place: Place) -> np.ndarray:
        memory = self._memory(place)
        return memory[place.start : place.start + place.nbytes].view(np.float64).reshape(place.shape)

    def _memory(self, place: Place) -> np.ndarray:
        return self._outputs.bytes if place.is_output else self._inputs.bytes

    def _require_untouched(self, inputs: Mapping[str, np.ndarray], views: Mapping[str, np.ndarray]) -> None:
        canary = int(CANARY.view(np.uint64)[0])
        for place in self._places:
            if not place.is_output:
                if not np.array_equal(views[place.name].view(np.uint64), inputs[place.name].view(np.uint64)):
                    self.close()
                    raise ChildFailed("wrong_result", f"it changed its input {place.name}")
                continue
            memory = self._memory(place)
            before = memory[place.first_page : place.start].view(np.uint64)
            after = memory[place.start + place.nbytes : place.first_page + place.pages_bytes].view(np.uint64)
            if (before != canary).any() or (after != canary).any():
                self.close()
                side = "before" if (before != canary).any() else "after"
                raise ChildFailed("runtime_error", f"it wrote {side} the array {place.name}")
