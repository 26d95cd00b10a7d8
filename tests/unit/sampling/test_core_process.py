"""The engine's process, seen from the trainer: how it ended, and what CPU time it has used."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from waiting import wait_until  # noqa: E402

from torchtune_ext.sampling.core_process import CoreProcess  # noqa: E402

pytestmark = pytest.mark.timeout(60)


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
        "import ctypes\nctypes.CDLL(None).prctl(15, b'\\xff) (\\xfe', 0, 0, 0)\nprint(flush=True)\nwhile True: pass"
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.stdout.readline()
            assert b"\xff) (\xfe" in Path(f"/proc/{process.pid}/stat").read_bytes()
            core = CoreProcess.__new__(CoreProcess)
            core.pid = process.pid
            wait_until(lambda: core.cpu_seconds() > 0)
        finally:
            process.kill()
