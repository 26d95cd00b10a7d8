"""`torchtune-ext serve` starts vLLM's own server with the flags that a run needs.

    torchtune-ext serve --config grpo/qwen2_5_7B_full
    torchtune-ext serve --config my.yaml engine.address=http://node2:8000 --print
    torchtune-ext serve --config my.yaml --tensor-parallel-size 4              # the rest goes to vLLM

The run connects to it with `engine.address`. Every route asks for the key in TORCHTUNE_EXT_API_KEY.
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
    """Adds the arguments of `torchtune-ext serve`; `cli` hands on all others."""
    parser.add_argument("--config", required=True, help="a config of a GRPO recipe, by its name or path")
    parser.add_argument("--recipe", help="the recipe, if it is your own: my_grpo.py")
    parser.add_argument("--host", help="address to listen on; else 127.0.0.1, or all if engine.address is elsewhere")
    parser.add_argument("--port", type=int, help="port to listen on; else that of engine.address, or 8000")
    parser.add_argument("--print", action="store_true", dest="show", help="print the command and start nothing")


def main(arguments: argparse.Namespace, extra: Sequence[str] = ()) -> int:
    """Becomes the server, or prints how it is started. `more`: settings (key=value), then words for vLLM.

    Raises:
        ValueError: the config is wrong, or there is no key.
    """
    # Settings come first and vLLM's options after them, with or without a `--` between.
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
            f"{KEY_VARIABLE} is not set: the server asks for this key on every route; set it to the same value here and where "
            f"the run starts, e.g. export {KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    print_text(redact_command(command, environ), sys.stderr)
    warn_ignored_variables()
    # The server takes the place of this process, so signals and the exit status are its own. What is still in Python's
    # buffers would be lost.
    sys.stdout.flush()
    kept = {name: value for name, value in os.environ.items() if name not in IGNORED_VARIABLES}
    os.execve(command[0], command, {**kept, **environ})


def read_engine_config(config: str, settings: Sequence[str], recipe: str | None = None) -> tuple[str, EngineConfig]:
    """Returns the folder of a run's model, and its engine as the run would start it, adapters and FP8 included.

    Args:
        config: name or path of a config.
        settings: key=value.
        recipe: name, file or module of the recipe; None: the one that the config names.

    Raises:
        ValueError: something of it is wrong.
    """
    cfg = read_config(config, settings, recipe)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return str(cfg.model_dir), build_model_components(cfg, device)[-1].engine
