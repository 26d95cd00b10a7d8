"""What happens to published weights inside vLLM's process, whichever way they came: checked, loaded layer by layer, noted."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from torchtune_ext.run.errors import Mistake
from torchtune_ext.sampling.weight_buffer import checksum

KV_SCALES = (".attn.q_scale", ".attn.k_scale", ".attn.v_scale", ".attn.prob_scale")
SCALE = "weight_scale_inv"  # the block scales of a weight, multipliers in spite of the name
# These are the checksums of the tensors that this process has taken, by name; None stands for one that came in two forms.
TAKEN: dict[str, dict[str, int | None]] = {"model": {}, "adapter": {}}
UNFINISHED = "(an update that was not finished)"  # stands there for a model that may be half loaded

Named = list[tuple[str, torch.Tensor]]


class Arrivals(TorchDispatchMode):
    """Takes the checksum of every published tensor at the moment when it is copied into a parameter. Its bytes are copied once,
    whether the layer is fused, packed or cut for tensor parallelism.

    A whole tensor is checked where it has arrived, in the parameter and on its device. Of one that is cut or changes its dtype
    on the way the source is checked, since the parameter holds other bytes. A tensor that vLLM takes and never copies is not in
    `checksums`.
    """

    def __init__(self):
        super().__init__()
        self.checksums: dict[str, int | None] = {}
        # For each storage, what begins at which offset in bytes. The weak reference lets its memory be freed, but keeps another
        # storage from getting its number.
        self._lent: dict[int, tuple[StorageWeakRef, dict[int, tuple[str, torch.dtype, torch.Size]]]] = {}

    def watch(self, named: Iterable[tuple[str, torch.Tensor]]) -> Named:
        """Returns the tensors, and knows them again when they are copied."""
        named = list(named)
        self._lent = {key: value for key, value in self._lent.items() if not value[0].expired()}
        for name, tensor in named:
            storage = tensor.untyped_storage()
            _, begins = self._lent.setdefault(storage._cdata, (StorageWeakRef(storage), {}))
            begins[tensor.storage_offset() * tensor.itemsize] = name, tensor.dtype, tensor.shape
        return named

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and not args[0].is_meta and not args[1].is_meta:
            lent = self._lent.get(args[1].untyped_storage()._cdata)
            if lent is not None:
                self._note(lent[1], *args[:2])
        return result

    def _note(
        self, lent: dict[int, tuple[str, torch.dtype, torch.Size]], target: torch.Tensor, source: torch.Tensor
    ) -> None:
        begins = sorted(lent)
        begin = begins[bisect_right(begins, source.storage_offset() * source.itemsize) - 1]
        name, dtype, shape = lent[begin]
        entire = source.numel() == shape.numel() and source.is_contiguous() and target.dtype == source.dtype
        whole = torch.empty(0, dtype=dtype, device=source.device)
        whole.set_(source.untyped_storage(), begin // dtype.itemsize, shape)
        value = checksum(target if entire else whole)
        self.checksums[name] = value if self.checksums.get(name, value) == value else None


def _parts(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Returns the published names that a parameter of the engine is made of. Args: packed: the model's fused layers, "qkv_proj"
    -> ["q_proj", "k_proj", "v_proj"]."""
    stem, _, kind = name.rpartition(".")
    head, _, layer = stem.rpartition(".")
    return [f"{head}.{part}.{kind}".lstrip(".") for part in packed.get(layer, [layer])]


def check_shapes(
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
    workers: int,
) -> None:
    """Raises ValueError when published weights leave parameters out, or have other shapes: vLLM would only say that something
    is wrong, and only after they were sent.

    Args: shapes: of what was published, by name; expected: the parameters; packed: as in `_parts`; workers: among which
    tensor parallelism cuts a parameter.
    """
    missing, wrong = [], []
    for name, parameter in expected.items():
        parts = [name] if name in shapes else _parts(name, packed)
        if not set(parts) <= shapes.keys():
            missing.append(name)
        elif not _fits(
            [shapes[part] for part in parts], parameter.shape, workers, padded="embed" in name or "head" in name
        ):
            wrong.append((parts, [list(shapes[part]) for part in parts], list(parameter.shape)))
    if missing:
        raise Mistake(f"published weights leave out {len(missing)} parameters, e.g. {sorted(missing)[:3]}")
    if wrong:
        parts, sent, held = wrong[0]
        raise Mistake(f"published {', '.join(parts)} in the shape {sent}, and the engine holds {held} of it")


def _fits(parts: Sequence[Sequence[int]], shape: Sequence[int], workers: int, padded: bool) -> bool:
    """Whether tensors, one behind the other, fill the parameter that one of `workers` workers holds. Args: parts: their shapes;
    shape: of the parameter; padded: it may have more rows."""
    if any(len(part) != len(shape) for part in parts):
        return False
    for axis, size in enumerate(shape):
        whole = sum(part[0] for part in parts) if axis == 0 else parts[0][axis]
        same = axis == 0 or all(part[axis] == whole for part in parts)
        # A cut is rounded up, and heads of keys and values may be held more than once.
        if not same or not (size <= whole <= size * workers or (padded and axis == 0 and whole <= size * workers)):
            return False
    return True


def check_quantized(
    names: Sequence[str],
    dtypes: Sequence[str],
    parameters: Mapping[str, torch.Tensor],
    packed: Mapping[str, list[str]],
) -> None:
    """Raises ValueError for the first weight that does not come as the engine holds it.

    vLLM copies bfloat16 into an FP8 weight without an error, and scales that are left out keep their last values: nobody would
    notice either.
    Args: names, dtypes: of what was published; parameters: those of the engine's model, by name; packed: as in `_parts`.
    """
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    sent = dict(zip(names, dtypes, strict=True))
    for name, dtype in sent.items():
        stem, _, kind = name.rpartition(".")
        if kind != "weight":
            continue
        head, _, layer = stem.rpartition(".")
        quantized = f"{head}.{fused.get(layer, layer)}.{SCALE}" in parameters
        precision = "float8_e4m3fn" if quantized else "a high precision"
        if quantized != (dtype == "float8_e4m3fn"):
            raise Mistake(
                f"published {name} is {dtype}, but the engine holds it in {precision}: the lists of layers differ"
            )
        if quantized and sent.get(f"{stem}.{SCALE}") != "float32":
            raise Mistake(f"published {name} comes without {stem}.{SCALE} in float32; send both")


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


class CheckedTransfer(WeightTransferEngine):
    """What our weight-transfer backends have in common: all but the way by which tensors come. vLLM calls the methods, in the
    order in which they stand here."""

    def start_weight_update(self) -> None:
        TAKEN["model"], TAKEN["adapter"] = {UNFINISHED: None}, {}  # a new model takes the adapter away
        self.arrivals = Arrivals()
        with without_lora(self.model):
            if any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
                # The last update was refused in its midst, or broke off. vLLM would go on with the layers that it left waiting
                # for the rest of their weights, and count the new ones to the old.
                finalize_layerwise_reload(self.model, self.model_config)
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Loads what comes, which `receive` of the backend hands over part by part. Raises ValueError before
        that for what this model cannot take.

        Args: update_info: `names`, `dtype_names` (torch's) and `shapes` of the tensors.
        """
        names, dtypes, shapes = update_info.names, update_info.dtype_names, update_info.shapes
        with without_lora(self.model), self.arrivals, disable_mtp_completeness_check():
            parameters = dict(self.model.named_parameters())
            packed = getattr(self.model, "packed_modules_mapping", {})
            check_quantized(names, dtypes, parameters, packed)
            # A quantized model has scales of an FP8 KV cache, whether its cache is FP8 or not; nobody publishes any.
            expected = {name for name in parameters if not name.endswith(KV_SCALES)}
            if self.model_config.hf_text_config.tie_word_embeddings:
                expected.discard("lm_head.weight")
            held = {name: parameters[name] for name in expected}
            check_shapes(dict(zip(names, shapes, strict=True)), held, packed, self.parallel_config.tensor_parallel_size)
            loaded: set[str] = set()

            def take(named: Named) -> None:
                loaded.update(self.model.load_weights(self.arrivals.watch(named)) or ())

            self.receive(update_info, take)
        # Some models do not say what they have loaded.
        missing = sorted(expected - loaded) if loaded else []
        if missing:
            raise Mistake(f"published weights leave out {len(missing)} parameters, e.g. {missing[:3]}")

    def finish_weight_update(self) -> None:
        with without_lora(self.model):
            # vLLM has kept layers until they are complete.
            with self.arrivals:
                finalize_layerwise_reload(self.model, self.model_config)
            retie_lm_head(self.model)
        TAKEN["model"] = self.arrivals.checksums
        self.arrivals = Arrivals()

    def shutdown(self) -> None:
        pass
