"""A process in which numpy computes a kernel's reference, so that a program can be compared with what libraries can do.

It is our own code, so nothing is locked in, and it reads the clock itself. Programs cannot see it.
"""

import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait

import cloudpickle

from torchtune_ext.measured.arena import Place, arena_size
from torchtune_ext.measured.child import Call
from torchtune_ext.measured.kernel import Arrays, Kernel, Size
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.run.parent import die_with_parent, environment

START_S = 60.0  # seconds until numpy is imported
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # of the libraries that numpy is built with


class NumpyChild:
    """Calls `kernel.reference` in another process on these cores, as `Child` calls the function of a library.

    The process ends with the thread that made this object, at the latest.

    Raises:
        SandboxError: it does not start.
    """

    def __init__(self, kernel: Kernel, cores: Sequence[int], threads: int) -> None:
        self.arena_bytes = arena_size(kernel, kernel.timed)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path), **dict.fromkeys(THREADS, str(threads))},
                start_new_session=True,
            )
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        try:
            self._ask((sorted(cores), cloudpickle.dumps(kernel)), START_S)
        except BaseException:
            self.close()
            raise

    def restless_s(self) -> float:
        """Returns 0: it runs no code of a candidate."""
        return 0.0

    def place(self, places: Sequence[Place]) -> None:
        """Does nothing: numpy's arrays lie where numpy puts them."""

    def call(self, size: Size, inputs: Arrays, deadline_s: float) -> Call:
        """Computes the reference once, in the data type of the inputs.

        Raises:
            SandboxError: it fails or does not end within `deadline_s`.
        """
        return self._ask((size, inputs), deadline_s)

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "NumpyChild":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, question: object, deadline_s: float) -> Call:
        # A process that is stopped must not block this one, neither in the middle of a question nor of an answer.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", math.ceil(deadline_s), 0))
        try:
            self._connection.send(question)
            if not wait([self._connection], deadline_s):
                raise SandboxError(f"numpy did not end within {deadline_s:g} s")
            answer = self._connection.recv()
        except BlockingIOError:
            raise SandboxError(f"numpy did not end within {deadline_s:g} s") from None
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise SandboxError(f"the process in which numpy is timed has ended: {error}") from error
        if isinstance(answer, str):
            raise SandboxError(f"numpy: {answer}")
        return answer


def main(fd: int, parent_pid: int) -> None:
    """Answers until the other end closes."""
    die_with_parent(parent_pid)
    parent = Connection(fd)
    cores, payload = parent.recv()
    os.sched_setaffinity(0, cores)
    kernel: Kernel = pickle.loads(payload)  # from here on there is numpy, and its threads are on these cores
    parent.send(Call(0.0, 0.0, 0.0, {}))
    while True:
        try:
            size, inputs = parent.recv()
        except EOFError:
            return
        try:
            cpu, start = time.process_time(), time.perf_counter()
            outputs = kernel.reference(size, inputs)
            parent.send(Call(time.perf_counter() - start, time.process_time() - cpu, 0.0, outputs))
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it)
            parent.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
