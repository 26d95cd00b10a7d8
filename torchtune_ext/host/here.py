"""Compares what a run asks for with the machine that it starts on, before its folder is touched."""

import os
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from torchtune_ext.host.config import instantiate
from torchtune_ext.policy.memory import ADAMW_BYTES, optimizer_bytes, sizes_of
from torchtune_ext.run.output import say
from torchtune_ext.sampling.engine import Engine
from torchtune_ext.sampling.imports import on_cpu
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.plan.devices import require_apart, training_gpus
from torchtune_ext.training.plan.disk import DiskNeed, disk_need, existing
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.state import CheckpointConfig


class Checked(Protocol):
    """What is looked at of a GRPO recipe whose settings are right."""

    cfg: Any
    ranks: Ranks
    saving: CheckpointConfig
    engine: Engine | None
    meta_model: nn.Module
    precision: Precision
    eval_task: Any


def check_machine(recipe: Checked) -> None:
    """Looks for the GPUs that a run asks for, and for room for its checkpoints. Says so if the disk is scarce.

    Raises:
        ValueError: the engine names GPUs that are not there, or that train, or there is no room for a single checkpoint.
    """
    cfg = recipe.cfg
    if recipe.engine:
        require_gpus(recipe.engine.config)
        require_apart(recipe.engine.config, training_gpus() if recipe.ranks.device.type == "cuda" else [])
    need = partial(
        disk_need,
        sizes_of(recipe.meta_model, recipe.precision.dtype),
        recipe.saving,
        cfg.output_dir,
        cfg.max_steps,
        evaluated=recipe.eval_task is not None,
        save_merged=bool(cfg.adapters.get("save_merged")),
        resumes=cfg.resume_from_checkpoint,
    )
    # What the optimizer keeps is found out by a step of it, which is made only where it matters.
    usual = need(optimizer_bytes=ADAMW_BYTES)
    scarce = usual.free < usual.total
    require_disk(
        need(optimizer_bytes=optimizer_bytes(partial(instantiate, cfg.optimizer))) if scarce else usual, cfg.output_dir
    )


def require_gpus(engine: EngineConfig) -> None:
    """Looks for the GPUs of an engine that starts here.

    Raises:
        ValueError: it asks for GPUs that are not there.
    """
    if engine.address is not None:
        return
    if on_cpu():
        for name, value, usual in (
            ("devices", engine.devices, None),
            ("tensor_parallel_size", engine.tensor_parallel_size, 1),
            ("sleep", engine.sleep, False),
        ):
            if value != usual:
                raise ValueError(
                    f"engine.{name}={value} asks for GPUs, but the installed torch is the CPU build; leave it out, or install "
                    "the CUDA build (docs/install.md)"
                )
        return
    # Physical numbers, which CUDA_VISIBLE_DEVICES of this process does not change.
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    numbers = [int(each) for each in (engine.devices or "").split(",") if each.strip().isdigit()]
    if count and numbers and max(numbers) >= count:
        raise ValueError(
            f"engine.devices={engine.devices!r} names GPU {max(numbers)}, but this machine has {count}, from 0 to {count - 1}"
        )


def require_disk(need: DiskNeed, output_dir: str) -> None:
    """Compares the checkpoints of a run with the disk under `output_dir`. Says so if there is no room for all that are kept.

    Raises:
        ValueError: there is no room for a single one.
    """
    place = existing(output_dir)
    if not os.access(place, os.W_OK):
        raise ValueError(f"output_dir={output_dir}: {place} cannot be written by this user; choose another output_dir")
    if need.free < need.one:
        raise ValueError(
            f"output_dir={output_dir}: a checkpoint takes {size_of(need.one)}, and {size_of(need.free)} are free there; "
            " free disk space, choose another output_dir, or set checkpoints.save_optimizer=false"
        )
    if need.free < need.total:
        say(
            f"disk: a checkpoint takes {size_of(need.one)}, {need.kept} are there at once, and "
            f"{size_of(need.free)} are free under {output_dir}; checkpoints.save_optimizer=false makes them smaller"
        )


def size_of(bytes_: int) -> str:
    """Returns a number of bytes in a unit that leaves some digits before the point: "2.7 MiB"."""
    return f"{bytes_ / 2**30:,.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:,.1f} MiB"
