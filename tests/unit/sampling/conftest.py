"""An `Engine` with a minimal backend, and with the process reaper and a process as in a real run."""

import gc
import threading
from dataclasses import replace

import pytest


@pytest.fixture
def complaints(caplog):
    """Return a function that returns asyncio's error reports in this test, also those of collected objects."""
    gc.collect()  # objects of earlier tests

    def messages():
        gc.collect()
        return [record.getMessage() for record in caplog.records if record.name == "asyncio"]

    return messages


@pytest.fixture
def make_engine(monkeypatch, tmp_path):
    """Return a function that creates an engine (started unless `start=False`); it must clean up completely."""
    pytest.importorskip("torch")
    from helpers.fake_backends import CONFIG, SleepingBackend
    from helpers.waiting import wait_until
    from torchtune_ext.run import reaper
    from torchtune_ext.sampling.engine import BACKENDS, Engine

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(reaper.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setitem(BACKENDS, "sleeping", SleepingBackend)
    monkeypatch.setattr(SleepingBackend, "instances", [])
    monkeypatch.setattr(SleepingBackend, "launch_allowed", threading.Event())
    SleepingBackend.launch_allowed.set()
    engines = []

    def make(start=True):
        engine = Engine("model", replace(CONFIG, backend="sleeping", rpc_deadline_s=20.0), str(tmp_path))
        engines.append(engine)
        if start:
            engine.start()
            engine.wait_ready(10)
        return engine

    yield make
    for engine in engines:
        engine.close()
    # A process that started during `close` was killed and exits shortly afterwards.
    wait_until(lambda: all(backend.process.poll() is not None for backend in SleepingBackend.instances))
    assert list((tmp_path / "tmp").iterdir()) == [], "a temporary folder is left"
