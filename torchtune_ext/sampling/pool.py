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

from torchtune_ext.sampling.calls import Call, Core, CoreLost, OnCompletion, together
from torchtune_ext.sampling.engine_args import engine_configs
from torchtune_ext.sampling.lane import COUNTS, Lane, State
from torchtune_ext.sampling.records import CanaryAnswer, Completion, EngineConfig, EngineFailed, EngineStats
from torchtune_ext.sampling.weight_buffer import Buffers

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pool:
    """Owns the lanes of a run. Coroutines run in the asyncio thread of the engines, all other methods in any."""

    def __init__(
        self,
        config: EngineConfig,
        make_core: Callable[[Lane], Core],
        buffers: Buffers,
        version: int,
        name: str = "engine",
    ):
        """Raises ValueError for more engines than devices.

        Args: make_core: begins a life of a lane; version: label of weights that were never published; name: of an
        engine, in messages.
        """
        self.make_core, self.buffers, self.first_version = make_core, buffers, version
        self.ids = itertools.count()  # of requests
        self.lanes: list[Lane] = []
        for number, each in enumerate(configs := engine_configs(config)):
            self.lanes.append(Lane(self, number, f"the {name}" if len(configs) == 1 else f"{name} {number}", each))
        self._homes: WeakKeyDictionary[object, Lane] = WeakKeyDictionary()  # where the turns of conversations go
        self._prepared, self.begun = 0.0, False  # when the first lives began; whether all have come up once

    # -- who is there -------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[Lane]:
        """The engines that take requests."""
        return [lane for lane in self.lanes if lane.serves]

    @property
    def up(self) -> list[Lane]:
        """The engines that can load weights now."""
        return [lane for lane in self.lanes if lane.up]

    @property
    def left(self) -> list[Lane]:
        """The engines that are not retired."""
        return [lane for lane in self.lanes if lane.state is not State.RETIRED]

    @property
    def version(self) -> int:
        """The newest version of weights that an engine has loaded."""
        return max(lane.version for lane in self.lanes)

    @property
    def cores(self) -> list[Core]:
        """The present lives."""
        # Another thread may ask, while a restart takes a life away: each is read once.
        return [core for lane in self.lanes if (core := lane.core) is not None]

    def others_serve(self, lane: Lane) -> bool:
        """Whether an engine serves besides this one."""
        return any(other is not lane for other in self.serving)

    def changed(self, lane: Lane, served: bool) -> None:
        """Says what became of an engine, which `served` or not, and sends what waits for it to others."""
        others = self.others_serve(lane)
        if lane.closed:
            return
        if lane.state is State.RETIRED and self.left and self.begun:
            why = lane.cause.removeprefix(f"{lane.name} ")
            message = "%s is retired (%s); the run goes on with %d of %d"
            log.warning(message, lane.name, why, len(self.left), len(self.lanes))
        elif lane.state is State.COMING and served and others and lane.requests:
            left = "the other" if len(self.serving) == 1 else f"{len(self.serving)} others"
            log.warning("%s is lost; its requests go to %s meanwhile", lane.name, left)
        # Also what waits for one that was lost while no other served.
        for each in self.lanes:
            if not each.serves and self.others_serve(each):
                each.throttle.withdraw()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Begins the first life of each engine. None is waited for."""
        self._prepared = time.monotonic()
        for lane in self.lanes:
            lane.core = self.make_core(lane)

    async def start(self) -> float:
        """Brings all engines up at once, and returns the seconds since `prepare`. Raises EngineFailed."""
        # Nothing goes on with fewer engines yet: one that cannot come up at the start mostly means a wrong config.
        await asyncio.gather(*(lane.start() for lane in self.lanes))
        for lane in self.lanes:
            await lane.ready()
        self.begun = True
        return time.monotonic() - self._prepared

    def refuse(self) -> None:
        """Kills all engines at once, from any thread, and lets no others come up."""
        for lane in self.lanes:
            lane.closed = True
        # The loop's thread may stand still while an engine comes up. It goes on once that engine is dead.
        for core in self.cores:
            core.kill()

    async def close(self) -> None:
        """Ends the present lives and every wait for an engine. Raises the first error."""
        ends = await asyncio.gather(*(lane.close() for lane in self.lanes), return_exceptions=True)
        for error in ends:
            if error is not None:
                raise error

    # -- work ---------------------------------------------------------------------------------------------------------

    async def draw(
        self,
        calls: Sequence[Call],
        on_completion: OnCompletion = lambda sample, completion: None,
        home: object = None,
        to: Lane | None = None,
    ) -> list[Completion]:
        """Draws a group's completions. Args: as of `Engine.submit`; to: the engine that has to do it; None: any.

        Raises ValueError, EngineFailed, WeightsIncomplete; CoreLost when `to` is lost and others serve.
        """
        lane, unfinished = to or self._home(home) or self._choose(), set(range(len(calls)))
        self._send(home, lane, len(unfinished))

        async def one(sample: int) -> Completion:
            nonlocal lane
            while True:
                at = lane
                try:
                    completion = await at.draw(calls[sample])
                    break
                except (CoreLost, EngineFailed):
                    if to is not None or at.closed or not self.left:
                        raise  # no other engine can do what this one could not
                # The first request that learns of the loss finds the group another engine. The others follow it there.
                if lane is at:
                    lane = self._choose()
                    at.requests -= len(unfinished)
                    self._send(home, lane, len(unfinished))
            # A backend may go on with a request although its group has failed, and was cancelled.
            if sample in unfinished:
                unfinished.remove(sample)
                lane.requests -= 1
                on_completion(sample, completion)
            return completion

        try:
            return await together(*map(one, range(len(calls))))
        finally:
            lane.requests -= len(unfinished)
            unfinished.clear()

    # -- routing ------------------------------------------------------------------------------------------------------
    #
    # A whole group goes to the engine with the fewest unfinished requests: its prompt is computed only once, and the
    # other engines keep their caches for their own groups. The group stays there unless that engine is lost. So do the
    # later turns of its conversations, which begin with what that engine has computed.
    #
    # Routing by a hash of the prompt would ignore the load: in published runs with it, the cache of one engine fell
    # from 98% to 5% hits while three were idle.

    def _home(self, home: object) -> Lane | None:
        """The engine that drew the turns before, if it serves."""
        lane = self._homes.get(home) if home is not None else None
        return lane if lane is not None and lane.serves else None

    def _choose(self) -> Lane:
        """The engine with the fewest requests: one that serves, or else one that may do so later."""
        return min(self.serving or self.left or self.lanes, key=lambda lane: lane.requests)

    def _send(self, home: object, lane: Lane, requests: int) -> None:
        lane.requests += requests
        if home is not None:
            self._homes[home] = lane

    # -- all engines --------------------------------------------------------------------------------------------------

    async def _each(self, work: Callable[[Lane], Awaitable[T]], lanes: Sequence[Lane]) -> dict[Lane, T]:
        """Asks some engines, or else those that come up. Returns the answers, without those of engines that are lost.

        Raises ValueError when one refuses; when none answers, the error of the first.
        """
        # An engine that is lost while another one serves raises CoreLost. It is not waited for: it comes back by
        # itself, and only with the current weights.
        while True:
            lanes = lanes or self.left or self.lanes
            results = await asyncio.gather(*map(work, lanes), return_exceptions=True)
            errors = [result for result in results if isinstance(result, BaseException)]
            answers = {lane: r for lane, r in zip(lanes, results, strict=True) if not isinstance(r, BaseException)}
            if refused := [error for error in errors if isinstance(error, ValueError)]:
                raise refused[0]
            if answers:
                return answers
            if not any(isinstance(error, CoreLost) for error in errors):
                raise errors[0]
            # All were lost, each while another one still served. Some of them come back.
            lanes = self.left

    async def load(self, version: int) -> tuple[float, float]:
        """Brings newly published weights into every engine. Returns the longest pause and loading, in seconds.

        Raises EngineFailed when none takes them, or one that serves was not told; ValueError when one refuses them.
        """
        try:
            times = await self._each(lambda lane: lane.load(), self.up)
        finally:
            for lane in self.serving:
                if lane.version < self.version:
                    lane.become(State.BEHIND, f"it holds version {lane.version}, others {self.version}")
        for lane in times:
            if lane.version < version:
                raise EngineFailed(f"publish: {lane.name} was not told of version {version}; it holds {lane.version}")
        return max(pause for pause, _ in times.values()), max(load for _, load in times.values())

    async def checksums(self) -> list[dict[str, int | None]]:
        """Does what `Engine.checksums` says."""
        sums = await self._each(lambda lane: lane.checksums(), self.serving)
        return [worker for lane in self.lanes if lane in sums for worker in sums[lane]]

    async def sleep(self) -> None:
        """Makes all engines free GPU memory, even those that just come up. Raises EngineFailed when none is left."""
        work = [lane.sleep() for lane in self.left or self.lanes]
        errors = [error for error in await asyncio.gather(*work, return_exceptions=True) if error is not None]
        refused = [error for error in errors if not isinstance(error, EngineFailed)]
        if refused or (errors and not self.left):
            raise (refused or errors)[0]

    async def ask_each(self, groups: Sequence[list[Call]]) -> list[CanaryAnswer]:
        """Does what `Engine.canary` says. Each engine gets groups of its own."""

        async def ask(lane: Lane) -> CanaryAnswer | None:
            try:
                completions = await asyncio.gather(*(self.draw(calls, to=lane) for calls in groups))
                return CanaryAnswer(lane.name, list(completions), await lane.checksums())
            except CoreLost as error:
                message = "%s did not answer the canary (%s): it serves again once it has proven its weights"
                log.warning(message, lane.name, error)
                return None

        answers: list[CanaryAnswer] = []
        # Without an answer, each engine was lost while another one served. Those that have come back are asked.
        while not answers:
            of_lane = await self._each(ask, self.up)
            answers = [answer for lane in self.lanes if (answer := of_lane.get(lane)) is not None]
        return answers

    # -- what it knows ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The counters of the run until now, of all engines."""
        lanes, serving = self.lanes, self.serving
        return EngineStats(
            **{name: sum(lane.counts[name] for lane in lanes) for name in COUNTS},
            max_kv_usage=max(lane.max_usage for lane in lanes),
            running=sum(lane.last_step.running for lane in serving),
            waiting=sum(lane.last_step.waiting for lane in serving),
            concurrency=sum(lane.throttle.limit for lane in serving),
            restarts=sum(lane.restarts for lane in lanes),
            healthy=len(serving),
            retired=len(lanes) - len(self.left),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run should know: the throttles' findings, one engine after the other."""
        return {"engines": [lane.throttle.controller.state_dict() for lane in self.lanes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from an earlier run's `state_dict`. To be called before anything is sampled."""
        states = state["engines"]
        # If there are more engines now, several share one finding.
        for lane in self.lanes:
            lane.throttle.controller.load_state_dict(states[lane.number % len(states)])
