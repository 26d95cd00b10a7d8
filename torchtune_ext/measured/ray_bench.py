"""The service of `Bench` on the machines of a Ray cluster, with one timing queue per machine.

The machines run `ray start --resources='{"bench_host": 1}'`. Each has an actor with a `Bench`.
"""

import logging
import pickle
import re
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_ext.measured.bench import BenchService
from torchtune_ext.measured.check import Deadlines
from torchtune_ext.measured.kernel import Kernel
from torchtune_ext.measured.results import BenchConfig, BenchError, Result, code_version
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.backend import BackendCrashed, crash_on_timeout
from torchtune_ext.sampling.child_process import ChildProcess, log_tail

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 20.0  # seconds for a graceful shutdown
MAX_OUTPUT_CHARS = 2000  # characters of the Ray process's output in the error message of a crash


class RayBench(BenchService):
    """Measures programs on all machines of a Ray cluster that have the resource `bench_host`.

    Args:
        address: "HOST:PORT" of the cluster's head, or "auto" for the cluster of this machine. This
            machine must be a member of the cluster.
        settings: settings of each machine's `Bench`, which selects missing `workers` and `cores`.

    Raises:
        UsageError: a setting is unknown or out of range, or Ray is not installed.
        BenchError: the address does not respond, or no machine has the resource and can measure.
    """

    def __init__(self, address: str = "auto", deadlines: Deadlines | None = None, **settings: Any) -> None:
        BenchConfig(**settings, address=address)
        if not re.fullmatch(r"auto|[^/\s]+:\d+", address):
            raise UsageError(
                f"bench.address={address!r}: expected auto, or HOST:PORT of the cluster's head, e.g. 10.0.0.1:6379 "
                "(no ray://: this machine must be a member of the cluster)"
            )
        if find_spec("ray") is None:
            raise UsageError("bench.address needs Ray. Fix: pip install 'torchtune-ext[ray]', here and on each machine")
        self._start_args = address, code_version(), pickle.dumps({**settings, "deadlines": deadlines}), list(sys.path)
        self._process: ChildProcess | None = None  # Ray's driver
        super().__init__()

    async def _serve(self) -> None:
        # Ray takes over the signals of its driver, and ends the whole process when the cluster
        # crashes. So the driver is a separate process (ray_process.py). Its output, a page per
        # crashed machine, is shown only if the driver itself crashes.
        with tempfile.NamedTemporaryFile(prefix="ray-") as printed:
            path = Path(printed.name)
            self._process = ChildProcess(
                "Ray's process",
                "torchtune_ext.measured.ray_process",
                path,
                lambda kind, message: log.warning("bench on Ray: %s", message),
            )
            try:
                for line in await self._process.send_request("start", *self._start_args):
                    log.info("bench on Ray: %s", line)
                self._started.set_result(None)
                await self._loop.create_future()  # until `close`
            except BackendCrashed as lost:
                tail = log_tail(path, 0)[-MAX_OUTPUT_CHARS:] if self._process.is_dead else ""
                raise BenchError(f"{lost}; its last output:\n{tail}" if tail else str(lost)) from None
            finally:
                with suppress(BackendCrashed):
                    async with crash_on_timeout(CLOSE_TIMEOUT_S, "no end"):
                        await self._process.send_request("close")
                await self._process.stop()

    async def _measure(
        self, kernel: Kernel, kernel_bytes: bytes, text: str, permitted: tuple[str, ...] | None
    ) -> Result:
        assert self._process is not None  # set by `_serve`
        try:
            state, value = await self._process.send_request("measure", pickle.dumps((kernel_bytes, text, permitted)))
        except BackendCrashed as lost:
            raise BenchError(str(lost)) from None
        if state == "failed":
            raise BenchError(value)
        return pickle.loads(value)
