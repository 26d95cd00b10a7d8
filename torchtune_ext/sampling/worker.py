"""Code that runs inside vLLM's process: loads weights out of the trainer's shared memory.

Named in the engine's arguments as `worker_extension_cls="torchtune_ext.sampling.worker.WeightLoader"`; importing it
registers the weight-transfer backend "shm". The same two arguments make any vLLM server on this machine able to take
our weights.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from torchtune_ext.sampling.weight_buffer import ADAPTER_ID, UNREADABLE, checksum

BACKEND = "shm"
KV_SCALES = (".attn.q_scale", ".attn.k_scale", ".attn.v_scale", ".attn.prob_scale")
SCALE = "weight_scale_inv"  # the block scales of a weight, multipliers in spite of the name
# These are the checksums of the tensors that this process has taken, by name; None stands for one that came in two forms.
TAKEN: dict[str, dict[str, int | None]] = {"model": {}, "adapter": {}}


@dataclass
class SharedMemory(WeightTransferInitInfo):
    """Says where the weights lie."""

    path: str  # a memory file of the trainer: /proc/<pid>/fd/<number>
    token: str  # the bytes with which the file begins, in hexadecimal


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """Says what lies there, tensor by tensor."""

    names: list[str]  # Hugging Face names
    dtypes: list[str]  # torch's names of them: "bfloat16", ...
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the file


def tensors(path: str, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor); the tensors are views of the shared memory, good until the generator is dropped."""
    columns = (manifest.names, manifest.dtypes, manifest.shapes, manifest.offsets)
    memory = torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
    for name, dtype, shape, offset in zip(*columns, strict=True):
        kind = getattr(torch, dtype)
        yield name, memory[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


class Arrivals(TorchDispatchMode):
    """Takes the checksum of every published tensor at the moment when it is copied into a parameter. In whatever layer it
    ends, fused, packed or cut for tensor parallelism, before that its bytes are copied once.

    A whole tensor is checked where it has arrived, in the parameter and on its device. Of one that is cut or changes its dtype
    on the way the source is: its bytes in the parameter are others. What vLLM takes from us and never copies is not in `found`.
    """

    def __init__(self):
        super().__init__()
        self.found: dict[str, int | None] = {}
        # It says for each storage what begins at which offset in bytes.
        self._lent: dict[int, dict[int, tuple[str, torch.Tensor]]] = {}

    def watch(self, named: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes the tensors on, and knows them again when they are copied."""
        for name, tensor in named:
            begin = tensor.storage_offset() * tensor.itemsize
            self._lent.setdefault(tensor.untyped_storage().data_ptr(), {})[begin] = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and not args[1].is_meta:
            lent = self._lent.get(args[1].untyped_storage().data_ptr())
            if lent is not None:
                self._note(lent, *args[:2])
        return done

    def _note(self, lent: dict[int, tuple[str, torch.Tensor]], held: torch.Tensor, source: torch.Tensor) -> None:
        begins = sorted(lent)
        name, whole = lent[begins[bisect_right(begins, source.storage_offset() * source.itemsize) - 1]]
        entire = source.numel() == whole.numel() and source.is_contiguous() and held.dtype == source.dtype
        value = checksum(held if entire else whole)
        self.found[name] = value if self.found.get(name, value) == value else None


def check_memory(path: str, token: str) -> None:
    """Raises ValueError when the file is not the trainer's memory."""
    expected = bytes.fromhex(token)
    try:
        with open(path, "rb") as file:
            ours = file.read(len(expected)) == expected
    except OSError:
        ours = False
    if not ours:
        raise ValueError(
            f"{UNREADABLE} at {path}: vLLM has to run on the trainer's machine, "
            f"as the same user and in the same PID namespace"
        )


def check_quantized(
    manifest: Manifest, parameters: Mapping[str, torch.Tensor], packed: Mapping[str, list[str]]
) -> None:
    """Raises ValueError for the first weight that does not come as the engine holds it.

    vLLM copies bfloat16 into an FP8 weight without a word, and scales that are left out keep their last values: both are
    wrong in silence.
    Args: manifest: what was published; parameters: those of the engine's model, by name; packed: its fused layers, "qkv_proj"
    -> ["q_proj", "k_proj", "v_proj"].
    """
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    sent = dict(zip(manifest.names, manifest.dtypes, strict=True))
    for name, dtype in sent.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        head, _, layer = stem.rpartition(".")
        quantized = f"{head}.{fused.get(layer, layer)}.{SCALE}" in parameters
        wanted = "float8_e4m3fn" if quantized else "a high precision"
        if quantized != (dtype == "float8_e4m3fn"):
            raise ValueError(
                f"published {name} is {dtype}, but the engine holds it in {wanted}: the lists of layers differ"
            )
        if quantized and sent.get(f"{stem}.{SCALE}") != "float32":
            raise ValueError(f"published {name} comes without {stem}.{SCALE} in float32; send both")


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Puts the layers that vLLM wrapped for LoRA back into their old places while the body runs, so that weights find their
    names."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, BaseLayerWithLoRA)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


def retie_lm_head(model: torch.nn.Module) -> None:
    """Packs a tied output head again. On CPU vLLM 0.32 copies linear weights into oneDNN's own layout, and its reload, layer
    by layer, skips a head that shares its weight with the embedding: the head would go on with the old weights."""
    if not current_platform.is_cpu():
        return
    inner, head = getattr(model, "model", None), getattr(model, "lm_head", None)
    embedding = getattr(inner, "embed_tokens", None)
    if head is None or embedding is None or head is embedding:
        return
    if getattr(head, "weight", None) is getattr(embedding, "weight", embedding):
        head.quant_method.process_weights_after_loading(head)


class SharedMemoryTransfer(WeightTransferEngine):
    """Takes publications on vLLM's side. vLLM calls its methods, in the order in which they stand here."""

    init_info_cls = SharedMemory
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: SharedMemory) -> None:
        check_memory(init_info.path, init_info.token)
        self.path = init_info.path

    def start_weight_update(self) -> None:
        TAKEN["model"], TAKEN["adapter"] = {}, {}  # a new model takes the adapter away
        self.arrivals = Arrivals()
        with without_lora(self.model):
            if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
                # The last update was refused in its midst. vLLM would go on with the layers that it left waiting for the
                # rest of their weights, and count the new ones to the old.
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Manifest) -> None:
        with without_lora(self.model), self.arrivals:
            parameters = dict(self.model.named_parameters())
            check_quantized(update_info, parameters, getattr(self.model, "packed_modules_mapping", {}))
            # A quantized model has scales of an FP8 KV cache, whether its cache is FP8 or not; nobody publishes any.
            expected = {name for name in parameters if not name.endswith(KV_SCALES)}
            if self.model_config.hf_text_config.tie_word_embeddings:
                expected.discard("lm_head.weight")
            loaded = self.model.load_weights(self.arrivals.watch(tensors(self.path, update_info)))
        missing = sorted(expected - loaded) if loaded is not None else []
        if missing:
            raise ValueError(f"published weights leave out {len(missing)} parameters, e.g. {missing[:3]}")

    def finish_weight_update(self) -> None:
        with without_lora(self.model):
            # vLLM has kept layers until they are complete.
            with self.arrivals:
                finalize_layerwise_reload(self.model, self.model_config)
            retie_lm_head(self.model)
        TAKEN["model"] = self.arrivals.found
        # The last one holds the trainer's memory.
        self.arrivals = Arrivals()

    def shutdown(self) -> None:
        pass


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


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
        if self.model_runner.lora_config is None:
            raise ValueError("this engine has no LoRA: it was started without engine.lora_rank")
        check_memory(**address)
        TAKEN["adapter"] = {}
        manager = self.model_runner.lora_manager._adapter_manager
        found = {name: tensor.clone() for name, tensor in tensors(address["path"], Manifest(**manifest))}
        # This is the moment for it: later vLLM scales them in place.
        taken = {name: checksum(tensor) for name, tensor in found.items()}
        peft = PEFTHelper.from_dict(config)
        peft.validate_legal(self.model_runner.lora_config)
        dtype = self.model_runner.lora_config.lora_dtype
        adapter = LoRAModel.from_lora_tensors(ADAPTER_ID, found, peft, device="cpu", dtype=dtype)
        used = {name for name in adapter.loras if any(_serves(module, name, manager) for module in manager.modules)}
        if unused := sorted(set(adapter.loras) - used):
            raise ValueError(
                f"this engine applies no adapter to {unused[:3]}; targets it has: {sorted(manager.modules)[:8]}"
            )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        if current_platform.is_cpu():
            for wrapper in manager.punica_wrapper_mapping.values():
                wrapper.add_lora_linear = partial(add_one_adapter, wrapper)
        TAKEN["adapter"] = taken


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
