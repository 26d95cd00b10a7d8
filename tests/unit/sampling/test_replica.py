"""A replica with a fake backend: loaded weights, their versions, and waiting callers."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_backends import CONFIG, Load, poll_until, run_scenario, weights  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed  # noqa: E402

pytestmark = pytest.mark.timeout(30)


def complete_load(versions, version):
    """The load of buffers whose tensors are all of `versions`, one version per buffer."""
    return Load(first_tensor=versions, second_tensor=versions, version=version)


def test_replica_weight_write_waits_for_restarting_backend_load():
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        harness.prepare_backend = lambda backend: backend.load_allowed.clear()
        harness.backends[0].kill()  # the health check starts another backend, which blocks in `load`
        await poll_until(lambda: len(harness.backends) == 2 and harness.backends[1].load_started.is_set())
        writer = threading.Thread(target=harness.write, args=(2,))
        writer.start()
        # Without the read lock, the write would finish within 50 ms.
        await asyncio.sleep(0.05)
        assert writer.is_alive()
        harness.backends[1].load_allowed.set()
        await poll_until(lambda: not writer.is_alive())
        assert harness.backends[1].loads == [complete_load([1], version=1)]
        assert harness.replica.version == 1  # 2 is published, but not loaded yet
        await harness.replica.load()
        assert harness.backends[1].loads[1:] == [complete_load([2], version=2)] and harness.replica.version == 2

    run_scenario(scenario)


@pytest.mark.parametrize("moment", ["restart", "wake"])
def test_replica_load_waits_for_weight_write(moment):
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        half_written, finish = threading.Event(), threading.Event()

        def paused_weights():
            a, b = weights(2)
            yield a
            half_written.set()
            finish.wait(10)
            yield b

        if moment == "wake":
            await harness.replica.sleep()
            assert harness.backends[0].sleep_level == 2
        writer = threading.Thread(target=harness.buffers.write, args=(paused_weights(), 2, None, 1))
        writer.start()
        await poll_until(half_written.is_set)
        if moment == "restart":
            harness.backends[0].kill()
            await poll_until(lambda: len(harness.backends) == 2)
        waiting = asyncio.ensure_future(harness.awake_backend())
        await asyncio.sleep(0.05)
        backend = harness.backends[-1]
        assert len(harness.backends) == (2 if moment == "restart" else 1)
        assert not backend.load_started.is_set() or (moment == "wake" and len(backend.loads) == 1)
        finish.set()
        if moment == "restart":
            await poll_until(lambda: backend.loads)
        else:
            await waiting
        assert backend.loads[-1] == complete_load([2], version=2) and harness.replica.version == 2
        await waiting

    run_scenario(scenario)


def test_replica_stuck_write_fails_waiters_and_next_write():
    config = replace(CONFIG, rpc_deadline_s=0.02, max_failures=2)

    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        half_written, finish = threading.Event(), threading.Event()

        def stuck_weights():
            yield weights(2)[0]
            half_written.set()
            finish.wait(10)

        writer = threading.Thread(target=lambda: harness.buffers.write(stuck_weights(), 2, None, 1))
        writer.start()
        await poll_until(half_written.is_set)
        harness.backends[0].kill()
        with pytest.raises(EngineFailed, match="rpc_deadline_s=0.02"):
            while True:
                await harness.awake_backend()
                await asyncio.sleep(0.002)
        # The write waits for a load, whose deadline is 6 * rpc_deadline_s.
        with pytest.raises(EngineFailed, match="loading .* 0.12 s"):
            await asyncio.to_thread(harness.write, 3)  # times out while the buffers are locked
        finish.set()
        await asyncio.to_thread(writer.join, 5)

    run_scenario(scenario, config)


def test_replica_load_uses_version_of_written_weights():
    """A load for version 1 that runs after version 2 was written loads version 2."""

    async def scenario(harness):
        harness.write(1)
        async with harness.replica._transition_lock:
            load_task = asyncio.ensure_future(harness.replica.load())
            await asyncio.sleep(0.01)
            harness.write(2)
        await load_task
        assert harness.backends[0].loads == [complete_load([2], version=2)] and harness.replica.version == 2

    run_scenario(scenario)


@pytest.mark.parametrize("work", ["load", "wake"])
def test_replica_replaced_backend_does_not_serve(work):
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        backend = harness.backends[0]
        if work == "wake":
            await harness.replica.sleep()
        async with harness.replica._transition_lock:
            harness.write(2)
            load_task = asyncio.ensure_future(harness.pool.load(2) if work == "load" else harness.awake_backend())
            await asyncio.sleep(0.01)
            harness.replica.restart(backend, "a request reported a crash")
        await load_task
        assert len(backend.loads) == 1 and harness.backends[1].loads == [complete_load([2], version=2)]

    run_scenario(scenario)


def test_replica_health_check_waits_for_first_completion():
    """Kernels are compiled at the first request of a backend, also after a restart."""

    async def scenario(harness):
        async def watched_deadline():
            backend, deadlines = harness.backends[-1], []

            async def ping(deadline_s):
                deadlines.append(deadline_s)

            backend.ping, backend.last_heartbeat = ping, 0.0
            backend.requests = {"a": SimpleNamespace(fail=lambda cause: None)}
            await poll_until(lambda: len(deadlines) > 1)
            return deadlines[-1]

        assert await watched_deadline() == CONFIG.start_deadline_s
        harness.replica.report_finished()
        assert await watched_deadline() == CONFIG.probe_deadline_s
        harness.backends[-1].kill()
        await poll_until(lambda: len(harness.backends) == 2 and harness.replica.serves)
        assert await watched_deadline() == CONFIG.start_deadline_s

    run_scenario(scenario)


def test_replica_version_updates_after_load_and_must_grow():
    async def scenario(harness):
        assert harness.replica.version == 7
        harness.backends[0].error = ValueError("load refused")
        harness.write(8)
        assert harness.replica.version == 7
        with pytest.raises(ValueError, match="load refused"):
            await harness.replica.load()
        assert harness.replica.version == 7
        harness.backends[0].error = None
        harness.write(8)  # the same version again: it was never sampled from
        await harness.replica.load()
        assert harness.replica.version == 8
        for version in (8, 3):
            with pytest.raises(ValueError, match=f"version {version} after 8; versions must increase"):
                harness.write(version)

    run_scenario(scenario, version=7)


def test_replica_adapter_loads_with_model_only_if_needed():
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        harness.write(2, adapter={"r": 1})
        await harness.replica.load()
        harness.write(3)
        await harness.replica.load()
        harness.backends[0].kill()
        await poll_until(lambda: len(harness.backends) == 2 and harness.backends[1].loads)
        assert [load.first_tensor for load in harness.backends[0].loads] == [[1], [2], [3, 2]]
        assert harness.backends[1].loads == [complete_load([3, 2], version=3)]

    run_scenario(scenario)


def test_replica_incomplete_adapter_is_not_loaded():
    async def scenario(harness):
        harness.write(1)
        harness.write(2, adapter={"r": 1})
        await harness.replica.load()

        def broken():
            yield weights(3)[0]
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            harness.buffers.write(broken(), 3, {"r": 1}, 2)
        with pytest.raises(ValueError, match="publish the adapter first"):
            harness.write(4)
        harness.write(4, adapter={"r": 1})
        harness.write(5)
        await harness.replica.load()
        assert harness.backends[0].loads[-1] == complete_load([5, 4], version=5)

    run_scenario(scenario)


@pytest.mark.parametrize("work", ["load", "restart"])
def test_replica_started_work_finishes_after_caller_cancels(work):
    """Ctrl-C in `publish` or `sample`: the engine must not stay paused, half loaded or unused."""

    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        backend = harness.backends[0]
        backend.load_started.clear()
        if work == "load":
            harness.write(2)
            backend.load_allowed.clear()
            caller = asyncio.ensure_future(harness.replica.load())
        else:
            harness.prepare_backend = lambda backend: backend.load_allowed.clear()
            caller = harness.replica.restart(backend, "test crash")
        await poll_until(lambda: harness.backends[-1].load_started.is_set())
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        harness.backends[-1].load_allowed.set()
        assert await asyncio.wait_for(harness.awake_backend(), 5) is harness.backends[-1]
        await poll_until(lambda: harness.backends[-1].loads[-1].version == (2 if work == "load" else 1))

    run_scenario(scenario)


def test_replica_empty_weight_sync_keeps_previous_weights():
    async def scenario(harness):
        harness.write(1)
        with pytest.raises(ValueError, match="named_tensors is empty"):
            harness.buffers.write([], 2, None, 0)
        await harness.replica.load()
        assert harness.backends[0].loads == [complete_load([1], version=1)]

    run_scenario(scenario)


def test_replica_crash_reported_during_load_replaces_backend(caplog):
    """The crashed engine may still finish the load. It must not serve again."""

    async def scenario(harness):
        harness.write(1)
        backend, states, set_state = harness.backends[0], [], harness.replica.set_state

        def record(state, cause=""):
            states.append((state, harness.backends.index(harness.replica.backend)))
            set_state(state, cause)

        harness.replica.set_state = record
        backend.load_started.clear()
        backend.load_allowed.clear()
        load_task = asyncio.ensure_future(harness.pool.load(1))
        await poll_until(backend.load_started.is_set)
        harness.replica.restart(backend, "a request reported a crash")
        backend.load_allowed.set()
        await load_task
        assert states == [(State.RESTARTING, 0), (State.SERVING, 1)]
        assert harness.replica.backend is harness.backends[1] and harness.replica.restarts == 1
        assert harness.backends[1].loads == [complete_load([1], version=1)]
        assert "crashed (a request reported a crash), consecutive failure 1" in caplog.text

    run_scenario(scenario)


def test_replica_load_without_pause_reports_elapsed_time():
    async def scenario(harness):
        async def load(buffers, version):
            await asyncio.sleep(0.01)
            return 0.0, 0.0

        harness.write(1)
        harness.backends[0].load = load
        pause_s, load_s = await harness.pool.load(1)
        assert 0.01 <= pause_s < 5 and load_s == 0.0

    run_scenario(scenario)
