"""Pools of minimal engines: routing of groups, failover after a crash, engines that may serve.

The same with real engines: tests/integration/test_engine_pool.py.
"""

import asyncio
import itertools

import psutil
import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools  # noqa: E402
from helpers.fake_backends import poll_until, weights  # noqa: E402
from helpers.fake_pools import replica_states, run_scenario  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed, Priority  # noqa: E402

pytestmark = pytest.mark.timeout(60)


# -- routing of groups ------------------------------------------------------------------------------------------------


def test_a_group_of_the_pool_stays_together(monkeypatch):
    async def scenario(harness):
        prompts = [[p] * 50 for p in range(12)]
        await asyncio.gather(*(harness.pool.generate_group(harness.group_requests(prompt, 6)) for prompt in prompts))
        # One engine computed each prompt, and the load is even: four groups of six for each of three engines.
        assert sum(len(backend.cached_prompts) for backend in harness.current_backends) == 12
        assert {backend.num_generated for backend in harness.current_backends} == {24}
        assert not any(replica.num_requests for replica in harness.pool.replicas)

    run_scenario(scenario, monkeypatch, 3)


class Home:
    """The affinity key of one conversation."""


def test_pool_session_turns_stay_with_prefix_replica(monkeypatch):
    """Affinity outweighs the load. Episodes of a crashed engine move to another one and stay there."""

    async def scenario(harness):
        homes = [Home() for _ in range(6)]
        prompts = itertools.count()

        async def turns(homes):
            """Generate a turn of each conversation. Return the engines that ran it."""
            groups = [harness.group_requests([next(prompts)] * 50, 3) for _ in homes]
            work = [
                harness.pool.generate_group(calls, affinity_key=home) for calls, home in zip(groups, homes, strict=True)
            ]
            await asyncio.gather(*work)
            serving = harness.pool.serving_replicas
            drawn = [
                [replica for replica in serving if tuple(calls[0].prompt) in replica.backend.cached_prompts]
                for calls in groups
            ]
            assert all(len(replicas) == 1 for replicas in drawn)
            return [replica for (replica,) in drawn]

        first = await turns(homes)
        assert sorted(replica.number for replica in first) == [0, 0, 1, 1, 2, 2]
        assert await turns([*homes, *(homes[0],) * 4]) == first + [first[0]] * 4
        harness.prepare_backend = lambda backend, number: backend.load_allowed.clear()
        first[0].backend.kill()
        await poll_until(lambda: not first[0].serves)
        moved = await turns(homes)
        assert all(new is not first[0] and old in (new, first[0]) for new, old in zip(moved, first, strict=True))
        harness.backends[first[0].number][-1].load_allowed.set()
        await poll_until(lambda: first[0].serves)
        assert await turns(homes) == moved
        homes.clear()
        assert not harness.pool._affinity

    run_scenario(scenario, monkeypatch, 3)


# -- a crashed engine -------------------------------------------------------------------------------------------------------


def test_pool_continues_with_remaining_replicas_until_none(monkeypatch, caplog):
    async def scenario(harness):
        def broken(backend, number):
            backend.error = BackendCrashed(f"GPU {number} is gone")

        harness.prepare_backend = broken
        harness.current_backends[0].kill()
        await poll_until(lambda: replica_states(harness)[0] is State.RETIRED)
        assert (
            len(await harness.pool.generate_group(harness.group_requests())) == 4
            and harness.backends[1][0].num_generated == 4
        )
        await harness.publish(weights(1), 1)  # it is not waited for
        stats = harness.pool.stats()
        assert (stats.serving, stats.retired) == (1, 1)
        assert (
            "engine replica 0: retired (failed 3 times in a row, the last time: GPU 0 is gone); the run continues with 1 of 2 replicas"
            in caplog.text
        )
        assert "GPU 0 is gone" in harness.pool.replicas[0].failure_cause
        harness.current_backends[1].kill()
        with pytest.raises(EngineFailed, match="(?s)engine replica 1 failed 3 times.*GPU 1 is gone.*the fake's log"):
            while True:
                await harness.pool.generate_group(harness.group_requests())
                await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="GPU"):
            await harness.publish(weights(2), 2)

    run_scenario(scenario, monkeypatch, 2)


def test_pool_requests_waiting_for_start_are_balanced(monkeypatch):
    async def main():
        harness = fake_pools.PoolHarness(monkeypatch, 2)

        def slow(backend, number):
            launch = backend.launch

            async def later():
                await asyncio.sleep(0.2 * number)
                await launch()

            backend.launch = later

        harness.prepare_backend = slow
        await harness.pool.create_backends()
        groups = [asyncio.ensure_future(harness.pool.generate_group(harness.group_requests())) for _ in range(4)]
        await asyncio.sleep(0)
        await harness.pool.start()
        await asyncio.gather(*groups)
        assert [lives[0].num_generated for lives in harness.backends] == [8, 8]
        await harness.pool.close()

    asyncio.run(main())


def test_pool_crash_of_last_replica_moves_groups(monkeypatch):
    async def scenario(harness):
        def late(backend, number):
            async def never():
                await asyncio.sleep(0.01 if number else 100)

            backend.launch = never

        harness.prepare_backend = late
        groups = [asyncio.ensure_future(harness.pool.generate_group(harness.group_requests(n=8))) for _ in range(4)]
        await poll_until(lambda: all(backend.requests for backend in harness.current_backends))
        for replica in harness.pool.replicas:
            replica.restart(replica.backend, "gone")  # both have crashed before any request notices
        await asyncio.wait_for(asyncio.gather(*groups), 5)
        assert harness.backends[1][1].num_generated == 32

    run_scenario(scenario, monkeypatch, 2, limit=4)


def test_pool_first_start_requires_all_replicas(monkeypatch):
    async def main():
        harness = fake_pools.PoolHarness(monkeypatch, 3)
        harness.prepare_backend = lambda backend, number: setattr(
            backend, "error", ValueError("no such GPU") if number == 2 else None
        )
        with pytest.raises(EngineFailed, match="engine replica 2 did not start: no such GPU"):
            await harness.start()
        await harness.pool.close()

    asyncio.run(main())


# -- weight syncs --------------------------------------------------------------------------------------------------------


def test_pool_publish_loads_all_replicas_concurrently(monkeypatch):
    async def scenario(harness):
        for backend in harness.current_backends:
            backend.load_allowed.clear()
        work = asyncio.ensure_future(harness.publish(weights(1), 1))
        # All of them load concurrently.
        await poll_until(lambda: all(backend.load_started.is_set() for backend in harness.current_backends))
        for backend in harness.current_backends:
            backend.load_allowed.set()
        assert await work == (0.1, 0.05)
        assert [backend.loads for backend in harness.current_backends] == [
            [([1], [1], 1)]
        ] * 3 and harness.pool.version == 1

    run_scenario(scenario, monkeypatch, 3)


def test_pool_replica_crash_in_publish_restarts_with_weights(monkeypatch):
    async def scenario(harness):
        await harness.publish(weights(1), 1)
        lost = harness.current_backends[1]
        lost.error = BackendCrashed("broken in the load")
        harness.prepare_backend = lambda backend, number: backend.load_allowed.clear()
        await harness.publish(weights(2), 2)  # returns with engine 0 alone
        assert replica_states(harness)[1] is State.RESTARTING and harness.pool.version == 2
        assert len(await harness.pool.generate_group(harness.group_requests())) == 4  # no call waits for it
        await poll_until(lambda: len(harness.backends[1]) == 2 and harness.backends[1][1].load_started.is_set())
        assert replica_states(harness)[1] is State.RESTARTING
        harness.backends[1][1].load_allowed.set()
        await poll_until(lambda: replica_states(harness)[1] is State.SERVING)
        assert harness.backends[1][1].loads == [([2], [2], 2)]

    run_scenario(scenario, monkeypatch, 2)


def test_pool_restarted_replica_with_wrong_weights_never_serves(monkeypatch, caplog):
    """The engine accepts the weights without an error, but its tensors differ from the published ones."""

    async def scenario(harness):
        await harness.publish(weights(1), 1)
        lies = []

        def liar(backend, number):
            if not lies:
                lies.append(backend)
                checksums = backend.checksums

                async def wrong():
                    return [sums | {"b": 1} for sums in await checksums()]

                backend.checksums = wrong

        harness.prepare_backend = liar
        harness.current_backends[1].kill()
        await poll_until(lambda: len(harness.backends[1]) == 3 and replica_states(harness)[1] is State.SERVING)
        assert lies[0].loads and lies[0].num_generated == 0
        assert "its weights differ from the published weights of version 1: 1 of the 2 tensors" in caplog.text

    run_scenario(scenario, monkeypatch, 2)


def test_pool_replica_skipping_load_fails_publish(monkeypatch):
    async def scenario(harness):
        async def forget():
            return 0.0, 0.0

        harness.pool.replicas[1].load = forget
        with pytest.raises(EngineFailed, match="engine replica 1 .*version 1; .* 0"):
            await harness.publish(weights(1), 1)
        assert replica_states(harness) == [State.SERVING, State.STALE]

    run_scenario(scenario, monkeypatch, 2)


def test_pool_replica_refusing_weights_is_stale_until_loaded(monkeypatch):
    async def scenario(harness):
        harness.current_backends[1].error = ValueError("not with me")
        with pytest.raises(ValueError, match="not with me"):
            await harness.publish(weights(1), 1)
        assert replica_states(harness) == [State.SERVING, State.STALE]
        harness.current_backends[1].error = None
        await harness.publish(weights(2), 2)
        assert replica_states(harness) == [State.SERVING] * 2 and harness.current_backends[1].loads == [([2], [2], 2)]

    run_scenario(scenario, monkeypatch, 2)


def test_pool_canary_runs_on_every_replica(monkeypatch):
    async def scenario(harness):
        await harness.publish(weights(1), 1)
        answers = await harness.pool.sample_canary([harness.group_requests(n=2, priority=Priority.CANARY, seed=0)])
        assert [answer.replica for answer in answers] == ["engine replica 0", "engine replica 1", "engine replica 2"]
        assert [backend.num_generated for backend in harness.current_backends] == [2, 2, 2]
        assert {int(v) for a in answers for group in a.completions for c in group for v in c.versions} == {1}
        sums = harness.buffers.model.checksums
        assert all(answer.checksums == [sums] for answer in answers)
        # An engine that crashes meanwhile is left out, and no call waits for it.
        harness.prepare_backend = lambda backend, number: backend.load_allowed.clear()
        for backend in harness.current_backends:
            backend.length = lambda call: 200
        future = asyncio.ensure_future(
            harness.pool.sample_canary([harness.group_requests(n=2, priority=Priority.CANARY)])
        )
        await poll_until(lambda: all(backend.requests for backend in harness.current_backends))
        lost = harness.current_backends[2]
        lost.kill()
        await lost.stop()
        assert [answer.replica for answer in await future] == ["engine replica 0", "engine replica 1"]
        harness.backends[2][-1].load_allowed.set()

    with monkeypatch.context() as patch:
        patch.setattr(fake_pools, "STEP_S", 0.001)
        run_scenario(scenario, monkeypatch, 3)


def test_50_restarts_leave_a_pool_as_it_was(monkeypatch):
    """Descriptors, tasks, process groups, and memory that a backend leaves in longer-lived objects."""
    monkeypatch.setattr(fake_pools, "STEP_S", 0.001)

    async def scenario(harness):
        process = psutil.Process()
        await harness.publish(weights(1), 1)

        async def restart(number):
            before = harness.pool.replicas[number].restarts
            work = asyncio.ensure_future(harness.pool.generate_group(harness.group_requests(n=2)))
            harness.current_backends[number].kill()
            await poll_until(lambda: harness.pool.replicas[number].restarts == before + 1)
            await work
            harness.pool.replicas[number].report_finished()

        for number in (0, 1):
            await restart(number)
        counts = process.num_fds(), len(asyncio.all_tasks()), len(process.children(recursive=True))
        for round_ in range(50):
            await restart(round_ % 2)
        await asyncio.sleep(0.05)
        assert (process.num_fds(), len(asyncio.all_tasks()), len(process.children(recursive=True))) == counts
        for replica in harness.pool.replicas:
            assert replica.throttle.num_held == 0 and not replica.throttle.has_waiters
            assert not replica._shielded_tasks and len(replica._loaded_versions) == 1 and replica.num_requests == 0
        assert harness.pool.stats().restarts == 52

    run_scenario(scenario, monkeypatch, 2)
