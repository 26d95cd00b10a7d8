"""Check the GPUs and the disk of this machine before a run touches its folder."""

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.nvidia import gpu_count
from torchtune_ext.run.output import print_text
from torchtune_ext.run.process_env import local_rank, rank_and_world_size, read_int_variable
from torchtune_ext.sampling.engine_args import on_cpu
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.setup.config_sections import RunSettings

# AdamW keeps two moments in float32 for each trained value. Others keep less, or slightly more.
ADAMW_BYTES = 8


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Disk space for the checkpoints of a run."""

    rows: dict[str, int]  # bytes of one checkpoint, by content
    max_checkpoints: int  # the most that exist at once, including the one being written
    free: int  # bytes under `output_dir`: free space, plus the checkpoints that the run already has

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(self.rows.values())

    @property
    def total_bytes(self) -> int:
        """Bytes of all checkpoints that exist at once."""
        return self.max_checkpoints * self.checkpoint_bytes


def require_gpus(engine: EngineConfig) -> None:
    """Raise UsageError if vLLM or a GPU of an engine that starts on this machine is missing."""
    if engine.address is not None:
        return
    if engine.backend == "vllm" and find_spec("vllm") is None:
        raise UsageError(
            "engine.backend=vllm, but vLLM is not installed. Fix: run `torchtune-ext install-engine`, or set engine.address to "
            "a server"
        )
    if on_cpu():
        for name, value, usual in (
            ("devices", engine.devices, None),
            ("tensor_parallel_size", engine.tensor_parallel_size, 1),
            ("sleep", engine.sleep, False),
        ):
            # Another backend may support these on a CPU.
            if value != usual and engine.backend == "vllm":
                raise UsageError(
                    f"engine.{name}={value} asks for GPUs, but the installed torch is the CPU build. Fix: leave it out, or "
                    "install the CUDA build (docs/getting_started/installation.md)"
                )
        return
    # `engine.devices` numbers all GPUs of the machine, not only those in CUDA_VISIBLE_DEVICES.
    count = gpu_count()
    if count and (problem := missing_device(engine, count, "this machine")):
        raise UsageError(problem)


def missing_device(engine: EngineConfig, count: int, machine: str) -> str | None:
    """Return the message for an engine device that a machine does not have, or None."""
    numbers = [int(name) for name in engine.device_names if name.isdigit()]
    if max(numbers, default=0) < count:
        return None
    last = ",".join(map(str, range(count - len(numbers), count)))
    fix = f". Fix: for the last GPUs, set engine.devices={last}" if len(numbers) <= count else ""
    return f"engine.devices={engine.devices} names GPU {max(numbers)}, but {machine} has {count}, from 0 to {count - 1}{fix}"


def training_gpus(ranks: int | None = None) -> list[str]:
    """Return the GPUs on which the ranks of this machine train.

    Args:
        ranks: the number of ranks that will train on this machine; None: the ranks that torchrun
            has started.

    Returns:
        Names as in CUDA_VISIBLE_DEVICES: "0", "GPU-8f6e...".
    """
    # A rank uses the visible GPU with its local rank. If another launcher started the ranks without
    # LOCAL_WORLD_SIZE, only the GPU of this process is known.
    local = min(read_int_variable("LOCAL_WORLD_SIZE", 0), rank_and_world_size()[1])
    numbers = range(ranks or local) or [local_rank()]
    # Without the variable, a rank and its engine see all GPUs of the machine by number.
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(number) for number in numbers]
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores all names after the first invalid name.
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return [names[number] for number in numbers if number < end]


def require_disjoint_gpus(engine: EngineConfig, trainer_gpus: list[str]) -> None:
    """Raise UsageError if an engine of this run would use the trainer's GPUs.

    Args:
        engine: the engine's settings.
        trainer_gpus: the result of `training_gpus`.
    """
    # An engine that sleeps during training may share them.
    if engine.address is not None or engine.sleep:
        return
    # A number and a UUID may name the same GPU, which this check cannot detect.
    shared = [name for name in trainer_gpus if name in engine.device_names]
    if not shared:
        return
    free = trainer_gpus.index(shared[0])
    take = "1 rank uses" if len(trainer_gpus) == 1 else f"{len(trainer_gpus)} ranks use"
    fewer = f"start {free} {'rank' if free == 1 else 'ranks'} here (--nproc_per_node {free}), or " if free else ""
    raise UsageError(
        f"engine.devices={engine.devices!r}: GPU {', '.join(shared)} of this machine would also be used for training: {take} "
        f"GPU {', '.join(trainer_gpus)}. Fix: {fewer}set CUDA_VISIBLE_DEVICES of the trainer to GPUs that the engine does not "
        "use, or share GPUs with engine.sleep=true"
    )


def disk_need(
    cfg: RunSettings, total: int, trained: int, dtype: torch.dtype, optimizer_bytes: float = ADAMW_BYTES
) -> DiskNeed:
    """Estimate the bytes of a run's checkpoints, without metrics, rollouts and earlier runs.

    Args:
        cfg: settings of a GRPO recipe.
        total: number of parameters of the model, including adapters.
        trained: number of trained parameters; fewer than `total` if adapters are trained.
        dtype: dtype of the exported model.
        optimizer_bytes: bytes of optimizer state per trained value (`measure_optimizer_state`).
    """
    config, is_adapter = cfg.checkpoints, trained < total
    model_bytes = dtype.itemsize * (total - trained * is_adapter)
    rows = {
        "trained weights for resuming, float32": 4 * trained,
        "optimizer state": int(optimizer_bytes * trained) if config.save_optimizer else 0,
        "exported adapters, float32": 4 * trained if is_adapter else 0,
        f"exported model, {str(dtype)[6:]}": model_bytes if cfg.adapters.save_merged or not is_adapter else 0,
    }
    # One more checkpoint follows the last step, so the quotient rounds up.
    written = -(-cfg.max_steps // config.every)
    # The checkpoint with the best held-out reward is kept in addition to the newest.
    evaluated = cfg.evaluation.task is not None and not cfg.replay
    free = shutil.disk_usage(nearest_existing(cfg.output_dir)).free
    if cfg.resume_from_checkpoint:
        # Existing checkpoints count toward the kept checkpoints, so their bytes are available.
        files = Path(cfg.output_dir, "checkpoints").glob("step_*/**/*")
        free += sum(file.stat().st_size for file in files if file.is_file())
    return DiskNeed(rows, min(config.keep_last + evaluated + 1, written), free)


def require_disk(need: DiskNeed, output_dir: str) -> None:
    """Compare the checkpoints of a run with the disk under `output_dir`.

    A warning is printed if one checkpoint fits but not all kept checkpoints.

    Raises:
        UsageError: not even one checkpoint fits, or the folder is not writable.
    """
    folder = nearest_existing(output_dir)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"output_dir={output_dir}: this user cannot write to {folder}. Fix: choose another output_dir")
    # A file system without any blocks, such as /proc, holds no files.
    if not shutil.disk_usage(folder).total:
        raise UsageError(
            f"output_dir={output_dir}: the file system of {folder} cannot hold files. Fix: choose another output_dir"
        )
    if need.free < need.checkpoint_bytes:
        raise UsageError(
            f"output_dir={output_dir}: a checkpoint takes {format_bytes(need.checkpoint_bytes)}, but {format_bytes(need.free)} "
            "are free. Fix: free disk space, choose another output_dir, or set checkpoints.save_optimizer=false"
        )
    if need.free < need.total_bytes:
        print_text(
            f"disk: a checkpoint takes {format_bytes(need.checkpoint_bytes)}, up to {need.max_checkpoints} exist at once, but "
            f"{format_bytes(need.free)} are free under {output_dir}. Fix: set checkpoints.save_optimizer=false"
        )


def format_bytes(bytes_: int) -> str:
    """Format bytes in MiB or GiB: "2.7 MiB"."""
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.1f} MiB"


def nearest_existing(folder: str | Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    path = Path(folder).absolute()
    return next(candidate for candidate in (path, *path.parents) if os.path.exists(candidate))
