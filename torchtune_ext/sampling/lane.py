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

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.calls import Call, Core, CoreLost, Step, fetch_error
from torchtune_ext.sampling.engine_args import DEFAULT_MAX_NUM_SEQS
from torchtune_ext.sampling.records import Completion, EngineConfig, EngineFailed, Priority, WeightsIncomplete
from torchtune_ext.sampling.throttle import Controller, Throttle
from torchtune_ext.sampling.weight_buffer import Buffers, WeightBuffer, wrong_tensors

log = logging.getLogger(__name__)

TICK_S = 0.2  # seconds between two looks at the engine, at most
LOOK_S = 0.2  # seconds between two looks at the other engines, while this one comes up
COUNTS = ("prefix_queries", "prefix_hits", "preemptions", "completed", "tokens")  # what is counted over all lives
WEDGED = 4  # times `probe_deadline_s` without an engine step, and with requests: no single step is as long


class State(Enum):
    """What an engine is good for at the moment."""

    COMING = "coming"  # its life is over or comes up, and has not proven that it holds the current weights: no requests
    SERVING = "serving"  # it samples
    BEHIND = "behind"  # it lives, and others have newer weights: no requests until it has loaded them
    RETIRED = "retired"  # it failed too often and is not started again; the cause is kept


def undisturbed(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., asyncio.Future]:
    """Makes a method run to its end, even if its caller is cancelled or does not await it."""

    # A caller is cancelled by Ctrl-C in the trainer, or by another request of its batch that failed. A restart or an
    # update that broke off there would leave an engine paused, half loaded or never announced, and nobody would notice.
    @wraps(method)
    def run(self: Any, *args: Any) -> asyncio.Future:
        task = asyncio.ensure_future(method(self, *args))
        # asyncio keeps only weak references to tasks.
        self._undisturbed.add(task)
        task.add_done_callback(self._undisturbed.discard)
        task.add_done_callback(fetch_error)
        return asyncio.shield(task)

    return run


class Siblings(Protocol):
    """What a lane uses of its `pool.Pool`."""

    make_core: "Callable[[Lane], Core]"
    buffers: Buffers
    first_version: int
    begun: bool
    ids: "itertools.count[int]"

    def others_serve(self, lane: "Lane") -> bool: ...

    def changed(self, lane: "Lane", served: bool) -> None: ...


class Lane:
    """Owns an engine's present life, its throttle and its counters.

    Coroutines and `on_step` run in the asyncio thread of all engines, other methods in any. Any may set `closed`.
    """

    def __init__(self, pool: Siblings, number: int, name: str, config: EngineConfig):
        """Args: pool: the engines of the run; number: place among them; name: in messages."""
        self._pool, self.number, self.name, self.config = pool, number, name, config
        self._make_core, self._buffers = pool.make_core, pool.buffers
        self.counts = dict.fromkeys(COUNTS, 0)
        self.max_usage = 0.0  # highest share of the KV cache in use
        self.last_step = Step(0.0, 0, 0, 0, 0, 0)
        self.requests = 0  # of the groups that the pool has sent here, without those that have ended
        self.throttle = Throttle(Controller(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS), config.max_concurrency)
        self.state = State.COMING
        self.cause = ""  # of its last change for the worse
        self.core: Core | None = None  # the present life; None while there is none
        self.version = pool.first_version  # the version of the weights that the engine holds
        self.restarts = 0  # lives after the first one that came up
        self.failures = 0  # failures in a row, without a finished request between them
        self.failed: EngineFailed | None = None  # why we have given up
        self.closed = False  # another thread may set it, to end a restart that is under way
        self._held: dict[WeightBuffer, int] = {}  # version of what the present life has loaded from each buffer
        self._tick_s = min(TICK_S, config.probe_interval_s / 10)
        self._moved = time.monotonic()  # the last moment at which no request waited, or one moved on
        self._counts_steps = False  # whether this life has ever reported a step; else nothing follows from its silence
        self._changed = asyncio.Event()  # serves, retired or closed
        self._control = asyncio.Lock()  # one restart or weight update at a time
        self._watching: asyncio.Task | None = None
        self._undisturbed: set[asyncio.Future] = set()

    # -- requests -----------------------------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.state is State.SERVING

    @property
    def up(self) -> bool:
        """Whether there is a life that can be told to load weights."""
        # One that is coming up loads them by itself.
        return self.state in (State.SERVING, State.BEHIND)

    def become(self, state: State, cause: str = "") -> None:
        """Changes the state; a retired engine stays retired. Args: cause: of a change for the worse."""
        if self.state is State.RETIRED:
            return
        served, self.state, self.cause = self.serves, state, cause or self.cause
        if state in (State.SERVING, State.RETIRED):
            self._changed.set()
        elif not self.closed:  # else those who wait would never hear of it
            self._changed.clear()
        self._pool.changed(self, served)

    def _expect(self, call: Call, core: Core) -> None:
        """Sets the first limit by what its group may take. Raises ValueError for ids that the model does not have."""
        # vLLM does not check token ids, and dies of an id that is too large.
        lowest, highest = min(call.prompt), max(call.prompt)
        if not 0 <= lowest <= highest < core.vocabulary:
            raise Mistake(
                f"sample: prompt {call.group} holds token ids from {lowest} to {highest}, but the model has only the ids 0 to "
                f"{core.vocabulary - 1}: tokenizer and model do not belong together"
            )
        # The few tokens of a canary say nothing about how long samples get.
        if call.priority is not Priority.CANARY and not self.throttle.controller.known:
            prompt, most = len(call.prompt), call.sampling.max_tokens
            self.throttle.controller.expect(core.cache_tokens, prompt, most, call.n, core.block)
            self.throttle.admit()

    async def draw(self, call: Call) -> Completion:
        """Draws one completion, from as many lives of the engine as it takes.

        Raises EngineFailed, WeightsIncomplete, ValueError; CoreLost when this engine was lost and another one serves.
        """
        self._expect(call, await self.awake(elsewhere=True))
        if not await self.throttle.acquire(call.priority):
            raise CoreLost(f"{self.name} was lost")
        try:
            while True:
                core = await self.awake(elsewhere=True)
                name = f"{os.getpid()}-{next(self._pool.ids)}"
                try:
                    completion = await core.generate(replace(call, id=name, first_version=self._pool.first_version))
                    break
                except CoreLost as error:
                    self.lose(core, str(error))
                    if self._pool.others_serve(self):
                        raise
        finally:
            self.throttle.release()
            # With no request left, the next ones are a new batch for the controller.
            if not self.throttle.held:
                self.throttle.controller.start_round()
        self.report_finished()
        self.counts["completed"] += 1
        self.counts["tokens"] += len(completion.tokens)
        if call.priority is not Priority.CANARY:
            self.throttle.controller.done()
            self.throttle.admit()
        return completion

    def report_finished(self) -> None:
        """Notes that a request has finished: the engine works, and the row of failures ends."""
        self.failures, self._moved = 0, time.monotonic()

    def on_step(self, step: Step) -> None:
        """Takes the counters of one step of the engine."""
        self._moved, self._counts_steps = time.monotonic(), True
        self.counts["prefix_queries"] += step.prefix_queries
        self.counts["prefix_hits"] += step.prefix_hits
        self.counts["preemptions"] += step.preempted
        self.max_usage = max(self.max_usage, step.usage)
        self.last_step = step
        blocked = self.throttle.blocked
        self.throttle.controller.step(step.usage, step.running, step.waiting, step.preempted, blocked)
        self.throttle.admit()

    # -- lives --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Brings the first life up. Its failure is final."""
        core = self.core
        assert core is not None  # since `Pool.prepare`
        async with self._control:
            try:
                await self._bring_up(core)
            except Exception as error:  # noqa: BLE001 (EngineFailed names it)
                await self._give_up(f"{self.name} did not start: {error}", cause=error)
        self._watching = asyncio.create_task(self._watch())

    async def ready(self, elsewhere: bool = False) -> Core:
        """Waits for a working engine. Raises EngineFailed; with `elsewhere` CoreLost as soon as another one serves."""
        # Every start is bounded by its own deadlines, so this one may be distant.
        limit = self.config.max_failures * (self.config.start_deadline_s + 4 * self.config.rpc_deadline_s)
        give_up_at = time.monotonic() + limit
        while not self._changed.is_set():
            # At the start all come up, and each has its part of what waits.
            if elsewhere and self._pool.begun and self._pool.others_serve(self):
                raise CoreLost(f"{self.name} was lost")
            if time.monotonic() > give_up_at:
                raise EngineFailed(f"{self.name} was not ready within {limit:g} s")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
        if self.closed:
            raise EngineFailed("the engine is closed")
        if self.failed is not None:
            raise EngineFailed(str(self.failed)) from self.failed.__cause__
        assert self.core is not None  # else `_changed` were clear
        return self.core

    def lose(self, core: Core | None, cause: str) -> asyncio.Future:
        """Takes a lost life out of service at once, and begins to replace it. The future need not be awaited."""
        # Several requests notice the same loss. Only the first one finds `core` still in place.
        if core is not None and core is self.core and self.up:
            self.become(State.COMING, cause)
        return self._replace(core, cause)

    @undisturbed
    async def load(self) -> tuple[float, float]:
        """Brings newly published weights into the engine. Returns the seconds of pause and of loading.

        Raises EngineFailed; CoreLost when it is lost and another one serves; ValueError when it refuses the weights and
        goes on with what it has.
        """
        started, cause = time.monotonic(), ""
        # An engine that is behind becomes ready only by this load.
        if self.state is not State.BEHIND:
            await self.ready(elsewhere=True)
        async with self._control:
            # One that was found lost meanwhile may still answer. It is about to be replaced, and must not serve again.
            core = self.core if self.up else None
            if core is not None:
                try:
                    pause_s, load_s = await self._load_buffers(core)
                    # A pause of 0 means that a restart has just loaded them.
                    return pause_s or time.monotonic() - started, load_s
                except CoreLost as error:
                    cause = f"publication: {error}"
        if core is not None:
            self.lose(core, cause)
        await self.ready(elsewhere=True)  # a new engine begins with the weights of the buffers
        return time.monotonic() - started, 0.0

    @undisturbed
    async def sleep(self) -> None:
        """Makes the engine free its GPU memory, until weights are loaded or somebody samples. Raises EngineFailed."""
        while True:
            core = self.core if self.up and not self.closed else await self.ready()
            assert core is not None  # what is up has a core
            try:
                async with self._control:
                    if core is self.core and not core.asleep:
                        model = self._buffers.model
                        async with self._buffers.reading():
                            # Level 1 keeps a copy of the weights in host memory. If ours are complete there, level 2
                            # saves that copy.
                            await core.sleep(2 if model.manifest is not None and model.complete else 1)
                    if core is self.core:
                        return
            except CoreLost as error:
                await self.lose(core, str(error))  # the new one is awake: once more

    async def checksums(self) -> list[dict[str, int | None]]:
        """The checksums of each worker. Raises EngineFailed; CoreLost when it is lost and another one serves."""
        while True:
            core = await self.awake(elsewhere=True)
            try:
                return await core.checksums()
            except CoreLost as error:
                self.lose(core, str(error))

    async def awake(self, elsewhere: bool = False) -> Core:
        """Waits for an engine that can sample. Raises as `ready`; WeightsIncomplete when no weights can wake it."""
        while True:
            core = await self.ready(elsewhere)
            if not core.asleep:
                return core
            await self._wake(core)

    @undisturbed
    async def _wake(self, core: Core) -> None:
        try:
            async with self._control:
                if core is self.core and self.up and core.asleep:
                    await self._load_buffers(core)
        except CoreLost as error:
            self.lose(core, str(error))

    async def close(self) -> None:
        """Ends the present life and every wait for an engine."""
        self.closed = True
        if self._watching is not None:
            self._watching.cancel()
        core, self.core = self.core, None
        try:
            if core is not None:
                await core.stop()
        finally:
            self._changed.set()
        if self._undisturbed:  # a restart or an update under way sees that its engine is gone
            await asyncio.wait(set(self._undisturbed), timeout=5.0)

    @undisturbed
    async def _replace(self, core: Core | None, cause: str) -> None:
        """Ends `core` and makes new lives until one comes up, or `max_failures` have failed in a row."""
        # It raises nothing, since nobody need await it: those who wait in `ready` get the error.
        async with self._control:
            if core is not self.core or self.closed or self.failed is not None:
                return  # somebody else has done it already
            self.become(State.COMING, cause)
            while True:
                self.failures += 1
                tail = core.log_tail() if core is not None else ""
                if self.failures >= self.config.max_failures:
                    why = f"{self.name} failed {self.failures} times in a row, the last time: {cause}"
                    return await self._give_up(why, tail)
                name = self.name.removeprefix("the ")
                again = "in a row: connecting again" if self.config.address else "in a row: starting it again"
                log.warning("%s lost (%s), failure %d %s", name, cause, self.failures, again)
                try:
                    if core is not None:
                        await core.stop()
                    core = self.core = None
                    # Checked first, before minutes go into an engine that could load nothing.
                    self._buffers.check_complete()
                    if not self.closed:
                        core = self.core = self._make_core(self)
                        await self._bring_up(core)
                        self.restarts += 1
                        return
                except WeightsIncomplete as error:
                    # Another life would find the same incomplete weights.
                    why = f"{self.name} was lost ({cause}) and cannot be replaced: {error}"
                    return await self._give_up(why, tail, error)
                except Exception as error:  # noqa: BLE001 (EngineFailed names it)
                    # Any error counts as a failure, and EngineFailed names the last one.
                    cause = self.cause = str(error) or repr(error)
                if self.closed:
                    if core is not None:
                        await core.stop()
                    return  # `close` has told everybody who waits

    async def _bring_up(self, core: Core) -> None:
        """Launches a life and gives it the current weights. Raises CoreLost, WeightsIncomplete, and as `launch`."""
        self._held = {}
        # `close` ends the life that it finds, and may have looked before there was this one.
        if self.closed:
            raise CoreLost("the engine is closed")
        self._counts_steps = False
        await core.launch()
        await self._load_buffers(core)

    async def _load_buffers(self, core: Core) -> tuple[float, float]:
        """Brings the engine to what the buffers hold, and is the only way by which weights reach it.

        Returns the seconds of pause and of loading. Raises WeightsIncomplete, and as `Core.load`.
        """
        was_up = self.up
        # The publisher is kept out until the weights are loaded and labeled. The label comes from the buffers, too, so
        # it never names other weights than those.
        async with self._buffers.reading():
            published = self._buffers.published
            stale = [buffer for buffer in published if self._held.get(buffer) != buffer.version]
            if self._buffers.model in stale or core.asleep == 2:
                # vLLM drops the adapter when a new model comes, and a sleep of level 2 keeps neither.
                stale = published
            version = max((buffer.version for buffer in published), default=self.version)
            times = await core.load(stale, version)
            for buffer in stale:
                self._held[buffer] = buffer.loaded = buffer.version
            self.version, self._moved = version, time.monotonic()
            if was_up and not self.up:
                raise CoreLost(self.cause)  # somebody has found it lost meanwhile
            if not self.serves:
                # An engine that answers may still hold old weights, which no sample would show. So it proves them
                # first; nobody can publish meanwhile, so they are still current when it begins to serve.
                await self._prove(core, published, version)
                self.become(State.SERVING)
            return times

    async def _prove(self, core: Core, published: list[WeightBuffer], version: int) -> None:
        """Raises CoreLost unless a life holds the current version, and every tensor is the one that was sent."""
        # Before the first publication there is nothing to compare: each life reads the weights from the disk.
        wrong = await wrong_tensors(published, core) if published else None
        held = await core.weight_version()
        if held != version:
            raise CoreLost(f"it holds version {held}, and version {version} is published")
        if wrong is not None:
            raise CoreLost(f"it does not hold the weights of version {version} as they were published: {wrong}")

    async def _give_up(self, why: str, tail: str | None = None, cause: Exception | None = None) -> None:
        """Ends the present life for good, and tells all who wait."""
        core, self.core = self.core, None
        tail = core.log_tail() if tail is None and core is not None else tail
        self.failed = EngineFailed(f"{why}\n--- end of the engine's log ---\n{tail or '(empty)'}")
        self.failed.__cause__ = cause
        try:
            if core is not None:
                await core.stop()
        except Exception:
            # Those who wait hear why it was given up, and not that its process is slow to end.
            log.warning("%s did not end properly", self.name, exc_info=True)
        finally:
            self.become(State.RETIRED, why)

    async def _watch(self) -> None:
        # Nobody awaits this task, so an error of our own would end the watch unseen. It ends the run instead.
        try:
            while not self.closed and self.failed is None:
                await asyncio.sleep(self._tick_s)
                await self._look()
        except Exception as error:
            log.exception("%s is no longer watched", self.name)
            async with self._control:
                await self._give_up(f"{self.name} is no longer watched: {error!r}", cause=error)

    async def _look(self) -> None:
        core = self.core
        if core is None or self._control.locked():
            self._moved = time.monotonic()  # a restart or an update watches by itself
        elif core.broken is not None:
            async with self._control:
                why = f"{self.name}'s counters could not be taken in: {core.broken!r}"
                await self._give_up(why, cause=core.broken)
        elif core.dead and not core.asleep:
            # One that dies asleep is replaced when it is needed: a new one would take the trainer's GPU memory now.
            await self.lose(core, core.ending())
        else:
            await self._ask_for_signs(core, time.monotonic())

    async def _ask_for_signs(self, core: Core, now: float) -> None:
        """Finds an engine that has requests, and neither answers nor moves on, to be lost."""
        # A ping proves that the process answers, not that it computes: `_moved` is the time of the last step.
        config, still_s = self.config, now - self._moved
        if not core.calls or core.asleep:
            self._moved = now
        elif now - core.sign_of_life > config.probe_interval_s:
            try:
                await core.ping(config.probe_deadline_s)
            except (CoreLost, ValueError) as error:
                # A ValueError means that it refuses the ping. `launch` of the next life will say why.
                await self.lose(core, str(error))
        elif self._counts_steps and still_s > WEDGED * config.probe_deadline_s:
            await self.lose(core, f"it answers, but has made no step for {still_s:.0f} s in spite of requests")
