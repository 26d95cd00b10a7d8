"""Which GPUs of this machine train, and whether the engine was given one of them."""

import os

from torchtune_ext.sampling.records import EngineConfig


def training_gpus(ranks: int | None = None) -> list[str]:
    """Returns the GPUs on which the ranks of this machine train, as CUDA_VISIBLE_DEVICES names them: "0", "GPU-8f6e...".

    A rank takes the GPU with its number among those that it sees. Where the variable is not set, it sees all of the machine, or
    of its container, by their numbers: the same that an engine sees which it starts.

    Args:
        ranks: how many will train here; None: as many as torchrun has started. Where somebody else started them and does not
            say how many are here, the GPU of this process is the only one that is known.
    """
    visible, local = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("LOCAL_WORLD_SIZE")
    mine = int(os.environ.get("LOCAL_RANK", 0))
    numbers = range(mine, mine + 1) if ranks is None and local is None else range(ranks or int(local))
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",")]
    # CUDA sees none of those behind the first that is none.
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return [names[number] for number in numbers if number < end]


def same_gpu(one: str, other: str) -> bool:
    """Says whether two names are surely those of one GPU. A number and a UUID may be, but nobody knows."""
    if one.isdigit() and other.isdigit():
        return int(one) == int(other)
    # A UUID may be cut short, as long as no other GPU begins so.
    return one == other or (
        min(one, other, key=len).startswith("GPU-") and (one.startswith(other) or other.startswith(one))
    )


def require_apart(engine: EngineConfig, training: list[str]) -> None:
    """Looks whether an engine of our own has the GPUs for itself that `engine.devices` gives it.

    An engine that sleeps while the trainer works may share them.

    Args:
        training: the GPUs that train, as `training_gpus` returns them.

    Raises:
        ValueError: it has not.
    """
    if engine.address is not None or engine.devices is None or engine.sleep:
        return
    shared = [name for name in training if any(same_gpu(name, each) for each in engine.device_names)]
    if not shared:
        return
    free = training.index(shared[0])
    take = "1 rank here takes" if len(training) == 1 else f"{len(training)} ranks here take"
    fewer = f"start {free} {'rank' if free == 1 else 'ranks'} here (--nproc_per_node {free}), or " if free else ""
    raise ValueError(
        f"engine.devices={engine.devices!r}: GPU {', '.join(shared)} of this machine would train, too, since {take} "
        f"GPU {', '.join(training)}; {fewer}set CUDA_VISIBLE_DEVICES of the trainer to GPUs that the engine does not have, or "
        "let both share by engine.devices=null with engine.sleep=true"
    )
