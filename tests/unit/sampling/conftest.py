"""An `Engine` whose backend is an engine of a few lines, with a janitor and a process as the real one has."""

import gc
import threading
from dataclasses import replace

import pytest


@pytest.fixture
def complaints(caplog):
    """A function that returns what asyncio has complained of in this test, also of what only the collector of garbage finds."""
    gc.collect()  # what tests before this one have left

    def messages():
        gc.collect()
        return [record.getMessage() for record in caplog.records if record.name == "asyncio"]

    return messages


@pytest.fixture
def make_engine(monkeypatch, tmp_path):
    """A function that makes an engine, which is up unless `start=False`; in the end nothing of it may be left."""
    pytest.importorskip("torch")
    from helpers.fake_cores import CONFIG, SleepingCore
    from helpers.waiting import wait_until
    from torchtune_ext.run import reaper
    from torchtune_ext.sampling.engine import BACKENDS, Engine

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(reaper.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setitem(BACKENDS, "sleeping", SleepingCore)
    monkeypatch.setattr(SleepingCore, "instances", [])
    monkeypatch.setattr(SleepingCore, "come_up", threading.Event())
    SleepingCore.come_up.set()
    engines = []
    # `Engine.close` collects garbage: what torch has made stays out of it, else each test takes 0.2 s more.
    gc.freeze()

    def make(start=True):
        engine = Engine("model", replace(CONFIG, backend="sleeping", rpc_deadline_s=20.0), str(tmp_path))
        engines.append(engine)
        if start:
            engine.start()
            engine.wait_ready(10)
        return engine

    yield make
    gc.unfreeze()
    for engine in engines:
        engine.close()
    # One that came up in the moment of `close` was killed, and dies a moment later.
    wait_until(lambda: all(core.process.poll() is not None for core in SleepingCore.instances))
    assert list((tmp_path / "tmp").iterdir()) == [], "a temporary folder is left"
