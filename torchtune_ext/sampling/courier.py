"""The trainer's end of the sender: carries publications to servers, and never waits longer than a deadline.

Each connection to a server (`ServerCore`) hands in its own parcel. Parcels of one publication travel together, as one
group of servers. When the group fails, or is late, the sender is killed, and each server that still answers gets its weights
alone, by another one."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchtune_ext.sampling.calls import CoreLost, together, within
from torchtune_ext.sampling.child_process import ChildProcess
from torchtune_ext.sampling.weight_buffer import WeightBuffer

log = logging.getLogger(__name__)

SENDER = "torchtune_ext.sampling.broadcast"
LOOK_S = 0.005  # seconds between two looks at who has prepared itself
START_S = 60.0  # seconds until a new sender answers: a Python that imports torch


@dataclass(eq=False, slots=True)
class Parcel:
    """One buffer on its way to one server."""

    core: Any  # the connection to it, a `ServerCore`
    buffer: WeightBuffer
    version: int  # the label of what is sampled from then on
    arrived: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def publication(self) -> tuple[Any, ...]:
        """What parcels of one publication have in common."""
        return self.core.transfer, id(self.buffer), self.buffer.version, self.version


class Courier:
    """Owns the sender of a run. All methods run in the engine's asyncio thread."""

    def __init__(self, log_path: Path):
        """Starts nothing yet. Args: log_path: takes what the sender says."""
        self._log_path = log_path
        self._sender: ChildProcess | None = None
        self._members: list[tuple[str, str]] = []  # of the sender's group: address and life of each connection
        self._waiting: list[Parcel] = []
        self._expected: list[str] = []  # addresses of servers that will hand in a parcel soon
        self._carrying: asyncio.Task | None = None

    def start(self) -> None:
        """Starts the sender, which takes seconds to come up, unless there is one. Raises OSError."""
        if self._sender is None or self._sender.dead:
            self._sender, self._members = ChildProcess("the sender", SENDER, self._log_path), []

    async def stop(self) -> None:
        """Ends the sender, and what is on its way."""
        if self._carrying is not None:
            self._carrying.cancel()
        _lose(self._waiting, "the engine was closed")
        self._waiting = []
        await self._kill()

    @contextmanager
    def expecting(self, address: str) -> Iterator[None]:
        """Inside, a server prepares itself for a publication: parcels of others wait for its own."""
        self._expected.append(address)
        try:
            yield
        finally:
            self._expected.remove(address)

    async def deliver(self, core: Any, buffer: WeightBuffer, version: int) -> None:
        """Brings weights to a server; returns once it has finished the update. It waits for other servers that prepare
        themselves, but no longer than `probe_deadline_s`. Args: core: the connection to it. Raises CoreLost."""
        parcel = Parcel(core, buffer, version)
        self._waiting.append(parcel)
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.ensure_future(self._carry_all())
        await parcel.arrived

    async def _carry_all(self) -> None:
        """Carries what waits, one publication after the other."""
        while self._waiting:
            first = self._waiting[0]
            give_up_at = time.monotonic() + first.core.config.probe_deadline_s
            # One that hands in another one, since it comes back and needs more, has to wait for these.
            while not set(self._expected) <= {parcel.core.address for parcel in self._waiting}:
                if time.monotonic() > give_up_at:
                    break
                await asyncio.sleep(LOOK_S)
            parcels = [parcel for parcel in self._waiting if parcel.publication == first.publication]
            self._waiting = [parcel for parcel in self._waiting if parcel not in parcels]
            # Whoever has handed one in may have gone.
            if parcels := [parcel for parcel in parcels if not parcel.arrived.done()]:
                await self._carry(parcels)

    async def _carry(self, parcels: list[Parcel]) -> None:
        """Brings a publication to all servers that answer, and tells each parcel what became of it."""
        try:
            await self._send(parcels)
            for parcel in parcels:
                if not parcel.arrived.done():
                    parcel.arrived.set_result(None)
        except Exception as error:
            addresses = ", ".join(sorted(parcel.core.address for parcel in parcels))
            log.warning("weights did not reach %s: %s", addresses, error)
            await self._kill()
            if len(parcels) == 1:
                _lose(parcels, str(error) or repr(error))
            # Nobody knows which of those that answer holds the others up, so each gets them by itself.
            for parcel in await self._answering(parcels, error):
                await self._carry([parcel])
        finally:
            _lose(parcels, "the connection was ended")

    async def _send(self, parcels: list[Parcel]) -> None:
        """Makes the servers a group with the sender, if they are none yet, and broadcasts. Raises CoreLost, ValueError,
        OSError."""
        cores = sorted((parcel.core for parcel in parcels), key=lambda core: core.address)
        buffer, version = parcels[0].buffer, parcels[0].version
        limit_s = min(core.config.rpc_deadline_s for core in cores)
        members = [(core.address, core.life) for core in cores]
        if self._members and members != self._members:
            # A sender is in one group, and nobody knows what one is worth whose members have changed.
            await self._kill()
        self.start()
        init = None
        if members != self._members:
            places = [(parts.hostname or "", parts.port or 80) for parts in (urlsplit(c.address) for c in cores)]
            world_size = 1 + sum(core.workers for core in cores)
            async with within(START_S, "the sender did not start"):
                init = await self._sender.ask("listen", cores[0].transfer, places, world_size, limit_s)
        async with within(limit_s, f"the sender did not bring version {version} to the servers"):
            if init is not None:
                joins, ranks = [self._sender.ask("join")], accumulate((core.workers for core in cores), initial=1)
                for core, rank in zip(cores, ranks, strict=False):
                    joins.append(core.slow("init_weight_transfer_engine", init_info=init | {"rank_offset": rank}))
                await together(*joins)
                self._members = members
            await together(*(core.begin_update(buffer) for core in cores))
            # The servers take what is broadcast meanwhile.
            sending = self._sender.ask("send", buffer.address()["path"], buffer.manifest, limit_s)
            await together(sending, *(core.take(buffer, broadcast=True) for core in cores))
            await together(*(core.finish_update(buffer, version) for core in cores))

    async def _answering(self, parcels: list[Parcel], error: Exception) -> list[Parcel]:
        """Returns those whose servers are worth another try, and gives the others up."""
        parcels = [parcel for parcel in parcels if not parcel.arrived.done()]
        pings = (parcel.core.ping(parcel.core.config.probe_deadline_s) for parcel in parcels)
        for parcel, answer in zip(parcels, await asyncio.gather(*pings, return_exceptions=True), strict=True):
            if isinstance(answer, Exception):
                _lose([parcel], f"{error}; it does not answer: {answer}")
        return [parcel for parcel in parcels if not parcel.arrived.done()]

    async def _kill(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.stop()


def _lose(parcels: list[Parcel], why: str) -> None:
    for parcel in parcels:
        if not parcel.arrived.done():
            parcel.arrived.set_exception(CoreLost(f"weights did not reach {parcel.core.address}: {why}"))
            parcel.arrived.exception()  # it is fetched here, since the one who waited may be gone
