"""A pool of fake engines, whose token rate per request falls with the number of requests."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np

from helpers.fake_cores import CONFIG, FakeCore
from torchtune_ext.sampling import engine_args
from torchtune_ext.sampling.backend import BackendCrashed, EngineStepStats, build_requests
from torchtune_ext.sampling.pool import Pool
from torchtune_ext.sampling.types import Priority, SamplingConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffers

STEP = EngineStepStats(0.1, 1, 0, 0, 0, 0)
STEP_S, PER_REQUEST_S, PER_PROMPT_TOKEN_S = 0.02, 0.0005, 0.00002


class SamplingCore(FakeCore):
    """Generates `length(call)` tokens per request. A step takes longer with more requests, and with each prompt that this
    engine has not computed before. The tokens depend only on the seed, so every engine returns the same tokens."""

    cache_tokens = 1 << 20

    def __init__(self, length=lambda call: 4):
        super().__init__()
        self.length, self.version = length, None
        self.prompts, self.computed_s, self.drawn = set(), 0.0, 0
        self.left = {}  # request id -> remaining tokens
        self.ends = {}
        self.stepping = None

    async def load(self, buffers, version):
        times = await super().load(buffers, version)
        self.version = version
        return times

    async def generate(self, call):
        if self.killed:
            raise BackendCrashed("killed")
        key = tuple(call.prompt)
        if key not in self.prompts:
            self.prompts.add(key)
            self.computed_s += len(key) * PER_PROMPT_TOKEN_S
        self.left[call.id] = tokens = self.length(call)
        self.ends[call.id] = asyncio.get_running_loop().create_future()
        if self.stepping is None or self.stepping.done():
            self.stepping = asyncio.ensure_future(self.step())
        try:
            with call.running(self.requests):
                await self.ends[call.id]
        finally:
            del self.left[call.id], self.ends[call.id]
        self.drawn += 1
        drawn = np.random.default_rng(call.seed).integers(0, 500, tokens)
        call.add(drawn.tolist(), [-1.0] * tokens)
        spans = [] if self.version is None else [(str(self.version), 0, tokens)]
        return call.completion("length", spans, 0)

    async def step(self):
        while self.left:
            took = STEP_S + PER_REQUEST_S * len(self.left) + self.computed_s
            self.computed_s = 0.0
            await asyncio.sleep(took)
            for name in list(self.left):
                self.left[name] -= 1
                if self.left[name] <= 0 and not self.ends[name].done():
                    self.ends[name].set_result(None)
            await asyncio.sleep(0)

    async def stop(self):
        await super().stop()
        if self.stepping is not None:
            self.stepping.cancel()
        for call in list(self.requests.values()):
            call.lose()


class PoolBench:
    """A pool of `count` fake engines, its weight buffers, and all backends of each engine."""

    def __init__(self, monkeypatch, count, length=lambda call: 4, config=CONFIG, limit=64, version=0):
        cores = range(max(count, 2))
        monkeypatch.setattr(engine_args.os, "sched_getaffinity", lambda pid: set(cores))
        monkeypatch.setattr(engine_args, "on_cpu", lambda: True)
        self.lives = [[] for _ in range(count)]
        self.length, self.prepare_core = length, lambda core, number: None
        self.buffers = WeightBuffers(config.rpc_deadline_s)
        self.pool = Pool(replace(config, count=count, max_concurrency=limit), self.make, self.buffers, version)
        self._groups = itertools.count()

    def make(self, lane):
        core = SamplingCore(self.length)
        core.on_step = lane.on_step
        self.prepare_core(core, lane.number)
        self.lives[lane.number].append(core)
        return core

    async def start(self):
        await self.pool.create_backends()
        await self.pool.start()

    def group(self, prompt=(1, 2, 3), n=4, max_tokens=8, priority=Priority.SAMPLE, seed=7):
        sampling = SamplingConfig(max_tokens=max_tokens, seed=seed)
        return build_requests(prompt, n, sampling, next(self._groups), priority, 1 << 20)

    async def publish(self, tensors, version):
        self.buffers.write(tensors, version, None, self.pool.version)
        return await self.pool.load(version)

    @property
    def now(self):
        """Return the current backend of each engine."""
        return [lane.backend for lane in self.pool.replicas]


def run(scenario, monkeypatch, *args, **kwargs):
    """Run `scenario(bench)` with a started pool. All other arguments go to `PoolBench`."""

    async def main():
        bench = PoolBench(monkeypatch, *args, **kwargs)
        await bench.start()
        try:
            return await asyncio.wait_for(scenario(bench), 30)
        finally:
            await bench.pool.close()
            bench.buffers.close()

    return asyncio.run(main())


def states(bench):
    return [lane.state for lane in bench.pool.lanes]
