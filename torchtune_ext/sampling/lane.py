"""One engine with what belongs to it alone: its supervisor, its throttle, its counters, and the requests on their way to it.

    lane = Lane(0, "the engine", config, make_core, buffers, version=0, ids=itertools.count(), elsewhere=lambda: False)
    completion = await lane.draw(request)

A lane sends a request as often as it takes: again whenever the engine was lost under it. Which engine a group goes to, and
what becomes of it where another one could do it sooner, is the pool's business (pool.py).
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from torchtune_ext.sampling.calls import Call, Core, CoreLost, Step, Submission
from torchtune_ext.sampling.core import DEFAULT_MAX_NUM_SEQS
from torchtune_ext.sampling.loop_thread import fetch_error
from torchtune_ext.sampling.records import Completion, EngineConfig, Priority
from torchtune_ext.sampling.supervisor import Supervisor
from torchtune_ext.sampling.throttle import Controller, Throttle
from torchtune_ext.sampling.weight_buffer import Buffers

LOOK_S = 0.2  # seconds between two looks at the other engines, while this one comes up


@dataclass(slots=True, eq=False)
class Request:
    """Is one sample of a group, from its submission to its end."""

    group: Submission
    sample: int  # its index in the group
    seed: int | None
    lane: "Lane"  # where it is, or waits
    load: float = 0.0  # tokens that are expected of it; 0 once it has ended


class Lane:
    """Owns one engine. Coroutines and `on_step` run in the asyncio thread of all engines, other methods in any."""

    def __init__(
        self,
        number: int,
        name: str,
        config: EngineConfig,
        make_core: Callable[["Lane"], Core],
        buffers: Buffers,
        version: int,
        ids: Iterator[int],
        elsewhere: Callable[[], bool],
    ):
        """Args: number: place among the engines; name: in messages; config: of this engine; make_core: begins a life of it;
        buffers: hold the current weights; version: label of weights that were never published; ids: numbers for requests,
        unique in the run; elsewhere: whether another engine serves now, so that nobody has to wait for this one."""
        self.number, self.name, self.config = number, name, config
        self.supervisor = Supervisor(config, partial(make_core, self), buffers, version, name, elsewhere)
        self.load = 0.0  # tokens that are expected of the requests here; kept by the pool
        self.counts = dict.fromkeys(("queries", "hits", "preemptions", "completed", "tokens"), 0)
        self.max_usage = 0.0  # highest share of the KV cache in use
        self.last_step = Step(0.0, 0, 0, 0, 0, 0)
        self._first_version, self._ids, self._elsewhere = version, ids, elsewhere
        self.controller = Controller(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        self._fixed = config.max_concurrency
        self.throttle = Throttle(self.concurrency)

    @property
    def serves(self) -> bool:
        """Whether it may be given requests."""
        return self.supervisor.health.serves

    @property
    def has_room(self) -> bool:
        """Whether a request would be sent at once."""
        return not self.throttle.blocked and self.throttle.held < self.throttle.size

    @property
    def concurrency(self) -> int:
        """The limit of requests in flight now."""
        return self._fixed or self.controller.allowed

    @property
    def limit(self) -> int:
        """The limit without the brake of a moment."""
        return self._fixed or self.controller.limit

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the limit that an earlier run has found, before anything is sampled."""
        self.controller.load_state_dict(state)
        if self._fixed is None:
            self.throttle.size = self.controller.allowed

    async def core(self) -> Core | None:
        """Waits for a life that can sample; None once another engine serves and this one does not. Raises EngineFailed,
        WeightsIncomplete."""
        if (core := self.supervisor.present) is not None:
            return core
        ready = asyncio.ensure_future(self.supervisor.awake())
        ready.add_done_callback(fetch_error)
        try:
            while True:
                await asyncio.wait({ready}, timeout=LOOK_S)
                if ready.done():
                    return ready.result()
                if not self.serves and self._elsewhere():
                    return None
        finally:
            ready.cancel()

    def expect(self, group: Submission) -> None:
        """Sets the first limit by what this group may take. The few tokens of a canary say nothing of how long samples get."""
        core = self.supervisor.core
        if group.priority is not Priority.CANARY and core is not None:
            max_tokens, samples = group.sampling.max_tokens, len(group.seeds)
            self.controller.expect(core.cache_tokens, len(group.prompt), max_tokens, samples, core.block)
            self._resize()

    async def draw(self, request: Request) -> Completion | None:
        """Draws one completion, from as many lives of the engine as it takes.

        Returns: it; or None when the request has to go to another engine: the pool has moved it while it waited for a place, or
        this engine was lost, and another one serves. Raises EngineFailed, WeightsIncomplete, ValueError.
        """
        group = request.group
        if not await self.throttle.acquire(group.priority, request):
            return None
        group.begun = True
        try:
            while True:
                core = await self.core()
                if core is None:
                    return None
                if group.cancelled:
                    nothing = np.zeros(0, np.int32)
                    return Completion(nothing, np.zeros(0, np.float32), nothing, "abort", 0)
                name, version = f"{os.getpid()}-{next(self._ids)}", self._first_version
                call = Call(name, group.prompt, group.sampling, request.seed, version, group.priority)
                try:
                    completion = await core.generate(call)
                    break
                except CoreLost as error:
                    if self._elsewhere():
                        self.supervisor.lose(core, error)
                        return None
                    await self.supervisor.report_lost(core, error)
        finally:
            self.throttle.release()
            if not self.throttle.held:
                self.controller.start_round()
        self.supervisor.report_finished()
        self.counts["completed"] += 1
        self.counts["tokens"] += len(completion.tokens)
        if group.priority is not Priority.CANARY:
            self.controller.done()
            self._resize()
        return completion

    def on_step(self, step: Step) -> None:
        """Takes the counters of one step of the engine."""
        self.supervisor.report_step()
        self.counts["queries"] += step.prefix_queries
        self.counts["hits"] += step.prefix_hits
        self.counts["preemptions"] += step.preempted
        self.max_usage = max(self.max_usage, step.usage)
        self.last_step = step
        self.controller.step(step.usage, step.running, step.waiting, step.preempted, self.throttle.blocked)
        self._resize()

    def limit_concurrency(self, limit: int | None) -> None:
        """Does what `Engine.limit_concurrency` says."""
        self._fixed = limit
        self.controller = Controller(self.controller.ceiling)
        self._resize()

    def _resize(self) -> None:
        if self.throttle.size != self.concurrency:
            self.throttle.resize(self.concurrency)
