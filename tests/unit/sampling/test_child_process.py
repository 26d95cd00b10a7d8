"""How a process of the sampler ended, and the CPU time of the engine's, as its client sees them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from waiting import wait_until  # noqa: E402

from torchtune_ext.run.parent import how_it_ended  # noqa: E402
from torchtune_ext.sampling.client_process import engine_cpu_seconds  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def test_how_the_process_ended():
    assert how_it_ended(-9, "it").startswith("it was killed by SIGKILL, perhaps by the kernel's out-of-memory killer")
    assert how_it_ended(-15, "it") == "it was killed by SIGTERM"
    assert how_it_ended(3, "it") == "it ended with exit code 3"
    assert how_it_ended(None, "it").startswith("vLLM gave the engine up")


def test_cpu_time_of_the_session_without_us(monkeypatch):
    command = ["sh", "-c", "python3 -c 'while True: pass' & wait"]
    with subprocess.Popen(command, start_new_session=True) as process:
        monkeypatch.setattr(os, "getsid", lambda _: process.pid)
        try:
            wait_until(lambda: engine_cpu_seconds() > 0.1)
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(0.1)
            frozen = engine_cpu_seconds()
            time.sleep(0.3)
            assert engine_cpu_seconds() == frozen
            monkeypatch.setattr(os, "getpid", lambda: process.pid)
            assert engine_cpu_seconds() <= frozen
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_cpu_time_beside_a_process_with_a_strange_name(tmp_path, monkeypatch):
    """Whatever a process calls itself, a publication must not end over it."""
    program = tmp_path / "strange"
    program.write_text(
        "import ctypes\nctypes.CDLL(None).prctl(15, b'\\xff) (\\xfe', 0, 0, 0)\nprint(flush=True)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, start_new_session=True) as process:
        monkeypatch.setattr(os, "getsid", lambda _: process.pid)
        try:
            process.stdout.readline()
            assert b"\xff) (\xfe" in Path(f"/proc/{process.pid}/stat").read_bytes()
            wait_until(lambda: engine_cpu_seconds() > 0)
        finally:
            process.kill()
