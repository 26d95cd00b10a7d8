"""The command line of a vLLM server that `ServerCore` can use."""

import json
import os
import secrets
import shlex
import sys
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from torchtune_ext.sampling.doors import GUARD, KEY_VARIABLE, one_machine, server_key
from torchtune_ext.sampling.engine_args import engine_args, engine_environment
from torchtune_ext.sampling.imports import on_cpu
from torchtune_ext.sampling.layout import device_shares
from torchtune_ext.sampling.records import EngineConfig

HERE = ("127.0.0.1", "localhost", "::1")
PORT = 8000


def server_command(
    model_dir: str, config: EngineConfig, host: str | None = None, port: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command line that starts a server which `ServerCore` can use, and the environment variables to add.

    The server gets the arguments of an engine of our own. The variables hold the key that it will ask for: the one of our own
    environment (`doors.KEY_VARIABLE`), or else a fresh random one, which then has to get into the trainer's. Raises ValueError
    for a key that no header can carry, for addresses of several ports, and for devices of several engines.
    Args: model_dir: directory of a Hugging Face model; config: how its engine is built; host: address to listen on; None:
    127.0.0.1, or all addresses when `config.address` names another machine, and the key then travels in the clear; port: its
    number; None: that of the first of `config.addresses`, or 8000.
    """
    elsewhere = not _all_here(config)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", host or ("0.0.0.0" if elsewhere else "127.0.0.1")]
    command += ["--port", str(port or _port(config)), "--middleware", GUARD]
    command += ["--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    for name, value in engine_args(model_dir, config, transfer_of(config)).items():
        command += _flag(name, value)
    key = server_key() or secrets.token_urlsafe(32)
    environ = {KEY_VARIABLE: key, "VLLM_API_KEY": key}  # else a VLLM_API_KEY of the user's would ask for another one
    environ |= {"VLLM_SERVER_DEV_MODE": "1"}  # the weight routes are in the "dev mode"
    if config.lora_rank:
        environ |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}  # so that requests can name the adapter
    # What `devices` names are GPUs of the trainer's machine (on a CPU: cores for an engine of the run). CUDA_VISIBLE_DEVICES of
    # the shell in which the server starts goes before them.
    own = _all_here(config) and not on_cpu() and "CUDA_VISIBLE_DEVICES" not in os.environ
    if own and len(device_shares(config)) > 1:
        raise ValueError(
            f"engine.devices={config.devices} names GPUs for {len(device_shares(config))} engines, and a server is one: start "
            f"one for each, and name its {config.tensor_parallel_size} with CUDA_VISIBLE_DEVICES in front of the command"
        )
    environ |= engine_environment(config if own else replace(config, devices=None)) | one_machine()
    if transfer_of(config) == "nccl":
        # It keeps NCCL on loopback, and the group with the sender is to leave this machine.
        del environ["NCCL_SOCKET_IFNAME"]
    return command, environ


def transfer_of(config: EngineConfig) -> str:
    """Returns how a server takes weights that is started by this config: what it names, or, with "auto", memory on the
    trainer's machine, and between machines NCCL from GPU to GPU, and else gloo."""
    if config.transfer != "auto":
        return config.transfer
    if _all_here(config):
        return "shm"
    return "gloo" if on_cpu() else "nccl"


def _all_here(config: EngineConfig) -> bool:
    return all(urlsplit(address).hostname in HERE for address in config.addresses)


def _port(config: EngineConfig) -> int:
    ports = sorted({urlsplit(address).port or PORT for address in config.addresses}) or [PORT]
    if ports[1:]:
        raise ValueError(
            f"engine.address={config.address} names the ports {', '.join(map(str, ports))}: say with --port which of them this "
            "server gets, or with engine.address which server it is"
        )
    return ports[0]


def shown_command(command: list[str], environ: dict[str, str]) -> str:
    """Returns a command line for a log: whoever reads it starts the same server, and learns no key."""
    secret = environ[KEY_VARIABLE]
    pairs = {name: f'"${KEY_VARIABLE}"' if value == secret else value for name, value in environ.items()}
    return " ".join([f"{name}={value}" for name, value in pairs.items()] + [shlex.quote(word) for word in command])


def _flag(name: str, value: Any) -> list[str]:
    """Writes an argument of AsyncEngineArgs as words of vLLM's command line."""
    word = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [word if value else word.replace("--", "--no-", 1)]
    if isinstance(value, list):
        return [word, *map(str, value)]
    return [word, json.dumps(value) if isinstance(value, dict) else str(value)]
