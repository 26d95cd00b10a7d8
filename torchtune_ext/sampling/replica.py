"""One engine of a run: its requests and its lives. It is started, watched, and restarted with the current weights.

Requests under way are repeated with the same seeds, by another engine where one serves. After `max_failures` failures
in a row the engine is retired (docs/sampling.md, "When the engine fails").
"""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import wraps
from typing import Any, Protocol

from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.backend import Backend, BackendCrashed, EngineRequest, EngineStepStats, mark_retrieved
from torchtune_ext.sampling.engine_args import DEFAULT_MAX_NUM_SEQS
from torchtune_ext.sampling.throttle import ConcurrencyController, Throttle
from torchtune_ext.sampling.types import Completion, EngineConfig, EngineFailed, Priority, WeightsIncomplete
from torchtune_ext.sampling.weight_buffer import WeightBuffer, WeightBuffers, find_wrong_tensors

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.2  # seconds between two looks at the engine, at most
PEER_POLL_S = 0.2  # seconds between two looks at the other engines, while this one comes up
COUNTS = ("prefix_queries", "prefix_hits", "preemptions", "completed", "tokens")  # what is counted over all lives
STALL_FACTOR = 4  # times `probe_deadline_s` without an engine step, and with requests: no single step is as long


class State(Enum):
    """What an engine is good for at the moment."""

    STARTING = (
        "coming"  # its life is over or comes up, and has not proven that it holds the current weights: no requests
    )
    SERVING = "serving"  # it samples
    STALE = "behind"  # it lives, and others have newer weights: no requests until it has loaded them
    RETIRED = "retired"  # it failed too often and is not started again; the cause is kept


def shielded(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., asyncio.Future]:
    """Makes a method run to its end, even if its caller is cancelled or does not await it."""

    # A caller is cancelled by Ctrl-C in the trainer, or by another request of its batch that failed. A restart or an
    # update that broke off there would leave an engine paused, half loaded or never announced, and nobody would notice.
    @wraps(method)
    def run(self: Any, *args: Any) -> asyncio.Future:
        task = asyncio.ensure_future(method(self, *args))
        # asyncio keeps only weak references to tasks.
        self._undisturbed.add(task)
        task.add_done_callback(self._undisturbed.discard)
        task.add_done_callback(mark_retrieved)
        return asyncio.shield(task)

    return run


class ReplicaPool(Protocol):
    """What a lane uses of its `pool.Pool`."""

    make_backend: "Callable[[EngineReplica], Backend]"
    buffers: WeightBuffers
    first_version: int
    has_started: bool
    ids: "itertools.count[int]"

    def others_serve(self, replica: "EngineReplica") -> bool: ...

    def on_state_change(self, replica: "EngineReplica", was_serving: bool) -> None: ...


class EngineReplica:
    """Owns an engine's present life, its throttle and its counters.

    Coroutines and `on_step` run in the asyncio thread of all engines, other methods in any. Any may set `closed`.
    """

    def __init__(self, pool: ReplicaPool, number: int, name: str, config: EngineConfig):
        """Args: pool: the engines of the run; number: place among them; name: in messages."""
        self._pool, self.number, self.name, self.config = pool, number, name, config
        self._make_backend, self._buffers = pool.make_backend, pool.buffers
        self.counts = dict.fromkeys(COUNTS, 0)
        self.max_usage = 0.0  # highest share of the KV cache in use
        self.last_step = EngineStepStats(0.0, 0, 0, 0, 0, 0)
        self.num_requests = 0  # of the groups that the pool has sent here, without those that have ended
        self.throttle = Throttle(
            ConcurrencyController(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS), config.max_concurrency
        )
        self.state = State.STARTING
        self.failure_cause = ""  # of its last change for the worse
        self.backend: Backend | None = None  # the present life; None while there is none
        self.version = pool.first_version  # the version of the weights that the engine holds
        self.restarts = 0  # lives after the first one that came up
        self.failures = 0  # failures in a row, without a finished request between them
        self.error: EngineFailed | None = None  # why we have given up
        self.closed = False  # another thread may set it, to end a restart that is under way
        self._loaded_versions: dict[
            WeightBuffer, int
        ] = {}  # version of what the present life has loaded from each buffer
        self._watch_interval_s = min(WATCH_INTERVAL_S, config.probe_interval_s / 10)
        self._last_progress = time.monotonic()  # the last moment at which no request waited, or one moved on
        self._reports_steps = False  # whether this life has ever reported a step; else nothing follows from its silence
        self._settled = asyncio.Event()  # serves, retired or closed
        self._control = asyncio.Lock()  # one restart or weight update at a time
        self._watching: asyncio.Task | None = None
        self._shielded_tasks: set[asyncio.Future] = set()

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.state is State.SERVING

    @property
    def is_running(self) -> bool:
        """Whether there is a life that can be told to load weights."""
        # One that is coming up loads them by itself.
        return self.state in (State.SERVING, State.STALE)

    def set_state(self, state: State, cause: str = "") -> None:
        """Changes the state; a retired engine stays retired. Args: cause: of a change for the worse."""
        if self.state is State.RETIRED:
            return
        served, self.state, self.failure_cause = self.serves, state, cause or self.failure_cause
        if state in (State.SERVING, State.RETIRED):
            self._settled.set()
        elif not self.closed:  # else those who wait would never hear of it
            self._settled.clear()
        self._pool.on_state_change(self, served)

    def _validate_request(self, request: EngineRequest, backend: Backend) -> None:
        """Sets the first limit by what its group may take. Raises ValueError for ids that the model does not have."""
        # vLLM does not check token ids, and dies of an id that is too large.
        lowest, highest = min(request.prompt), max(request.prompt)
        if not 0 <= lowest <= highest < backend.vocab_size:
            raise UsageError(
                f"sample: prompt {request.group} holds token ids from {lowest} to {highest}, but the model has only the ids 0 to "
                f"{backend.vocab_size - 1}: tokenizer and model do not belong together"
            )
        # The few tokens of a canary say nothing about how long samples get.
        if request.priority is not Priority.CANARY and not self.throttle.controller.is_measured:
            prompt, most = len(request.prompt), request.sampling.max_tokens
            self.throttle.controller.set_initial_limit(
                backend.cache_tokens, prompt, most, request.n, backend.block_size
            )
            self.throttle.admit()

    async def generate(self, request: EngineRequest) -> Completion:
        """Draws one completion, from as many lives of the engine as it takes.

        Raises EngineFailed, WeightsIncomplete, ValueError; CoreLost when this engine was lost and another one serves.
        """
        self._validate_request(request, await self.wait_awake(allow_failover=True))
        if not await self.throttle.acquire(request.priority):
            raise BackendCrashed(f"{self.name} was lost")
        try:
            while True:
                backend = await self.wait_awake(allow_failover=True)
                name = f"{os.getpid()}-{next(self._pool.ids)}"
                try:
                    completion = await backend.generate(
                        replace(request, id=name, first_version=self._pool.first_version)
                    )
                    break
                except BackendCrashed as error:
                    self.restart(backend, str(error))
                    if self._pool.others_serve(self):
                        raise
        finally:
            self.throttle.release()
            # With no request left, the next ones are a new batch for the controller.
            if not self.throttle.num_held:
                self.throttle.controller.start_round()
        self.report_finished()
        self.counts["completed"] += 1
        self.counts["tokens"] += len(completion.tokens)
        if request.priority is not Priority.CANARY:
            self.throttle.controller.on_finished()
            self.throttle.admit()
        return completion

    def report_finished(self) -> None:
        """Notes that a request has finished: the engine works, and the row of failures ends."""
        self.failures, self._last_progress = 0, time.monotonic()

    def on_step(self, step: EngineStepStats) -> None:
        """Takes the counters of one step of the engine."""
        self._last_progress, self._reports_steps = time.monotonic(), True
        self.counts["prefix_queries"] += step.prefix_queries
        self.counts["prefix_hits"] += step.prefix_hits
        self.counts["preemptions"] += step.preempted
        self.max_usage = max(self.max_usage, step.usage)
        self.last_step = step
        self.throttle.controller.observe(
            step.usage, step.running, step.waiting, step.preempted, self.throttle.has_waiters
        )
        self.throttle.admit()

    # -- lives --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Brings the first life up. Its failure is final."""
        backend = self.backend
        assert backend is not None  # since `Pool.prepare`
        async with self._control:
            try:
                await self._bring_up(backend)
            except Exception as error:  # noqa: BLE001 (EngineFailed names it)
                await self._give_up(f"{self.name} did not start: {error}", cause=error)
        self._watching = asyncio.create_task(self._watch())

    async def wait_ready(self, allow_failover: bool = False) -> Backend:
        """Waits for a working engine. Raises EngineFailed; with `elsewhere` CoreLost as soon as another one serves."""
        # Every start is bounded by its own deadlines, so this one may be distant.
        limit = self.config.max_failures * (self.config.start_deadline_s + 4 * self.config.rpc_deadline_s)
        give_up_at = time.monotonic() + limit
        while not self._settled.is_set():
            # At the start all come up, and each has its part of what waits.
            if allow_failover and self._pool.has_started and self._pool.others_serve(self):
                raise BackendCrashed(f"{self.name} was lost")
            if time.monotonic() > give_up_at:
                raise EngineFailed(f"{self.name} was not ready within {limit:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(PEER_POLL_S):
                    await self._settled.wait()
        if self.closed:
            raise EngineFailed("the engine is closed")
        if self.error is not None:
            raise EngineFailed(str(self.error)) from self.error.__cause__
        assert self.backend is not None  # else `_changed` were clear
        return self.backend

    def restart(self, backend: Backend | None, cause: str) -> asyncio.Future:
        """Takes a lost life out of service at once, and begins to replace it. The future need not be awaited."""
        # Several requests notice the same loss. Only the first one finds `core` still in place.
        if backend is not None and backend is self.backend and self.is_running:
            self.set_state(State.STARTING, cause)
        return self._replace(backend, cause)

    @shielded
    async def load(self) -> tuple[float, float]:
        """Brings newly published weights into the engine. Returns the seconds of pause and of loading.

        Raises EngineFailed; CoreLost when it is lost and another one serves; ValueError when it refuses the weights and
        goes on with what it has.
        """
        started, cause = time.monotonic(), ""
        # An engine that is behind becomes ready only by this load.
        if self.state is not State.STALE:
            await self.wait_ready(allow_failover=True)
        async with self._control:
            # One that was found lost meanwhile may still answer. It is about to be replaced, and must not serve again.
            backend = self.backend if self.is_running else None
            if backend is not None:
                try:
                    pause_s, load_s = await self._load_buffers(backend)
                    # A pause of 0 means that a restart has just loaded them.
                    return pause_s or time.monotonic() - started, load_s
                except BackendCrashed as error:
                    cause = f"publication: {error}"
        if backend is not None:
            self.restart(backend, cause)
        await self.wait_ready(allow_failover=True)  # a new engine begins with the weights of the buffers
        return time.monotonic() - started, 0.0

    @shielded
    async def sleep(self) -> None:
        """Makes the engine free its GPU memory, until weights are loaded or somebody samples. Raises EngineFailed."""
        while True:
            backend = self.backend if self.is_running and not self.closed else await self.wait_ready()
            assert backend is not None  # what is up has a core
            try:
                async with self._control:
                    if backend is self.backend and not backend.sleep_level:
                        model = self._buffers.model
                        async with self._buffers.read_lock():
                            # Level 1 keeps a copy of the weights in host memory. If ours are complete there, level 2
                            # saves that copy.
                            await backend.sleep(2 if model.manifest is not None and model.complete else 1)
                    if backend is self.backend:
                        return
            except BackendCrashed as error:
                await self.restart(backend, str(error))  # the new one is awake: once more

    async def checksums(self) -> list[dict[str, int | None]]:
        """The checksums of each worker. Raises EngineFailed; CoreLost when it is lost and another one serves."""
        while True:
            backend = await self.wait_awake(allow_failover=True)
            try:
                return await backend.checksums()
            except BackendCrashed as error:
                self.restart(backend, str(error))

    async def wait_awake(self, allow_failover: bool = False) -> Backend:
        """Waits for an engine that can sample. Raises as `ready`; WeightsIncomplete when no weights can wake it."""
        while True:
            backend = await self.wait_ready(allow_failover)
            if not backend.sleep_level:
                return backend
            await self._wake(backend)

    @shielded
    async def _wake(self, backend: Backend) -> None:
        try:
            async with self._control:
                if backend is self.backend and self.is_running and backend.sleep_level:
                    await self._load_buffers(backend)
        except BackendCrashed as error:
            self.restart(backend, str(error))

    async def close(self) -> None:
        """Ends the present life and every wait for an engine."""
        self.closed = True
        if self._watching is not None:
            self._watching.cancel()
        backend, self.backend = self.backend, None
        try:
            if backend is not None:
                await backend.stop()
        finally:
            self._settled.set()
        if self._shielded_tasks:  # a restart or an update under way sees that its engine is gone
            await asyncio.wait(set(self._shielded_tasks), timeout=5.0)

    @shielded
    async def _replace(self, backend: Backend | None, cause: str) -> None:
        """Ends `core` and makes new lives until one comes up, or `max_failures` have failed in a row."""
        # It raises nothing, since nobody need await it: those who wait in `ready` get the error.
        async with self._control:
            if backend is not self.backend or self.closed or self.error is not None:
                return  # somebody else has done it already
            self.set_state(State.STARTING, cause)
            while True:
                self.failures += 1
                tail = backend.log_tail() if backend is not None else ""
                if self.failures >= self.config.max_failures:
                    why = f"{self.name} failed {self.failures} times in a row, the last time: {cause}"
                    return await self._give_up(why, tail)
                name = self.name.removeprefix("the ")
                again = "in a row: connecting again" if self.config.address else "in a row: starting it again"
                log.warning("%s lost (%s), failure %d %s", name, cause, self.failures, again)
                try:
                    if backend is not None:
                        await backend.stop()
                    backend = self.backend = None
                    # Checked first, before minutes go into an engine that could load nothing.
                    self._buffers.check_complete()
                    if not self.closed:
                        backend = self.backend = self._make_backend(self)
                        await self._bring_up(backend)
                        self.restarts += 1
                        return
                except WeightsIncomplete as error:
                    # Another life would find the same incomplete weights.
                    why = f"{self.name} was lost ({cause}) and cannot be replaced: {error}"
                    return await self._give_up(why, tail, error)
                except Exception as error:  # noqa: BLE001 (EngineFailed names it)
                    # Any error counts as a failure, and EngineFailed names the last one.
                    cause = self.failure_cause = str(error) or repr(error)
                if self.closed:
                    if backend is not None:
                        await backend.stop()
                    return  # `close` has told everybody who waits

    async def _bring_up(self, backend: Backend) -> None:
        """Launches a life and gives it the current weights. Raises CoreLost, WeightsIncomplete, and as `launch`."""
        self._loaded_versions = {}
        # `close` ends the life that it finds, and may have looked before there was this one.
        if self.closed:
            raise BackendCrashed("the engine is closed")
        self._reports_steps = False
        await backend.launch()
        await self._load_buffers(backend)

    async def _load_buffers(self, backend: Backend) -> tuple[float, float]:
        """Brings the engine to what the buffers hold, and is the only way by which weights reach it.

        Returns the seconds of pause and of loading. Raises WeightsIncomplete, and as `Backend.load`.
        """
        was_up = self.is_running
        # The publisher is kept out until the weights are loaded and labeled. The label comes from the buffers, too, so
        # it never names other weights than those.
        async with self._buffers.read_lock():
            published = self._buffers.published
            stale = [buffer for buffer in published if self._loaded_versions.get(buffer) != buffer.version]
            if self._buffers.model in stale or backend.sleep_level == 2:
                # vLLM drops the adapter when a new model comes, and a sleep of level 2 keeps neither.
                stale = published
            version = max((buffer.version for buffer in published), default=self.version)
            times = await backend.load(stale, version)
            for buffer in stale:
                self._loaded_versions[buffer] = buffer.loaded_version = buffer.version
            self.version, self._last_progress = version, time.monotonic()
            if was_up and not self.is_running:
                raise BackendCrashed(self.failure_cause)
            if not self.serves:
                # An engine that answers may still hold old weights, which no sample would show. So it proves them
                # first; nobody can publish meanwhile, so they are still current when it begins to serve.
                await self._verify_weights(backend, published, version)
                self.set_state(State.SERVING)
            return times

    async def _verify_weights(self, backend: Backend, published: list[WeightBuffer], version: int) -> None:
        """Raises CoreLost unless a life holds the current version, and every tensor is the one that was sent."""
        # Before the first publication there is nothing to compare: each life reads the weights from the disk.
        wrong = await find_wrong_tensors(published, backend) if published else None
        held = await backend.weight_version()
        if held != version:
            raise BackendCrashed(f"it holds version {held}, and version {version} is published")
        why = f"it does not hold the weights of version {version} as they were published: {wrong}"
        if wrong is not None:
            raise BackendCrashed(why)

    async def _give_up(self, why: str, tail: str | None = None, cause: Exception | None = None) -> None:
        """Ends the present life for good, and tells all who wait."""
        backend, self.backend = self.backend, None
        tail = backend.log_tail() if tail is None and backend is not None else tail
        self.error = EngineFailed(f"{why}\n--- end of the engine's log ---\n{tail or '(empty)'}")
        self.error.__cause__ = cause
        try:
            if backend is not None:
                await backend.stop()
        except Exception:
            # Those who wait hear why it was given up, and not that its process is slow to end.
            log.warning("%s did not end properly", self.name, exc_info=True)
        finally:
            self.set_state(State.RETIRED, why)

    async def _watch(self) -> None:
        # Nobody awaits this task, so an error of our own would end the watch unseen. It ends the run instead.
        try:
            while not self.closed and self.error is None:
                await asyncio.sleep(self._watch_interval_s)
                await self._check_health()
        except Exception as error:
            log.exception("%s is no longer watched", self.name)
            async with self._control:
                await self._give_up(f"{self.name} is no longer watched: {error!r}", cause=error)

    async def _check_health(self) -> None:
        backend = self.backend
        if backend is None or self._control.locked():
            self._last_progress = time.monotonic()  # a restart or an update watches by itself
        elif backend.stats_error is not None:
            async with self._control:
                await self._give_up(
                    f"{self.name}'s counters could not be taken in: {backend.stats_error!r}", cause=backend.stats_error
                )
        elif backend.is_dead and not backend.sleep_level:
            # One that dies asleep is replaced when it is needed: a new one would take the trainer's GPU memory now.
            await self.restart(backend, backend.describe_exit())
        else:
            await self._check_liveness(backend, time.monotonic())

    async def _check_liveness(self, backend: Backend, now: float) -> None:
        """Finds an engine that has requests, and neither answers nor moves on, to be lost."""
        # A ping proves that the process answers, not that it computes: `_moved` is the time of the last step.
        config, still_s = self.config, now - self._last_progress
        if not backend.requests or backend.sleep_level:
            self._last_progress = now
        elif now - backend.last_heartbeat > config.probe_interval_s:
            try:
                await backend.ping(config.probe_deadline_s)
            except (BackendCrashed, ValueError) as error:
                # A ValueError means that it refuses the ping. `launch` of the next life will say why.
                await self.restart(backend, str(error))
        elif self._reports_steps and still_s > STALL_FACTOR * config.probe_deadline_s:
            await self.restart(backend, f"it answers, but has made no step for {still_s:.0f} s in spite of requests")
