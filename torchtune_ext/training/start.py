"""What a start asks of this machine before it touches the folder of its run: GPUs for the engine, which do not train, and room
for checkpoints."""

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.output import say
from torchtune_ext.sampling.engine_args import on_cpu
from torchtune_ext.sampling.records import EngineConfig

ADAMW_BYTES = 8  # of two moments in float32, for one trained value; other optimizers keep less or little more


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What the checkpoints of a run take.

    Args:
        rows: bytes of one checkpoint, by name.
        kept: how many there are at once, at most, with the one that is being written.
        free: bytes for them on the file system of `output_dir`: those that are free, and those of checkpoints that the run has.
    """

    rows: dict[str, int]
    kept: int
    free: int

    @property
    def one(self) -> int:
        """Bytes of one checkpoint."""
        return sum(self.rows.values())

    @property
    def total(self) -> int:
        """Bytes of all that are there at once."""
        return self.kept * self.one


def require_gpus(engine: EngineConfig) -> None:
    """Looks for the GPUs of an engine that starts here.

    Raises:
        ValueError: it asks for GPUs that are not there.
    """
    if engine.address is not None:
        return
    if engine.backend == "vllm" and find_spec("vllm") is None:
        raise Mistake(
            "engine.backend=vllm, and no vLLM is installed: `torchtune-ext install-engine`, or name a server: engine.address"
        )
    if on_cpu():
        for name, value, usual in (
            ("devices", engine.devices, None),
            ("tensor_parallel_size", engine.tensor_parallel_size, 1),
            ("sleep", engine.sleep, False),
        ):
            if value != usual:
                raise Mistake(
                    f"engine.{name}={value} asks for GPUs, but the installed torch is the CPU build; leave it out, or install "
                    "the CUDA build (docs/first_real_run.md)"
                )
        return
    # Physical numbers, which CUDA_VISIBLE_DEVICES of this process does not change.
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count and (problem := missing_device(engine, count, "this machine")):
        raise Mistake(problem)


def missing_device(engine: EngineConfig, count: int, machine: str) -> str | None:
    """Returns the message for a device of an engine that is not among the GPUs of a machine, or None."""
    numbers = [int(name) for name in engine.device_names if name.isdigit()]
    if max(numbers, default=0) < count:
        return None
    last = ",".join(map(str, range(count - len(numbers), count)))
    fix = f"; for the last: engine.devices={last}" if len(numbers) <= count else ""
    return f"engine.devices={engine.devices} names GPU {max(numbers)}, but {machine} has {count}, from 0 to {count - 1}{fix}"


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
    # CUDA sees no GPU behind the first name that is not one.
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return [names[number] for number in numbers if number < end]


def same_gpu(one: str, other: str) -> bool:
    """Says whether two names are surely those of one GPU. A number and a UUID may be, but that cannot be told."""
    if one.isdigit() and other.isdigit():
        return int(one) == int(other)
    # A UUID may be cut short, as long as no other GPU begins so.
    return one == other or (
        min(one, other, key=len).startswith("GPU-") and (one.startswith(other) or other.startswith(one))
    )


def require_apart(engine: EngineConfig, training: list[str]) -> None:
    """Looks whether an engine of our own has the GPUs of `engine.devices` for itself.

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
    raise Mistake(
        f"engine.devices={engine.devices!r}: GPU {', '.join(shared)} of this machine would train, too, since {take} "
        f"GPU {', '.join(training)}; {fewer}set CUDA_VISIBLE_DEVICES of the trainer to GPUs that the engine does not have, or "
        "let both share by engine.devices=null with engine.sleep=true"
    )


def disk_need(cfg: Any, total: int, trained: int, dtype: torch.dtype) -> DiskNeed:
    """Counts the bytes of a run's checkpoints. Metrics, rollouts and earlier runs in the folder are not in it.

    Args:
        cfg: settings of a GRPO recipe.
        total: parameters of the model.
        trained: those that are trained; fewer are adapters.
        dtype: of the model for other tools.
    """
    config, frozen = cfg.checkpoints, trained < total
    whole = dtype.itemsize * (total - trained * frozen)
    rows = {
        "trained weights in float32, to go on from": 4 * trained,
        "state of the optimizer": ADAMW_BYTES * trained if config.save_optimizer else 0,
        "adapters for other tools, float32": 4 * trained if frozen else 0,
        f"model for other tools, {str(dtype)[6:]}": whole if cfg.adapters.save_merged or not frozen else 0,
    }
    written = -(-cfg.max_steps // config.every)
    # The checkpoint with the best accuracy is kept besides the newest.
    evaluated = cfg.evaluation.task is not None and not cfg.replay
    free = shutil.disk_usage(existing(cfg.output_dir)).free
    if cfg.resume_from_checkpoint:
        # Those that are there belong to this run, and are among the kept.
        files = Path(cfg.output_dir, "checkpoints").glob("step_*/**/*")
        free += sum(file.stat().st_size for file in files if file.is_file())
    return DiskNeed(rows, min(config.keep_last + evaluated + 1, written), free)


def require_disk(need: DiskNeed, output_dir: str) -> None:
    """Compares the checkpoints of a run with the disk under `output_dir`. Says so if there is no room for all that are kept.

    Raises:
        ValueError: there is no room for a single one.
    """
    place = existing(output_dir)
    if not os.access(place, os.W_OK):
        raise Mistake(f"output_dir={output_dir}: {place} cannot be written by this user; choose another output_dir")
    if not shutil.disk_usage(place).total:
        raise Mistake(f"output_dir={output_dir}: {place} is no place for files; choose another output_dir")
    if need.free < need.one:
        raise Mistake(
            f"output_dir={output_dir}: a checkpoint takes {size_of(need.one)}, and {size_of(need.free)} are free there; "
            "free disk space, choose another output_dir, or set checkpoints.save_optimizer=false"
        )
    if need.free < need.total:
        say(
            f"disk: a checkpoint takes {size_of(need.one)}, {need.kept} are there at once, and "
            f"{size_of(need.free)} are free under {output_dir}; checkpoints.save_optimizer=false makes them smaller"
        )


def size_of(bytes_: int) -> str:
    """Returns a number of bytes in a unit that leaves some digits before the point: "2.7 MiB"."""
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.1f} MiB"


def existing(folder: str | Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if place.exists())
