"""The sender: the process that takes part in collectives with servers, so that the trainer never does.

`courier.Courier` is the trainer's end, and speaks with the servers by HTTP. The sender reads rank 0's published copy out
of the trainer's memory and broadcasts it in a group with the workers of all servers that it is told of, which it keeps
for the next time.

    python -P -m torchtune_ext.sampling.sender_process SOCKET PARENT

It is asked to `listen`, to `join` the group, and to `send`, as `child_process.ChildProcess` asks. After an error it ends:
nobody knows in which state a group is whose collective broke off, and another sender makes another one."""

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any

import torch

from torchtune_ext.run.errors import Failure
from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling.broadcast import (
    CHUNK_BYTES,
    GlooGroup,
    GlooInit,
    chunks,
    facing,
    listen,
)
from torchtune_ext.sampling.child_process import pack, receive
from torchtune_ext.sampling.weight_buffer import memory_of, tensors

log = logging.getLogger(__name__)


def address_facing(places: Sequence[tuple[str, int]]) -> str:
    """Returns the address of this machine that all servers are told: one that leads to it from elsewhere, if any of them is
    elsewhere. Args: places: host and port of each server. Raises Failure where one cannot be reached."""
    addresses = []
    for host, port in places:
        try:
            addresses.append(facing(host, port))
        except OSError as error:
            raise Failure(f"no way to {host}: {error}") from None
    return min(addresses, key=lambda address: ip_address(address).is_loopback)


class GlooSender:
    """Sends by gloo."""

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
        self.init = asdict(self._init)  # for the first server

    def join(self) -> None:
        """Waits until all are there. Raises RuntimeError (of torch)."""
        init = self._init
        self._group = GlooGroup(
            init.master_address, init.master_port, 0, init.world_size, init.group, init.deadline_s, self._listener
        )

    def send(self, path: str, manifest: dict[str, list], deadline_s: float) -> None:
        """Broadcasts what lies in the trainer's memory at `path`. Raises RuntimeError (of torch), ValueError."""
        give_up_at = time.monotonic() + deadline_s
        memory = memory_of(path)
        for begin, end, _ in chunks(manifest, CHUNK_BYTES):
            self._group.broadcast(memory[begin:end], give_up_at)


class NcclSender:
    """Sends by NCCL as vLLM's own trainer side does, from the first GPU that this process sees. The trainer holds the
    deadline, and kills this process; so does each server."""

    def __init__(self, address: str, world_size: int, deadline_s: float):
        from vllm.distributed.weight_transfer.packed_tensor import (
            DEFAULT_PACKED_BUFFER_SIZE_BYTES,
            DEFAULT_PACKED_NUM_BUFFERS,
        )

        with listen(address) as free:
            port = free.getsockname()[1]
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

        packed_nccl_broadcast_producer(
            iterator=((name, tensor.to("cuda")) for name, tensor in tensors(path, manifest)),
            group=self._group,
            src=0,
            post_iter_func=lambda named: named[1],
            buffer_size_bytes=self.init["packed_buffer_size_bytes"],
            num_buffers=self.init["packed_num_buffers"],
        )
        torch.cuda.synchronize()
        # The trainer has the same GPU, and needs the memory until the next publication.
        torch.cuda.empty_cache()


SENDERS = {"gloo": GlooSender, "nccl": NcclSender}


def serve(end: socket.socket) -> None:
    """Does what the trainer asks for until it closes its end, or something fails."""
    sender: GlooSender | NcclSender | None = None

    def act(method: str, arguments: tuple) -> Any:
        nonlocal sender
        if method == "listen":
            backend, places, world_size, deadline_s = arguments
            # The old group ends here; the servers leave it when they are told of the new one.
            sender = None
            sender = SENDERS[backend](address_facing(places), world_size, deadline_s)
            return sender.init
        return getattr(sender, method)(*arguments)

    while True:
        try:
            messages = receive(end)
        except (EOFError, OSError):
            return
        for number, method, arguments in messages:
            if method == "cancel":
                return  # nobody waits for this group any more
            try:
                answer = ("value", act(method, arguments))
            except Exception as error:
                log.error("%s: %s", method, error)
                answer = ("lost", f"the sender failed in {method}: {error}")
            end.sendall(pack([(number, *answer)]))
            if answer[0] == "lost":
                return


def main(descriptor: int, parent: int) -> None:
    """Lives as the sender. Args: descriptor: of the socket; parent: process id of the trainer."""
    die_with_parent(parent)
    logging.basicConfig(level=logging.INFO, format="(sender) %(asctime)s %(levelname)s %(name)s: %(message)s")
    serve(socket.socket(fileno=descriptor))
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
