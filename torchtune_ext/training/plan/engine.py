"""How many engines there are, what each takes of each of its devices, and how much room that leaves for keys and values."""

from dataclasses import dataclass

from torchtune_ext.policy.memory import GIB, Sizes
from torchtune_ext.sampling.core import CPU_KV_CACHE
from torchtune_ext.sampling.layout import device_shares
from torchtune_ext.sampling.records import CANARY_REQUESTS, EngineConfig

CONTEXT = GIB // 2  # allowance for a CUDA context with its kernels: it is not in any tensor
NCCL = GIB // 2  # allowance for the buffers of NCCL's channels, where several GPUs talk
GRAPHS = GIB  # allowance for captured CUDA graphs; vLLM measures them at its start and takes them out of the KV cache
STEP_TOKENS = 2048  # tokens of a vLLM step where `engine.max_num_batched_tokens` is null
REQUESTS_GPU, REQUESTS_CPU = 1024, 256  # requests in a step where `engine.max_num_seqs` is null
# vLLM tries the sampler with all its options before it sizes the KV cache: logits in float32 (4 bytes), sorted (4) with their
# places as int64 (8), and probabilities (4).
SAMPLER_BYTES = 20


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What the engine takes of each device.

    Args:
        rows: bytes by name, without the KV cache.
        kv_bytes: of the KV cache; negative where the rest alone is too much.
        tokens: how many tokens the KV cache of one engine holds, on all its devices together.
        max_model_len: tokens of the longest request.
        requests: in one step at most, canary aside.
    """

    rows: dict[str, int]
    kv_bytes: int
    tokens: int
    max_model_len: int
    requests: int

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return sum(self.rows.values()) + max(self.kv_bytes, 0)

    @property
    def fits(self) -> bool:
        """Says whether the KV cache holds a request of the greatest length, without which vLLM does not start."""
        return self.tokens >= self.max_model_len

    def in_flight(self, tokens: int) -> int:
        """Returns how many requests of so many tokens the KV cache holds at once, shared prompts not counted."""
        return min(self.tokens // tokens, self.requests)


def engine_count(config: EngineConfig) -> int:
    """Returns how many engines sample: `engine.devices`, divided among engines of `engine.tensor_parallel_size` GPUs, one for
    each address of a server, or, on a CPU, `engine.count`.

    Raises:
        ValueError: the GPUs cannot be divided so.
    """
    if config.addresses:
        return len(config.addresses)
    return len(device_shares(config)) or config.count or 1


def engine_need(sizes: Sizes, config: EngineConfig, gpu_bytes: int, adapter_bytes: int = 0) -> EngineNeed:
    """Estimates what one engine takes, of our own or a server that `torchtune-ext serve` starts with the same settings.

    Args:
        gpu_bytes: memory of each GPU; 0: the engine computes on the CPU.
        adapter_bytes: of adapters that are published alone.
    """
    gpus = config.tensor_parallel_size
    size = 4 if config.dtype == "float32" else 2
    # Heads of keys and values that do not suffice for all GPUs are held twice.
    share = max(1, -(-sizes.kv_heads // gpus)) / sizes.kv_heads
    cached = 1 if str(config.extra_args.get("kv_cache_dtype", "")).startswith("fp8") else size
    token_bytes = sizes.keys * share * cached
    requests = config.max_num_seqs or (REQUESTS_GPU if gpu_bytes else REQUESTS_CPU)
    rows = {"weights": sizes.engine_bytes // gpus, "adapters": adapter_bytes}
    if not gpu_bytes:
        kv = config.kv_cache_bytes or CPU_KV_CACHE
        return EngineNeed(rows, kv, int(kv / token_bytes), config.max_model_len, requests)
    tokens = config.max_num_batched_tokens or STEP_TOKENS
    sampled = min(requests + CANARY_REQUESTS, tokens)
    # The widest moment of a layer holds gate, up and their product, and two residuals.
    rows |= {
        "activations of a step and its sampler": SAMPLER_BYTES * sampled * sizes.vocab
        + tokens * size * (3 * sizes.mlp // gpus + 2 * sizes.width),
        "CUDA context (allowance)": CONTEXT,
        "NCCL (allowance)": NCCL if gpus > 1 else 0,
        "CUDA graphs (allowance)": 0 if config.extra_args.get("enforce_eager") else GRAPHS,
    }
    kv = config.kv_cache_bytes or int(config.gpu_memory_utilization * gpu_bytes) - sum(rows.values())
    return EngineNeed(rows, kv, max(0, int(kv / token_bytes)), config.max_model_len, requests)
