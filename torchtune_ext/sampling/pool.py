"""The engine replicas of a run: routes each group to one replica and syncs weights to all.

A pool may have a single replica. It fails only after its last replica is retired.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torchtune_ext.sampling.backend import Backend, BackendCrashed, EngineRequest, OnCompletion, gather_or_cancel
from torchtune_ext.sampling.engine_args import engine_configs
from torchtune_ext.sampling.replica import COUNTS, EngineReplica, State
from torchtune_ext.sampling.types import CanaryAnswer, Completion, EngineConfig, EngineFailed, EngineStats
from torchtune_ext.sampling.weight_buffer import WeightBuffers

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pool:
    """Owns the engine replicas of a run.

    Coroutines run in the engine's asyncio thread, all other methods in any thread.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_backend: Callable[[EngineReplica], Backend],
        buffers: WeightBuffers,
        version: int,
        name: str = "engine",
    ):
        """Creates the replicas; `create_backends` starts their processes.

        Args:
            config: The `engine:` section.
            make_backend: Creates a backend of a replica.
            buffers: The published weights.
            version: Version of weights that were never published.
            name: Name of the engine in messages.

        Raises:
            UsageError: For more replicas than devices.
        """
        self.make_backend, self.buffers, self.first_version = make_backend, buffers, version
        self.ids = itertools.count()  # request ids
        self.replicas: list[EngineReplica] = []
        for number, replica_config in enumerate(configs := engine_configs(config)):
            replica_name = f"the {name}" if len(configs) == 1 else f"{name} replica {number}"
            self.replicas.append(EngineReplica(self, number, replica_name, replica_config))
        # Affinity key -> replica that has the episode's prefix cache.
        self._affinity: WeakKeyDictionary[object, EngineReplica] = WeakKeyDictionary()
        # Time of `create_backends`, and whether all replicas have started once.
        self._start_time, self.has_started = 0.0, False

    # -- availability ------------------------------------------------------------------------------

    @property
    def serving_replicas(self) -> list[EngineReplica]:
        """Replicas that take requests."""
        return [replica for replica in self.replicas if replica.serves]

    @property
    def running_replicas(self) -> list[EngineReplica]:
        """Replicas that can load weights now."""
        return [replica for replica in self.replicas if replica.is_running]

    @property
    def active_replicas(self) -> list[EngineReplica]:
        """Replicas that are not retired."""
        return [replica for replica in self.replicas if replica.state is not State.RETIRED]

    @property
    def version(self) -> int:
        """Newest policy version that a replica has loaded."""
        return max(replica.version for replica in self.replicas)

    @property
    def backends(self) -> list[Backend]:
        """Current backends."""
        # A restart may clear `replica.backend` while another thread reads it, so it is read once.
        return [backend for replica in self.replicas if (backend := replica.backend) is not None]

    def others_serve(self, replica: EngineReplica) -> bool:
        """Whether another replica serves."""
        return any(other is not replica for other in self.serving_replicas)

    def on_state_change(self, replica: EngineReplica, was_serving: bool) -> None:
        """Logs a state change and lets other replicas take the waiting requests.

        Args:
            replica: The replica whose state has changed.
            was_serving: Whether it served before.
        """
        if replica.closed:
            return
        if replica.state is State.RETIRED and self.active_replicas and self.has_started:
            log.warning(
                "%s: retired (%s); the run continues with %d of %d replicas",
                replica.log_name,
                replica.failure_cause.removeprefix(f"{replica.name} "),
                len(self.active_replicas),
                len(self.replicas),
            )
        elif replica.state is State.STARTING and was_serving and self.others_serve(replica) and replica.num_requests:
            message = "%s: crashed; %d other %s its requests until it serves again"
            num_serving = len(self.serving_replicas)
            serve = "replica serves" if num_serving == 1 else "replicas serve"
            log.warning(message, replica.log_name, num_serving, serve)
        # Reject the waiters of all replicas that do not serve, including replicas that crashed while
        # no other replica served. Their requests then move to a serving replica.
        for waiting_replica in self.replicas:
            if not waiting_replica.serves and self.others_serve(waiting_replica):
                waiting_replica.throttle.reject_waiters()

    # -- start and close ---------------------------------------------------------------------------

    async def create_backends(self) -> None:
        """Starts the first process of each replica without waiting."""
        self._start_time = time.monotonic()
        for replica in self.replicas:
            replica.backend = self.make_backend(replica)

    async def start(self) -> float:
        """Starts all replicas concurrently. Returns the seconds since `create_backends`.

        Raises:
            EngineFailed: If a replica does not start.
        """
        # At the start every replica must come up: a failure here usually means a wrong config.
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        for replica in self.replicas:
            await replica.wait_ready()
        self.has_started = True
        return time.monotonic() - self._start_time

    def kill_all(self) -> None:
        """Kills all backends and prevents restarts; may be called from any thread."""
        for replica in self.replicas:
            replica.closed = True
        # The start of a backend may block the loop's thread. Killing the backend unblocks it.
        for backend in self.backends:
            backend.kill()

    async def close(self) -> None:
        """Stops all backends and ends every wait for a replica. Raises the first error."""
        results = await asyncio.gather(*(replica.close() for replica in self.replicas), return_exceptions=True)
        for error in filter(None, results):
            raise error

    # -- requests ----------------------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[EngineRequest],
        on_completion: OnCompletion = lambda sample_index, completion: None,
        affinity_key: object = None,
        target: EngineReplica | None = None,
    ) -> list[Completion]:
        """Generates a group's completions.

        Args:
            requests: The group's requests.
            on_completion: As in `Engine.submit`.
            affinity_key: As in `Engine.submit`.
            target: The replica that must run the requests; None: any.

        Raises:
            ValueError, EngineFailed, WeightsIncomplete: As `EngineReplica.generate`.
            BackendCrashed: If `target` crashes while others serve.
        """
        replica = target or self._affine_replica(affinity_key) or self._choose()
        unfinished = set(range(len(requests)))
        self._assign(affinity_key, replica, len(unfinished))

        async def generate_one(sample_index: int) -> Completion:
            nonlocal replica
            while True:
                current = replica
                try:
                    completion = await current.generate(requests[sample_index])
                    break
                except (BackendCrashed, EngineFailed):
                    if target is not None or current.closed or not self.active_replicas:
                        raise  # no other replica can take the request
                # The first failed request moves its group to another replica. The others follow.
                if replica is current:
                    replica = self._choose()
                    current.num_requests -= len(unfinished)
                    self._assign(affinity_key, replica, len(unfinished))
            # A backend may finish a request although its group has failed and was canceled.
            if sample_index in unfinished:
                unfinished.remove(sample_index)
                replica.num_requests -= 1
                on_completion(sample_index, completion)
            return completion

        try:
            return await gather_or_cancel(*map(generate_one, range(len(requests))))
        finally:
            replica.num_requests -= len(unfinished)
            unfinished.clear()

    # -- routing -----------------------------------------------------------------------------------
    #
    # A whole group goes to the replica with the fewest unfinished requests: its prompt is computed
    # only once, and the other replicas keep their caches for their own groups. The group stays
    # there unless that replica crashes. The later turns of its episodes stay there, too,
    # because their prefix is in that replica's cache.
    #
    # Routing by a hash of the prompt would ignore the load: with consistent hashing, the cache hit
    # rate of one replica fell from 98% to 5% while three replicas were idle (prime-rl, pull request
    # 3255).

    def _affine_replica(self, affinity_key: object) -> EngineReplica | None:
        """Returns the replica that ran the episode's previous turns, if it serves."""
        replica = self._affinity.get(affinity_key) if affinity_key is not None else None
        return replica if replica is not None and replica.serves else None

    def _choose(self) -> EngineReplica:
        """Returns the serving replica with the fewest requests, else one that may serve later."""
        return min(
            self.serving_replicas or self.active_replicas or self.replicas, key=lambda replica: replica.num_requests
        )

    def _assign(self, affinity_key: object, replica: EngineReplica, requests: int) -> None:
        replica.num_requests += requests
        if affinity_key is not None:
            self._affinity[affinity_key] = replica

    # -- all replicas ------------------------------------------------------------------------------

    async def _call_replicas(
        self, work: Callable[[EngineReplica], Awaitable[T]], replicas: Sequence[EngineReplica]
    ) -> dict[EngineReplica, T]:
        """Calls `work` on `replicas`.

        If `replicas` is empty, waits for all non-retired replicas to start and uses these.

        Returns:
            Replica -> result, without the replicas that crashed.

        Raises:
            ValueError: If a replica refuses the call.
            Exception: The error of the first replica, if every call fails.
        """
        # A replica that crashes while another one serves raises BackendCrashed. The call does not
        # wait for its restart, because a restarted replica serves only with the current weights.
        while True:
            replicas = replicas or self.active_replicas or self.replicas
            results = await asyncio.gather(*map(work, replicas), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            returned = {
                replica: r for replica, r in zip(replicas, results, strict=True) if not isinstance(r, BaseException)
            }
            if refusals := [error for error in errors if isinstance(error, ValueError)]:
                raise refusals[0]
            if returned:
                return returned
            if not any(isinstance(error, BackendCrashed) for error in errors):
                raise errors[0]
            # All replicas crashed, each while another one still served. Retry after their restart.
            replicas = self.active_replicas

    async def load(self, version: int) -> tuple[float, float]:
        """Loads newly published weights into every replica.

        Returns:
            Longest pause and longest loading time, in seconds.

        Raises:
            EngineFailed: If no replica loads the weights, or a serving replica still has older ones.
            ValueError: If a replica refuses the weights.
        """
        try:
            times = await self._call_replicas(lambda replica: replica.load(), self.running_replicas)
        finally:
            for replica in self.serving_replicas:
                if replica.version < self.version:
                    replica.set_state(State.STALE, f"it holds version {replica.version}, others {self.version}")
        for replica in times:
            if replica.version < version:
                raise EngineFailed(
                    f"publish: {replica.name} did not load version {version}; it holds version {replica.version}"
                )
        return max(pause for pause, _ in times.values()), max(load for _, load in times.values())

    async def checksums(self) -> list[dict[str, int | None]]:
        """Implements `Engine.checksums`."""
        by_replica = await self._call_replicas(lambda replica: replica.checksums(), self.serving_replicas)
        return [worker for sums in by_replica.values() for worker in sums]

    async def sleep(self) -> None:
        """Frees the GPU memory of all replicas, also of starting ones.

        Raises:
            EngineFailed: If all replicas are retired.
        """
        work = [replica.sleep() for replica in self.active_replicas or self.replicas]
        errors = [error for error in await asyncio.gather(*work, return_exceptions=True) if error is not None]
        refusals = [error for error in errors if not isinstance(error, EngineFailed)]
        if refusals or (errors and not self.active_replicas):
            raise (refusals or errors)[0]

    async def sample_canary(self, group_requests: Sequence[list[EngineRequest]]) -> list[CanaryAnswer]:
        """Implements `Engine.sample_canary`. Every replica runs all groups."""

        async def sample(replica: EngineReplica) -> CanaryAnswer | None:
            try:
                completions = await asyncio.gather(*(self.generate(r, target=replica) for r in group_requests))
                return CanaryAnswer(replica.name, list(completions), await replica.checksums())
            except BackendCrashed as error:
                message = "%s: crashed during the canary (%s); it serves again after its weights are verified"
                log.warning(message, replica.log_name, error)
                return None

        # Without an answer, each replica crashed while another one served. Repeat after the restarts.
        while True:
            by_replica = await self._call_replicas(sample, self.running_replicas)
            if answers := [answer for answer in by_replica.values() if answer is not None]:
                return answers

    # -- counters and state ------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Returns the counters of all replicas since the start of the run."""
        replicas, serving = self.replicas, self.serving_replicas
        return EngineStats(
            **{name: sum(replica.counts[name] for replica in replicas) for name in COUNTS},
            max_kv_usage=max(replica.max_usage for replica in replicas),
            running=sum(replica.last_step.running for replica in serving),
            waiting=sum(replica.last_step.waiting for replica in serving),
            concurrency=sum(replica.throttle.limit for replica in serving),
            restarts=sum(replica.restarts for replica in replicas),
            serving=len(serving),
            retired=len(replicas) - len(self.active_replicas),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a resumed run: the throttle's measured limit of each replica."""
        return {"replicas": [replica.throttle.controller.state_dict() for replica in self.replicas]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores an earlier run's `state_dict`. Call it before the first request."""
        states = state["replicas"] if "replicas" in state else state["engines"]  # key of an earlier commit
        # If there are more replicas now, several start from the same state.
        for replica in self.replicas:
            replica.throttle.controller.load_state_dict(states[replica.number % len(states)])
