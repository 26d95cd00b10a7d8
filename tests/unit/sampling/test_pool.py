"""Pools of minimal engines: routing of groups, failover after a crash, engines that may serve.

The same with real engines: tests/integration/test_engine_pool.py.
"""

import asyncio
import itertools

import psutil
import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools  # noqa: E402
from helpers.fake_cores import until, weights  # noqa: E402
from helpers.fake_pools import run, states  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed, Priority  # noqa: E402

pytestmark = pytest.mark.timeout(60)


# -- routing of groups ------------------------------------------------------------------------------------------------


def test_a_group_of_the_pool_stays_together(monkeypatch):
    async def scenario(bench):
        prompts = [[p] * 50 for p in range(12)]
        await asyncio.gather(*(bench.pool.draw(bench.group(prompt, 6)) for prompt in prompts))
        assert sum(len(core.prompts) for core in bench.now) == 12  # each prompt was computed by one engine
        assert {core.drawn for core in bench.now} == {24}  # and the load is even: four groups of six for each of three
        assert not any(lane.requests for lane in bench.pool.lanes)

    run(scenario, monkeypatch, 3)


class Home:
    """The affinity key of one conversation."""


def test_pool_session_turns_stay_with_prefix_replica(monkeypatch):
    """Affinity outweighs the load. Conversations of a crashed engine move to another one and stay there."""

    async def scenario(bench):
        homes = [Home() for _ in range(6)]
        prompts = itertools.count()

        async def turns(homes):
            """Generate a turn of each conversation. Return the engines that ran it."""
            groups = [bench.group([next(prompts)] * 50, 3) for _ in homes]
            work = [bench.pool.draw(calls, home=home) for calls, home in zip(groups, homes, strict=True)]
            await asyncio.gather(*work)
            serving = bench.pool.serving
            drawn = [[lane for lane in serving if tuple(calls[0].prompt) in lane.core.prompts] for calls in groups]
            assert all(len(lanes) == 1 for lanes in drawn)
            return [lane for (lane,) in drawn]

        first = await turns(homes)
        assert sorted(lane.number for lane in first) == [0, 0, 1, 1, 2, 2]
        assert await turns([*homes, *(homes[0],) * 4]) == first + [first[0]] * 4
        bench.prepare_core = lambda core, number: core.go_on.clear()
        first[0].core.kill()
        await until(lambda: not first[0].serves)
        moved = await turns(homes)
        assert all(new is not first[0] and old in (new, first[0]) for new, old in zip(moved, first, strict=True))
        bench.lives[first[0].number][-1].go_on.set()
        await until(lambda: first[0].serves)
        assert await turns(homes) == moved
        homes.clear()
        assert not bench.pool._homes

    run(scenario, monkeypatch, 3)


# -- a crashed engine -------------------------------------------------------------------------------------------------------


def test_pool_continues_with_remaining_replicas_until_none(monkeypatch, caplog):
    async def scenario(bench):
        def broken(core, number):
            core.fail = BackendCrashed(f"GPU {number} is gone")

        bench.prepare_core = broken
        bench.now[0].kill()
        await until(lambda: states(bench)[0] is State.RETIRED)
        assert len(await bench.pool.draw(bench.group())) == 4 and bench.lives[1][0].drawn == 4
        await bench.publish(weights(1), 1)  # it is not waited for
        stats = bench.pool.stats()
        assert (stats.healthy, stats.retired) == (1, 1)
        assert (
            "engine 0 is retired (failed 3 times in a row, the last time: GPU 0 is gone); the run continues with 1 of 2"
            in caplog.text
        )
        assert "GPU 0 is gone" in bench.pool.lanes[0].cause
        bench.now[1].kill()
        with pytest.raises(EngineFailed, match="(?s)engine 1 failed 3 times.*GPU 1 is gone.*the fake's log"):
            while True:
                await bench.pool.draw(bench.group())
                await asyncio.sleep(0.01)
        with pytest.raises(EngineFailed, match="GPU"):
            await bench.publish(weights(2), 2)

    run(scenario, monkeypatch, 2)


def test_pool_requests_waiting_for_start_are_balanced(monkeypatch):
    async def main():
        bench = fake_pools.PoolBench(monkeypatch, 2)

        def slow(core, number):
            launch = core.launch

            async def later():
                await asyncio.sleep(0.2 * number)
                await launch()

            core.launch = later

        bench.prepare_core = slow
        await bench.pool.create_backends()
        groups = [asyncio.ensure_future(bench.pool.generate(bench.group())) for _ in range(4)]
        await asyncio.sleep(0)
        await bench.pool.start()
        await asyncio.gather(*groups)
        assert [lives[0].drawn for lives in bench.lives] == [8, 8]
        await bench.pool.close()

    asyncio.run(main())


def test_pool_crash_of_last_replica_moves_groups(monkeypatch):
    async def scenario(bench):
        def late(core, number):
            async def never():
                await asyncio.sleep(0.01 if number else 100)

            core.launch = never

        bench.prepare_core = late
        groups = [asyncio.ensure_future(bench.pool.draw(bench.group(n=8))) for _ in range(4)]
        await until(lambda: all(core.calls for core in bench.now))
        for lane in bench.pool.lanes:
            lane.lose(lane.core, "gone")  # both have crashed before any request notices
        await asyncio.wait_for(asyncio.gather(*groups), 5)
        assert bench.lives[1][1].drawn == 32

    run(scenario, monkeypatch, 2, limit=4)


def test_pool_first_start_requires_all_replicas(monkeypatch):
    async def main():
        bench = fake_pools.PoolBench(monkeypatch, 3)
        bench.prepare_core = lambda core, number: setattr(
            core, "fail", ValueError("no such GPU") if number == 2 else None
        )
        with pytest.raises(EngineFailed, match="engine 2 did not start: no such GPU"):
            await bench.start()
        await bench.pool.close()

    asyncio.run(main())


# -- weight syncs --------------------------------------------------------------------------------------------------------


def test_pool_publish_loads_all_replicas_concurrently(monkeypatch):
    async def scenario(bench):
        for core in bench.now:
            core.go_on.clear()
        work = asyncio.ensure_future(bench.publish(weights(1), 1))
        # All of them load concurrently.
        await until(lambda: all(core.reading.is_set() for core in bench.now))
        for core in bench.now:
            core.go_on.set()
        assert await work == (0.1, 0.05)
        assert [core.loads for core in bench.now] == [[([1], [1], 1)]] * 3 and bench.pool.version == 1

    run(scenario, monkeypatch, 3)


def test_pool_replica_crash_in_publish_restarts_with_weights(monkeypatch):
    async def scenario(bench):
        await bench.publish(weights(1), 1)
        lost = bench.now[1]
        lost.fail = BackendCrashed("broken in the load")
        bench.prepare_core = lambda core, number: core.go_on.clear()
        await bench.publish(weights(2), 2)  # returns with engine 0 alone
        assert states(bench)[1] is State.STARTING and bench.pool.version == 2
        assert len(await bench.pool.draw(bench.group())) == 4  # no call waits for it
        await until(lambda: len(bench.lives[1]) == 2 and bench.lives[1][1].reading.is_set())
        assert states(bench)[1] is State.STARTING
        bench.lives[1][1].go_on.set()
        await until(lambda: states(bench)[1] is State.SERVING)
        assert bench.lives[1][1].loads == [([2], [2], 2)]

    run(scenario, monkeypatch, 2)


def test_pool_restarted_replica_with_wrong_weights_never_serves(monkeypatch, caplog):
    """The engine accepts the weights without an error, but its tensors differ from the published ones."""

    async def scenario(bench):
        await bench.publish(weights(1), 1)
        lies = []

        def liar(core, number):
            if not lies:
                lies.append(core)
                checksums = core.checksums

                async def wrong():
                    return [sums | {"b": 1} for sums in await checksums()]

                core.checksums = wrong

        bench.prepare_core = liar
        bench.now[1].kill()
        await until(lambda: len(bench.lives[1]) == 3 and states(bench)[1] is State.SERVING)
        assert lies[0].loads and lies[0].drawn == 0
        assert "its weights differ from the published weights of version 1: 1 of the 2 tensors" in caplog.text

    run(scenario, monkeypatch, 2)


def test_pool_replica_skipping_load_fails_publish(monkeypatch):
    async def scenario(bench):
        async def forget():
            return 0.0, 0.0

        bench.pool.lanes[1].load = forget
        with pytest.raises(EngineFailed, match="engine 1 .*version 1; .* 0"):
            await bench.publish(weights(1), 1)
        assert states(bench) == [State.SERVING, State.STALE]

    run(scenario, monkeypatch, 2)


def test_pool_replica_refusing_weights_is_stale_until_loaded(monkeypatch):
    async def scenario(bench):
        bench.now[1].fail = ValueError("not with me")
        with pytest.raises(ValueError, match="not with me"):
            await bench.publish(weights(1), 1)
        assert states(bench) == [State.SERVING, State.STALE]
        bench.now[1].fail = None
        await bench.publish(weights(2), 2)
        assert states(bench) == [State.SERVING] * 2 and bench.now[1].loads == [([2], [2], 2)]

    run(scenario, monkeypatch, 2)


def test_pool_canary_runs_on_every_replica(monkeypatch):
    async def scenario(bench):
        await bench.publish(weights(1), 1)
        answers = await bench.pool.ask_each([bench.group(n=2, priority=Priority.CANARY, seed=0)])
        assert [answer.engine for answer in answers] == ["engine 0", "engine 1", "engine 2"]
        assert [core.drawn for core in bench.now] == [2, 2, 2]
        assert {int(v) for a in answers for group in a.completions for c in group for v in c.versions} == {1}
        sums = bench.buffers.model.sums
        assert all(answer.checksums == [sums] for answer in answers)
        # An engine that crashes meanwhile is left out, and no call waits for it.
        bench.prepare_core = lambda core, number: core.go_on.clear()
        for core in bench.now:
            core.length = lambda call: 200
        future = asyncio.ensure_future(bench.pool.ask_each([bench.group(n=2, priority=Priority.CANARY)]))
        await until(lambda: all(core.calls for core in bench.now))
        lost = bench.now[2]
        lost.kill()
        await lost.stop()
        assert [answer.engine for answer in await future] == ["engine 0", "engine 1"]
        bench.lives[2][-1].go_on.set()

    with monkeypatch.context() as patch:
        patch.setattr(fake_pools, "STEP_S", 0.001)
        run(scenario, monkeypatch, 3)


def test_50_restarts_leave_a_pool_as_it_was(monkeypatch):
    """Descriptors, tasks, process groups, and memory that a backend leaves in longer-lived objects."""
    monkeypatch.setattr(fake_pools, "STEP_S", 0.001)

    async def scenario(bench):
        process = psutil.Process()
        await bench.publish(weights(1), 1)

        async def restart(number):
            before = bench.pool.lanes[number].restarts
            work = asyncio.ensure_future(bench.pool.draw(bench.group(n=2)))
            bench.now[number].kill()
            await until(lambda: bench.pool.lanes[number].restarts == before + 1)
            await work
            bench.pool.lanes[number].report_finished()

        for number in (0, 1):
            await restart(number)
        counts = process.num_fds(), len(asyncio.all_tasks()), len(process.children(recursive=True))
        for round_ in range(50):
            await restart(round_ % 2)
        await asyncio.sleep(0.05)
        assert (process.num_fds(), len(asyncio.all_tasks()), len(process.children(recursive=True))) == counts
        for lane in bench.pool.lanes:
            assert lane.throttle.held == 0 and not lane.throttle.blocked
            assert not lane._undisturbed and len(lane._held) == 1 and lane.requests == 0
        assert bench.pool.stats().restarts == 52

    run(scenario, monkeypatch, 2)
