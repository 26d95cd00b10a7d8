"""The records of the sampling stage: configs go in, completions, reports and counters come out, and its two errors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from torchtune_ext.run.errors import Failure, Mistake, require_seconds

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM has room for these; a rank between is padded to the next
TRANSFERS = ("auto", "shm", "nccl", "gloo")
CANARY_REQUESTS = 32  # at most in flight; a step of an engine has rows for them besides those of `max_num_seqs`


class Priority(IntEnum):
    """Who goes first where requests wait: at the throttle, and in vLLM's own queue."""

    CANARY = 0  # waits for no place of the throttle: all wait for it, and it is few and short (CANARY_REQUESTS)
    EVALUATION = 1  # gets the next places; it belongs to one version, so nothing may be published while one is drawn
    TURN = 2  # a later turn of a conversation, most of which is still in the prefix cache
    SAMPLE = 3  # what is trained on
    SCORE = 4  # asks for the log-probs of its own prompt, and so for a prefill without the prefix cache


class EngineFailed(Failure):
    """The engine could not be brought back; the message holds the cause and the end of the engine's log."""


class WeightsIncomplete(Failure):
    """The last publication broke off while copying, and the engine has to load it: publish again."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine is built. Raises ValueError for a value that cannot be."""

    backend: str = "vllm"  # what samples: "vllm", or the dotted path of a class of your own
    dtype: str = "auto"  # of weights and KV cache inside the engine; "auto": the trainer's `dtype`
    max_model_len: int = 4096  # tokens, prompt + completion of one request
    kv_cache_bytes: int | None = None  # KV cache of each engine; None: 1 GiB on CPU, a share of the memory on GPU
    gpu_memory_utilization: float = 0.85  # share of the GPU for weights + KV cache, when kv_cache_bytes is None
    tensor_parallel_size: int = 1  # GPUs of one engine
    max_concurrency: int | None = None  # requests in flight in one engine; None: follow its own counters
    max_num_seqs: int | None = None  # requests in one engine step, canary aside; None: 256 on CPU, 1024 on GPU
    max_num_batched_tokens: int | None = None  # tokens of one engine step; None: vLLM's choice
    block_size: int | None = None  # tokens in a KV block; None: 32 on CPU, vLLM's choice on GPU
    # GPUs, as in CUDA_VISIBLE_DEVICES: each `tensor_parallel_size` of them are an engine with a process of its own;
    # None: inherited
    devices: str | None = None
    count: int | None = None  # engines on a CPU; None: as many as devices or address say, else one
    # of each engine on a CPU; None: the trainer's, where it waits for the engine and the model is large enough, else
    # one
    threads: int | None = None
    # keys and values of requests in flight at a publication: "recompute" under the new weights, or "keep" the old ones
    kv_on_publish: str = "recompute"
    sleep: bool = False  # engine shares the trainer's GPU: give memory back between sampling and publishing
    # "http://host:port" of a running vLLM server, or a list of several (with commas between them in one text), whose
    # key is in TORCHTUNE_EXT_API_KEY; None: engines of our own
    address: Any = None
    # how weights reach a server: "shm" (this machine's memory), "nccl" or "gloo" (network); "auto": as it was started
    transfer: str = "auto"
    lora_rank: int | None = None  # rank of an adapter that will be published; the recipe sets it
    lora_targets: tuple[str, ...] = ()  # layers with an adapter: "q_proj", ...; empty: all that vLLM can adapt
    quantization: dict[str, Any] = field(default_factory=dict)  # quantization_config of weights that will be published
    seed: int = 0  # seed of requests that bring none of their own
    start_deadline_s: float = 600.0  # seconds until the engine has to answer after its start
    rpc_deadline_s: float = 300.0  # seconds for one call into the engine (weights, pause, resume)
    probe_interval_s: float = 2.0  # seconds without a sign of life before a pending engine is asked for one
    probe_deadline_s: float = 30.0  # seconds it has to answer; longer than its slowest single step
    max_failures: int = 3  # failures in a row, without a finished request between, before giving up
    extra_args: dict[str, Any] = field(default_factory=dict)  # further arguments of vLLM's AsyncEngineArgs

    def following(self, dtype: str, threads: int | None = None) -> "EngineConfig":
        """A copy with the trainer's dtype and `threads`, where nothing else is set."""
        return replace(self, dtype=dtype if self.dtype == "auto" else self.dtype, threads=self.threads or threads)

    def __post_init__(self):
        # YAML gives one address or a list, and the command line one text with commas. From here on it is such a text.
        if self.address is not None:
            several = self.address if isinstance(self.address, list | tuple) else [self.address]
            words = [word.strip().rstrip("/") for each in several for word in str(each).split(",")]
            object.__setattr__(self, "address", ",".join(words))
        if self.dtype not in ("bfloat16", "float16", "float32", "auto"):
            raise Mistake(f"engine.dtype is {self.dtype!r}: use 'bfloat16', 'float16', 'float32' or 'auto'")
        if self.kv_on_publish not in ("recompute", "keep"):
            raise Mistake(f"engine.kv_on_publish is {self.kv_on_publish!r}: use 'recompute' or 'keep'")
        if self.kv_on_publish == "keep" and self.sleep:
            raise Mistake(
                "engine.kv_on_publish=keep with engine.sleep: what sleeps loses its KV cache; use 'recompute'"
            )
        for name in ("max_model_len", "tensor_parallel_size", "max_failures"):
            if getattr(self, name) < 1:
                raise Mistake(f"engine.{name} is {getattr(self, name)}: it has to be 1 or more")
        counts = ("count", "threads", "max_concurrency", "max_num_seqs", "max_num_batched_tokens")
        for name in (*counts, "kv_cache_bytes", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Mistake(f"engine.{name} is {value}: it has to be 1 or more, or null for the default")
        if self.lora_rank is not None and not 1 <= self.lora_rank <= LORA_RANKS[-1]:
            raise Mistake(f"engine.lora_rank is {self.lora_rank}: vLLM takes adapters of rank 1 to {LORA_RANKS[-1]}")
        if self.transfer not in TRANSFERS:
            raise Mistake(f"engine.transfer is {self.transfer!r}: use one of {', '.join(TRANSFERS)}")
        if self.address is None and self.transfer not in ("auto", "shm"):
            raise Mistake(
                f"engine.transfer={self.transfer} without engine.address: an engine of this run reads the trainer's memory; "
                "leave it out, or name a server"
            )
        if self.quantization and self.dtype == "float32":
            raise Mistake(
                "engine.dtype=float32 with quantized weights: vLLM computes around them in bfloat16; set it so"
            )
        for name in ("start_deadline_s", "rpc_deadline_s", "probe_interval_s", "probe_deadline_s"):
            require_seconds(f"engine.{name}", getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise Mistake(
                f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}: it is a share of the GPU in (0, 1]"
            )
        if not all(_is_address(each) for each in self.addresses):
            raise Mistake(
                f"engine.address is {self.address!r}: write it as 'http://host:port', several with commas between"
            )
        for name, several in (("devices", self.device_names), ("address", self.addresses)):
            if twice := [each for each in several if several.count(each) > 1]:
                raise Mistake(f"engine.{name} is {getattr(self, name)!r}, which names {twice[0]} twice")
        count = len(self.addresses) or len(self.device_names) // self.tensor_parallel_size
        if self.count is not None and count and self.count != count:
            where = f"address={self.address!r}"
            if not self.addresses:
                where = f"devices={self.devices!r} with tensor_parallel_size={self.tensor_parallel_size}"
            raise Mistake(f"engine.count is {self.count}, but engine.{where} makes {count}; leave engine.count out")

    @property
    def device_names(self) -> list[str]:
        """The devices, one by one; empty where none are named."""
        return [each.strip() for each in str(self.devices or "").split(",") if each.strip()]

    @property
    def addresses(self) -> list[str]:
        """The addresses, one by one; empty for engines of our own."""
        return self.address.split(",") if self.address is not None else []


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How completions are drawn in one call of `sample`. Raises ValueError for a value that cannot be."""

    max_tokens: int  # tokens of a completion at most
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # below 1 the log-probs are of the renormalized distribution
    top_k: int = 0  # 0: off
    stop_token_ids: tuple[int, ...] = ()  # a completion ends with (and contains) the first of these; with nothing else
    seed: int | None = None  # requests' seeds come from (seed, group, sample index); None: not reproducible
    early_stop_logprob: float | None = None  # mean log-prob (nats) below which a completion is stopped; None: off
    early_stop_decay: float = 0.992  # decay of the running mean: 0.992 looks back about 125 tokens
    early_stop_min_tokens: int = 64  # tokens before which there is no early stop

    def stopping_at(self, ids: Sequence[int]) -> "SamplingConfig":
        """A copy with these stops, where no others are set."""
        return self if self.stop_token_ids else replace(self, stop_token_ids=tuple(ids))

    def __post_init__(self):
        if self.max_tokens < 1:
            raise Mistake(f"sampling.max_tokens is {self.max_tokens}: it has to be 1 or more")
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise Mistake(
                f"sampling.temperature is {self.temperature}: it has to be above 0, or 0 (greedy) where nothing is trained"
            )
        if not 0 < self.top_p <= 1:
            raise Mistake(f"sampling.top_p is {self.top_p}: it is a probability in (0, 1], 1 is off")
        if self.top_k < 0:
            raise Mistake(f"sampling.top_k is {self.top_k}: it has to be 0 (off) or more")
        if not 0 < self.early_stop_decay < 1:
            raise Mistake(f"sampling.early_stop_decay is {self.early_stop_decay}: it lies in (0, 1), e.g. 0.992")
        if self.early_stop_min_tokens < 1:
            raise Mistake(f"sampling.early_stop_min_tokens is {self.early_stop_min_tokens}: it has to be 1 or more")
        if self.early_stop_logprob is not None and not self.early_stop_logprob < 0:
            raise Mistake(
                f"sampling.early_stop_logprob is {self.early_stop_logprob}: a mean log-prob is negative, e.g. -3.0"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion of R tokens."""

    tokens: np.ndarray  # [R] int32, ids as sampled, with the stop token when it was sampled
    logprobs: np.ndarray  # [R] float32, nats: of the sampled tokens under the sampling temperature
    versions: np.ndarray  # [R] int32, policy version that produced each token
    finish_reason: str  # "stop", "length", "early_stop" or "abort"
    cached_prompt_tokens: int = 0  # prompt tokens that came out of the prefix cache
    # [P - 1] float32, nats: of the prompt's tokens from the second on, where they were asked for (`Priority.SCORE`)
    prompt_logprobs: np.ndarray | None = None
    # [start, stop) of each turn of a conversation in `tokens`. Between two turns stands the environment's answer, which
    # was not sampled: its log-probs are 0. Empty: all of `tokens` was sampled.
    turns: tuple[tuple[int, int], ...] = ()
    # For each turn, how many tokens its context keeps of the path before it (the prompt, or the turn before it with
    # that turn's context). The rest of its context stands before the turn in `tokens`. Empty: every turn keeps all.
    kept: tuple[int, ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The turns. A completion that is no conversation has one."""
        return self.turns or ((0, len(self.tokens)),)

    @property
    def sampled(self) -> np.ndarray:
        """The places [S] of the sampled tokens in `tokens`."""
        return np.concatenate([np.arange(*span) for span in self.spans])

    def paths(self, prompt: int) -> Iterator[np.ndarray]:
        """Yields the path of each turn, its context and itself, as indices into `prompt` tokens and then `tokens`."""
        path, begin = np.arange(prompt), prompt
        for (_, stop), keeps in zip(self.spans, self.kept or (None,) * len(self.spans), strict=True):
            path = np.concatenate([path[:keeps], np.arange(begin, prompt + stop)])
            begin = prompt + stop
            yield path


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publication of weights took, and what was sent."""

    bytes: int  # size of the published tensors
    sums: dict[str, int]  # checksum of each of them, by name
    copy_s: float  # seconds to copy them into shared memory; the engine goes on sampling meanwhile
    pause_s: float  # seconds in which the engine sampled nothing, with load_s in it
    load_s: float  # seconds the engine took to load them


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """What one engine says when it is asked what it samples with."""

    engine: str  # its name in messages
    completions: list[list[Completion]]  # of each prompt
    checksums: list[dict[str, int | None]]  # of each worker, as `Engine.checksums` returns them


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The counters of all engines since the start of the run. A restart of an engine does not reset them."""

    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens that were found there
    preemptions: int  # requests thrown out of a full KV cache and computed again later
    max_kv_usage: float  # highest share of an engine's KV cache in use
    running: int  # requests in the last steps of the engines
    waiting: int  # requests in their queues then
    concurrency: int  # limit of requests in flight now
    completed: int  # requests finished, whatever the reason
    tokens: int  # tokens sampled in finished requests
    restarts: int  # times an engine was started again after a failure
    healthy: int = 1  # engines that sample now
    retired: int = 0  # engines that failed too often and are not started again

    @property
    def prefix_hit_rate(self) -> float:
        """The share of the prompt tokens that were not computed again."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
