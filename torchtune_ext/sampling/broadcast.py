"""Weight sync to servers on other machines, by vLLM's weight-transfer protocol.

    trainer                                          server, in vLLM's process
    server.py ── HTTP ─────────────────────────────▶ worker.py: starts, receives, finishes an update
    weight_sender.py ─ requests ─▶ this module ────▶ the bytes by gloo or NCCL, in chunks

This module is a process next to the trainer (python -P -m torchtune_ext.sampling.broadcast SOCKET
PARENT). It opens the trainer's memory and broadcasts it in a group with the workers of each server.
Only this process waits for other machines.
"""

import logging
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtune_ext.run.errors import RunFailure
from torchtune_ext.run.process_env import die_with_parent
from torchtune_ext.sampling.child_process import pack_messages, receive_messages
from torchtune_ext.sampling.weight_buffer import MANIFEST, iter_views, manifest_of, map_memory, pin, unpin

log = logging.getLogger(__name__)

MIN_TIMEOUT_S = 0.001  # gloo treats a timeout of 0 as infinite
CHUNK_BYTES = 64 << 20  # bytes per gloo broadcast; a larger tensor is its own chunk


def own_address(host: str, port: int) -> str:
    """Returns this machine's source address for packets to `host`.

    Raises:
        OSError: If the host is unknown or has no route.
    """
    # Connecting a UDP socket only looks up the route and sends nothing.
    (family, kind, protocol, _, target), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def listen(address: str) -> socket.socket:
    """Returns a socket that listens only on `address`, on a free port.

    Raises:
        OSError: If the address does not belong to this machine.
    """
    return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


@dataclass(kw_only=True)
class GlooInit:
    """Rendezvous of a gloo group: the fields of vLLM's `NCCLWeightTransferInitInfo` and our own."""

    master_address: str  # address of the sender, as the server sees it
    master_port: int
    rank_offset: int  # rank of the server's first worker; the sender has rank 0
    world_size: int  # the sender and the workers of the server
    group: str  # random, unique name of the group
    chunk_bytes: int = CHUNK_BYTES
    deadline_s: float = 300.0  # timeout of the rendezvous and of an update in a worker, seconds


class GlooGroup:
    """A separate gloo group of the sender and a server's workers. After any error, close it."""

    def __init__(self, init: GlooInit, rank: int, listener: socket.socket | None = None):
        """Waits until all ranks have joined.

        Args:
            init: The rendezvous.
            rank: Rank of this process; the sender has rank 0.
            listener: Listening socket of the sender; None for the workers.

        Raises:
            RuntimeError: After `init.deadline_s` seconds.
        """
        address, port, world_size = init.master_address, init.master_port, init.world_size
        limit = timedelta(seconds=init.deadline_s)
        # From here on the store owns the descriptor and closes it with the group.
        listener_options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.detach()}
        self._store = dist.TCPStore(
            address, port, world_size, listener is not None, limit, wait_for_workers=False, **listener_options
        )
        # torch's stub has another name for this class, and lacks the collectives of a group.
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        # The group binds only to the address that faces the other end. It ignores
        # `GLOO_SOCKET_IFNAME`, which restricts a replica's own groups to its machine.
        here = address if listener is not None else own_address(address, port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
        options._timeout = limit
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
            dist.PrefixStore(init.group, self._store), rank, world_size, options
        )

    def broadcast(self, data: torch.Tensor, give_up_at: float) -> None:
        """Broadcasts `data` [bytes], uint8, from rank 0, in place.

        Args:
            data: Sent by rank 0, overwritten on the other ranks.
            give_up_at: Deadline on time.monotonic().

        Raises:
            RuntimeError: At the deadline, or if the group is closed.
        """
        if self._group is None:
            raise RunFailure("the group is closed")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=max(MIN_TIMEOUT_S, give_up_at - time.monotonic()))
        self._group.broadcast([data], options).wait()  # pyright: ignore[reportAttributeAccessIssue]

    def close(self) -> None:
        """Closes the connections. May be called twice."""
        self._group = self._store = None


def iter_chunks(manifest: Mapping[str, Sequence], limit: int) -> Iterator[tuple[int, int, dict[str, list]]]:
    """Yields (begin, end, manifest) of each chunk, in bytes.

    A chunk ends with the tensor at which its size reaches `limit`.
    """
    # Sender and workers each compute the chunks, which must depend only on the arguments.
    rows: list[tuple] = []
    begin = end = 0
    for name, dtype, shape, offset in zip(*(manifest[column] for column in MANIFEST), strict=True):
        begin = begin if rows else offset
        rows.append((name, dtype, shape, offset - begin))
        end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
        if end - begin >= limit:
            yield begin, end, manifest_of(rows)
            rows = []
    if rows:
        yield begin, end, manifest_of(rows)


class GlooSender:
    """Broadcasts weights by gloo."""

    def __init__(self, address: str, world_size: int, deadline_s: float):
        self._listener = listen(address)
        self._init = GlooInit(
            master_address=address,
            master_port=self._listener.getsockname()[1],
            rank_offset=1,
            world_size=world_size,
            group=secrets.token_hex(16),
            deadline_s=deadline_s,
        )
        self.init = asdict(self._init)

    def join(self) -> None:
        """Waits until all ranks have joined. Raises RuntimeError (from torch)."""
        self._group = GlooGroup(self._init, 0, self._listener)

    def send(self, path: str, manifest: dict[str, list], deadline_s: float) -> None:
        """Broadcasts the trainer's memory at `path`. Raises RuntimeError (of torch), ValueError."""
        give_up_at = time.monotonic() + deadline_s
        memory = map_memory(path)
        for begin, end, _ in iter_chunks(manifest, CHUNK_BYTES):
            self._group.broadcast(memory[begin:end], give_up_at)


_MAPPED: dict[str, torch.Tensor] = {}  # path -> memory of the trainer, for all servers


def pinned_memory(path: str) -> torch.Tensor:
    """Maps and pins the trainer's memory [bytes] at `path`, until its size changes: pinning is slow."""
    memory = _MAPPED.get(path)
    if memory is None or memory.numel() != os.stat(path).st_size:
        if memory is not None:
            unpin(memory)
        memory = _MAPPED[path] = pin(map_memory(path))
    return memory


class NcclSender:
    """Broadcasts weights by NCCL from the first visible GPU, as vLLM's own trainer side does."""

    def __init__(self, address: str, world_size: int, deadline_s: float):
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            DEFAULT_PACKED_NUM_BUFFERS,
        )

        with listen(address) as probe:
            port = probe.getsockname()[1]
        self.init = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            "packed_num_buffers": DEFAULT_PACKED_NUM_BUFFERS,
            "deadline_s": deadline_s,
        }

    def join(self) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(0)
        self._group = trainer_init(self.init)

    def send(self, path: str, manifest: dict[str, list], deadline_s: float) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        # NCCL has no timeout. The trainer enforces the deadline and kills this process.
        views = iter_views(pinned_memory(path), manifest)
        packed_nccl_broadcast_producer(
            iterator=((name, tensor.to("cuda", non_blocking=True)) for name, tensor in views),
            group=self._group,
            src=0,
            post_iter_func=lambda named: named[1],
            buffer_size_bytes=self.init["packed_buffer_size_bytes"],
            num_buffers=self.init["packed_num_buffers"],
        )
        torch.cuda.synchronize()
        # The trainer uses the same GPU and needs the memory until the next weight sync.
        torch.cuda.empty_cache()


SENDERS = {"gloo": GlooSender, "nccl": NcclSender}


def serve(end: socket.socket) -> None:
    """Serves the trainer's requests until it closes its end, or a request fails."""
    senders: dict[str, GlooSender | NcclSender] = {}  # server address -> sender
    while True:
        try:
            messages = receive_messages(end)
        except (EOFError, OSError):
            return
        for number, method, arguments in messages:
            if method == "cancel":
                return  # the trainer has canceled the transfer
            try:
                server, *rest = arguments
                if method == "listen":
                    backend, host, port, world_size, deadline_s = rest
                    senders[server] = SENDERS[backend](own_address(host, port), world_size, deadline_s)
                    answer = ("value", senders[server].init)
                else:
                    answer = ("value", getattr(senders[server], method)(*rest))
            except Exception as error:  # noqa: BLE001 (the trainer gets it)
                log.error("%s: %s", method, error)
                answer = ("lost", f"the sender failed in {method}: {error}")
            end.sendall(pack_messages([(number, *answer)]))
            # After an interrupted collective the state of the group is undefined.
            if answer[0] == "lost":
                return


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="(sender) %(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
