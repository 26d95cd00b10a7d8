"""`torchtune-ext ray`: starts trainer and vLLM servers of a run on an existing Ray cluster.

    torchtune-ext ray --config grpo/qwen2_5_7B_full --train-gpus 3 --engine-gpus 2 max_steps=100

Ray chooses machines and GPUs. The commands on them are the same that a user would run by hand
(cluster/driver.py). The run ends with this command, and this command ends with any part of the run.
"""

import argparse
import os
import re
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from torchtune_ext.cluster.connection import RAY_VARIABLES, connect
from torchtune_ext.cluster.driver import PLACEMENT_TIMEOUT_S, RESOURCE_NAMES, Driver, Plan, ResourceRequest
from torchtune_ext.run.catalog import config_name, config_path, recipe_for_config
from torchtune_ext.run.errors import RunFailure, UsageError, require_seconds
from torchtune_ext.run.folder import checkpoint_folders
from torchtune_ext.run.process_env import copy_environment
from torchtune_ext.run.stop import CLEANUP_S, REACTION_S
from torchtune_ext.sampling.server_command import KEY_VARIABLE, server_key
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.settings.config import read_config

# Variables that describe a machine or a process. The run gets all other variables of this shell.
MACHINE_VARIABLES = re.compile(
    r"_|PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|SHLVL|TERM|PWD|OLDPWD|TMPDIR|TMP|TEMP|HOSTNAME|DISPLAY|VIRTUAL_ENV|"
    r"CUDA_VISIBLE_DEVICES|RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SSH_.*|SLURM.*|XDG_.*|DBUS_.*"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext ray`."""
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of config keys, as for `tune run`")
    parser.add_argument("--config", required=True, help="config, as for `tune run`")
    text = "recipe, if the config does not determine it: grpo_full, or your own my_grpo.py"
    parser.add_argument("--recipe", help=text)
    for name, text in {
        "--train-gpus": "trainer ranks, one GPU each",
        "--engine-gpus": "GPUs of all servers; each server has tensor_parallel_size GPUs",
        "--train-cpus": "cluster without GPUs: trainer ranks, one core each",
        "--engine-cpus": "cluster without GPUs: servers, one core each",
    }.items():
        parser.add_argument(name, type=int, metavar="N", help=text)
    text = "HOST:PORT of the cluster's head; auto (default): RAY_ADDRESS, or the cluster of this machine"
    parser.add_argument("--address", default="auto", help=text)
    text = f"timeout for free resources, also of machines that join later (default {PLACEMENT_TIMEOUT_S:g})"
    parser.add_argument("--wait", type=float, default=PLACEMENT_TIMEOUT_S, metavar="SECONDS", help=text)
    # Otherwise argparse would refuse overrides (key=value) that follow an option.
    parser.parse_args = parser.parse_intermixed_args


def main(args: argparse.Namespace) -> int:
    """Runs to the end and returns the exit status of the trainer. Raises UsageError, RunFailure."""
    # Config and plan are checked before the first request to Ray.
    cfg = read_config(args.config, args.words, args.recipe)
    plan = build_plan(args, cfg.engine, cfg.checkpoints.stop_grace_s)
    if not find_spec("ray"):
        raise UsageError(
            "torchtune-ext ray needs Ray, which is not installed: pip install 'torchtune-ext[ray]', here and on each machine "
            "of the cluster"
        )
    with silence_ray() as (out, err):

        def report(reason: str) -> None:
            print(f"error: --address={args.address}: {reason}", file=err, flush=True)

        try:
            ray = connect(args.address, report)
        except RunFailure as error:
            raise UsageError(f"--address={args.address}: {error}") from None
        # Ray Train is not used: its `TorchTrainer` calls a function in a thread, where Python
        # delivers no signals, so a run could not save on SIGTERM. It also creates the process group
        # itself (ours waits for rank 0 without a limit), waits forever for a placement, and uses its
        # own placement group, so trainer and servers could not be placed together.
        driver = Driver(ray, plan, ray.get_runtime_context().gcs_address, out, err)
        try:
            return driver.run()
        except KeyboardInterrupt:
            # The signal arrived before or after the run. During the run the driver handles signals.
            return 128 + signal.SIGINT
        except RuntimeError as error:
            error.add_note(status_message(cfg.output_dir))
            raise
        finally:
            ray.shutdown()


@contextmanager
def silence_ray() -> Iterator[tuple[TextIO, TextIO]]:
    """Yields stdout and stderr, and discards all other output while the body runs."""
    # Ray prints a page of text for each machine that dies.
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as null:
        sys.stdout = sys.stderr = null
        try:
            yield out, err
        finally:
            sys.stdout, sys.stderr = out, err


def build_plan(args: argparse.Namespace, engine: EngineConfig, stop_grace_s: float) -> Plan:
    """Returns the plan of a run. Raises UsageError if an argument or setting is invalid."""
    if engine.address is not None:
        raise UsageError(
            f"engine.address={engine.address}: torchtune-ext ray starts its own servers; leave engine.address out, or start "
            "the run with tune run"
        )
    if not re.fullmatch(r"auto|[^/\s]+:\d+", args.address):
        raise UsageError(
            f"--address={args.address}: expected auto, or HOST:PORT of the cluster's head, as 10.0.0.1:6379 (not ray://: this "
            "machine must be a member of the cluster)"
        )
    require_seconds("--wait", args.wait)
    request = build_request(args, engine.tensor_parallel_size)
    # Every machine must read the user's own config. A packaged config needs only the folder.
    folder = Path.cwd()
    # Trainer and servers share a key, which is created here if the user has not set one. After a
    # signal the trainer needs time to finish its step, to react, and to close all components.
    recipe = args.recipe or recipe_for_config(args.config)
    assert recipe is not None  # otherwise `read_config` would have refused the config
    return Plan(
        recipe=recipe,
        config=args.config,
        overrides=tuple(args.words),
        request=request,
        folder=str(folder),
        required_path=str(folder if config_name(Path(config_path(args.config))) else folder / args.config),
        variables=run_variables(request) | {KEY_VARIABLE: server_key() or secrets.token_urlsafe(32)},
        grace_s=stop_grace_s + REACTION_S + CLEANUP_S,
        wait_s=args.wait,
    )


def build_request(args: argparse.Namespace, each: int) -> ResourceRequest:
    """Returns the resources that the command requests from the cluster.

    Args:
        args: Arguments of `torchtune-ext ray`.
        each: GPUs of one server.

    Raises:
        UsageError: For missing, invalid or contradictory numbers.
    """
    pairs = {kind: (getattr(args, f"train_{kind}"), getattr(args, f"engine_{kind}")) for kind in RESOURCE_NAMES}
    given = [kind for kind, pair in pairs.items() if pair != (None, None)]
    if len(given) != 1 or None in pairs[given[0]]:
        raise UsageError(
            "the number of GPUs is missing: set --train-gpus N --engine-gpus N; on a cluster without GPUs, --train-cpus N "
            "--engine-cpus N"
        )
    kind = given[0]
    train, engine = pairs[kind]
    for name, value in ((f"--train-{kind}", train), (f"--engine-{kind}", engine)):
        if value < 1:
            raise UsageError(f"{name}={value}: expected at least 1")
    if kind == "cpus" and each > 1:
        raise UsageError(
            f"engine.tensor_parallel_size={each} needs GPUs. Fix: use --engine-gpus, or remove engine.tensor_parallel_size"
        )
    if engine % each:
        raise UsageError(
            f"--engine-gpus={engine} must be a multiple of engine.tensor_parallel_size={each}, the GPUs of a server"
        )
    return ResourceRequest(kind, train, engine // each, each)


def run_variables(request: ResourceRequest) -> dict[str, str]:
    """Returns the run's environment variables on every machine: this shell's, as under Slurm."""
    variables = {name: value for name, value in copy_environment().items() if not MACHINE_VARIABLES.fullmatch(name)}
    if request.kind == "cpus":
        # A rank requests one core from Ray, so it runs one thread by default. GPUs stay hidden even
        # if the shell sets CUDA_VISIBLE_DEVICES.
        variables = {"OMP_NUM_THREADS": "1", **variables, "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in variables.items() if name not in RAY_VARIABLES}


def status_message(output_dir: str) -> str:
    """Returns a line with the newest checkpoint, as seen from this machine."""
    checkpoints = checkpoint_folders(Path(output_dir, "checkpoints"))
    if not checkpoints:
        return f"{output_dir} has no checkpoint yet, so the next start begins at step 1"
    return f"The newest checkpoint is {checkpoints[-1]}; resume from it with resume_from_checkpoint=True"
