"""How a process of the sampler ended, and the CPU time of the engine's, as the trainer sees them."""

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
from torchtune_ext.sampling.child_process import descendants_cpu_seconds  # noqa: E402

pytestmark = pytest.mark.timeout(60)


def test_how_the_process_ended():
    assert how_it_ended(-9, "it").startswith("it was killed by SIGKILL, perhaps by the kernel's out-of-memory killer")
    assert how_it_ended(-15, "it") == "it was killed by SIGTERM"
    assert how_it_ended(3, "it") == "it ended with exit code 3"
    assert how_it_ended(None, "it").startswith("vLLM gave the engine up")


def test_cpu_time_of_descendants_without_their_ancestor():
    command = ["sh", "-c", "python3 -c 'while True: pass' & wait"]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            wait_until(lambda: descendants_cpu_seconds(process.pid) > 0.1)
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(0.1)
            frozen = descendants_cpu_seconds(process.pid)
            time.sleep(0.3)
            assert descendants_cpu_seconds(process.pid) == frozen
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        leader.stdout.readline()
        assert descendants_cpu_seconds(leader.pid) == 0
        leader.kill()


def test_cpu_time_beside_a_process_with_a_strange_name(tmp_path):
    """Whatever a process calls itself, a publication must not end over it."""
    program = tmp_path / "strange"
    program.write_text(
        "import ctypes, os\nctypes.CDLL(None).prctl(15, b'\\xff) (\\xfe', 0, 0, 0)\nprint(os.getpid(), flush=True)\nwhile True: pass"
    )
    command = ["sh", "-c", f"{sys.executable} {program} & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            strange = int(process.stdout.readline())
            assert b"\xff) (\xfe" in Path(f"/proc/{strange}/stat").read_bytes()
            wait_until(lambda: descendants_cpu_seconds(process.pid) > 0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
