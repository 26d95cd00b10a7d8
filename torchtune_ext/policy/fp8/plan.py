"""Selects the linear layers in FP8, in trainer and engine, and quantizes their weights.

`skip_reasons` selects the layers once. `convert_to_fp8` applies the plan to the trainer,
`Fp8Plan.quantization_config` passes it to vLLM, and `fp8_hf_tensors` converts the published
weights, so both sides compute with the same values (Jet-RL, arXiv:2601.14243).
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
from torchtune_ext.policy.families import FUSED_PARTS, hf_name
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8LoRALinear
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.lora import adapter_names
from torchtune_ext.run.errors import UsageError, closest_match

# vLLM fuses each of these groups into one layer, which is either completely in FP8 or not.
FUSED_GROUPS = tuple(FUSED_PARTS.values())
LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class Fp8Layer:
    """A linear layer of the model, and whether it computes in FP8."""

    # Hugging Face's name, without ".weight".
    name: str
    # (out-features, in-features).
    shape: tuple[int, int]
    # Why the layer stays in the compute dtype; None: it computes in FP8.
    reason: str | None


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """The FP8 layers of a model, for trainer and engine."""

    config: Fp8Config
    # Dtype of the weights in a forward, from which they are quantized.
    dtype: torch.dtype
    # All linear layers in the order of the model. The output head is the last, tied or not.
    layers: tuple[Fp8Layer, ...]
    # GEMM, (out, in) and backend. Empty if only the engine is in FP8.
    choices: tuple[tuple[str, tuple[int, int], BackendChoice], ...] = ()

    @property
    def fp8_layer_names(self) -> frozenset[str]:
        """Hugging Face's names of the layers in FP8."""
        return frozenset(layer.name for layer in self.layers if layer.reason is None)

    @property
    def num_fp8_params(self) -> int:
        """The number of weights in FP8."""
        return sum(out * features for out, features in (layer.shape for layer in self.layers if layer.reason is None))

    @property
    def fp8_fraction(self) -> float:
        """The fraction of FP8 in the parameters of all linear layers, including the output head."""
        # A token costs two FLOPs per parameter, so this is also the fraction of FLOPs.
        return self.num_fp8_params / sum(layer.shape[0] * layer.shape[1] for layer in self.layers)

    def quantization_config(self) -> dict[str, Any]:
        """Returns the `quantization_config` that makes vLLM quantize the same layers and blocks."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
            "modules_to_not_convert": self._skipped_names(),
        }

    def _skipped_names(self) -> list[str]:
        """Names of the layers that stay in the compute dtype, including the fused layers of vLLM."""
        names = [layer.name for layer in self.layers if layer.reason is not None]
        fused = {parts[0]: name for name, parts in FUSED_PARTS.items()}
        # vLLM looks up the parts of a fused layer, but not in Phi-3, whose files hold fused layers.
        stems = ((name.rpartition(".")[0], fused.get(_kind(name))) for name in names)
        return names + [f"{stem}.{whole}" for stem, whole in stems if whole]

    def round_weight(self, weight: Tensor) -> Tensor:
        """Rounds a weight to its FP8 values, returned in float32."""
        return dequantize(quantize_weight(weight.to(self.dtype)))

    def require_whole_shards(self, gpus: int, kv_heads: int) -> None:
        """Checks that tensor parallelism does not split FP8 tiles, which vLLM does not support.

        Args:
            gpus: `engine.tensor_parallel_size`.
            kv_heads: number of key/value heads.

        Raises:
            UsageError: a tile would be split.
        """
        for layer in self.layers:
            out, features = layer.shape
            kind = layer.name.rpartition(".")[2]
            # vLLM shards o_proj and down_proj along in-features, the other layers along
            # out-features, and keys and values by heads.
            axis, width = ("in", features) if kind in ("o_proj", "down_proj") else ("out", out)
            parts = min(gpus, kv_heads) if kind in ("k_proj", "v_proj") else gpus
            if layer.reason is None and width % (parts * BLOCK_SIZE):
                raise UsageError(
                    f"engine.tensor_parallel_size={gpus} splits {layer.name}, {out} x {features}, into shards of "
                    f"{width / parts:g} {axis}-features; expected a multiple of {BLOCK_SIZE}, the size of an FP8 tile. Set it "
                    f"lower, or exclude the layers with precision.skip=[{kind}]"
                )

    def format_table(self) -> str:
        """Formats the layers by kind and dtype, then the backends, in a few lines."""
        lines = [
            f"FP8: {len(self.fp8_layer_names)} of {len(self.layers)} linear layers, {self.fp8_fraction:.1%} of "
            "their parameters and FLOPs per token"
        ]
        kinds = Counter((layer.name.rpartition(".")[2], layer.shape, layer.reason) for layer in self.layers)
        for (kind, (out, features), reason), count in kinds.items():
            dtype_text = "FP8" if reason is None else f"{str(self.dtype)[6:]}: {reason}"
            lines.append(f"  {count:>4} x {kind:<10} {out:>6} x {features:<6} {dtype_text}")
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
    shapes: Mapping[str, tuple[int, int]], skip: Collection[str] = (), other_reasons: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Decides for each linear layer whether it computes in FP8.

    Args:
        shapes: Hugging Face name -> (out, in) of all linear layers.
        skip: layers to exclude, by full names or last name components.
        other_reasons: further reasons, by name.

    Returns:
        Name -> why the layer stays in the compute dtype, or None if it computes in FP8.

    Raises:
        UsageError: an entry of `skip` matches no layer.
    """
    kinds = sorted({_kind(name) for name in shapes} - {LM_HEAD})
    for entry in skip:
        if not any(entry in (name, _kind(name)) for name in shapes):
            near = closest_match(entry, [*kinds, *shapes])
            raise UsageError(
                f"precision.skip names {entry!r}, which matches no layer; {f'did you mean {near!r}? ' if near else ''}"
                f"give a kind, {', '.join(kinds)}, or a full name, like {next(iter(shapes))!r}"
            )

    def layer_reason(name: str) -> str | None:
        out, features = shapes[name]
        if _kind(name) == LM_HEAD:
            return "output head, whose errors directly change the log-probs"
        if name in skip or _kind(name) in skip:
            return "named in precision.skip"
        if features % BLOCK_SIZE:
            return f"{features} in-features: vLLM quantizes activations in groups of {BLOCK_SIZE}"
        if out % BLOCK_SIZE and any(_kind(name) in parts for parts in FUSED_GROUPS):
            return f"{out} out-features: vLLM fuses it with other layers in tiles of {BLOCK_SIZE}"
        return (other_reasons or {}).get(name)

    reasons = {name: layer_reason(name) for name in shapes}
    # If a layer of a fused group is not in FP8, the other layers of the group cannot be in FP8.
    for name in shapes:
        stem = name.removesuffix(_kind(name))
        for part in next((parts for parts in FUSED_GROUPS if _kind(name) in parts), ()):
            if reasons[name] is None and f"{stem}{part}" in shapes and layer_reason(f"{stem}{part}") is not None:
                reasons[name] = f"vLLM fuses it with {part}, which is not in FP8"
    return reasons


def linear_layers(
    model: TransformerDecoder, config: Fp8Config, trains: bool, hf_model: HFModel | None = None
) -> tuple[tuple[Fp8Layer, ...], dict[str, nn.Module]]:
    """Lists all linear layers of a model.

    Args:
        model: the model; it may be on the meta device.
        config: FP8 settings.
        trains: whether the trainer also computes in FP8.
        hf_model: the model directory; None: permuted rows are not checked (`_permutation_reason`).

    Returns:
        The layers in the order of the model, the output head last; and Hugging Face name -> module.

    Raises:
        UsageError: an entry of `config.skip` matches no layer.
    """
    adapters = adapter_names(model)
    modules, other_reasons = {}, {}
    for tune_name, module in model.named_modules():
        tune_name = clean_name(tune_name)
        if isinstance(module, (nn.Linear, LoRALinear, DoRALinear)) and f"{tune_name}.weight" not in adapters:
            name = hf_name(f"{tune_name}.weight").removesuffix(".weight")
            modules[name] = module
            reason = (
                (_unsupported_reason(module) or (hf_model and _permutation_reason(hf_model, tune_name, module)))
                if trains
                else None
            )
            if reason:
                other_reasons[name] = reason
    # A tied head is not a separate module; it has the shape of the embedding.
    head = modules.pop(LM_HEAD, None)
    shapes = {name: tuple(module.weight.shape) for name, module in modules.items()}
    if head is not None:
        modules[LM_HEAD] = head
    shapes[LM_HEAD] = tuple((model.tok_embeddings if head is None else head).weight.shape)
    reasons = skip_reasons(shapes, config.skip, other_reasons)
    return tuple(Fp8Layer(name, shapes[name], reasons[name]) for name in shapes), modules


def make_fp8_plan(
    model: TransformerDecoder,
    hf_model: HFModel,
    config: Fp8Config,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Fp8Plan:
    """Makes the FP8 plan of a model without changing the model.

    Args:
        model: the model; it may be on the meta device.
        hf_model: the model directory.
        config: FP8 settings.
        dtype: dtype of the weights in a forward.
        device: the trainer's device, which determines the backends; None: only the engine is in
            FP8.

    Raises:
        UsageError: no layer can be converted, an entry of `config.skip` matches no layer, the
            weights are already quantized, or the backend cannot run on `device`.
    """
    return _make_plan(model, hf_model, config, dtype, device)[0]


def convert_to_fp8(
    model: TransformerDecoder, hf_model: HFModel, config: Fp8Config, dtype: torch.dtype, device: torch.device
) -> Fp8Plan:
    """Makes a plan as `make_fp8_plan` and converts the model's layers to FP8.

    Call it after `lora.freeze_base`. It raises the errors of `make_fp8_plan`.
    """
    fp8_plan, modules = _make_plan(model, hf_model, config, dtype, device)
    for name in fp8_plan.fp8_layer_names:
        module = modules[name]
        # Changing the class keeps parameters, their names and checkpoints. FSDP2, activation
        # checkpointing and compile wrap the layers, so they must come later.
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
    """Quantizes weights for an engine that was started with `fp8_plan.quantization_config()`.

    It is a collective if `tensors` gathers.

    Args:
        tensors: pairs (Hugging Face name, unsharded tensor in `fp8_plan.dtype`), from
            `named_hf_tensors` or `lora.base_hf_tensors`.
        fp8_plan: the FP8 plan.
        dtype: dtype of all other tensors.

    Yields:
        (Hugging Face name, tensor). A layer in FP8 becomes `X.weight`, float8_e4m3fn [N, K], and
        its factor `X.weight_scale_inv`, float32 [N/128 rounded up, K/128].

    Raises:
        UsageError: a tensor has another dtype, or a layer in FP8 is missing.
    """
    missing = set(fp8_plan.fp8_layer_names)
    for name, tensor in tensors:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in fp8_plan.fp8_layer_names:
            yield name, tensor.to(dtype)
            continue
        # The forward quantizes weights that are already rounded to its dtype. Quantizing float32
        # weights would give other bits.
        if tensor.dtype != fp8_plan.dtype:
            raise UsageError(
                f"{name} has dtype {tensor.dtype}; expected {fp8_plan.dtype}, which the forward quantizes: gather it in "
                f"{fp8_plan.dtype}"
            )
        missing.discard(layer)
        q = quantize_weight(tensor)
        yield name, q.values
        yield f"{name}_scale_inv", q.scales
    if missing:
        raise UsageError(f"{len(missing)} layers in FP8 are missing from the tensors: {sorted(missing)[:4]} ...")


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
            f"{fp8_plan.format_table()}\nprecision: no layer of model_dir={str(hf_model.path)!r} can compute in FP8, for "
            "the reasons above; use another model, or set precision=bf16"
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
        return "its weight is NF4 (supported with model.quantize_base=False or precision=fp8_rollout)"
    if isinstance(module, DoRALinear):
        return "DoRA: engines get the merged weight, which FP8 would round again (supported with precision=fp8_rollout)"
    if type(module) not in (nn.Linear, LoRALinear):
        return f"it is a {type(module).__name__}"
    return None


def _permutation_reason(hf_model: HFModel, tune_name: str, module: nn.Module) -> str | None:
    """Why a layer whose rows are permuted in Hugging Face's layout cannot be in FP8, or None."""
    # A permutation within a tile keeps the tile's scale and values, so it is allowed. Row numbers
    # represent the weight.
    row_numbers = torch.arange(module.get_parameter("weight").shape[0], device="cpu")[:, None]
    _, order = hf_model.to_hf(f"{tune_name}.weight", row_numbers)
    if torch.equal(order[:, 0] // BLOCK_SIZE, torch.arange(order.shape[0]) // BLOCK_SIZE):
        return None
    return f"Hugging Face permutes its rows across tiles of {BLOCK_SIZE}: the head width must divide {BLOCK_SIZE}"


def _choose_gemm_backend(gemm: str, layer: Fp8Layer, fp8_plan: Fp8Plan, device: torch.device) -> BackendChoice:
    out, features = layer.shape

    def blocks(rows: int, columns: int, block: tuple[int, int]) -> Fp8Blocks:
        # The backends check only shapes, dtypes and the device. An expanded scalar has these
        # without the memory.
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
                f"precision.backend=auto: {device} has no fast backend for {gemm} of {layer.name}, {choice.reason}; make "
                "one of these backends available, set precision=bf16, or emulate FP8 with precision.backend=reference"
            )
        return choice
    if reason := fp8_gemm.unsupported_reason(backend, gemm, *operands, dtype):
        raise UsageError(
            f"precision.backend={backend} cannot run {gemm} of {layer.name}: {reason}; or set precision.backend=auto"
        )
    return BackendChoice(backend, "set by precision.backend")
