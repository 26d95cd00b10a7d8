"""Checks of this machine before a run touches its folder: GPUs for the engine, which do not train, and disk space."""

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.output import print_text
from torchtune_ext.run.process_env import local_rank, rank_and_world_size, read_int_variable
from torchtune_ext.sampling.engine_args import on_cpu
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.setup.config_records import GRPOConfig

# AdamW keeps two moments in float32 for each trained value. Other optimizers keep less or little more.
ADAMW_BYTES = 8


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """What the checkpoints of a run take.

    Args:
        rows: bytes of one checkpoint, by name.
        kept: the most that exist at once, with the one that is being written.
        free: bytes for them under `output_dir`: free ones, and those of checkpoints that the run already has.
    """

    rows: dict[str, int]
    max_checkpoints: int
    free: int

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(self.rows.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all that exist at once."""
        return self.max_checkpoints * self.checkpoint_bytes


def require_gpus(engine: EngineConfig) -> None:
    """Raises ValueError if an engine that starts here asks for GPUs that are not there."""
    if engine.address is not None:
        return
    if engine.backend == "vllm" and find_spec("vllm") is None:
        raise UsageError(
            "engine.backend=vllm, and no vLLM is installed: `torchtune-ext install-engine`, or name a server: engine.address"
        )
    if on_cpu():
        for name, value, usual in (
            ("devices", engine.devices, None),
            ("tensor_parallel_size", engine.tensor_parallel_size, 1),
            ("sleep", engine.sleep, False),
        ):
            if value != usual:
                raise UsageError(
                    f"engine.{name}={value} asks for GPUs, but the installed torch is the CPU build; leave it out, or install "
                    "the CUDA build (docs/first_real_run.md)"
                )
        return
    # `engine.devices` counts all GPUs of the machine. CUDA would count only those in this process's
    # CUDA_VISIBLE_DEVICES.
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if count and (problem := missing_device(engine, count, "this machine")):
        raise UsageError(problem)


def missing_device(engine: EngineConfig, count: int, machine: str) -> str | None:
    """The message for a device of an engine that is not among the GPUs of a machine, or None."""
    numbers = [int(name) for name in engine.device_names if name.isdigit()]
    if max(numbers, default=0) < count:
        return None
    last = ",".join(map(str, range(count - len(numbers), count)))
    fix = f"; for the last: engine.devices={last}" if len(numbers) <= count else ""
    return f"engine.devices={engine.devices} names GPU {max(numbers)}, but {machine} has {count}, from 0 to {count - 1}{fix}"


def training_gpus(ranks: int | None = None) -> list[str]:
    """The GPUs on which the ranks of this machine train, as CUDA_VISIBLE_DEVICES names them: "0", "GPU-8f6e...".

    `ranks` is how many will train here; None: as many as torchrun has started.
    """
    # A rank takes the GPU with its number among those that it sees. If another launcher started the ranks and does not
    # say how many are here, only the GPU of this process is known.
    visible, local = (
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        min(read_int_variable("LOCAL_WORLD_SIZE", 0), rank_and_world_size()[1]),
    )
    mine = local_rank()
    numbers = range(ranks or local) if ranks or local else range(mine, mine + 1)
    # Without the variable a rank sees all GPUs of the machine by their numbers, as an engine that it starts does.
    if visible is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",")]
    # CUDA sees no GPU behind the first name that is not one.
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return [names[number] for number in numbers if number < end]


def require_disjoint_gpus(engine: EngineConfig, trainer_gpus: list[str]) -> None:
    """Raises ValueError if an engine of our own shares GPUs of `engine.devices` with `training` (`training_gpus`)."""
    # An engine that sleeps while the trainer works may share them.
    if engine.address is not None or engine.devices is None or engine.sleep:
        return
    # A number and a UUID may name the same GPU, but nothing here can tell.
    shared = [name for name in trainer_gpus if name in engine.device_names]
    if not shared:
        return
    free = trainer_gpus.index(shared[0])
    take = "1 rank here takes" if len(trainer_gpus) == 1 else f"{len(trainer_gpus)} ranks here take"
    fewer = f"start {free} {'rank' if free == 1 else 'ranks'} here (--nproc_per_node {free}), or " if free else ""
    raise UsageError(
        f"engine.devices={engine.devices!r}: GPU {', '.join(shared)} of this machine would train, too, since {take} "
        f"GPU {', '.join(trainer_gpus)}; {fewer}set CUDA_VISIBLE_DEVICES of the trainer to GPUs that the engine does not have, or "
        "let both share by engine.devices=null with engine.sleep=true"
    )


def disk_need(cfg: GRPOConfig, total: int, trained: int, dtype: torch.dtype) -> DiskNeed:
    """Counts the bytes of a run's checkpoints, without metrics, rollouts and earlier runs.

    Args:
        cfg: settings of a GRPO recipe.
        total: parameters of the model.
        trained: parameters that are trained; if they are fewer, they are adapters.
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
    # There is one more after the last step, so the quotient rounds up.
    written = -(-cfg.max_steps // config.every)
    # The checkpoint with the best accuracy is kept besides the newest.
    evaluated = cfg.evaluation.task is not None and not cfg.replay
    free = shutil.disk_usage(nearest_existing(cfg.output_dir)).free
    if cfg.resume_from_checkpoint:
        # The checkpoints that exist are among those that are kept, so their bytes are not needed again.
        files = Path(cfg.output_dir, "checkpoints").glob("step_*/**/*")
        free += sum(file.stat().st_size for file in files if file.is_file())
    return DiskNeed(rows, min(config.keep_last + evaluated + 1, written), free)


def require_disk(need: DiskNeed, output_dir: str) -> None:
    """Compares the checkpoints of a run with the disk under `output_dir`, and warns if not all that are kept fit.

    Raises ValueError if not even one fits, or the folder cannot be written.
    """
    place = nearest_existing(output_dir)
    if not os.access(place, os.W_OK):
        raise UsageError(f"output_dir={output_dir}: {place} cannot be written by this user; choose another output_dir")
    # A file system without any blocks, such as /proc, holds no files.
    if not shutil.disk_usage(place).total:
        raise UsageError(f"output_dir={output_dir}: {place} is no place for files; choose another output_dir")
    if need.free < need.checkpoint_bytes:
        raise UsageError(
            f"output_dir={output_dir}: a checkpoint takes {format_bytes(need.checkpoint_bytes)}, and {format_bytes(need.free)} are free there; "
            "free disk space, choose another output_dir, or set checkpoints.save_optimizer=false"
        )
    if need.free < need.total_bytes:
        print_text(
            f"disk: a checkpoint takes {format_bytes(need.checkpoint_bytes)}, {need.max_checkpoints} are there at once, and "
            f"{format_bytes(need.free)} are free under {output_dir}; checkpoints.save_optimizer=false makes them smaller"
        )


def format_bytes(bytes_: int) -> str:
    """A number of bytes in MiB or GiB: "2.7 MiB"."""
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.1f} MiB"


def nearest_existing(folder: str | Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if os.path.exists(place))
