"""How a server of a run on a cluster is started, and how the trainer reaches it: all that depends on the way of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_ext.sampling.records import EngineConfig

NETWORK = {"gpus": "nccl", "cpus": "gloo"}  # by what ranks and servers compute on


@dataclass(frozen=True, slots=True)
class Route:
    """How the trainer and its servers reach each other."""

    hosts: tuple[str, ...]  # at which each server listens
    transfer: str  # `engine.transfer`


def route(trainer: str, servers: Sequence[str], kind: str) -> Route:
    """Returns how servers are reached. On rank 0's machine they read its memory, and listen for that machine alone; if one is
    elsewhere, the weights of all travel over the network.

    Args:
        trainer: address of rank 0's machine.
        servers: that of each server's machine.
        kind: "gpus" or "cpus".
    """
    if all(server == trainer for server in servers):
        return Route(("127.0.0.1",) * len(servers), "shm")
    return Route(tuple(servers), NETWORK[kind])


def server_words(recipe: str, config: str, words: Sequence[str], settings: Sequence[str], host: str) -> list[str]:
    """Returns what stands behind `python` to start a server for a run, on the machine of the server.

    Args:
        words: settings of the run.
        settings: those that `engine_words` returns for this server.
    """
    return [
        *("-m", "torchtune_ext", "serve", "--config", config, "--recipe", recipe, "--host", host),
        *(*words, *settings),
    ]


def engine_words(engine: EngineConfig, addresses: Sequence[str], transfer: str) -> list[str]:
    """Returns the settings by which trainer and servers find each other, to stand behind those of the run.

    The GPUs that the config names are those of an engine on the trainer's machine, and Ray numbers them anew.
    """
    found = [f"engine.address={addresses[0] if len(addresses) == 1 else '[' + ','.join(addresses) + ']'}"]
    found.append(f"engine.transfer={transfer}")
    if engine.devices is not None:
        found.append("engine.devices=null")
    if engine.count is not None:
        found.append("engine.count=null")
    if engine.sleep:
        found.append("engine.sleep=false")
    return found
