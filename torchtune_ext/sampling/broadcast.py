"""Weights over a network, by vLLM's weight-transfer protocol: from the trainer's memory to servers that share none with it.

    trainer                                          server, in vLLM's process
    server.py ── HTTP ─────────────────────────────▶ worker.py (begins, takes, finishes an update)
    courier.py ── asks ──▶ sender_process.py ──────▶ the bytes by gloo or NCCL, piece by piece

The trainer only writes its weights into memory, as for an engine of its own. A process beside it, the sender, opens that
memory and does all that may wait for another machine. When it is late it is killed, and no collective of ours ever runs in
the trainer. In here is what both ends of the broadcast share.
"""

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtune_ext.run.errors import Failure
from torchtune_ext.sampling.weight_buffer import MANIFEST

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


def chunks(manifest: Mapping[str, Sequence], limit: int) -> Iterator[tuple[int, int, dict[str, list]]]:
    """Cuts the memory of a `WeightBuffer` into pieces that are broadcast one after the other. Both ends compute them by
    themselves.

    Args: manifest: of the buffer; limit: bytes; a piece ends with the tensor that reaches them.
    Yields: where a piece begins and ends, bytes from the start of the file, and the manifest of what lies in it.
    """
    rows: list[tuple] = []
    begin = 0
    for name, dtype, shape, offset in zip(*(manifest[column] for column in MANIFEST), strict=True):
        begin = begin if rows else offset
        rows.append((name, dtype, shape, offset - begin))
        end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
        if end - begin >= limit:
            yield begin, end, dict(zip(MANIFEST, map(list, zip(*rows, strict=True)), strict=True))
            rows = []
    if rows:
        yield begin, end, dict(zip(MANIFEST, map(list, zip(*rows, strict=True)), strict=True))
