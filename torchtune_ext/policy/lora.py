"""Low-rank adapters: their first values, export, merging, and the model without them. The modules are torchtune's.

    LoRA    y = W x + s B A x,                s = alpha / r          Hu et al. 2021, arXiv:2106.09685
    DoRA    y = m / |V| * (V x),  V = W + s B A                      Liu et al. 2024, arXiv:2402.09353, eq. 5 and 11
    QLoRA   one of these over a W stored in NF4                      Dettmers et al. 2023, arXiv:2305.14314

|V| is the norm of each row, and a constant in the backward.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import DoRALinear, LoRALinear, disable_adapter

from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.sharding import dequantize_nf4, fill_param, gather_full
from torchtune_ext.run.errors import UsageError


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapters of a model, which all have the same rank, alpha and dropout."""

    rank: int
    alpha: float
    dropout: float
    # The adapted linear layers by Hugging Face's names: "q_proj", "down_proj", ...
    targets: tuple[str, ...]
    # Whether they are DoRA's, with a magnitude for each row.
    dora: bool
    # Whether the weights below the adapters are in NF4.
    quantized: bool

    def peft_config(self, base: str) -> dict[str, Any]:
        """Returns the content of PEFT's `adapter_config.json` for an adapter over the model `base`."""
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
        }


def adapter_spec(
    model: TransformerDecoder, hf_model: HFModel, section: Mapping[str, Any], shards: int = 1
) -> AdapterSpec | None:
    """The adapters of a model, which may lie on the meta device, or None if it has none. `node` is the YAML's `model:`.

    Raises ValueError for a rank of 0, targets that name nothing or are missing, or NF4 weights that ranks cannot share.
    """
    if section.get("lora_rank", 1) < 1:
        raise UsageError(f"model.lora_rank={section.get('lora_rank')} must be at least 1")
    modules = adapted_modules(model)
    # torchtune's builders skip targets that they do not know, and the run would train fewer layers than it says.
    parts = model.layers[0].get_submodule("attn").named_children()
    attention = {name for name, module in parts if hasattr(module, "weight")}
    unknown = sorted(set(section.get("lora_attn_modules") or ()) - attention)
    if unknown:
        raise UsageError(f"model.lora_attn_modules names {unknown}, which no layer has; there are {sorted(attention)}")
    builder = str(section.get("_component_")).rpartition(".")[2]
    if not modules and (
        re.search(r"(^|_)q?lora(_|$)", builder) or any(str(key).startswith("lora_") for key in section)
    ):
        raise UsageError(
            "`model:` speaks of LoRA, but the model has no adapters; name torchtune_ext.policy.from_config, or a LoRA builder "
            f"of torchtune, and give it lora_attn_modules out of {sorted(attention)}"
        )
    if not modules:
        return None
    for name, module in modules.items():
        # FSDP2 cuts an NF4 weight between its scales of scales, of which there is one for 256 blocks.
        if isinstance(module.weight, NF4Tensor) and module.weight.quantization_factor.numel() % shards:
            raise UsageError(
                f"model.quantize_base: {name} has {module.weight.quantization_factor.numel()} groups of 256 NF4 blocks, which "
                f"{shards} ranks cannot share; leave it out of the targets, or take another number of ranks or shard_within"
            )
    first = next(iter(modules.values()))
    rank = first.lora_a.weight.shape[0]
    alpha, dropout = _scaling(first) * rank, getattr(first.dropout, "p", 0.0)
    if not 0 < alpha < math.inf:
        raise UsageError(
            f"model.lora_alpha={alpha}: expected a finite number above 0. An adapter's output is scaled by lora_alpha / "
            "lora_rank, so with this value it learns nothing; set model.lora_alpha=16, for instance"
        )
    # torchtune takes NaN for 0.
    if not 0 <= (share := section.get("lora_dropout", dropout)) < 1:
        raise UsageError(
            f"model.lora_dropout={share}: expected the share of an adapter's inputs that is dropped, at least 0 and below 1"
        )
    names = [hf_model.to_hf(f"{name}.weight", module.lora_b.weight)[0] for name, module in modules.items()]
    return AdapterSpec(
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        targets=tuple(dict.fromkeys(name.split(".")[-2] for name in names)),
        dora=isinstance(first, DoRALinear),
        quantized=any(isinstance(module.weight, NF4Tensor) for module in modules.values()),
    )


def adapted_modules(model: nn.Module) -> dict[str, LoRALinear | DoRALinear]:
    """Returns the linear layers that have an adapter, by name."""
    return {clean_name(n): m for n, m in model.named_modules() if isinstance(m, (LoRALinear, DoRALinear))}


def adapter_names(model: nn.Module) -> set[str]:
    """Returns the names of the adapters' parameters."""
    return {f"{name}.{p}" for name, module in adapted_modules(model).items() for p in module.adapter_params()}


def freeze_base(model: nn.Module, base_dtype: torch.dtype) -> None:
    """Freezes all parameters but the adapters, and holds them in `base_dtype`, or in NF4. No weights may exist yet."""
    adapters = adapter_names(model)
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if clean_name(f"{prefix}.{name}") in adapters:
                continue
            param.requires_grad_(False)
            if not isinstance(param, NF4Tensor):
                setattr(module, name, nn.Parameter(param.to(base_dtype), requires_grad=False))
    for module in adapted_modules(model).values():
        for linear in (module.lora_a, module.lora_b):
            # Changing the class, not the forward of each instance, lets torch.compile share one graph between layers.
            linear.__class__ = _MasterLinear
        if isinstance(module, DoRALinear):
            module.__class__ = _DoRALinear
    # torchtune's hook dequantizes the whole model for every state dict, even if a checkpoint takes only the adapters.
    model._state_dict_hooks.clear()


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Gives adapters their first values, with which they change nothing: B is zero, and m is the norm of W's rows."""
    # Every rank draws the whole of A on the CPU, so its bits are the same on any number of ranks.
    generator = torch.Generator().manual_seed(seed)
    for module in adapted_modules(model).values():
        rank, width = module.lora_a.weight.shape
        # Kaiming, as in the paper's code: uniform in +-1/sqrt(width).
        fill_param(module.lora_a.weight, (2 * torch.rand(rank, width, generator=generator) - 1) * width**-0.5)
        fill_param(module.lora_b.weight, torch.zeros(module.lora_b.weight.shape))
        if isinstance(module, DoRALinear):
            fill_param(module.magnitude, torch.linalg.norm(gather_full(module.get_parameter("weight")).float(), dim=1))


def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> Tensor:
    """Returns the matrix [out, in] that does what a weight and its adapter do together."""
    v = weight + scaling * (b @ a)
    return v if magnitude is None else (magnitude / torch.linalg.norm(v, dim=1).detach())[:, None] * v


def effective_weight(module: Any) -> Tensor:
    """Returns the weight of a layer inside a forward: merged with its adapter, if any, and with its gradient."""
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
    """Yields (Hugging Face name, whole tensor) of the model below the adapters, dequantized. It is a collective."""
    for name, full in base_tensors(model):
        yield hf_model.to_hf(name, full.to(dtype))


@torch.no_grad()
def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, whole tensor) of the model below the adapters, dequantized. It is a collective."""
    adapters = adapter_names(model)
    for name, param in model.named_parameters():
        if clean_name(name) not in adapters:
            yield clean_name(name), gather_full(param)


def merged_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of the model with its adapters, merged. It is a collective."""
    # Merging is in float32. The result is rounded only once, to `dtype`.
    for name, full in merged_tensors(model):
        yield hf_model.to_hf(name, full.to(dtype))


@torch.no_grad()
def merged_tensors(
    model: nn.Module,
    base: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    factor: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, whole tensor) of the model with its adapters, merged in float32. A collective.

    `base` rounds a weight before an adapter is merged into it, `factor` an adapter's A and B (not DoRA's magnitude).
    """
    adapters, modules = adapter_names(model), adapted_modules(model)
    for name, param in model.named_parameters():
        name = clean_name(name)
        if name in adapters:
            continue
        full = base(name, gather_full(param))
        module = modules.get(name.removesuffix(".weight"))
        if module is not None:
            a, b = (factor(gather_full(part.weight)).float() for part in (module.lora_a, module.lora_b))
            magnitude = gather_full(module.magnitude).float() if isinstance(module, DoRALinear) else None
            full = merge_weight(full.float(), a, b, _scaling(module), magnitude)
        yield name, full


@torch.no_grad()
def adapter_hf_tensors(model: nn.Module, hf_model: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (PEFT name, whole tensor) of only the adapters. It is a collective."""
    # torchtune's own export permutes q and k of Qwen2, too, whose layout is that of Hugging Face already.
    for name, module in adapted_modules(model).items():
        hf_name, b = hf_model.to_hf(f"{name}.weight", gather_full(module.lora_b.weight).to(dtype))
        stem = "base_model.model." + hf_name.removesuffix(".weight")
        yield f"{stem}.lora_A.weight", gather_full(module.lora_a.weight).to(dtype)
        yield f"{stem}.lora_B.weight", b
        if isinstance(module, DoRALinear):
            _, magnitude = hf_model.to_hf(f"{name}.weight", gather_full(module.magnitude).to(dtype)[:, None])
            yield f"{stem}.lora_magnitude_vector", magnitude[:, 0]


class AdapterDisabledReference:
    """The reference policy of an adapted model: the model with its adapters switched off, which costs no memory."""

    def __init__(self, model: nn.Module):
        self._model = model

    def activate(self) -> AbstractContextManager[None]:
        """Returns a context in which the model is the one that the adapters were put on."""
        return disable_adapter(self._model)


def _scaling(module: LoRALinear | DoRALinear) -> float:
    # torchtune stores the same number differently in the two classes.
    return module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank


class _MasterLinear(nn.Linear):
    """A linear layer that rounds its float32 master when it uses it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype))


class _DoRALinear(DoRALinear):
    """torchtune's DoRA, but with a bias that is not scaled and an output that is rounded only once."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return F.linear(x, dequantize_nf4(self.weight).to(x.dtype), self.bias)
        a, b = self.lora_a.weight, self.lora_b.weight
        with torch.no_grad():
            # torchtune pushes an identity matrix through A and B for this product.
            v = torch.addmm(dequantize_nf4(self.weight).to(a.dtype), b, a, alpha=self.scaling)
            norm = torch.linalg.norm(v, dim=1)
        lora = self.scaling * self.lora_b(self.lora_a(self.dropout(x)))
        # torchtune 0.6.1 scales the bias, too. Qwen2 has biases, and neither PEFT nor a merged weight scales them.
        return _ScaledLinear.apply(x, self.weight, self.bias, lora, self.magnitude / norm)


class _ScaledLinear(torch.autograd.Function):
    """Computes scale * (W x + lora) + bias over a frozen W in float32, and rounds it once."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, lora: Tensor, scale: Tensor) -> Tensor:
        """x [..., in], weight [out, in] and lora [..., out] in one dtype, scale [out] in float32 -> [..., out] as x."""
        rows, columns = x.flatten(0, -2), dequantize_nf4(weight).to(x.dtype).T
        # Both factors are float32. The scale m / |V| stays near 1, where bfloat16 has steps of 2^-7 and would miss most
        # updates of m. And if W x were rounded first, a change below half a step of W x would be rounded away.
        if x.is_cuda and x.dtype != torch.float32:
            # Only CUDA has `out_dtype`. It is as fast as an output in the dtype of x.
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
        # The norm in `scale` is a constant (eq. 11), so the gradient does not pass through it.
        dv = (scale * dy).to(dy.dtype)
        dx = dv @ dequantize_nf4(weight).to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dv, (dy * v).flatten(0, -2).sum(0, dtype=scale.dtype)
