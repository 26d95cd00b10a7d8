"""The trainer's end of the sender: carries publications to servers, and never waits longer than a deadline.

Each connection to a server (`ServerCore`) hands in its own parcel. Parcels of one publication travel together, as one group of
servers. When the group fails, or is late, the sender is killed. Then the servers are asked one by one, and a new sender makes
the group again from those that answer.
"""

import asyncio
import itertools
import logging
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Failure
from torchtune_ext.run.parent import how_it_ended
from torchtune_ext.sampling.calls import CoreLost
from torchtune_ext.sampling.child_process import Frames, start_module
from torchtune_ext.sampling.transfer.group import Member, Order

log = logging.getLogger(__name__)

SENDER = "torchtune_ext.sampling.transfer.sender_process"
START_S = 60.0  # seconds until a new sender answers: a Python that imports torch
END_S = 5.0  # seconds that a killed process has to end


@dataclass(eq=False, slots=True)
class Parcel:
    """One buffer on its way to one server."""

    backend: str  # "gloo" or "nccl"
    member: Member
    buffer: Any  # a `WeightBuffer`
    version: int  # the label of what is sampled from then on
    deadline_s: float  # seconds for one try
    alive: Callable[[], Awaitable[None]]  # returns when the server's engine has answered; raises CoreLost
    arrived: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def kind(self) -> tuple[Any, ...]:
        """What parcels of one publication have in common."""
        return self.backend, id(self.buffer), self.buffer.version, self.version


class SenderLost(Failure):
    """The sender failed or was late. `url` is that of the server that failed, None where nobody knows."""

    def __init__(self, message: str, url: str | None = None):
        super().__init__(message)
        self.url = url


class Sender:
    """One life of the sender's process."""

    def __init__(self, log_path: Path):
        """Starts the process; `ask` waits for it. Raises OSError."""
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future = loop.create_future()
        self.lost: str | None = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_module(SENDER, log_path, str(theirs.fileno()), keep=[theirs.fileno()])
        ours.setblocking(False)
        self._frames = Frames(self._receive, self._end)
        self._connected = loop.create_task(loop.create_connection(lambda: self._frames, sock=ours))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def ask(self, order: Order) -> float:
        """Sends an order, and returns the seconds that it took. Raises SenderLost, after `order.deadline_s` at the latest."""
        await self._within(asyncio.shield(self._ready), START_S, "did not start")
        if self.lost is not None:
            raise SenderLost(self.lost)
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._frames.say((number, "send", order))
            return await self._within(answer, order.deadline_s, f"did not bring version {order.version} to the servers")
        finally:
            del self._answers[number]

    async def _within(self, work: Awaitable[Any], limit_s: float, what: str) -> Any:
        try:
            return await asyncio.wait_for(work, limit_s)
        except TimeoutError:
            raise SenderLost(f"the sender {what} within {limit_s:g} s") from None

    def _receive(self, messages: list[Any]) -> None:
        for number, kind, value in messages:
            if kind == "ready":
                self._ready.set_result(None)
            elif (answer := self._answers.get(number)) is not None and not answer.done():
                if kind == "value":
                    answer.set_result(value)
                else:
                    url, message = value
                    self.lost = message
                    answer.set_exception(SenderLost(message, url))

    def _end(self) -> None:
        """The process is gone."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.lost = self.lost or how_it_ended(code, "the sender")
        for answer in (self._ready, *self._answers.values()):
            if not answer.done():
                answer.set_exception(SenderLost(self.lost))
                answer.exception()  # it is fetched here, since the one who waited may be gone

    async def kill(self) -> None:
        """Ends the process, and returns once it reads no memory any more."""
        self.lost = self.lost or "the sender was ended"
        self._process.kill()
        self._connected.cancel()
        self._frames.close()
        self._end()
        await asyncio.to_thread(self._process.wait, END_S)


class Courier:
    """Owns the sender of a run. All methods run in the engine's asyncio thread."""

    _of: dict[str, "Courier"] = {}  # by the folder that an engine has for its temporary files

    def __init__(self, key: str, log_path: Path):
        """Starts nothing yet. `shared` makes it."""
        self._key, self._log_path, self._users = key, log_path, 0
        self._sender: Sender | None = None
        self._waiting: list[Parcel] = []
        self._expected: list[str] = []  # urls of servers that will hand in a parcel soon
        self._patience: asyncio.TimerHandle | None = None
        self._patience_s = 0.0
        self._carrying: asyncio.Task | None = None

    @classmethod
    def shared(cls, key: str, log_path: Path) -> "Courier":
        """Returns the courier of an engine, the same one for all its connections; each calls `release`. Args: key: the engine's
        folder for temporary files; log_path: takes what the sender says."""
        courier = cls._of.setdefault(key, cls(key, log_path))
        courier._users += 1
        return courier

    async def release(self) -> None:
        """Ends the sender, when this was the last connection that used it."""
        self._users -= 1
        if self._users == 0:
            self._of.pop(self._key, None)
            if self._carrying is not None:
                self._carrying.cancel()
            self._lose(self._waiting, "the connection was ended")
            self._waiting = []
            await self._kill()

    def start(self) -> None:
        """Starts the sender, which takes seconds to come up, unless there is one. Raises OSError."""
        if self._sender is not None and self._sender.lost is not None:
            self._sender = None
        if self._sender is None:
            self._sender = Sender(self._log_path)

    @property
    def sender_pid(self) -> int:
        """The process id of the sender; 0 without one."""
        return 0 if self._sender is None else self._sender.pid

    @contextmanager
    def expecting(self, url: str) -> Iterator[None]:
        """Inside, a server prepares itself for a publication: parcels of others wait for its own."""
        self._expected.append(url)
        try:
            yield
        finally:
            self._expected.remove(url)
            self._look()

    async def deliver(self, parcel: Parcel, patience_s: float) -> None:
        """Brings weights to a server; returns once it has finished the update. Raises CoreLost.

        Args: patience_s: seconds to wait for other servers that prepare themselves.
        """
        self._waiting.append(parcel)
        self._patience_s = patience_s
        self._look()
        await parcel.arrived

    def _look(self, at_once: bool = False) -> None:
        """Sets off with the parcels of one publication, once all that are expected are here. Args: at_once: whether to wait for
        no others."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._waiting = [parcel for parcel in self._waiting if not parcel.arrived.done()]
        busy = self._carrying is not None and not self._carrying.done()
        if busy or not self._waiting:
            return  # it looks again when it is done
        kind = self._waiting[0].kind
        parcels = [parcel for parcel in self._waiting if parcel.kind == kind]
        # One that hands in another kind, since it comes back and needs more, has to wait for these.
        if not at_once and not set(self._expected) <= {parcel.member.url for parcel in self._waiting}:
            self._patience = asyncio.get_running_loop().call_later(self._patience_s, self._look, True)
            return
        self._waiting = [parcel for parcel in self._waiting if parcel not in parcels]
        self._carrying = asyncio.ensure_future(self._carry(parcels))
        self._carrying.add_done_callback(lambda _: self._look())

    async def _carry(self, parcels: list[Parcel]) -> None:
        """Brings a publication to all servers that answer. Tells each parcel what became of it, and raises nothing."""
        failures = 0  # in a row, of servers that all answer
        try:
            while parcels:
                try:
                    await self._send(parcels)
                except SenderLost as error:
                    log.warning("weights did not reach %s: %s", _urls(parcels), error)
                    await self._kill()
                    rest = await self._answering(parcels, error)
                    failures = failures + 1 if len(rest) == len(parcels) else 0
                    if failures == 2:
                        # The first one that complained may have been told so by another one's end, but not twice.
                        self._lose([p for p in rest if error.url == p.member.url], str(error))
                        if len(rest) == len(parcels := [p for p in rest if not p.arrived.done()]):
                            return await self._carry_apart(rest)
                        failures = 0
                    else:
                        parcels = rest
                else:
                    return _delivered(parcels)
        except BaseException as error:
            self._lose(parcels, str(error) or repr(error))
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _carry_apart(self, parcels: list[Parcel]) -> None:
        """Brings a publication to one server after the other: nobody knows which of them holds the others up."""
        for parcel in parcels:
            try:
                await self._send([parcel])
            except SenderLost as error:
                await self._kill()
                self._lose([parcel], str(error))
            else:
                _delivered([parcel])

    async def _send(self, parcels: list[Parcel]) -> None:
        """Raises SenderLost, OSError."""
        self.start()
        first, buffer = parcels[0], parcels[0].buffer
        order = Order(
            backend=first.backend,
            members=tuple(sorted((parcel.member for parcel in parcels), key=lambda member: member.url)),
            path=buffer.address()["path"],
            manifest=buffer.manifest,
            adapter=buffer.adapter,
            version=first.version,
            deadline_s=min(parcel.deadline_s for parcel in parcels),
        )
        began = time.monotonic()
        took = await self._sender.ask(order)
        log.debug(
            "version %d: %d bytes in %.2f s of %.2f s", order.version, buffer.bytes, took, time.monotonic() - began
        )

    async def _answering(self, parcels: list[Parcel], error: SenderLost) -> list[Parcel]:
        """Returns the parcels of the servers that are worth another try, and gives the others up."""
        if len(parcels) == 1:
            self._lose(parcels, str(error))
            return []
        answers = await asyncio.gather(*(parcel.alive() for parcel in parcels), return_exceptions=True)
        rest = []
        for parcel, answer in zip(parcels, answers, strict=True):
            if isinstance(answer, Exception):
                self._lose([parcel], f"{error}; it does not answer: {answer}")
            else:
                rest.append(parcel)
        return rest

    def _lose(self, parcels: list[Parcel], why: str) -> None:
        for parcel in parcels:
            if not parcel.arrived.done():
                parcel.arrived.set_exception(CoreLost(f"weights did not reach {parcel.member.url}: {why}"))
                parcel.arrived.exception()  # it is fetched here, since the one who waited may be gone

    async def _kill(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            await sender.kill()


def _delivered(parcels: list[Parcel]) -> None:
    for parcel in parcels:
        if not parcel.arrived.done():
            parcel.arrived.set_result(None)


def _urls(parcels: list[Parcel]) -> str:
    return ", ".join(sorted(parcel.member.url for parcel in parcels))
