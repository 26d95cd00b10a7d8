"""Handles the ranks of a run. A process without torchrun is rank 0 of 1, and every function here works there, too."""

import gc
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torchtune import training

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.output import say
from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.training.collectives import from_main, gathered

if TYPE_CHECKING:
    from torchtune_ext.training.watch import Limits, Watch

# Seconds that a rank may wait in a collective for one that lives: rank 0 samples and evaluates meanwhile.
GROUP_S = 4 * 3600.0
T = TypeVar("T")
_watches: "list[Watch]" = []  # the watch of this process, at most one; it is global, as the process group is


@dataclass(frozen=True, slots=True)
class RanksConfig:
    """The node `ranks:` of a recipe, for what concerns several of them."""

    deadline_s: float = 300.0  # seconds without a sign of life after which a rank is given up
    shard_within: int | None = None  # ranks that share one copy of the weights, as those of a machine do; null: all

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < float("inf"):
            raise Mistake(
                f"ranks.deadline_s={self.deadline_s} must be a number greater than 0: the seconds that a rank may give no "
                "sign of life"
            )
        if self.shard_within is not None and self.shard_within < 1:
            raise Mistake(
                f"ranks.shard_within={self.shard_within} must be at least 1: the ranks that share one copy of the weights"
            )

    def require_divides(self, world_size: int) -> None:
        """Raises ValueError if `world_size` ranks cannot be put into groups of `shard_within`."""
        if self.shard_within is not None and world_size % self.shard_within:
            fitting = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
            use = f"set it to {' or '.join(fitting)}" if fitting else "leave it out"
            raise Mistake(
                f"ranks.shard_within={self.shard_within} does not divide the {world_size} "
                f"{'rank' if world_size == 1 else 'ranks'} of this run: {use}, or start it on other machines "
                "(--nnodes, --nproc_per_node)"
            )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those that train.

    What rank 0 tells the others travels over gloo, on GPUs, too: a rank that waits in NCCL keeps its GPU and a core busy, and
    rank 0 may let the others wait for hours. NCCL carries what the model itself needs.
    """

    rank: int
    world_size: int  # number of ranks
    device: torch.device
    watch: "Watch | None" = None  # the watch over the other ranks; None where there are none
    hosts: tuple[str, ...] = ()  # the machine of every rank, where there are several ranks
    shard_within: int | None = None  # ranks that share one copy of the weights; None: all

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> int:
        """Returns into how many parts each copy of the weights is cut."""
        return self.shard_within or self.world_size

    def broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0 on every rank. It is pickled. A collective."""
        return from_main(lambda: value)

    def from_main(self, phase: str, make: Callable[[], T]) -> T:
        """Returns what `make` returns on rank 0, on every rank. It is pickled. The others sleep meanwhile. A collective.

        Args:
            phase: names for the watch what only rank 0 does.

        Raises:
            OSError or ValueError: `make` raised it on rank 0.
        """

        def named() -> T:
            with self.phase(phase):
                return make()

        return from_main(named)

    def any(self, flag: bool) -> bool:
        """Tells whether the flag is true on any rank. A collective."""
        if self.world_size == 1:
            return bool(flag)
        highest = torch.tensor([int(flag)], dtype=torch.int32)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return bool(highest.item())

    def phase(self, name: str, step: int | None = None) -> AbstractContextManager[None]:
        """Names what this rank does inside `with ranks.phase("sample", 3):`, for messages of ranks that wait for it."""
        if self.watch is None:
            return nullcontext()
        return self.watch.phase(name if step is None else f"{name}, step {step}")

    def share(self, items: list) -> list:
        """Returns this rank's share of a list. The length of the list must be a multiple of the number of ranks."""
        return items[self.rank :: self.world_size]


def init_ranks(
    device: str,
    config: RanksConfig | None = None,
    engine_beside: bool = False,
    output_dir: str | None = None,
    **limits: float,
) -> Ranks:
    """Joins the process group that torchrun set up, if there is one, and begins the watch over the other ranks.

    A rank that torchrun started is killed when torchrun ends, also when torchrun gets SIGKILL.

    Args:
        device: "cpu", "cuda" or "auto" (cuda where there is one).
        config: the node `ranks:`; None for the defaults.
        engine_beside: an engine samples while this process trains; on a CPU a core is left to it.
        output_dir: the folder that the run writes, which ranks on several machines must see. None: it is not looked at.
        limits: other times of the watch in seconds, by their names in `watch.Limits`.

    Raises:
        ValueError: the device is unknown or missing, a limit is out of its range, `shard_within` does not divide the ranks, a
            variable of torchrun is not set, or a machine does not see the folder.
    """
    config = config or RanksConfig()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    config.require_divides(world_size)
    # torchrun starts the ranks from its main thread, which lives as long as torchrun. `die_with_parent` needs that.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    here = local_device(device)
    if here.type == "cpu" and engine_beside and (cores := leave_a_core()) and rank == 0:
        say(
            f"cores: PyTorch computes on {cores - 1} of {cores}, since an engine that samples ahead needs one; "
            "OMP_NUM_THREADS sets another number"
        )
    if world_size == 1 or dist.is_initialized():
        return Ranks(rank, world_size, here, shard_within=config.shard_within)
    # Only a run of several ranks needs these.
    from torchtune_ext.training.machines import choose_interface, hosts_of_ranks, require_shared
    from torchtune_ext.training.watch import Limits

    watch_limits = Limits(config.deadline_s, **limits)
    watch = make_watch(rank, world_size, watch_limits)
    choose_interface()
    _watches.append(watch)
    # The watch starts before the process group is made, so that it also reports ranks that do not arrive.
    watch.start()
    # gloo moves tensors on the CPU, NCCL those on GPUs.
    backend = training.get_distributed_backend(here.type, offload_ops_to_cpu=here.type != "cpu")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=GROUP_S))
    except RuntimeError as error:
        error.add_note(
            f"The ranks did not find each other. gloo listens on {os.environ.get('GLOO_SOCKET_IFNAME', 'the host name')}: set "
            "GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME on GPUs, to the network interface that connects the machines "
            "(docs/several_machines.md)"
        )
        raise
    hosts = hosts_of_ranks()
    if output_dir is not None:
        with watch.phase("look for the folder"):
            require_shared(hosts, output_dir)
    return Ranks(rank, world_size, here, watch, hosts, config.shard_within)


def local_device(device: str) -> torch.device:
    """Returns the device of this rank: the GPU whose number among those that it sees is its number on its machine, or the CPU.

    Raises:
        ValueError: the device is unknown or missing.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise Mistake(f"device={device!r} is unknown; use 'auto', 'cpu' or 'cuda' (torchrun numbers the devices)")
    if device == "cuda" and not torch.cuda.is_available():
        raise Mistake("device='cuda', but torch sees no CUDA device; use device=cpu or run `torchtune-ext doctor`")
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= count:
        raise Mistake(
            f"rank {os.environ.get('RANK', 0)} is number {number} on {socket.gethostname()}, which shows it {count} "
            f"{'GPU' if count == 1 else 'GPUs'}: start at most {count} ranks there (--nproc_per_node), or set "
            "CUDA_VISIBLE_DEVICES"
        )
    here = torch.device("cuda", number)
    torch.cuda.set_device(here)
    return here


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


def make_watch(rank: int, world_size: int, limits: "Limits") -> "Watch":
    """Makes a watch with its own connection to the rendezvous store, because a connection serves one caller at a time.

    Raises:
        ValueError: a variable that torchrun sets is missing.
    """
    from torchtune_ext.training.watch import Watch

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise Mistake(f"WORLD_SIZE={world_size}, but {missing[0]} is not set; start the run with torchrun")
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


def reduce(values: dict[str, float]) -> dict[str, float]:
    """Returns the sum of each value over the ranks that have it, and of `*_max` the maximum. A collective."""
    whole: dict[str, float] = {}
    for each in gathered(values):
        for name, value in each.items():
            both = (whole[name], value) if name in whole else (value,)
            whole[name] = max(both) if name.endswith("_max") else sum(both)
    return whole


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
