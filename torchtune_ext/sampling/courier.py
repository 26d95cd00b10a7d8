"""The trainer's end of the sender: brings weights to servers, one after the other, each within a deadline."""

import asyncio
import logging
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from torchtune_ext.sampling.calls import CoreLost, together, within
from torchtune_ext.sampling.child_process import ChildProcess
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffer

log = logging.getLogger(__name__)

SENDER = "torchtune_ext.sampling.broadcast"
START_S = 60.0  # seconds until a new sender answers: a Python that imports torch


class Receiver(Protocol):
    """What the courier uses of a `ServerCore`."""

    config: EngineConfig
    address: str
    life: str
    transfer: str
    workers: int

    async def slow(self, method: str, /, **arguments: Any) -> Any: ...

    async def begin_update(self, buffer: WeightBuffer) -> None: ...

    async def take(self, buffer: WeightBuffer, broadcast: bool = False) -> None: ...

    async def finish_update(self, buffer: WeightBuffer, version: int) -> None: ...


class Courier:
    """Owns the sender of a run. All methods run in the engine's asyncio thread."""

    def __init__(self, log_path: Path):
        """Starts nothing yet. Args: log_path: takes what the sender says."""
        self._log_path = log_path
        self._sender: ChildProcess | None = None
        # The sender is in a group of its own with each server, so that none waits for another's network.
        self._joined: dict[str, str] = {}  # address of a server -> life of the connection whose group the sender is in
        self._turn = asyncio.Lock()  # one transfer at a time
        self._closed = False

    def start(self) -> ChildProcess:
        """Starts the sender, which takes seconds to come up, unless there is one. Raises OSError, CoreLost."""
        if self._closed:
            raise CoreLost("the engine was closed")
        if self._sender is None or self._sender.dead:
            self._sender, self._joined = ChildProcess("the sender", SENDER, self._log_path), {}
        return self._sender

    async def stop(self) -> None:
        """Ends the sender, and what is on its way."""
        self._closed = True
        await self._kill()

    async def deliver(self, core: Receiver, buffer: WeightBuffer, version: int) -> None:
        """Updates the server of `core`, and labels what it samples as `version`. Raises CoreLost."""
        async with self._turn:
            try:
                await self._send(core, buffer, version)
            except BaseException as error:
                # After a transfer that broke off, the sender's group may be in any state. The next gets a new one.
                await self._kill()
                if not isinstance(error, Exception):
                    raise
                message = f"weights did not reach {core.address}: {error or repr(error)}"
                log.warning(message)
                raise CoreLost(message) from error

    async def _send(self, core: Receiver, buffer: WeightBuffer, version: int) -> None:
        limit_s, address = core.config.rpc_deadline_s, core.address
        sender, init = self.start(), None
        # A server that was connected anew is not in the group of its last connection.
        if self._joined.get(address) != core.life:
            parts = urlsplit(address)
            async with within(START_S, "the sender did not start"):
                place = parts.hostname or "", parts.port or 80
                init = await sender.ask("listen", address, core.transfer, *place, 1 + core.workers, limit_s)
        async with within(limit_s, f"the sender did not bring version {version} to the server"):
            if init is not None:
                joins = core.slow("init_weight_transfer_engine", init_info=init)
                await together(sender.ask("join", address), joins)
                self._joined[address] = core.life
            await core.begin_update(buffer)
            # A broadcast ends only when both ends take part, so they run at the same time.
            sending = sender.ask("send", address, buffer.address()["path"], buffer.manifest, limit_s)
            await together(sending, core.take(buffer, broadcast=True))
            await core.finish_update(buffer, version)

    async def _kill(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.stop()
