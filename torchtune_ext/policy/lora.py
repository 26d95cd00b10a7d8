"""Low-rank adapters: which a model has, how they begin, which tensors of them travel, and the model without them.

    LoRA    y = W x + s B A x,                s = alpha / r          Hu et al. 2021, arXiv:2106.09685
    DoRA    y = m / |V| * (V x),  V = W + s B A                      Liu et al. 2024, arXiv:2402.09353, eq. 5 and 11
    QLoRA   one of these over a W stored in NF4                      Dettmers et al. 2023, arXiv:2305.14314

|V| is the norm of each row and a constant in the backward. The modules are torchtune's (`LoRALinear`, `DoRALinear`), chosen
in the YAML by its builders. Two things of torchtune 0.6.1 are replaced: its DoRA scales the bias of a linear layer, too
(Qwen2 has biases, and neither PEFT nor a merged weight agrees with that), and its PEFT export permutes q and k of Qwen2.
"""

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
from torchtune_ext.policy.sharded import dequantized, fill, whole
from torchtune_ext.run.errors import Mistake


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapters of a model, which all have one rank, one alpha and one dropout.

    Args:
        targets: the adapted linear layers by Hugging Face's names: "q_proj", "down_proj", ...
        dora: whether they are DoRA's, with a magnitude for each row.
        quantized: whether the weights below the adapters are in NF4.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    dora: bool
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
    model: TransformerDecoder, source: HFModel, node: Mapping[str, Any], shards: int = 1
) -> AdapterSpec | None:
    """Looks at the model that the YAML names and says which adapters it has; None where it has none.

    Args:
        model: may lie on the meta device.
        node: `model:` of the YAML, for its `lora_rank` and `lora_attn_modules`; torchtune passes over names that it does
            not know.

    Raises:
        ValueError: a rank of 0, targets that name nothing, a LoRA builder that is given no targets, or NF4 weights that the
            ranks cannot share.
    """
    if node.get("lora_rank", 1) < 1:
        raise Mistake(f"model.lora_rank={node['lora_rank']} must be at least 1")
    modules = adapted_modules(model)
    attention = {name for name, module in model.layers[0].attn.named_children() if hasattr(module, "weight")}
    unknown = sorted(set(node.get("lora_attn_modules") or ()) - attention)
    if unknown:
        raise Mistake(f"model.lora_attn_modules names {unknown}, which no layer has; there are {sorted(attention)}")
    builder = str(node.get("_component_")).rpartition(".")[2]
    if not modules and (re.search(r"(^|_)q?lora(_|$)", builder) or any(str(key).startswith("lora_") for key in node)):
        raise Mistake(
            "`model:` speaks of LoRA, but the model has no adapters; name torchtune_ext.policy.from_config, or a LoRA builder "
            f"of torchtune, and give it lora_attn_modules out of {sorted(attention)}"
        )
    if not modules:
        return None
    for name, module in modules.items():
        if isinstance(module.weight, NF4Tensor) and module.weight.quantization_factor.numel() % shards:
            raise Mistake(
                f"model.quantize_base: {name} has {module.weight.quantization_factor.numel()} groups of 256 NF4 blocks, which "
                f"{shards} ranks cannot share; leave it out of the targets, or take another number of ranks or shard_within"
            )
    first = next(iter(modules.values()))
    rank = first.lora_a.weight.shape[0]
    names = [source.to_hf(f"{name}.weight", module.lora_b.weight)[0] for name, module in modules.items()]
    return AdapterSpec(
        rank=rank,
        alpha=_scaling(first) * rank,
        dropout=getattr(first.dropout, "p", 0.0),
        targets=tuple(dict.fromkeys(name.split(".")[-2] for name in names)),
        dora=isinstance(first, DoRALinear),
        quantized=any(isinstance(module.weight, NF4Tensor) for module in modules.values()),
    )


def adapted_modules(model: nn.Module) -> dict[str, LoRALinear | DoRALinear]:
    """Returns the linear layers that have an adapter, by name."""
    return {clean_name(n): m for n, m in model.named_modules() if isinstance(m, (LoRALinear, DoRALinear))}


def adapter_names(model: nn.Module) -> set[str]:
    """Returns the names of the adapters' parameters; a model without adapters has none."""
    return {f"{name}.{p}" for name, module in adapted_modules(model).items() for p in module.adapter_params()}


def prepare(model: nn.Module, base_dtype: torch.dtype) -> None:
    """Freezes all but the adapters, before weights exist, and holds what is frozen in `base_dtype`; NF4 stays NF4."""
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
            # The forward is changed in the class, not in the instance, so that torch.compile shares it between layers.
            linear.__class__ = _MasterLinear
        if isinstance(module, DoRALinear):
            module.__class__ = _DoRALinear
    # torchtune's hook would dequantize the whole model for every checkpoint of the adapters.
    model._state_dict_hooks.clear()


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Gives adapters their first values, with which the model does what it did without them.

    A is uniform in +-1/sqrt(width) (Kaiming, as in the paper's code), B is zero, and m is the norm of W's rows. The bits are
    the same on any number of ranks.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in adapted_modules(model).values():
        rank, width = module.lora_a.weight.shape
        fill(module.lora_a.weight, (2 * torch.rand(rank, width, generator=generator) - 1) * width**-0.5)
        fill(module.lora_b.weight, torch.zeros(module.lora_b.weight.shape))
        if isinstance(module, DoRALinear):
            fill(module.magnitude, torch.linalg.norm(whole(module.weight).float(), dim=1))


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> Tensor:
    """Returns the one matrix that does what a weight [out, in] and its adapter do together."""
    v = weight + scaling * (b @ a)
    return v if magnitude is None else (magnitude / torch.linalg.norm(v, dim=1).detach())[:, None] * v


def effective_weight(module: nn.Linear | LoRALinear | DoRALinear) -> Tensor:
    """Returns the merged weight of a layer inside a forward, with gradient for the adapter, and the weight of a plain layer."""
    if not isinstance(module, (LoRALinear, DoRALinear)) or module.disabled:
        return module.weight
    magnitude = module.magnitude if isinstance(module, DoRALinear) else None
    weight = dequantized(module.weight).to(module.lora_a.weight.dtype)
    return merged(weight, module.lora_a.weight, module.lora_b.weight, _scaling(module), magnitude)


@torch.no_grad()
def base_hf_tensors(model: nn.Module, names: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of the model below the adapters, dequantized. It is a collective."""
    for name, full in base_tensors(model):
        yield names.to_hf(name, full.to(dtype))


@torch.no_grad()
def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, whole tensor) of the model below the adapters, dequantized. It is a collective."""
    adapters = adapter_names(model)
    for name, param in model.named_parameters():
        if clean_name(name) not in adapters:
            yield clean_name(name), whole(param)


def merged_hf_tensors(model: nn.Module, names: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (Hugging Face name, whole tensor) of the model with its adapters, merged in float32 and then rounded to `dtype`.

    It is a collective.
    """
    for name, full in merged_tensors(model):
        yield names.to_hf(name, full.to(dtype))


@torch.no_grad()
def merged_tensors(
    model: nn.Module,
    base: Callable[[str, Tensor], Tensor] = lambda name, weight: weight,
    factor: Callable[[Tensor], Tensor] = lambda weight: weight,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (torchtune's name, whole tensor) of the model with its adapters, merged in float32. It is a collective.

    Args:
        base: rounds a weight that is no adapter's, before an adapter is merged into it.
        factor: rounds a weight of an adapter, but for a magnitude of DoRA's, which is never rounded.
    """
    adapters, modules = adapter_names(model), adapted_modules(model)
    for name, param in model.named_parameters():
        name = clean_name(name)
        if name in adapters:
            continue
        full = base(name, whole(param))
        module = modules.get(name.removesuffix(".weight"))
        if module is not None:
            a, b = (factor(whole(part.weight)).float() for part in (module.lora_a, module.lora_b))
            magnitude = whole(module.magnitude).float() if isinstance(module, DoRALinear) else None
            full = merged(full.float(), a, b, _scaling(module), magnitude)
        yield name, full


@torch.no_grad()
def adapter_hf_tensors(model: nn.Module, names: HFModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields (PEFT name, whole tensor) of only the adapters. It is a collective."""
    for name, module in adapted_modules(model).items():
        hf_name, b = names.to_hf(f"{name}.weight", whole(module.lora_b.weight).to(dtype))
        stem = "base_model.model." + hf_name.removesuffix(".weight")
        yield f"{stem}.lora_A.weight", whole(module.lora_a.weight).to(dtype)
        yield f"{stem}.lora_B.weight", b
        if isinstance(module, DoRALinear):
            _, magnitude = names.to_hf(f"{name}.weight", whole(module.magnitude).to(dtype)[:, None])
            yield f"{stem}.lora_magnitude_vector", magnitude[:, 0]


class AdapterOff:
    """The reference policy of an adapted model: it is the model with its adapters switched off, and costs no memory."""

    def __init__(self, model: nn.Module):
        self._model = model

    def swapped_in(self) -> AbstractContextManager[None]:
        """Returns a context in which the model is the one that the adapters were put on."""
        return disable_adapter(self._model)


def _scaling(module: LoRALinear | DoRALinear) -> float:
    return module.scaling if isinstance(module, DoRALinear) else module.alpha / module.rank


class _MasterLinear(nn.Linear):
    """A linear layer that rounds its float32 master where it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _DoRALinear(DoRALinear):
    """torchtune's DoRA, with three differences.

    It adds the bias after the rows are scaled, does not push an identity matrix through B A, and rounds its output once.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return F.linear(x, dequantized(self.weight).to(x.dtype), self.bias)
        a, b = self.lora_a.weight, self.lora_b.weight
        with torch.no_grad():
            v = torch.addmm(dequantized(self.weight).to(a.dtype), b, a, alpha=self.scaling)
            norm = torch.linalg.norm(v, dim=1)
        lora = self.scaling * self.lora_b(self.lora_a(self.dropout(x)))
        return _ScaledLinear.apply(x, self.weight, self.bias, lora, self.magnitude / norm)


class _ScaledLinear(torch.autograd.Function):
    """Computes scale * (W x + lora) + bias over a frozen W in float32, and rounds it once.

    m / |V| stays near 1, where bfloat16 has steps of 2^-7: a scale rounded to it would not see most updates of m. Nor would
    one that finds W x rounded already: a change below half a step of W x is rounded away again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, lora: Tensor, scale: Tensor) -> Tensor:
        """Takes x [..., in], weight [out, in], lora [..., out] in one dtype, and scale [out] in float32.

        Returns [..., out] in the dtype of x.
        """
        rows, columns = x.flatten(0, -2), dequantized(weight).to(x.dtype).T
        if x.is_cuda and x.dtype != torch.float32:
            # Only CUDA has this; it is as fast as with an output in x's dtype.
            v = torch.mm(rows, columns, out_dtype=torch.float32)
        else:
            v = rows.float() @ columns.float()
        v = v.view(lora.shape) + lora
        ctx.save_for_backward(weight, scale, v.to(x.dtype))
        y = scale * v
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, v = ctx.saved_tensors
        dv = (scale * dy).to(dy.dtype)
        dx = dv @ dequantized(weight).to(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, dv, (dy * v).flatten(0, -2).sum(0, dtype=scale.dtype)
