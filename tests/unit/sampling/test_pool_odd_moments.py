"""Pools at rare moments: a late start, a cancel before the first step."""

import asyncio

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_cores import until, weights  # noqa: E402
from helpers.fake_pools import run, states  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def test_pool_late_replica_starts_with_published_weights(monkeypatch):
    async def scenario(bench):
        late = asyncio.Event()

        def prepare(core, number):
            if number == 1:
                launch = core.launch

                async def slowly():
                    await late.wait()
                    await launch()

                core.launch = slowly

        bench.prepare_core = prepare
        await bench.pool.close()
        fresh = type(bench)(monkeypatch, 2)
        fresh.prepare_core = prepare
        await fresh.pool.prepare()
        starting = asyncio.create_task(fresh.pool.start())
        await until(lambda: fresh.pool.lanes[0].serves)
        await fresh.publish(weights(1), 1)
        late.set()
        await starting
        groups = await asyncio.gather(*(fresh.pool.draw(fresh.group()) for _ in range(6)))
        assert {lane.version for lane in fresh.pool.lanes} == {1}
        assert all(life[0].drawn for life in fresh.lives)
        assert {v for group in groups for c in group for v in c.versions.tolist()} == {1}
        await fresh.pool.close()
        fresh.buffers.close()

    run(scenario, monkeypatch, 2)


def test_pool_with_stale_replica_answers_and_sleeps(monkeypatch):
    async def scenario(bench):
        bench.now[1].fail = ValueError("not these")
        with pytest.raises(ValueError, match="not these"):
            await bench.publish(weights(1), 1)
        assert states(bench) == [State.SERVING, State.STALE]
        assert len(await asyncio.wait_for(bench.pool.checksums(), 5)) == 1
        bench.now[1].fail = None
        await asyncio.wait_for(bench.pool.sleep(), 5)
        assert all(core.asleep for core in bench.now)

    run(scenario, monkeypatch, 2)


def test_pool_group_cancelled_early_leaves_no_load(monkeypatch):
    async def scenario(bench):
        drawing = asyncio.create_task(bench.pool.draw(bench.group(n=8, max_tokens=1000)))
        while not any(lane.requests for lane in bench.pool.lanes):
            await asyncio.sleep(0)
        drawing.cancel()
        await asyncio.sleep(0.05)
        assert not any(lane.requests for lane in bench.pool.lanes)

    run(scenario, monkeypatch, 2)


def test_requests_that_are_repeated_elsewhere_are_counted_there(monkeypatch):
    async def scenario(bench):
        bench.prepare_core = lambda core, number: core.go_on.clear()
        for core in bench.now:
            core.length = lambda call: 40
        drawing = [asyncio.create_task(bench.pool.draw(bench.group(n=5))) for _ in range(2)]
        await until(lambda: [len(core.calls) for core in bench.now] == [5, 5])
        bench.now[0].kill()
        await until(lambda: len(bench.now[1].calls) == 10)
        assert [lane.requests for lane in bench.pool.lanes] == [0, 10]
        assert [len(group) for group in await asyncio.gather(*drawing)] == [5, 5]
        assert [lane.requests for lane in bench.pool.lanes] == [0, 0]
        bench.lives[0][1].go_on.set()

    run(scenario, monkeypatch, 2)


def test_pool_request_outliving_its_group_is_ignored(monkeypatch):
    """A backend may ignore a cancellation."""

    async def scenario(bench):
        calls, completions = [], []

        async def generate(call):
            calls.append(call)
            if len(calls) == 3:
                raise ValueError("refused")
            try:
                await asyncio.sleep(10.0)
            except asyncio.CancelledError:
                call.add([1], [-1.0])
            return call.completion("length", [], 0)

        for core in bench.now:
            core.generate = generate
        with pytest.raises(ValueError, match="refused"):
            await bench.pool.draw(bench.group(n=3), lambda *completion: completions.append(completion))
        await until(lambda: not any(lane.throttle.held for lane in bench.pool.lanes))
        await asyncio.sleep(0)
        assert [lane.requests for lane in bench.pool.lanes] == [0, 0] and completions == []

    run(scenario, monkeypatch, 2)


def test_pool_stats_count_only_serving_replicas(monkeypatch):
    async def scenario(bench):
        for lane in bench.pool.lanes:
            lane.on_step(type(lane.last_step)(0.1, 3, 2, 0, 0, 0))
        before = bench.pool.stats()
        bench.prepare_core = lambda core, number: setattr(core, "fail", BackendCrashed("no"))
        bench.now[1].kill()
        await until(lambda: states(bench)[1] is State.RETIRED)
        after = bench.pool.stats()
        assert (before.running, before.waiting, before.concurrency) == (6, 4, 128)
        assert (after.running, after.waiting, after.concurrency) == (3, 2, 64)

    run(scenario, monkeypatch, 2)


def test_pool_process_exit_during_concurrent_close_is_safe(monkeypatch):
    """`Engine.close` runs in its own thread. A restart removed the backend between two reads."""

    async def scenario(bench):
        class Ending(type(bench.pool.lanes[0])):
            @property
            def core(self):
                core, self.life = self.life, None
                return core

            @core.setter
            def core(self, life):
                self.life = life

        lane = bench.pool.lanes[0]
        lane.life = first = lane.__dict__.pop("core")
        lane.__class__ = Ending
        assert bench.pool.cores == [first, bench.pool.lanes[1].core]
        lane.__class__ = Ending.__base__
        lane.core = first

    run(scenario, monkeypatch, 2)
