"""Random crashes: a crashed engine serves again only after it has loaded and verified the weights."""

import asyncio
import random

import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools, virtual_time  # noqa: E402
from helpers.fake_backends import CONFIG, weights  # noqa: E402
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
        harness = fake_pools.PoolHarness(monkeypatch, 3, lambda call: rng.randint(1, 30), limit=8)
        monkeypatch.setattr(weight_buffer.asyncio, "to_thread", at_once)  # virtual time has no threads

        def fault(backend, number):
            kind = rng.choice(["none", "none", "none", "launch", "load", "liar", "old version"])
            if kind in ("launch", "load"):
                backend.error = BackendCrashed(kind)
                if kind == "load":
                    backend.launch = lambda: asyncio.sleep(0.1)
            elif kind == "liar":
                honest = backend.checksums

                async def lie():
                    return [dict.fromkeys(sums, 1) for sums in await honest()]

                backend.checksums = lie
            elif kind == "old version":

                async def old():
                    return backend.version - 1

                backend.weight_version = old

        sums = {}

        def look():
            for replica in harness.pool.replicas:
                if replica.serves and replica.backend is not None and sums:
                    backend = replica.backend
                    served.append(replica.number)
                    # The newest weight sync may still be running.
                    assert backend.version in (published[0], published[0] - 1, None if published[0] <= 1 else -1)
                    assert backend.loaded_checksums in (sums[published[0]], sums.get(published[0] - 1, {}))

        await harness.start()
        harness.prepare_backend = fault
        served, published = [], [0]
        for replica in harness.pool.replicas:
            replica.set_state = lambda *change, become=replica.set_state: (become(*change), look())
        drawn, failed = [], None
        try:
            for version in range(1, 13):
                tensors = weights(version)
                sums[version] = {name: weight_buffer.checksum(tensor) for name, tensor in tensors}
                published[0] = version
                await harness.publish(tensors, version)
                for replica in harness.pool.replicas:
                    if replica.serves:
                        assert replica.backend.version == version and replica.backend.loaded_checksums == sums[version]
                work = [
                    asyncio.ensure_future(harness.pool.generate_group(harness.group_requests([version, i], 3, 30)))
                    for i in range(8)
                ]
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(rng.random())
                    replica = rng.choice(harness.pool.replicas)
                    if replica.backend is not None:
                        replica.backend.kill()
                        await replica.backend.stop()
                for group in await asyncio.gather(*work):
                    drawn += group
                    assert {int(v) for c in group for v in c.versions} <= {version}
        except EngineFailed as error:
            failed = error  # the only allowed error: all three were retired
            assert not harness.pool.active_replicas
        await harness.pool.close()
        harness.buffers.close()
        return len(drawn), len(served), failed

    count, served, failed = virtual_time.run(main(), monkeypatch)
    assert served and (count == 12 * 8 * 3 or failed is not None)


async def at_once(function, *args):
    return function(*args)


def test_pool_replica_without_step_progress_is_replaced(monkeypatch):
    """A health check alone would never detect the stall."""

    async def main():
        harness = fake_pools.PoolHarness(monkeypatch, 2, lambda call: 10)
        monkeypatch.setattr(weight_buffer.asyncio, "to_thread", at_once)
        await harness.start()
        wedged = harness.current_backends[0]
        wedged.on_step(fake_pools.STEP)  # it has reported a step before

        async def stand_still():
            await asyncio.sleep(3600)

        wedged.step = stand_still
        work = [asyncio.ensure_future(harness.pool.generate_group(harness.group_requests([i], 2))) for i in range(2)]
        began = asyncio.get_running_loop().time()
        while not all(task.done() for task in work):
            await asyncio.sleep(0.01)
        took = asyncio.get_running_loop().time() - began
        assert 4 * CONFIG.probe_deadline_s < took < 6 * CONFIG.probe_deadline_s
        assert "no engine step for" in harness.pool.replicas[0].failure_cause
        await harness.pool.close()
        harness.buffers.close()

    virtual_time.run(main(), monkeypatch)
