"""A process in which numpy computes a kernel's reference, so that a program can be compared with what libraries can do.

It is our own code, so nothing is locked in, and it reads the clock itself. Programs cannot see it.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import cloudpickle

from torchtune_ext.measured.arena import Place, arena_size
from torchtune_ext.measured.child import Call
from torchtune_ext.measured.kernel import Arrays, Kernel, Size
from torchtune_ext.measured.machine import pin
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.run.processes import Processes

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # of the libraries that numpy is built with


class NumpyChild:
    """Calls `kernel.reference` in another process on these cores, as `Child` calls the function of a library."""

    def __init__(self, kernel: Kernel, cores: Sequence[int], threads: int) -> None:
        self.arena_bytes = arena_size(kernel, kernel.timed)
        target = cloudpickle.dumps(partial(_timed_reference, frozenset(cores), kernel))
        variables = dict.fromkeys(THREADS, str(threads))
        self._processes = Processes(target, 1, "numpy", "kernel", variables=variables)

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
        return self._processes.submit((size, inputs), deadline_s, _fail).result()

    def close(self) -> None:
        """Ends the process."""
        self._processes.close(SandboxError("numpy is not timed any more"))


def _timed_reference(cores: frozenset[int], kernel: Kernel, size: Size, inputs: Arrays) -> Call:
    """Runs in the process, whose threads of numpy began before it could be told its cores."""
    pin(cores)
    cpu, start = time.process_time(), time.perf_counter()
    outputs = kernel.reference(size, inputs)
    return Call(time.perf_counter() - start, time.process_time() - cpu, 0.0, outputs)


def _fail(kind: str, cause: str) -> NoReturn:
    raise SandboxError(f"numpy: {cause}")
