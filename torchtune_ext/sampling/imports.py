"""Imports vLLM without what it does to the trainer's environment."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Importing and configuring vLLM writes variables with these beginnings into os.environ. They belong to the core, not to the
# trainer.
VLLM_ENVIRONMENT = (
    *("VLLM_", "TORCHINDUCTOR_", "NUMEXPR_MAX_", "PYTORCH_NVML_", "TRITON_CACHE_", "TILELANG_", "AITER_", "NCCL_"),
    *("LD_PRELOAD", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"),
)

CORES = "TORCHTUNE_EXT_CORES"  # variable that holds the cores which one of several engines on a CPU may use


def on_cpu() -> bool:
    """Whether the installed torch, and so the vLLM beside it, is the CPU build."""
    return torch.version.cuda is None and torch.version.hip is None


@contextmanager
def environment_kept() -> Iterator[dict[str, str]]:
    """Undoes what vLLM does to this process's environment. Afterwards the dictionary holds what it had set."""
    before, changed = dict(os.environ), {}
    try:
        yield changed
    finally:
        for key, value in list(os.environ.items()):
            if key.startswith(VLLM_ENVIRONMENT) and before.get(key) != value:
                changed[key] = value
                if key in before:
                    os.environ[key] = before[key]
                else:
                    del os.environ[key]


def import_vllm() -> None:
    """Imports what the engine's thread will use, in the thread that calls. In two threads at once Python would see half-made
    modules: Transformers, Accelerate and torch are imported by the trainer, too."""
    if on_cpu():
        # It would warn that there is no Triton, which nobody expects.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    with environment_kept():
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
        # Dynamo and inductor come before vLLM, which changes their environment variables.
        import torch._dynamo
        import torch._inductor.config  # noqa: F401
        import vllm.engine.arg_utils
        import vllm.renderers.hf
        import vllm.v1.engine.async_llm  # noqa: F401
