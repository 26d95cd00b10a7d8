"""`Engine` without vLLM: close at any moment, concurrent weight syncs, cancel, callback errors."""

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from helpers.fake_backends import SleepingBackend, weights
from helpers.waiting import start_thread, wait_until
from torchtune_ext.run.stop import RunStopped, StopSignals
from torchtune_ext.sampling.backend import BackendCrashed, EngineStepStats
from torchtune_ext.sampling.engine import EngineFailed, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.sampling.weight_buffer import checksum

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("first", [True, False], ids=["first start", "restart"])
def test_close_while_an_engine_comes_up(make_engine, first):
    engine = make_engine(start=False)
    if first:
        SleepingBackend.launch_allowed.clear()
        engine.start()
    else:
        engine.start()
        engine.wait_ready(10)
        SleepingBackend.launch_allowed.clear()
        SleepingBackend.instances[0].kill()
    count = 1 if first else 2
    wait_until(lambda: len(SleepingBackend.instances) == count and SleepingBackend.instances[-1].launched.is_set())
    sampler, outcome = start_thread(lambda: engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4)))
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert len(SleepingBackend.instances) == count  # no further one
    assert not Path(engine._reaper.folder).exists() and not Path(f"/proc/{engine._reaper.pid}").exists()
    sampler.join(5)
    assert isinstance(outcome[0], EngineFailed)


def test_closed_while_another_thread_waits_for_the_engine(make_engine, monkeypatch):
    async def launch(self):  # as for a server's connection, which does not block the loop
        self.launched.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(SleepingBackend, "launch", launch)
    engine = make_engine(start=False)
    engine.start()
    waiter, outcome = start_thread(lambda: engine.wait_ready(20))
    assert SleepingBackend.instances[0].launched.wait(5)
    engine.close()
    waiter.join(10)
    assert isinstance(outcome[0], EngineFailed) and "closed" in str(outcome[0])


def test_engine_close_continues_after_partial_failure(make_engine, monkeypatch, caplog):
    engine = make_engine()

    async def fail():
        raise ZeroDivisionError("in the lane")

    monkeypatch.setattr(engine._pool.replicas[0], "close", fail)
    memory = Path(engine._buffers.model.address()["path"])
    engine.close()
    assert "the engine was not closed properly" in caplog.text and "in the lane" in caplog.text
    assert not memory.exists() and not engine._thread.is_alive() and not Path(engine._reaper.folder).exists()


def test_engine_close_ends_in_flight_sample_and_publish(make_engine):
    engine = make_engine()
    half, rest = threading.Event(), threading.Event()

    def slowly():
        yield weights(1)[0]
        half.set()
        rest.wait(10)
        yield weights(1)[1]

    sampler, sampled = start_thread(lambda: engine.sample([[1, 2]], 4, SamplingConfig(max_tokens=4)))
    publisher, published = start_thread(lambda: engine.publish(slowly(), 1))
    waiting, waited = start_thread(lambda: (half.wait(5), engine.publish(weights(2), 2)))
    wait_until(lambda: half.is_set() and len(SleepingBackend.instances[0].requests) > 0)
    closer, closed = start_thread(engine.close)
    sampler.join(5)
    rest.set()
    for thread in (publisher, waiting, closer):
        thread.join(10)
        assert not thread.is_alive()
    for outcome in (sampled, published, waited):
        assert isinstance(outcome[0], EngineFailed) and re.search("closed|not running", str(outcome[0]))
    assert closed == [None]


@pytest.mark.parametrize("work", ["sample", "publish"])
def test_engine_interrupted_caller_leaves_no_unretrieved_error(make_engine, monkeypatch, complaints, work):
    """The pending call ends after the engine was closed and its process is dead."""

    async def until_dead(self, *args):
        self.busy.set()
        while not self.is_dead:
            with contextlib.suppress(asyncio.CancelledError):  # as vLLM's client, which first tells its engine
                await asyncio.sleep(0.002)
        raise BackendCrashed("the engine is gone")

    engine = make_engine()
    for name in ("generate", "load"):
        monkeypatch.setattr(SleepingBackend, name, until_dead)

    def stop():
        SleepingBackend.instances[0].busy.wait(10)
        # By then the caller must be waiting.
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    with StopSignals(1.0, str):
        stopper, _ = start_thread(stop)
        with pytest.raises(RunStopped):
            if work == "sample":
                engine.sample([[1, 2]], 4, SamplingConfig(max_tokens=4))
            engine.publish(weights(1), 1)
    stopper.join()
    engine.close()
    assert not complaints()


def test_engine_call_from_own_thread_raises(make_engine, monkeypatch):
    engine = make_engine()

    async def generate(self, call):
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "length", 0)

    monkeypatch.setattr(SleepingBackend, "generate", generate)
    for method in (engine.close, lambda: engine.publish(weights(1), 1)):
        with pytest.raises(RuntimeError, match="on_completion may not call the engine"):
            engine.submit([1], 1, SamplingConfig(max_tokens=1), lambda s, c, method=method: method()).result(10)
    assert len(engine.sample([[1]], 1, SamplingConfig(max_tokens=1))[0]) == 1  # it still runs


def test_two_threads_publish_one_after_the_other(make_engine):
    engine = make_engine()
    results = [start_thread(lambda v=v: engine.publish(weights(v), v)) for v in (1, 2)]
    for thread, _ in results:
        thread.join(10)
    outcomes = [outcome[0] for _, outcome in results]
    sums = [outcome.checksums for outcome in outcomes if not isinstance(outcome, ValueError)]
    # The first one was earlier, or is refused.
    assert sums == [{name: checksum(t) for name, t in weights(v)} for v in (1, 2)][-len(sums) :] and engine.version == 2


def test_engine_publish_during_evaluation_is_refused(make_engine):
    engine, sampling = make_engine(), SamplingConfig(max_tokens=4)
    sample = engine.submit([1, 2], 2, sampling)
    evaluation = engine.submit([1, 2], 2, sampling, priority=Priority.EVALUATION)
    with pytest.raises(RuntimeError, match="version 1 during an evaluation of version 0"):
        engine.publish(weights(1), 1)
    assert engine.version == 0
    evaluation.cancel()
    engine.publish(weights(1), 1)
    assert engine.version == 1 and not sample.done()


def test_engine_evaluation_waits_for_running_weight_sync(make_engine):
    engine = make_engine()
    backend, half, rest = SleepingBackend.instances[0], threading.Event(), threading.Event()

    def slowly():
        yield weights(1)[0]
        half.set()
        assert rest.wait(10)
        yield weights(1)[1]

    publisher, _ = start_thread(lambda: engine.publish(slowly(), 1))
    assert half.wait(5)
    request = lambda: engine.submit([1], 1, SamplingConfig(max_tokens=4), priority=Priority.EVALUATION)  # noqa: E731
    asker, _ = start_thread(request)
    time.sleep(0.05)
    assert not backend.requests
    rest.set()
    publisher.join(10)
    asker.join(10)
    wait_until(lambda: backend.requests)
    assert engine.version == 1


def test_engine_group_cancelled_during_startup_is_dropped(make_engine):
    engine = make_engine()
    cancelled = engine.submit([1, 2], 3, SamplingConfig(max_tokens=4))
    wait_until(lambda: SleepingBackend.instances[0].requests)
    SleepingBackend.launch_allowed.clear()
    SleepingBackend.instances[0].kill()
    wait_until(lambda: len(SleepingBackend.instances) == 2 and SleepingBackend.instances[1].launched.is_set())
    assert cancelled.cancel()
    engine.submit([3], 1, SamplingConfig(max_tokens=4))
    SleepingBackend.launch_allowed.set()
    wait_until(lambda: SleepingBackend.instances[1].requests)
    assert [call.prompt for call in SleepingBackend.instances[1].requests.values()] == [[3]]


def test_engine_stats_error_is_raised_from_sample(make_engine, monkeypatch):
    engine = make_engine()

    def broken(*args):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(engine._pool.replicas[0].throttle.controller, "observe", broken)
    sampler, outcome = start_thread(lambda: engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4)))
    backend = SleepingBackend.instances[0]
    wait_until(lambda: backend.requests)
    try:
        backend.on_step(EngineStepStats(0.5, 1, 0, 0, 0, 0))
    except ZeroDivisionError as error:
        backend.stats_error = error  # as the client's logger does
    sampler.join(10)
    assert isinstance(outcome[0], EngineFailed) and isinstance(outcome[0].__cause__, ZeroDivisionError)
