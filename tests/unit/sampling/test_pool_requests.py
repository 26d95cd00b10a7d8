"""Single requests of a pool: routed as whole groups, and repeated in order after a crash."""

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools  # noqa: E402
from helpers.fake_backends import poll_until  # noqa: E402
from helpers.fake_pools import replica_states, run_scenario  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed, EngineRequest  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402
from torchtune_ext.sampling.types import Priority, SamplingConfig  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Key:
    """The affinity key of a group."""


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_pool_single_requests_balance_like_whole_groups(monkeypatch, count):
    """Requests started one by one, group by group, against a model that assigns each group at once."""
    rng = random.Random(count)

    async def scenario(harness):
        expected, groups = [0] * count, []  # [key, replica, unfinished tasks]

        def start(group, size):
            # The model: a group stays with its replica; a new one takes the first of those with the fewest requests.
            if group[1] is None:
                group[1] = min(range(count), key=expected.__getitem__)
            expected[group[1]] += size
            work = (harness.pool.generate(call, group[0]) for call in harness.group_requests(n=size))
            group[2] += map(asyncio.ensure_future, work)

        for _ in range(60):
            for _ in range(rng.randint(1, 6)):
                groups.append([Key(), None, []])
                start(groups[-1], rng.randint(1, 9))
            for group in rng.sample(groups, min(3, len(groups))):  # a later turn
                start(group, rng.randint(1, 3))
            await asyncio.sleep(0)
            assert [replica.num_requests for replica in harness.pool.replicas] == expected
            for group in rng.sample(groups, len(groups) // 2):
                for task in group[2]:
                    task.cancel()
                await asyncio.gather(*group[2], return_exceptions=True)
                expected[group[1]] -= len(group[2])
                group[2].clear()
            assert [replica.num_requests for replica in harness.pool.replicas] == expected
        assert len(groups) > 120
        for group in groups:
            assert harness.pool._affinity[group[0]].number == group[1]
            for task in group[2]:
                task.cancel()

    run_scenario(scenario, monkeypatch, count, lambda call: 10**6, limit=50)


def test_pool_starting_replica_keeps_requests_gets_none(monkeypatch):
    """Groups that came before any engine served are divided. Later ones go to the engine that serves."""

    async def main():
        harness = fake_pools.PoolHarness(monkeypatch, 2)
        late = asyncio.Event()

        def prepare(backend, number):
            if number == 1:
                backend.launch = late.wait

        harness.prepare_backend = prepare
        await harness.pool.create_backends()
        replicas, keys = harness.pool.replicas, [Key() for _ in range(4)]
        work = [asyncio.ensure_future(harness.pool.generate(harness.group_requests(n=1)[0], key)) for key in keys]
        await asyncio.sleep(0)
        assert [replica.num_requests for replica in replicas] == [2, 2]
        starting = asyncio.ensure_future(harness.pool.start())
        await asyncio.gather(work[0], work[2])
        assert replica_states(harness) == [State.SERVING, State.STARTING]
        await asyncio.gather(*(harness.pool.generate(call) for call in harness.group_requests(n=4)))
        assert [replica.num_requests for replica in replicas] == [0, 2] and not work[1].done()
        late.set()
        await asyncio.wait_for(asyncio.gather(starting, *work), 5)
        assert [lives[0].num_generated for lives in harness.backends] == [6, 2]
        await harness.pool.close()
        harness.buffers.close()

    asyncio.run(main())


@pytest.mark.parametrize("way", ["crash", "hang", "stop"])
def test_pool_lost_requests_are_repeated_in_order(monkeypatch, way):
    """The requests in flight come first, then the waiting ones by priority, as before the crash."""

    async def scenario(harness):
        sent = []

        def length(call):
            sent.append(call.prompt[0])
            return 10**6 if len(sent) <= 3 else 1

        harness.length = harness.current_backends[0].length = length
        priorities = [Priority.SAMPLE] * 6 + [Priority.EVALUATION] * 2
        calls = [harness.group_requests([i], 1, priority=priority)[0] for i, priority in enumerate(priorities)]
        work = [asyncio.ensure_future(harness.pool.generate(call)) for call in calls]
        await poll_until(lambda: len(sent) == 3)
        backend = harness.current_backends[0]
        if way == "hang":
            backend.last_heartbeat, backend.ping = 0.0, _raise_crashed
        else:
            backend.kill()
            if way == "stop":
                await backend.stop()
        await asyncio.wait_for(asyncio.gather(*work), 10)
        assert sent == [0, 1, 2, 0, 1, 2, 6, 7, 3, 4, 5]
        (replica,) = harness.pool.replicas
        assert (replica.num_requests, replica.throttle.num_held, replica.throttle.has_waiters) == (0, 0, False)

    run_scenario(scenario, monkeypatch, 1, limit=3)


async def _raise_crashed(deadline_s):
    raise BackendCrashed("did not answer")


def test_pool_retiring_replica_passes_on_requests(monkeypatch):
    """The engine that retires has the fewest requests, and its process takes time to end."""

    async def scenario(harness):
        retiring, other = harness.current_backends
        retiring.length, other.length = lambda call: 10**6, lambda call: 20
        busy = [asyncio.ensure_future(harness.pool.generate_group(harness.group_requests(n=n))) for n in (1, 8)]
        await poll_until(lambda: all(backend.requests for backend in harness.current_backends))
        stop, stopped = retiring.stop, asyncio.Event()

        async def stop_late():
            await stopped.wait()
            await stop()

        retiring.stop, retiring.stats_error = stop_late, ZeroDivisionError("ours")
        await poll_until(lambda: replica_states(harness)[0] is State.RETIRED)
        assert len(await asyncio.wait_for(harness.pool.generate_group(harness.group_requests()), 5)) == 4
        assert other.num_generated >= 4
        stopped.set()
        assert [len(group) for group in await asyncio.wait_for(asyncio.gather(*busy), 10)] == [1, 8]

    run_scenario(scenario, monkeypatch, 2)


def test_pool_canary_repeats_on_its_only_replica(monkeypatch, caplog):
    async def scenario(harness):
        backend = harness.current_backends[0]
        backend.length = lambda call: 10**6
        groups = [harness.group_requests(n=2, priority=Priority.CANARY) for _ in range(2)]
        work = asyncio.create_task(harness.pool.sample_canary(groups))
        await poll_until(lambda: len(backend.requests) == 4)
        backend.kill()
        (answer,) = await asyncio.wait_for(work, 10)
        assert [len(group) for group in answer.completions] == [2, 2] and answer.replica == "the engine"
        assert harness.backends[0][1].num_generated == 4
        assert "the fake ended" in caplog.text and "during the canary" not in caplog.text

    run_scenario(scenario, monkeypatch, 1)


def test_request_that_fails_twice_is_a_crash():
    """A restart and the end of its backend both fail a request, which may take several steps to end."""

    async def main():
        request, requests = EngineRequest([1], SamplingConfig(max_tokens=1), None, id="1"), {}

        async def generate():
            with request.track_in(requests):
                try:
                    await asyncio.sleep(60)
                finally:
                    await asyncio.sleep(0)

        task = asyncio.ensure_future(generate())
        await asyncio.sleep(0)
        request.fail("gone")
        await asyncio.sleep(0)
        request.fail()
        with pytest.raises(BackendCrashed, match="gone"):
            await task
        assert not requests and not task.cancelling()

    asyncio.run(main())
