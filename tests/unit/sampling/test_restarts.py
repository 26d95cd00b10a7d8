"""Restarts of a replica with a minimal engine: causes, limits and messages.

The same with real processes: tests/integration/test_engine_failures.py.
"""

import asyncio
from subprocess import TimeoutExpired

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_backends import CONFIG, FakeBackend, ReplicaHarness, poll_until, run_scenario  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed, EngineRequest  # noqa: E402
from torchtune_ext.sampling.replica import State  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed, SamplingConfig, WeightsIncomplete  # noqa: E402

pytestmark = pytest.mark.timeout(30)


def dies(backend):
    backend.kill()


def hangs(backend):
    """A request is in flight, the engine has made no step for long and does not answer a ping."""
    backend.requests = {"1": EngineRequest([1], SamplingConfig(max_tokens=1), None)}
    backend.last_heartbeat, backend.error = 0.0, BackendCrashed("did not answer")


@pytest.mark.parametrize("way", [dies, hangs])
def test_crashed_replica_restarts_with_current_weights(way, caplog):
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        way(harness.backends[0])
        await poll_until(lambda: harness.replica.restarts == 1)
        assert await harness.awake_backend() is harness.backends[1] and harness.backends[0].num_stops == 1
        assert harness.backends[1].loads == [([1], [1], 1)] and harness.replica.version == 1
        cause = "the fake ended" if way is dies else "did not answer"
        assert f"engine: crashed ({cause}), consecutive failure 1: restarting it" in caplog.text

    run_scenario(scenario)


@pytest.mark.parametrize("moment", ["launch", "load"])
def test_failed_restart_is_retried_up_to_limit(moment):
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()

        def break_it(backend):
            backend.error = BackendCrashed("as it comes up")
            if moment == "load":
                backend.launch = lambda: asyncio.sleep(0)

        harness.prepare_backend = break_it
        harness.backends[0].kill()
        with pytest.raises(
            EngineFailed, match="(?s)failed 3 times in a row, the last time: as it comes up.*the fake's log"
        ):
            await harness.replica.restart(harness.backends[0], "as it happens")
            await harness.awake_backend()
        assert len(harness.backends) == CONFIG.max_failures and all(backend.num_stops for backend in harness.backends)
        assert harness.replica.restarts == 0

    run_scenario(scenario)


def test_consecutive_failure_count_resets_after_finished_request():
    async def scenario(harness):
        for count in range(1, 5):
            harness.backends[-1].kill()
            await poll_until(lambda count=count: harness.replica.restarts == count)
            harness.replica.report_finished()
        assert harness.replica.failures == 0
        for count in (5, 6):
            harness.backends[-1].kill()
            await poll_until(lambda count=count: harness.replica.restarts == count)
        harness.backends[-1].kill()
        await poll_until(lambda: harness.replica.error is not None)
        assert len(harness.backends) == 7

    run_scenario(scenario)


def test_the_failure_of_the_first_start_is_final():
    async def scenario():
        harness = ReplicaHarness()
        harness.prepare_backend = dies
        await harness.start()
        with pytest.raises(EngineFailed, match="(?s)did not start: killed.*the fake's log"):
            await harness.awake_backend()
        assert len(harness.backends) == 1 and harness.backends[0].num_stops == 1
        await harness.replica.close()

    asyncio.run(scenario())


def test_replica_failed_stop_still_reports_last_failure(caplog):
    async def scenario(harness):
        async def late():
            raise TimeoutExpired("the engine's client", 5)

        harness.backends[0].stop = late
        harness.backends[0].kill()
        with pytest.raises(EngineFailed, match="failed 3 times in a row, the last time: .*timed out after 5 seconds"):
            await harness.replica.restart(harness.backends[0], "as it happens")
            await harness.awake_backend()
        assert "the engine did not end properly" in caplog.text
        await harness.replica.close()

    run_scenario(scenario)


def test_close_during_restart_ends_starting_backend():
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        harness.prepare_backend = lambda backend: backend.load_allowed.clear()
        harness.backends[0].kill()
        await poll_until(lambda: len(harness.backends) == 2 and harness.backends[1].load_started.is_set())
        waiting = [asyncio.ensure_future(harness.awake_backend()), asyncio.ensure_future(harness.pool.load(1))]
        closing = asyncio.ensure_future(harness.replica.close())
        await asyncio.sleep(0.01)
        harness.backends[1].load_allowed.set()
        await asyncio.wait_for(closing, 5)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineFailed) and "closed" in str(result)
        assert len(harness.backends) == 2 and all(backend.killed and backend.num_stops for backend in harness.backends)

    run_scenario(scenario)


def test_closed_while_the_next_engine_is_made():
    """`Engine.close` found no backend to kill, because a restart had just removed it."""

    async def scenario(harness):
        def close_now(backend):
            harness.replica.set_state(State.CLOSED)

        harness.prepare_backend = close_now
        await harness.replica.restart(harness.backends[0], "as it happens")
        assert len(harness.backends) == 2 and harness.backends[1].num_stops and harness.replica.restarts == 0

    run_scenario(scenario)


def test_replica_crash_at_sleep_is_replaced_and_sleeps():
    async def scenario(harness):
        harness.backends[0].error = BackendCrashed("frozen")
        await harness.pool.sleep()
        assert len(harness.backends) == 2 and harness.backends[1].sleep_level == 1

    run_scenario(scenario)


def test_replica_crash_while_sleeping_restarts_on_wake():
    """Until then the trainer uses the GPU, and a new engine would compete for its memory."""

    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        await harness.replica.sleep()
        harness.backends[0].kill()
        await asyncio.sleep(20 * harness.replica._watch_interval_s)
        assert len(harness.backends) == 1
        harness.write(2)
        await harness.pool.load(2)
        assert (
            len(harness.backends) == 2
            and harness.backends[1].loads == [([2], [2], 2)]
            and not harness.backends[1].sleep_level
        )

    run_scenario(scenario)


def test_errors_of_our_own_come_out_as_themselves():
    async def scenario(harness):
        harness.backends[0].stats_error = ZeroDivisionError("division by zero")
        await poll_until(lambda: harness.replica.error is not None and harness.replica.backend is None)
        with pytest.raises(EngineFailed, match=r"reading its counters failed: ZeroDivisionError\('division") as caught:
            await harness.awake_backend()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert len(harness.backends) == 1  # another engine would not help

    run_scenario(scenario)


def test_replica_monitor_failure_is_raised():
    async def scenario(harness):
        harness.backends[0].__class__ = type("Strange", (FakeBackend,), {"is_dead": property(lambda self: 1 / 0)})
        await poll_until(lambda: harness.replica.error is not None)
        with pytest.raises(EngineFailed, match="the health check failed: ZeroDivisionError"):
            await harness.awake_backend()

    run_scenario(scenario)


def test_server_refusing_health_check_is_reconnected():
    async def scenario(harness):
        backend = harness.backends[0]
        backend.requests = {"1": EngineRequest([1], SamplingConfig(max_tokens=1), None)}
        backend.error = ValueError("refuses the request")
        backend.last_heartbeat = 0.0
        await poll_until(lambda: len(harness.backends) == 2)
        assert await harness.awake_backend() is harness.backends[1] and harness.replica.error is None

    run_scenario(scenario)


def test_sleeping_replica_survives_interrupted_weight_write():
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        await harness.replica.sleep()
        harness.write_failing(2)
        with pytest.raises(WeightsIncomplete, match="interrupted while copying.*publish again"):
            await harness.awake_backend()
        assert len(harness.backends) == 1 and not harness.backends[0].num_stops and harness.replica.failures == 0
        harness.write(3)
        await harness.replica.load()
        assert await harness.awake_backend() is harness.backends[0] and harness.replica.version == 3

    run_scenario(scenario)


def test_replica_without_loadable_weights_is_not_restarted():
    async def scenario(harness):
        harness.write(1)
        await harness.replica.load()
        harness.write_failing(2)
        harness.backends[0].kill()
        await poll_until(lambda: harness.replica.error is not None and harness.replica.backend is None)
        with pytest.raises(
            EngineFailed, match="crashed .the fake ended. and cannot be restarted: the last weight sync was interrupted"
        ):
            await harness.awake_backend()
        assert len(harness.backends) == 1

    run_scenario(scenario)
