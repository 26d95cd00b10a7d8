"""Config, result and error types of the sampling stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from pydantic import BeforeValidator, Field

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.settings.sections import Seconds, config_section

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's `max_lora_rank`; other ranks are padded to the next one
TRANSFERS = ("auto", "shm", "nccl", "gloo")
CANARY_REQUESTS = 32  # maximum in flight; each engine step reserves sequences for them on top of `max_num_seqs`


class Priority(IntEnum):
    """Request priority in the throttle and in vLLM's scheduler; lower values go first."""

    CANARY = 0  # bypasses the throttle: training waits for its few, short requests (CANARY_REQUESTS)
    EVALUATION = 1  # belongs to one policy version: no weight sync may start while an evaluation is in flight
    TURN = 2  # later turn of an episode; most of its prompt is still in the prefix cache
    SCORE = 3  # log-probs of the prompt, for which training waits; needs a prefill without the prefix cache
    SAMPLE = 4  # training rollouts


class EngineFailed(RunFailure):
    """The engine could not be restarted; the message holds the cause and the engine's log tail."""


class WeightsIncomplete(RunFailure):
    """The last weight sync was interrupted while copying, so the engine cannot load it."""


def _join_addresses(address: Any) -> Any:
    """Joins a list of addresses, or a comma-separated string, into one comma-separated string."""
    if address is None:
        return None
    words = ",".join(map(str, address)) if isinstance(address, list | tuple) else str(address)
    return ",".join(word.strip().rstrip("/") for word in words.split(","))


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@config_section("engine")
class EngineConfig:
    """Keys of the `engine:` section: how vLLM replicas are built.

    Raises:
        UsageError: For values that exclude each other.
    """

    backend: str = Field(default="vllm", description='"vllm", or the dotted path of a backend class')
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="dtype of weights and KV cache in the engine; auto: the trainer's `dtype`"
    )
    max_model_len: int = Field(default=4096, ge=1, description="maximum tokens of prompt + completion")
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="KV cache per GPU, on CPU per replica; null: 1 GiB on CPU, gpu_memory_utilization on GPU",
    )
    gpu_memory_utilization: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="share of the GPU that vLLM may use; the KV cache gets the rest of it. Unused if kv_cache_bytes is set",
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs per replica")
    max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="in-flight requests per replica; null: adapts to KV cache usage and preemptions of each replica",
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        description="maximum requests per engine step, without the canary; null: 1024 on GPUs of 70 GB or more, else 256",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="maximum tokens per engine step; null: 4096 on CPU, vLLM's choice on GPU, 2048 with teacher.self; "
        "on CPU at least max_model_len",
    )
    block_size: int | None = Field(
        default=None, ge=1, description="tokens per KV-cache block; null: 32 on CPU, vLLM's choice on GPU"
    )
    devices: str | None = Field(
        default=None,
        description="GPUs, as in CUDA_VISIBLE_DEVICES; one replica per `tensor_parallel_size` of them; null: inherited",
    )
    count: int | None = Field(
        default=None, ge=1, description="replicas on a CPU; null: from devices or address, else 1"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        description="threads of each replica on a CPU; null: the trainer's, divided among replicas; 1 below 5 million "
        "parameters or in async training",
    )
    kv_on_publish: Literal["recompute", "keep"] = Field(
        default="recompute", description="KV cache of in-flight requests after a weight sync: recompute or keep"
    )
    sleep: bool | Literal[2] = Field(
        default=False,
        description="colocated engine: release GPU memory between sampling and weight sync; 2: vLLM's sleep level 2, which "
        "keeps no weights in main memory and rereads an adapter's base model from `model_dir`",
    )
    address: Annotated[str | None, BeforeValidator(_join_addresses, json_schema_input_type=str | list[str] | None)] = (
        Field(
            default=None,
            description='"http://host:port" of running vLLM servers, a list or separated by commas; null: replicas '
            "that this run starts. Their API key is in TORCHTUNE_EXT_API_KEY",
        )
    )
    transfer: Literal["auto", "shm", "nccl", "gloo"] = Field(
        default="auto",
        description="weight transfer to servers; auto: as `torchtune-ext serve` sets it: shm at a local address, else nccl "
        "(CPU: gloo)",
    )
    lora_rank: int | None = Field(
        default=None, ge=1, le=LORA_RANKS[-1], description="rank of published adapters; set by the recipe"
    )
    lora_targets: tuple[str, ...] = Field(
        default=(), description='layers with an adapter, e.g. "q_proj"; set by the recipe'
    )
    quantization: dict[str, Any] = Field(
        default_factory=dict, description="quantization_config of published weights; set by the recipe"
    )
    seed: int = Field(default=0, description="seed of requests without a seed")
    start_deadline_s: Seconds = Field(
        default=600.0, description="deadline of the engine's start, and of a health check before its first completion"
    )
    rpc_deadline_s: Seconds = Field(
        default=300.0, description="deadline of one engine call (weights, pause, resume), seconds"
    )
    probe_interval_s: Seconds = Field(
        default=2.0, description="seconds without output before a health check of a busy replica"
    )
    probe_deadline_s: Seconds = Field(
        default=30.0,
        description="timeout of a health check in seconds, above the slowest engine step; at least 900 if a CPU emulates "
        "bfloat16",
    )
    max_failures: int = Field(
        default=3, ge=1, description="consecutive crashes, without a finished request, after which a replica is retired"
    )
    extra_args: dict[str, Any] = Field(default_factory=dict, description="further arguments of vLLM's AsyncEngineArgs")

    def with_trainer_defaults(self, dtype: str, threads: int | None = None) -> "EngineConfig":
        """Returns a copy with the trainer's dtype and `threads` where this config has no value."""
        return replace(self, dtype=dtype if self.dtype == "auto" else self.dtype, threads=self.threads or threads)

    def __post_init__(self) -> None:
        if self.kv_on_publish == "keep" and self.sleep:
            raise UsageError(
                "engine.kv_on_publish=keep with engine.sleep: a sleeping engine drops its KV cache. Fix: set "
                "engine.kv_on_publish=recompute"
            )
        if self.address is None and self.transfer not in ("auto", "shm"):
            raise UsageError(
                f"engine.transfer={self.transfer} without engine.address: replicas of this run receive weights through shared "
                "memory. Fix: remove engine.transfer, or set engine.address to a server"
            )
        if self.quantization and self.dtype == "float32":
            raise UsageError(
                "engine.dtype=float32 with quantized weights: vLLM runs the other layers in bfloat16. Fix: "
                "set engine.dtype=bfloat16"
            )
        if not all(map(_is_address, self.addresses)):
            raise UsageError(
                f"engine.address={self.address!r}: expected 'http://host:port', several separated by commas"
            )
        for key, names in (("devices", self.device_names), ("address", self.addresses)):
            if duplicates := [name for name in names if names.count(name) > 1]:
                raise UsageError(
                    f"engine.{key}={getattr(self, key)!r}: {duplicates[0]} is listed twice. Fix: remove one"
                )
        count = len(self.addresses) or len(self.device_names) // self.tensor_parallel_size
        gpus = f"devices={self.devices!r} with tensor_parallel_size={self.tensor_parallel_size}"
        where = f"address={self.address!r}" if self.addresses else gpus
        if count and self.count not in (None, count):
            raise UsageError(
                f"engine.count={self.count}: engine.{where} starts {count} {'replicas' if count > 1 else 'replica'}. Fix: "
                "remove engine.count"
            )

    @property
    def device_names(self) -> list[str]:
        """Device names as a list; empty if `devices` is null."""
        return [name.strip() for name in str(self.devices or "").split(",") if name.strip()]

    @property
    def addresses(self) -> list[str]:
        """Server addresses as a list; empty if this run starts its own replicas."""
        return self.address.split(",") if self.address is not None else []


@config_section("sampling")
class SamplingConfig:
    """Keys of the `sampling:` section: the sampling parameters of completions."""

    max_tokens: int = Field(ge=1, description="maximum tokens of a completion")
    temperature: float = Field(
        default=1.0, ge=0, allow_inf_nan=False, description="usually 1.0; 0 (greedy) only in evaluate"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling; 1: off; below 1 only in evaluate")
    top_k: int = Field(default=0, ge=0, description="top-k sampling; 0: off; above 0 only in evaluate")
    stop_token_ids: tuple[int, ...] = Field(
        default=(),
        description="a completion ends with, and contains, the first of these; empty: end tokens of tokenizer and model",
    )
    seed: int | None = Field(
        default=None, description="base seed, combined with group and sample index, only in evaluate; null: from `seed`"
    )
    early_stop_logprob: float | None = Field(
        default=None,
        lt=0,
        description="running mean log-prob (nats) below which a completion is stopped, e.g. -3.0; null: off",
    )
    early_stop_decay: float = Field(
        default=0.992, gt=0, lt=1, description="decay of the running mean; 0.992 averages about 125 tokens"
    )
    early_stop_min_tokens: int = Field(default=64, ge=1, description="minimum tokens before an early stop")

    def with_default_stops(self, ids: Sequence[int]) -> "SamplingConfig":
        """Returns a copy with `ids` as stop tokens if `stop_token_ids` is empty."""
        return self if self.stop_token_ids else replace(self, stop_token_ids=tuple(ids))


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of R tokens."""

    tokens: np.ndarray  # [R] int32, sampled ids, including the stop token if one was sampled
    logprobs: np.ndarray  # [R] float32, nats, under the sampling temperature
    versions: np.ndarray  # [R] int32, policy version that produced each token
    # "stop", "length", "early_stop" or "abort" from the engine; an episode sets further reasons.
    finish_reason: str
    cached_prompt_tokens: int = 0  # prompt tokens found in the prefix cache
    # [P - 1] float32, nats: log-probs of the prompt from its second token on (`Priority.SCORE`
    # only)
    prompt_logprobs: np.ndarray | None = None
    # [start, stop) of each turn of an episode in `tokens`. The tokens between two turns are the
    # environment's reply. They were not sampled, and their log-probs are 0. If `turns` is empty,
    # every token was sampled.
    turns: tuple[tuple[int, int], ...] = ()
    # For each turn, the number of tokens that its context keeps from its parent's path (the parent
    # turn with its context, or the prompt); empty: every turn keeps the whole path. Example: a
    # prompt of 10 tokens, a turn of 6 (4 of thought, 2 of answer), and a template that drops the
    # thought. The second context is the prompt, the answer again (2) and the reply (5), so `tokens`
    # is turn 1 (6), answer and reply (7), turn 2; `turns` is ((0, 6), (13, ...)), and
    # `kept_prefix_lens` is (10, 10).
    kept_prefix_lens: tuple[int, ...] = ()
    # For each turn, the index of its parent, an earlier turn, or -1 for the prompt; empty: the
    # previous turn. Turns are in the order in which they were sampled. Example: two conversations
    # A1 A2 and B1 B2 after one prompt, sampled as A1 B1 A2 B2, have the parents (-1, -1, 0, 1).
    parents: tuple[int, ...] = ()
    # [start, stop) in `tokens` of text that the environment wrote: the content of its messages, without
    # the template's tokens around it. Each message counts once, after the turn that it answers.
    content_spans: tuple[tuple[int, int], ...] = ()

    @property
    def sampled_spans(self) -> tuple[tuple[int, int], ...]:
        """[start, stop) of each turn; a single-turn completion has one span."""
        return self.turns or ((0, len(self.tokens)),)

    @property
    def sampled_indices(self) -> np.ndarray:
        """Indices [S] of the sampled tokens in `tokens`."""
        return np.concatenate([np.arange(*span) for span in self.sampled_spans])

    @property
    def content_indices(self) -> np.ndarray:
        """Indices [E] of the environment's content in `tokens`."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in self.content_spans)])

    @property
    def has_branches(self) -> bool:
        """Whether the turns may form a tree, so that no single path contains all of them."""
        return bool(self.kept_prefix_lens or self.parents)

    @property
    def num_forks(self) -> int:
        """The number of branches beyond the first: 0 if each turn continues the path of the previous one."""
        if not self.has_branches:
            return 0
        path_lens, continued, begin = [], set(), 0
        for turn, (_, stop) in enumerate(self.turns):
            parent = self.parents[turn] if self.parents else turn - 1
            if parent >= 0 and self.kept_prefix_lens[turn] == path_lens[parent]:
                continued.add(parent)
            path_lens.append(self.kept_prefix_lens[turn] + stop - begin)
            begin = stop
        return len(self.turns) - len(continued) - 1

    def turn_paths(self, prompt_len: int) -> list[np.ndarray]:
        """Returns each turn's path (context and turn) as indices into prompt + `tokens`."""
        prompt, paths, begin = np.arange(prompt_len), [], prompt_len
        for turn, (_, stop) in enumerate(self.sampled_spans):
            parent = self.parents[turn] if self.parents else turn - 1
            kept_len = self.kept_prefix_lens[turn] if self.kept_prefix_lens else None
            parent_path = paths[parent] if parent >= 0 else prompt
            paths.append(np.concatenate([parent_path[:kept_len], np.arange(begin, prompt_len + stop)]))
            begin = prompt_len + stop
        return paths


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Size, checksums and timings of one weight sync."""

    bytes: int  # total size of the published tensors
    checksums: dict[str, int]  # tensor name -> checksum
    copy_s: float  # seconds to copy the tensors into shared memory; sampling continues meanwhile
    pause_s: float  # seconds without sampling; includes load_s
    load_s: float  # seconds the engine took to load the tensors


@dataclass(frozen=True, slots=True)
class CanaryAnswer:
    """One replica's completions of the canary prompts, and the checksums of its weights."""

    replica: str  # name of the replica in messages
    completions: list[list[Completion]]  # one list per prompt
    checksums: list[dict[str, int | None]]  # one dict per worker, as in `Engine.checksums`


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of all replicas since the start of the run; a restart does not reset them."""

    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int  # prompt tokens found in the prefix cache
    preemptions: int  # requests evicted from a full KV cache and recomputed later
    max_kv_usage: float  # highest fraction of a replica's KV cache in use
    running: int  # running requests, as of each replica's last step
    waiting: int  # requests in the replicas' queues, as of each replica's last step
    concurrency: int  # current limit of in-flight requests
    completed: int  # finished requests, whatever the reason
    tokens: int  # tokens sampled in finished requests
    restarts: int  # restarts after a crash
    serving: int = 1  # replicas that serve now
    retired: int = 0  # replicas that failed `max_failures` times in a row and are not restarted

    @property
    def prefix_hit_rate(self) -> float:
        """Fraction of the prompt tokens that were found in the prefix cache."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
