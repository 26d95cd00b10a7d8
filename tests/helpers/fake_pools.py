"""A pool of fake engines, whose token rate per request falls with the number of requests."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np

from helpers.fake_backends import CONFIG, FakeBackend
from torchtune_ext.sampling import engine_args
from torchtune_ext.sampling.backend import BackendCrashed, EngineStepStats, build_requests
from torchtune_ext.sampling.pool import Pool
from torchtune_ext.sampling.types import Priority, SamplingConfig
from torchtune_ext.sampling.weight_buffer import WeightBuffers

STEP = EngineStepStats(0.1, 1, 0, 0, 0, 0)
STEP_S, PER_REQUEST_S, PER_PROMPT_TOKEN_S = 0.02, 0.0005, 0.00002


class SamplingBackend(FakeBackend):
    """Generates `length(request)` tokens per request. A step takes longer with more requests, and with each prompt that this
    engine has not computed before. The tokens depend only on the seed, so every engine returns the same tokens."""

    cache_tokens = 1 << 20

    def __init__(self, length=lambda request: 4):
        super().__init__()
        self.length, self.version = length, None
        self.cached_prompts, self.prefill_s, self.num_generated = set(), 0.0, 0
        self.remaining_tokens = {}  # request id -> remaining tokens
        self.finished = {}
        self.step_task = None

    async def load(self, buffers, version):
        times = await super().load(buffers, version)
        self.version = version
        return times

    async def generate(self, request):
        if self.killed:
            raise BackendCrashed("killed")
        key = tuple(request.prompt)
        if key not in self.cached_prompts:
            self.cached_prompts.add(key)
            self.prefill_s += len(key) * PER_PROMPT_TOKEN_S
        self.remaining_tokens[request.id] = tokens = self.length(request)
        self.finished[request.id] = asyncio.get_running_loop().create_future()
        if self.step_task is None or self.step_task.done():
            self.step_task = asyncio.ensure_future(self.step())
        try:
            with request.track_in(self.requests):
                await self.finished[request.id]
        finally:
            del self.remaining_tokens[request.id], self.finished[request.id]
        self.num_generated += 1
        tokens_drawn = np.random.default_rng(request.seed).integers(0, 500, tokens)
        request.add(tokens_drawn.tolist(), [-1.0] * tokens)
        spans = [] if self.version is None else [(str(self.version), 0, tokens)]
        return request.completion("length", spans, 0)

    async def step(self):
        while self.remaining_tokens:
            took = STEP_S + PER_REQUEST_S * len(self.remaining_tokens) + self.prefill_s
            self.prefill_s = 0.0
            await asyncio.sleep(took)
            for name in list(self.remaining_tokens):
                self.remaining_tokens[name] -= 1
                if self.remaining_tokens[name] <= 0 and not self.finished[name].done():
                    self.finished[name].set_result(None)
            await asyncio.sleep(0)

    async def stop(self):
        await super().stop()
        if self.step_task is not None:
            self.step_task.cancel()
        for request in list(self.requests.values()):
            request.fail()


class PoolHarness:
    """A pool of `count` fake engines, its weight buffers, and all backends of each engine."""

    def __init__(self, monkeypatch, count, length=lambda request: 4, config=CONFIG, limit=64, version=0):
        cores = range(max(count, 2))
        monkeypatch.setattr(engine_args.os, "sched_getaffinity", lambda pid: set(cores))
        monkeypatch.setattr(engine_args, "on_cpu", lambda: True)
        self.backends = [[] for _ in range(count)]
        self.length, self.prepare_backend = length, lambda backend, number: None
        self.buffers = WeightBuffers(config.rpc_deadline_s)
        self.pool = Pool(replace(config, count=count, max_concurrency=limit), self.make_backend, self.buffers, version)
        self._groups = itertools.count()

    def make_backend(self, replica):
        backend = SamplingBackend(self.length)
        backend.on_step = replica.on_step
        self.prepare_backend(backend, replica.number)
        self.backends[replica.number].append(backend)
        return backend

    async def start(self):
        await self.pool.create_backends()
        await self.pool.start()

    def group_requests(self, prompt=(1, 2, 3), n=4, max_tokens=8, priority=Priority.SAMPLE, seed=7):
        sampling = SamplingConfig(max_tokens=max_tokens, seed=seed)
        return build_requests(prompt, n, sampling, next(self._groups), priority, 1 << 20)

    async def publish(self, tensors, version):
        self.buffers.write(tensors, version, None, self.pool.version)
        return await self.pool.load(version)

    @property
    def current_backends(self):
        """Return the current backend of each engine."""
        return [replica.backend for replica in self.pool.replicas]


def run_scenario(scenario, monkeypatch, *args, **kwargs):
    """Run `scenario(harness)` with a started pool. All other arguments go to `PoolHarness`."""

    async def main():
        harness = PoolHarness(monkeypatch, *args, **kwargs)
        await harness.start()
        try:
            return await asyncio.wait_for(scenario(harness), 30)
        finally:
            await harness.pool.close()
            harness.buffers.close()

    return asyncio.run(main())


def replica_states(harness):
    return [replica.state for replica in harness.pool.replicas]
