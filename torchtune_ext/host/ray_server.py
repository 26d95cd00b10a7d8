"""Becomes the vLLM server of a run on a Ray cluster (`cluster.serving.server_words`).

    python -P -m torchtune_ext.host.ray_server --host HOST --port PORT --config CONFIG key=value ...

The key that the server asks for is in the environment (`sampling.doors.KEY_VARIABLE`).
"""

import argparse
import os
import sys
from collections.abc import Sequence

from torchtune_ext.host.mistakes import shown
from torchtune_ext.host.run_settings import RunSettings, run_settings
from torchtune_ext.sampling.imports import on_cpu
from torchtune_ext.sampling.server_command import server_command


def command_of(settings: RunSettings, host: str, port: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command line of the server, and the variables to add to the environment."""
    engine = settings.engine
    command, variables = server_command(settings.model_dir, engine, host, port)
    if not on_cpu():
        command += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
        command += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    return command, variables


def main(argv: Sequence[str]) -> None:
    """Replaces this process by the server."""
    parser = argparse.ArgumentParser(prog="ray_server")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--config", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_intermixed_args(argv)
    with shown():
        command, variables = command_of(run_settings(arguments.config, arguments.words), arguments.host, arguments.port)
    os.execve(command[0], command, {**os.environ, **variables})


if __name__ == "__main__":
    main(sys.argv[1:])
