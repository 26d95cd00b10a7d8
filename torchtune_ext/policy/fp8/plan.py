"""Decides which linear layers compute in FP8, in trainer and sampler, and makes the bytes that pass between them.

The list is made once (`skip_reasons`). `convert` applies it to the trainer, the receipt states it as vLLM's
`quantization_config`, and `fp8_hf_tensors` sends the weights, so both sides compute alike (Jet-RL, arXiv:2601.14243).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear, LoRALinear

from torchtune_ext.kernels import fp8_gemm
from torchtune_ext.kernels.fp8_gemm import BackendChoice
from torchtune_ext.kernels.fp8_quantize import (
    BLOCK_SIZE,
    COLUMN_BLOCK,
    FP8_DTYPE,
    ROW_BLOCK,
    TILE_BLOCK,
    Fp8Blocks,
    dequantize,
    quantize_weight,
)
from torchtune_ext.policy.families import hf_name
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8LoRALinear
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.lora import adapter_names
from torchtune_ext.run.errors import UsageError, closest_match

# vLLM holds each of these groups as one layer, which is in FP8 as a whole or not at all.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """A linear layer of the model, and whether it computes in FP8."""

    # Hugging Face's name, without ".weight".
    name: str
    # (out-features, in-features).
    shape: tuple[int, int]
    # Why the layer stays in the compute dtype. None: it computes in FP8.
    reason: str | None


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """What a conversion did, for the trainer and the sampler."""

    config: Fp8Config
    # The dtype in which a forward sees the weights and quantizes them.
    dtype: torch.dtype
    # In the order of the model. The output head is the last, tied or not.
    layers: tuple[Fp8Layer, ...]
    # GEMM, (out, in) and backend. Empty if only the sampler is in FP8.
    choices: tuple[tuple[str, tuple[int, int], BackendChoice], ...] = ()

    @property
    def fp8_layer_names(self) -> frozenset[str]:
        """Hugging Face's names of the layers in FP8."""
        return frozenset(layer.name for layer in self.layers if layer.reason is None)

    @property
    def num_fp8_params(self) -> int:
        """The number of values in FP8."""
        return sum(out * features for out, features in (layer.shape for layer in self.layers if layer.reason is None))

    @property
    def fp8_fraction(self) -> float:
        """The share of FP8 in the parameters of all linear layers, the output head among them."""
        # A token costs two FLOPs for each of these parameters, so it is the share of their FLOPs, too.
        return self.num_fp8_params / sum(layer.shape[0] * layer.shape[1] for layer in self.layers)

    def quantization_config(self) -> dict[str, Any]:
        """Returns the `quantization_config` with which vLLM computes the same layers in the same blocks."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
            "modules_to_not_convert": [layer.name for layer in self.layers if layer.reason is not None],
        }

    def round_weight(self, weight: Tensor) -> Tensor:
        """Returns the values of a weight in FP8 that both sides compute with, in float32."""
        return dequantize(quantize_weight(weight.to(self.dtype)))

    def require_whole_shards(self, gpus: int, kv_heads: int) -> None:
        """Raises ValueError where tensor parallelism over `gpus` would cut a tile. vLLM quantizes by whole ones."""
        for layer in self.layers:
            out, features = layer.shape
            kind = layer.name.rpartition(".")[2]
            # vLLM cuts o_proj and down_proj along their in-features, the others along their out-features, and keys
            # and values by heads.
            axis, width = ("in", features) if kind in ("o_proj", "down_proj") else ("out", out)
            parts = min(gpus, kv_heads) if kind in ("k_proj", "v_proj") else gpus
            if layer.reason is None and width % (parts * BLOCK_SIZE):
                raise UsageError(
                    f"engine.tensor_parallel_size={gpus} cuts {layer.name}, {out} x {features}, into pieces of "
                    f"{width / parts:g} {axis}-features, which are no whole FP8 tiles of {BLOCK_SIZE}: set it lower, or leave the "
                    f"layers out by precision.skip=[{kind}]"
                )

    def format_table(self) -> str:
        """Returns a few lines: the layers by kind and dtype, then the backends."""
        lines = [
            f"FP8: {len(self.fp8_layer_names)} of {len(self.layers)} linear layers, {self.fp8_fraction:.1%} of "
            "their parameters and of their FLOPs for a token"
        ]
        kinds = Counter((layer.name.rpartition(".")[2], layer.shape, layer.reason) for layer in self.layers)
        for (kind, (out, features), reason), count in kinds.items():
            fate = "FP8" if reason is None else f"{str(self.dtype)[6:]}: {reason}"
            lines.append(f"  {count:>4} x {kind:<10} {out:>6} x {features:<6} {fate}")
        shapes: dict[tuple[BackendChoice, str], list[str]] = {}
        for gemm, (out, features), choice in self.choices:
            shapes.setdefault((choice, gemm), []).append(f"{out}x{features}")
        gemms: dict[tuple[BackendChoice, str], list[str]] = {}
        for (choice, gemm), sizes in shapes.items():
            gemms.setdefault((choice, ", ".join(sizes)), []).append(gemm)
        lines += [
            f"  GEMMs: {choice.backend} for {', '.join(names)} of {sizes} ({choice.reason})"
            for (choice, sizes), names in gemms.items()
        ]
        return "\n".join(lines)


def skip_reasons(
    shapes: Mapping[str, tuple[int, int]], skip: Collection[str] = (), unfit: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """For each linear layer, why it stays in the compute dtype, or None if it computes in FP8.

    Args:
        shapes: Hugging Face name -> (out, in) of all linear layers.
        skip: layers to leave alone, by whole names or by their last parts. ValueError if one names no layer.
        unfit: further reasons, by name.
    """
    kinds = sorted({_kind(name) for name in shapes} - {LM_HEAD})
    for entry in skip:
        if not any(entry in (name, _kind(name)) for name in shapes):
            near = closest_match(entry, [*kinds, *shapes])
            raise UsageError(
                f"precision.skip names {entry!r}, which no layer is; {f'did you mean {near!r}? ' if near else ''}"
                f"give a kind, {', '.join(kinds)}, or a whole name, like {next(iter(shapes))!r}"
            )

    def own(name: str) -> str | None:
        out, features = shapes[name]
        if _kind(name) == LM_HEAD:
            return "output head, whose errors go straight into the log-probs"
        if name in skip or _kind(name) in skip:
            return "named in precision.skip"
        if features % BLOCK_SIZE:
            return f"{features} features in: vLLM quantizes activations in whole groups of {BLOCK_SIZE}"
        if out % BLOCK_SIZE and any(_kind(name) in parts for parts in FUSED_GROUPS):
            return f"{out} features out: vLLM fuses it with others in whole tiles of {BLOCK_SIZE}"
        return (unfit or {}).get(name)

    reasons = {name: own(name) for name in shapes}
    # A layer that vLLM fuses with one that stays has to stay, too.
    for name in shapes:
        stem = name.removesuffix(_kind(name))
        for part in next((parts for parts in FUSED_GROUPS if _kind(name) in parts), ()):
            if reasons[name] is None and f"{stem}{part}" in shapes and own(f"{stem}{part}") is not None:
                reasons[name] = f"vLLM fuses it with {part}, which stays"
    return reasons


def linear_layers(
    model: TransformerDecoder, config: Fp8Config, trains: bool, hf_model: HFModel | None = None
) -> tuple[tuple[Fp8Layer, ...], dict[str, nn.Module]]:
    """All linear layers in the order of the model, the output head last, and the modules by Hugging Face name.

    Args:
        model: may lie on the meta device.
        trains: whether the trainer computes in FP8, too.
        names: the model directory. Without it, permuted rows are not noticed (`_moved`).

    Raises ValueError if `config.skip` names no layer.
    """
    adapters = adapter_names(model)
    modules, unfit = {}, {}
    for ours, module in model.named_modules():
        ours = clean_name(ours)
        if isinstance(module, (nn.Linear, LoRALinear, DoRALinear)) and f"{ours}.weight" not in adapters:
            name = hf_name(f"{ours}.weight").removesuffix(".weight")
            modules[name] = module
            reason = (
                (_unsupported_reason(module) or (hf_model and _permutation_reason(hf_model, ours, module)))
                if trains
                else None
            )
            if reason:
                unfit[name] = reason
    # A tied head is no module of its own, but has the shape of the embedding.
    head = modules.pop(LM_HEAD, None)
    shapes = {name: tuple(module.weight.shape) for name, module in modules.items()}
    if head is not None:
        modules[LM_HEAD] = head
    shapes[LM_HEAD] = tuple((model.tok_embeddings if head is None else head).weight.shape)
    reasons = skip_reasons(shapes, config.skip, unfit)
    return tuple(Fp8Layer(name, shapes[name], reasons[name]) for name in shapes), modules


def make_fp8_plan(
    model: TransformerDecoder,
    hf_model: HFModel,
    config: Fp8Config,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Fp8Plan:
    """Makes the list for a model, which may lie on the meta device and stays as it is.

    Args:
        dtype: the dtype in which the forward sees the weights.
        device: the trainer's device, which decides the backends. None: only the sampler is in FP8.

    Raises ValueError if no layer can be converted, `config.skip` names no layer, the checkpoint is quantized already,
    or the backend of `config` cannot run on `device`.
    """
    return _make_plan(model, hf_model, config, dtype, device)[0]


def convert_to_fp8(
    model: TransformerDecoder, hf_model: HFModel, config: Fp8Config, dtype: torch.dtype, device: torch.device
) -> Fp8Plan:
    """Lets the layers of `plan` compute in FP8, with its arguments and errors. Comes after `lora.prepare`."""
    fp8_plan, modules = _make_plan(model, hf_model, config, dtype, device)
    for name in fp8_plan.fp8_layer_names:
        module = modules[name]
        # Another class leaves parameters, their names and checkpoints as they are. FSDP2, checkpointing and compile
        # wrap the layers, so they must come later.
        if isinstance(module, LoRALinear):
            module.__class__ = Fp8LoRALinear
        else:
            module.__class__ = Fp8BlockLinear
        # torch's annotation allows only tensors and modules as attributes of a module.
        module.fp8 = config  # pyright: ignore[reportArgumentType]
    return fp8_plan


@torch.no_grad()
def fp8_hf_tensors(
    tensors: Iterable[tuple[str, Tensor]], fp8_plan: Fp8Plan, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, tensor) for a sampler that was made with `receipt.quantization_config()`.

    A converted layer becomes `X.weight`, float8_e4m3fn [N, K], and `X.weight_scale_inv`, float32 [N/128 rounded up,
    K/128], by which it is multiplied. All other tensors come in `dtype`. `tensors` come in `receipt.dtype` from
    `named_hf_tensors` or `lora.base_hf_tensors`, which may gather: a collective.

    Raises ValueError if a tensor has another dtype, or a converted layer is not among them.
    """
    missing = set(fp8_plan.fp8_layer_names)
    for name, tensor in tensors:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in fp8_plan.fp8_layer_names:
            yield name, tensor.to(dtype)
            continue
        # The forward quantizes weights that are already rounded to its dtype. From float32, other bits would come out.
        if tensor.dtype != fp8_plan.dtype:
            raise UsageError(
                f"{name} comes as {tensor.dtype}, the forward quantizes {fp8_plan.dtype}: gather it in that"
            )
        missing.discard(layer)
        q = quantize_weight(tensor)
        yield name, q.values
        yield f"{name}_scale_inv", q.scales
    if missing:
        raise UsageError(f"{len(missing)} layers in FP8 were not among the tensors: {sorted(missing)[:4]} ...")


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _make_plan(
    model: TransformerDecoder, hf_model: HFModel, config: Fp8Config, dtype: torch.dtype, device: torch.device | None
) -> tuple[Fp8Plan, dict[str, nn.Module]]:
    hf_model.require_unquantized()
    layers, modules = linear_layers(model, config, device is not None, hf_model)
    fp8_plan = Fp8Plan(config, dtype, layers)
    if not fp8_plan.fp8_layer_names:
        raise UsageError(
            f"{fp8_plan.format_table()}\nprecision: no layer of model_dir={str(hf_model.path)!r} can compute in FP8, for the reasons "
            "above; take another model, or set precision=bf16"
        )
    if device is None:
        return fp8_plan, modules
    frozen, choices = bool(adapter_names(model)), {}
    for layer in layers:
        if layer.reason is None:
            for gemm in config.gemms(frozen):
                if (gemm, layer.shape) not in choices:
                    choices[gemm, layer.shape] = _choose_gemm_backend(gemm, layer, fp8_plan, device)
    return replace(fp8_plan, choices=tuple((*key, choice) for key, choice in choices.items())), modules


def _unsupported_reason(module: nn.Module) -> str | None:
    if isinstance(module.weight, NF4Tensor):
        return "its weight is NF4 (model.quantize_base=False or precision=fp8_rollout would do)"
    if isinstance(module, DoRALinear):
        return "DoRA: no sampler has it but merged, and then rounded as a whole (precision=fp8_rollout would do)"
    if type(module) not in (nn.Linear, LoRALinear):
        return f"it is a {type(module).__name__}"
    return None


def _permutation_reason(hf_model: HFModel, ours: str, module: nn.Module) -> str | None:
    """Why a layer whose rows are permuted on the way to Hugging Face cannot be in FP8, or None."""
    # Inside a tile rows may change places, since its scale and its values stay the same. Row numbers stand in for the
    # weight.
    places = torch.arange(module.get_parameter("weight").shape[0], device="cpu")[:, None]
    _, order = hf_model.to_hf(f"{ours}.weight", places)
    if torch.equal(order[:, 0] // BLOCK_SIZE, torch.arange(order.shape[0]) // BLOCK_SIZE):
        return None
    return f"Hugging Face has its rows in another order, across tiles of {BLOCK_SIZE}: heads must divide {BLOCK_SIZE}"


def _choose_gemm_backend(gemm: str, layer: Fp8Layer, fp8_plan: Fp8Plan, device: torch.device) -> BackendChoice:
    out, features = layer.shape

    def blocks(rows: int, columns: int, block: tuple[int, int]) -> Fp8Blocks:
        # The backends look only at shapes, dtypes and the device. One expanded number has these, without the memory.
        values, scales = torch.empty((), dtype=FP8_DTYPE, device=device), torch.empty((), device=device)
        grid = rows // block[0], columns // block[1]
        return Fp8Blocks(values.expand(rows, columns), scales.expand(grid), block, (rows, columns))

    weight = blocks(out, features, TILE_BLOCK)
    operands = {
        "fprop": (blocks(0, features, ROW_BLOCK), weight),
        "dgrad": (blocks(0, out, ROW_BLOCK), weight),
        "wgrad": (blocks(0, out, COLUMN_BLOCK), blocks(0, features, COLUMN_BLOCK)),
    }[gemm]
    backend, dtype = fp8_plan.config.backend, fp8_plan.dtype
    if backend == "auto":
        choice = fp8_gemm.choose_backend(gemm, *operands, dtype)
        if device.type == "cuda" and choice.backend == "reference":
            raise UsageError(
                f"precision.backend=auto: {device} has nothing fast for {gemm} of {layer.name}, {choice.reason}; mend one of "
                "these, set precision=bf16, or emulate FP8 with precision.backend=reference"
            )
        return choice
    if objection := fp8_gemm.unsupported_reason(backend, gemm, *operands, dtype):
        raise UsageError(
            f"precision.backend={backend} cannot run {gemm} of {layer.name}: {objection}; or set precision.backend=auto"
        )
    return BackendChoice(backend, "asked for")
