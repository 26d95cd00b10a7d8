"""The benchmark for a Hopper GPU, tried on a CPU: that every part of it runs, not what it measures."""

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_fp8_gpu_in_small(repo_root):
    command = [sys.executable, str(repo_root / "benchmarks" / "fp8_gpu.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| qwen")]
    assert {"| qwen3_8b |", "| qwen2_5_32b |"} <= {" ".join(row.split()[:3]) for row in rows}
    assert not [row for row in rows if "Error" in row or "left out" in row]
    tables = [line for line in done.stdout.splitlines() if line.startswith("### ")]
    assert len(tables) == 7 and all("smoke run, not a measurement" in line for line in tables)
