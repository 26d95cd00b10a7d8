"""Joins a Ray cluster, or reports within seconds why it cannot and which command fixes it."""

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from torchtune_ext.run.errors import RunFailure, describe_error

CONNECT_TIMEOUT_S = 5.0  # seconds for the address to accept a connection
RAY_TIMEOUT_S = 15.0  # seconds for Ray to answer at that address
# These variables turn off usage reports, the environment that `uv run` would build on each machine,
# and a warning about CUDA_VISIBLE_DEVICES.
RAY_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def member_command(address: str) -> str:
    """Returns the command that makes a machine a member of the cluster."""
    return f"RAY_worker_niceness=0 ray start --address={address} --num-cpus=0 --disable-usage-stats"


def connect(address: str, on_timeout: Callable[[str], Any]) -> Any:
    """Connects to the cluster and returns the module `ray`.

    Args:
        address: HOST:PORT of the cluster's head, or "auto".
        on_timeout: Called in another thread with the reason if Ray does not answer. Afterwards the
            process exits.

    Raises:
        RunFailure: If the cluster is not found, or this machine is not a member.
    """
    named = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    if ":" in named:
        host, _, port = named.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise RunFailure(
                f"no answer at {named} ({error}). Start Ray there: RAY_worker_niceness=0 ray start --head "
                f"--node-ip-address={host} --port={port} --num-cpus=0 --include-dashboard=false --disable-usage-stats"
            ) from error
    member = f"this machine must be a member of the cluster: {member_command(named)}"

    def give_up() -> None:
        on_timeout(f"Ray does not answer at {named} within {RAY_TIMEOUT_S:g} s. If Ray is there, {member}")
        os._exit(1)

    # If another program listens on the port, `ray.init` would retry forever.
    watchdog = threading.Timer(RAY_TIMEOUT_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    os.environ.update(RAY_VARIABLES)
    try:
        import ray

        ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.WARNING)
    except Exception as error:
        hint = "start a cluster with `ray start --head`, or name its address" if address == "auto" else member
        raise RunFailure(f"cannot join the Ray cluster at {named}: {describe_error(error)}; {hint}") from error
    finally:
        watchdog.cancel()
    return ray
