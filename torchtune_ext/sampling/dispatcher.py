"""Sends requests to the engine: as many at once as the throttle allows, and again whenever the engine was lost under them."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtune_ext.sampling.calls import Call, CoreLost, Step, Submission
from torchtune_ext.sampling.core import DEFAULT_MAX_NUM_SEQS
from torchtune_ext.sampling.records import Completion, EngineConfig, EngineStats, Priority
from torchtune_ext.sampling.supervisor import Supervisor
from torchtune_ext.sampling.throttle import Controller, Throttle


class Dispatcher:
    """Owns the throttle and the counters of the run. Coroutines and `on_step` run in the engine's asyncio thread, all other
    methods in any."""

    def __init__(self, config: EngineConfig, supervisor: Supervisor, version: int):
        """Args: config: of the engine; supervisor: knows its present life; version: label of weights that were never
        published."""
        self._supervisor, self._first_version = supervisor, version
        self._ids = itertools.count()
        self._groups: set[Submission] = set()
        self._counts = dict.fromkeys(("queries", "hits", "preemptions", "completed", "tokens"), 0)
        self._max_usage = 0.0
        self._last_step = Step(0.0, 0, 0, 0, 0, 0)
        self.controller = Controller(config.max_num_seqs or DEFAULT_MAX_NUM_SEQS)
        self._fixed = config.max_concurrency
        self._throttle = Throttle(self._fixed or self.controller.allowed)

    def mark_cancelled(self) -> None:
        """Keeps all requests that wait from being sent: they end with nothing sampled."""
        for group in list(self._groups):
            group.cancelled = True

    async def cancel(self) -> None:
        """Ends all requests early, those that were sent with what they have."""
        self.mark_cancelled()
        core = self._supervisor.core
        try:
            for call in list(core.calls.values()) if core is not None else ():
                await core.end(call, "abort")
        except CoreLost:
            pass  # the watch notices it, too, and a call that was cancelled is not repeated

    def stats(self) -> EngineStats:
        """Returns the counters of the run until now."""
        return EngineStats(
            prefix_queries=self._counts["queries"],
            prefix_hits=self._counts["hits"],
            preemptions=self._counts["preemptions"],
            max_kv_usage=self._max_usage,
            running=self._last_step.running,
            waiting=self._last_step.waiting,
            concurrency=self._fixed or self.controller.limit,
            completed=self._counts["completed"],
            tokens=self._counts["tokens"],
            restarts=self._supervisor.restarts,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run should know: the throttle's findings."""
        return self.controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` of an earlier run has returned, before anything is sampled."""
        self.controller.load_state_dict(state)
        if self._fixed is None:
            self._throttle.size = self.controller.allowed

    async def draw_all(self, groups: Sequence[Submission]) -> list[list[Completion]]:
        """Draws groups, in their order. Where one of them fails, the others end."""
        tasks = [asyncio.create_task(self.draw(group)) for group in groups]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def draw(self, group: Submission) -> list[Completion]:
        """Draws the completions of a group. Raises ValueError, EngineFailed, WeightsIncomplete."""
        core = await self._supervisor.awake()
        prompt = group.prompt
        # vLLM does not look, and dies of an id that it does not have.
        if not 0 <= min(prompt) <= max(prompt) < core.vocabulary:
            raise ValueError(
                f"sample: prompt {group.group} holds token ids from {min(prompt)} to {max(prompt)}, but the model has only "
                f"the ids 0 to {core.vocabulary - 1}: tokenizer and model do not belong together"
            )
        if group.priority is not Priority.CANARY:  # its few tokens say nothing of how long samples may get
            max_tokens, samples = group.sampling.max_tokens, len(group.seeds)
            self.controller.expect(core.cache_tokens, len(prompt), max_tokens, samples, core.block)
            self._resize()
        self._groups.add(group)
        tasks = [asyncio.create_task(self._one(group, s, seed)) for s, seed in enumerate(group.seeds)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            self._groups.discard(group)
            for task in tasks:
                task.cancel()

    async def _one(self, group: Submission, sample: int, seed: int | None) -> Completion:
        """Draws one completion, from as many lives of the engine as it takes."""
        await self._throttle.acquire(group.priority)
        try:
            while True:
                core = await self._supervisor.awake()
                if group.cancelled:
                    nothing = np.zeros(0, np.int32)
                    return group.notify(sample, Completion(nothing, np.zeros(0, np.float32), nothing, "abort", 0))
                name, version = f"{os.getpid()}-{next(self._ids)}", self._first_version
                call = Call(name, group.prompt, group.sampling, seed, version, group.priority)
                try:
                    completion = await core.generate(call)
                    break
                except CoreLost as error:
                    await self._supervisor.report_lost(core, error)
        finally:
            self._throttle.release()
            if not self._throttle.held:
                self.controller.start_round()
        self._supervisor.report_finished()
        self._counts["completed"] += 1
        self._counts["tokens"] += len(completion.tokens)
        if group.priority is not Priority.CANARY:
            self.controller.done()
            self._resize()
        return group.notify(sample, completion)

    def on_step(self, step: Step) -> None:
        """Takes the counters of one step of the engine."""
        self._counts["queries"] += step.prefix_queries
        self._counts["hits"] += step.prefix_hits
        self._counts["preemptions"] += step.preempted
        self._max_usage = max(self._max_usage, step.usage)
        self._last_step = step
        self.controller.step(step.usage, step.running, step.waiting, step.preempted, self._throttle.blocked)
        self._resize()

    async def limit_concurrency(self, limit: int | None) -> None:
        """Does what `Engine.limit_concurrency` says."""
        self._fixed = limit
        self.controller = Controller(self.controller.ceiling)
        self._resize()

    def _resize(self) -> None:
        limit = self._fixed or self.controller.allowed
        if self._throttle.size != limit:
            self._throttle.resize(limit)
