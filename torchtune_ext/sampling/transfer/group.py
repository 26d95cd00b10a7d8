"""A gloo group between the sender and the workers of servers, and how tensors lie in what is broadcast in it."""

import math
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtune_ext.run.errors import Failure, Mistake
from torchtune_ext.sampling.weight_buffer import ALIGNMENT

SHORTEST_S = 0.001  # gloo takes a timeout of 0 for none
CHUNK_BYTES = 64 << 20  # of one broadcast by gloo; a larger tensor is a chunk of its own


# A gloo group between the sender and the workers of servers, apart from every other group of either side.
#
# It binds to the one address that faces the other end, whatever `GLOO_SOCKET_IFNAME` says: that variable keeps an engine's
# own groups on its machine.
def facing(host: str, port: int) -> str:
    """Returns the address of this machine from which packets to another one leave. Nothing is sent. Raises OSError."""
    (family, kind, protocol, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def listen(address: str) -> socket.socket:
    """Returns a socket that listens only on one address of this machine, at a free port. Raises OSError."""
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


class GlooGroup:
    """One group. After any error it is of no more use: close it."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        name: str,
        deadline_s: float,
        listener: socket.socket | None = None,
    ):
        """Waits until all are there. Raises RuntimeError (of torch) after `deadline_s` seconds.

        Args: address, port: of the sender; rank: 0 is the sender; name: of the group, the same on all ranks; listener: the
        socket of the sender, which `listen` returned; it is closed with the group.
        """
        limit = timedelta(seconds=deadline_s)
        ours = {} if listener is None else {"master_listen_fd": listener.detach()}
        self._store = dist.TCPStore(
            address, port, world_size, listener is not None, limit, wait_for_workers=False, **ours
        )
        options = dist.ProcessGroupGloo._Options()
        here = address if listener is not None else facing(address, port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
        options._timeout = limit
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
            dist.PrefixStore(name, self._store), rank, world_size, options
        )

    def broadcast(self, data: torch.Tensor, give_up_at: float) -> None:
        """Sends `data` [bytes] from rank 0 to all, in place. Args: give_up_at: on time.monotonic(). Raises RuntimeError."""
        if self._group is None:
            raise Failure("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(SHORTEST_S, give_up_at - time.monotonic()))
        self._group.broadcast([data], options).wait()

    def close(self) -> None:
        """Closes the connections. May be called twice."""
        self._group = self._store = None


# The messages about weights between a trainer and a server, which are vLLM's, and how tensors lie in a chunk of bytes.
@dataclass(kw_only=True)
class GlooInit:
    """How a server's workers find the group: the fields of vLLM's `NCCLWeightTransferInitInfo`, and what gloo needs besides."""

    master_address: str  # of the sender, as the server sees it
    master_port: int
    rank_offset: int  # rank of the server's first worker; the sender has rank 0
    world_size: int  # the sender and all workers of all servers
    group: str  # a name that nobody guesses, used by no other group
    chunk_bytes: int = CHUNK_BYTES
    deadline_s: float = 300.0  # seconds until a worker gives up a group or an update that does not come


@dataclass(kw_only=True)
class Update:
    """What one update holds, tensor by tensor: the fields of vLLM's `NCCLWeightTransferUpdateInfo`."""

    names: list[str]  # Hugging Face names
    dtype_names: list[str]  # torch's names of them: "bfloat16", ...
    shapes: list[list[int]]

    def __post_init__(self):
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise Mistake(
                f"an update with {len(self.names)} names, {len(self.dtype_names)} dtypes and {len(self.shapes)} shapes"
            )
        if not self.names or len(set(self.names)) != len(self.names):
            raise Mistake("an update holds no tensors, or two of one name")
        for name, dtype, shape in zip(self.names, self.dtype_names, self.shapes, strict=True):
            if not isinstance(getattr(torch, dtype, None), torch.dtype):
                raise Mistake(f"the update holds {name} in {dtype!r}, which is no dtype of torch")
            if not all(isinstance(size, int) and size >= 0 for size in shape):
                raise Mistake(f"the update holds {name} in the shape {shape}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in its chunk."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the chunk, a multiple of ALIGNMENT
    end: int

    def of(self, chunk: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as a view of its chunk [bytes], uint8."""
        return chunk[self.begin : self.end].view(self.dtype).view(self.shape)


def chunks(update: Update, limit: int) -> Iterator[list[Place]]:
    """Yields the tensors of each broadcast. Both ends compute them by themselves, from the same message.

    Tensors lie as in a `WeightBuffer`, each at a multiple of ALIGNMENT, so that the sender broadcasts its memory as it is.
    Args: limit: bytes; a chunk ends with the tensor that reaches them.
    """
    places: list[Place] = []
    begin = 0
    for name, dtype_name, shape in zip(update.names, update.dtype_names, update.shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        end = begin + math.prod(shape) * dtype.itemsize
        places.append(Place(name, dtype, tuple(shape), begin, end))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        if end >= limit:
            yield places
            places, begin = [], 0
    if places:
        yield places


def update_of(manifest: dict[str, list]) -> Update:
    """Returns the message for what lies in a `WeightBuffer`. Args: manifest: of the buffer."""
    return Update(names=manifest["names"], dtype_names=manifest["dtype_names"], shapes=manifest["shapes"])


def check_layout(places: Sequence[Place], offsets: Sequence[int]) -> None:
    """Raises ValueError when memory is laid out otherwise than `chunks` says. Args: offsets: bytes, of the same tensors."""
    for place, offset in zip(places, offsets, strict=True):
        if offset - offsets[0] != place.begin:
            raise Mistake(f"{place.name} lies at byte {offset}, which is not where a receiver looks for it")
