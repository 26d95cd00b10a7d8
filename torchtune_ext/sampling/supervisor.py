"""Keeps one engine alive: starts it, watches it, and starts it again with the current weights when it is lost.

What can happen to the engine, and how it is noticed:

    its process dies           vLLM fails the requests at once; the watch sees it within `TICK_S`
    its process hangs or is    it makes no step and does not answer a ping within `probe_deadline_s`; it is killed
    stopped
    a weight update fails      the model is left half-loaded; the engine is ended
    it does not come up        `launch` fails; at the very first start that is final (a wrong configuration, mostly)

Requests that were under way are repeated by their callers, with the same seeds. After `max_failures` failures without a
finished request between them the supervisor gives up, and everybody who waits for the engine gets `EngineFailed`.

Weights reach an engine through `_load_buffers` alone. It keeps the publisher out of the buffers while the engine reads
them, and takes the version's label from the buffers, so that a label never names other weights than those.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any

from torchtune_ext.sampling.calls import Core, CoreLost
from torchtune_ext.sampling.loop_thread import fetch_error
from torchtune_ext.sampling.records import EngineConfig, EngineFailed, WeightsIncomplete
from torchtune_ext.sampling.weight_buffer import Buffers, WeightBuffer

log = logging.getLogger(__name__)

TICK_S = 0.2  # seconds between two looks at the engine, at most
# vLLM's client refers to itself: until it is collected, a lost one keeps descriptors and threads. So many seconds are given
# to all who knew it, its own threads too, to let go of it first.
COLLECT_S = 3.0


def undisturbed(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
    """Lets a method run to its end also when its caller is cancelled (Ctrl-C in the trainer, another request of the batch
    that failed). A restart or an update that broke off in the middle would leave an engine that is paused, half loaded,
    or never announced, and nobody would notice."""

    @wraps(method)
    async def run(self: "Supervisor", *args: Any) -> Any:
        task = asyncio.ensure_future(method(self, *args))
        self._undisturbed.add(task)
        task.add_done_callback(self._undisturbed.discard)
        task.add_done_callback(fetch_error)
        return await asyncio.shield(task)

    return run


class Supervisor:
    """Owns the engine's present life. All methods run in the engine's asyncio thread; `closed` may be set from any."""

    def __init__(
        self,
        config: EngineConfig,
        make_core: Callable[[], Core],
        buffers: Buffers,
        version: int,
    ):
        """Args: config: the deadlines count here; make_core: begins a life of the engine; buffers: hold the current weights;
        version: the version of the weights on the disk."""
        self.config, self._make_core, self._buffers = config, make_core, buffers
        self.core: Core | None = None  # the present life; None while there is none
        self.version = version  # the version of the weights that the engine holds
        self.restarts = 0  # lives after the first one that came up
        self.failures = 0  # failures in a row, without a finished request between them
        self.failed: EngineFailed | None = None  # why we have given up
        self.closed = False  # another thread may set it, to end a restart that is under way
        self._held: dict[WeightBuffer, int] = {}  # version of what the present life has loaded from each buffer
        self._tick_s = min(TICK_S, config.probe_interval_s / 10)
        self._collect_at = float("inf")  # time.monotonic() at which to free what a lost life holds
        self._changed = asyncio.Event()  # ready, failed or closed
        self._control = asyncio.Lock()  # one restart or weight update at a time
        self._watches: list[asyncio.Task] = []
        self._undisturbed: set[asyncio.Future] = set()

    async def prepare(self) -> None:
        """Begins the first life, which is not waited for."""
        self.core = self._make_core()

    async def start(self) -> None:
        """Brings the first life up. Its failure is final."""
        async with self._control:
            try:
                await self.core.launch()
                self._changed.set()
            except Exception as error:
                await self._give_up(f"the engine did not start: {error}", cause=error)
        self._watches = [asyncio.create_task(self._guarded(work)) for work in (self._watch, self._end_late_requests)]

    async def ready(self) -> Core:
        """Waits for a working engine. Raises EngineFailed."""
        if not self._changed.is_set():
            # Every start is bounded by its own deadlines, so this wait needs only a distant one.
            limit = self.config.max_failures * (self.config.start_deadline_s + 4 * self.config.rpc_deadline_s)
            try:
                await asyncio.wait_for(self._changed.wait(), limit)
            except TimeoutError:
                raise EngineFailed(f"the engine was not ready within {limit:g} s") from None
        if self.closed:
            raise EngineFailed("the engine is closed")
        if self.failed is not None:
            raise EngineFailed(str(self.failed)) from self.failed.__cause__
        return self.core

    def report_finished(self) -> None:
        """Notes that a request has finished, so that the engine works: the row of failures ends."""
        self.failures = 0

    async def report_lost(self, core: Core | None, cause: Exception) -> None:
        """Replaces the engine that a request has lost, unless somebody has done so already. Returns when that is over; `ready`
        then tells whether there is another one."""
        await self._replace(core, str(cause))

    @undisturbed
    async def load(self) -> tuple[float, float]:
        """Brings newly published weights into the engine. Returns the seconds of pause and of loading.

        When the update fails, the engine is started again, and takes the weights then. Raises EngineFailed; ValueError
        when the engine refuses them and goes on with what it has.
        """
        started = time.monotonic()
        await self.ready()
        async with self._control:
            core = self.core
            if core is not None:
                try:
                    pause_s, load_s = await self._load_buffers(core)
                    # A pause of 0 means that a restart has just loaded them.
                    return pause_s or time.monotonic() - started, load_s
                except CoreLost as error:
                    cause = str(error)
        if core is not None:
            await self._replace(core, f"publication: {cause}")
        await self.ready()  # a new engine begins with the weights of the buffers
        return time.monotonic() - started, 0.0

    @undisturbed
    async def sleep(self) -> None:
        """Makes the engine give its GPU memory back, until weights are loaded or somebody samples. Raises EngineFailed."""
        while True:
            core = await self.ready()
            try:
                async with self._control:
                    if core is self.core and not core.asleep:
                        model = self._buffers.model
                        async with self._buffers.reading():
                            # With whole weights in host memory already, the engine need not keep a copy.
                            await core.sleep(2 if model.manifest is not None and model.complete else 1)
                    if core is self.core:
                        return
            except CoreLost as error:
                await self._replace(core, str(error))  # the new one is awake: once more

    async def checksums(self) -> list[dict[str, int | None]]:
        """Returns what each worker of the engine says of the weights that it has taken. Raises EngineFailed."""
        while True:
            core = await self.awake()
            try:
                return await core.checksums()
            except CoreLost as error:
                await self._replace(core, str(error))

    async def awake(self) -> Core:
        """Waits for an engine that can sample. Raises EngineFailed; WeightsIncomplete when it sleeps and there are none to
        wake it with."""
        while True:
            core = await self.ready()
            if not core.asleep:
                return core
            await self._wake(core)

    @undisturbed
    async def _wake(self, core: Core) -> None:
        try:
            async with self._control:
                if core is self.core and core.asleep == 1:
                    await core.wake()
                elif core is self.core and core.asleep:
                    await self._load_buffers(core)
        except CoreLost as error:
            await self._replace(core, str(error))

    async def close(self) -> None:
        """Ends the present life and every wait for an engine."""
        self.closed = True
        for task in self._watches:
            task.cancel()
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
        """Ends `core`, if it still is the present life, and makes lives until one has come up with the current weights, or
        until `max_failures` have failed in a row. Raises nothing: who waits in `ready` is told."""
        async with self._control:
            if core is not self.core or self.closed or self.failed is not None:
                return  # somebody else has seen to it already
            self._changed.clear()
            while True:
                self.failures += 1
                tail = core.log_tail() if core is not None else ""
                if self.failures >= self.config.max_failures:
                    await self._give_up(
                        f"the engine failed {self.failures} times in a row, the last time: {cause}", tail
                    )
                    return
                log.warning("engine lost (%s), failure %d in a row: starting it again", cause, self.failures)
                try:
                    if core is not None:
                        await core.stop()
                    core = self.core = None
                    # This comes before minutes are spent on an engine that could load nothing.
                    self._buffers.check_complete()
                    if not self.closed:
                        core = self.core = self._make_core()
                        await self._bring_up(core)
                        return
                except WeightsIncomplete as error:
                    # Another engine would not help.
                    await self._give_up(f"the engine was lost ({cause}) and cannot be replaced: {error}", tail, error)
                    return
                except Exception as error:
                    # Whatever it is, it is counted, and the last one is in EngineFailed.
                    cause = str(error) or repr(error)
                if self.closed:
                    if core is not None:
                        await core.stop()
                    return  # `close` has told everybody who waits

    async def _bring_up(self, core: Core) -> None:
        """Launches a life that was just made and gives it the current weights. Raises CoreLost, WeightsIncomplete, and what
        `launch` raises."""
        self._held = {}
        # `close` may have looked for an engine to kill before there was this one.
        if self.closed:
            raise CoreLost("the engine is closed")
        await core.launch()
        await self._load_buffers(core)
        self.restarts += 1
        self._collect_at = time.monotonic() + COLLECT_S
        self._changed.set()

    async def _load_buffers(self, core: Core) -> tuple[float, float]:
        """Brings the engine to what the buffers hold, and labels it so. Returns the seconds of pause and of loading.
        Raises WeightsIncomplete, and what `load` raises."""
        async with self._buffers.reading():
            published = self._buffers.published
            stale = [buffer for buffer in published if self._held.get(buffer) != buffer.version]
            if self._buffers.model in stale or core.asleep == 2:
                # An adapter comes over the model that is there. A new model takes the adapter away (vLLM drops it), and
                # after a sleep of level 2 there is neither.
                stale = published
            version = max((buffer.version for buffer in published), default=self.version)
            times = await core.load(stale, version)
            for buffer in stale:
                self._held[buffer] = buffer.loaded = buffer.version
            self.version = version
            return times

    async def _give_up(self, why: str, tail: str | None = None, cause: Exception | None = None) -> None:
        """Ends the present life for good, and tells all who wait. Args: why: the message; tail: the end of the engine's log;
        cause: the error behind it."""
        core, self.core = self.core, None
        self.failed = EngineFailed(why)
        try:
            if core is not None:
                tail = core.log_tail() if tail is None else tail
                await core.stop()
        finally:
            self.failed = EngineFailed(f"{why}\n--- end of the engine's log ---\n{tail or '(empty)'}")
            self.failed.__cause__ = cause
            self._changed.set()

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs a watch. Nobody waits for it, so its own errors would be lost and the engine unwatched: here
        they end the run."""
        try:
            await work()
        except Exception as error:
            log.exception("the engine is no longer watched")
            async with self._control:
                await self._give_up(f"the engine is no longer watched: {error!r}", cause=error)

    async def _watch(self) -> None:
        """Looks after the engine until the end of the run."""
        while not self.closed and self.failed is None:
            await asyncio.sleep(self._tick_s)
            core = self.core
            if core is None or self._control.locked():
                continue  # a restart or an update watches by itself
            if time.monotonic() > self._collect_at:
                self._collect_at = float("inf")
                gc.collect()
            if core.broken is not None:
                async with self._control:
                    why = f"the engine's counters could not be taken in: {core.broken!r}"
                    await self._give_up(why, cause=core.broken)
            elif core.dead:
                await self._replace(core, core.ending())
            elif core.calls and time.monotonic() - core.sign_of_life > self.config.probe_interval_s:
                try:
                    await core.ping(self.config.probe_deadline_s)
                except (CoreLost, ValueError) as error:
                    # After a ValueError, where it refuses the ping, `launch` of the next life says why.
                    await self._replace(core, str(error))

    async def _end_late_requests(self) -> None:
        """Ends requests whose deadline has passed."""
        while not self.closed:
            await asyncio.sleep(self._tick_s / 2)
            core, now = self.core, time.monotonic()
            if core is None:
                continue
            for call in [call for call in core.calls.values() if call.give_up_at < now and not call.ended_by]:
                try:
                    await core.end(call, "deadline")
                except CoreLost:
                    break  # the watch notices it, too
                except ValueError as error:
                    await self._replace(core, str(error))
                    break
