"""`torchtune-ext serve` starts vLLM's own server with the flags that a run needs, or the endpoint of agents.

    torchtune-ext serve --config grpo/qwen2_5_7B_full
    torchtune-ext serve --config my.yaml engine.address=http://node2:8000 --print
    torchtune-ext serve --config my.yaml --tensor-parallel-size 4       # other options go to vLLM
    torchtune-ext serve --endpoint --config my.yaml model_dir=runs/my/checkpoints/step_000020

The run connects to the server with `engine.address`. Every route requires the key in
TORCHTUNE_EXT_API_KEY. With `--endpoint`, an agent reaches the model as in a run
(`pipeline/endpoint.py`).
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import torch

from torchtune_ext.pipeline.endpoint import MODEL, Endpoint
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.sampling.engine import Engine, EngineRequest, Priority
from torchtune_ext.sampling.engine_args import warn_ignored_variables
from torchtune_ext.sampling.prestart import IGNORED_VARIABLES
from torchtune_ext.sampling.server_command import KEY_VARIABLE, redact_command, server_command, server_key
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.config import read_config
from torchtune_ext.setup.run_components import build_model_components


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext serve`; `cli` passes all others to `main`."""
    parser.usage = "torchtune-ext serve --config CONFIG [OPTIONS] [key=value ...] [VLLM-OPTIONS ...]"
    parser.epilog = "`key=value` overrides a config key; options of vLLM's server come last"
    parser.add_argument("--config", required=True, help="a config of a GRPO recipe, by name or path")
    parser.add_argument("--recipe", help="the recipe, if it is a file of your own: my_grpo.py")
    default = "127.0.0.1, or all if engine.address is another machine; with --endpoint agent.host"
    parser.add_argument("--host", help=f"address (default: {default})")
    default = "the port of engine.address, or 8000; with --endpoint a free one"
    parser.add_argument("--port", type=int, help=f"port to listen on (default: {default})")
    text = "serve model_dir at the endpoint of agents, to try an agent by hand"
    parser.add_argument("--endpoint", action="store_true", help=text)
    text = "print the command without starting the server"
    parser.add_argument("--print", action="store_true", dest="show", help=text)


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
    cfg = read_config(arguments.config, settings, arguments.recipe)
    model_dir, engine = str(cfg.model_dir), engine_config(cfg)
    if arguments.endpoint:
        if arguments.show or vllm_arguments:
            raise UsageError(
                f"--endpoint with {' '.join(vllm_arguments) or '--print'}: starts no server of vLLM. Fix: remove one of the two"
            )
        if engine.quantization:
            raise UsageError(
                "--endpoint with precision in FP8: the engine gets its weights from a run only. Fix: precision=bf16"
            )
        serve_endpoint(cfg, engine, arguments.host or cfg.agent.host, arguments.port or 0)
        return 0
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


def serve_endpoint(cfg: Any, config: EngineConfig, host: str, port: int) -> None:
    """Serves a model at the endpoint of agents until Ctrl-C, as one episode that is not trained on.

    Args:
        cfg: the config of a GRPO recipe.
        config: as `engine_config` returns it.
        host, port: address; port 0 takes a free one.

    Raises:
        UsageError: the address is in use or unknown.
    """
    tokenizer = cfg.tokenizer.instantiate()
    sampling = cfg.sampling.with_default_stops(tokenizer.stop_token_ids)
    with TemporaryDirectory() as folder, Engine(cfg.model_dir, config, folder) as engine:
        engine.start()
        try:
            endpoint = Endpoint(engine, tokenizer, cfg.agent, host, port)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--host {host} --port {port}: {reason}. Fix: choose another address") from None
        engine.wait_ready()
        engine.require_unmodified_server()
        request = EngineRequest([], sampling, seed=None)
        episode = endpoint.open([], sampling, request, 0, Priority.SAMPLE, lambda completion: None)
        episode.is_trained = False
        names = {"BASE_URL": endpoint.url, "API_KEY": episode.key, "MODEL": MODEL}
        print_text("\n".join(f"export OPENAI_{name}={value}" for name, value in names.items()))
        print_text("Ctrl-C ends the server.", sys.stderr)
        with suppress(KeyboardInterrupt):
            while True:
                signal.pause()
        endpoint.close()


def engine_config(cfg: Any) -> EngineConfig:
    """Returns the engine config of a run, adapters and FP8 included.

    Args:
        cfg: the config of a GRPO recipe (`read_config`).

    Raises:
        UsageError: the model, its adapters or its precision are unsupported.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return build_model_components(cfg, device)[-1].engine
