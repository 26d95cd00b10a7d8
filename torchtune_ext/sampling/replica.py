"""One replica of the engine: its requests, health checks, and restarts with the current weights.

Each call is one attempt: it raises ReplicaLost if the replica does not serve or crashes, and the pool
repeats it, with the same seeds. After `max_failures` failures in a row the replica is retired
(docs/how_to/engines.md, "Failures and restarts").
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from functools import wraps
from typing import Any, Protocol

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.sampling.backend import Backend, BackendCrashed, EngineRequest, EngineStepStats, mark_retrieved
from torchtune_ext.sampling.engine_args import LARGE_GPU_BYTES, default_max_num_seqs, local_gpu_bytes, on_cpu
from torchtune_ext.sampling.throttle import ConcurrencyController, Throttle
from torchtune_ext.sampling.types import Completion, EngineConfig, EngineFailed, Priority, WeightsIncomplete
from torchtune_ext.sampling.weight_buffer import WeightBuffer, WeightBuffers, find_differing_tensors

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.2  # longest time between two health checks, seconds
COUNTS = ("prefix_queries", "prefix_hits", "preemptions", "completed", "tokens")  # kept across restarts
# A replica with requests has stalled after this many times `probe_deadline_s` without a step. No
# single step takes that long.
STALL_FACTOR = 4


class State(Enum):
    """Availability of a replica. `Pool.wait_for` waits for a change."""

    STARTING = "starting"  # first start; the requests that the pool sends here wait for its end
    SERVING = "serving"  # generates completions
    STALE = "stale"  # running, but others have newer weights: takes no requests until it has loaded them
    RESTARTING = "restarting"  # crashed: takes no requests until a new backend's weights are verified
    RETIRED = "retired"  # failed too often and is not restarted; `error` holds the cause
    CLOSED = "closed"  # `Engine.close` was called


class ReplicaLost(RunFailure):
    """The replica does not serve, or crashed during the call. It restarts without its caller."""


def shielded(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., asyncio.Future]:
    """Runs a method to its end, even if its caller is canceled or does not await it."""

    # Ctrl-C in the trainer, or another failed request of a batch, cancels the caller. A canceled
    # restart or weight sync would leave a replica paused, half loaded or unused without any error.
    @wraps(method)
    def run(self: Any, *args: Any) -> asyncio.Future:
        task = asyncio.ensure_future(method(self, *args))
        self._shielded_tasks.add(task)  # asyncio keeps only weak references to tasks
        task.add_done_callback(self._shielded_tasks.discard)
        task.add_done_callback(mark_retrieved)
        return asyncio.shield(task)

    return run


class ReplicaPool(Protocol):
    """The part of `pool.Pool` that a replica uses."""

    make_backend: "Callable[[EngineReplica], Backend]"
    buffers: WeightBuffers
    first_version: int
    ids: "itertools.count[int]"
    changed: asyncio.Condition

    def wait_for(self, condition: Callable[[], bool]) -> Awaitable[None]: ...

    def on_state_change(self, replica: "EngineReplica", previous: State) -> None: ...


class EngineReplica:
    """Owns a replica's current backend, its throttle and its counters.

    All methods run in the engine's asyncio thread. Any thread may set the state CLOSED.
    """

    def __init__(self, pool: ReplicaPool, number: int, name: str, config: EngineConfig):
        """Creates a replica without a backend.

        Args:
            pool: The pool of the run.
            number: Index of the replica in the pool.
            name: Name of the replica in messages.
            config: The `engine:` section of this replica.
        """
        self._pool, self.number, self.name, self.config = pool, number, name, config
        self.log_name = name.removeprefix("the ")  # begins log lines: "engine replica 1: crashed"
        self._make_backend, self._buffers = pool.make_backend, pool.buffers
        self.counts = dict.fromkeys(COUNTS, 0)
        self.max_usage = 0.0  # highest fraction of the KV cache in use
        self.last_step = EngineStepStats(0.0, 0, 0, 0, 0, 0)
        self.num_requests = 0  # unfinished requests that the pool has sent here
        self.throttle = Throttle(
            # The GPU of a server is unknown here, and its own queue is the limit.
            ConcurrencyController(
                config.max_num_seqs
                or default_max_num_seqs(LARGE_GPU_BYTES if config.address and not on_cpu() else local_gpu_bytes())
            ),
            config.max_concurrency,
        )
        self.state = State.STARTING
        self._state_lock = threading.Lock()
        self.failure_cause = ""  # cause of the last change to a worse state
        self.backend: Backend | None = None  # current backend; None between two of them
        self.version = pool.first_version  # policy version of the loaded weights
        self.restarts = 0  # successful restarts
        self.failures = 0  # failures in a row, without a finished request between them
        self.error: EngineFailed | None = None  # why the replica was retired
        # Version that the current backend has loaded from each buffer.
        self._loaded_versions: dict[WeightBuffer, int] = {}
        self._watch_interval_s = min(WATCH_INTERVAL_S, config.probe_interval_s / 10)
        self._last_progress = time.monotonic()  # last time without requests, or with an engine step
        # Whether this backend has ever reported a step. Without reports no stall can be detected.
        self._reports_steps = False
        self._has_finished = False  # whether this backend has finished a request
        self._transition_lock = asyncio.Lock()  # one restart or weight sync at a time
        self._watch_task: asyncio.Task | None = None
        self._shielded_tasks: set[asyncio.Future] = set()

    # -- state -------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether the replica generates completions."""
        return self.state is State.SERVING

    @property
    def accepts_requests(self) -> bool:
        """Whether the pool may send requests here; during the first start they wait."""
        return self.state in (State.STARTING, State.SERVING)

    @property
    def is_running(self) -> bool:
        """Whether a running backend can load weights now."""
        # A starting backend loads the weights by itself.
        return self.state in (State.SERVING, State.STALE)

    @property
    def is_active(self) -> bool:
        """Whether the replica is neither retired nor closed."""
        return self.state not in (State.RETIRED, State.CLOSED)

    def set_state(self, state: State, cause: str = "") -> None:
        """Changes the state; a retired or closed replica stays so.

        Args:
            state: The new state.
            cause: Reason for a change to a worse state.
        """
        # Another thread closes the engine, perhaps while the loop's thread is blocked.
        with self._state_lock:
            if not self.is_active:
                return
            previous, self.state = self.state, state
        if state is State.CLOSED:
            return  # `close` wakes the waiters, in the loop's thread
        self.failure_cause = cause or self.failure_cause
        if not self.serves:
            self.throttle.admit(everyone=True)  # `attempt` then raises ReplicaLost
        self._pool.on_state_change(self, previous)
        self._notify()

    @shielded
    async def _notify(self) -> None:
        """Wakes the waits of `Pool.wait_for`."""
        async with self._pool.changed:
            self._pool.changed.notify_all()

    @asynccontextmanager
    async def attempt(self, is_transition: bool = False, prefix: str = "") -> AsyncIterator[Backend]:
        """Yields the backend. If the body raises BackendCrashed, the backend is restarted.

        Args:
            is_transition: Whether the body loads weights or sleeps, under `_transition_lock`: the
                replica may then be stale or asleep. Otherwise it has to serve, and is awake.
            prefix: Begins the cause of the restart.

        Raises:
            ReplicaLost: If the replica does not serve (transition: run), or crashes.
            WeightsIncomplete: If the replica sleeps and no complete weights can wake it.
        """
        if not is_transition and self.backend is not None and self.backend.sleep_level:
            await self._wake()
        backend = self.backend
        if backend is None or not (self.serves or (is_transition and self.is_running)):
            raise ReplicaLost(f"{self.name} crashed")
        try:
            yield backend
        except BackendCrashed as error:
            self.restart(backend, f"{prefix}{error}")
            raise ReplicaLost(str(error)) from error

    # -- requests ----------------------------------------------------------------------------------

    def _check_token_ids(self, request: EngineRequest, backend: Backend) -> None:
        """Raises UsageError for token ids outside of the model's vocabulary."""
        # vLLM does not check token ids, and an id that is too large crashes vLLM.
        lowest, highest = min(request.prompt), max(request.prompt)
        if not 0 <= lowest <= highest < backend.vocab_size:
            raise UsageError(
                f"sample: prompt {request.seed_index} holds token ids from {lowest} to {highest}; "
                f"expected 0 to {backend.vocab_size - 1}, as in the model's vocabulary. Fix: use the model's own tokenizer"
            )

    def _set_initial_limit(self, request: EngineRequest, backend: Backend) -> None:
        """Sets the first concurrency limit from the longest possible completions of a group."""
        # The short canary completions do not predict the length of samples.
        if request.priority is not Priority.CANARY and not self.throttle.controller.is_measured:
            self.throttle.controller.set_initial_limit(
                backend.cache_tokens,
                prompt_tokens=len(request.prompt),
                max_tokens=request.sampling.max_tokens,
                samples=request.n,
                block=backend.block_size,
            )
            self.throttle.admit()

    async def generate(self, request: EngineRequest) -> Completion:
        """Generates one completion.

        Raises:
            ReplicaLost: If the replica does not serve, or crashes.
            WeightsIncomplete: If no complete weights can wake the replica.
            ValueError: If the request is invalid.
        """
        self.num_requests += 1
        try:
            # During the first start every replica keeps its own requests.
            await self._pool.wait_for(lambda: self.state is not State.STARTING)
            # Groups that wait for a slot count in the first limit, too.
            if self.backend is not None and self.serves:
                self._set_initial_limit(request, self.backend)
            await self.throttle.acquire(request.priority)
            try:
                async with self.attempt() as backend:
                    self._check_token_ids(request, backend)
                    self._set_initial_limit(request, backend)
                    request_id = f"{os.getpid()}-{next(self._pool.ids)}"
                    completion = await backend.generate(
                        replace(request, id=request_id, first_version=self._pool.first_version)
                    )
            finally:
                self.throttle.release()
                # If no request is left, the next one starts a new round of the controller.
                if not self.throttle.num_held:
                    self.throttle.controller.start_round()
        finally:
            self.num_requests -= 1
        self.report_finished()
        self.counts["completed"] += 1
        self.counts["tokens"] += len(completion.tokens)
        if request.priority is not Priority.CANARY:
            self.throttle.controller.on_finished()
            self.throttle.admit()
        return completion

    def report_finished(self) -> None:
        """Records a finished request, which resets the count of failures in a row."""
        self.failures, self._last_progress, self._has_finished = 0, time.monotonic(), True

    def on_step(self, step: EngineStepStats) -> None:
        """Adds the counters of one engine step."""
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

    # -- start, restart and weight sync ------------------------------------------------------------

    async def start(self) -> None:
        """Starts the first backend. A failure retires the replica."""
        backend = self.backend
        assert backend is not None  # set by `Pool.create_backends`
        async with self._transition_lock:
            try:
                await self._bring_up(backend)
            except Exception as error:  # noqa: BLE001 (EngineFailed names it)
                await self._retire(f"{self.name} did not start: {error}", cause=error)
        self._watch_task = asyncio.create_task(self._watch())

    def restart(self, backend: Backend, cause: str) -> asyncio.Future:
        """Takes a crashed backend out of service and starts its replacement.

        The returned future need not be awaited.
        """
        # Several requests may report a crash. Only the first one finds `backend` still in place.
        if backend is self.backend and self.is_running:
            # Requests in flight fail before the waiting ones are admitted, so they are repeated first.
            for request in list(backend.requests.values()):
                request.fail(cause)
            self.set_state(State.RESTARTING, cause)
        return self._replace(backend, cause)

    @shielded
    async def load(self) -> tuple[float, float]:
        """Loads newly published weights. Returns the seconds of pause and of loading.

        Both are 0 if a restart has already loaded the weights.

        Raises:
            ReplicaLost: If the replica does not run, or crashes.
            ValueError: If the replica refuses the weights and keeps the old ones.
        """
        # A backend that was reported as crashed while this call waited for the lock may still
        # answer. It is about to be replaced and must not serve again.
        async with self._transition_lock, self.attempt(is_transition=True, prefix="weight sync: ") as backend:
            return await self._load_buffers(backend)

    @shielded
    async def sleep(self) -> None:
        """Frees the replica's GPU memory until the next weight sync or request.

        Raises:
            ReplicaLost: If the replica does not run, or crashes.
        """
        async with self._transition_lock, self.attempt(is_transition=True) as backend:
            if not backend.sleep_level:
                model = self._buffers.model
                async with self._buffers.read_lock():
                    # Level 1 copies the weights into host memory. If the weight buffer already
                    # holds complete weights there, level 2 avoids that copy.
                    is_published = model.manifest is not None and model.complete
                    await backend.sleep(2 if is_published or self.config.sleep == 2 else 1)

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns the checksums of each worker (`Engine.checksums`). Raises as `attempt`."""
        async with self.attempt() as backend:
            return await backend.checksums()

    @shielded
    async def _wake(self) -> None:
        async with self._transition_lock, self.attempt(is_transition=True) as backend:
            if backend.sleep_level:
                await self._load_buffers(backend)

    async def close(self) -> None:
        """Stops the backend and ends every wait for this replica."""
        self.set_state(State.CLOSED)
        self._notify()
        if self._watch_task is not None:
            self._watch_task.cancel()
        backend, self.backend = self.backend, None
        if backend is not None:
            await backend.stop()
        if self._shielded_tasks:  # a running restart or weight sync notices that its backend has ended
            await asyncio.wait(set(self._shielded_tasks), timeout=5.0)

    @shielded
    async def _replace(self, crashed: Backend, cause: str) -> None:
        """Replaces `crashed` until a new one starts, or `max_failures` have failed in a row."""
        # This method raises nothing, since its callers need not await it.
        async with self._transition_lock:
            if crashed is not self.backend or not self.is_active:
                return  # another call has already replaced the backend
            backend: Backend | None = crashed
            while True:
                self.failures += 1
                tail = backend.log_tail() if backend is not None else ""
                if self.failures >= self.config.max_failures:
                    reason = f"{self.name} failed {self.failures} times in a row, the last time: {cause}"
                    return await self._retire(reason, tail)
                action = "reconnecting" if self.config.address else "restarting it"
                message = "%s: crashed (%s), consecutive failure %d: %s"
                log.warning(message, self.log_name, cause, self.failures, action)
                try:
                    if backend is not None:
                        await backend.stop()
                    backend = self.backend = None
                    # Without complete weights a start, which can take minutes, would be useless.
                    self._buffers.check_complete()
                    if self.is_active:
                        backend = self.backend = self._make_backend(self)
                        await self._bring_up(backend)
                        self.restarts += 1
                        return
                except WeightsIncomplete as error:
                    # Another start would find the same incomplete weights.
                    reason = f"{self.name} crashed ({cause}) and cannot be restarted: {error}"
                    return await self._retire(reason, tail, error)
                except Exception as error:  # noqa: BLE001 (EngineFailed names the last one)
                    cause = self.failure_cause = str(error) or repr(error)
                if not self.is_active:
                    if backend is not None:
                        await backend.stop()
                    return  # `close` has woken all waiters

    async def _bring_up(self, backend: Backend) -> None:
        """Launches a backend and loads the current weights.

        Raises:
            BackendCrashed, ValueError: As `Backend.launch` and `Backend.load`.
            WeightsIncomplete: If the last weight sync was interrupted.
        """
        self._loaded_versions = {}
        # `close` may have run before this backend was created, and would then not have stopped it.
        if not self.is_active:
            raise BackendCrashed("the engine is closed")
        self._reports_steps = self._has_finished = False
        await backend.launch()
        await self._load_buffers(backend)

    async def _load_buffers(self, backend: Backend) -> tuple[float, float]:
        """Loads the contents of the buffers. All weights reach the replica through this method.

        Returns:
            Seconds of pause and of loading.

        Raises:
            WeightsIncomplete: If the last weight sync was interrupted.
            BackendCrashed, ValueError: As `Backend.load`.
        """
        was_running = self.is_running
        # The lock keeps the publisher out until the weights are loaded and the version is set. The
        # version comes from the same buffers, so version and weights always match.
        async with self._buffers.read_lock():
            published = self._buffers.published
            buffers_to_load = [b for b in published if self._loaded_versions.get(b) != b.version]
            if self._buffers.model in buffers_to_load or backend.sleep_level == 2:
                # vLLM drops the adapter when it loads a new model, and sleep level 2 drops both.
                buffers_to_load = published
            version = max((buffer.version for buffer in published), default=self.version)
            times = await backend.load(buffers_to_load, version)
            for buffer in buffers_to_load:
                self._loaded_versions[buffer] = buffer.loaded_version = buffer.version
            self.version, self._last_progress = version, time.monotonic()
            if was_running and not self.is_running:
                raise BackendCrashed(self.failure_cause)
            if not self.serves:
                # A backend that answers may still hold old weights, and no sample would show it. So
                # the weights are verified first. The read lock keeps the publisher out, so the
                # weights are still current when the replica begins to serve.
                await self._verify_weights(backend, published, version)
                self.set_state(State.SERVING)
            return times

    async def _verify_weights(self, backend: Backend, published: list[WeightBuffer], version: int) -> None:
        """Raises BackendCrashed unless version and tensor checksums match the published weights."""
        # Before the first weight sync there is nothing to compare: the weights come from the disk.
        differences = await find_differing_tensors(published, backend) if published else None
        backend_version = await backend.weight_version()
        if backend_version != version:
            raise BackendCrashed(f"it holds version {backend_version}, expected the published version {version}")
        if differences is not None:
            raise BackendCrashed(f"its weights differ from the published weights of version {version}: {differences}")

    async def _retire(self, reason: str, tail: str | None = None, cause: Exception | None = None) -> None:
        """Retires the replica and stops the backend."""
        backend = self.backend
        tail = backend.log_tail() if tail is None and backend is not None else tail
        self.error = EngineFailed(f"{reason}\n--- end of the engine's log ---\n{tail or '(empty)'}")
        self.error.__cause__ = cause
        self.set_state(State.RETIRED, reason)
        try:
            if backend is not None:
                await backend.stop()
        except Exception:  # the waiters get the original cause
            log.warning("%s did not end properly", self.name, exc_info=True)
        finally:
            self.backend = None

    async def _watch(self) -> None:
        # An internal error would silently end this task, so it retires the replica.
        try:
            while self.is_active:
                await asyncio.sleep(self._watch_interval_s)
                await self._check_health()
        except Exception as error:
            log.exception("%s: the health check failed", self.name)
            async with self._transition_lock:
                await self._retire(f"{self.name}: the health check failed: {error!r}", cause=error)

    async def _check_health(self) -> None:
        backend = self.backend
        if backend is None or self._transition_lock.locked():
            self._last_progress = time.monotonic()  # a restart or weight sync has its own deadlines
        elif backend.stats_error is not None:
            async with self._transition_lock:
                await self._retire(
                    f"{self.name}: reading its counters failed: {backend.stats_error!r}", cause=backend.stats_error
                )
        elif backend.is_dead and not backend.sleep_level:
            # A sleeping replica is restarted on demand: now the trainer uses its GPU memory.
            await self.restart(backend, backend.describe_exit())
        else:
            await self._check_liveness(backend, time.monotonic())

    async def _check_liveness(self, backend: Backend, now: float) -> None:
        """Restarts a backend that has requests but does not answer or makes no steps."""
        # A ping shows that the process answers. `_last_progress` shows that it computes.
        config, idle_s = self.config, now - self._last_progress
        # The first request compiles some GPU kernels, which blocks every answer.
        ping_deadline_s = max(config.probe_deadline_s, 0.0 if self._has_finished else config.start_deadline_s)
        stall_limit_s = max(STALL_FACTOR * config.probe_deadline_s, ping_deadline_s)
        if not backend.requests or backend.sleep_level:
            self._last_progress = now
        elif now - backend.last_heartbeat > config.probe_interval_s:
            try:
                await backend.ping(ping_deadline_s)
            except (BackendCrashed, ValueError) as error:
                # If vLLM refuses the ping (ValueError), the next `launch` reports why.
                await self.restart(backend, str(error))
        elif self._reports_steps and idle_s > stall_limit_s:
            times = f"no engine step for {idle_s:.0f} s (limit {stall_limit_s:.0f} s)"
            await self.restart(backend, f"stalled: {len(backend.requests)} requests, {times}")
