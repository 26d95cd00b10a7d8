"""Restarts of a replica with a minimal engine: causes, limits and messages.

The same with real processes: tests/integration/test_engine_failures.py.
"""

import asyncio
from subprocess import TimeoutExpired
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_cores import CONFIG, Bench, FakeCore, run, until  # noqa: E402
from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.types import EngineFailed, WeightsIncomplete  # noqa: E402

pytestmark = pytest.mark.timeout(30)


def dies(core):
    core.kill()


def hangs(core):
    """A request is in flight, the engine has made no step for long and does not answer a ping."""
    core.calls = {"1": SimpleNamespace()}
    core.sign_of_life, core.fail = 0.0, BackendCrashed("did not answer")


@pytest.mark.parametrize("way", [dies, hangs])
def test_crashed_replica_restarts_with_current_weights(way, caplog):
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        way(bench.lives[0])
        await until(lambda: bench.lane.restarts == 1)
        assert await bench.lane.awake() is bench.lives[1] and bench.lives[0].stops == 1
        assert bench.lives[1].loads == [([1], [1], 1)] and bench.lane.version == 1
        cause = "the fake ended" if way is dies else "did not answer"
        assert f"engine crashed ({cause}), failure 1 in a row" in caplog.text

    run(scenario)


@pytest.mark.parametrize("moment", ["launch", "load"])
def test_failed_restart_is_retried_up_to_limit(moment):
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()

        def break_it(core):
            core.fail = BackendCrashed("as it comes up")
            if moment == "load":
                core.launch = lambda: asyncio.sleep(0)

        bench.prepare_core = break_it
        bench.lives[0].kill()
        with pytest.raises(
            EngineFailed, match="(?s)failed 3 times in a row, the last time: as it comes up.*the fake's log"
        ):
            await bench.lane.lose(bench.lives[0], "as it happens")
            await bench.lane.awake()
        assert len(bench.lives) == CONFIG.max_failures and all(core.stops for core in bench.lives)
        assert bench.lane.restarts == 0

    run(scenario)


def test_consecutive_failure_count_resets_after_finished_request():
    async def scenario(bench):
        for count in range(1, 5):
            bench.lives[-1].kill()
            await until(lambda count=count: bench.lane.restarts == count)
            bench.lane.report_finished()
        assert bench.lane.failures == 0
        for count in (5, 6):
            bench.lives[-1].kill()
            await until(lambda count=count: bench.lane.restarts == count)
        bench.lives[-1].kill()
        await until(lambda: bench.lane.failed is not None)
        assert len(bench.lives) == 7

    run(scenario)


def test_the_failure_of_the_first_start_is_final():
    async def scenario():
        bench = Bench()
        bench.prepare_core = dies
        await bench.start()
        with pytest.raises(EngineFailed, match="(?s)did not start: killed.*the fake's log"):
            await bench.lane.wait_awake()
        assert len(bench.lives) == 1 and bench.lives[0].stops == 1
        await bench.lane.close()

    asyncio.run(scenario())


def test_replica_failed_stop_still_reports_last_failure(caplog):
    async def scenario(bench):
        async def late():
            raise TimeoutExpired("the engine's client", 5)

        bench.lives[0].stop = late
        bench.lives[0].kill()
        with pytest.raises(EngineFailed, match="failed 3 times in a row, the last time: .*timed out after 5 seconds"):
            await bench.lane.lose(bench.lives[0], "as it happens")
            await bench.lane.awake()
        assert "the engine did not end properly" in caplog.text
        await bench.lane.close()

    run(scenario)


def test_close_during_restart_ends_starting_backend():
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        bench.prepare_core = lambda core: core.go_on.clear()
        bench.lives[0].kill()
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].reading.is_set())
        waiting = [asyncio.ensure_future(bench.lane.awake()), asyncio.ensure_future(bench.lane.load())]
        closing = asyncio.ensure_future(bench.lane.close())
        await asyncio.sleep(0.01)
        bench.lives[1].go_on.set()
        await asyncio.wait_for(closing, 5)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineFailed) and "closed" in str(result)
        assert len(bench.lives) == 2 and all(core.killed and core.stops for core in bench.lives)

    run(scenario)


def test_closed_while_the_next_engine_is_made():
    """`Engine.close` found no backend to kill, because a restart had just removed it."""

    async def scenario(bench):
        def close_now(core):
            bench.lane.closed = True

        bench.prepare_core = close_now
        await bench.lane.lose(bench.lives[0], "as it happens")
        assert len(bench.lives) == 2 and bench.lives[1].stops and bench.lane.restarts == 0

    run(scenario)


def test_replica_crash_at_sleep_is_replaced_and_sleeps():
    async def scenario(bench):
        bench.lives[0].fail = BackendCrashed("frozen")
        await bench.lane.sleep()
        assert len(bench.lives) == 2 and bench.lives[1].asleep == 1

    run(scenario)


def test_replica_crash_while_sleeping_restarts_on_wake():
    """Until then the trainer uses the GPU, and a new engine would compete for its memory."""

    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        await bench.lane.sleep()
        bench.lives[0].kill()
        await asyncio.sleep(20 * bench.lane._tick_s)
        assert len(bench.lives) == 1
        bench.write(2)
        await bench.lane.load()
        assert len(bench.lives) == 2 and bench.lives[1].loads == [([2], [2], 2)] and not bench.lives[1].asleep

    run(scenario)


def test_errors_of_our_own_come_out_as_themselves():
    async def scenario(bench):
        bench.lives[0].broken = ZeroDivisionError("division by zero")
        await until(lambda: bench.lane.failed is not None and bench.lane.core is None)
        with pytest.raises(EngineFailed, match=r"reading its counters failed: ZeroDivisionError\('division") as caught:
            await bench.lane.awake()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert len(bench.lives) == 1  # another engine would not help

    run(scenario)


def test_replica_monitor_failure_is_raised():
    async def scenario(bench):
        bench.lives[0].__class__ = type("Strange", (FakeCore,), {"dead": property(lambda self: 1 / 0)})
        await until(lambda: bench.lane.failed is not None)
        with pytest.raises(EngineFailed, match="the health check failed: ZeroDivisionError"):
            await bench.lane.awake()

    run(scenario)


def test_server_refusing_health_check_is_reconnected():
    async def scenario(bench):
        core = bench.lives[0]
        core.calls, core.fail = {"1": SimpleNamespace()}, ValueError("refuses the request")
        core.sign_of_life = 0.0
        await until(lambda: len(bench.lives) == 2)
        assert await bench.lane.ready() is bench.lives[1] and bench.lane.failed is None

    run(scenario)


def test_sleeping_replica_survives_interrupted_weight_write():
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        await bench.lane.sleep()
        bench.break_off(2)
        with pytest.raises(WeightsIncomplete, match="interrupted while copying.*publish again"):
            await bench.lane.awake()
        assert len(bench.lives) == 1 and not bench.lives[0].stops and bench.lane.failures == 0
        bench.write(3)
        await bench.lane.load()
        assert await bench.lane.awake() is bench.lives[0] and bench.lane.version == 3

    run(scenario)


def test_replica_without_loadable_weights_is_not_restarted():
    async def scenario(bench):
        bench.write(1)
        await bench.lane.load()
        bench.break_off(2)
        bench.lives[0].kill()
        await until(lambda: bench.lane.failed is not None and bench.lane.core is None)
        with pytest.raises(
            EngineFailed, match="crashed .the fake ended. and cannot be restarted: the last weight sync was interrupted"
        ):
            await bench.lane.awake()
        assert len(bench.lives) == 1

    run(scenario)
