"""Code that runs inside vLLM's process: takes weights out of the trainer's shared memory, or out of a group with its sender.

Named in the engine's arguments as `worker_extension_cls="torchtune_ext.sampling.worker.WeightLoader"`; importing it
registers the weight-transfer backends "shm" and "gloo", and puts our checks around vLLM's own "nccl". The same two arguments
make any vLLM server able to take our weights.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.platforms import current_platform

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.broadcast import GlooGroup, GlooInit, chunks
from torchtune_ext.sampling.loading import TAKEN, CheckedTransfer, Named
from torchtune_ext.sampling.weight_buffer import ADAPTER_ID, UNREADABLE, checksum, tensors, views


@dataclass
class SharedMemory(WeightTransferInitInfo):
    """Says where the weights lie."""

    path: str  # a memory file of the trainer: /proc/<pid>/fd/<number>
    token: str  # the bytes with which the file begins, in hexadecimal


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """Says what lies there, tensor by tensor."""

    names: list[str]  # Hugging Face names
    dtype_names: list[str]  # torch's names of them: "bfloat16", ...
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the file


def check_memory(path: str, token: str) -> None:
    """Raises ValueError when the file is not the trainer's memory."""
    expected = bytes.fromhex(token)
    try:
        with open(path, "rb") as file:
            ours = file.read(len(expected)) == expected
    except OSError:
        ours = False
    if not ours:
        raise Mistake(
            f"{UNREADABLE} at {path}: vLLM has to run on the trainer's machine, "
            f"as the same user and in the same PID namespace"
        )


class SharedMemoryTransfer(CheckedTransfer):
    """Takes publications out of the trainer's memory."""

    init_info_cls = SharedMemory
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: SharedMemory) -> None:
        check_memory(init_info.path, init_info.token)
        self.path = init_info.path

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        take(list(tensors(self.path, vars(update))))


# Weights out of a group with the trainer's sender. Every wait ends by itself: a sender that was killed closes its connections,
# and one that cannot be heard any more is given up after `deadline_s`. The engine is then free for the next trainer, or for the
# next group of this one.
NO_GROUP = "this server is in no group with the trainer's sender"


class GlooTransfer(CheckedTransfer):
    """Takes publications by gloo, chunk by chunk, on a CPU or on the way to a GPU."""

    init_info_cls = GlooInit
    update_info_cls = Manifest
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

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        """Takes what the sender broadcasts. Raises RuntimeError when it does not, and the group is over then."""
        if self.group is None:
            raise RuntimeError(NO_GROUP)
        give_up_at = time.monotonic() + self.init.deadline_s
        try:
            for begin, end, manifest in chunks(vars(update), self.init.chunk_bytes):
                chunk = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
                self.group.broadcast(chunk, give_up_at)
                take(list(views(chunk, manifest)))
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
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: NcclInit) -> None:
        self.shutdown()
        self.deadline_s = init_info.deadline_s
        NCCLWeightTransferEngine.init_transfer_engine(self, init_info)

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
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


def _register(name: str, backend: type[CheckedTransfer]) -> None:
    """Makes vLLM find a backend of ours; its own `nccl` gets our checks and checksums."""
    WeightTransferEngineFactory._registry.pop(name, None)
    WeightTransferEngineFactory.register_engine(name, backend)


_register("shm", SharedMemoryTransfer)
_register("gloo", GlooTransfer)
_register("nccl", NcclTransfer)


class WeightLoader:
    """Adds our methods to vLLM's workers, into which vLLM mixes this class; its import has registered the backend."""

    def checksums(self) -> dict[str, int | None]:
        """Returns the checksum (`weight_buffer.checksum`) of every tensor of the last published model and adapter, as this
        worker has taken it, by name. None stands for a tensor that came in two forms."""
        return {name: value for part in TAKEN.values() for name, value in part.items()}

    def load_adapter(self, address: dict[str, str], manifest: dict[str, list], config: dict[str, Any]) -> None:
        """Puts an adapter out of the trainer's memory where every request with `ADAPTER_ID` finds it, in place of the last.

        vLLM's own way would read a directory.
        Args: address: that of the `WeightBuffer`; manifest: the fields of `Manifest`; config: PEFT's.
        Raises: ValueError when this engine cannot read or apply the adapter.
        """
        self._require_lora()
        check_memory(**address)
        self._use_adapter({name: tensor.clone() for name, tensor in tensors(address["path"], manifest)}, config)

    def receive_adapter(self, manifest: dict[str, list], config: dict[str, Any]) -> None:
        """As `load_adapter`, out of the broadcast of the sender's group, which this call is a part of.

        Args: manifest: the fields of `Manifest`; config: PEFT's.
        """
        self._require_lora()
        engine, weights = self.weight_transfer_engine, {}
        # The tensors are views of chunks, and live longer than these.
        engine.receive(
            engine.parse_update_info(manifest),
            lambda named: weights.update((name, t.cpu().clone()) for name, t in named),
        )
        self._use_adapter(weights, config)

    def _require_lora(self) -> None:
        if self.model_runner.lora_config is None:
            raise Mistake("this engine has no LoRA: it was started without engine.lora_rank")

    def _use_adapter(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        TAKEN["adapter"] = {}
        manager = self.model_runner.lora_manager._adapter_manager
        # This is the moment for it: later vLLM scales them in place.
        sums = {name: checksum(tensor) for name, tensor in weights.items()}
        peft = PEFTHelper.from_dict(config)
        peft.validate_legal(self.model_runner.lora_config)
        dtype = self.model_runner.lora_config.lora_dtype
        adapter = LoRAModel.from_lora_tensors(ADAPTER_ID, weights, peft, device="cpu", dtype=dtype)
        layers = {name for name in adapter.loras if any(_serves(module, name, manager) for module in manager.modules)}
        if unused := sorted(set(adapter.loras) - layers):
            raise Mistake(
                f"this engine applies no adapter to {unused[:3]}; targets it has: {sorted(manager.modules)[:8]}"
            )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        if current_platform.is_cpu():
            for wrapper in manager.punica_wrapper_mapping.values():
                wrapper.add_lora_linear = partial(add_one_adapter, wrapper)
        TAKEN["adapter"] = sums


def add_one_adapter(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: Sequence[torch.Tensor],
    lora_b_stacked: Sequence[torch.Tensor],
    scale: float,
    output_slices: Sequence[int],
    **_: Any,
) -> None:
    """Adds scale * x A' B' to y [T, out], for each slice of a packed layer, in place.

    Args: x: [T, in]; lora_a_stacked: A for each slice, [slots, 1, rank, in]; lora_b_stacked: B, [slots, 1, out, rank];
    output_slices: features of each slice, in their order in y.

    On CPU vLLM 0.32 copies A and B once for each token, [T, rank, in], since tokens may have different adapters. Ours all
    have the same one, in slot 0. The product is made in float64: in float32 its last bits would depend on how many requests
    happen to share the step, and a run would not repeat itself.
    """
    if wrapper.no_lora:
        return
    start, y, x = 0, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).double()
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size] += (scale * (x @ a[0, 0].T.double() @ b[0, 0].T.double())).to(y.dtype)
        start += size


def _serves(module: str, name: str, manager: Any) -> bool:
    """Whether vLLM's (packed) module applies the adapter of the layer `name`: qkv_proj serves q_proj."""
    stem, _, last = module.rpartition(".")
    parts = manager.packed_modules_mapping.get(last, [last])
    return name in {f"{stem}.{part}" if stem else part for part in parts}
