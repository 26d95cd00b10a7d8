"""A replica with a minimal engine: loaded weights, their versions, and waiting callers."""

import asyncio
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_cores import CONFIG, run, until, weights  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed  # noqa: E402

pytestmark = pytest.mark.timeout(30)


def test_replica_weight_write_waits_for_restarting_backend_load():
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        bench.prepare_core = lambda core: core.go_on.clear()
        bench.lives[0].kill()  # the health check starts another backend, which stops during its load
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].reading.is_set())
        writer = threading.Thread(target=bench.write, args=(2,))
        writer.start()
        # This is enough time for the bug to show.
        await asyncio.sleep(0.05)
        assert writer.is_alive()
        bench.lives[1].go_on.set()
        await until(lambda: not writer.is_alive())
        assert bench.lives[1].loads == [([1], [1], 1)]
        assert bench.lane.version == 1  # 2 is published, but not loaded yet
        await bench.lane.load()
        assert bench.lives[1].loads[1:] == [([2], [2], 2)] and bench.lane.version == 2

    run(scenario)


@pytest.mark.parametrize("moment", ["restart", "wake"])
def test_replica_load_waits_for_weight_write(moment):
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        half, rest = threading.Event(), threading.Event()

        def slowly():
            a, b = weights(2)
            yield a
            half.set()
            rest.wait(10)
            yield b

        if moment == "wake":
            await bench.lane.sleep()
            assert bench.lives[0].asleep == 2
        writer = threading.Thread(target=bench.buffers.write, args=(slowly(), 2, None, 1))
        writer.start()
        await until(half.is_set)
        if moment == "restart":
            bench.lives[0].kill()
            await until(lambda: len(bench.lives) == 2)
        waiting = asyncio.ensure_future(bench.lane.awake())
        await asyncio.sleep(0.05)
        core = bench.lives[-1]
        assert len(bench.lives) == (2 if moment == "restart" else 1)
        assert not core.reading.is_set() or (moment == "wake" and len(core.loads) == 1)
        rest.set()
        if moment == "restart":
            await until(lambda: core.loads)
        else:
            await waiting
        assert core.loads[-1] == ([2], [2], 2) and bench.lane.version == 2
        await waiting

    run(scenario)


def test_replica_stuck_weight_write_raises_on_both_sides():
    config = replace(CONFIG, rpc_deadline_s=0.02, max_failures=2)

    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        half, rest = threading.Event(), threading.Event()

        def never():
            yield weights(2)[0]
            half.set()
            rest.wait(10)

        writer = threading.Thread(target=lambda: bench.buffers.write(never(), 2, None, 1))
        writer.start()
        await until(half.is_set)
        bench.lives[0].kill()
        with pytest.raises(EngineFailed, match="rpc_deadline_s=0.02"):
            while True:
                await bench.lane.awake()
                await asyncio.sleep(0.002)
        with pytest.raises(EngineFailed, match="loading .* 0.12 s"):
            await asyncio.to_thread(bench.write, 3)  # as long as the buffers are locked
        rest.set()
        await asyncio.to_thread(writer.join, 5)

    run(scenario, config)


def test_replica_load_labels_weights_in_buffer():
    """A load for version 1 that runs after version 2 was written loads version 2."""

    async def scenario(bench):
        bench.write(1)
        async with bench.lane._control:
            late = asyncio.ensure_future(bench.lane.load())
            await asyncio.sleep(0.01)
            bench.write(2)
        await late
        assert bench.lives[0].loads == [([2], [2], 2)] and bench.lane.version == 2

    run(scenario)


@pytest.mark.parametrize("work", ["load", "wake"])
def test_replaced_engine_that_answers_does_not_serve(work):
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        core = bench.lives[0]
        if work == "wake":
            await bench.lane.sleep()
        async with bench.lane._control:
            bench.write(2)
            late = asyncio.ensure_future(bench.lane.load() if work == "load" else bench.lane.awake())
            await asyncio.sleep(0.01)
            bench.lane.lose(core, "a request found it lost")
        await late
        assert len(core.loads) == 1 and bench.lives[1].loads == [([2], [2], 2)]

    run(scenario)


def test_replica_version_updates_after_load_and_must_grow():
    async def scenario(bench):
        assert bench.lane.version == 7
        bench.lives[0].fail = ValueError("not with me")
        bench.write(8)
        assert bench.lane.version == 7
        with pytest.raises(ValueError, match="not with me"):
            await bench.lane.load()
        assert bench.lane.version == 7
        bench.lives[0].fail = None
        bench.write(8)  # the same version again: it was never sampled from
        await bench.lane.load()
        assert bench.lane.version == 8
        for version in (8, 3):
            with pytest.raises(ValueError, match=f"version {version} after 8; versions must grow"):
                bench.write(version)

    run(scenario, version=7)


def test_replica_adapter_loads_with_model_only_if_needed():
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        bench.write(2, adapter={"r": 1})
        await bench.lane.load()
        bench.write(3)
        await bench.lane.load()
        bench.lives[0].kill()
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].loads)
        assert [load[0] for load in bench.lives[0].loads] == [[1], [2], [3, 2]]
        assert bench.lives[1].loads == [([3, 2], [3, 2], 3)]

    run(scenario)


def test_half_an_adapter_never_reaches_the_engine():
    async def scenario(bench):
        bench.write(1)
        bench.write(2, adapter={"r": 1})
        await bench.lane.load()

        def broken():
            yield weights(3)[0]
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            bench.buffers.write(broken(), 3, {"r": 1}, 2)
        with pytest.raises(ValueError, match="publish the adapter first"):
            bench.write(4)
        bench.write(4, adapter={"r": 1})
        bench.write(5)
        await bench.lane.load()
        assert bench.lives[0].loads[-1] == ([5, 4], [5, 4], 5)

    run(scenario)


@pytest.mark.parametrize("work", ["load", "restart"])
def test_replica_started_work_finishes_after_caller_cancels(work):
    """Ctrl-C in `publish` or `sample`: the engine must not stay paused, half loaded or unused."""

    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        core = bench.lives[0]
        core.reading.clear()
        if work == "load":
            bench.write(2)
            core.go_on.clear()
            caller = asyncio.ensure_future(bench.lane.load())
        else:
            bench.prepare_core = lambda core: core.go_on.clear()
            caller = bench.lane.lose(core, "as it happens")
        await until(lambda: bench.lives[-1].reading.is_set())
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        bench.lives[-1].go_on.set()
        assert await asyncio.wait_for(bench.lane.awake(), 5) is bench.lives[-1]
        await until(lambda: bench.lives[-1].loads[-1][2] == (2 if work == "load" else 1))

    run(scenario)


def test_replica_empty_weight_sync_keeps_previous_weights():
    async def scenario(bench):
        bench.write(1)
        with pytest.raises(ValueError, match="named_tensors is empty"):
            bench.buffers.write([], 2, None, 0)
        await bench.lane.load()
        assert bench.lives[0].loads == [([1], [1], 1)]

    run(scenario)
