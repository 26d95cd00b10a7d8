"""What vLLM is started with: the same arguments and variables for an engine of our own and for a server."""

from typing import Any

from torchtune_ext.sampling.imports import CORES, on_cpu
from torchtune_ext.sampling.records import CANARY_REQUESTS, LORA_RANKS, EngineConfig

# It is named in full, since vLLM on CPU makes two processes of the short name.
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
LOADER = "torchtune_ext.sampling.worker.WeightLoader"
CPU_KV_CACHE = 1 << 30  # bytes
CPU_STEP = 4096  # tokens
DEFAULT_MAX_NUM_SEQS = 256 if on_cpu() else 1024


def engine_args(model_dir: str, config: EngineConfig, transfer: str = "shm") -> dict[str, Any]:
    """Returns the arguments of vLLM's AsyncEngineArgs. Args: transfer: the weight-transfer backend that it listens with."""
    args: dict[str, Any] = {
        "model": model_dir,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": config.seed,
        "load_format": config.load_format,
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
        args |= {"hf_overrides": {"quantization_config": config.quantization}, "load_format": "dummy"}
    if on_cpu():
        args |= {
            "enforce_eager": True,
            "distributed_executor_backend": UNIPROC,
            "block_size": config.block_size or 32,
            "kv_cache_memory_bytes": config.kv_cache_bytes or CPU_KV_CACHE,
            # vLLM 0.32 on CPU dies when it splits the prompt of a request with a seed ("CPU Generator does not use
            # offset"). So prompts stay whole, and a step is large enough for the longest.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(config.max_num_batched_tokens or CPU_STEP, config.max_model_len),
        }
    else:
        args |= {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": config.sleep}
        if config.tensor_parallel_size > 1:
            # Else vLLM counts the GPUs that the trainer sees, and not the engine's.
            args["distributed_executor_backend"] = "mp"
        args |= {"kv_cache_memory_bytes": config.kv_cache_bytes} if config.kv_cache_bytes else {}
        args |= {"block_size": config.block_size} if config.block_size else {}
    return args | config.extra_args


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Returns the variables that vLLM's processes need, whoever starts them."""
    environ = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu():
        environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    if config.quantization:
        # Else vLLM rounds the scales of published weights to powers of two, on Hopper, too.
        environ |= {"VLLM_USE_DEEP_GEMM_E8M0": "0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0"}
    if config.devices is not None:
        environ[CORES if on_cpu() else "CUDA_VISIBLE_DEVICES"] = config.devices
    return environ
