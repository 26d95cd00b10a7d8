"""The engines of a run behind one set of calls: groups are shared out, and weights go to all.

One engine is a pool of one lane. A pool goes on with the engines that are left, and fails when none is.
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
    """Owns the lanes of a run. Coroutines run in the asyncio thread of the engines, all other methods in any."""

    def __init__(
        self,
        config: EngineConfig,
        make_core: Callable[[EngineReplica], Backend],
        buffers: WeightBuffers,
        version: int,
        name: str = "engine",
    ):
        """Raises ValueError for more engines than devices.

        Args: make_core: begins a life of a lane; version: label of weights that were never published; name: of an
        engine, in messages.
        """
        self.make_backend, self.buffers, self.first_version = make_core, buffers, version
        self.ids = itertools.count()  # of requests
        self.replicas: list[EngineReplica] = []
        for number, each in enumerate(configs := engine_configs(config)):
            self.replicas.append(
                EngineReplica(self, number, f"the {name}" if len(configs) == 1 else f"{name} {number}", each)
            )
        self._affinity: WeakKeyDictionary[object, EngineReplica] = (
            WeakKeyDictionary()
        )  # where the turns of conversations go
        self._prepared, self.has_started = 0.0, False  # when the first lives began; whether all have come up once

    # -- who is there -------------------------------------------------------------------------------------------------

    @property
    def serving_replicas(self) -> list[EngineReplica]:
        """The engines that take requests."""
        return [replica for replica in self.replicas if replica.serves]

    @property
    def running_replicas(self) -> list[EngineReplica]:
        """The engines that can load weights now."""
        return [replica for replica in self.replicas if replica.is_running]

    @property
    def active_replicas(self) -> list[EngineReplica]:
        """The engines that are not retired."""
        return [replica for replica in self.replicas if replica.state is not State.RETIRED]

    @property
    def version(self) -> int:
        """The newest version of weights that an engine has loaded."""
        return max(replica.version for replica in self.replicas)

    @property
    def backends(self) -> list[Backend]:
        """The present lives."""
        # Another thread may ask, while a restart takes a life away: each is read once.
        return [backend for replica in self.replicas if (backend := replica.backend) is not None]

    def others_serve(self, replica: EngineReplica) -> bool:
        """Whether an engine serves besides this one."""
        return any(other is not replica for other in self.serving_replicas)

    def on_state_change(self, replica: EngineReplica, was_serving: bool) -> None:
        """Says what became of an engine, which `served` or not, and sends what waits for it to others."""
        if replica.closed:
            return
        if replica.state is State.RETIRED and self.active_replicas and self.has_started:
            why, rest = replica.failure_cause.removeprefix(f"{replica.name} "), len(self.active_replicas)
            log.warning(
                "%s is retired (%s); the run goes on with %d of %d", replica.name, why, rest, len(self.replicas)
            )
        elif replica.state is State.STARTING and was_serving and self.others_serve(replica) and replica.num_requests:
            others_text = "the other" if len(self.serving_replicas) == 1 else f"{len(self.serving_replicas)} others"
            log.warning("%s is lost; its requests go to %s meanwhile", replica.name, others_text)
        # Also what waits for one that was lost while no other served.
        for each in self.replicas:
            if not each.serves and self.others_serve(each):
                each.throttle.withdraw()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def create_backends(self) -> None:
        """Begins the first life of each engine. None is waited for."""
        self._prepared = time.monotonic()
        for replica in self.replicas:
            replica.backend = self.make_backend(replica)

    async def start(self) -> float:
        """Brings all engines up at once, and returns the seconds since `prepare`. Raises EngineFailed."""
        # Nothing goes on with fewer engines yet: one that cannot come up at the start mostly means a wrong config.
        await asyncio.gather(*(lane.start() for lane in self.replicas))
        for replica in self.replicas:
            await replica.wait_ready()
        self.has_started = True
        return time.monotonic() - self._prepared

    def kill_all(self) -> None:
        """Kills all engines at once, from any thread, and lets no others come up."""
        for replica in self.replicas:
            replica.closed = True
        # The loop's thread may stand still while an engine comes up. It goes on once that engine is dead.
        for backend in self.backends:
            backend.kill()

    async def close(self) -> None:
        """Ends the present lives and every wait for an engine. Raises the first error."""
        ends = await asyncio.gather(*(replica.close() for replica in self.replicas), return_exceptions=True)
        for error in filter(None, ends):
            raise error

    # -- work ---------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        requests: Sequence[EngineRequest],
        on_completion: OnCompletion = lambda sample, completion: None,
        affinity_key: object = None,
        target: EngineReplica | None = None,
    ) -> list[Completion]:
        """Draws a group's completions. Args: as of `Engine.submit`; to: the engine that has to do it; None: any.

        Raises ValueError, EngineFailed, WeightsIncomplete; CoreLost when `to` is lost and others serve.
        """
        replica, unfinished = target or self._affine_replica(affinity_key) or self._choose(), set(range(len(requests)))
        self._assign(affinity_key, replica, len(unfinished))

        async def one(sample: int) -> Completion:
            nonlocal replica
            while True:
                current = replica
                try:
                    completion = await current.generate(requests[sample])
                    break
                except (BackendCrashed, EngineFailed):
                    if target is not None or current.closed or not self.active_replicas:
                        raise  # no other engine can do what this one could not
                # The first request that learns of the loss finds the group another engine. The others follow it there.
                if replica is current:
                    replica = self._choose()
                    current.num_requests -= len(unfinished)
                    self._assign(affinity_key, replica, len(unfinished))
            # A backend may go on with a request although its group has failed, and was cancelled.
            if sample in unfinished:
                unfinished.remove(sample)
                replica.num_requests -= 1
                on_completion(sample, completion)
            return completion

        try:
            return await gather_or_cancel(*map(one, range(len(requests))))
        finally:
            replica.num_requests -= len(unfinished)
            unfinished.clear()

    # -- routing ------------------------------------------------------------------------------------------------------
    #
    # A whole group goes to the engine with the fewest unfinished requests: its prompt is computed only once, and the
    # other engines keep their caches for their own groups. The group stays there unless that engine is lost. So do the
    # later turns of its conversations, which begin with what that engine has computed.
    #
    # Routing by a hash of the prompt would ignore the load: in published runs with it, the cache of one engine fell
    # from 98% to 5% hits while three were idle.

    def _affine_replica(self, affinity_key: object) -> EngineReplica | None:
        """The engine that drew the turns before, if it serves."""
        replica = self._affinity.get(affinity_key) if affinity_key is not None else None
        return replica if replica is not None and replica.serves else None

    def _choose(self) -> EngineReplica:
        """The engine with the fewest requests: one that serves, or else one that may do so later."""
        return min(
            self.serving_replicas or self.active_replicas or self.replicas, key=lambda replica: replica.num_requests
        )

    def _assign(self, affinity_key: object, replica: EngineReplica, requests: int) -> None:
        replica.num_requests += requests
        if affinity_key is not None:
            self._affinity[affinity_key] = replica

    # -- all engines --------------------------------------------------------------------------------------------------

    async def _each(
        self, work: Callable[[EngineReplica], Awaitable[T]], replicas: Sequence[EngineReplica]
    ) -> dict[EngineReplica, T]:
        """Asks some engines, or else those that come up. Returns the answers, without those of engines that are lost.

        Raises ValueError when one refuses; when none answers, the error of the first.
        """
        # An engine that is lost while another one serves raises CoreLost. It is not waited for: it comes back by
        # itself, and only with the current weights.
        while True:
            replicas = replicas or self.active_replicas or self.replicas
            results = await asyncio.gather(*map(work, replicas), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            answers = {
                replica: r for replica, r in zip(replicas, results, strict=True) if not isinstance(r, BaseException)
            }
            if refused := [error for error in errors if isinstance(error, ValueError)]:
                raise refused[0]
            if answers:
                return answers
            if not any(isinstance(error, BackendCrashed) for error in errors):
                raise errors[0]
            # All were lost, each while another one still served. Some of them come back.
            replicas = self.active_replicas

    async def load(self, version: int) -> tuple[float, float]:
        """Brings newly published weights into every engine. Returns the longest pause and loading, in seconds.

        Raises EngineFailed when none takes them, or one that serves was not told; ValueError when one refuses them.
        """
        try:
            times = await self._each(lambda lane: lane.load(), self.running_replicas)
        finally:
            for replica in self.serving_replicas:
                if replica.version < self.version:
                    replica.set_state(State.STALE, f"it holds version {replica.version}, others {self.version}")
        for replica in times:
            why = f"publish: {replica.name} was not told of version {version}; it holds {replica.version}"
            if replica.version < version:
                raise EngineFailed(why)
        return max(pause for pause, _ in times.values()), max(load for _, load in times.values())

    async def checksums(self) -> list[dict[str, int | None]]:
        """Does what `Engine.checksums` says."""
        of_lanes = await self._each(lambda replica: replica.checksums(), self.serving_replicas)
        return [worker for sums in of_lanes.values() for worker in sums]

    async def sleep(self) -> None:
        """Makes all engines free GPU memory, even those that just come up. Raises EngineFailed when none is left."""
        work = [replica.sleep() for replica in self.active_replicas or self.replicas]
        errors = [error for error in await asyncio.gather(*work, return_exceptions=True) if error is not None]
        refused = [error for error in errors if not isinstance(error, EngineFailed)]
        if refused or (errors and not self.active_replicas):
            raise (refused or errors)[0]

    async def canary(self, groups: Sequence[list[EngineRequest]]) -> list[CanaryAnswer]:
        """Does what `Engine.canary` says. Each engine gets groups of its own."""

        async def ask(replica: EngineReplica) -> CanaryAnswer | None:
            try:
                completions = await asyncio.gather(*(self.generate(requests, target=replica) for requests in groups))
                return CanaryAnswer(replica.name, list(completions), await replica.checksums())
            except BackendCrashed as error:
                message = "%s did not answer the canary (%s): it serves again once it has proven its weights"
                log.warning(message, replica.name, error)
                return None

        # Without an answer, each engine was lost while another one served. Those that have come back are asked.
        while True:
            of_lanes = await self._each(ask, self.running_replicas)
            if answers := [answer for answer in of_lanes.values() if answer is not None]:
                return answers

    # -- what it knows ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The counters of the run until now, of all engines."""
        replicas, serving = self.replicas, self.serving_replicas
        return EngineStats(
            **{name: sum(lane.counts[name] for lane in replicas) for name in COUNTS},
            max_kv_usage=max(replica.max_usage for replica in replicas),
            running=sum(lane.last_step.running for lane in serving),
            waiting=sum(lane.last_step.waiting for lane in serving),
            concurrency=sum(lane.throttle.limit for lane in serving),
            restarts=sum(lane.restarts for lane in replicas),
            healthy=len(serving),
            retired=len(replicas) - len(self.active_replicas),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run should know: the throttles' findings, one engine after the other."""
        return {"engines": [replica.throttle.controller.state_dict() for replica in self.replicas]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from an earlier run's `state_dict`. To be called before anything is sampled."""
        states = state["engines"]
        # If there are more engines now, several share one finding.
        for replica in self.replicas:
            replica.throttle.controller.load_state_dict(states[replica.number % len(states)])
