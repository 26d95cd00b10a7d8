"""The controller with a small simulated KV cache, and its semaphore."""

import asyncio
import math

import numpy as np
import pytest

from torchtune_ext.sampling.throttle import MAX_GROWTH, TARGET_KV_USAGE, ConcurrencyController, Throttle
from torchtune_ext.sampling.types import Priority


class Cache:
    """A paged KV cache as in vLLM: full blocks, shared prompts, preemption of the newest request."""

    def __init__(self, blocks, block=32, rows=256):
        self.blocks, self.block, self.rows = blocks, block, rows
        self.running, self.waiting = [], []  # [group, prompt, made, length]
        self.preemptions = self.steps = self.finished = 0

    def used(self):
        shared = {group: prompt // self.block for group, prompt, _, _ in self.running}
        own = sum(-(-(p + length + 1) // self.block) - p // self.block for _, p, length, _ in self.running)
        return own + sum(shared.values())

    def step(self):
        """Returns (usage, running, waiting, preempted, finished)."""
        self.steps += 1
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.pop(0))
            if self.used() > self.blocks:
                self.waiting.insert(0, self.running.pop())
                break
        preempted = 0
        while self.used() > self.blocks and len(self.running) > 1:
            self.waiting.insert(0, self.running.pop())
            preempted += 1
        for request in self.running:
            request[2] += 1
        done = [request for request in self.running if request[2] >= request[3]]
        self.running = [request for request in self.running if request[2] < request[3]]
        self.preemptions += preempted
        self.finished += len(done)
        # counted as vLLM does: after the finished requests have left
        return self.used() / self.blocks, len(self.running), len(self.waiting), preempted, len(done)


def run(cache, controller, requests):
    """Run the requests as the engine does. Return (steps, preemptions, limits after each finished request)."""
    queue, limits, steps, preemptions = list(requests), [], cache.steps, cache.preemptions
    while queue or cache.running or cache.waiting:
        while queue and len(cache.running) + len(cache.waiting) < controller.effective_limit:
            cache.waiting.append(list(queue.pop(0)))
        usage, running, waiting, preempted, done = cache.step()
        controller.observe(usage, running, waiting, preempted, bool(queue))
        for _ in range(done):
            controller.on_finished()
            limits.append(controller.limit)
    controller.start_round()
    return cache.steps - steps, cache.preemptions - preemptions, limits


def groups(prompts, samples, prompt, lengths, first=0):
    lengths = iter(lengths)
    return [(first + p, prompt, 0, next(lengths)) for p in range(prompts) for _ in range(samples)]


def fixed_steps(blocks, size, requests):
    """Steps and preemptions with a fixed number in flight."""
    controller = ConcurrencyController(ceiling=10**6, limit=size)
    controller.observe = lambda *args: None
    controller.on_finished = lambda: None
    steps, preemptions, _ = run(Cache(blocks), controller, requests)
    return steps, preemptions


@pytest.mark.parametrize("blocks", [256, 512])
def test_throttle_equal_lengths_near_best_without_preemption(blocks):
    """12 prompts x 16 samples, 300 + 128 tokens, caches of 8192 and 16384 tokens."""
    requests = groups(12, 16, 300, [128] * 192)
    fixed = [fixed_steps(blocks, size, requests) for size in (8, 16, 24, 32, 40, 48, 64, 96, 128, 192)]
    best = min(steps for steps, preemptions in fixed if not preemptions)
    assert any(preemptions for _, preemptions in fixed), "the cache is not too small"
    cache, controller = Cache(blocks), ConcurrencyController(ceiling=256)
    controller.set_initial_limit(blocks * 32, 300, 128, 16, 32)
    for _ in range(6):
        steps, preemptions, _ = run(cache, controller, requests)
        assert preemptions == 0
        assert steps <= best / 0.95


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_throttle_unknown_lengths_limit_adapts(seed):
    """Completions have at most 2000 and on average 120 tokens: the safe first limit is far too low."""
    generator = np.random.default_rng(seed)
    batches = [
        groups(16, 16, 300, np.minimum(2000, 1 + generator.geometric(1 / 120, 256)), first=100 * number)
        for number in range(14)
    ]
    cache, controller = Cache(512), ConcurrencyController(ceiling=256)
    controller.set_initial_limit(512 * 32, 300, 2000, 16, 32)
    first = controller.limit
    assert first <= 8
    for batch in batches[:2]:
        run(cache, controller, batch)
    assert controller.limit > 6 * first
    results = [run(cache, controller, batch) for batch in batches[2:]]  # the steady state: 3072 requests
    assert sum(preemptions for _, preemptions, _ in results) == 0
    fixed = {
        size: np.sum([fixed_steps(512, size, batch) for batch in batches[2:]], axis=0)
        for size in (40, 48, 56, 64, 72, 80)
    }
    best = min(steps for steps, preemptions in fixed.values() if not preemptions)
    assert sum(steps for steps, _, _ in results) <= best / 0.95


def test_longer_completions_shrink_the_limit():
    """Completions become four times longer: at most a few preemptions, then none."""
    cache, controller = Cache(512), ConcurrencyController(ceiling=256)
    generator = np.random.default_rng(0)
    for number in range(4):
        run(cache, controller, groups(16, 16, 100, generator.integers(60, 100, 256), first=100 * number))
    short = controller.limit
    history = []
    for _ in range(8):
        _steps, preemptions, _ = run(cache, controller, groups(16, 16, 100, generator.integers(240, 400, 256)))
        history.append(preemptions)
    assert controller.limit < short / 2
    assert sum(history[1:]) == 0


def test_one_excess_shrinks_once():
    """A burst of preemptions has one cause, a limit that was too high, and reduces it once."""
    controller = ConcurrencyController(ceiling=256, limit=100)
    for running in (100, 99, 98, 97):
        controller.observe(1.0, running, 100 - running, 1, True)
    assert controller.limit == 85 and controller.target == pytest.approx(TARGET_KV_USAGE - 0.04)
    controller.observe(0.8, 60, 0, 0, True)
    controller.observe(1.0, 85, 0, 2, True)
    assert controller.limit == 72


def test_throttle_initial_limit_fits_longest_expected_group():
    """A cache of 100 blocks, 92 to be used; a completion of up to 32 tokens takes one, of up to 320 tokens ten."""
    controller = ConcurrencyController(ceiling=256)
    controller.set_initial_limit(3200, 1, 31, 4, 32)
    assert controller.limit == controller.effective_limit == 92
    controller.set_initial_limit(3200, 1, 319, 4, 32)
    controller.set_initial_limit(3200, 1, 31, 4, 32)
    assert controller.limit == controller.effective_limit == 9
    for _ in range(9):
        controller.observe(0.46, 9, 0, 0, True)
        controller.on_finished()
    assert controller.limit == 18, "measured: nine took half of it"
    controller.set_initial_limit(3200, 1, 319, 4, 32)
    assert controller.limit == 18


def test_throttle_idle_step_leaves_controller_unchanged():
    """As after a pause, whatever the other counters are; it must not raise an error."""
    controller = ConcurrencyController(ceiling=256, limit=100)
    before = controller.state_dict()
    controller.observe(0.0, 0, 100, 100, True)
    assert controller.state_dict() == before and not controller.is_draining and controller.effective_limit == 100


def test_controller_loads_state_of_version_1():
    controller = ConcurrencyController(ceiling=256)
    controller.load_state_dict({"limit": 40, "known": True, "target": 0.9})
    assert controller.state_dict() == {"limit": 40, "is_measured": True, "target": 0.9}


def test_growth_needs_demand_room_and_is_bounded():
    def after_round(usage, running, waiting, blocked, limit=10, ceiling=1000):
        controller = ConcurrencyController(ceiling=ceiling, limit=limit)
        for _ in range(limit):
            controller.observe(usage, running, waiting, 0, blocked)
            controller.on_finished()
        return controller.limit

    assert after_round(0.5, 10, 0, True) == math.floor(10 * TARGET_KV_USAGE / 0.5)
    assert after_round(0.01, 10, 0, True) == 10 * MAX_GROWTH
    assert after_round(0.01, 10, 0, True, ceiling=25) == 25
    assert after_round(0.5, 10, 0, False) == 10  # no request waits
    assert after_round(0.5, 3, 0, True) == 10  # 3 used half of it: 10 would be too many, but nothing is wrong yet
    assert after_round(0.99, 10, 0, True) == 9  # nearly full
    assert after_round(TARGET_KV_USAGE, 10, 5, True) == 10


def test_state_survives_a_checkpoint():
    controller = ConcurrencyController(ceiling=256, limit=100)
    controller.observe(1.0, 100, 3, 1, True)
    other = ConcurrencyController(ceiling=256)
    other.load_state_dict(controller.state_dict())
    assert (other.limit, other.target, other.is_measured) == (85, controller.target, True)
    other.set_initial_limit(10**6, 10, 10, 1, 32)
    assert other.limit == 85
    small = ConcurrencyController(ceiling=16)
    small.load_state_dict(controller.state_dict())
    assert small.limit == 16


def test_throttle_is_fair_and_bounded():
    async def scenario():
        throttle, order, most = Throttle(ConcurrencyController(1), 3), [], 0

        async def work(number):
            nonlocal most
            await throttle.acquire(Priority.SAMPLE)
            order.append(number)
            most = max(most, throttle.num_held)
            await asyncio.sleep(0)
            throttle.release()

        await asyncio.wait_for(asyncio.gather(*[work(number) for number in range(50)]), 5)
        assert order == list(range(50)) and most == 3 and throttle.num_held == 0 and not throttle.has_waiters

    asyncio.run(scenario())


def test_throttle_admits_canary_then_evaluation_before_samples():
    async def scenario():
        throttle, order = Throttle(ConcurrencyController(1), 2), []

        async def work(priority, number):
            await throttle.acquire(priority)
            order.append((priority, number))

        for number in range(2):
            await work(Priority.SAMPLE, number)
        queued = [asyncio.create_task(work(Priority.SAMPLE, number)) for number in range(2, 6)]
        queued += [asyncio.create_task(work(Priority.EVALUATION, number)) for number in range(3)]
        await asyncio.sleep(0)
        for number in range(2):
            await asyncio.wait_for(work(Priority.CANARY, number), 0.1)
        assert throttle.num_held == 4 and order[2:] == [(Priority.CANARY, 0), (Priority.CANARY, 1)]
        queued[4].cancel()  # the first of the evaluation
        for _ in range(2):
            throttle.release()
            await asyncio.sleep(0)
        assert len(order) == 4, "samples wait for the places that the canary holds, too"
        for _ in range(6):
            throttle.release()
            await asyncio.sleep(0)
        assert order[4:] == [(Priority.EVALUATION, n) for n in (1, 2)] + [(Priority.SAMPLE, n) for n in (2, 3, 4, 5)]
        assert throttle.num_held == 2 and not throttle.has_waiters

    asyncio.run(scenario())


def test_throttle_resizes_while_in_use():
    async def scenario():
        throttle = Throttle(ConcurrencyController(1))
        await throttle.acquire(Priority.SAMPLE)
        waiters = [asyncio.create_task(throttle.acquire(Priority.SAMPLE)) for _ in range(4)]
        await asyncio.sleep(0)
        assert throttle.has_waiters and throttle.num_held == 1
        throttle.fixed = 3
        throttle.admit()
        await asyncio.sleep(0)
        assert [task.done() for task in waiters] == [True, True, False, False]
        throttle.fixed = 1
        throttle.release()
        throttle.release()
        await asyncio.sleep(0)
        assert throttle.num_held == 1 and not waiters[2].done()
        throttle.release()
        await asyncio.sleep(0)
        assert waiters[2].done() and not waiters[3].done()
        waiters[3].cancel()

    asyncio.run(scenario())


def test_throttle_cancelled_waiter_keeps_its_slot_available():
    async def scenario():
        throttle = Throttle(ConcurrencyController(1))
        await throttle.acquire(Priority.SAMPLE)
        waiting, next_one = (asyncio.create_task(throttle.acquire(Priority.SAMPLE)) for _ in range(2))
        await asyncio.sleep(0)
        throttle.release()  # gives the slot to `waiting`...
        waiting.cancel()  # ...which is cancelled before it has run
        await asyncio.wait_for(next_one, 5)
        assert waiting.cancelled() and throttle.num_held == 1
        throttle.release()
        assert throttle.num_held == 0

    asyncio.run(scenario())


def test_throttle_of_lost_replica_admits_all_waiters():
    async def scenario():
        throttle = Throttle(ConcurrencyController(1))
        await throttle.acquire(Priority.SAMPLE)
        waits = [Priority.SAMPLE, Priority.EVALUATION, Priority.SAMPLE]
        tasks = [asyncio.ensure_future(throttle.acquire(priority)) for priority in waits]
        await asyncio.sleep(0)
        tasks[2].cancel()  # in the same moment
        throttle.admit(everyone=True)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done[0] is done[1] is None and isinstance(done[2], asyncio.CancelledError)
        assert throttle.num_held == 3 and not throttle.has_waiters
        for _ in range(3):
            throttle.release()
        await throttle.acquire(Priority.SAMPLE)
        assert throttle.num_held == 1

    asyncio.run(scenario())
