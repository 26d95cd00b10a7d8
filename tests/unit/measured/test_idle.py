"""A timing waits until engines on its cores are idle. The engines here are processes of the same name that only compute."""

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import psutil
import pytest

from torchtune_ext.measured import machine
from torchtune_ext.measured.machine import ENGINE_MODULE, wait_until_idle

FIND = machine.engine_cores
# Seconds of CPU time: on a busy machine it computes for longer.
BURN = "import time\nwhile time.process_time() < {}: pass\n"


@contextmanager
def engine(monkeypatch, code: str, cores: frozenset[int] = frozenset({0})):
    """An engine that runs `code`, and is the only one of this machine that counts."""
    with subprocess.Popen([sys.executable, "-c", code, ENGINE_MODULE], start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 20
            while process.pid not in FIND():
                assert time.monotonic() < deadline
            monkeypatch.setattr(machine, "engine_cores", lambda: {process.pid: cores})
            yield process
        finally:
            os.killpg(process.pid, 9)


@pytest.fixture
def any_use_counts(monkeypatch):
    """An engine that computes gets little of a core on a busy machine."""
    monkeypatch.setattr(machine, "_BUSY_FRACTION", 1e-4)


def wait_until_it_computes(pid: int) -> None:
    while time.clock_gettime_ns(~pid << 3 | 2) < 50e6:
        time.sleep(0.01)


def test_idle_wait_without_engine_returns_at_once(monkeypatch):
    monkeypatch.setattr(machine, "engine_cores", lambda: {})
    assert wait_until_idle([0], 0.0) < 0.5


def test_an_engine_that_computes_is_waited_for(monkeypatch, caplog):
    with engine(monkeypatch, BURN.format(1.5) + "time.sleep(600)") as process:
        begin = time.monotonic()
        wait_until_it_computes(process.pid)
        waited = wait_until_idle([0, 1], 60.0)
        assert time.monotonic() - begin > 0.5 and waited > 0
        assert caplog.text.count(f"waits until an engine (process {process.pid}) is idle") == 1
        wait_until_idle([0], 60.0)  # it is idle now
        assert caplog.text.count("is idle") == 1


def test_idle_wait_timeout_names_the_engine(monkeypatch, any_use_counts):
    with engine(monkeypatch, BURN.format(600)) as process:
        wait_until_it_computes(process.pid)
        with pytest.raises(
            TimeoutError, match=rf"an engine \(process {process.pid}\) still computes on cores \[0\] after 0.2 s"
        ):
            wait_until_idle([0], 0.2)
        assert wait_until_idle([1], 0.2) < 0.2  # it may not run there


def test_idle_wait_counts_engine_workers_not_its_starter(monkeypatch, any_use_counts):
    """An engine leads a session; the trainer that started it is in another."""
    burner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN.format(600)!r}])"
    stop = threading.Event()

    def compute():
        while not stop.is_set():
            pass

    starter = threading.Thread(target=compute)
    starter.start()
    try:
        with engine(monkeypatch, "import time; time.sleep(600)"):
            wait_until_idle([0], 60.0)
        with engine(monkeypatch, burner) as process:
            while not (workers := psutil.Process(process.pid).children()):
                time.sleep(0.01)
            wait_until_it_computes(workers[0].pid)
            with pytest.raises(TimeoutError):
                wait_until_idle([0], 1.0)
    finally:
        stop.set()
        starter.join()


def test_idle_wait_ends_when_engine_exits(monkeypatch):
    with engine(monkeypatch, BURN.format(600)) as process:
        wait_until_it_computes(process.pid)
        threading.Timer(0.4, process.kill).start()
        assert wait_until_idle([0], 60.0) < 30
