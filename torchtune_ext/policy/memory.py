"""Estimates what memory a run needs, for parameters, optimizer, activations, logits and engine. A dry run prints it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TransformerDecoder

from torchtune_ext.kernels.fp8_quantize import LINE_BYTES, TILE_BYTES
from torchtune_ext.kernels.linear_logprob import CHUNK_ELEMENTS
from torchtune_ext.policy import lora
from torchtune_ext.policy.fp8.gain import engine_memory
from torchtune_ext.policy.fp8.linear import Fp8Config
from torchtune_ext.policy.fp8.plan import Fp8Receipt, linear_layers

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a run needs. Three dicts say for what how many bytes are needed.

    Args:
        parameters: the number of values in the model.
        trained: how many of them are trained.
        device: on each training device.
        engine: on each engine device, KV cache aside.
        host: in main memory, by all ranks of the machine together.
    """

    parameters: int
    trained: int
    device: dict[str, int]
    engine: dict[str, int]
    host: dict[str, int]


def estimate(
    model: TransformerDecoder,
    row_tokens: int,
    compute_dtype: torch.dtype,
    world_size: int,
    activation_checkpointing: bool,
    fp8: tuple[Fp8Config | None, Fp8Config | None] = (None, None),
    reference: bool = False,
    engine_gpus: int = 1,
    publishes_all: bool = True,
) -> MemoryNeed:
    """Estimates the need from the shapes of a model. It assumes an optimizer with two moments (AdamW).

    Activations of a layer are what its linear layers, norms and fused attention keep for the backward. With checkpointing they
    are one input per layer and the inside of one layer. Layers in FP8 keep their inputs as columns.

    Args:
        model: may lie on the meta device, and stays as it is.
        fp8: how the trainer's layers and the engine's compute, as in `PrecisionConfig.sides`.
        reference: whether a second set of weights is kept, for a KL term.
        publishes_all: whether whole weights go to the engine for a model with adapters, too.
    """
    trainer_fp8, engine_fp8 = fp8
    adapters = lora.adapter_names(model)
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for n, p in model.named_parameters() if not adapters or n in adapters)
    frozen = sum(_bytes(p, compute_dtype) for n, p in model.named_parameters() if adapters and n not in adapters)
    width = model.tok_embeddings.embedding_dim
    vocab = model.tok_embeddings.num_embeddings
    layer = model.layers[0]
    layer_parameters = sum(p.numel() for p in layer.parameters())
    outer = total - layer_parameters * len(model.layers)
    size = compute_dtype.itemsize
    attention, ffn = layer.attn.num_heads * layer.attn.head_dim, layer.mlp.w1.weight.shape[0]
    # A layer keeps, for each token, the inputs of two norms and of attention's and the MLP's linear layers, q, k and v as
    # attention sees them (heads expanded) and its output, gate, up, and their product. Qwen3 also keeps q and k before their
    # norms.
    normed = (layer.attn.num_heads + layer.attn.num_kv_heads) * layer.attn.head_dim if layer.attn.q_norm else 0
    inside = row_tokens * size * (4 * width + 4 * attention + 4 * ffn + normed)
    layers = len(model.layers)
    inside += row_tokens * _kept_by_fp8(model, trainer_fp8, size)
    kept = layers * row_tokens * width * size + inside if activation_checkpointing else layers * inside
    logits = min(CHUNK_ELEMENTS, row_tokens * vocab) * 4 * 3
    quantized = max((p.numel() for p in model.parameters() if isinstance(p, NF4Tensor)), default=0)
    # On one device only the float32 masters of a whole model go through FSDP2; adapters are rounded where they are used.
    unsharded = (outer + 2 * layer_parameters) * size if world_size > 1 or (size < 4 and not frozen) else 0
    converted = in_fp8(model, engine_fp8, trainer_fp8 is not None).values()
    sent = size * total - (size - TILE_BYTES) * sum(out * width for out, width in converted)
    weights = f"weights, {'FP8 and ' if engine_fp8 else ''}{str(compute_dtype)[6:]}"
    return MemoryNeed(
        parameters=total,
        trained=trained,
        device={
            **({"frozen weights, as they are held": frozen // world_size} if frozen else {}),
            "weights, float32 master": 4 * trained // world_size,
            "gradients, float32": 4 * trained // world_size,
            "AdamW moments, float32": 8 * trained // world_size,
            f"gathered weights, {str(compute_dtype)[6:]}": unsharded,
            f"activations of a row of {row_tokens} tokens": kept,
            "logits of one chunk with gradient, float32": logits,
            **({"largest NF4 weight while it is dequantized": (8 + size) * quantized} if quantized else {}),
        },
        engine={f"{weights} (KV cache comes on top)": int(sent) // engine_gpus},
        host={
            "published weights in shared memory": int(sent)
            if publishes_all or quantized or engine_fp8 or not frozen
            else size * trained,
            "reference and weights swapped out, float32": 8 * total * (reference and not frozen),
        },
    )


def in_fp8(model: TransformerDecoder, config: Fp8Config | None, trains: bool) -> dict[str, tuple[int, int]]:
    """Returns Hugging Face name -> (out, in) of the layers that compute in FP8, as `fp8.plan.linear_layers` has them."""
    layers = linear_layers(model, config, trains)[0] if config else ()
    return {layer.name: layer.shape for layer in layers if layer.reason is None}


def _kept_by_fp8(model: TransformerDecoder, config: Fp8Config | None, size: int) -> float:
    """Returns how many bytes a token the first layer keeps more than without FP8; a negative number says that it keeps less.

    Attention keeps its own output, which output_proj reads, in any case.
    """
    if config is None or config.save_activations != "fp8" or lora.adapter_names(model):
        return 0.0
    inputs = {
        "q_proj": LINE_BYTES - size,
        "o_proj": LINE_BYTES,
        "gate_proj": LINE_BYTES - size,
        "down_proj": LINE_BYTES - size,
    }
    found = {
        name.rpartition(".")[2]: width
        for name, (_, width) in in_fp8(model, config, trains=True).items()
        if ".layers.0." in name
    }
    return sum(more * found[kind] for kind, more in inputs.items() if kind in found)


def _bytes(param: Tensor, dtype: torch.dtype) -> int:
    """Returns what a frozen parameter takes that is held in `dtype`, or in NF4: that has 4 bits a value, 8 bits a block of 64,
    and a float32 for 256 of these (Dettmers et al. 2023, section 3)."""
    if isinstance(param, NF4Tensor):
        return int(param.numel() * (0.5 + 1 / 64 + 4 / (64 * 256)))
    return param.numel() * dtype.itemsize


def memory_table(
    model: TransformerDecoder,
    row_tokens: int,
    compute_dtype: torch.dtype,
    activation_checkpointing: bool,
    fp8: tuple[Fp8Config | None, Fp8Config | None] = (None, None),
    **options: Any,
) -> str:
    """Writes the estimates for 1, 2, 4 and 8 training devices as columns in GiB, and which layers are in FP8.

    Args:
        options: the further arguments of `estimate`.
    """
    needs = {
        n: estimate(model, row_tokens, compute_dtype, n, activation_checkpointing, fp8, **options) for n in (1, 2, 4, 8)
    }
    share = needs[1].trained / needs[1].parameters
    adapters = f" ({share:.2%} of them trained)" if share < 1 else ""
    lines = [f"{needs[1].parameters / 1e9:.3f} B parameters{adapters}; GiB by number of training devices"]
    lines.append(f"{'':<50}" + "".join(f"{n:>9}" for n in needs))
    for part, title in (("device", "each training device"), ("engine", "each engine device"), ("host", "host")):
        lines.append(title)
        columns = [getattr(need, part) for need in needs.values()]
        lines += [f"  {name:<48}" + "".join(f"{c[name] / GIB:>9.2f}" for c in columns) for name in columns[0]]
        lines.append(f"  {'total':<48}" + "".join(f"{sum(c.values()) / GIB:>9.2f}" for c in columns))
    trainer_fp8, engine_fp8 = fp8
    if engine_fp8:
        receipt = Fp8Receipt(engine_fp8, compute_dtype, linear_layers(model, engine_fp8, trainer_fp8 is not None)[0])
        lines += [receipt.table(), f"  engine: {engine_memory(model, receipt)}"]
    return "\n".join(lines)
