"""The ranks of a run. One process without torchrun is rank 0 of 1, and every call here works there too."""

import gc
import os
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtune import training

from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.training.watch import Limits, Watch

SLACK_S = 600.0  # the process group's own limit comes so much later than the watch's, whose message is readable
_watches: list[Watch] = []  # of this process, at most one; beside the process group, which is the process's, too


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that train."""

    rank: int
    world_size: int
    device: torch.device
    watch: Watch | None = None  # over the others; None where there are no others

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

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank. Every rank has to call it."""
        if self.world_size == 1:
            return bool(flag)
        found = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """`with ranks.phase("sample", 3):` says what this rank does, for the messages of those that wait for it.

        Use the same name on all ranks for what all do together, and a name of its own for what one does alone: a wait for a
        rank in a phase of its own is no alarm.
        """
        if self.watch is None:
            return nullcontext()
        return self.watch.phase(name if step is None else f"{name}, step {step}")

    def share(self, items: list) -> list:
        """This rank's share of a list whose length is a multiple of the number of ranks."""
        return items[self.rank :: self.world_size]


def init_ranks(device: str, rank_deadline_s: float = 300.0, **limits: float) -> Ranks:
    """Joins the process group that torchrun set up, if any, and begins the watch over the other ranks.

    A rank that torchrun started ends with it: SIGKILL for the one ends the other.

    Args:
        device: "cpu", "cuda" or "auto" (cuda where there is one).
        rank_deadline_s: a rank that gives no sign of life for so long ends the run (see `watch`); greater than 0.
        limits: other seconds of the watch, by their names in `watch.Limits`.
    """
    watch_limits = Limits(rank_deadline_s, **limits)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown; use 'auto', 'cpu' or 'cuda' (torchrun numbers the devices)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; use device=cpu or run `torchtune-ext doctor`")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun starts the ranks from its main thread, which lives as long as it
        die_with_parent(os.getppid())
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(here)
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1 or dist.is_initialized():
        return Ranks(rank, world_size, here)
    stay_on_this_machine()
    watch = make_watch(rank, world_size, watch_limits)
    _watches.append(watch)
    watch.start()  # before the group, so that it also tells of ranks that do not arrive
    limit = timedelta(seconds=watch_limits.wait_s + SLACK_S)
    dist.init_process_group(training.get_distributed_backend(kind), timeout=limit)
    return Ranks(rank, world_size, here, watch)


def stay_on_this_machine() -> None:
    """When all ranks are on one machine, makes gloo listen on the loopback interface alone, unless the user has chosen one.

    Otherwise it listens on whatever address the host's name stands for, which may be one that the network reaches.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if alone and "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def make_watch(rank: int, world_size: int, limits: Limits) -> Watch:
    """A watch with its own connection to the rendezvous store, since a connection serves one caller at a time."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE={world_size}, but {missing[0]} is not set; start the run with torchrun")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # without torchrun's store rank 0 has it; all connections of one process to one port share it
    connect = partial(
        dist.TCPStore, host, port, is_master=rank == 0 and not agents, wait_for_workers=False, multi_tenant=not agents,
        timeout=timedelta(seconds=limits.deadline_s),
    )  # fmt: skip
    prefix = f"torchtune_ext/ranks/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    holder = "torchrun" if agents else "rank 0"
    here = agents and os.environ.get("GROUP_RANK") == "0"
    where = f"the rendezvous store at {host}:{port} ({holder} has it)"
    return Watch(rank, world_size, limits, lambda: dist.PrefixStore(prefix, connect()), where, here)


def reduce(values: dict[str, float], how: str, device: torch.device) -> dict[str, float]:
    """Sum or maximum of each value over ranks; the same names on every rank."""
    if not values or not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return dict(zip(names, tensor.tolist(), strict=True))


def close_ranks() -> None:
    """Ends the group and the watch after a run that went well; every rank arrives first, so that none leaves another's
    collective.

    Call it when nothing holds the model any more: its sharded weights keep the group alive, and a gloo thread that is alive
    while the interpreter ends now and then aborts it ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.barrier()
        while _watches:
            _watches.pop().close()
            dist.barrier()  # rank 0 may hold the store that the watches of the others talk to until here
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
