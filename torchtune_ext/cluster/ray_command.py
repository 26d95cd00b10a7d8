"""`torchtune-ext ray` starts a run on an existing Ray cluster: the trainer under torchrun, vLLM's servers beside it.

    torchtune-ext ray --config grpo/qwen2_5_7B_full --train-gpus 4 --engine-gpus 1 max_steps=100

Ray says which machines and GPUs they get. What runs there is what a user would start by hand (cluster/driver.py). It
ends with this command, and this command ends with any part of it.
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

# Variables that describe a machine or a process. The run gets all others of this shell on every machine.
MACHINE_VARIABLES = re.compile(
    r"_|PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|SHLVL|TERM|PWD|OLDPWD|TMPDIR|TMP|TEMP|HOSTNAME|DISPLAY|VIRTUAL_ENV|"
    r"CUDA_VISIBLE_DEVICES|RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SSH_.*|SLURM.*|XDG_.*|DBUS_.*"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext ray`."""
    parser.add_argument("words", nargs="*", metavar="key=value", help="settings of the run, as behind `tune run`")
    parser.add_argument("--config", required=True, help="the config, as for `tune run`")
    parser.add_argument("--recipe", help="the recipe, if the config does not say it: grpo_full, or your own my_grpo.py")
    parser.add_argument("--train-gpus", type=int, metavar="N", help="ranks of the trainer, a GPU each")
    parser.add_argument(
        "--engine-gpus", type=int, metavar="N", help="GPUs of all servers; each has tensor_parallel_size of them"
    )
    parser.add_argument("--train-cpus", type=int, metavar="N", help="without GPUs: ranks of the trainer, a core each")
    parser.add_argument("--engine-cpus", type=int, metavar="N", help="without GPUs: servers, a core each")
    parser.add_argument(
        "--address",
        default="auto",
        help="HOST:PORT of the cluster's head; auto: RAY_ADDRESS, or the cluster of this machine",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=PLACEMENT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to wait for a place ({PLACEMENT_TIMEOUT_S:g}), also for machines that join later",
    )
    # argparse would otherwise refuse settings (key=value) that come after an option.
    parser.parse_args = parser.parse_intermixed_args


def main(args: argparse.Namespace) -> int:
    """Runs to the end and returns the exit status of the trainer. Raises ValueError, RuntimeError."""
    # The settings and the plan are checked here, before Ray is asked for anything.
    cfg = read_config(args.config, args.words, args.recipe)
    plan = build_plan(args, cfg.engine, cfg.checkpoints.stop_grace_s)
    if not find_spec("ray"):
        raise UsageError(
            "torchtune-ext ray needs Ray: pip install 'torchtune-ext[ray]', here and on each machine of the cluster"
        )
    with silence_ray() as (out, err):
        try:
            ray = connect(
                args.address, lambda why: print(f"error: --address={args.address}: {why}", file=err, flush=True)
            )
        except RunFailure as refused:
            raise UsageError(f"--address={args.address}: {refused}") from None
        # Not Ray Train: its `TorchTrainer` calls a function in a thread, where Python delivers no signals, so a run
        # could not save on SIGTERM. It also makes the process group itself (ours waits longer for rank 0 than for the
        # others), tries for ever to place a trainer, and has a placement group of its own, so trainer and servers could
        # not be placed at once.
        driver = Driver(ray, plan, ray.get_runtime_context().gcs_address, out, err)
        try:
            return driver.run()
        except KeyboardInterrupt:
            # It came before or after the run. During it the driver handles signals.
            return 128 + signal.SIGINT
        except RuntimeError as error:
            error.add_note(status_message(cfg.output_dir))
            raise
        finally:
            ray.shutdown()


@contextmanager
def silence_ray() -> Iterator[tuple[TextIO, TextIO]]:
    """Gives stdout and stderr to the block, and to nobody else."""
    # Ray prints a page for each machine that is lost.
    out, err = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as null:
        sys.stdout = sys.stderr = null
        try:
            yield out, err
        finally:
            sys.stdout, sys.stderr = out, err


def build_plan(args: argparse.Namespace, engine: EngineConfig, stop_grace_s: float) -> Plan:
    """Makes the plan of a run. Raises ValueError."""
    if engine.address is not None:
        raise UsageError(
            f"engine.address={engine.address}: torchtune-ext ray starts servers of its own; leave it out, or start "
            "the run with tune run"
        )
    if not re.fullmatch(r"auto|[^/\s]+:\d+", args.address):
        raise UsageError(
            f"--address={args.address}: write auto, or HOST:PORT of the cluster's head as 10.0.0.1:6379 (and no ray://: this "
            "machine must be a member of the cluster)"
        )
    require_seconds("--wait", args.wait)
    request = build_request(args, engine.tensor_parallel_size)
    # The machines have to see a config of the user's own. One of ours comes with the package, so the folder is enough.
    folder = Path.cwd()
    # Trainer and servers share a key, which is made here if the user has none. After a signal the trainer may need its
    # time for the step, for noticing that it is over, and for closing all parts.
    recipe = args.recipe or recipe_for_config(args.config)
    assert recipe is not None  # else `read_config` has refused the config
    return Plan(
        recipe=recipe,
        config=args.config,
        overrides=tuple(args.words),
        request=request,
        folder=str(folder),
        required_path=str(folder if config_name(Path(config_path(args.config))) else folder / args.config),
        variables=run_variables(request) | {KEY_VARIABLE: server_key() or secrets.token_urlsafe(32)},
        patience_s=stop_grace_s + REACTION_S + CLEANUP_S,
        wait_s=args.wait,
    )


def build_request(args: argparse.Namespace, each: int) -> ResourceRequest:
    """Returns what the command asks of the cluster. `each`: the GPUs of a server. Raises ValueError."""
    pairs = {kind: (getattr(args, f"train_{kind}"), getattr(args, f"engine_{kind}")) for kind in RESOURCE_NAMES}
    given = [kind for kind, pair in pairs.items() if pair != (None, None)]
    if len(given) != 1 or None in pairs[given[0]]:
        raise UsageError(
            "how many GPUs? Write --train-gpus N --engine-gpus N; on a cluster without GPUs, --train-cpus N --engine-cpus N"
        )
    kind = given[0]
    train, engine = pairs[kind]
    for name, value in ((f"--train-{kind}", train), (f"--engine-{kind}", engine)):
        if value < 1:
            raise UsageError(f"{name}={value}: it has to be 1 or more")
    if kind == "cpus" and each > 1:
        raise UsageError(f"engine.tensor_parallel_size={each} asks for GPUs: write --engine-gpus, or leave it out")
    if engine % each:
        raise UsageError(
            f"--engine-gpus={engine} is no multiple of engine.tensor_parallel_size={each}, the GPUs of a server"
        )
    return ResourceRequest(kind, train, engine // each, each)


def run_variables(request: ResourceRequest) -> dict[str, str]:
    """Returns the variables of this shell that the run gets on every machine, as under Slurm, and what else it needs."""
    variables = {name: value for name, value in copy_environment().items() if not MACHINE_VARIABLES.fullmatch(name)}
    if request.kind == "cpus":
        # A rank asks Ray for one core, so it runs one thread unless the user says otherwise. GPUs stay hidden whatever
        # the shell has set.
        variables = {"OMP_NUM_THREADS": "1", **variables, "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in variables.items() if name not in RAY_VARIABLES}


def status_message(output_dir: str) -> str:
    """A line that names the newest checkpoint, seen from this machine."""
    checkpoints = checkpoint_folders(Path(output_dir, "checkpoints"))
    if not checkpoints:
        return f"There is no checkpoint in {output_dir} yet, so the next start begins anew"
    return f"The newest checkpoint is {checkpoints[-1]}; go on from there with resume_from_checkpoint=True"
