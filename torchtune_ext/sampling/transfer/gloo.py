"""A gloo group between the sender and the workers of servers, apart from every other group of either side.

It binds to the one address that faces the other end, whatever `GLOO_SOCKET_IFNAME` says: that variable keeps an engine's own
groups on its machine.
"""

import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SHORTEST_S = 0.001  # gloo takes a timeout of 0 for none


def facing(host: str, port: int) -> str:
    """Returns the address of this machine from which packets to another one leave. Nothing is sent. Raises OSError."""
    (family, kind, protocol, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def listen(address: str) -> socket.socket:
    """Returns a socket that listens on one address of this machine alone, at a free port. Raises OSError."""
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
            raise RuntimeError("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(SHORTEST_S, give_up_at - time.monotonic()))
        self._group.broadcast([data], options).wait()

    def close(self) -> None:
        """Closes the connections. May be called twice."""
        self._group = self._store = None
