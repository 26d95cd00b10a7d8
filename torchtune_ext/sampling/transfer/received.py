"""The servers' end, inside vLLM's process: weights out of a group with the trainer's sender.

Every wait ends by itself: a sender that was killed closes its connections, and one that cannot be heard any more is given up
after `deadline_s`. The engine is free then for the next trainer, or for this one's next group.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

from torchtune_ext.sampling.loading import CheckedTransfer, Named
from torchtune_ext.sampling.transfer.group import GlooGroup, GlooInit, Update, chunks

NO_GROUP = "this server is in no group with the trainer's sender"


class GlooTransfer(CheckedTransfer):
    """Takes publications by gloo, chunk by chunk, on a CPU or on the way to a GPU."""

    init_info_cls = GlooInit
    update_info_cls = Update
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.init = init_info
        self.group = GlooGroup(
            init_info.master_address,
            init_info.master_port,
            rank,
            init_info.world_size,
            init_info.group,
            init_info.deadline_s,
        )

    def receive(self, update: Update, take: Callable[[Named], None]) -> None:
        """Takes what the sender broadcasts. Raises RuntimeError when it does not, and the group is over then."""
        if self.group is None:
            raise RuntimeError(NO_GROUP)
        give_up_at = time.monotonic() + self.init.deadline_s
        try:
            for places in chunks(update, self.init.chunk_bytes):
                chunk = torch.empty(places[-1].end, dtype=torch.uint8, device="cpu")
                self.group.broadcast(chunk, give_up_at)
                take([(place.name, place.of(chunk)) for place in places])
        except BaseException:
            # Also when the model refuses a tensor: the sender is in the midst of an update that nobody takes.
            self.shutdown()
            raise

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


@dataclass(kw_only=True)
class NcclInit(NCCLWeightTransferInitInfo):
    """vLLM's message with a deadline, which it lacks."""

    deadline_s: float = 300.0  # seconds until a worker gives up an update that does not come


class NcclTransfer(CheckedTransfer, NCCLWeightTransferEngine):
    """vLLM's own backend with our checks, checksums and a deadline."""

    init_info_cls = NcclInit

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        self.shutdown()
        self.deadline_s = init_info.deadline_s
        NCCLWeightTransferEngine.init_transfer_engine(self, init_info)

    def receive(self, update: Update, take: Callable[[Named], None]) -> None:
        """As `GlooTransfer.receive`. NCCL itself would wait for ever: at the deadline the communicator is aborted."""
        group = self.model_update_group
        if group is None:
            raise RuntimeError(NO_GROUP)
        aborted = threading.Event()

        def abort() -> None:
            aborted.set()
            self.shutdown()

        def require_in_time() -> None:
            if aborted.is_set():
                raise RuntimeError(f"the weights did not come within {self.deadline_s:g} s")

        def take_received(named: Named) -> None:
            # The bytes are on their way still. An abort ends that wait, too, and they are then anything.
            torch.cuda.current_stream(self.device).synchronize()
            require_in_time()
            take(named)

        late = threading.Timer(self.deadline_s, abort)
        late.daemon = True
        late.start()
        columns = zip(update.names, update.dtype_names, update.shapes, strict=True)
        try:
            packed_nccl_broadcast_consumer(
                iterator=((name, (shape, getattr(torch, dtype))) for name, dtype, shape in columns),
                group=group,
                src=0,
                post_unpack_func=take_received,
                buffer_size_bytes=self.packed_buffer_size_bytes,
                num_buffers=self.packed_num_buffers,
                device=self.device,
            )
            torch.cuda.synchronize(self.device)
            require_in_time()  # what was received is on the device only now
        except BaseException:
            self.shutdown()
            raise
        finally:
            late.cancel()

    def shutdown(self) -> None:
        NCCLWeightTransferEngine.shutdown(self)
