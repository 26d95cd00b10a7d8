"""Starts a process of the sampler, says how it ended, and carries messages between it and us."""

import asyncio
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.run.parent import environment

# Variables that begin so tell the trainer its place among its ranks; a process of the sampler has none.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_LENGTH = struct.Struct("<Q")


def start_module(
    module: str,
    log: Path,
    *words: str,
    environ: Mapping[str, str] | None = None,
    keep: Sequence[int] = (),
) -> subprocess.Popen:
    """Starts a module as a process in a session of its own. It finds the modules that we find, and no variable of torchrun's.

    Args:
        module: by its full name.
        log: its output is appended to it.
        words: its arguments; the last one is always our process id, to whose life it binds itself.
        environ: on top of our own environment.
        keep: descriptors that it inherits.

    Raises:
        OSError: it cannot be started, or the log cannot be written.
    """
    path = [os.path.abspath(entry or ".") for entry in sys.path]
    env = {key: value for key, value in environment().items() if not key.startswith(TORCHRUN)}
    env |= {"PYTHONPATH": os.pathsep.join(path), **(environ or {})}
    command = [sys.executable, "-P", "-m", module, *words, str(os.getpid())]
    with open(log, "ab", buffering=0) as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, pass_fds=keep, start_new_session=True
        )


def log_tail(log: Path, start: int, lines: int = 30) -> str:
    """Returns the last lines of a log from the byte `start` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(cannot be read: {error})"
    return "\n".join(text.splitlines()[-lines:])


# Messages between two processes of the sampler are pickled lists with their length before them, over a socket pair.
def pack(messages: list[Any]) -> bytes:
    """Returns the bytes that carry some messages."""
    data = pickle.dumps(messages, protocol=5)
    return _LENGTH.pack(len(data)) + data


def receive(end: socket.socket) -> list[Any]:
    """Reads one frame before a loop runs, and not a byte behind it. Returns its messages. Raises EOFError, OSError."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return pickle.loads(_exactly(end, length))


def _exactly(end: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = end.recv(count - len(data))
        if not part:
            raise EOFError("the other end was closed")
        data += part
    return bytes(data)


class Frames(asyncio.Protocol):
    """One end of the socket pair in an asyncio loop.

    The messages of one turn of the loop leave as one frame: the other end is woken once, not for each message.
    """

    def __init__(self, on_messages: Callable[[list[Any]], None], on_end: Callable[[], None]) -> None:
        """Args: on_messages: takes what has arrived; on_end: called once when the other end is gone."""
        self._on_messages, self._on_end = on_messages, on_end
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[Any] = []  # messages that have not left yet
        self._flushing = False
        self._arrived = bytearray()

    def say(self, message: Any) -> None:
        """Sends a message, unless the other end is gone."""
        self._waiting.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Ends the connection without calling `on_end`. Messages that were sent before still leave."""
        self._flush()
        self._on_end = lambda: None
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is not None and self._waiting:
            messages, self._waiting = self._waiting, []
            self._transport.write(pack(messages))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        begin = 0
        while len(self._arrived) >= begin + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived, begin)
            end = begin + _LENGTH.size + length
            if len(self._arrived) < end:
                break
            messages = pickle.loads(self._arrived[begin + _LENGTH.size : end])
            begin = end
            self._on_messages(messages)
        del self._arrived[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_end()
