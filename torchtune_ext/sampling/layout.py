"""Which engines a config means: how many, and what each of them computes on."""

import os
from dataclasses import replace

from torchtune_ext.sampling.imports import on_cpu
from torchtune_ext.sampling.records import EngineConfig


def log_name(config: EngineConfig) -> str:
    """Returns the name of the engine's log in a run's folder; of several the `*` stands for the number of each. Servers have
    logs of their own, so that theirs takes what the sender of weights says alone (`transfer/`)."""
    return "engine.log" if config.addresses or len(engine_configs(config)) == 1 else "engine_*.log"


def device_shares(config: EngineConfig) -> list[list[str]]:
    """Returns the devices of each engine of the run's own, as `engine.devices` names them; none where it is null. Raises
    ValueError for devices that cannot be shared out."""
    size, names = config.tensor_parallel_size, config.device_names
    if len(names) % size:
        below, above = len(names) // size * size, (len(names) // size + 1) * size
        raise ValueError(
            f"engine.devices={config.devices!r} names {len(names)} GPUs, but engine.tensor_parallel_size={size} needs "
            f"{size} for each engine: name {f'{below} or {above}' if below else above}"
        )
    return [names[start : start + size] for start in range(0, len(names), size)]


def engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns the config of each engine: one for each address, for each `tensor_parallel_size` of the devices, or, on a CPU,
    `count`.

    On a CPU the `devices` of one of several engines are its share of the cores that this process may use: its process is
    bound to them, so that no two engines fight for the same. A single one is not bound.

    Raises:
        ValueError: more engines than there are devices for them.
    """
    if config.address is not None:
        return [replace(config, address=each, devices=None, count=None) for each in config.addresses]
    size, shares = config.tensor_parallel_size, device_shares(config)
    if len(shares) > 1:
        return [replace(config, devices=",".join(share), count=None) for share in shares]
    count = config.count or 1
    if count == 1:
        return [config]
    if not on_cpu():
        raise ValueError(
            f"engine.count={count} without engine.devices: on GPUs name them instead, {size} for each engine, as in "
            f"engine.devices='{','.join(map(str, range(count * size)))}'"
        )
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        raise ValueError(
            f"engine.count={count}: this process may use {len(cores)} cores, and each engine needs one; set "
            f"engine.count={len(cores)} or less"
        )
    bounds = [len(cores) * i // count for i in range(count + 1)]
    shares = [cores[low:high] for low, high in zip(bounds[:-1], bounds[1:], strict=True)]
    return [replace(config, devices=",".join(map(str, share)), count=None) for share in shares]
