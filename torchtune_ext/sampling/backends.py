"""The sampler backends by their names: to add one, write a class with the methods of `calls.Core` and give it a line here."""

from collections.abc import Callable
from pathlib import Path

from torchtune_ext.sampling.calls import Core, Step
from torchtune_ext.sampling.core import LocalCore
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.sampling.remote_core import RemoteCore
from torchtune_ext.sampling.server import ServerCore

# A backend is called with the model's directory, the config, the file that takes the engine's log, a folder for temporary
# files, and the function that takes the counters of each step. It returns at once; `Core.launch` then waits.
Backend = Callable[[str, EngineConfig, Path, str, Callable[[Step], None]], Core]


def vllm(model_dir: str, config: EngineConfig, log_path: Path, temp_dir: str, on_step: Callable[[Step], None]) -> Core:
    """Connects to a server when `engine.address` names one, and otherwise starts an engine of our own."""
    if config.address is not None:
        return ServerCore(config, on_step, log_path, temp_dir)
    return RemoteCore(model_dir, config, log_path, temp_dir, on_step)


# With "vllm_in_process" vLLM's client lives in the trainer: to set a breakpoint there, or to replace a part of it. It takes
# time from training.
BACKENDS: dict[str, Backend] = {"vllm": vllm, "vllm_in_process": LocalCore}


def find_backend(name: str) -> Backend:
    """Returns the backend of that name. Raises ValueError for a name that `BACKENDS` lacks."""
    if name not in BACKENDS:
        raise ValueError(f"engine.backend is {name!r}: use one of {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]
