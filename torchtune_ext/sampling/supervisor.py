"""Keeps one engine alive: starts it, watches it, and starts it again with the current weights when it is lost.

What can happen to the engine, and how it is noticed:

    its process dies           vLLM fails the requests at once; the watch sees it within `TICK_S`
    its process hangs or is    no step and no answer to a ping within `probe_deadline_s`; it is killed
    stopped
    a weight update fails      the model is left half-loaded; the engine is ended
    it does not come up        `launch` fails; at the very first start that is final (a wrong configuration, mostly)

Requests that were under way are repeated by their callers, with the same seeds. After `max_failures` failures without a
finished request between them the supervisor gives up, and everybody who waits for the engine gets `EngineFailed`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

from torchtune_ext.sampling.calls import Core, CoreLost
from torchtune_ext.sampling.records import EngineConfig, EngineFailed
from torchtune_ext.sampling.weights import WeightBuffer

log = logging.getLogger(__name__)

TICK_S = 0.2


class Supervisor:
    """Owns the engine's present life. All methods run in the engine's asyncio thread."""

    def __init__(
        self,
        config: EngineConfig,
        make_core: Callable[[], Core],
        buffers: Sequence[WeightBuffer],
        weights_lock: threading.Lock,
    ):
        """Args: make_core: begins a new life (`LocalCore` or `ServerCore`); buffers: the current weights, the model's and
        the adapter's; weights_lock: held by the publisher while it writes them."""
        self.config, self._make_core, self._buffers, self._weights_lock = config, make_core, buffers, weights_lock
        self.core: Core | None = None  # the present life; None while there is none
        self.version = 0  # of the weights in the buffer, or on the disk before the first publication
        self.restarts = 0
        self.failures = 0  # in a row
        self.failed: EngineFailed | None = None  # why we have given up
        self.closed = False
        self._changed = asyncio.Event()  # ready, failed or closed
        self._control = asyncio.Lock()  # one restart or weight update at a time
        self._tasks: list[asyncio.Task] = []

    async def prepare(self) -> None:
        """Begins the first life; its process does what it can without us."""
        self.core = self._make_core()

    async def start(self) -> None:
        """Brings the first life up. Its failure is final."""
        async with self._control:
            try:
                await self.core.launch()
                self._changed.set()
            except (CoreLost, ValueError, OSError, ImportError) as error:
                await self._give_up(f"the engine did not start: {error}")
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._end_late_requests())]

    async def ready(self) -> Core:
        """Waits for a working engine. Raises EngineFailed."""
        # every start is bounded by its own deadlines, so this wait needs only a distant one
        limit = self.config.max_failures * (self.config.start_deadline_s + 4 * self.config.rpc_deadline_s)
        try:
            await asyncio.wait_for(self._changed.wait(), limit)
        except TimeoutError:
            raise EngineFailed(f"the engine was not ready within {limit:g} s") from None
        if self.failed is not None:
            raise EngineFailed(str(self.failed)) from self.failed.__cause__
        if self.closed:
            raise EngineFailed("the engine is closed")
        return self.core

    def report_finished(self) -> None:
        """A request has finished: the engine works."""
        self.failures = 0

    async def report_lost(self, core: Core | None, cause: Exception) -> None:
        """A request has lost its engine. Waits until there is another one. Raises EngineFailed."""
        await self._replace(core, str(cause))

    async def load(self, buffer: WeightBuffer, version: int) -> tuple[float, float]:
        """Brings newly published weights into the engine. Returns the seconds of pause and of loading.

        When the update fails, the engine is started again, and takes the weights then. Raises EngineFailed.
        """
        await self.ready()
        async with self._control:
            self.version = version
            core = self.core
            if core is not None:
                try:
                    # an adapter comes over the model that is there; a new model takes the adapter away (vLLM drops it), and
                    # after a sleep of level 2 there is none
                    alone = buffer.adapter is not None and core.asleep != 2
                    return await core.load([buffer] if alone else self._published(), version)
                except CoreLost as error:
                    cause = str(error)
        started = time.monotonic()
        if core is not None:
            await self._replace(core, f"publication of version {version}: {cause}")
        await self.ready()  # a new engine begins with the weights of the buffers
        return time.monotonic() - started, 0.0

    async def sleep(self) -> None:
        """Makes the engine give its GPU memory back, until weights are loaded or somebody samples."""
        core = await self.ready()
        async with self._control:
            if core is self.core and not core.asleep:
                # with published weights in host memory already, the engine need not keep a copy
                model = self._buffers[0]
                await core.sleep(2 if model.manifest is not None and model.complete else 1)

    async def awake(self) -> Core:
        """Waits for an engine that can sample. Raises EngineFailed."""
        while True:
            core = await self.ready()
            if not core.asleep:
                return core
            try:
                async with self._control:
                    if core is self.core and core.asleep == 1:
                        await core.wake()
                    elif core is self.core and core.asleep:
                        await core.load(self._published(), self.version)
            except CoreLost as error:
                await self._replace(core, str(error))

    async def close(self) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()
        core, self.core = self.core, None
        if core is not None:
            await core.stop()
        self._changed.set()

    async def _replace(self, core: Core | None, cause: str) -> None:
        async with self._control:
            if core is not self.core or self.closed or self.failed is not None:
                return  # somebody else has seen to it
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
                if core is not None:
                    await core.stop()
                core, self.core = None, None
                try:
                    core = self.core = self._make_core()
                    await core.launch()
                    await self._wait_for_writer()
                    if self._published() or self.version:
                        await core.load(self._published(), self.version)
                    self.restarts += 1
                    self._changed.set()
                    return
                except (CoreLost, ValueError, OSError) as error:
                    cause = str(error)

    def _published(self) -> list[WeightBuffer]:
        return [buffer for buffer in self._buffers if buffer.manifest is not None]

    async def _wait_for_writer(self) -> None:
        """Waits until no publication is writing into the buffer."""
        give_up_at = time.monotonic() + self.config.rpc_deadline_s
        while not self._weights_lock.acquire(blocking=False):
            if time.monotonic() > give_up_at:
                raise CoreLost(f"a publication did not finish its copy within {self.config.rpc_deadline_s:g} s")
            await asyncio.sleep(0.05)
        self._weights_lock.release()
        if not all(buffer.complete for buffer in self._buffers):
            raise CoreLost("the last publication broke off while copying: there are no complete weights to start with")

    async def _give_up(self, cause: str, tail: str | None = None) -> None:
        core, self.core = self.core, None
        if core is not None:
            tail = core.log_tail() if tail is None else tail
            await core.stop()
        self.failed = EngineFailed(f"{cause}\n--- end of the engine's log ---\n{tail or '(empty)'}")
        self._changed.set()

    async def _watch(self) -> None:
        """Looks after the engine until the end of the run."""
        while not self.closed and self.failed is None:
            await asyncio.sleep(TICK_S)
            core = self.core
            if core is None or self._control.locked():
                continue
            if core.dead:
                await self._replace(core, "its process ended")
            elif core.calls and time.monotonic() - core.sign_of_life > self.config.probe_interval_s:
                try:
                    await core.ping(self.config.probe_deadline_s)
                except CoreLost as error:
                    await self._replace(core, str(error))

    async def _end_late_requests(self) -> None:
        """Ends requests whose deadline has passed."""
        while not self.closed:
            await asyncio.sleep(TICK_S / 2)
            core, now = self.core, time.monotonic()
            if core is None:
                continue
            for call in [call for call in core.calls.values() if call.give_up_at < now and not call.ended_by]:
                try:
                    await core.end(call, "deadline")
                except CoreLost:
                    break  # the watch sees to it
