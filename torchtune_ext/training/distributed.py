"""The ranks of a run. One process without torchrun is rank 0 of 1, and every call here works there too."""

import gc
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtune import training

WAIT = timedelta(hours=4)  # the other ranks wait this long for rank 0, which samples, grades and saves meanwhile


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank (pickled; small things and packed rows)."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def share(self, items: list) -> list:
        """This rank's share of a list whose length is a multiple of the number of ranks."""
        return items[self.rank :: self.world_size]


def init_ranks(device: str) -> Ranks:
    """Joins the process group that torchrun set up, if any.

    Args:
        device: "cpu", "cuda" or "auto" (cuda where there is one).
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown; use 'auto', 'cpu' or 'cuda' (torchrun numbers the devices)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; use device=cpu or run `torchtune-ext doctor`")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group(training.get_distributed_backend(kind), timeout=WAIT)
    return Ranks(int(os.environ.get("RANK", 0)), world_size, here)


def reduce(values: dict[str, float], how: str, device: torch.device) -> dict[str, float]:
    """Sum or maximum of each value over ranks; the same names on every rank."""
    if not values or not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return dict(zip(names, tensor.tolist(), strict=True))


def close_ranks() -> None:
    """Ends the group after a run that went well; every rank arrives first, so that none leaves another's collective.

    Call it when nothing holds the model any more: its sharded weights keep the group alive, and a gloo thread that is alive
    while the interpreter ends now and then aborts it ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
