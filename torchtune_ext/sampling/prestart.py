"""Begins the process of an engine's client before the recipe: it imports vLLM while the trainer imports torchtune."""

# Each import takes about five seconds. This file runs when `tune run` starts, so it imports only what Python brings.
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
ENGINE_MODULE = "torchtune_ext.sampling.engine"  # a recipe that imports it samples
# Words of `tune run` without which the engine is one of our own.
NO_PRESTART_ARGS = ("-h", "--help", "dry_run", "replay", "engine.address", "engine.backend")
# Variables with these prefixes tell the trainer its place among its ranks. A process of the sampler has no such place.
TORCHRUN_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
# An engine on a CPU keeps freed memory, as the trainer does (`keep_memory`).
MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# The client sets up logging itself. vLLM's own limit for the start of an engine may not end before
# `engine.start_deadline_s`, which is a week at most.
CLIENT_VARIABLES = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_LOGGING_CONFIG_PATH": "",
    "VLLM_ENGINE_READY_TIMEOUT_S": "604800",
}
# What torch and vLLM read on a CPU while they are imported. The client itself computes nothing.
CPU_VARIABLES = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"} | CLIENT_VARIABLES | MALLOC_VARIABLES
# Variables of vLLM that would replace a setting of the run, and that setting. An engine does not get them.
IGNORED_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_bytes",
    "VLLM_DP_SIZE": "engine.count",
    "VLLM_PP_LAYER_PARTITION": "engine.tensor_parallel_size",
    "VLLM_MODEL_REDIRECT_PATH": "model_dir",
    "VLLM_USE_MODELSCOPE": "model_dir",
}

ProcessHandle = tuple[subprocess.Popen, socket.socket]

_prestarted: ProcessHandle | None = None  # for the engine that takes it


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process of the sampler: ours without torchrun's and ignored variables, our path, and `more`."""
    env = {
        key: value
        for key, value in copy_environment().items()
        if not key.startswith(TORCHRUN_PREFIXES) and key not in IGNORED_VARIABLES
    }
    return env | {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry or ".") for entry in sys.path), **more}


def spawn(module: str, out: int, environ: Mapping[str, str]) -> ProcessHandle:
    """Starts a program in a session of its own, which dies when we do. `out`: takes its output. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def prestart_client(args: Sequence[str]) -> None:
    """Begins a client if the recipe will want one. Args: words: of the command line, behind `tune run`."""
    global _prestarted
    # Only on a CPU: on a GPU vLLM may read its variables before the first frame brings them.
    if args and not any(word.startswith(NO_PRESTART_ARGS) for word in args) and _uses_engine(args[0]) and vllm_cpu():
        # If no process can be started here, the engine tries again, and the run then says what is wrong.
        with suppress(OSError):
            _prestarted = spawn(CLIENT_MODULE, subprocess.DEVNULL, child_environment(CPU_VARIABLES))


def _uses_engine(recipe: str) -> bool:
    from torchtune_ext.run.catalog import package_folder, recipe_files

    named = {each.name: each.path for each in recipe_files(package_folder("recipes"), package_folder("configs"))}
    path = named.get(recipe, Path(recipe))
    return path.suffix == ".py" and path.is_file() and ENGINE_MODULE in path.read_text(errors="replace")


def vllm_cpu() -> bool:
    """Whether the installed vLLM is vllm-cpu."""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def take_prestarted() -> ProcessHandle | None:
    """Hands out the process that was begun, once; None if there is none or it has ended."""
    global _prestarted
    begun, _prestarted = _prestarted, None
    # Its output went to /dev/null. The process that replaces it says in its log what went wrong.
    if begun is not None and begun[0].poll() is not None:
        begun[1].close()
        return None
    return begun


def discard_prestarted() -> None:
    """Ends the process that was begun, if no engine has taken it."""
    if (begun := take_prestarted()) is not None:
        begun[0].kill()
        begun[0].wait()
        begun[1].close()
