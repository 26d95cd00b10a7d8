"""Starts a process of the sampler, says how it ended, and carries messages between it and us."""

import asyncio
import itertools
import pickle
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtune_ext.run import reaper
from torchtune_ext.run.process_env import describe_exit
from torchtune_ext.sampling.backend import BackendCrashed
from torchtune_ext.sampling.prestart import ProcessHandle, child_environment, spawn

EXIT_TIMEOUT_S = 5.0  # seconds that a killed process has to end
_LENGTH = struct.Struct("<Q")


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """The last lines of a log, none of them before the byte `start`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(cannot be read: {error})"


# Messages between two processes of the sampler are pickled lists behind their length, over a socket pair.
def pack_messages(messages: list[Any]) -> bytes:
    """The frame that carries some messages."""
    data = pickle.dumps(messages, protocol=5)
    return _LENGTH.pack(len(data)) + data


def receive_messages(end: socket.socket) -> list[Any]:
    """Reads one frame without an asyncio loop, and returns its messages. Raises EOFError, OSError."""
    # Not a byte more is read: what follows is for the loop that runs later.
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return pickle.loads(_exactly(end, length))


def _exactly(end: socket.socket, count: int) -> bytes:
    data = end.recv(count, socket.MSG_WAITALL)
    if len(data) != count:
        raise EOFError("the other end was closed")
    return data


class MessageChannel(asyncio.Protocol):
    """One end of the socket pair in an asyncio loop."""

    def __init__(self, on_messages: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        """Args: on_messages: takes what has arrived; on_end: called once when the other end is gone."""
        self._on_messages, self._on_end = on_messages, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Any] = []  # messages that have not left yet
        self._flushing = False
        self._arrived = bytearray()

    def send(self, message: Any) -> None:
        """Sends a message, unless the other end is gone."""
        # All messages of one turn of the loop leave as one frame, which wakes the other end only once.
        self._waiting.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Ends the connection without calling `on_end`. Messages sent before still leave."""
        self._flush()
        self._on_end = lambda: None
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is not None and self._waiting:
            messages, self._waiting = self._waiting, []
            self._transport.write(pack_messages(messages))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # a socket's
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        begin = 0
        while len(self._arrived) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived, begin)
            end = begin + _LENGTH.size + length
            if len(self._arrived) < end:
                break
            self._on_messages(pickle.loads(self._arrived[begin + _LENGTH.size : end]))
            begin = end
        del self._arrived[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_end()


class ChildProcess:
    """One life of a process of the sampler, and those who wait for its answers."""

    def __init__(
        self,
        name: str,
        module: str,
        log: Path,
        on_event: Callable[[str, Any], None] = lambda kind, value: None,
        first: list[Any] | None = None,
        environ: Mapping[str, str] | None = None,
        begun: ProcessHandle | None = None,
    ):
        """Starts the process and returns at once. Raises OSError.

        Args: module: its program (`spawn`); log: takes its output; on_news: takes kind and value; first: a frame before
        all messages; begun: a process that runs already, whose first frame brings log and environment.
        """
        self.name = name
        self.exit_reason: str | None = None  # how this life ended, as soon as anybody knows
        self.last_heartbeat = time.monotonic()  # when its last message came
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}  # who waits, by the number of the message
        self._loop = asyncio.get_running_loop()
        with open(log, "ab", buffering=0) as out:
            self._process, ours = begun or spawn(module, out.fileno(), environ or child_environment({}))
        if first is not None:
            ours.sendall(pack_messages(first))
        ours.setblocking(False)
        self._channel = MessageChannel(self._receive, self._end)
        self._connected = self._loop.create_task(self._loop.create_connection(lambda: self._channel, sock=ours))

    @property
    def process_group(self) -> int:
        """The id of its process group, which is also its own."""
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self.exit_reason is not None or self._process.poll() is not None

    def describe_exit(self) -> str:
        return self.exit_reason or describe_exit(self._process.poll(), self.name)

    async def send_request(self, method: str, *arguments: Any) -> Any:
        """Sends a message, and returns the answer. The caller bounds the wait. Raises CoreLost, ValueError."""
        # A message is (number, method, arguments), or (number, "cancel", ()) when nobody waits for the answer any more.
        # An answer is (number, kind, value), where the kind is "value", "refused" or "lost". All else is news.
        if self.exit_reason is not None:
            raise BackendCrashed(f"{self.exit_reason}")
        number, answer = next(self._numbers), self._loop.create_future()
        self._answers[number] = answer
        self._channel.send((number, method, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            self._channel.send((number, "cancel", ()))
            raise
        finally:
            del self._answers[number]

    def kill(self) -> None:
        """Kills it and all that it has started, from any thread, without a wait."""
        reaper.kill_group(self.process_group)

    async def stop(self) -> None:
        """Ends it, and all who wait for an answer. May be called twice."""
        self.exit_reason = self.exit_reason or f"{self.name} was ended"
        self.kill()
        self._fail_pending()
        self._connected.cancel()
        self._channel.close()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> None:
        self._process.wait(EXIT_TIMEOUT_S)
        reaper.end_group(self.process_group, EXIT_TIMEOUT_S)

    def _receive(self, messages: list[Any]) -> None:
        self.last_heartbeat = time.monotonic()
        for number, kind, value in messages:
            answer = self._answers.get(number)
            if kind not in ("value", "refused", "lost"):
                self._on_event(kind, value)
            elif answer is not None and not answer.done():
                if kind == "value":
                    answer.set_result(value)
                else:
                    answer.set_exception(ValueError(value) if kind == "refused" else BackendCrashed(value))

    def _end(self) -> None:
        # The connection ends a moment before the process does.
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.exit_reason = self.exit_reason or describe_exit(code, self.name)
        self._fail_pending()

    def _fail_pending(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BackendCrashed(self.exit_reason))
                # Whoever waited may be gone, and asyncio prints an error that nobody fetches.
                answer.exception()
