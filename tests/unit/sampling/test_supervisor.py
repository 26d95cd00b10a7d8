"""The supervisor with an engine made of a few lines: which weights it loads under which label, and that nothing hangs."""

import asyncio
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling.calls import CoreLost  # noqa: E402
from torchtune_ext.sampling.records import EngineConfig, EngineFailed, WeightsIncomplete  # noqa: E402
from torchtune_ext.sampling.supervisor import Supervisor  # noqa: E402
from torchtune_ext.sampling.weight_buffer import Buffers  # noqa: E402

CONFIG = EngineConfig(rpc_deadline_s=5.0, probe_deadline_s=1.0, start_deadline_s=5.0)
pytestmark = pytest.mark.timeout(30)


class FakeCore:
    """An engine: notes what it was told to load, by reading the buffers slowly, in two halves."""

    vocabulary, cache_tokens, block, group = 10, 100, 10, 0

    def __init__(self):
        self.calls, self.sign_of_life, self.asleep = {}, time.monotonic(), 0
        self.broken, self.killed, self.stops = None, False, 0
        self.loads = []  # (what was read, label)
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.fail = None  # raised in a load

    @property
    def dead(self):
        return self.killed

    def ending(self):
        return "the fake ended"

    def kill(self):
        self.killed = True

    def log_tail(self):
        return "the fake's log"

    async def launch(self):
        if self.killed:
            raise CoreLost("killed")

    async def load(self, buffers, version):
        first = [self.half(buffer, 0) for buffer in buffers]
        self.reading.set()
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        if self.fail is not None:
            raise self.fail
        if self.killed:
            raise CoreLost("killed in a load")
        second = [self.half(buffer, 1) for buffer in buffers]
        self.loads.append((first, second, version))
        self.asleep = 0
        return 0.1, 0.05

    @staticmethod
    def half(buffer, which):
        with open(buffer.address()["path"], "rb") as file:
            file.seek(buffer.manifest["offsets"][which])
            return file.read(1)[0]

    async def sleep(self, level):
        if self.fail is not None:
            raise self.fail
        self.asleep = level

    async def wake(self):
        self.asleep = 0

    async def ping(self, deadline_s):
        if self.fail is not None:
            raise self.fail
        self.sign_of_life = time.monotonic()

    async def end(self, call, reason):
        if self.fail is not None:
            raise self.fail

    async def stop(self):
        self.killed = True
        self.stops += 1


def weights(value):
    return [(name, torch.full((4,), value, dtype=torch.uint8)) for name in ("a", "b")]


class Bench:
    """A supervisor, its buffers, and the lives it has made."""

    def __init__(self, config=CONFIG, version=0):
        self.lives = []
        self.prepare_core = lambda core: None
        self.buffers = Buffers(config.rpc_deadline_s)
        self.supervisor = Supervisor(config, self.make, self.buffers, version)

    def make(self):
        core = FakeCore()
        self.prepare_core(core)
        self.lives.append(core)
        return core

    async def start(self):
        await self.supervisor.prepare()
        await self.supervisor.start()

    def write(self, value, adapter=None):
        self.buffers.write(weights(value), value, adapter, self.supervisor.version)


def run(scenario, *args, **kwargs):
    async def main():
        bench = Bench(*args, **kwargs)
        await bench.start()
        try:
            await asyncio.wait_for(scenario(bench), 20)
        finally:
            await bench.supervisor.close()

    asyncio.run(main())


async def until(condition):
    give_up_at = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.01)


def test_no_publication_writes_while_a_restarting_engine_reads():
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        bench.prepare_core = lambda core: core.go_on.clear()
        bench.lives[0].kill()  # the watch starts another one, which stops in the midst of its load
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].reading.is_set())
        writer = threading.Thread(target=bench.write, args=(2,))
        writer.start()
        await asyncio.sleep(0.5)  # all the time it needs to do harm
        assert writer.is_alive()  # it waits
        bench.lives[1].go_on.set()
        await until(lambda: not writer.is_alive())
        assert bench.lives[1].loads == [([1], [1], 1)]
        assert bench.supervisor.version == 1  # 2 is published, but nobody has it yet
        await bench.supervisor.load()
        assert bench.lives[1].loads[1:] == [([2], [2], 2)] and bench.supervisor.version == 2

    run(scenario)


@pytest.mark.parametrize("moment", ["restart", "wake"])
def test_no_engine_reads_while_a_publication_writes(moment):
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        half, rest = threading.Event(), threading.Event()

        def slowly():
            a, b = weights(2)
            yield a
            half.set()
            rest.wait(10)
            yield b

        if moment == "wake":
            await bench.supervisor.sleep()
            assert bench.lives[0].asleep == 2
        writer = threading.Thread(target=bench.buffers.write, args=(slowly(), 2, None, 1))
        writer.start()
        await until(half.is_set)
        if moment == "restart":
            bench.lives[0].kill()
        waiting = asyncio.ensure_future(bench.supervisor.awake())
        await asyncio.sleep(0.7)
        core = bench.lives[-1]
        assert len(bench.lives) == (2 if moment == "restart" else 1)
        assert not core.reading.is_set() or moment == "wake" and len(core.loads) == 1
        rest.set()
        if moment == "restart":
            await until(lambda: core.loads)
        else:
            await waiting
        assert core.loads[-1] == ([2], [2], 2) and bench.supervisor.version == 2
        await waiting

    run(scenario)


def test_a_writer_that_never_ends_is_a_clear_error_on_both_sides():
    config = replace(CONFIG, rpc_deadline_s=0.3, max_failures=2)

    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        rest = threading.Event()

        def never():
            yield weights(2)[0]
            rest.wait(10)

        writer = threading.Thread(target=lambda: bench.buffers.write(never(), 2, None, 1))
        writer.start()
        bench.lives[0].kill()
        with pytest.raises(EngineFailed, match="did not finish its copy within rpc_deadline_s = 0.3"):
            while True:
                await bench.supervisor.awake()
                await asyncio.sleep(0.05)
        with pytest.raises(EngineFailed, match="not finished loading the last weights within 1.8 s"):
            await asyncio.to_thread(bench.write, 3)  # as long as somebody holds the buffers
        rest.set()
        await asyncio.to_thread(writer.join, 5)

    run(scenario, config)


def test_the_label_is_that_of_the_weights_in_the_buffer():
    """A load that was asked for version 1 and comes to its turn after version 2 was written is one of version 2."""

    async def scenario(bench):
        bench.write(1)
        async with bench.supervisor._control:
            late = asyncio.ensure_future(bench.supervisor.load())
            await asyncio.sleep(0.1)
            bench.write(2)
        await late
        assert bench.lives[0].loads == [([2], [2], 2)] and bench.supervisor.version == 2

    run(scenario)


def test_a_version_counts_once_it_is_loaded_and_versions_grow():
    async def scenario(bench):
        assert bench.supervisor.version == 7
        bench.lives[0].fail = ValueError("not with me")
        bench.write(8)
        assert bench.supervisor.version == 7
        with pytest.raises(ValueError, match="not with me"):
            await bench.supervisor.load()
        assert bench.supervisor.version == 7
        bench.lives[0].fail = None
        bench.write(8)  # the same once more: nothing was ever sampled from it
        await bench.supervisor.load()
        assert bench.supervisor.version == 8
        for version in (8, 3):
            with pytest.raises(ValueError, match=f"version {version} after 8; versions grow"):
                bench.write(version)

    run(scenario, version=7)


def test_an_adapter_comes_alone_over_a_model_that_is_there_and_with_it_otherwise():
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        bench.write(2, adapter={"r": 1})
        await bench.supervisor.load()
        bench.write(3)
        await bench.supervisor.load()
        bench.lives[0].kill()
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].loads)
        assert [load[0] for load in bench.lives[0].loads] == [[1], [2], [3, 2]]
        assert bench.lives[1].loads == [([3, 2], [3, 2], 3)]

    run(scenario)


def test_half_an_adapter_never_reaches_the_engine():
    async def scenario(bench):
        bench.write(1)
        bench.write(2, adapter={"r": 1})
        await bench.supervisor.load()

        def broken():
            yield weights(3)[0]
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            bench.buffers.write(broken(), 3, {"r": 1}, 2)
        with pytest.raises(ValueError, match="last publication of the adapter broke off; publish the adapter first"):
            bench.write(4)
        bench.write(4, adapter={"r": 1})
        bench.write(5)
        await bench.supervisor.load()
        assert bench.lives[0].loads[-1] == ([5, 4], [5, 4], 5)

    run(scenario)


@pytest.mark.parametrize("work", ["load", "restart"])
def test_what_was_begun_is_finished_when_the_caller_goes_away(work):
    """Ctrl-C in `publish` or `sample`: the engine must not stay paused, half loaded, or unannounced."""

    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        core = bench.lives[0]
        if work == "load":
            bench.write(2)
            core.reading.clear()
            core.go_on.clear()
            caller = asyncio.ensure_future(bench.supervisor.load())
        else:
            bench.prepare_core = lambda core: core.go_on.clear()
            caller = asyncio.ensure_future(bench.supervisor.report_lost(core, CoreLost("as it happens")))
        await until(lambda: bench.lives[-1].reading.is_set())
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        bench.lives[-1].go_on.set()
        assert await asyncio.wait_for(bench.supervisor.awake(), 5) is bench.lives[-1]
        await until(lambda: bench.lives[-1].loads[-1][2] == (2 if work == "load" else 1))

    run(scenario)


def test_close_in_the_midst_of_a_restart_ends_the_engine_that_comes_up():
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        bench.prepare_core = lambda core: core.go_on.clear()
        bench.lives[0].kill()
        await until(lambda: len(bench.lives) == 2 and bench.lives[1].reading.is_set())
        waiting = [asyncio.ensure_future(bench.supervisor.awake()), asyncio.ensure_future(bench.supervisor.load())]
        closing = asyncio.ensure_future(bench.supervisor.close())
        await asyncio.sleep(0.05)
        bench.lives[1].go_on.set()
        await asyncio.wait_for(closing, 5)
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, EngineFailed) and "closed" in str(result)
        assert len(bench.lives) == 2 and all(core.killed and core.stops for core in bench.lives)

    run(scenario)


def test_closed_while_the_next_engine_is_made():
    """`Engine.close` looked for an engine to kill in the one moment when there was none."""

    async def scenario(bench):
        def close_now(core):
            bench.supervisor.closed = True

        bench.prepare_core = close_now
        await bench.supervisor.report_lost(bench.lives[0], CoreLost("as it happens"))
        assert len(bench.lives) == 2 and bench.lives[1].stops and bench.supervisor.restarts == 0

    run(scenario)


def test_an_engine_lost_at_sleep_is_replaced_and_sleeps():
    async def scenario(bench):
        bench.lives[0].fail = CoreLost("frozen")
        await bench.supervisor.sleep()
        assert len(bench.lives) == 2 and bench.lives[1].asleep == 1

    run(scenario)


def test_errors_of_our_own_come_out_as_themselves():
    async def scenario(bench):
        bench.lives[0].broken = ZeroDivisionError("division by zero")
        await until(lambda: bench.supervisor.failed is not None and bench.supervisor.core is None)
        with pytest.raises(
            EngineFailed, match=r"counters could not be taken in: ZeroDivisionError\('division"
        ) as caught:
            await bench.supervisor.awake()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert len(bench.lives) == 1  # another engine would not help

    run(scenario)


def test_a_watch_that_fails_is_not_silent():
    async def scenario(bench):
        bench.lives[0].__class__ = type("Strange", (FakeCore,), {"dead": property(lambda self: 1 / 0)})
        await until(lambda: bench.supervisor.failed is not None)
        with pytest.raises(EngineFailed, match="no longer watched: ZeroDivisionError"):
            await bench.supervisor.awake()

    run(scenario)


@pytest.mark.parametrize("asked", ["ping", "abort"])
def test_a_server_that_refuses_a_ping_or_an_abort_is_connected_anew(asked):
    async def scenario(bench):
        core = bench.lives[0]
        call = SimpleNamespace(give_up_at=0.0 if asked == "abort" else float("inf"), ended_by="")
        core.calls, core.fail = {"1": call}, ValueError("refuses the request")
        core.sign_of_life = 0.0 if asked == "ping" else time.monotonic() + 60
        await until(lambda: len(bench.lives) == 2)
        assert await bench.supervisor.ready() is bench.lives[1] and bench.supervisor.failed is None

    run(scenario)


def break_off(bench, version):
    def broken():
        yield weights(version)[0]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.buffers.write(broken(), version, None, bench.supervisor.version)


def test_a_healthy_engine_that_sleeps_is_not_ended_for_weights_that_broke_off():
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        await bench.supervisor.sleep()
        break_off(bench, 2)
        with pytest.raises(WeightsIncomplete, match="broke off while copying.*publish again"):
            await bench.supervisor.awake()
        assert len(bench.lives) == 1 and not bench.lives[0].stops and bench.supervisor.failures == 0
        bench.write(3)
        await bench.supervisor.load()
        assert await bench.supervisor.awake() is bench.lives[0] and bench.supervisor.version == 3

    run(scenario)


def test_no_engine_is_started_that_could_load_nothing():
    async def scenario(bench):
        bench.write(1)
        await bench.supervisor.load()
        break_off(bench, 2)
        bench.lives[0].kill()
        await until(lambda: bench.supervisor.failed is not None and bench.supervisor.core is None)
        with pytest.raises(
            EngineFailed, match="lost .the fake ended. and cannot be replaced: the last publication broke"
        ):
            await bench.supervisor.awake()
        assert len(bench.lives) == 1

    run(scenario)


def test_a_publication_of_nothing_leaves_the_last_one_as_it_is():
    async def scenario(bench):
        bench.write(1)
        with pytest.raises(ValueError, match="named_tensors is empty"):
            bench.buffers.write([], 2, None, 0)
        await bench.supervisor.load()
        assert bench.lives[0].loads == [([1], [1], 1)]

    run(scenario)
