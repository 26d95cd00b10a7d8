"""How a server of a run on a cluster is started, and how the trainer reaches it: all that depends on the way of the weights."""

from collections.abc import Sequence

from torchtune_ext.sampling.records import EngineConfig


def beside(engine: EngineConfig) -> bool:
    """Tells whether a server has to be on the machine of rank 0: it reads the weights out of the trainer's memory."""
    assert engine.address is None
    return True


def host_of(trainer: str, server: str) -> str:
    """Returns the address at which a server listens, from those of the machines of rank 0 and of the server.

    Raises:
        ValueError: the weights cannot reach it there.
    """
    if trainer != server:
        raise ValueError(
            f"Ray places a server on {server} and rank 0 on {trainer}, and the weights travel through the memory of one "
            "machine: leave out --servers anywhere"
        )
    return "127.0.0.1"


def server_words(config: str, words: Sequence[str], host: str, port: int) -> list[str]:
    """Returns what stands behind `python` to start a server with the settings of a run, on the machine of the server."""
    return ["-m", "torchtune_ext.host.ray_server", "--host", host, "--port", str(port), "--config", config, *words]


def engine_words(engine: EngineConfig, addresses: Sequence[str]) -> list[str]:
    """Returns the settings that make the recipe use these servers, behind those of the run.

    The GPUs that the config names are those of an engine on the trainer's machine, and Ray numbers them anew.
    """
    found = [f"engine.address={addresses[0] if len(addresses) == 1 else '[' + ','.join(addresses) + ']'}"]
    if engine.devices is not None:
        found.append("engine.devices=null")
    if engine.sleep:
        found.append("engine.sleep=false")
    return found
