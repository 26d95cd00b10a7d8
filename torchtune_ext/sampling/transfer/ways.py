"""The two ways of weights into a server, as a connection to it (`server.ServerCore`) uses them."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.calls import Core, CoreLost, bounded
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.sampling.transfer.courier import START_S, Courier, Parcel
from torchtune_ext.sampling.transfer.group import ADAPTER_NAME, ADAPTER_PATH, ALREADY_ACTIVE, HAS_ADAPTER, Member
from torchtune_ext.sampling.weight_buffer import UNREADABLE, WeightBuffer

log = logging.getLogger(__name__)


class Connection(Core, Protocol):
    """What a way needs of a connection to a server."""

    address: str
    config: EngineConfig

    def quick(self, path: str, body: dict[str, Any] | None = None) -> Awaitable[Any]:
        """Posts what the engine answers between two steps. Raises CoreLost, ValueError."""

    def slow(self, path: str, body: dict[str, Any] | None = None) -> Awaitable[Any]:
        """Posts what may take as long as a load. Raises CoreLost, ValueError."""

    def how(self) -> str:
        """Returns the command that starts the server right."""


class MemoryWay:
    """The server reads the trainer's memory: on the same machine, as the same user, in the same PID namespace."""

    def __init__(self, core: Connection):
        self._core = core

    def expecting(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def prepare(self, buffers: Sequence[WeightBuffer]) -> None:
        """Lets the server look for the memory, before anything stands still for it. Raises CoreLost; ValueError when it cannot
        read it."""
        try:
            await self._core.quick("/init_weight_transfer_engine", {"init_info": buffers[0].address()})
        except CoreLost as error:
            if UNREADABLE not in str(error):
                raise
            raise Mistake(
                f"publish: {self._core.address} cannot read this process's memory ({error}); the server has to run on this "
                f"machine, as the same user and in the same PID namespace, started like this: {self._core.how()}; on "
                "another machine set engine.transfer=gloo or nccl, here and there"
            ) from error

    async def bring(self, buffer: WeightBuffer, version: int) -> None:
        """Loads a buffer while the engine stands still. Raises CoreLost, ValueError."""
        core = self._core
        if buffer.adapter is not None:
            body = {"method": "load_adapter", "args": [buffer.address(), buffer.manifest, buffer.adapter]}
            await core.slow("/collective_rpc", body)
            await core.quick("/update_weight_version", {"new_version": str(version)})
            try:
                named = {"lora_name": ADAPTER_NAME, "lora_path": ADAPTER_PATH}
                await core.quick("/v1/load_lora_adapter", named)
            except (CoreLost, ValueError) as error:
                if HAS_ADAPTER not in str(error):
                    raise
            return
        await self._start_update()
        await core.slow("/update_weights", {"update_info": buffer.manifest})
        await core.slow("/finish_weight_update", {"weight_version": str(version)})

    async def _start_update(self) -> None:
        """Begins an update. One that a trainer before us began, and died in, is finished first: that gives every layer a
        whole set of tensors, whatever they hold, and our own full publication then overwrites them. Raises CoreLost."""
        core = self._core
        try:
            await core.slow("/start_weight_update")
            return
        except CoreLost as error:
            if ALREADY_ACTIVE not in str(error):
                raise
        log.warning("%s is in the midst of an update that another trainer began: finishing it first", core.address)
        try:
            await core.slow("/finish_weight_update")
            await core.slow("/start_weight_update")
        except CoreLost as error:
            raise CoreLost(
                f"{core.address} is in the midst of an update that cannot be finished; start the server again ({error})"
            ) from error

    async def close(self) -> None:
        pass


class NetworkWay:
    """The sender brings weights to the server, which may be anywhere."""

    def __init__(self, core: Connection, backend: str, workers: int, life: str, temp_dir: str, log_path: Path):
        """Starts nothing yet. Args: backend: "gloo" or "nccl"; workers: of the server's engine; life: a name for this
        connection; temp_dir, log_path: the engine's."""
        self._core, self._backend = core, backend
        self._member = Member(core.address, workers, life)
        self._courier: Courier | None = Courier.shared(temp_dir, log_path)

    def start(self) -> None:
        """Starts the sender, if no other connection of this engine has. Raises OSError."""
        if self._courier is not None:
            self._courier.start()

    def expecting(self) -> AbstractContextManager[None]:
        """Inside, the parcels of other servers wait for this one's."""
        return nullcontext() if self._courier is None else self._courier.expecting(self._core.address)

    async def prepare(self, buffers: Sequence[WeightBuffer]) -> None:
        pass

    async def bring(self, buffer: WeightBuffer, version: int) -> None:
        """Loads a buffer while the engine stands still. Raises CoreLost."""
        core, config = self._core, self._core.config
        if self._courier is None:
            raise CoreLost("the connection was ended")

        async def alive() -> None:
            await core.ping(config.probe_deadline_s)

        parcel = Parcel(self._backend, self._member, buffer, version, config.rpc_deadline_s, alive)
        # The courier keeps its own deadline for each try; this one is for a courier that does not.
        limit_s = 4 * (config.rpc_deadline_s + config.probe_deadline_s + START_S)
        await bounded(core, self._courier.deliver(parcel, config.probe_deadline_s), limit_s)

    async def close(self) -> None:
        courier, self._courier = self._courier, None
        if courier is not None:
            await asyncio.shield(courier.release())
