"""Handles the ranks of a run. A process without torchrun is rank 0 of 1, and every function here works there, too."""

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

from torchtune_ext.run.output import say
from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.training.watch import Limits, Watch

# The process group has a time limit of its own. It is this many seconds longer than that of the watch, so that the
# watch, whose message is readable, ends the run first.
SLACK_S = 600.0
_watches: list[Watch] = []  # the watch of this process, at most one; it is global, as the process group is


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those that train."""

    rank: int
    world_size: int  # number of ranks
    device: torch.device
    watch: Watch | None = None  # the watch over the other ranks; None where there are none

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0 on every rank. It is pickled, so it should be small. A collective."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Tells whether the flag is true on any rank. A collective."""
        if self.world_size == 1:
            return bool(flag)
        found = torch.tensor([int(flag)], dtype=torch.int32, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Names what this rank does inside `with ranks.phase("sample", 3):`, for messages of ranks that wait for it.

        All ranks must use the same name for what they do together, and a rank must use a different name for what it
        does alone. The watch does not warn early about a rank that is in a phase of its own.
        """
        if self.watch is None:
            return nullcontext()
        return self.watch.phase(name if step is None else f"{name}, step {step}")

    def share(self, items: list) -> list:
        """Returns this rank's share of a list. The length of the list must be a multiple of the number of ranks."""
        return items[self.rank :: self.world_size]


def init_ranks(device: str, rank_deadline_s: float = 300.0, engine_beside: bool = False, **limits: float) -> Ranks:
    """Joins the process group that torchrun set up, if there is one, and begins the watch over the other ranks.

    A rank that torchrun started is killed when torchrun ends, also when torchrun gets SIGKILL.

    Args:
        device: "cpu", "cuda" or "auto" (cuda where there is one).
        rank_deadline_s: seconds without a sign of life from a rank after which the run ends (see `watch`); more than 0.
        engine_beside: an engine samples while this process trains; on a CPU a core is left to it.
        limits: other times of the watch in seconds, by their names in `watch.Limits`.

    Raises:
        ValueError: the device is unknown or missing, a limit is out of its range, or a variable of torchrun is not set.
    """
    watch_limits = Limits(rank_deadline_s, **limits)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown; use 'auto', 'cpu' or 'cuda' (torchrun numbers the devices)")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; use device=cpu or run `torchtune-ext doctor`")
    # torchrun starts the ranks from its main thread, which lives as long as torchrun. `die_with_parent` needs that.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device("cpu")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if kind == "cuda":
        torch.cuda.set_device(here)
    elif engine_beside and (cores := leave_a_core()) and rank == 0:
        say(
            f"cores: PyTorch computes on {cores - 1} of {cores}, since an engine that samples ahead needs one; "
            "OMP_NUM_THREADS sets another number"
        )
    if world_size == 1 or dist.is_initialized():
        return Ranks(rank, world_size, here)
    stay_on_this_machine()
    watch = make_watch(rank, world_size, watch_limits)
    _watches.append(watch)
    # The watch starts before the process group is made, so that it also reports ranks that do not arrive.
    watch.start()
    limit = timedelta(seconds=watch_limits.wait_s + SLACK_S)
    dist.init_process_group(training.get_distributed_backend(kind), timeout=limit)
    return Ranks(rank, world_size, here, watch)


def leave_a_core() -> int | None:
    """Lets PyTorch compute on all cores but one, unless OMP_NUM_THREADS says on how many.

    Returns the number of cores, or None where nothing was changed.

    An engine on a CPU computes in one thread. Where it takes a core from one of the trainer's threads, all others wait for
    that thread at the end of every operation.
    """
    cores = len(os.sched_getaffinity(0))
    if "OMP_NUM_THREADS" not in os.environ and 1 < cores <= torch.get_num_threads():
        torch.set_num_threads(cores - 1)
        return cores
    return None


def stay_on_this_machine() -> None:
    """Makes gloo listen only on the loopback interface if all ranks are on one machine and the user chose no interface.

    Otherwise gloo listens on the address that the name of the host stands for, which other machines may reach.
    """
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if alone and "lo" in [name for _, name in socket.if_nameindex()]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def make_watch(rank: int, world_size: int, limits: Limits) -> Watch:
    """Makes a watch with its own connection to the rendezvous store, because a connection serves one caller at a time.

    Raises:
        ValueError: a variable that torchrun sets is missing.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE={world_size}, but {missing[0]} is not set; start the run with torchrun")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # If torchrun does not hold the store, rank 0 does. With `multi_tenant`, all connections of a process to one port
    # share a store.
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
    """Returns the sum (`how="sum"`) or the maximum of each value over all ranks. A collective.

    The names must be the same on every rank.
    """
    if not values or not dist.is_initialized() or dist.get_world_size() == 1:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)
    return dict(zip(names, tensor.tolist(), strict=True))


def close_ranks() -> None:
    """Ends the process group and the watch after a run that went well. A collective.

    It waits for every rank first, so that no rank leaves while another one is still in a collective. It must be called
    when nothing holds the model any more, because sharded weights keep the group alive. A gloo thread that is still
    alive when the interpreter ends sometimes aborts the process ("terminate called without an active exception").
    """
    if dist.is_initialized():
        dist.barrier()
        while _watches:
            _watches.pop().close()
            # Rank 0 may hold the store that the watches of the other ranks use, so it waits until they are closed.
            dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
