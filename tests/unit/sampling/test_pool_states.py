"""Random crashes: a crashed engine serves again only after it has loaded and verified the weights."""

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools, virtual_time  # noqa: E402
from helpers.fake_cores import CONFIG, weights  # noqa: E402
from torchtune_ext.sampling import weight_buffer  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("seed", range(8))
def test_pool_serving_replicas_always_have_published_weights(monkeypatch, seed):
    """Engines crash, fail to start or load, report wrong tensors, and restart during weight syncs and sampling.

    At every state change, a serving engine holds the tensors and the version of a completed weight sync. A token never
    has an older version than the last weight sync that was complete when its request was sent.
    """
    rng = random.Random(seed)

    async def main():
        bench = fake_pools.PoolBench(monkeypatch, 3, lambda call: rng.randint(1, 30), limit=8)
        # Virtual time does not support threads.
        monkeypatch.setattr(weight_buffer.asyncio, "to_thread", at_once)

        def fault(core, number):
            kind = rng.choice(["none", "none", "none", "launch", "load", "liar", "old label"])
            if kind in ("launch", "load"):
                core.fail = BackendCrashed(kind)
                if kind == "load":
                    core.launch = lambda: asyncio.sleep(0.1)
            elif kind == "liar":
                honest = core.checksums

                async def lie():
                    return [dict.fromkeys(sums, 1) for sums in await honest()]

                core.checksums = lie
            elif kind == "old label":

                async def old():
                    return core.version - 1

                core.weight_version = old

        sums = {}

        def look():
            for lane in bench.pool.replicas:
                if lane.serves and lane.backend is not None and sums:
                    core = lane.backend
                    served.append(lane.number)
                    # The newest weight sync may still be running.
                    assert core.version in (published[0], published[0] - 1, None if published[0] <= 1 else -1)
                    assert core.sums in (sums[published[0]], sums.get(published[0] - 1, {}))

        await bench.start()
        bench.prepare_core = fault
        served, published = [], [0]
        for lane in bench.pool.replicas:
            lane.set_state = lambda *change, become=lane.set_state: (become(*change), look())
        drawn, failed = [], None
        try:
            for version in range(1, 13):
                tensors = weights(version)
                sums[version] = {name: weight_buffer.checksum(tensor) for name, tensor in tensors}
                published[0] = version
                await bench.publish(tensors, version)
                for lane in bench.pool.replicas:
                    if lane.serves:
                        assert lane.backend.version == version and lane.backend.sums == sums[version]
                work = [asyncio.ensure_future(bench.pool.generate(bench.group([version, i], 3, 30))) for i in range(8)]
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(rng.random())
                    lane = rng.choice(bench.pool.replicas)
                    if lane.backend is not None:
                        lane.backend.kill()
                        await lane.backend.stop()
                for group in await asyncio.gather(*work):
                    drawn += group
                    assert {int(v) for c in group for v in c.versions} <= {version}
        except EngineFailed as error:
            failed = error  # the only allowed error: all three were retired
            assert not bench.pool.active_replicas
        await bench.pool.close()
        bench.buffers.close()
        return len(drawn), len(served), failed

    count, served, failed = virtual_time.run(main(), monkeypatch)
    assert served and (count == 12 * 8 * 3 or failed is not None)


async def at_once(function, *args):
    return function(*args)


def test_pool_replica_without_step_progress_is_replaced(monkeypatch):
    """A health check alone would never detect the stall."""

    async def main():
        bench = fake_pools.PoolBench(monkeypatch, 2, lambda call: 10)
        monkeypatch.setattr(weight_buffer.asyncio, "to_thread", at_once)
        await bench.start()
        wedged = bench.now[0]
        wedged.on_step(fake_pools.STEP)  # it has reported a step before

        async def stand_still():
            await asyncio.sleep(3600)

        wedged.step = stand_still
        work = [asyncio.ensure_future(bench.pool.generate(bench.group([i], 2))) for i in range(2)]
        began = asyncio.get_running_loop().time()
        while not all(task.done() for task in work):
            await asyncio.sleep(0.01)
        took = asyncio.get_running_loop().time() - began
        assert 4 * CONFIG.probe_deadline_s < took < 6 * CONFIG.probe_deadline_s
        assert "made no step" in bench.pool.replicas[0].failure_cause
        await bench.pool.close()
        bench.buffers.close()

    virtual_time.run(main(), monkeypatch)
