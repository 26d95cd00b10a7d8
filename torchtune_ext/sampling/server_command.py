"""The command that starts a vLLM server, and the server's API-key middleware."""

import hmac
import json
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.engine_args import (
    LOOPBACK_VARIABLES,
    engine_args,
    engine_device_groups,
    engine_environment,
    is_local_server,
    on_cpu,
    resolve_transfer,
)
from torchtune_ext.sampling.types import EngineConfig

log = logging.getLogger(__name__)
DEFAULT_PORT = 8000
KEY_VARIABLE = "TORCHTUNE_EXT_API_KEY"  # vLLM's bug reports omit variables with "API" in the name
GUARD = "torchtune_ext.sampling.server_command.KeyGuard"
OPEN_PATH = "/health"  # needs no key; it returns only whether the server is up


def server_command(
    model_dir: str, config: EngineConfig, host: str | None = None, port: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts a server for `ServerBackend`, and its additional environment.

    The environment holds the server's API key: the value of `KEY_VARIABLE`, or a random key, which
    the trainer then needs.

    Args:
        model_dir: Folder of a Hugging Face model.
        config: The `engine:` section.
        host: Address to listen on. None: 127.0.0.1, or all addresses if `config.address` names
            another machine (the key is then sent unencrypted).
        port: Port to listen on. None: the port of `config.addresses`, or 8000.

    Raises:
        UsageError: For a key that does not fit a header, addresses with several ports, or devices
            for several replicas.
    """
    host = host or ("127.0.0.1" if is_local_server(config) else "0.0.0.0")
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", host, "--port", str(port or _port(config)), "--middleware", GUARD),
        *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
    ]
    for name, value in engine_args(model_dir, config, resolve_transfer(config)).items():
        command += _flag(name, value)
    key = server_key() or secrets.token_urlsafe(32)
    environ = {
        KEY_VARIABLE: key,
        "VLLM_API_KEY": key,  # overrides a VLLM_API_KEY of the user
        "VLLM_SERVER_DEV_MODE": "1",  # enables vLLM's weight routes
    }
    if config.lora_rank:
        environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}  # lets requests name the adapter
    # `devices` names GPUs of the trainer's machine (on a CPU: cores of a replica of this run), so
    # it is ignored for other machines. CUDA_VISIBLE_DEVICES of the server's shell takes precedence.
    own = is_local_server(config) and not on_cpu() and "CUDA_VISIBLE_DEVICES" not in os.environ
    if own and (replicas := len(engine_device_groups(config))) > 1:
        raise UsageError(
            f"engine.devices={config.devices} names GPUs for {replicas} replicas; a server is one "
            f"replica. Fix: start one server per replica, and set its {config.tensor_parallel_size} GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    environ |= engine_environment(config if own else replace(config, devices=None)) | LOOPBACK_VARIABLES
    if resolve_transfer(config) == "nccl":
        # The variable restricts NCCL to loopback, but the group with the sender spans machines.
        del environ["NCCL_SOCKET_IFNAME"]
    return command, environ


def _port(config: EngineConfig) -> int:
    ports = sorted({urlsplit(address).port or DEFAULT_PORT for address in config.addresses}) or [DEFAULT_PORT]
    if len(ports) != 1:
        raise UsageError(
            f"engine.address={config.address} names the ports {', '.join(map(str, ports))}, but a server has one port: choose "
            "it with --port, or set engine.address to this server"
        )
    return ports[0]


def redact_command(command: list[str], environ: dict[str, str]) -> str:
    """Returns the command for a log: it starts the same server but does not show the key."""
    shown = {environ[KEY_VARIABLE]: f'"${KEY_VARIABLE}"'}
    pairs = {name: shown.get(value, value) for name, value in environ.items()}
    return " ".join([f"{name}={value}" for name, value in pairs.items()] + [shlex.quote(word) for word in command])


def _flag(name: str, value: Any) -> list[str]:
    """Converts an argument of AsyncEngineArgs to flags of vLLM's command line."""
    word = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [word if value else word.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word, *map(str, value)]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]


def server_key() -> str | None:
    """Returns the environment's API key, or None. Raises UsageError if it does not fit a header."""
    key = os.environ.get(KEY_VARIABLE, "")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{KEY_VARIABLE} contains a space, a line break or a non-ASCII character: make another key, e.g. with "
            "`openssl rand -hex 32`, and start the server with the same key"
        )
    return key or None


def authorization(key: str) -> str:
    """Returns the value of the header `Authorization`."""
    return f"Bearer {key}"


class KeyGuard:
    """ASGI middleware that answers 401 without the key, on every route except `/health`."""

    # vLLM's own `--api-key` does not protect the routes that pause the engine and replace weights.
    def __init__(self, app: Callable[..., Awaitable[None]]):
        key, self.app = server_key(), app
        self.expected = authorization(key).encode() if key else b""
        self.answer = f"this server requires the key that {KEY_VARIABLE} had at its start"
        if not key:
            self.answer = (
                f"this server was started without {KEY_VARIABLE} and refuses every request; start it with a key"
            )
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
        # `compare_digest` takes the same time for every wrong key, which prevents timing attacks.
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        return bool(self.expected) and len(keys) == 1 and hmac.compare_digest(keys[0], self.expected)
