"""The engine replicas of a run: routes each group to one replica and syncs weights to all.

A pool may have a single replica. It fails only after its last replica is retired.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torchtune_ext.sampling.backend import Backend, EngineRequest, OnCompletion, gather_or_cancel
from torchtune_ext.sampling.engine_args import engine_configs
from torchtune_ext.sampling.replica import COUNTS, EngineReplica, ReplicaLost, State
from torchtune_ext.sampling.types import CanaryAnswer, Completion, EngineConfig, EngineFailed, EngineStats
from torchtune_ext.sampling.weight_buffer import WeightBuffers

log = logging.getLogger(__name__)

T = TypeVar("T")


class GroupKey:
    """Affinity key of the requests of a group."""


class Pool:
    """Owns the replicas. Coroutines run in the engine's asyncio thread, the rest in any thread."""

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
        # Affinity key -> replica that has the prefix cache of the group or episode.
        self._affinity: WeakKeyDictionary[object, EngineReplica] = WeakKeyDictionary()
        self._start_time = 0.0  # time of `create_backends`
        self.changed = asyncio.Condition()  # notified of each change of a replica's state
        self.error: EngineFailed | None = None  # why the last retired replica was retired
        # Every start has its own deadlines, so this timeout may be generous.
        self._wait_timeout_s = config.max_failures * (config.start_deadline_s + 4 * config.rpc_deadline_s)
        self._name = f"the {name}"

    # -- availability ------------------------------------------------------------------------------

    @property
    def serving_replicas(self) -> list[EngineReplica]:
        """Replicas that generate completions."""
        return [replica for replica in self.replicas if replica.serves]

    @property
    def running_replicas(self) -> list[EngineReplica]:
        """Replicas that can load weights now."""
        return [replica for replica in self.replicas if replica.is_running]

    @property
    def active_replicas(self) -> list[EngineReplica]:
        """Replicas that are neither retired nor closed."""
        return [replica for replica in self.replicas if replica.is_active]

    @property
    def accepting_replicas(self) -> list[EngineReplica]:
        """Replicas that the pool may send requests to."""
        return [replica for replica in self.replicas if replica.accepts_requests]

    @property
    def version(self) -> int:
        """Newest policy version that a replica has loaded."""
        return max(replica.version for replica in self.replicas)

    @property
    def backends(self) -> list[Backend]:
        # A restart may clear `replica.backend` while another thread reads it, so it is read once.
        return [backend for replica in self.replicas if (backend := replica.backend) is not None]

    def others_accept(self, replica: EngineReplica) -> bool:
        """Whether another replica accepts requests."""
        return any(other is not replica for other in self.accepting_replicas)

    def on_state_change(self, replica: EngineReplica, previous: State) -> None:
        """Logs a state change.

        Args:
            replica: The replica whose state has changed.
            previous: Its state before.
        """
        if replica.state is State.RETIRED:
            self.error = replica.error
            if self.active_replicas and previous is not State.STARTING:
                log.warning(
                    "%s: retired (%s); the run continues with %d of %d replicas",
                    replica.log_name,
                    replica.failure_cause.removeprefix(f"{replica.name} "),
                    len(self.active_replicas),
                    len(self.replicas),
                )
        num_serving = len(self.serving_replicas)
        if previous is State.SERVING and replica.state is State.RESTARTING and num_serving and replica.num_requests:
            message = "%s: crashed; %d other %s its requests until it serves again"
            serve = "replica serves" if num_serving == 1 else "replicas serve"
            log.warning(message, replica.log_name, num_serving, serve)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until the states of the replicas meet a condition.

        Raises:
            EngineFailed: If the engine is closed, no replica is left, or the wait takes too long.
        """
        if not condition():
            try:
                async with asyncio.timeout(self._wait_timeout_s), self.changed:
                    await self.changed.wait_for(lambda: condition() or not self.active_replicas)
            except TimeoutError:
                raise EngineFailed(f"{self._name} was not ready within {self._wait_timeout_s:g} s") from None
        if not condition():
            if self.error is None or any(replica.state is State.CLOSED for replica in self.replicas):
                raise EngineFailed("the engine is closed")
            raise EngineFailed(str(self.error)) from self.error.__cause__

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
        await self.wait_for(lambda: all(replica.state in (State.SERVING, State.RETIRED) for replica in self.replicas))
        for error in filter(None, (replica.error for replica in self.replicas)):
            raise error
        return time.monotonic() - self._start_time

    def kill_all(self) -> None:
        """Kills all backends and prevents restarts; may be called from any thread."""
        for replica in self.replicas:
            replica.set_state(State.CLOSED)
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
        self, request: EngineRequest, affinity_key: object = None, target: EngineReplica | None = None
    ) -> Completion:
        """Generates one completion, and repeats the request after ReplicaLost.

        Args:
            request: The request.
            affinity_key: As in `Engine.submit`.
            target: The replica that must run the request; None: any.

        Raises:
            EngineFailed: If no replica can be restarted.
            ValueError, WeightsIncomplete: As `EngineReplica.generate`.
            ReplicaLost: If `target` crashes while other replicas accept requests.
        """
        while True:
            await self.wait_for(lambda: bool(self.accepting_replicas))
            replica = target or self._route(affinity_key)
            try:
                return await replica.generate(request)
            except ReplicaLost:
                if target is not None and self.others_accept(target):
                    raise

    async def generate_group(
        self,
        requests: Sequence[EngineRequest],
        on_completion: OnCompletion = lambda sample_index, completion: None,
        affinity_key: object = None,
        target: EngineReplica | None = None,
    ) -> list[Completion]:
        """Generates a group's completions. Arguments as in `Engine.submit`. Raises as `generate`."""
        key = GroupKey() if affinity_key is None else affinity_key

        async def generate_one(sample_index: int) -> Completion:
            completion = await self.generate(requests[sample_index], key, target)
            task = asyncio.current_task()
            # A backend may finish a request although its group has failed and was canceled.
            if task is not None and not task.cancelling():
                on_completion(sample_index, completion)
            return completion

        return await gather_or_cancel(*map(generate_one, range(len(requests))))

    # -- routing -----------------------------------------------------------------------------------
    #
    # A whole group goes to the replica with the fewest unfinished requests: its prompt is computed
    # only once, and the other replicas keep their caches for their own groups. The group stays
    # there unless that replica crashes; the first of its lost requests then chooses another one. The
    # later turns of its episodes stay there, too, because their prefix is in that replica's cache.
    #
    # Routing by a hash of the prompt would ignore the load: with consistent hashing, the cache hit
    # rate of one replica fell from 98% to 5% while three were idle (prime-rl, pull request 3255).

    def _route(self, affinity_key: object) -> EngineReplica:
        """Returns the replica of the affinity key if it accepts requests, else another one."""
        if affinity_key is None:
            return self._choose()
        replica = self._affinity.get(affinity_key)
        if replica is None or not replica.accepts_requests:
            replica = self._affinity[affinity_key] = self._choose()
        return replica

    def _choose(self) -> EngineReplica:
        """Returns the serving replica with the fewest requests; during the first start, any replica."""
        return min(self.serving_replicas or self.accepting_replicas, key=lambda replica: replica.num_requests)

    # -- all replicas ------------------------------------------------------------------------------

    async def _call_replicas(
        self, work: Callable[[EngineReplica], Awaitable[T]], choose: Callable[[], list[EngineReplica]]
    ) -> dict[EngineReplica, T]:
        """Calls `work` on the chosen replicas, once there are any; repeats it if all crash.

        Returns:
            Replica -> result, without the replicas that crashed.

        Raises:
            ValueError: If a replica refuses the call.
            Exception: The error of the first replica, if every call fails.
        """
        # The call does not wait for the restart of a crashed replica while others return, because a
        # restarted replica serves only with the current weights.
        while True:
            await self.wait_for(lambda: bool(choose()))
            replicas = choose()
            results = await asyncio.gather(*map(work, replicas), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            for error in errors:
                if isinstance(error, ValueError):
                    raise error
            if len(errors) < len(replicas):
                pairs = zip(replicas, results, strict=True)
                return {replica: result for replica, result in pairs if not isinstance(result, BaseException)}
            if not any(isinstance(error, ReplicaLost) for error in errors):
                raise errors[0]

    async def load(self, version: int) -> tuple[float, float]:
        """Loads newly published weights into every replica.

        Returns:
            Longest pause and longest loading time, in seconds.

        Raises:
            EngineFailed: If no replica loads the weights, or a serving replica still has older ones.
            ValueError: If a replica refuses the weights.
        """
        start_time = time.monotonic()

        async def load_into(replica: EngineReplica) -> tuple[float, float]:
            pause_s, load_s = await replica.load()
            # A pause of 0 means that a restart has just loaded the weights.
            return pause_s or time.monotonic() - start_time, load_s

        try:
            times = await self._call_replicas(load_into, lambda: self.running_replicas)
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
        by_replica = await self._call_replicas(EngineReplica.checksums, lambda: self.serving_replicas)
        return [worker for sums in by_replica.values() for worker in sums]

    async def sleep(self) -> None:
        """Frees the GPU memory of all replicas, also of starting ones.

        Raises:
            EngineFailed: If all replicas are retired.
        """

        async def put_to_sleep(replica: EngineReplica) -> None:
            while True:
                await self.wait_for(lambda: replica.is_running or not replica.is_active)
                if not replica.is_active:
                    return
                with suppress(ReplicaLost):  # the restarted backend is awake
                    return await replica.sleep()

        results = await asyncio.gather(*map(put_to_sleep, self.replicas), return_exceptions=True)
        for error in filter(None, results):
            raise error
        await self.wait_for(lambda: bool(self.active_replicas))

    async def sample_canary(self, group_requests: Sequence[list[EngineRequest]]) -> list[CanaryAnswer]:
        """Implements `Engine.sample_canary`. Every replica runs all groups."""

        async def sample(replica: EngineReplica) -> CanaryAnswer:
            try:
                groups = (self.generate_group(requests, target=replica) for requests in group_requests)
                return CanaryAnswer(replica.name, await asyncio.gather(*groups), await replica.checksums())
            except ReplicaLost as error:
                if self.others_accept(replica):
                    message = "%s: crashed during the canary (%s); it serves again after its weights are verified"
                    log.warning(message, replica.log_name, error)
                raise

        return list((await self._call_replicas(sample, lambda: self.serving_replicas)).values())

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
            retired=sum(replica.state is State.RETIRED for replica in replicas),
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
