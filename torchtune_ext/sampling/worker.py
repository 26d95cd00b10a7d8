"""Loads published weights in vLLM's process: from the trainer's shared memory, by gloo or by NCCL.

vLLM imports this module for `worker_extension_cls`, and the import registers the weight-transfer
backends.
"""

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.broadcast import GlooGroup, GlooInit, iter_chunks
from torchtune_ext.sampling.weight_buffer import (
    ADAPTER_ID,
    UNREADABLE,
    checksum,
    iter_views,
    map_memory,
    pin,
    unpin,
)

KV_SCALES = (".attn.q_scale", ".attn.k_scale", ".attn.v_scale", ".attn.prob_scale")
SCALE_SUFFIX = "weight_scale_inv"  # block scales of a weight; multipliers, despite the name
# Tensor name -> checksum of the tensors that this process has loaded. None if a tensor was loaded
# into several parameters whose checksums differ.
LOADED_CHECKSUMS: dict[str, dict[str, int | None]] = {"model": {}, "adapter": {}}
# Phi-3's files hold these layers fused. vLLM lists no parts of them, but loads published parts.
FUSED_PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
UNFINISHED_MARKER = "(an update that was not finished)"  # entry for a model that may be half loaded

Named = list[tuple[str, torch.Tensor]]


class ChecksumRecorder(TorchDispatchMode):
    """Records the checksum of every published tensor that is copied into a parameter."""

    def __init__(self):
        super().__init__()
        self.checksums: dict[str, int | None] = {}
        # Storage id -> (weak reference, byte offset -> tensor). The weak reference allows the
        # memory to be freed, but prevents another storage from getting the same id.
        self._registered: dict[int, tuple[StorageWeakRef, dict[int, tuple[str, torch.dtype, torch.Size]]]] = {}

    def register(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        """Registers tensors, so that their copies are recognized. Returns them as a list."""
        named = list(named)
        self._registered = {key: value for key, value in self._registered.items() if not value[0].expired()}
        for name, tensor in named:
            storage = tensor.untyped_storage()
            _, begins = self._registered.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
            begins[int(tensor.storage_offset()) * tensor.itemsize] = name, tensor.dtype, tensor.shape
        return named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Every weight is loaded by one `copy_`, whether its layer is fused, packed or sharded.
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and not args[1].is_meta:
            lent = self._registered.get(args[1].untyped_storage()._cdata)
            if lent is not None:
                self._record(lent[1], *args[:2])
        return result

    def _record(
        self, lent: dict[int, tuple[str, torch.dtype, torch.Size]], target: torch.Tensor, source: torch.Tensor
    ) -> None:
        # The source may be a slice of the published tensor, the last that begins at or before it.
        begin = max(start for start in lent if start <= source.storage_offset() * source.itemsize)
        name, dtype, shape = lent[begin]
        # The checksum of an entire tensor is computed from the parameter. For a shard, or after a
        # change of dtype, it is computed from the source, since the parameter has other bytes. Both
        # use the parameter's device: one thread of a CPU would take a minute for a model of 72B.
        entire = source.numel() == shape.numel() and source.is_contiguous() and target.dtype == source.dtype
        whole = torch.empty(0, dtype=dtype, device=source.device)
        # torch's stub asks for strides, too.
        whole.set_(source.untyped_storage(), begin // dtype.itemsize, shape)  # pyright: ignore[reportCallIssue]
        value = checksum(target if entire else whole, target.device)
        self.checksums[name] = value if self.checksums.get(name, value) == value else None


def _part_names(module: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Returns the published names of a vLLM module: of q_proj, k_proj and v_proj for qkv_proj.

    `packed`: fused layer -> its parts, such as "qkv_proj" -> ["q_proj", "k_proj", "v_proj"].
    """
    head, _, layer = module.rpartition(".")
    return [f"{head}.{part}".lstrip(".") for part in packed.get(layer, [layer])]


def require_all(missing: Collection[str]) -> None:
    """Raises UsageError if published weights lack parameters."""
    if missing:
        raise UsageError(f"published weights lack {len(missing)} parameters, e.g. {sorted(missing)[:3]}")


def check_shapes(
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
    workers: int,
) -> None:
    """Checks names and shapes of published weights.

    Args:
        shapes: Name -> shape of the published tensors.
        expected: Name -> parameter of this worker.
        packed: As in `_part_names`.
        workers: Tensor-parallel size.

    Raises:
        UsageError: If a parameter is missing or a shape differs.
    """
    # vLLM's own error has no details, and comes only after all bytes were sent.
    missing, wrong = [], []
    for name, parameter in expected.items():
        stem, _, kind = name.rpartition(".")
        parts = [name] if name in shapes else [f"{part}.{kind}" for part in _part_names(stem, packed)]
        if not set(parts) <= shapes.keys():
            missing.append(name)
        elif not _shapes_fit(
            [shapes[part] for part in parts], parameter.shape, workers, padded="embed" in name or "head" in name
        ):
            wrong.append((parts, [list(shapes[part]) for part in parts], list(parameter.shape)))
    require_all(missing)
    if wrong:
        parts, sent, held = wrong[0]
        raise UsageError(f"published {', '.join(parts)} has shape {sent}, but the engine's parameter has shape {held}")


def _shapes_fit(parts: Sequence[Sequence[int]], shape: Sequence[int], workers: int, padded: bool) -> bool:
    """Returns whether concatenated shapes fit a worker's parameter, which may have `padded` rows."""
    if any(len(part) != len(shape) for part in parts):
        return False
    for axis, size in enumerate(shape):
        whole = sum(part[0] for part in parts) if axis == 0 else parts[0][axis]
        same = axis == 0 or all(part[axis] == whole for part in parts)
        # Shard sizes are rounded up, and several workers may hold the same key/value heads.
        if not same or not (size <= whole <= size * workers or (padded and axis == 0 and whole <= size * workers)):
            return False
    return True


def check_quantized(
    names: Sequence[str],
    dtypes: Sequence[str],
    parameters: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
) -> None:
    """Raises UsageError for the first weight whose precision differs from the engine's."""
    # vLLM detects neither error: it copies bfloat16 into an FP8 weight without an error, and
    # missing scales keep their old values.
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    sent = dict(zip(names, dtypes, strict=True))
    for name, dtype in sent.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        head, _, layer = stem.rpartition(".")
        quantized = f"{head}.{fused.get(layer, layer)}.{SCALE_SUFFIX}" in parameters
        precision = "float8_e4m3fn" if quantized else "high precision"
        if quantized != (dtype == "float8_e4m3fn"):
            raise UsageError(
                f"published {name} is {dtype}, but the engine holds it in {precision}: "
                "trainer and engine quantize different layers"
            )
        if quantized and sent.get(f"{stem}.{SCALE_SUFFIX}") != "float32":
            raise UsageError(f"published {name} comes without {stem}.{SCALE_SUFFIX} in float32; publish both")


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Removes vLLM's LoRA wrappers from the model while the body runs."""
    # With wrappers, parameters have other names than published: `...base_layer.weight`.
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


def text_model(model: Any) -> Any:
    """Returns the text model of a multimodal model; of another model, the model itself."""
    return getattr(model, "language_model", model)


def retie_lm_head(model: torch.nn.Module) -> None:
    """Repacks a tied output head, on a CPU."""
    # On a CPU vLLM 0.32 copies linear weights into oneDNN's own layout. Its layerwise reload skips
    # a head that shares its weight with the embedding, so the head would keep the old weights.
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if not current_platform.is_cpu() or head is None or embedding is None or head is embedding:
        return
    if getattr(head, "weight", None) is getattr(embedding, "weight", embedding):
        head.quant_method.process_weights_after_loading(head)


class CheckedTransfer(WeightTransferEngine):
    """Base class of our weight-transfer backends, which implement `receive`.

    vLLM calls the methods in this order.
    """

    model: Any  # a model of vLLM, with `load_weights`

    @abstractmethod
    def receive(self, update: Any, take: Callable[[Named], None]) -> None:
        """Calls `take` with the tensors of an update, all at once or in chunks."""

    def start_weight_update(self) -> None:
        # A new model removes the adapter. Until the update is finished, no checksum may match,
        # since the model may be half loaded.
        LOADED_CHECKSUMS["model"], LOADED_CHECKSUMS["adapter"] = {UNFINISHED_MARKER: None}, {}
        self.recorder = ChecksumRecorder()
        with without_lora(self.model):
            if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
                # The last update was refused halfway or interrupted, and some layers still wait for
                # weights. vLLM would otherwise count the new weights as a part of the old update.
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Loads the tensors of `receive`.

        Raises:
            UsageError: If names, shapes or precisions do not match the model.
        """
        # The checks run before the first byte, while the old weights are still complete.
        names, dtypes, shapes = update_info.names, update_info.dtype_names, update_info.shapes
        with without_lora(self.model), self.recorder, disable_mtp_completeness_check():
            model = text_model(self.model)
            parameters = dict(model.named_parameters())
            packed: dict[str, list[str]] = dict(getattr(model, "packed_modules_mapping", {}))
            packed |= {name: parts for name, parts in FUSED_PARTS.items() if packed.get(name) == [name]}
            check_quantized(names, dtypes, parameters, packed)
            # A quantized model has scales for an FP8 KV cache, even if its cache is not FP8. The
            # trainer does not publish these scales.
            expected = {name for name in parameters if not name.endswith(KV_SCALES)}
            if self.model_config.hf_text_config.tie_word_embeddings:
                expected.discard("lm_head.weight")
            held = {name: parameters[name] for name in expected}
            check_shapes(dict(zip(names, shapes, strict=True)), held, packed, self.parallel_config.tensor_parallel_size)
            loaded: set[str] = set()

            def take(named: Named) -> None:
                loaded.update(model.load_weights(self.recorder.register(named)) or ())

            self.receive(update_info, take)
        # Some models do not return the names of loaded parameters.
        require_all(expected - loaded if loaded else ())

    def finish_weight_update(self) -> None:
        with without_lora(self.model):
            # vLLM buffers a layer until it is complete, so some weights are copied only here.
            with self.recorder:
                finalize_layerwise_reload(self.model, self.model_config)
            retie_lm_head(text_model(self.model))
        LOADED_CHECKSUMS["model"] = self.recorder.checksums
        self.recorder = ChecksumRecorder()


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Location of the weights in the trainer's memory."""

    path: str  # a memory file of the trainer: /proc/<pid>/fd/<number>
    token: str  # first bytes of the file, in hexadecimal


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """Names, dtypes, shapes and offsets of the tensors of an update."""

    names: list[str]  # Hugging Face names
    dtype_names: list[str]  # torch dtype names: "bfloat16", ...
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the file


def check_memory(path: str, token: str) -> None:
    """Raises UsageError if the file is not the trainer's memory."""
    # In another PID namespace the same path may belong to another process. The token detects this.
    expected = bytes.fromhex(token)
    try:
        with open(path, "rb") as file:
            ours = file.read(len(expected)) == expected
    except OSError:
        ours = False
    if not ours:
        raise UsageError(
            f"{UNREADABLE} at {path}: run vLLM on the trainer's machine, as the same user and in the same PID namespace"
        )


class SharedMemoryTransfer(CheckedTransfer):
    """Reads weights from the trainer's shared memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = Manifest
    mapped: tuple[SharedMemoryInit, int] | None = None  # location and size in bytes of `memory`
    memory: torch.Tensor | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        check_memory(init_info.path, init_info.token)
        # The memory stays mapped (on a GPU: pinned) between weight syncs, because pinning is slow.
        now = init_info, os.stat(init_info.path).st_size
        if self.mapped != now:
            self.shutdown()
            self.memory = map_memory(init_info.path)
            if self.device.type == "cuda":
                pin(self.memory)
            self.mapped = now

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        assert self.memory is not None  # set by `init_transfer_engine`
        take(list(iter_views(self.memory, vars(update))))

    def shutdown(self) -> None:
        if self.mapped is not None and self.memory is not None:
            if self.device.type == "cuda":
                unpin(self.memory)
            self.memory = self.mapped = None


# In the two backends below, every wait is bounded: a killed sender closes its connections, and a
# silent sender times out after `deadline_s`. The engine is then free for the next trainer or group.
NO_GROUP = "this server has not joined a group with the trainer's sender"


class GlooTransfer(CheckedTransfer):
    """Receives weights by gloo, in chunks, into CPU memory."""

    init_info_cls = GlooInit
    update_info_cls = Manifest
    group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInit) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.init = init_info
        self.group = GlooGroup(init_info, rank)

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        """Receives the sender's broadcasts. Any error closes the group.

        Raises:
            RuntimeError: Without a group, or at the deadline.
        """
        if self.group is None:
            raise RuntimeError(NO_GROUP)
        give_up_at = time.monotonic() + self.init.deadline_s
        try:
            for begin, end, manifest in iter_chunks(vars(update), self.init.chunk_bytes):
                chunk = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
                self.group.broadcast(chunk, give_up_at)
                take(list(iter_views(chunk, manifest)))
        except BaseException:
            # The model may refuse a tensor. The sender must not continue without a receiver.
            self.shutdown()
            raise

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


@dataclass(kw_only=True)
class NcclInit(NCCLWeightTransferInitInfo):
    """vLLM's init message, extended by a deadline."""

    deadline_s: float = 300.0  # timeout of an update in a worker, seconds


class NcclTransfer(CheckedTransfer, NCCLWeightTransferEngine):
    """vLLM's own NCCL backend, with our checks, checksums and a deadline."""

    init_info_cls = NcclInit
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert isinstance(init_info, NcclInit)  # vLLM creates it from `init_info_cls`
        self.shutdown()
        self.deadline_s = init_info.deadline_s
        NCCLWeightTransferEngine.init_transfer_engine(self, init_info)

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        """Receives the sender's broadcasts, as `GlooTransfer.receive`."""
        # NCCL has no timeout, so a timer aborts the communicator at the deadline.
        group = self.model_update_group
        if group is None:
            raise RuntimeError(NO_GROUP)
        aborted = threading.Event()

        def abort() -> None:
            aborted.set()
            self.shutdown()

        def require_in_time() -> None:
            if aborted.is_set():
                raise RuntimeError(f"the weights did not arrive within {self.deadline_s:g} s")

        def take_received(named: Named) -> None:
            # The transfer is asynchronous. An abort ends this wait with garbage in the buffer.
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
            require_in_time()  # the tensors are on the device only after the synchronization
        except BaseException:
            self.shutdown()
            raise
        finally:
            late.cancel()


def _register(name: str, backend: type[CheckedTransfer]) -> None:
    # vLLM refuses a registered name, and "nccl" is its own.
    WeightTransferEngineFactory._registry.pop(name, None)
    WeightTransferEngineFactory.register_engine(name, backend)


_register("shm", SharedMemoryTransfer)
_register("gloo", GlooTransfer)
_register("nccl", NcclTransfer)


class WeightLoader:
    """Methods that vLLM mixes into its worker class (`worker_extension_cls`)."""

    # Attributes of the worker, only declared: vLLM refuses a mixin that defines the same names.
    model_runner: Any
    reload_weights: Callable[[], None]
    weight_transfer_engine: CheckedTransfer

    def checksums(self) -> dict[str, int | None]:
        """Returns tensor name -> checksum of the last weight syncs; None if two copies differed."""
        return {name: value for part in LOADED_CHECKSUMS.values() for name, value in part.items()}

    def reload_base(self) -> None:
        """Rereads the model's files after sleep level 2, which has dropped all that was published."""
        LOADED_CHECKSUMS["model"], LOADED_CHECKSUMS["adapter"] = {}, {}
        self.reload_weights()
        retie_lm_head(text_model(self.model_runner.model))

    def load_adapter(self, address: dict[str, str], manifest: dict[str, list], config: dict[str, Any]) -> None:
        """Loads an adapter from the trainer's memory.

        Args:
            address: Location of the memory (`SharedMemoryInit`).
            manifest: Names, dtypes, shapes and offsets (`Manifest`).
            config: PEFT's config of the adapter.

        Raises:
            UsageError: If this engine cannot read or apply the adapter.
        """
        self._require_lora()
        check_memory(**address)
        views = iter_views(map_memory(address["path"]), manifest)
        self._use_adapter({name: t.clone() for name, t in views}, config)

    def receive_adapter(self, manifest: dict[str, list], config: dict[str, Any]) -> None:
        """Loads an adapter from the sender's broadcast, in which this call takes part."""
        self._require_lora()
        engine, weights = self.weight_transfer_engine, {}

        def take(named: Named) -> None:
            # The tensors are views of chunks that are freed, so they are cloned.
            weights.update((name, t.cpu().clone()) for name, t in named)

        engine.receive(engine.parse_update_info(manifest), take)
        self._use_adapter(weights, config)

    def _require_lora(self) -> None:
        if self.model_runner.lora_config is None:
            raise UsageError("this engine was started without LoRA; start it with engine.lora_rank")

    def _use_adapter(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        LOADED_CHECKSUMS["adapter"] = {}
        # vLLM's public API loads an adapter from a folder only, so this uses its manager.
        manager = self.model_runner.lora_manager._adapter_manager
        # The checksums are computed first, because vLLM scales the tensors in place.
        sums: dict[str, int | None] = {name: checksum(tensor) for name, tensor in weights.items()}
        if text_model(model := self.model_runner.model) is not model:
            weights = {name.replace(".model.model.", ".model.language_model.model."): t for name, t in weights.items()}
        peft, lora = PEFTHelper.from_dict(config), self.model_runner.lora_config
        peft.validate_legal(lora)
        adapter = LoRAModel.from_lora_tensors(ADAPTER_ID, weights, peft, device="cpu", dtype=lora.lora_dtype)
        packed = manager.packed_modules_mapping
        if unused := sorted(adapter.loras.keys() - {name for m in manager.modules for name in _part_names(m, packed)}):
            raise UsageError(
                f"this engine applies no adapter to {unused[:3]}; its targets are {sorted(manager.modules)[:8]}"
            )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        if current_platform.is_cpu():
            for wrapper in manager.punica_wrapper_mapping.values():
                wrapper.add_lora_linear = partial(add_one_adapter, wrapper)
        LOADED_CHECKSUMS["adapter"] = sums


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
    """Adds scale * x A' B' to y in place, for each slice of a packed layer.

    Args:
        wrapper: vLLM's punica wrapper.
        y: [T, out], output of the layer.
        x: [T, in], input of the layer.
        lora_a_stacked: A of each slice, [slots, 1, rank, in].
        lora_b_stacked: B of each slice, [slots, 1, out, rank].
        scale: Scale of the adapter.
        output_slices: Features of each slice, in their order in y.
    """
    if wrapper.no_lora:
        return
    # On a CPU vLLM 0.32 copies A and B once per token, [T, rank, in], since tokens may have
    # different adapters. Here all tokens use the adapter in slot 0. The product is in float64: in
    # float32 its last bits, and with them a run, would depend on the requests that share the step.
    start, y, x = 0, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).double()
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size] += (scale * (x @ a[0, 0].T.double() @ b[0, 0].T.double())).to(y.dtype)
        start += size
