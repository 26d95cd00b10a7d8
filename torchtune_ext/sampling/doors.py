"""Who may reach an engine: its sockets stay on this machine, and a server asks for a key.

vLLM names `KeyGuard` in its command line (`--middleware torchtune_ext.sampling.doors.KeyGuard`) and imports it in the
server's process.
"""

import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

KEY_VARIABLE = "TORCHTUNE_EXT_API_KEY"  # "API" keeps vLLM's bug reports, which print variables, from printing this one
GUARD = "torchtune_ext.sampling.doors.KeyGuard"
OPEN_PATH = "/health"  # it says only whether the server lives
# Without them gloo listens on whatever address the host's name has, NCCL on the first network card, and neither asks
# who is there. An engine has all its processes on one machine.
ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": "127.0.0.1"}


def one_machine() -> dict[str, str]:
    """Returns the environment variables that keep the sockets of an engine's processes on loopback.

    They win over settings of the user, which are meant for the trainer's ranks and stay in force there; a warning says so.
    """
    for name, value in ONE_MACHINE.items():
        theirs = os.environ.get(name, value)
        # A run on several machines chooses an interface itself (training/machines.py).
        if theirs not in (value, os.environ.get(f"TORCHTUNE_EXT_{name}")):
            log.warning(
                "%s=%s holds for the trainer only: the engine stays on this machine, with %s=%s",
                *(name, theirs, name, value),
            )
    return dict(ONE_MACHINE)


def server_key() -> str | None:
    """Returns the key in the environment, None when there is none. Raises ValueError when it cannot travel in a header."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return None
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ValueError(
            f"{KEY_VARIABLE} holds a space, a line break or a letter outside ASCII: make another key, e.g. with "
            "`openssl rand -hex 32`, and start the server with it, too"
        )
    return key


def authorization(key: str) -> str:
    """Returns the value of the header `Authorization`."""
    return f"Bearer {key}"


class KeyGuard:
    """Answers a request without the key with 401, on every route but `/health`. It is an ASGI middleware.

    vLLM's own `--api-key` leaves the routes open that pause the engine, replace its weights and call its methods. A server
    that was started without a key lets nobody in.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = server_key()
        self.app, self.expected = app, authorization(key).encode() if key else b""
        self.answer = f"this server wants the key that {KEY_VARIABLE} held when it was started"
        if not key:
            self.answer = f"this server was started without {KEY_VARIABLE} and lets nobody in; start it with a key"
            log.error(self.answer)

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Callable) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == OPEN_PATH or self._has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": self.answer})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": self.answer.encode()})

    def _has_key(self, scope: dict[str, Any]) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        return bool(self.expected) and len(sent) == 1 and hmac.compare_digest(sent[0], self.expected)
