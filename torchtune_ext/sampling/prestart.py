"""Starts the engine's client process early, so that it imports vLLM while torchtune is imported."""

# Each import takes five seconds. This module runs when `tune run` starts: standard library only.
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchtune_ext.run.process_env import copy_environment

CLIENT_MODULE = "torchtune_ext.sampling.client_process"
ENGINE_MODULE = "torchtune_ext.sampling.engine"  # recipes that import it start an engine
# With one of these arguments `tune run` needs no local vLLM engine.
NO_PRESTART_ARGS = ("-h", "--help", "dry_run", "replay", "engine.address", "engine.backend")
# Prefixes of torchrun's variables. They describe a trainer rank and must not reach the engine.
TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
# An engine on a CPU keeps freed memory, as the trainer does (`keep_memory`).
MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# The client configures logging itself. vLLM's own start timeout must not expire before
# `engine.start_deadline_s`, which is at most a week.
CLIENT_VARIABLES = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_CONFIG_PATH": "",
    "VLLM_ENGINE_READY_TIMEOUT_S": "604800",
}
# Variables that torch and vLLM read on a CPU during import. The client itself computes nothing.
CPU_VARIABLES = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"} | CLIENT_VARIABLES | MALLOC_VARIABLES
# vLLM variables that engines do not get -> the config key that each would override.
IGNORED_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_bytes",
    "VLLM_DP_SIZE": "engine.count",
    "VLLM_PP_LAYER_PARTITION": "engine.tensor_parallel_size",
    "VLLM_MODEL_REDIRECT_PATH": "model_dir",
    "VLLM_USE_MODELSCOPE": "model_dir",
}

ProcessHandle = tuple[subprocess.Popen, socket.socket]

_prestarted: ProcessHandle | None = None  # until an engine takes it


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the trainer's environment with its `sys.path` and `extra`, without torchrun's variables."""
    env = {
        key: value
        for key, value in copy_environment().items()
        if not key.startswith(TORCHRUN_PREFIXES) and key not in IGNORED_VARIABLES
    }
    return env | {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path), **extra}


def spawn(module: str, out: int, environ: Mapping[str, str]) -> ProcessHandle:
    """Starts a module in its own session; the process ends with its parent.

    Args:
        module: Module to run.
        out: File descriptor for stdout and stderr.
        environ: Environment of the process.

    Returns:
        The process, and the parent's end of a socket pair.

    Raises:
        OSError: If the process cannot be started.
    """
    trainer_socket, child_socket = socket.socketpair()
    with child_socket:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(child_socket.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            pass_fds=[child_socket.fileno()],
            start_new_session=True,
        )
    return process, trainer_socket


def prestart_client(args: Sequence[str]) -> None:
    """Starts a client process if the recipe will start an engine.

    Args:
        args: Arguments of `tune run`.
    """
    global _prestarted
    # Only on a CPU: on a GPU vLLM may read its variables before the first message delivers them.
    if args and not any(word.startswith(NO_PRESTART_ARGS) for word in args) and _uses_engine(args[0]) and vllm_cpu():
        # If the start fails here, the engine tries again and reports the error.
        with suppress(OSError):
            _prestarted = spawn(CLIENT_MODULE, subprocess.DEVNULL, child_environment(CPU_VARIABLES))


def _uses_engine(recipe: str) -> bool:
    from torchtune_ext.run.catalog import recipe_files

    named = {recipe.name: recipe.path for recipe in recipe_files()}
    path = named.get(recipe, Path(recipe))
    return path.suffix == ".py" and path.is_file() and ENGINE_MODULE in path.read_text(errors="replace")


def vllm_cpu() -> bool:
    """Whether the installed vLLM is vllm-cpu."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def take_prestarted() -> ProcessHandle | None:
    """Returns the prestarted process, once; None if it does not exist or has ended."""
    global _prestarted
    handle, _prestarted = _prestarted, None
    # The output of this process went to /dev/null. Its replacement logs the same error.
    if handle is not None and handle[0].poll() is not None:
        handle[1].close()
        return None
    return handle


def discard_prestarted() -> None:
    """Kills the prestarted process if no engine has taken it."""
    if (handle := take_prestarted()) is not None:
        handle[0].kill()
        handle[0].wait()
        handle[1].close()
