"""The process reaper cleans up after a killed trainer, for every engine."""

import os
import signal
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

pytest.importorskip("torch")

from helpers.fake_backends import SleepingBackend
from helpers.waiting import wait_until
from torchtune_ext.run import reaper
from torchtune_ext.sampling.engine import EngineFailed, SamplingConfig

pytestmark = pytest.mark.timeout(60)


def test_reaper_killed_is_replaced_by_next_engine(make_engine, caplog):
    engine = make_engine()
    first = engine._reaper.pid
    os.kill(first, signal.SIGKILL)
    engine._reaper._process.wait(10)
    SleepingBackend.instances[0].kill()
    wait_until(lambda: len(SleepingBackend.instances) == 2 and engine.stats().restarts == 1)
    assert engine._reaper.pid != first and "process reaper: exited with status -9" in caplog.text
    folder, core = Path(engine._reaper.folder), SleepingBackend.instances[1]
    engine._reaper._process.stdin.close()  # the state after the trainer was killed
    wait_until(lambda: not folder.exists() and core.process.poll() is not None)


def test_engine_close_with_killed_reaper_succeeds(make_engine):
    engine = make_engine()
    os.kill(engine._reaper.pid, signal.SIGKILL)
    folder = Path(engine._reaper.folder)
    engine.close()
    assert not folder.exists() and SleepingBackend.instances[0].process.poll() is not None


def test_engine_close_with_stopped_reaper_succeeds(make_engine, monkeypatch):
    monkeypatch.setattr(reaper, "EXIT_TIMEOUT_S", 0.05)
    engine = make_engine()
    os.kill(engine._reaper.pid, signal.SIGSTOP)
    engine.close()
    assert not Path(engine._reaper.folder).exists() and not Path(f"/proc/{engine._reaper.pid}").exists()


def test_engine_without_working_reaper_is_ended(make_engine, monkeypatch):
    engine = make_engine()

    def fail(self, groups):
        raise OSError("no more processes")

    monkeypatch.setattr(reaper.ProcessReaper, "set_process_groups", fail)
    SleepingBackend.instances[0].kill()
    with pytest.raises(EngineFailed, match="3 times in a row, the last time: no more processes"):
        engine.sample([[1, 2]], 1, SamplingConfig(max_tokens=4))
    wait_until(lambda: all(backend.process.poll() is not None for backend in SleepingBackend.instances))


def test_reaper_guard_after_close_raises(make_engine):
    engine = make_engine()
    engine.close()
    with pytest.raises(OSError, match="closed"):
        engine._reaper.set_process_groups([1])


SHARER = """
import subprocess, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=64)
worker = subprocess.Popen(["sleep", "600"])
print(memory.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tracker", ["runs", "is stopped"])
def test_reaper_removes_engine_shared_memory(tmp_path, tracker):
    """As in vLLM with `tensor_parallel_size` above 1. The reaper does not wait forever for a tracker."""
    ours = SharedMemory(create=True, size=64)
    program = [sys.executable, "-c", SHARER]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        name, pid = process.stdout.readline().split()
        memory = Path("/dev/shm", name)
        assert memory.exists() and sorted(reaper.live_processes(process.pid).values()) == [False, False, True]
        if tracker == "runs":
            reaper.clean_up([process.pid], str(tmp_path / "none"))
            assert not memory.exists()
        else:
            os.kill(int(pid), signal.SIGSTOP)
            reaper.end_group(process.pid, 0.1)
            memory.unlink()
    wait_until(lambda: not reaper.live_processes(process.pid))
    assert Path("/dev/shm", ours.name).exists()
    ours.close()
    ours.unlink()
