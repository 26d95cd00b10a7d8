"""Pools at rare moments: a late start, a cancel before the first step."""

import asyncio

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_backends import poll_until, weights  # noqa: E402
from helpers.fake_pools import replica_states, run_scenario  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def test_pool_late_replica_starts_with_published_weights(monkeypatch):
    async def scenario(harness):
        late = asyncio.Event()

        def prepare(backend, number):
            if number == 1:
                launch = backend.launch

                async def slowly():
                    await late.wait()
                    await launch()

                backend.launch = slowly

        harness.prepare_backend = prepare
        await harness.pool.close()
        fresh = type(harness)(monkeypatch, 2)
        fresh.prepare_backend = prepare
        await fresh.pool.create_backends()
        starting = asyncio.create_task(fresh.pool.start())
        await poll_until(lambda: fresh.pool.replicas[0].serves)
        await fresh.publish(weights(1), 1)
        late.set()
        await starting
        groups = await asyncio.gather(*(fresh.pool.generate_group(fresh.group_requests()) for _ in range(6)))
        assert {replica.version for replica in fresh.pool.replicas} == {1}
        assert all(life[0].num_generated for life in fresh.backends)
        assert {v for group in groups for c in group for v in c.versions.tolist()} == {1}
        await fresh.pool.close()
        fresh.buffers.close()

    run_scenario(scenario, monkeypatch, 2)


def test_pool_with_stale_replica_answers_and_sleeps(monkeypatch):
    async def scenario(harness):
        harness.current_backends[1].error = ValueError("not these")
        with pytest.raises(ValueError, match="not these"):
            await harness.publish(weights(1), 1)
        assert replica_states(harness) == [State.SERVING, State.STALE]
        assert len(await asyncio.wait_for(harness.pool.checksums(), 5)) == 1
        harness.current_backends[1].error = None
        await asyncio.wait_for(harness.pool.sleep(), 5)
        assert all(backend.sleep_level for backend in harness.current_backends)

    run_scenario(scenario, monkeypatch, 2)


def test_pool_group_cancelled_early_leaves_no_load(monkeypatch):
    async def scenario(harness):
        drawing = asyncio.create_task(harness.pool.generate_group(harness.group_requests(n=8, max_tokens=1000)))
        while not any(replica.num_requests for replica in harness.pool.replicas):
            await asyncio.sleep(0)
        drawing.cancel()
        await asyncio.sleep(0.05)
        assert not any(replica.num_requests for replica in harness.pool.replicas)

    run_scenario(scenario, monkeypatch, 2)


def test_requests_that_are_repeated_elsewhere_are_counted_there(monkeypatch):
    async def scenario(harness):
        harness.prepare_backend = lambda backend, number: backend.load_allowed.clear()
        for backend in harness.current_backends:
            backend.length = lambda call: 40
        drawing = [asyncio.create_task(harness.pool.generate_group(harness.group_requests(n=5))) for _ in range(2)]
        await poll_until(lambda: [len(backend.requests) for backend in harness.current_backends] == [5, 5])
        harness.current_backends[0].kill()
        await poll_until(lambda: len(harness.current_backends[1].requests) == 10)
        assert [replica.num_requests for replica in harness.pool.replicas] == [0, 10]
        assert [len(group) for group in await asyncio.gather(*drawing)] == [5, 5]
        assert [replica.num_requests for replica in harness.pool.replicas] == [0, 0]
        harness.backends[0][1].load_allowed.set()

    run_scenario(scenario, monkeypatch, 2)


def test_pool_request_outliving_its_group_is_ignored(monkeypatch):
    """A backend may ignore a cancellation."""

    async def scenario(harness):
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

        for backend in harness.current_backends:
            backend.generate = generate
        with pytest.raises(ValueError, match="refused"):
            await harness.pool.generate_group(
                harness.group_requests(n=3), lambda *completion: completions.append(completion)
            )
        await poll_until(lambda: not any(replica.throttle.num_held for replica in harness.pool.replicas))
        await asyncio.sleep(0)
        assert [replica.num_requests for replica in harness.pool.replicas] == [0, 0] and completions == []

    run_scenario(scenario, monkeypatch, 2)


def test_pool_stats_count_only_serving_replicas(monkeypatch):
    async def scenario(harness):
        for replica in harness.pool.replicas:
            replica.on_step(type(replica.last_step)(0.1, 3, 2, 0, 0, 0))
        before = harness.pool.stats()
        harness.prepare_backend = lambda backend, number: setattr(backend, "error", BackendCrashed("no"))
        harness.current_backends[1].kill()
        await poll_until(lambda: replica_states(harness)[1] is State.RETIRED)
        after = harness.pool.stats()
        assert (before.running, before.waiting, before.concurrency) == (6, 4, 128)
        assert (after.running, after.waiting, after.concurrency) == (3, 2, 64)

    run_scenario(scenario, monkeypatch, 2)


def test_pool_process_exit_during_concurrent_close_is_safe(monkeypatch):
    """`Engine.close` runs in its own thread. A restart removed the backend between two reads."""

    async def scenario(harness):
        class Ending(type(harness.pool.replicas[0])):
            @property
            def backend(self):
                backend, self.life = self.life, None
                return backend

            @backend.setter
            def backend(self, life):
                self.life = life

        replica = harness.pool.replicas[0]
        replica.life = first = replica.__dict__.pop("backend")
        replica.__class__ = Ending
        assert harness.pool.backends == [first, harness.pool.replicas[1].backend]
        replica.__class__ = Ending.__base__
        replica.backend = first

    run_scenario(scenario, monkeypatch, 2)
