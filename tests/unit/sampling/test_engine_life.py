"""The engine's frame without vLLM: janitor, close, publications from two threads, deadlines of calls."""

import asyncio
import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.run.stop import Stopped, StopSignals  # noqa: E402
from torchtune_ext.sampling import cleanup  # noqa: E402
from torchtune_ext.sampling import engine as engine_module  # noqa: E402
from torchtune_ext.sampling.calls import CoreLost, Step, bounded, paused  # noqa: E402
from torchtune_ext.sampling.cleanup import Cleanup  # noqa: E402
from torchtune_ext.sampling.core_process import CoreProcess  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.records import Completion  # noqa: E402

pytestmark = pytest.mark.timeout(60)
CONFIG = EngineConfig(rpc_deadline_s=20.0, probe_deadline_s=1.0)


class SleepingCore:
    """An engine whose process sleeps. Its launch blocks the thread, as vLLM's does, until `come_up` or until it is killed."""

    vocabulary, cache_tokens, block = 512, 4096, 32
    made: list = []
    come_up = threading.Event()

    def __init__(self, model_dir, config, log_path, temp_dir, on_step):
        self.calls, self.asleep, self.broken = {}, 0, None
        self.sign_of_life = time.monotonic()
        self.launched = threading.Event()
        self.busy = threading.Event()
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.group = self.process.pid
        self.on_step = on_step
        self.made.append(self)

    def configure(self):
        pass

    @property
    def dead(self):
        return self.process.poll() is not None

    def ending(self):
        return "the process ended"

    async def launch(self):
        self.launched.set()
        while not self.come_up.is_set():
            time.sleep(0.02)
            if self.dead:
                raise CoreLost("killed while it came up")

    async def load(self, buffers, version):
        return 0.1, 0.1

    async def generate(self, call):
        call.begin()
        self.calls[call.id] = call
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if call.was_lost():
                raise CoreLost("ended") from None
            raise
        finally:
            del self.calls[call.id]

    async def end(self, call, reason):
        pass

    async def ping(self, deadline_s):
        self.sign_of_life = time.monotonic()

    def kill(self):
        try:
            os.killpg(self.group, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def log_tail(self):
        return ""

    async def stop(self):
        self.kill()
        self.process.wait(5)
        await asyncio.sleep(0.1)  # as for vLLM's client to notice
        for call in list(self.calls.values()):
            call.lose()


@pytest.fixture
def make_engine(monkeypatch, tmp_path):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(cleanup.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(engine_module, "LocalCore", SleepingCore)
    monkeypatch.setattr(engine_module, "import_vllm", lambda config: None)
    monkeypatch.setattr(SleepingCore, "made", [])
    monkeypatch.setattr(SleepingCore, "come_up", threading.Event())
    SleepingCore.come_up.set()
    engines = []

    def make(config=CONFIG, start=True):
        engine = Engine("model", config, str(tmp_path))
        engines.append(engine)
        if start:
            engine.start()
            engine.wait_ready(10)
        return engine

    yield make
    for engine in engines:
        engine.close()
    assert all(core.process.poll() is not None for core in SleepingCore.made), "a process is left"
    assert list((tmp_path / "tmp").iterdir()) == [], "a temporary folder is left"


def wait_until(condition, seconds=10):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.01)


def in_thread(work):
    """Runs `work` in a thread; the list gets its result or its error."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def weights(value):
    return [(name, torch.full((4,), float(value))) for name in ("a", "b")]


# -- the janitor ------------------------------------------------------------------------------------------------------


def test_a_dead_janitor_is_replaced_and_does_its_work(make_engine):
    engine = make_engine()
    first = engine._cleanup.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: engine._cleanup.pid != first)  # before it is needed
    os.kill(engine._cleanup.pid, signal.SIGKILL)
    SleepingCore.made[0].kill()  # before anybody has looked: when the next engine is made
    wait_until(lambda: len(SleepingCore.made) == 2 and engine.stats().restarts == 1)
    folder, core = Path(engine._cleanup.folder), SleepingCore.made[1]
    engine._cleanup._janitor.stdin.close()  # what it sees when the trainer is killed
    wait_until(lambda: not folder.exists() and core.process.poll() is not None)


def test_close_with_a_dead_janitor(make_engine):
    engine = make_engine()
    os.kill(engine._cleanup.pid, signal.SIGKILL)
    folder = Path(engine._cleanup.folder)
    engine.close()
    assert not folder.exists() and SleepingCore.made[0].process.poll() is not None


def test_close_with_a_stopped_janitor(make_engine, monkeypatch):
    monkeypatch.setattr(cleanup, "JANITOR_END_S", 0.5)
    engine = make_engine()
    os.kill(engine._cleanup.pid, signal.SIGSTOP)
    engine.close()
    assert not Path(engine._cleanup.folder).exists() and not Path(f"/proc/{engine._cleanup.pid}").exists()


def test_an_engine_that_nobody_could_guard_is_ended(make_engine, monkeypatch):
    engine = make_engine()

    def fail(self, group):
        raise OSError("no more processes")

    monkeypatch.setattr(Cleanup, "guard", fail)
    SleepingCore.made[0].kill()
    with pytest.raises(EngineFailed, match="3 times in a row, the last time: no more processes"):
        engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4))
    wait_until(lambda: all(core.process.poll() is not None for core in SleepingCore.made))


def test_a_janitor_is_not_replaced_after_close_and_a_cause_is_told_once(make_engine, monkeypatch, caplog):
    engine = make_engine()
    monkeypatch.setattr(engine_module, "LOOK_S", 0.05)
    looks = []

    def fail(self):
        looks.append(1)
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(Cleanup, "_start", fail)
        os.kill(engine._cleanup.pid, signal.SIGKILL)
        wait_until(lambda: len(looks) >= 3)
    assert caplog.text.count("could not be started again") == caplog.text.count("janitor ended") == 1
    engine.close()
    last = engine._cleanup.pid
    engine._cleanup.look()
    assert engine._cleanup.pid == last
    with pytest.raises(OSError, match="closed"):
        engine._cleanup.guard(1)


# -- close ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["first start", "restart"])
def test_close_while_an_engine_comes_up(make_engine, first):
    engine = make_engine(start=False)
    if first:
        SleepingCore.come_up.clear()
        engine.start()
    else:
        engine.start()
        engine.wait_ready(10)
        SleepingCore.come_up.clear()
        SleepingCore.made[0].kill()
    count = 1 if first else 2
    wait_until(lambda: len(SleepingCore.made) == count and SleepingCore.made[-1].launched.is_set())
    sampler, outcome = in_thread(lambda: engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4)))
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 5
    assert len(SleepingCore.made) == count  # no further one
    assert not Path(engine._cleanup.folder).exists() and not Path(f"/proc/{engine._cleanup.pid}").exists()
    sampler.join(5)
    assert isinstance(outcome[0], EngineFailed)


def test_closed_while_another_thread_waits_for_the_engine(make_engine, monkeypatch):
    async def launch(self):  # as that of a server's connection, which stands nothing still
        self.launched.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(SleepingCore, "launch", launch)
    engine = make_engine(start=False)
    engine.start()
    waiter, outcome = in_thread(lambda: engine.wait_ready(20))
    assert SleepingCore.made[0].launched.wait(5)
    engine.close()
    waiter.join(10)
    assert isinstance(outcome[0], EngineFailed) and "closed" in str(outcome[0])


def test_one_part_that_fails_does_not_keep_the_others_open(make_engine, monkeypatch, caplog):
    engine = make_engine()

    async def fail():
        raise ZeroDivisionError("in the supervisor")

    monkeypatch.setattr(engine._supervisor, "close", fail)
    memory = Path(engine._buffers.model.address()["path"])
    engine.close()
    assert "the engine was not closed properly" in caplog.text and "in the supervisor" in caplog.text
    assert not memory.exists() and not engine._thread.alive and not Path(engine._cleanup.folder).exists()


def test_sample_and_publish_under_way_end_with_close(make_engine):
    engine = make_engine()
    half, rest = threading.Event(), threading.Event()

    def slowly():
        yield weights(1)[0]
        half.set()
        rest.wait(10)
        yield weights(1)[1]

    sampler, sampled = in_thread(lambda: engine.sample([[1, 2]], 4, SamplingConfig(max_tokens=4)))
    publisher, published = in_thread(lambda: engine.publish(slowly(), 1))
    waiting, waited = in_thread(lambda: (half.wait(5), engine.publish(weights(2), 2)))
    wait_until(lambda: half.is_set() and len(SleepingCore.made[0].calls) > 0)
    closer, closed = in_thread(engine.close)
    sampler.join(5)
    rest.set()
    for thread in (publisher, waiting, closer):
        thread.join(10)
        assert not thread.is_alive()
    for outcome in (sampled, published, waited):
        assert isinstance(outcome[0], EngineFailed) and re.search("closed|not running", str(outcome[0]))
    assert closed == [None]


@pytest.mark.parametrize("work", ["sample", "publish"])
def test_a_caller_that_was_stopped_leaves_no_error_that_nobody_fetches(make_engine, monkeypatch, caplog, work):
    """What it had asked for ends after it: the engine is closed meanwhile, and found dead."""

    async def until_dead(self, *args):
        self.busy.set()
        while not self.dead:
            with contextlib.suppress(asyncio.CancelledError):  # as vLLM's client, which first tells its engine
                await asyncio.sleep(0.01)
        raise CoreLost("the engine is gone")

    for name in ("generate", "load"):
        monkeypatch.setattr(SleepingCore, name, until_dead)
    gc.collect()
    caplog.clear()  # of what other tests left behind
    engine = make_engine()

    def stop():
        SleepingCore.made[0].busy.wait(10)
        time.sleep(0.2)  # for the caller to wait for it
        os.kill(os.getpid(), signal.SIGTERM)

    with StopSignals(1.0, str):
        stopper, _ = in_thread(stop)
        with pytest.raises(Stopped):
            if work == "sample":
                engine.sample([[1, 2]], 4, SamplingConfig(max_tokens=4))
            engine.publish(weights(1), 1)
    stopper.join()
    engine.close()
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_the_engine_may_not_be_called_from_its_own_thread(make_engine, monkeypatch):
    engine = make_engine()

    async def generate(self, call):
        return Completion(np.zeros(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "length", 0)

    monkeypatch.setattr(SleepingCore, "generate", generate)
    for method in (engine.close, engine.cancel, lambda: engine.publish(weights(1), 1)):
        with pytest.raises(RuntimeError, match="on_completion may not call the engine"):
            engine.sample([[1]], 1, SamplingConfig(max_tokens=1), lambda p, s, c, method=method: method())
    assert len(engine.sample([[1]], 1, SamplingConfig(max_tokens=1))[0]) == 1  # it still runs


# -- publications, cancel, counters -----------------------------------------------------------------------------------


def test_two_threads_publish_one_after_the_other(make_engine):
    engine = make_engine()
    results = [in_thread(lambda v=v: engine.publish(weights(v), v)) for v in (1, 2)]
    for thread, _ in results:
        thread.join(10)
    outcomes = [outcome[0] for _, outcome in results]
    assert outcomes[1].version == 2  # the other one came before, or is refused
    assert isinstance(outcomes[0], ValueError) or outcomes[0].version == 1
    assert engine.version == 2


def test_cancel_while_an_engine_comes_up(make_engine):
    engine = make_engine()
    sampler, outcome = in_thread(lambda: engine.sample([[1, 2]], 3, SamplingConfig(max_tokens=4)))
    engine_calls = SleepingCore.made[0].calls
    wait_until(lambda: engine_calls)
    SleepingCore.come_up.clear()
    SleepingCore.made[0].kill()
    wait_until(lambda: len(SleepingCore.made) == 2 and SleepingCore.made[1].launched.is_set())
    canceller, _ = in_thread(engine.cancel)
    time.sleep(0.2)  # `cancel` waits for the engine's thread, and so would anything that ran there
    SleepingCore.come_up.set()
    canceller.join(10)
    sampler.join(10)
    assert [completion.finish_reason for completion in outcome[0][0]] == ["abort"] * 3


def test_an_error_over_the_counters_comes_out_of_sample(make_engine, monkeypatch):
    engine = make_engine()

    def broken(*args):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(engine._controller, "step", broken)
    sampler, outcome = in_thread(lambda: engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4)))
    core = SleepingCore.made[0]
    wait_until(lambda: core.calls)
    try:
        core.on_step(Step(0.5, 1, 0, 0, 0, 0))
    except ZeroDivisionError as error:
        core.broken = error  # as LocalCore's logger does
    sampler.join(10)
    assert isinstance(outcome[0], EngineFailed) and isinstance(outcome[0].__cause__, ZeroDivisionError)


# -- one call into the engine -----------------------------------------------------------------------------------------


class Answer:
    dead = False

    def ending(self):
        return "the engine's process was killed by SIGKILL"


def test_a_call_that_moves_weights_may_take_long_but_not_stand_still():
    async def slow():
        await asyncio.sleep(1.5)
        return "done"

    async def scenario():
        began = time.process_time()
        working = bounded(Answer(), slow(), 10, lambda: time.monotonic(), 0.5)
        assert await working == "done"
        with pytest.raises(CoreLost, match="the engine is frozen: no CPU time used for 0.5 s in slow"):
            await bounded(Answer(), slow(), 10, lambda: began, 0.5)
        with pytest.raises(CoreLost, match="did not answer slow within 0.3 s"):
            await bounded(Answer(), slow(), 0.3)
        dead = Answer()
        dead.dead = True
        with pytest.raises(CoreLost, match="killed by SIGKILL during slow"):
            await bounded(dead, slow(), 10)

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["cancelled", "too late"])
def test_the_error_of_a_call_that_was_given_up_is_fetched(way, caplog):
    """A ping, an update: whoever gives it up has said why, and what it then dies of is nobody's any more."""

    async def refused():
        try:
            await asyncio.sleep(60)
        finally:
            raise RuntimeError("Session is closed")

    async def scenario():
        call = asyncio.create_task(bounded(Answer(), refused(), 60 if way == "cancelled" else 0.1))
        await asyncio.sleep(0.1)
        if way == "cancelled":
            call.cancel()
        with pytest.raises(asyncio.CancelledError if way == "cancelled" else CoreLost):
            await call

    asyncio.run(scenario())
    gc.collect()
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


def test_an_update_that_is_refused_half_way_ends_this_life():
    with pytest.raises(CoreLost, match="refused an update that had begun: no such route"), paused():
        raise ValueError("no such route")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-9, "killed by SIGKILL, perhaps by the kernel's out-of-memory killer"),
        (-15, "killed by SIGTERM$"),
        (3, "ended with exit code 3"),
        (None, "vLLM gave the engine up"),
    ],
)
def test_how_the_process_ended(code, text, monkeypatch):
    monkeypatch.setattr(CoreProcess, "exitcode", property(lambda self: code))
    assert re.search(text, CoreProcess.__new__(CoreProcess).ending())


def test_cpu_time_of_the_process_and_its_workers():
    command = ["sh", "-c", "python3 -c 'while True: pass' & wait"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            core = CoreProcess.__new__(CoreProcess)
            core.pid = process.pid
            wait_until(lambda: core.cpu_seconds() > 0.1)
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(0.1)
            frozen = core.cpu_seconds()
            time.sleep(0.3)
            assert core.cpu_seconds() == frozen
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_cpu_time_beside_a_process_with_a_strange_name(tmp_path):
    """Whatever a process calls itself, a publication must not end over it."""
    program = tmp_path / "strange"
    program.write_text(
        "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) (\\xfe', 0, 0, 0)\nprint(flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.stdout.readline()
            assert b"\xff) (\xfe" in Path(f"/proc/{process.pid}/stat").read_bytes()
            core = CoreProcess.__new__(CoreProcess)
            core.pid = process.pid
            assert core.cpu_seconds() > 0
        finally:
            process.kill()
