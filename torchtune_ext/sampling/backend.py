"""Shared by all engine backends: the protocol `Backend`, requests, step counters and errors."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.sampling.types import Completion, Priority, SamplingConfig

CRASH_POLL_S = 0.2  # seconds between two checks for a crash during an engine call

T = TypeVar("T")
OnCompletion = Callable[[int, Completion], None]  # (index of the sample in its group, completion)


def derive_seed(seed: int, *parts: int) -> int:
    """Derives a 63-bit seed from `seed` and `parts`, for instance for step 3 of a run."""
    # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) mixes in one part after the other, so that
    # neighboring parts have uncorrelated seeds.
    mask = (1 << 64) - 1
    value = seed & mask
    for part in parts:
        value = (value + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def group_seeds(seed: int | None, group: int, n: int) -> list[int | None]:
    """Returns the seeds of a group's `n` completions; all None if `seed` is None."""
    # The seeds depend only on `seed` and the group's number, not on other submitted groups.
    return [None if seed is None else derive_seed(seed, group, s) for s in range(n)]


class BackendCrashed(RunFailure):
    """The replica's process exited, does not answer, or holds half-loaded weights: restart it."""


@dataclass(frozen=True, slots=True)
class EngineStepStats:
    """The replica's counters after one of its steps."""

    usage: float  # fraction of the KV cache in use
    running: int  # requests
    waiting: int  # requests
    preempted: int  # requests, in this step
    prefix_queries: int  # tokens, in this step
    prefix_hits: int  # tokens, in this step


@dataclass(slots=True)
class EngineRequest:
    """One request to one replica, and the tokens sampled so far."""

    prompt: list[int]
    sampling: SamplingConfig
    seed: int | None
    priority: Priority = Priority.SAMPLE  # in the replica's own queue
    seed_index: int = 0  # index of the group (`Engine.submit`), for messages
    n: int = 1  # number of requests in the group; all share this prompt
    # Each replica gets a copy of the request, with an id that is unique in the run.
    id: str = ""
    first_version: int = 0  # policy version of the initial weights, which were never published
    task: asyncio.Task | None = field(default=None, init=False)  # task that runs the request
    crash_reason: str = field(default="", init=False)  # why the replica failed the request; "" if it did not
    num_kept: int | None = field(default=None, init=False)  # tokens to keep after an early stop
    tokens: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    _sum: float = field(default=0.0, init=False)  # running sum for the early stop

    @property
    def needs_streaming(self) -> bool:
        """Whether the backend must stream tokens, because an early stop may depend on them."""
        return self.sampling.early_stop_logprob is not None

    def vllm_params(self) -> dict[str, Any]:
        """Returns the arguments of vLLM's `SamplingParams`, for a process or a server."""
        sampling = self.sampling
        return {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": self.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            # Only `stop_token_ids` end a completion; if the config has none, recipes set the EOS tokens.
            "ignore_eos": True,
            "logprobs": 0,  # only the log-prob of the sampled token
            "prompt_logprobs": 0 if self.priority is Priority.SCORE else None,
            "detokenize": False,
        }

    @contextmanager
    def track_in(self, requests: dict[str, "EngineRequest"]) -> Iterator[None]:
        """Registers the request in `requests` while the body runs it.

        Raises:
            BackendCrashed: If `fail` ends the body.
        """
        task = asyncio.current_task()
        assert task is not None
        self.task, requests[self.id] = task, self
        try:
            yield
        except asyncio.CancelledError:
            # Only a cancellation by `fail` alone is a crash; the caller may have canceled, too.
            if self.crash_reason and task.uncancel() == 0:
                raise BackendCrashed(self.crash_reason) from None
            raise
        finally:
            del requests[self.id]

    def fail(self, reason: str = "the engine was stopped") -> None:
        """Ends the request with BackendCrashed."""
        # A second cancellation would count as the caller's.
        if self.task is not None and not self.crash_reason:
            self.crash_reason = reason
            self.task.cancel()

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Appends sampled tokens. Returns whether the early stop ends the request now."""
        sampling, before = self.sampling, len(self.tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        threshold = sampling.early_stop_logprob
        if threshold is None or self.num_kept is not None:
            return False
        decay = sampling.early_stop_decay
        for count, logprob in enumerate(logprobs, before + 1):
            # The sum starts at zero, which would hide the first hundred tokens. Divided by 1 -
            # decay^t it is a weighted mean from the first token on (bias correction, as in Adam).
            self._sum = decay * self._sum + (1.0 - decay) * logprob
            low = self._sum / (1.0 - decay**count) < threshold
            if math.isnan(logprob) or (low and count >= sampling.early_stop_min_tokens):
                self.num_kept = count  # however many tokens arrived at a time
                return True
        return False

    def completion(
        self, reason: str, spans: Iterable[tuple[str, int, int]], cached: int, prompt_logprobs: Sequence[float] = ()
    ) -> Completion:
        """Returns the finished completion.

        Args:
            reason: vLLM's finish reason.
            spans: (version, first token, last token + 1) of each span of one policy version.
            cached: Prompt tokens found in the prefix cache.
            prompt_logprobs: [P - 1], nats, for a request with `Priority.SCORE`.
        """
        versions = np.full(len(self.tokens), self.first_version, np.int32)
        for version, start, end in spans:
            # vLLM reports the version "default" until a version is set.
            versions[start:end] = self.first_version if version == "default" else int(version)
        return Completion(
            tokens=np.array(self.tokens[: self.num_kept], np.int32),
            logprobs=np.array(self.logprobs[: self.num_kept], np.float32),
            versions=versions[: self.num_kept],
            finish_reason=reason if self.num_kept is None else "early_stop",
            cached_prompt_tokens=cached,
            prompt_logprobs=np.array(prompt_logprobs, np.float32) if self.priority is Priority.SCORE else None,
        )


def build_requests(
    prompt: Sequence[int], n: int, sampling: SamplingConfig, seed_index: int, priority: Priority, max_model_len: int
) -> list[EngineRequest]:
    """Returns the `n` requests of a group. Arguments as in `Engine.submit`.

    Raises:
        UsageError: For an empty prompt, n < 1, or more tokens than max_model_len.
    """
    ids: list[int] = np.asarray(prompt).tolist()
    if n < 1:
        raise UsageError(f"sample: n={n}; expected at least 1")
    if not ids:
        raise UsageError(f"sample: prompt {seed_index} is empty; expected at least one token")
    if len(ids) + sampling.max_tokens > max_model_len:
        raise UsageError(
            f"sample: prompt {seed_index} has {len(ids)} tokens, and sampling.max_tokens="
            f"{sampling.max_tokens}: the sum exceeds engine.max_model_len={max_model_len}. Fix: shorten the prompt, lower "
            "sampling.max_tokens or raise engine.max_model_len"
        )
    seeds = group_seeds(sampling.seed, seed_index, n)
    return [EngineRequest(ids, sampling, seed, priority, seed_index, n) for seed in seeds]


class ProcessStatus(Protocol):
    """A process that `call_with_deadline` watches for a crash while it waits."""

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended, with or without a call of `stop`."""
        ...

    def describe_exit(self) -> str:
        """Returns how the process ended, as a phrase for a message."""
        ...


class Backend(ProcessStatus, Protocol):
    """How a replica reaches vLLM: a process, a server, or in-process code (`engine.BACKENDS`).

    After BackendCrashed the replica calls `stop`, and the factory makes another incarnation, which
    gets the weights by `load`. After a ValueError the backend stays in service. Coroutines run in
    the engine's asyncio thread and bound their own waits by the deadlines of the config.
    """

    # In-flight requests by id.
    requests: dict[str, EngineRequest]
    # Time of the last heartbeat (time.monotonic()). The replica pings a backend with requests but
    # without a recent heartbeat.
    last_heartbeat: float
    # Known after `launch`: capacity of the KV cache in tokens, tokens per block, and vocabulary
    # size.
    cache_tokens: int
    block_size: int
    vocab_size: int
    # Sleep level; 0 if the replica is awake.
    sleep_level: int

    @property
    def process_group(self) -> int:
        """Process group to kill when the trainer dies; 0 if the backend has no process."""
        ...

    @property
    def stats_error(self) -> Exception | None:
        """Error in our code that reads the replica's counters; retires the replica."""
        ...

    def configure(self) -> None:
        """Does slow imports and checks the config, in the thread of `Engine.start`.

        Raises:
            ValueError: If the replica refuses the config.
        """

    async def launch(self) -> None:
        """Returns once the replica can take requests; calls `configure` if that was not done.

        Raises:
            BackendCrashed: If the replica does not start.
            ValueError: As `configure`.
        """

    async def generate(self, request: EngineRequest) -> Completion:
        """Runs one request inside `request.track_in` and returns `request.completion`.

        The backend passes tokens to `request.add` as they arrive.

        Raises:
            BackendCrashed: If the replica crashes.
            ValueError: If the replica refuses the request.
        """
        ...

    async def ping(self, deadline_s: float) -> None:
        """Returns once the replica has answered.

        Raises:
            BackendCrashed: Without an answer after `deadline_s` seconds.
            ValueError: If the replica refuses the request.
        """

    async def load(self, buffers: Sequence[Any], version: int) -> tuple[float, float]:
        """Replaces the weights between two steps, wakes a sleeping replica, and sets its version.

        Args:
            buffers: `weight_buffer.WeightBuffer`s, the model's before its adapter's. If empty, only
                the version changes.
            version: Policy version of the tokens sampled from now on.

        Returns:
            Seconds without sampling, and the seconds of loading that they include.

        Raises:
            BackendCrashed: If the replica crashes.
            ValueError: If the replica refuses the weights and continues with the old ones.
        """
        ...

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns `Engine.checksums` of this replica, one dict per worker.

        Raises:
            BackendCrashed: If the replica crashes.
        """
        ...

    async def weight_version(self) -> int:
        """Returns the version of the weights, as the replica reports it.

        Raises:
            BackendCrashed: If the replica crashes.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Frees GPU memory. Level 1 keeps the weights in host memory, level 2 drops them.

        `load` wakes the replica from both levels; after level 2 without the model's buffer it rereads
        the model's files. A replica with its own GPU may ignore the call.

        Raises:
            BackendCrashed: If the replica crashes.
        """

    def kill(self) -> None:
        """Kills the replica without waiting; may be called from any thread."""

    def log_tail(self) -> str:
        """Returns the last lines of the replica's log, for an error message."""
        ...

    async def stop(self) -> None:
        """Ends the process and all of its requests (`EngineRequest.fail`). May be called twice."""


def mark_retrieved(task: asyncio.Future) -> None:
    """Marks the error of a finished task as retrieved."""
    # asyncio prints errors that were never retrieved. The caller of such a task may leave before
    # its end (Ctrl-C, a deadline), and has then reported the reason.
    if not task.cancelled():
        task.exception()


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """Awaits all of `work` and returns the results. If one fails, the others are canceled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.add_done_callback(mark_retrieved)
            task.cancel()


@asynccontextmanager
async def crash_on_timeout(limit_s: float, what: str) -> AsyncIterator[None]:
    """Raises BackendCrashed if the body takes longer than `limit_s` seconds.

    Args:
        limit_s: Deadline in seconds.
        what: What did not happen, for the message: "the sender did not start".
    """
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BackendCrashed(f"{what} within {limit_s:g} s") from None


async def call_with_deadline(backend: ProcessStatus, awaitable: Awaitable[Any], deadline_s: float, name: str) -> Any:
    """Awaits a call into the replica.

    Raises:
        BackendCrashed: After `deadline_s` seconds, or if the replica crashes or the call fails.
        ValueError: As the call.
    """
    # After a crash the call itself never returns, so `backend.is_dead` is polled.
    give_up_at = time.monotonic() + deadline_s
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(mark_retrieved)
    try:
        while True:
            await asyncio.wait({task}, timeout=min(CRASH_POLL_S, deadline_s / 10))
            if task.done():
                return task.result()
            if backend.is_dead:
                raise BackendCrashed(f"{backend.describe_exit()} during {name}")
            if time.monotonic() > give_up_at:
                raise BackendCrashed(f"the engine did not answer {name} within {deadline_s:g} s")
    except (BackendCrashed, ValueError):
        raise
    except Exception as error:  # vLLM wraps errors of its process in a bare Exception
        raise BackendCrashed(f"the engine failed in {name}: {error}") from error
    finally:
        task.cancel()
