"""A child process of the engine: start, messages over a socket pair, and end."""

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
from torchtune_ext.sampling.backend import BackendCrashed, mark_retrieved
from torchtune_ext.sampling.prestart import ProcessHandle, child_environment, spawn

EXIT_TIMEOUT_S = 5.0  # deadline in seconds for a killed process to end
_LENGTH = struct.Struct("<Q")


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """Returns the last `lines` lines of a log, at or after the byte `start`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(cannot be read: {error})"


# Sampler processes exchange frames over a socket pair: the length, then a pickled list of messages.
def pack_messages(messages: list[Any]) -> bytes:
    """Returns one frame with `messages`."""
    data = pickle.dumps(messages, protocol=5)
    return _LENGTH.pack(len(data)) + data


def receive_messages(end: socket.socket) -> list[Any]:
    """Returns the messages of exactly one frame, without asyncio. Raises EOFError, OSError."""
    (length,) = _LENGTH.unpack(_recv_exactly(end, _LENGTH.size))
    return pickle.loads(_recv_exactly(end, length))


def _recv_exactly(end: socket.socket, count: int) -> bytes:
    data = end.recv(count, socket.MSG_WAITALL)
    if len(data) != count:
        raise EOFError("the other end was closed")
    return data


class MessageChannel(asyncio.Protocol):
    """One end of the socket pair in an asyncio loop."""

    def __init__(self, on_messages: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        """Must be called in the asyncio loop.

        Args:
            on_messages: Called with the messages of each frame.
            on_end: Called once when the other end is closed.
        """
        self._on_messages, self._on_end = on_messages, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[Any] = []
        self._flushing = False
        self._arrived = bytearray()

    def send(self, message: Any) -> None:
        """Sends a message, unless the other end is closed."""
        # All messages of one loop iteration make one frame, which wakes the other end only once.
        self._unsent.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Flushes pending messages and closes the connection without calling `on_end`."""
        self._flush()
        self._on_end = lambda: None
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is not None and self._unsent:
            messages, self._unsent = self._unsent, []
            self._transport.write(pack_messages(messages))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # always true for a socket
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
    """One process of the engine, and the pending requests to it."""

    def __init__(
        self,
        name: str,
        module: str,
        log: Path,
        on_event: Callable[[str, Any], None] = lambda kind, value: None,
        first_frame: list[Any] | None = None,
        environ: Mapping[str, str] | None = None,
        prestarted: ProcessHandle | None = None,
    ):
        """Starts the process without waiting.

        Args:
            name: Name of the process in messages.
            module: Module to run (`spawn`).
            log: File for the output.
            on_event: Called with kind and value of each event.
            first_frame: Content of the first frame, before all messages.
            environ: Environment of the process; None: `child_environment({})`.
            prestarted: A prestarted process, which gets log and environment with the first frame.

        Raises:
            OSError: If the process cannot be started.
        """
        self.name = name
        self.exit_reason: str | None = None  # how the process ended, once known
        self.last_heartbeat = time.monotonic()  # time of the last message
        self._on_event = on_event
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}  # pending requests by message number
        self._loop = asyncio.get_running_loop()
        with open(log, "ab", buffering=0) as out:
            self._process, trainer_socket = prestarted or spawn(module, out.fileno(), environ or child_environment({}))
        if first_frame is not None:
            trainer_socket.sendall(pack_messages(first_frame))
        trainer_socket.setblocking(False)
        self._channel = MessageChannel(self._receive, self._on_disconnect)
        self._connected = self._loop.create_task(
            self._loop.create_connection(lambda: self._channel, sock=trainer_socket)
        )

    @property
    def process_group(self) -> int:
        """Process group id; equal to the process id."""
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        return self.exit_reason is not None or self._process.poll() is not None

    def describe_exit(self) -> str:
        return self.exit_reason or describe_exit(self._process.poll(), self.name)

    async def send_request(self, method: str, *arguments: Any) -> Any:
        """Sends a request and returns the answer. The caller must set a deadline.

        Raises:
            BackendCrashed: If the process has ended, or answers "lost".
            ValueError: If the process refuses the request.
        """
        # A message is (number, method, arguments), or (number, "cancel", ()) after the waiter was
        # canceled. An answer is (number, kind, value), as `_receive` reads it.
        if self.exit_reason is not None:
            raise BackendCrashed(self.exit_reason)
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
        """Kills the process group without waiting; may be called from any thread."""
        reaper.kill_group(self.process_group)

    async def stop(self) -> None:
        """Kills the process and fails all pending requests. May be called twice."""
        self.exit_reason = self.exit_reason or f"{self.name} was stopped"
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
            elif answer is None or answer.done():
                continue  # the waiter was canceled
            elif kind == "value":
                answer.set_result(value)
            else:
                answer.set_exception(ValueError(value) if kind == "refused" else BackendCrashed(value))

    def _on_disconnect(self) -> None:
        # The connection closes shortly before the process exits.
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
                mark_retrieved(answer)  # the waiter may be canceled
