"""What all sampler backends share: the protocol `Backend`, a request and its result, a step's counters, and errors."""

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

CRASH_POLL_S = 0.2  # seconds between two looks at an engine that is called

T = TypeVar("T")
OnCompletion = Callable[[int, Completion], None]  # it takes the index of the sample in its group


def derive_seed(seed: int, *parts: int) -> int:
    """A seed of 63 bits for a part of what `seed` stands for, for instance step 3 of a run."""
    # SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) mixes in one part after the other, so that neighboring parts have
    # seeds with nothing in common.
    mask = (1 << 64) - 1
    value = seed & mask
    for part in parts:
        value = (value + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value >> 1


def group_seeds(seed: int | None, group: int, n: int) -> list[int | None]:
    """The seeds of a group's `n` completions; None stays None."""
    # They follow only from the seed and the group's number, whatever else is submitted.
    return [None if seed is None else derive_seed(seed, group, s) for s in range(n)]


class BackendCrashed(RunFailure):
    """The engine is gone, does not answer, or holds half-loaded weights: this life of it is over."""


@dataclass(frozen=True, slots=True)
class EngineStepStats:
    """The engine's counters after one of its steps."""

    usage: float  # share of the KV cache in use
    running: int  # requests
    waiting: int  # requests
    preempted: int  # requests, in this step
    prefix_queries: int  # tokens, in this step
    prefix_hits: int  # tokens, in this step


@dataclass(slots=True)
class EngineRequest:
    """One request, and in a life of the engine what it has sampled until now."""

    prompt: list[int]
    sampling: SamplingConfig
    seed: int | None
    priority: Priority = Priority.SAMPLE  # where it stands in the engine's own queue
    group: int = 0  # its number, for messages
    n: int = 1  # requests of its group, all with this prompt
    # Each life of the engine gets a copy of the request, with an id that is unique in the run.
    id: str = ""
    first_version: int = 0  # label of weights that were never published
    task: asyncio.Task | None = field(default=None, init=False)  # the task that runs it
    lost_reason: str = field(default="", init=False)  # why the engine ended before the request did
    num_kept: int | None = field(default=None, init=False)  # tokens to keep, once the early stop has fired
    tokens: list[int] = field(default_factory=list, init=False)
    logprobs: list[float] = field(default_factory=list, init=False)
    _sum: float = field(default=0.0, init=False)  # of the early stop's running mean

    @property
    def needs_streaming(self) -> bool:
        """Whether tokens are wanted as they come, since an early stop may follow from them."""
        return self.sampling.early_stop_logprob is not None

    def vllm_params(self) -> dict[str, Any]:
        """The arguments of vLLM's `SamplingParams`, here and on a server."""
        sampling = self.sampling
        return {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": self.seed,
            "stop_token_ids": list(sampling.stop_token_ids),
            # A completion ends only with these stops. The tokenizer's end token is one of them where it should end one.
            "ignore_eos": True,
            # Only the log-prob of the sampled token is returned.
            "logprobs": 0,
            "prompt_logprobs": 0 if self.priority is Priority.SCORE else None,
            "detokenize": False,
        }

    @contextmanager
    def track_in(self, requests: dict[str, "EngineRequest"]) -> Iterator[None]:
        """Keeps the request in `calls` while a backend runs it in the body, which `lose` ends with CoreLost."""
        task = asyncio.current_task()
        assert task is not None
        self.task, requests[self.id] = task, self
        try:
            yield
        except asyncio.CancelledError:
            # The caller may have cancelled the task, too. Only a cancellation by `lose` and nobody else is a loss.
            if self.lost_reason and task.uncancel() == 0:
                raise BackendCrashed(self.lost_reason) from None
            raise
        finally:
            del requests[self.id]

    def fail(self, why: str = "the engine was ended") -> None:
        """Ends the request with CoreLost."""
        self.lost_reason = why
        if self.task is not None:
            self.task.cancel()

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Takes what was sampled. Returns whether the early stop ends the request now."""
        sampling, before = self.sampling, len(self.tokens)
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        lowest = sampling.early_stop_logprob
        if lowest is None or self.num_kept is not None:
            return False
        decay = sampling.early_stop_decay
        for count, logprob in enumerate(logprobs, before + 1):
            # The sum starts at zero, which would hide the first hundred tokens. Divided by 1 - decay^t it is a true
            # weighted mean from the first token on.
            self._sum = decay * self._sum + (1.0 - decay) * logprob
            low = self._sum / (1.0 - decay**count) < lowest
            if math.isnan(logprob) or (low and count >= sampling.early_stop_min_tokens):
                # Cut here, the completion does not depend on how many tokens arrive at a time.
                self.num_kept = count
                return True
        return False

    def completion(
        self, reason: str, spans: Iterable[tuple[str, int, int]], cached: int, prompt_logprobs: Sequence[float] = ()
    ) -> Completion:
        """The result.

        Args: spans: (version, first token, last token + 1) of each stretch; cached: prompt tokens from the cache.
        """
        versions = np.full(len(self.tokens), self.first_version, np.int32)
        for version, start, end in spans:
            # vLLM calls the weights "default" until they get a label.
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
    prompt: Sequence[int], n: int, sampling: SamplingConfig, group: int, priority: Priority, max_model_len: int
) -> list[EngineRequest]:
    """The `n` requests of a group. Raises ValueError for what does not fit. Args: as of `Engine.submit`."""
    ids: list[int] = np.asarray(prompt).tolist()
    if n < 1:
        raise UsageError(f"sample: n is {n}; it has to be 1 or more")
    if not ids:
        raise UsageError(f"sample: prompt {group} is empty; it needs at least one token")
    if len(ids) + sampling.max_tokens > max_model_len:
        raise UsageError(
            f"sample: prompt {group} has {len(ids)} tokens, sampling.max_tokens is {sampling.max_tokens}: together more "
            f"than engine.max_model_len = {max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
        )
    return [EngineRequest(ids, sampling, seed, priority, group, n) for seed in group_seeds(sampling.seed, group, n)]


class ProcessStatus(Protocol):
    """What `bounded` watches while it waits: an engine that may die meanwhile."""

    @property
    def is_dead(self) -> bool:
        """Whether this life is over, also when nobody has called `stop`."""
        ...

    def describe_exit(self) -> str:
        """Says how a dead engine ended, in words that fit into a message."""
        ...


class Backend(ProcessStatus, Protocol):
    """One life of an engine, as its lane sees it: what a backend (`engine.BACKENDS`) makes.

    CoreLost ends a life: the lane calls `stop`, and the backend makes another life, which gets the weights by `load`.
    After a ValueError the engine lives on. Coroutines run in the engine's asyncio thread and bound their own waits by
    the deadlines of the config.
    """

    # The requests under way, by their ids.
    requests: dict[str, EngineRequest]
    # When it last gave a sign of life, on time.monotonic(). The lane pings an engine that has requests and gives none.
    last_heartbeat: float
    # Known after `launch`: tokens that the KV cache holds, tokens of one of its blocks, and token ids of the model.
    cache_tokens: int
    block_size: int
    vocab_size: int
    # The level of sleep; 0 when the engine is awake.
    sleep_level: int

    @property
    def process_group(self) -> int:
        """The process group that has to be killed when the trainer dies; 0 when there is none."""
        ...

    @property
    def stats_error(self) -> Exception | None:
        """The error that our own code raised over the engine's counters; with one the lane gives up."""
        ...

    def configure(self) -> None:
        """Imports what is slow and checks the config, in the thread of `Engine.start`. Raises ValueError."""

    async def launch(self) -> None:
        """Returns once the engine can work. Calls `configure` if nobody has. Raises CoreLost, and as `configure`."""

    async def generate(self, request: EngineRequest) -> Completion:
        """Runs one request inside `call.running`, gives `call.add` its tokens as they come, returns `call.completion`.

        Raises CoreLost; ValueError when the engine refuses the request.
        """
        ...

    async def ping(self, deadline_s: float) -> None:
        """Returns once the engine has answered. Raises CoreLost after `deadline_s` seconds; ValueError."""

    async def load(self, buffers: Sequence[Any], version: int) -> tuple[float, float]:
        """Replaces weights between two steps, wakes the engine if it sleeps, and labels what it samples as `version`.

        Args: buffers: `weight_buffer.WeightBuffer`s, the model's before its adapter's; with none, the weights stay.
        Returns: seconds in which nothing was sampled, and seconds of loading among them.
        Raises: CoreLost; ValueError when the engine refuses the weights and goes on with the old ones.
        """
        ...

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns for each worker what `Engine.checksums` does. Raises CoreLost."""
        ...

    async def weight_version(self) -> int:
        """Returns the label of what it samples, from the engine itself. Raises CoreLost."""
        ...

    async def sleep(self, level: int) -> None:
        """Frees GPU memory. Level 1 keeps the weights in host memory, level 2 drops them. Raises CoreLost.

        `load` wakes the engine from either. An engine with a GPU of its own may ignore the call.
        """

    def kill(self) -> None:
        """Ends the engine at once, from any thread and without a wait."""

    def log_tail(self) -> str:
        """Returns the last lines of the engine's log, for the message of an error."""
        ...

    async def stop(self) -> None:
        """Ends this life, which may be over already, and all requests in `calls` (`Call.lose`). May be called twice."""


def mark_retrieved(task: asyncio.Future) -> None:
    """Marks the error of a task that is done as seen."""
    # asyncio prints an error that nobody fetches, with its traceback. The caller of such a task may leave before it
    # ends (Ctrl-C, a deadline), and has then said why.
    if not task.cancelled():
        task.exception()


async def gather_or_cancel(*work: Awaitable[T]) -> list[T]:
    """Awaits all, and returns their results. Where one fails, the others end."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.add_done_callback(mark_retrieved)
            task.cancel()


@asynccontextmanager
async def crash_on_timeout(limit_s: float, what: str) -> AsyncIterator[None]:
    """Raises CoreLost if the body takes longer. Args: what: did not happen then, for the message."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise BackendCrashed(f"{what} within {limit_s:g} s") from None


async def call_with_deadline(backend: ProcessStatus, awaitable: Awaitable[Any], deadline_s: float, name: str) -> Any:
    """Awaits a call into the engine. Raises CoreLost after `deadline_s` seconds, and what the call raises."""
    # By itself the call would never return when the engine dies meanwhile, so `core.dead` is asked again and again.
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
    except Exception as error:  # vLLM wraps what happened in its process in a bare Exception
        raise BackendCrashed(f"the engine failed in {name}: {error}") from error
    finally:
        task.cancel()
