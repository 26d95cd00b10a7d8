"""What a run needs before it runs: parameters, optimizer, activations, logits, engine. Estimates, printed by a dry run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torchtune.modules import TransformerDecoder

from torchtune_ext.kernels.linear_logprob import CHUNK_ELEMENTS

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each training device, line by line, and in main memory."""

    parameters: int  # of the model, a count
    device: dict[str, int]  # what -> bytes per training device
    host: dict[str, int]  # what -> bytes in main memory, all ranks of the machine together
    engine: dict[str, int]  # what -> bytes per engine device, KV cache aside

    def __str__(self) -> str:
        lines = [f"model: {self.parameters / 1e9:.3f} B parameters"]
        for title, table in (("training device", self.device), ("engine device", self.engine), ("host", self.host)):
            lines.append(f"{title}:")
            lines += [f"  {name:<46} {size / GIB:9.2f} GiB" for name, size in table.items()]
            lines.append(f"  {'total':<46} {sum(table.values()) / GIB:9.2f} GiB")
        return "\n".join(lines)


def estimate(
    make_model: Callable[[], TransformerDecoder],
    row_tokens: int,
    compute_dtype: torch.dtype,
    world_size: int,
    activation_checkpointing: bool,
    reference: bool,
    engine_tensor_parallel: int = 1,
) -> MemoryNeed:
    """Estimates from shapes on the meta device; an optimizer with two moments (AdamW) is assumed.

    Activations of a layer are what its linear layers, norms and fused attention keep for the backward; with
    checkpointing, one input per layer and the inside of one layer.
    """
    with torch.device("meta"):
        model = make_model()
    total = sum(p.numel() for p in model.parameters())
    width = model.tok_embeddings.embedding_dim
    vocab = model.tok_embeddings.num_embeddings
    layer = model.layers[0]
    layer_parameters = sum(p.numel() for p in layer.parameters())
    outer = total - layer_parameters * len(model.layers)
    size = compute_dtype.itemsize
    attention, ffn = layer.attn.num_heads * layer.attn.head_dim, layer.mlp.w1.out_features
    # kept per token: inputs of two norms and of attention's and the MLP's linears, q k v as attention sees them (heads
    # expanded) and its output, gate, up, their product
    inside = row_tokens * size * (4 * width + 4 * attention + 4 * ffn)
    layers = len(model.layers)
    kept = layers * row_tokens * width * size + inside if activation_checkpointing else layers * inside
    logits = min(CHUNK_ELEMENTS, row_tokens * vocab) * 4 * 3
    unsharded = (outer + 2 * layer_parameters) * size if world_size > 1 or size < 4 else 0
    return MemoryNeed(
        parameters=total,
        device={
            "weights, float32 master, sharded": 4 * total // world_size,
            "gradients, float32, sharded": 4 * total // world_size,
            "AdamW moments, float32, sharded": 8 * total // world_size,
            f"gathered weights, {str(compute_dtype)[6:]}": unsharded,
            f"activations of a row of {row_tokens} tokens": kept,
            "logits of one chunk, float32, with gradient": logits,
        },
        host={
            "published weights in shared memory": size * total,
            "reference weights, float32": 4 * total * reference,
            "weights while a reference is swapped in": 4 * total * reference,
        },
        engine={
            f"weights, {str(compute_dtype)[6:]} (the KV cache comes on top)": size * total // engine_tensor_parallel
        },
    )
