"""Runs in vLLM's process and takes weights from the trainer: from its shared memory, or by gloo or NCCL.

vLLM imports it as its `worker_extension_cls`, and the import registers the weight-transfer backends.
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
    iter_tensors,
    iter_views,
    map_memory,
    pin,
    unpin,
)

KV_SCALES = (".attn.q_scale", ".attn.k_scale", ".attn.v_scale", ".attn.prob_scale")
SCALE_SUFFIX = "weight_scale_inv"  # the block scales of a weight, multipliers in spite of the name
# Checksums of the tensors that this process has taken, by name. None stands for a tensor that came in two forms.
LOADED_CHECKSUMS: dict[str, dict[str, int | None]] = {"model": {}, "adapter": {}}
UNFINISHED_MARKER = "(an update that was not finished)"  # stands there for a model that may be half loaded

Named = list[tuple[str, torch.Tensor]]


class ChecksumRecorder(TorchDispatchMode):
    """Takes the checksum of every published tensor that is copied into a parameter. A tensor never copied has none."""

    def __init__(self):
        super().__init__()
        self.checksums: dict[str, int | None] = {}
        # For each storage, what begins at which offset in bytes. The weak reference lets the memory be freed, but keeps
        # another storage from getting the same number.
        self._lent: dict[int, tuple[StorageWeakRef, dict[int, tuple[str, torch.dtype, torch.Size]]]] = {}

    def register(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        """Returns the tensors, and from now on recognizes them when they are copied."""
        named = list(named)
        self._lent = {key: value for key, value in self._lent.items() if not value[0].expired()}
        for name, tensor in named:
            storage = tensor.untyped_storage()
            _, begins = self._lent.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
            begins[int(tensor.storage_offset()) * tensor.itemsize] = name, tensor.dtype, tensor.shape
        return named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Every weight ends in one `copy_`, whether its layer is fused, packed or cut for tensor parallelism.
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and not args[1].is_meta:
            lent = self._lent.get(args[1].untyped_storage()._cdata)
            if lent is not None:
                self._note(lent[1], *args[:2])
        return result

    def _note(
        self, lent: dict[int, tuple[str, torch.dtype, torch.Size]], target: torch.Tensor, source: torch.Tensor
    ) -> None:
        # The source may be a slice of a published tensor: that is the last one that begins at or before it.
        begin = max(each for each in lent if each <= source.storage_offset() * source.itemsize)
        name, dtype, shape = lent[begin]
        # A whole tensor is checked where it arrived, in the parameter and on its device. Of one that is cut, or changes
        # its dtype on the way, the source is checked: the parameter holds other bytes.
        entire = source.numel() == shape.numel() and source.is_contiguous() and target.dtype == source.dtype
        whole = torch.empty(0, dtype=dtype, device=source.device)
        # torch's stub asks for strides, too.
        whole.set_(source.untyped_storage(), begin // dtype.itemsize, shape)  # pyright: ignore[reportCallIssue]
        value = checksum(target if entire else whole)
        self.checksums[name] = value if self.checksums.get(name, value) == value else None


def _parts(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """The published names of a parameter. Args: packed: "qkv_proj" -> ["q_proj", "k_proj", "v_proj"], ..."""
    stem, _, kind = name.rpartition(".")
    head, _, layer = stem.rpartition(".")
    return [f"{head}.{part}.{kind}".lstrip(".") for part in packed.get(layer, [layer])]


def require_all(missing: Collection[str]) -> None:
    """Raises ValueError for parameters that publications leave out."""
    if missing:
        raise UsageError(f"published weights leave out {len(missing)} parameters, e.g. {sorted(missing)[:3]}")


def check_shapes(
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
    workers: int,
) -> None:
    """Raises ValueError when published weights leave parameters out, or have other shapes.

    Args: shapes: of what was published; expected: the parameters; packed: as in `_parts`; workers: among which tensor
    parallelism cuts a parameter.
    """
    # vLLM would say only that something is wrong, and only after all bytes were sent.
    missing, wrong = [], []
    for name, parameter in expected.items():
        parts = [name] if name in shapes else _parts(name, packed)
        if not set(parts) <= shapes.keys():
            missing.append(name)
        elif not _shapes_fit(
            [shapes[part] for part in parts], parameter.shape, workers, padded="embed" in name or "head" in name
        ):
            wrong.append((parts, [list(shapes[part]) for part in parts], list(parameter.shape)))
    require_all(missing)
    if wrong:
        parts, sent, held = wrong[0]
        raise UsageError(f"published {', '.join(parts)} in the shape {sent}, and the engine holds {held} of it")


def _shapes_fit(parts: Sequence[Sequence[int]], shape: Sequence[int], workers: int, padded: bool) -> bool:
    """Whether tensors of the shapes `parts`, concatenated, fill one worker's parameter.

    With `padded` it may have more rows.
    """
    if any(len(part) != len(shape) for part in parts):
        return False
    for axis, size in enumerate(shape):
        whole = sum(part[0] for part in parts) if axis == 0 else parts[0][axis]
        same = axis == 0 or all(part[axis] == whole for part in parts)
        # A cut is rounded up, and heads of keys and values may be held by more than one worker.
        if not same or not (size <= whole <= size * workers or (padded and axis == 0 and whole <= size * workers)):
            return False
    return True


def check_quantized(
    names: Sequence[str],
    dtypes: Sequence[str],
    parameters: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
) -> None:
    """Raises ValueError for the first weight that does not come in the precision in which the engine holds it."""
    # vLLM would notice neither mistake: it copies bfloat16 into an FP8 weight without an error, and scales that are
    # left out keep their last values.
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    sent = dict(zip(names, dtypes, strict=True))
    for name, dtype in sent.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        head, _, layer = stem.rpartition(".")
        quantized = f"{head}.{fused.get(layer, layer)}.{SCALE_SUFFIX}" in parameters
        precision = "float8_e4m3fn" if quantized else "a high precision"
        if quantized != (dtype == "float8_e4m3fn"):
            raise UsageError(
                f"published {name} is {dtype}, but the engine holds it in {precision}: the lists of layers differ"
            )
        if quantized and sent.get(f"{stem}.{SCALE_SUFFIX}") != "float32":
            raise UsageError(f"published {name} comes without {stem}.{SCALE_SUFFIX} in float32; send both")


@contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Takes vLLM's LoRA wrappers out of the model while the body runs."""
    # With a wrapper in between, parameters are called `...base_layer.weight`, and published names would not match.
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
    """Packs a tied output head again, on a CPU."""
    # There vLLM 0.32 copies linear weights into oneDNN's own layout. Its layerwise reload skips a head that shares its
    # weight with the embedding, so the head would go on with the old weights.
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if not current_platform.is_cpu() or head is None or embedding is None or head is embedding:
        return
    if getattr(head, "weight", None) is getattr(embedding, "weight", embedding):
        head.quant_method.process_weights_after_loading(head)


class CheckedTransfer(WeightTransferEngine):
    """What our weight-transfer backends share: all but how tensors arrive. vLLM calls the methods in this order."""

    model: Any  # one of vLLM's, with `load_weights`

    @abstractmethod
    def receive(self, update: Any, take: Callable[[Named], None]) -> None:
        """Hands over the tensors of an update, all at once or piece by piece."""

    def start_weight_update(self) -> None:
        # A new model takes the adapter away. Until the update is finished, no checksum matches: a model that is half
        # loaded proves nothing.
        LOADED_CHECKSUMS["model"], LOADED_CHECKSUMS["adapter"] = {UNFINISHED_MARKER: None}, {}
        self.recorder = ChecksumRecorder()
        with without_lora(self.model):
            if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
                # The last update was refused halfway, or broke off, and left layers waiting for the rest of their
                # weights. vLLM would count the new weights to the old ones.
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Loads what the backend's `receive` hands over. Raises ValueError for what the model cannot take."""
        # All checks come before the first byte, while the old weights are still whole.
        names, dtypes, shapes = update_info.names, update_info.dtype_names, update_info.shapes
        with without_lora(self.model), self.recorder, disable_mtp_completeness_check():
            parameters = dict(self.model.named_parameters())
            packed = getattr(self.model, "packed_modules_mapping", {})
            check_quantized(names, dtypes, parameters, packed)
            # A quantized model has scales for an FP8 KV cache, even if its cache is not FP8. Nobody publishes those.
            expected = {name for name in parameters if not name.endswith(KV_SCALES)}
            if self.model_config.hf_text_config.tie_word_embeddings:
                expected.discard("lm_head.weight")
            held = {name: parameters[name] for name in expected}
            check_shapes(dict(zip(names, shapes, strict=True)), held, packed, self.parallel_config.tensor_parallel_size)
            loaded: set[str] = set()

            def take(named: Named) -> None:
                loaded.update(self.model.load_weights(self.recorder.register(named)) or ())

            self.receive(update_info, take)
        # Some models do not say what they have loaded.
        require_all(expected - loaded if loaded else ())

    def finish_weight_update(self) -> None:
        with without_lora(self.model):
            # vLLM buffers a layer until it is complete, so some copies happen only here.
            with self.recorder:
                finalize_layerwise_reload(self.model, self.model_config)
            retie_lm_head(self.model)
        LOADED_CHECKSUMS["model"] = self.recorder.checksums
        self.recorder = ChecksumRecorder()


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Where the weights lie."""

    path: str  # a memory file of the trainer: /proc/<pid>/fd/<number>
    token: str  # the bytes with which the file begins, in hexadecimal


@dataclass
class Manifest(WeightTransferUpdateInfo):
    """What lies there, tensor by tensor."""

    names: list[str]  # Hugging Face names
    dtype_names: list[str]  # torch's names of them: "bfloat16", ...
    shapes: list[list[int]]
    offsets: list[int]  # bytes from the start of the file


def check_memory(path: str, token: str) -> None:
    """Raises ValueError when the file is not the trainer's memory."""
    # In another PID namespace the same path may name another process, with another file. The token tells them apart.
    expected = bytes.fromhex(token)
    try:
        with open(path, "rb") as file:
            ours = file.read(len(expected)) == expected
    except OSError:
        ours = False
    if not ours:
        raise UsageError(
            f"{UNREADABLE} at {path}: vLLM has to run on the trainer's machine, "
            f"as the same user and in the same PID namespace"
        )


class SharedMemoryTransfer(CheckedTransfer):
    """Takes publications from the trainer's memory."""

    init_info_cls = SharedMemoryInit
    update_info_cls = Manifest
    mapped: tuple[SharedMemoryInit, int] | None = None  # whose memory it is, and its bytes
    memory: torch.Tensor | None = None

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        check_memory(init_info.path, init_info.token)
        # The memory stays mapped, and for a GPU pinned, between publications: pinning all of it anew is slow.
        now = init_info, os.stat(init_info.path).st_size
        if self.mapped != now:
            self.shutdown()
            self.memory = map_memory(init_info.path)
            if self.device.type == "cuda":
                pin(self.memory)
            self.mapped = now

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        assert self.memory is not None  # since `init_transfer_engine`
        take(list(iter_views(self.memory, vars(update))))

    def shutdown(self) -> None:
        if self.mapped is not None and self.memory is not None:
            if self.device.type == "cuda":
                unpin(self.memory)
            self.memory = self.mapped = None


# In the two backends below, every wait ends by itself: a sender that was killed closes its connections, and a silent
# one is given up after `deadline_s`. The engine is then free for the next trainer, or for the next group of this one.
NO_GROUP = "this server is in no group with the trainer's sender"


class GlooTransfer(CheckedTransfer):
    """Takes publications by gloo, chunk by chunk, into CPU memory."""

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
        """Takes what the sender broadcasts. Raises RuntimeError when nothing comes. Any error ends the group."""
        if self.group is None:
            raise RuntimeError(NO_GROUP)
        give_up_at = time.monotonic() + self.init.deadline_s
        try:
            for begin, end, manifest in iter_chunks(vars(update), self.init.chunk_bytes):
                chunk = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
                self.group.broadcast(chunk, give_up_at)
                take(list(iter_views(chunk, manifest)))
        except BaseException:
            # This holds for a tensor that the model refuses, too: the sender goes on with an update that nobody takes.
            self.shutdown()
            raise

    def shutdown(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


@dataclass(kw_only=True)
class NcclInit(NCCLWeightTransferInitInfo):
    """vLLM's message, with the deadline that it lacks."""

    deadline_s: float = 300.0  # seconds until a worker gives up an update that does not come


class NcclTransfer(CheckedTransfer, NCCLWeightTransferEngine):
    """vLLM's own backend with our checks, checksums and a deadline."""

    init_info_cls = NcclInit
    update_info_cls = Manifest

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        assert isinstance(init_info, NcclInit)  # vLLM makes it of `init_info_cls`
        self.shutdown()
        self.deadline_s = init_info.deadline_s
        NCCLWeightTransferEngine.init_transfer_engine(self, init_info)

    def receive(self, update: Manifest, take: Callable[[Named], None]) -> None:
        """As `GlooTransfer.receive`."""
        # NCCL itself would wait for ever, so a timer aborts the communicator at the deadline.
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
            # The bytes are still on their way. An abort ends this wait, too, and leaves garbage in the buffer.
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


def _register(name: str, backend: type[CheckedTransfer]) -> None:
    # vLLM refuses a name that is taken, as its own "nccl" is.
    WeightTransferEngineFactory._registry.pop(name, None)
    WeightTransferEngineFactory.register_engine(name, backend)


_register("shm", SharedMemoryTransfer)
_register("gloo", GlooTransfer)
_register("nccl", NcclTransfer)


class WeightLoader:
    """Our methods of vLLM's workers, into which vLLM mixes this class."""

    # What these methods use of the worker. They are only declared: vLLM refuses a mixin with attributes of its names.
    model_runner: Any
    weight_transfer_engine: CheckedTransfer

    def checksums(self) -> dict[str, int | None]:
        """The checksum of every tensor of the last publications, by name; None: it came in two forms."""
        return {name: value for part in LOADED_CHECKSUMS.values() for name, value in part.items()}

    def load_adapter(self, address: dict[str, str], manifest: dict[str, list], config: dict[str, Any]) -> None:
        """Replaces the adapter by the one at `address` in the trainer's memory. Args: config: PEFT's.

        Raises ValueError when this engine cannot read or apply the adapter.
        """
        self._require_lora()
        check_memory(**address)
        self._use_adapter({name: t.clone() for name, t in iter_tensors(address["path"], manifest)}, config)

    def receive_adapter(self, manifest: dict[str, list], config: dict[str, Any]) -> None:
        """As `load_adapter`, from a broadcast of the sender, in which this call takes part."""
        self._require_lora()
        engine, weights = self.weight_transfer_engine, {}
        # The tensors are views of chunks and outlive them, so they are cloned.
        engine.receive(
            engine.parse_update_info(manifest),
            lambda named: weights.update((name, t.cpu().clone()) for name, t in named),
        )
        self._use_adapter(weights, config)

    def _require_lora(self) -> None:
        if self.model_runner.lora_config is None:
            raise UsageError("this engine has no LoRA: it was started without engine.lora_rank")

    def _use_adapter(self, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        LOADED_CHECKSUMS["adapter"] = {}
        # vLLM's public way to load an adapter reads a directory, so this goes to its manager.
        manager = self.model_runner.lora_manager._adapter_manager
        # The checksums come first: later vLLM scales the tensors in place.
        sums: dict[str, int | None] = {name: checksum(tensor) for name, tensor in weights.items()}
        peft, lora = PEFTHelper.from_dict(config), self.model_runner.lora_config
        peft.validate_legal(lora)
        adapter = LoRAModel.from_lora_tensors(ADAPTER_ID, weights, peft, device="cpu", dtype=lora.lora_dtype)
        unused = sorted(
            name for name in adapter.loras if not any(_applies_adapter(each, name, manager) for each in manager.modules)
        )
        if unused:
            raise UsageError(
                f"this engine applies no adapter to {unused[:3]}; targets it has: {sorted(manager.modules)[:8]}"
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
    """Adds scale * x A' B' to y [T, out] in place, for each slice of a packed layer. x is [T, in].

    Args: lora_a_stacked: A of each slice, [slots, 1, rank, in]; lora_b_stacked: B, [slots, 1, out, rank];
    output_slices: features of each slice, in their order in y.
    """
    if wrapper.no_lora:
        return
    # On a CPU vLLM 0.32 copies A and B once for each token, [T, rank, in], since tokens may have different adapters.
    # Ours all have the one in slot 0. The product is in float64: in float32 its last bits would depend on how many
    # requests happen to share the step, and a run would not repeat itself.
    start, y, x = 0, y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]).double()
    for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + size] += (scale * (x @ a[0, 0].T.double() @ b[0, 0].T.double())).to(y.dtype)
        start += size


def _applies_adapter(module: str, name: str, manager: Any) -> bool:
    """Whether vLLM's (packed) module applies the adapter of the layer `name`: qkv_proj serves q_proj."""
    stem, _, last = module.rpartition(".")
    return name in {f"{stem}.{part}".lstrip(".") for part in manager.packed_modules_mapping.get(last, [last])}
