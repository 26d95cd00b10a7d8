"""The sender: the process that takes part in collectives with servers, so that the trainer never does.

`courier.Courier` is the trainer's end. The sender reads rank 0's published copy out of the trainer's memory, makes a group
with the workers of all servers that it is told of, and keeps it for the next time.

    python -P -m torchtune_ext.sampling.transfer.sender_process SOCKET PARENT

An order is (number, "send", Order); its answer (number, "value", seconds). After an error, (number, "lost", (url or None,
message)), the process ends: nobody knows in which state a group is whose collective broke off, and another sender makes
another one.
"""

import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import torch

from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling.child_process import pack, receive
from torchtune_ext.sampling.server_command import server_key
from torchtune_ext.sampling.transfer.group import (
    CHUNK_BYTES,
    GlooGroup,
    GlooInit,
    Member,
    Order,
    ServerGroup,
    ServerLost,
    check_layout,
    chunks,
    facing,
    listen,
    update_of,
)
from torchtune_ext.sampling.weight_buffer import tensors

log = logging.getLogger(__name__)


def memory_of(path: str) -> torch.Tensor:
    """Returns the trainer's memory [bytes], uint8, mapped and not copied."""
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def address_facing(members: tuple[Member, ...]) -> str:
    """Returns the address of this machine that all servers are told: one that leads to it from elsewhere, if any of them is
    elsewhere. Raises ServerLost where one cannot be reached."""
    addresses = []
    for member in members:
        parts = urlsplit(member.url)
        try:
            addresses.append(facing(parts.hostname or "", parts.port or 80))
        except OSError as error:
            raise ServerLost(member.url, f"no way to it: {error}") from None
    return min(addresses, key=lambda address: ip_address(address).is_loopback)


class GlooSender:
    """Sends by gloo. Its verbs are those of the trainer side of vLLM's backends."""

    def __init__(self, servers: ServerGroup, give_up_at: float):
        """Makes the group. Raises ServerLost, RuntimeError (of torch), OSError."""
        address = address_facing(servers.members)
        listener, name = listen(address), secrets.token_hex(16)
        port, limit_s = listener.getsockname()[1], give_up_at - time.monotonic()
        init = GlooInit(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=servers.world_size,
            group=name,
            deadline_s=limit_s,
        )
        # The servers wait in this call until the group is there.
        with ThreadPoolExecutor(max_workers=1) as side:
            answer = side.submit(servers.init_weight_transfer_engine, asdict(init))
            self._group = GlooGroup(address, port, 0, servers.world_size, name, limit_s, listener)
            answer.result()

    def send(self, servers: ServerGroup, order: Order, give_up_at: float) -> None:
        """Sends one update, and returns when all servers have finished it. Raises ServerLost, RuntimeError, ValueError."""
        update = update_of(order.manifest)
        memory, offsets = memory_of(order.path), iter(order.manifest["offsets"])
        servers.start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as side:
            answer = side.submit(servers.update_weights, asdict(update))
            for places in chunks(update, CHUNK_BYTES):
                here = [next(offsets) for _ in places]
                check_layout(places, here)
                self._group.broadcast(memory[here[0] : here[0] + places[-1].end], give_up_at)
            answer.result()
        servers.finish_weight_update()


class NcclSender:
    """Sends by vLLM's own trainer side, `NCCLTrainerWeightTransferEngine`, from the first GPU that this process sees."""

    def __init__(self, servers: ServerGroup, give_up_at: float):
        """Makes the group. Raises ServerLost, RuntimeError."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

        address = address_facing(servers.members)
        with listen(address) as free:
            port = free.getsockname()[1]
        torch.cuda.set_device(0)
        init = NCCLTrainerInitInfo(
            rank=0, master_address=address, master_port=port, world_size=servers.world_size, packed=True
        )
        self._engine = NCCLTrainerWeightTransferEngine.trainer_init(init, client=servers, source=_Source({}, ""))

    def send(self, servers: ServerGroup, order: Order, give_up_at: float) -> None:
        """As `GlooSender.send`. The deadline is held by the trainer, which kills this process, and by each server."""
        self._engine.client, self._engine.source = servers, _Source(order.manifest, order.path)
        self._engine.send_weights()
        # The trainer has the same GPU, and needs the memory until the next publication.
        torch.cuda.empty_cache()


class _Source:
    """The trainer's memory as vLLM's `WeightSource`: pairs of name and tensor on the GPU."""

    def __init__(self, manifest: dict[str, list], path: str):
        self._manifest, self._path = manifest, path

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        columns = (self._manifest[name] for name in ("names", "dtype_names", "shapes"))
        return [ParamMeta(n, getattr(torch, d), tuple(s)) for n, d, s in zip(*columns, strict=True)]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(self._path, self._manifest):
            yield name, tensor.to("cuda")


SENDERS = {"gloo": GlooSender, "nccl": NcclSender}


class Process:
    """What the sender does, order after order."""

    def __init__(self, end: socket.socket, key: str):
        """Args: end: to the trainer; key: of the servers."""
        self._end, self._key = end, key
        self._number = 0  # number of the order under way
        self._ending = threading.Lock()  # only the first error is reported
        self._group: GlooSender | NcclSender | None = None
        self._of: tuple[str, tuple[Member, ...]] | None = None  # whom the group connects, and by what

    def serve(self) -> None:
        """Works until the trainer closes its end."""
        while True:
            try:
                orders = receive(self._end)
            except (EOFError, OSError):
                return
            for self._number, _, order in orders:
                try:
                    took = self._send(order)
                except Exception as error:
                    self.end(error)
                self._end.sendall(pack([(self._number, "value", took)]))

    def _send(self, order: Order) -> float:
        """Returns the seconds that it took. Raises ServerLost, RuntimeError, ValueError, OSError."""
        began = time.monotonic()
        servers = ServerGroup(order.members, self._key, order.deadline_s, self.end)
        servers.version, servers.adapter = order.version, order.adapter
        if self._of != (order.backend, order.members):
            # The old group ends here; the servers leave it when they are told of the new one.
            self._group = None
            self._group = SENDERS[order.backend](servers, began + order.deadline_s)
            self._of = (order.backend, order.members)
        self._group.send(servers, order, began + order.deadline_s)
        return time.monotonic() - began

    def end(self, error: Exception) -> None:
        """Tells the trainer what went wrong, and ends the process, whatever its other threads wait for."""
        self._ending.acquire()  # never released: this process ends
        log.error("order %d: %s", self._number, error)
        url = error.url if isinstance(error, ServerLost) else None
        message = str(error) if isinstance(error, ServerLost) else f"{type(error).__name__}: {error}"
        try:
            self._end.sendall(pack([(self._number, "lost", (url, message))]))
        finally:
            os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Lives as the sender. Args: descriptor: of the socket; parent: process id of the trainer."""
    die_with_parent(parent)
    logging.basicConfig(level=logging.INFO, format="(sender) %(asctime)s %(levelname)s %(name)s: %(message)s")
    end = socket.socket(fileno=descriptor)
    end.sendall(pack([(0, "ready", None)]))
    Process(end, server_key() or "").serve()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
