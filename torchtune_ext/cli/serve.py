"""`torchtune-ext serve` starts vLLM's own server with the flags that a run needs.

    torchtune-ext serve --config grpo/qwen2_5_7B_full
    torchtune-ext serve --config my.yaml engine.address=http://node2:8000 --print
    torchtune-ext serve --config my.yaml --tensor-parallel-size 4       # other options go to vLLM

The run connects to the server with `engine.address`. Every route requires the key in
TORCHTUNE_EXT_API_KEY.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.sampling.engine_args import warn_ignored_variables
from torchtune_ext.sampling.prestart import IGNORED_VARIABLES
from torchtune_ext.sampling.server_command import KEY_VARIABLE, redact_command, server_command, server_key
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.config import read_config
from torchtune_ext.setup.run_components import build_model_components


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext serve`; `cli` passes all others to `main`."""
    parser.add_argument("--config", required=True, help="a config of a GRPO recipe, by name or path")
    parser.add_argument("--recipe", help="the recipe, if it is a file of your own: my_grpo.py")
    parser.add_argument(
        "--host", help="address to listen on (default: 127.0.0.1; all addresses if engine.address is another machine)"
    )
    parser.add_argument("--port", type=int, help="port to listen on (default: the port of engine.address, or 8000)")
    parser.add_argument(
        "--print", action="store_true", dest="show", help="print the command without starting the server"
    )


def main(arguments: argparse.Namespace, extra: Sequence[str] = ()) -> int:
    """Replaces this process by the server, or prints the server's command.

    Args:
        arguments: the parsed arguments.
        extra: config overrides (key=value), then arguments for vLLM.

    Raises:
        UsageError: the config is invalid, or TORCHTUNE_EXT_API_KEY is not set.
    """
    # Overrides come first and vLLM's options after them, with or without a `--` between.
    first = next((i for i, word in enumerate(extra) if word.startswith("-")), len(extra))
    settings, vllm_arguments = extra[:first], [word for word in extra[first:] if word != "--"]
    model_dir, engine = read_engine_config(arguments.config, settings, arguments.recipe)
    command, environ = server_command(model_dir, engine, arguments.host, arguments.port)
    command += vllm_arguments
    if arguments.show:
        print(redact_command(command, environ))
        return 0
    if not server_key():
        raise UsageError(
            f"{KEY_VARIABLE} is not set: the server requires this key on every route. Fix: set it to the same value here and "
            f"where the run starts, e.g. export {KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    print_text(redact_command(command, environ), sys.stderr)
    warn_ignored_variables()
    # The server replaces this process, so signals and the exit status are the server's. Flush
    # first, because exec discards Python's buffers.
    sys.stdout.flush()
    kept = {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}
    os.execve(command[0], command, {**kept, **environ})


def read_engine_config(config: str, settings: Sequence[str], recipe: str | None = None) -> tuple[str, EngineConfig]:
    """Returns a run's model directory and its engine config, adapters and FP8 included.

    Args:
        config: name or path of a config.
        settings: config overrides (key=value).
        recipe: name, file or module of the recipe; None: the recipe that the config names.

    Raises:
        UsageError: the config or an override is invalid.
    """
    cfg = read_config(config, settings, recipe)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return str(cfg.model_dir), build_model_components(cfg, device)[-1].engine
