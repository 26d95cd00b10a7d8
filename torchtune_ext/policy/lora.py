"""Low-rank adapters: initialization, export, merging and disabling. The modules are torchtune's.

    LoRA    y = W x + s B A x,  s = alpha / r       Hu et al. 2021, arXiv:2106.09685
    DoRA    y = m / |V| * (V x),  V = W + s B A     Liu et al. 2024, arXiv:2402.09353, eq. 5 and 11
    QLoRA   LoRA or DoRA over a W stored in NF4     Dettmers et al. 2023, arXiv:2305.14314

|V| is the norm of each row, and a constant in the backward.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear, LoRALinear, disable_adapter

from torchtune_ext.policy.families import FUSED_PARTS, hf_name
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.sharding import dequantize_nf4, fill_param, gather_full
from torchtune_ext.run.errors import UsageError


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The settings of a model's adapters, which all have the same rank, alpha and dropout."""

    rank: int
    alpha: float
    dropout: float
    # Hugging Face's names of the adapted linear layers: "q_proj", "down_proj", ...
    targets: tuple[str, ...]
    # Whether they are DoRA adapters, with a magnitude for each row.
    dora: bool
    # Whether the base weights are in NF4.
    quantized: bool
    # Target that the files hold fused ("qkv_proj") -> number of its parts with an adapter.
    fused: Mapping[str, int] = field(default_factory=dict)

    @property
    def max_rank(self) -> int:
        """The largest rank of an exported adapter."""
        return self.rank * max(self.fused.values(), default=1)

    def peft_config(self, base: str) -> dict[str, Any]:
        """Returns PEFT's `adapter_config.json` for an adapter of the model `base`."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.targets),
            "use_dora": self.dora,
            "bias": "none",
            "inference_mode": True,
            # The adapters of a fused layer are one adapter of a higher rank, with the same scale.
            "rank_pattern": {name: self.rank * count for name, count in self.fused.items()},
            "alpha_pattern": {name: self.alpha * count for name, count in self.fused.items()},
        }


def adapter_spec(
    model: TransformerDecoder, hf_model: HFModel, section: Mapping[str, Any], shards: int = 1
) -> AdapterSpec | None:
    """Reads and checks the adapters of a model.

    Args:
        model: the model; it may be on the meta device.
        hf_model: maps weights to Hugging Face's names.
        section: the config section `model:`.
        shards: number of shards of each copy of the weights.

    Returns:
        The settings of the adapters, or None if the model has no adapters.

    Raises:
        UsageError: rank, alpha or dropout is invalid; a target is unknown or missing; or NF4
            weights cannot be sharded.
    """
    if section.get("lora_rank", 1) < 1:
        raise UsageError(f"model.lora_rank={section.get('lora_rank')} must be at least 1")
    modules = adapted_modules(model)
    # torchtune's builders ignore unknown targets, so the run would train fewer layers than the
    # config lists.
    parts = model.layers[0].get_submodule("attn").named_children()
    attention = {name for name, module in parts if hasattr(module, "weight")}
    unknown = sorted(set(section.get("lora_attn_modules") or ()) - attention)
    if unknown:
        raise UsageError(f"model.lora_attn_modules names {unknown}, which no layer has; available: {sorted(attention)}")
    builder = str(section.get("_component_")).rpartition(".")[2]
    if not modules and (
        re.search(r"(^|_)q?lora(_|$)", builder) or any(str(key).startswith("lora_") for key in section)
    ):
        raise UsageError(
            "`model:` configures LoRA, but the model has no adapters; set model._component_ to "
            "torchtune_ext.policy.from_config or a LoRA builder of torchtune, and set model.lora_attn_modules to some of "
            f"{sorted(attention)}"
        )
    if not modules:
        return None
    if hf_model.is_multimodal:
        raise UsageError(
            f"model.lora_attn_modules with model_dir={str(hf_model.path)!r}: adapters of multimodal folders are unsupported, "
            "because PEFT and vLLM would also look for them in the vision tower. Fix: train all weights, or use a folder of "
            "the text model, such as a checkpoint of a run that trained all weights"
        )
    for name, module in modules.items():
        # FSDP2 shards an NF4 weight between groups of 256 blocks, which share a second-level scale.
        if isinstance(module.weight, NF4Tensor) and module.weight.quantization_factor.numel() % shards:
            raise UsageError(
                f"model.quantize_base=True: {name} has {module.weight.quantization_factor.numel()} groups of 256 NF4 "
                f"blocks, which is not divisible by {shards} shards. Fix: remove {name.rpartition('.')[2]} from "
                "model.lora_attn_modules, or change the number of ranks or ranks.shard_within"
            )
    first = next(iter(modules.values()))
    rank = first.lora_a.weight.shape[0]
    alpha, dropout = _scaling(first) * rank, getattr(first.dropout, "p", 0.0)
    if not 0 < alpha < math.inf:
        raise UsageError(
            f"model.lora_alpha={alpha}: expected a finite number above 0. An adapter's output is scaled by lora_alpha / "
            "lora_rank, so with this value it learns nothing; set model.lora_alpha=16, for instance"
        )
    # torchtune treats NaN as 0.
    if not 0 <= (share := section.get("lora_dropout", dropout)) < 1:
        raise UsageError(
            f"model.lora_dropout={share}: expected the fraction of an adapter's inputs that is dropped, at least 0 and "
            "below 1"
        )
    dora = isinstance(first, DoRALinear)
    targets = _count_adapters(model, hf_model, dora)
    return AdapterSpec(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(targets),
        dora=dora,
        quantized=any(isinstance(module.weight, NF4Tensor) for module in modules.values()),
        fused={name: count for name, count in targets.items() if name in FUSED_PARTS},
    )


def _count_adapters(model: TransformerDecoder, hf_model: HFModel, dora: bool) -> dict[str, int]:
    """Returns Hugging Face's names of the adapted layers -> number of their parts with an adapter.

    Raises:
        UsageError: a fused layer has DoRA adapters on some of its parts.
    """
    targets: dict[str, int] = {}
    for name, parts in _adapted_layers(model, hf_model).items():
        count = sum(isinstance(part, (LoRALinear, DoRALinear)) for part in parts)
        if dora and count < len(parts):
            raise UsageError(
                f"model.use_dora: the files hold {name.rpartition('.')[2]} fused, so an exported DoRA adapter must adapt all "
                "its parts. Fix: set model.lora_attn_modules=[q_proj, k_proj, v_proj], or model.use_dora=False"
            )
        targets[name.rpartition(".")[2]] = count
    return targets


def adapted_modules(model: nn.Module) -> dict[str, LoRALinear | DoRALinear]:
    """Returns the linear layers that have an adapter, by name."""
    return {clean_name(n): m for n, m in model.named_modules() if isinstance(m, (LoRALinear, DoRALinear))}


def adapter_names(model: nn.Module) -> set[str]:
    """Returns the names of the adapters' parameters."""
    return {f"{name}.{p}" for name, module in adapted_modules(model).items() for p in module.adapter_params()}


def freeze_base(model: nn.Module, base_dtype: torch.dtype) -> None:
    """Freezes all parameters except the adapters, and stores them in `base_dtype` or NF4.

    The model must still be on the meta device.
    """
    adapters = adapter_names(model)
    share_rope(model)
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if clean_name(f"{prefix}.{name}") in adapters:
                continue
            param.requires_grad_(False)
            if not isinstance(param, NF4Tensor):
                setattr(module, name, nn.Parameter(param.to(base_dtype), requires_grad=False))
    for module in adapted_modules(model).values():
        for linear in (module.lora_a, module.lora_b):
            # Changing the class, not the forward of each instance, lets torch.compile share one
            # graph between layers.
            linear.__class__ = _MasterLinear
        if isinstance(module, DoRALinear):
            module.__class__ = _DoRALinear
    # torchtune's hook dequantizes the whole model for every state dict, even if a checkpoint takes
    # only the adapters.
    model._state_dict_hooks.clear()


def share_rope(model: nn.Module) -> None:
    """Lets layers with equal RoPE settings share one table."""
    # torchtune's LoRA builders make a table for each layer: 896 MiB in Qwen2.5 7B.
    tables: dict[tuple, nn.Module] = {}
    for module in model.modules():
        if (rope := getattr(module, "pos_embeddings", None)) is not None:
            settings = sorted((key, repr(value)) for key, value in vars(rope).items() if not key.startswith("_"))
            module.pos_embeddings = tables.setdefault((type(rope), *settings), rope)


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Initializes adapters that do not change the model: B = 0, and m is the norm of W's rows."""
    # Every rank draws the unsharded A on the CPU, so its bits do not depend on the number of ranks.
    generator = torch.Generator().manual_seed(seed)
    for module in adapted_modules(model).values():
        rank, width = module.lora_a.weight.shape
        # Kaiming initialization as in the paper's code: uniform in +-1/sqrt(width).
        fill_param(module.lora_a.weight, (2 * torch.rand(rank, width, generator=generator) - 1) * width**-0.5)
        fill_param(module.lora_b.weight, torch.zeros(module.lora_b.weight.shape))
        if isinstance(module, DoRALinear):
            fill_param(module.magnitude, torch.linalg.norm(gather_full(module.get_parameter("weight")).float(), dim=1))


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> Tensor:
    """Merges a weight [out, in] with its adapter."""
    v = weight + scaling * (b @ a)
    return v if magnitude is None else (magnitude / torch.linalg.norm(v, dim=1).detach())[:, None] * v


def effective_weight(module: Any) -> Tensor:
    """Returns a layer's differentiable weight in a forward, merged with its adapter, if any."""
    if not isinstance(module, (LoRALinear, DoRALinear)):
        return module.weight
    # torchtune registers the parameter without a declaration.
    weight: Tensor = module.weight  # pyright: ignore[reportAssignmentType]
    if module.disabled:
        return weight
    magnitude = module.magnitude if isinstance(module, DoRALinear) else None
    weight = dequantize_nf4(weight).to(module.lora_a.weight.dtype)
    return merge_weight(weight, module.lora_a.weight, module.lora_b.weight, _scaling(module), magnitude)


@torch.no_grad()
def base_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, unsharded tensor) of the dequantized base model. A collective."""
    for name, full in base_tensors(model):
        yield hf_model.to_hf(name, full.to(dtype))


@torch.no_grad()
def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, unsharded tensor) of the dequantized base model. A collective."""
    adapters = adapter_names(model)
    for name, param in model.named_parameters():
        if clean_name(name) not in adapters:
            yield clean_name(name), gather_full(param)


def merged_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, unsharded tensor) of the merged model. A collective."""
    # Merging uses float32, and the result is rounded only once, to `dtype`.
    for name, full in merged_tensors(model):
        yield hf_model.to_hf(name, full.to(dtype))


@torch.no_grad()
def merged_tensors(
    model: nn.Module,
    base: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    factor: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, unsharded tensor) of the model, merged in float32. A collective.

    Args:
        model: the model with adapters.
        base: rounds a weight before merging; takes torchtune's name and the weight.
        factor: rounds an adapter's A and B before merging, but not DoRA's magnitude.
    """
    adapters, modules = adapter_names(model), adapted_modules(model)
    for name, param in model.named_parameters():
        name = clean_name(name)
        if name in adapters:
            continue
        full = base(name, gather_full(param))
        module = modules.get(name.removesuffix(".weight"))
        if module is not None:
            # The base may be in main memory (`FrozenOffload`).
            a, b = (factor(gather_full(part.weight)).to(full.device).float() for part in (module.lora_a, module.lora_b))
            magnitude = (
                gather_full(module.magnitude).to(full.device).float() if isinstance(module, DoRALinear) else None
            )
            full = merge_weight(full.float(), a, b, _scaling(module), magnitude)
        yield name, full


@torch.no_grad()
def adapter_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (PEFT name, unsharded tensor) of the adapters only. A collective."""
    # torchtune's own export also permutes q and k of Qwen2, which already have Hugging Face's
    # layout.
    names = {module: name for name, module in adapted_modules(model).items()}
    for layer, parts in _adapted_layers(model, hf_model).items():
        stem = f"base_model.model.{layer}"
        adapted = [part for part in parts if isinstance(part, (LoRALinear, DoRALinear))]
        # The A of a fused layer are stacked, and its B are the blocks of a diagonal.
        yield f"{stem}.lora_A.weight", torch.cat([gather_full(part.lora_a.weight).to(dtype) for part in adapted])
        blocks, magnitudes = [], []
        for part in parts:
            if part not in names:
                rows = part.get_parameter("weight").shape[0]
                blocks.append(torch.zeros(rows, 0, dtype=dtype, device=adapted[0].lora_b.weight.device))
                continue
            name = f"{names[part]}.weight"
            blocks.append(hf_model.to_hf(name, gather_full(part.lora_b.weight).to(dtype))[1])
            if isinstance(part, DoRALinear):
                magnitudes.append(hf_model.to_hf(name, gather_full(part.magnitude).to(dtype)[:, None])[1][:, 0])
        yield f"{stem}.lora_B.weight", blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)
        if magnitudes:
            yield f"{stem}.lora_magnitude_vector", torch.cat(magnitudes)


def _adapted_layers(model: nn.Module, hf_model: HFModel) -> dict[str, list[Any]]:
    """Returns the layers of the model's files that have an adapter.

    Returns:
        Hugging Face name -> module; if the files hold it fused: the modules of its parts, in order.
    """
    modules = {
        hf_name(f"{clean_name(name)}.weight").removesuffix(".weight"): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | LoRALinear | DoRALinear) and ".lora_" not in name
    }
    layers = {}
    for name, module in modules.items():
        stem, _, kind = name.rpartition(".")
        fused = hf_model.fused_names.get(kind)
        names = [f"{stem}.{part}" for part in FUSED_PARTS[fused]] if fused else [name]
        if isinstance(module, (LoRALinear, DoRALinear)):
            layers[f"{stem}.{fused or kind}".lstrip(".")] = [modules[each] for each in names]
    return layers


class AdapterDisabledReference:
    """The reference policy of an adapted model: the model with disabled adapters."""

    def __init__(self, model: nn.Module):
        self._model = model

    def activate(self) -> AbstractContextManager[None]:
        """Returns a context in which the model computes without its adapters."""
        return disable_adapter(self._model)


def _scaling(module: LoRALinear | DoRALinear) -> float:
    # torchtune stores the same number differently in the two classes.
    return module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank


class _MasterLinear(nn.Linear):
    """A linear layer that rounds its float32 master weight in each forward."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class _DoRALinear(DoRALinear):
    """torchtune's DoRA, but the bias is not scaled and the output is rounded only once."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return F.linear(x, dequantize_nf4(self.weight).to(x.dtype), self.bias)
        a, b = self.lora_a.weight, self.lora_b.weight
        with torch.no_grad():
            # torchtune instead passes an identity matrix through A and B for this product.
            v = torch.addmm(dequantize_nf4(self.weight).to(a.dtype), b, a, alpha=self.scaling)
            norm = torch.linalg.norm(v, dim=1)
        lora = self.scaling * self.lora_b(self.lora_a(self.dropout(x)))
        # torchtune 0.6.1 also scales the bias. Qwen2 has biases, and neither PEFT nor a merged
        # model scales them.
        return _ScaledLinear.apply(x, self.weight, self.bias, lora, self.magnitude / norm)


class _ScaledLinear(torch.autograd.Function):
    """Computes scale * (W x + lora) + bias with a frozen W in float32, and rounds it once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, lora: Tensor, scale: Tensor) -> Tensor:
        """Returns [..., out] in the dtype of x.

        Args:
            x: [..., in].
            weight: [out, in], as x or NF4.
            bias: [out], or None.
            lora: the adapter's output [..., out], in the dtype of x.
            scale: [out], float32.
        """
        rows, columns = x.flatten(0, -2), dequantize_nf4(weight).to(x.dtype).T
        # Both factors are float32. The scale m / |V| stays near 1, where bfloat16 has steps of 2^-7
        # and would round off most updates of m. If W x were rounded first, a change below half a
        # step of W x would be rounded off.
        if x.is_cuda and x.dtype != torch.float32:
            # Only CUDA supports `out_dtype`. It is as fast as an output in the dtype of x.
            v = torch.mm(rows, columns, out_dtype=torch.float32)
        else:
            v = rows.float() @ columns.float()
        v = v.view(lora.shape) + lora
        ctx.save_for_backward(weight, scale, v.to(x.dtype))
        y = scale * v
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grad_outputs
        weight, scale, v = ctx.saved_tensors
        # The norm in `scale` is a constant (eq. 11), so it has no gradient.
        dv = (scale * dy).to(dy.dtype)
        dx = dv @ dequantize_nf4(weight).to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dv, (dy * v).flatten(0, -2).sum(0, dtype=scale.dtype)
