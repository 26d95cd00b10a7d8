"""The ranks of a run.

A process without torchrun is rank 0 of 1. Every function here also works in such a process.
"""

import ctypes
import gc
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import Field
from torchtune import training

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.nvidia import capability_problem, driver_fix, gpu_count
from torchtune_ext.run.output import print_text
from torchtune_ext.run.process_env import (
    die_with_parent,
    invalid_variables,
    local_rank,
    rank_and_world_size,
    read_int_variable,
)
from torchtune_ext.settings.sections import Seconds, config_section
from torchtune_ext.training.collectives import any_rank, call_on_main, join, scatter_from_main

T = TypeVar("T")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # <malloc.h>


@config_section("ranks")
class RanksConfig:
    """The keys of `ranks:`, for runs of several ranks."""

    deadline_s: Seconds = Field(default=600.0, description="seconds that ranks wait for one another in a collective")
    shard_within: int | None = Field(
        default=None, ge=1, description="ranks that share one copy of the weights, e.g. ranks of one machine; null: all"
    )

    def require_divisible(self, world_size: int) -> None:
        """Raises UsageError if `shard_within` does not divide `world_size`."""
        if self.shard_within is not None and world_size % self.shard_within:
            divisors = [str(n) for n in range(2, world_size + 1) if world_size % n == 0]
            use = f"set it to {' or '.join(divisors)}" if divisors else "leave it out"
            raise UsageError(
                f"ranks.shard_within={self.shard_within} does not divide the {world_size} "
                f"{'rank' if world_size == 1 else 'ranks'} of this run: {use}, or start it on other machines "
                "(--nnodes, --nproc_per_node)"
            )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among the training processes."""

    rank: int
    world_size: int  # number of ranks
    device: torch.device
    hosts: tuple[str, ...] = ()  # machine of every rank; empty in a run of one rank
    shard_within: int | None = None  # ranks that share one copy of the weights; None: all

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def shards(self) -> int:
        """The number of shards of each copy of the weights."""
        return self.shard_within or self.world_size

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0 on every rank, pickled. A collective."""
        return call_on_main(lambda: value)

    def call_on_main(self, make: Callable[[], T]) -> T:
        """Returns rank 0's result of `make` on every rank. A collective."""
        return call_on_main(make)

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank. A collective."""
        return any_rank(flag)

    def local_slice(self, items: list) -> list:
        """This rank's share of a list. The length must be a multiple of the number of ranks."""
        return items[self.rank :: self.world_size]

    def scatter(self, lists: Sequence[list[T]]) -> list[list[T]]:
        """This rank's share (`local_slice`) of each list of rank 0, pickled. A collective."""
        return scatter_from_main([[items[r :: self.world_size] for items in lists] for r in range(self.world_size)])


def init_ranks(
    device: str,
    config: RanksConfig | None = None,
    concurrent_engine: bool = False,
    output_dir: str | None = None,
    shares_gpu: bool = False,
) -> Ranks:
    """Joins the process group of torchrun, if torchrun started this process.

    Args:
        device: "cpu", "cuda" or "auto" (cuda if available).
        config: the section `ranks:`; None: the defaults.
        concurrent_engine: an engine samples while this process trains. On a CPU, PyTorch then
            leaves one core to the engine.
        output_dir: the run's folder, which all machines must see; None: not checked.
        shares_gpu: an engine uses this rank's GPU in turns (`use_expandable_segments`).

    Raises:
        UsageError: the device, `shard_within` or torchrun's environment variables are invalid, or a
            machine does not see `output_dir`.
        RunFailure: the ranks did not find each other within `ranks.deadline_s`.
    """
    config = config or RanksConfig()
    if invalid := invalid_variables():
        raise UsageError(
            f"{invalid[0]}={os.environ[invalid[0]]!r} in the environment must be a whole number, as torchrun sets it; "
            f"`env -u {invalid[0]} tune run ...` starts without it"
        )
    rank, world_size = rank_and_world_size()
    config.require_divisible(world_size)
    # torchrun cannot stop its ranks after a SIGKILL, so each rank asks the kernel for a signal when
    # torchrun dies. The kernel watches the parent thread, not the process. This works because
    # torchrun starts the ranks from its main thread.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
    if shares_gpu:
        use_expandable_segments()
    rank_device = local_device(device)
    if rank_device.type == "cpu":
        disable_malloc_trim()
    if rank_device.type == "cpu" and concurrent_engine and (cores := reserve_engine_core()) and rank == 0:
        print_text(
            f"cores: PyTorch uses {cores - 1} of {cores}, because the asynchronous engine needs one; "
            "set OMP_NUM_THREADS to use another number"
        )
    if world_size == 1 or dist.is_initialized():
        return Ranks(rank, world_size, rank_device, shard_within=config.shard_within)
    # Only a run of several ranks needs these imports.
    from torchtune_ext.training.machines import (
        choose_interface,
        hosts_of_ranks,
        rendezvous_progress,
        require_shared_folder,
    )

    # On GPUs, NCCL carries the tensors of the model. Messages from rank 0 use gloo: a rank that
    # waits in NCCL keeps its GPU and a core busy, and ranks may wait for rank 0 for hours.
    backend = training.get_distributed_backend(rank_device.type, offload_ops_to_cpu=rank_device.type != "cpu")
    try:
        with rendezvous_progress(rank, world_size, config.deadline_s):
            choose_interface()
            join(backend, config.deadline_s)
    except RuntimeError as error:
        raise RunFailure(
            f"The ranks did not find each other within ranks.deadline_s={config.deadline_s:g} s "
            f"({' '.join(str(error).split())[:300]}). gloo listens on "
            f"{os.environ.get('GLOO_SOCKET_IFNAME', 'the host name')}: set GLOO_SOCKET_IFNAME, and NCCL_SOCKET_IFNAME "
            "on GPUs, to the network interface that connects the machines (docs/how_to/multi_gpu.md)"
        ) from error
    hosts = hosts_of_ranks()
    machines = len(set(hosts))
    if rank == 0 and machines > 1 and config.shard_within is None and rank_device.type != "cpu":
        print_text(
            f"ranks: {world_size} ranks on {machines} machines share one copy of the weights, so every row gathers the weights "
            f"over the network. If a copy fits into one machine, ranks.shard_within={hosts.count(hosts[0])} is faster"
        )
    if output_dir is not None:
        require_shared_folder(hosts, output_dir)
    return Ranks(rank, world_size, rank_device, hosts, config.shard_within)


def local_device(device: str) -> torch.device:
    """Selects the device of this rank: the GPU with its LOCAL_RANK, or the CPU.

    Raises:
        UsageError: the machine has no GPU for this rank, or torch cannot use it.
    """
    if not has_usable_gpus(device):
        return torch.device("cpu")
    local, count = local_rank(), torch.cuda.device_count()
    if local >= count:
        raise UsageError(
            f"rank {read_int_variable('RANK', 0)} has LOCAL_RANK={local} on {socket.gethostname()}, where torch sees "
            f"{count} {'GPU' if count == 1 else 'GPUs'}. Fix: start at most {count} ranks there (--nproc_per_node), or set "
            "CUDA_VISIBLE_DEVICES"
        )
    require_capability(local)
    gpu = torch.device("cuda", local)
    torch.cuda.set_device(gpu)
    return gpu


def has_usable_gpus(device: str) -> bool:
    """Whether a run with this `device` uses GPUs.

    A CPU build of torch on a machine with a GPU causes a warning.

    Raises:
        UsageError: the run requires GPUs and torch sees none, or `device="auto"` would ignore GPUs
            that torch cannot use.
    """
    if device == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    # CUDA ignores all names from the first invalid one on: "", "-1" and Slurm's "NoDevFiles" hide all GPUs.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and not re.match(r"\s*(\d|GPU-|MIG-)", visible)
    gpus = 0 if is_hidden else gpu_count()
    if gpus and torch.version.cuda:
        raise UsageError(
            f"device={device!r}: torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the "
            f"{'GPU' if gpus == 1 else f'{gpus} GPUs'} of this machine. Fix: {driver_fix()}, or set device=cpu"
        )
    if device == "cuda":
        raise UsageError(
            "device='cuda', but torch sees no CUDA device. Fix: set device=cpu, or run `torchtune-ext doctor`"
        )
    if gpus and torch.version.hip is None and read_int_variable("RANK", 0) == 0:
        print_text(
            f"device: the CPU, although this machine has {gpus} NVIDIA {'GPU' if gpus == 1 else 'GPUs'}: torch "
            f"{torch.__version__} is a CPU build. Fix: install the CUDA build (make install), or set device=cpu"
        )
    return False


def require_capability(index: int) -> None:
    """Raise UsageError if a visible GPU is too old."""
    name = f"GPU {index} ({torch.cuda.get_device_name(index)})"
    if problem := capability_problem(name, torch.cuda.get_device_capability(index)):
        raise UsageError(f"{problem}. Fix: use another GPU (CUDA_VISIBLE_DEVICES), or set device=cpu")


def use_expandable_segments() -> None:
    """Lets PyTorch return free GPU memory next to used blocks, unless the user configured it."""
    # `empty_cache` otherwise keeps each segment in which a small block is used. An environment
    # variable would also change the engine's allocator.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def disable_malloc_trim() -> None:
    """Makes malloc keep freed memory in this process."""
    # By default the C library returns freed large tensors to the kernel, which zeroes the pages of
    # the next allocation. That took a third of the time of forward and backward
    # (benchmarks/results/whole_step.md).
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def reserve_engine_core() -> int | None:
    """Limits PyTorch to all cores but one.

    Returns:
        The number of cores, or None if the limit was not changed.
    """
    # An engine on a CPU computes in one thread. If that thread takes a core from a trainer thread,
    # all other trainer threads wait for the delayed thread at the end of every operation.
    cores = len(os.sched_getaffinity(0))
    if not os.environ.get("OMP_NUM_THREADS") and 1 < cores <= torch.get_num_threads():
        torch.set_num_threads(cores - 1)
        return cores
    return None


def close_ranks() -> None:
    """Destroys the process group after a successful run. A collective.

    The caller must have dropped all references to the model.
    """
    if dist.is_initialized():
        # No rank may exit while another one is still in a collective.
        dist.barrier()
        # Sharded weights keep the group and its gloo thread alive. If a gloo thread is alive when
        # the interpreter exits, the process sometimes aborts ("terminate called without an active
        # exception").
        gc.collect()
        dist.destroy_process_group()
        gc.collect()
