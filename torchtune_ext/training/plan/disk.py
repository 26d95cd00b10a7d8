"""What the checkpoints of a run take of the disk."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from torchtune_ext.policy.memory import Sizes
from torchtune_ext.training.export import SHARD_BYTES
from torchtune_ext.training.state import CheckpointConfig


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


def disk_need(
    sizes: Sizes,
    config: CheckpointConfig,
    output_dir: str | Path,
    steps: int,
    evaluated: bool,
    optimizer_bytes: float,
    save_merged: bool = False,
    resumes: bool = False,
) -> DiskNeed:
    """Counts the bytes of checkpoints. Metrics, rollouts and earlier runs in the folder are not in it.

    Args:
        output_dir: folder of the run, which need not exist.
        steps: of the run; there is a checkpoint after every `config.every` of them and after the last.
        evaluated: whether checkpoints have an accuracy, so that the best is kept besides the newest.
        optimizer_bytes: what the optimizer keeps for one trained value.
        save_merged: whether checkpoints of adapters hold the merged model, too.
        resumes: whether the checkpoints that are there belong to this run. They are among those that are kept.
    """
    dtype, whole = str(sizes.dtype)[6:], sizes.dtype.itemsize * (sizes.total - sizes.trained * sizes.frozen)
    rows = {
        "trained weights in float32, to go on from": 4 * sizes.trained,
        "state of the optimizer": int(optimizer_bytes * sizes.trained) if config.save_optimizer else 0,
        "adapters for other tools, float32": 4 * sizes.trained if sizes.frozen else 0,
        f"model for other tools, {dtype}": whole if save_merged or not sizes.frozen else 0,
    }
    written = -(-steps // config.every)
    free = shutil.disk_usage(existing(output_dir)).free
    if resumes:
        files = Path(output_dir, "checkpoints").glob("step_*/**/*")
        free += sum(file.stat().st_size for file in files if file.is_file())
    return DiskNeed(rows, min(config.keep_last + evaluated + 1, written), free)


def file_in_memory(sizes: Sizes) -> int:
    """Returns the bytes of main memory in which a file of a checkpoint is put together: the tensors, and safetensors' copy of
    them."""
    whole = sizes.trained * 4 if sizes.frozen else sizes.total * sizes.dtype.itemsize
    return 2 * min(SHARD_BYTES, whole)


def existing(folder: str | Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    path = Path(folder).absolute()
    return next(place for place in (path, *path.parents) if place.exists())
