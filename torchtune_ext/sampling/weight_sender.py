"""The trainer's side of the sender: updates servers one after the other, each with a deadline."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from torchtune_ext.sampling.backend import BackendCrashed, crash_on_timeout, gather_or_cancel
from torchtune_ext.sampling.child_process import ChildProcess
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffer

log = logging.getLogger(__name__)

SENDER_MODULE = "torchtune_ext.sampling.broadcast"
SENDER_START_S = 60.0  # deadline of the sender's start in seconds; it imports torch


class Receiver(Protocol):
    """The part of a `ServerBackend` that the weight sender uses."""

    config: EngineConfig
    address: str
    connection_id: str
    transfer: str
    workers: int

    async def slow_call(self, method: str, /, **arguments: Any) -> Any: ...

    async def begin_update(self, buffer: WeightBuffer) -> None: ...

    async def transfer_tensors(self, buffer: WeightBuffer, broadcast: bool = False) -> None: ...

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None: ...


class WeightSender:
    """Owns the sender process of a run. All methods run in the engine's asyncio thread."""

    def __init__(self, log_path: Path):
        self._log_path = log_path  # file for the sender's output
        self._sender: ChildProcess | None = None
        # The sender has a group with each server, so that no server waits for another's network.
        self._joined: dict[str, str] = {}  # server address -> connection id whose group the sender has joined
        self._turn = asyncio.Lock()  # one server at a time
        self._closed = False

    def start(self) -> ChildProcess:
        """Starts the sender process, which takes seconds, unless it runs already.

        Raises:
            OSError: If the process cannot be started.
            BackendCrashed: If the engine was closed.
        """
        if self._closed:
            raise BackendCrashed("the engine was closed")
        if self._sender is None or self._sender.is_dead:
            self._sender, self._joined = ChildProcess("the sender", SENDER_MODULE, self._log_path), {}
        return self._sender

    async def stop(self) -> None:
        """Ends the sender and its transfer."""
        self._closed = True
        await self._kill()

    @asynccontextmanager
    async def turn(self, limit_s: float) -> AsyncIterator[None]:
        """Excludes the updates of other servers while the body pauses, updates and resumes a server.

        Raises:
            BackendCrashed: If other servers take longer than `limit_s` seconds.
        """
        async with crash_on_timeout(limit_s, "the weight syncs of other servers did not end"):
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    async def update_server(self, backend: Receiver, buffer: WeightBuffer, version: int) -> None:
        """Sends a buffer to the server of `backend`, and sets the server's policy version.

        The caller must have the `turn`.

        Raises:
            BackendCrashed: If the transfer fails or exceeds its deadline.
        """
        try:
            await self._send(backend, buffer, version)
        except BaseException as error:
            # The state of the sender's groups is undefined. The next transfer starts a new sender.
            await self._kill()
            if not isinstance(error, Exception):
                raise
            message = f"weights did not reach {backend.address}: {error or repr(error)}"
            log.warning(message)
            raise BackendCrashed(message) from error

    async def _send(self, backend: Receiver, buffer: WeightBuffer, version: int) -> None:
        limit_s, address = backend.config.rpc_deadline_s, backend.address
        sender, init = self.start(), None
        # A reconnected server is not in the group of its previous connection.
        if self._joined.get(address) != backend.connection_id:
            parts = urlsplit(address)
            async with crash_on_timeout(SENDER_START_S, "the sender did not start"):
                place = parts.hostname or "", parts.port or 80
                init = await sender.send_request(
                    "listen", address, backend.transfer, *place, 1 + backend.workers, limit_s
                )
        async with crash_on_timeout(limit_s, f"the sender did not transfer version {version} to the server"):
            if init is not None:
                await gather_or_cancel(
                    sender.send_request("join", address),
                    backend.slow_call("init_weight_transfer_engine", init_info=init),
                )
                self._joined[address] = backend.connection_id
            await backend.begin_update(buffer)
            # A broadcast is collective, so sender and server run concurrently.
            sending = sender.send_request("send", address, buffer.address()["path"], buffer.manifest, limit_s)
            await gather_or_cancel(sending, backend.transfer_tensors(buffer, broadcast=True))
            await backend.finish_update(buffer, version)

    async def _kill(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.stop()
