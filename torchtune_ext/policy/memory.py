"""Estimates what memory the policy takes of a training device: weights, optimizer, activations, logits.

Every figure comes from shapes alone, so that a model on the meta device is enough. The rows are not all at their highest in the
same moment; their sum is an upper bound of the peak, as far as the shapes go (tests/unit/policy/test_memory.py counts it).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_ext.kernels.fp8_quantize import LINE_BYTES, TILE_BYTES
from torchtune_ext.kernels.linear_logprob import CHUNK_ELEMENTS
from torchtune_ext.policy import lora
from torchtune_ext.policy.fp8.linear import Fp8Config
from torchtune_ext.policy.fp8.plan import linear_layers

GIB = 1 << 30
ADAPTER_SHARE = 0.01  # of the values of a model, that a typical adapter has
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits a value, 8 bits a block of 64, and a float32 for 256 blocks of these


@dataclass(frozen=True, slots=True)
class Sizes:
    """What of a model decides about memory. These are numbers of values where nothing else is said."""

    total: int  # all parameters
    trained: int  # those that are trained
    frozen_bytes: int  # bytes of the others, as the trainer holds them
    layers: int  # how many layers there are
    layer: int  # parameters of one layer
    outer: int  # parameters beside the layers: embedding, output projection, last norm
    trained_layer: int  # trained parameters of one layer
    head: int  # parameters of the output projection where it is trained, else 0
    largest: int  # parameters of the largest tensor
    largest_nf4: int  # of the largest one in NF4
    width: int  # of the model
    vocab: int  # of the output projection
    mlp: int  # width inside the MLP
    rope_bytes: int  # bytes of the tables of RoPE, which no device shares
    keys: int  # keys and values of a token in all layers
    heads: int  # heads of queries in a layer
    kv_heads: int  # heads of keys and values in a layer
    inside: float  # bytes a token that one layer keeps for the backward
    dtype: torch.dtype  # in which forward and backward compute
    engine_bytes: int  # bytes of all weights, as the engine holds them

    @property
    def frozen(self) -> bool:
        """Says whether a part of the model is frozen, as it is below adapters."""
        return self.trained < self.total

    def with_adapters(self, nf4: bool = False) -> "Sizes":
        """Returns about what the same model takes with adapters over frozen weights, in NF4 if asked for."""
        trained = int(ADAPTER_SHARE * self.total)
        inner = self.total - self.outer
        base = self.dtype.itemsize * self.outer + (NF4_BYTES if nf4 else self.dtype.itemsize) * inner
        return replace(
            self,
            total=self.total + trained,
            trained=trained,
            trained_layer=trained // self.layers,
            frozen_bytes=int(base),
            head=0,
            largest_nf4=self.width * self.mlp if nf4 else 0,
        )


def sizes_of(
    model: TransformerDecoder,
    compute_dtype: torch.dtype,
    fp8: tuple[Fp8Config | None, Fp8Config | None] = (None, None),
    engine_dtype: torch.dtype | None = None,
) -> Sizes:
    """Reads the sizes of a model, which may lie on the meta device and stays as it is.

    Activations of a layer are what its linear layers, norms and fused attention keep for the backward when nothing is compiled.
    Layers in FP8 keep their inputs as columns.

    Args:
        compute_dtype: the dtype of forward and backward.
        fp8: how the trainer's layers and the engine's compute, as in `PrecisionConfig.sides`.
        engine_dtype: the dtype of the engine; None: that of forward and backward.
    """
    trainer_fp8, engine_fp8 = fp8
    adapters = lora.adapter_names(model)
    params = dict(model.named_parameters())
    trained = adapters or params.keys()
    total = sum(p.numel() for p in params.values())
    layer = model.layers[0]
    in_layer = dict(layer.named_parameters(prefix="layers.0"))
    layer_parameters = sum(p.numel() for p in in_layer.values())
    width, vocab = model.tok_embeddings.embedding_dim, model.tok_embeddings.num_embeddings
    size, attn, mlp = compute_dtype.itemsize, layer.attn, layer.mlp.w1.weight.shape[0]
    attention = attn.num_heads * attn.head_dim
    # A layer keeps, for each token, the float32 inputs of its two norms; the inputs of attention's and the MLP's linear layers;
    # q, k and v as attention sees them (heads expanded), its output and log-sum-exp; the angles of RoPE in float32 for q and k;
    # gate, up, SiLU and their product. Norms of q and k keep theirs in float32, too.
    normed = (attn.num_heads + attn.num_kv_heads) * attn.head_dim if attn.q_norm else 0
    inside = size * (2 * width + 4 * attention + 4 * mlp) + 4 * (
        2 * width + normed + attn.num_heads + 2 * attn.head_dim
    )
    converted = in_fp8(model, engine_fp8, trainer_fp8 is not None).values()
    sent = (engine_dtype or compute_dtype).itemsize
    below = total - sum(params[name].numel() for name in adapters)
    # With adapters, the output projection gets a gradient where it has one itself.
    own_head = not isinstance(model.output, TiedLinear) and any(name.startswith("output.") for name in adapters)
    return Sizes(
        total=total,
        trained=sum(params[name].numel() for name in trained),
        frozen_bytes=sum(_bytes(p, compute_dtype) for name, p in params.items() if name not in trained),
        layers=len(model.layers),
        layer=layer_parameters,
        outer=total - layer_parameters * len(model.layers),
        trained_layer=sum(p.numel() for name, p in in_layer.items() if name in trained),
        head=vocab * width if own_head or not adapters else 0,
        largest=max(p.numel() for p in params.values()),
        largest_nf4=max((p.numel() for p in params.values() if isinstance(p, NF4Tensor)), default=0),
        width=width,
        vocab=vocab,
        mlp=mlp,
        rope_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        keys=2 * sum(block.attn.num_kv_heads * block.attn.head_dim for block in model.layers),
        heads=attn.num_heads,
        kv_heads=attn.num_kv_heads,
        inside=inside + _kept_by_fp8(model, trainer_fp8, size),
        dtype=compute_dtype,
        engine_bytes=int(sent * below - (sent - TILE_BYTES) * sum(out * features for out, features in converted)),
    )


def trainer_rows(
    sizes: Sizes,
    row_tokens: int,
    world_size: int,
    activation_checkpointing: bool,
    optimizer_bytes: float = 8.0,
    shard_within: int | None = None,
) -> dict[str, int]:
    """Returns what each training device holds, in bytes by name. Allowances of a GPU are not in it.

    With checkpointing, activations are one input per layer and the inside of one layer.

    Args:
        row_tokens: tokens of a packed row.
        world_size: training devices, over which FSDP2 shards.
        activation_checkpointing: whether layers are computed again in the backward.
        optimizer_bytes: what the optimizer keeps for one trained value; AdamW has two moments in float32.
        shard_within: training devices that share the states; each group of so many holds all of them. None: all devices do.
    """
    shards = min(shard_within or world_size, world_size)
    size, inside = sizes.dtype.itemsize, sizes.inside * row_tokens
    # The backward of an MLP holds three gradients of its width beside what the layer has kept; the last norm and the log-probs
    # keep their inputs and a gradient.
    around = row_tokens * (3 * size * sizes.mlp + sizes.width * (4 + 2 * size))
    if activation_checkpointing:
        kept = sizes.layers * row_tokens * sizes.width * size + inside + around
    else:
        kept = sizes.layers * inside + around
    # Of a chunk, logits and probabilities are there at a time, in float32: 8 bytes a logit.
    chunk = min(CHUNK_ELEMENTS, row_tokens * sizes.vocab)
    # On one device only the float32 masters of a whole model go through FSDP2; adapters are rounded where they are used.
    sharded = world_size > 1 or (size < 4 and not sizes.frozen)
    # Below adapters, what is gathered has the dtype in which it is held, which may be NF4.
    gathered = sizes.outer + 2 * sizes.layer
    width = sizes.frozen_bytes / (sizes.total - sizes.trained) if sizes.frozen else size
    step = {
        "gradients, float32": 4 * sizes.trained // shards,
        f"activations of a row of {row_tokens} tokens": int(kept),
        "logits of one chunk, with gradient": 8 * chunk,
        "gradients before they are shared out": _gradients_in_flight(sizes, sharded, shards, int(kept)),
    }
    # Between steps the gate scores a few rows in float32: one layer at a time beside the table of tokens, and one of its
    # weights twice more while an adapter is merged into it (`streamed_logprobs`).
    gate = 4 * (sizes.vocab * sizes.width + sizes.layer + 2 * sizes.width * sizes.mlp) + sizes.rope_bytes
    return {
        "frozen weights, as they are held": sizes.frozen_bytes // shards,
        "weights, float32 master": 4 * sizes.trained // shards,
        **step,
        "state of the optimizer": int(optimizer_bytes * sizes.trained) // shards,
        "table of RoPE, float32": sizes.rope_bytes,
        f"gathered weights, {str(sizes.dtype)[6:]}": int(width * gathered) if sharded else 0,
        "largest NF4 weight while it is dequantized": (8 + size) * sizes.largest_nf4,
        "the gate's pass in float32, beyond what a step takes": max(0, gate - sum(step.values())),
    }


def _gradients_in_flight(sizes: Sizes, sharded: bool, shards: int, activations: int) -> int:
    """Returns the most that whole gradients take, in bytes, in one of three moments of the backward.

    At its beginning the output projection's gradient is summed up in float32 and then rounded. In the middle that one waits for
    the end, beside the gradient of a layer and two float32 copies that FSDP2 reduces. At the end the gradients of embedding and
    output projection are reduced together, when the activations are gone.
    """
    size = sizes.dtype.itemsize
    begin = (4 + size) * sizes.head
    if not sharded:
        return begin
    middle = size * sizes.head + (size + 8) * sizes.trained_layer
    outer = sizes.trained - sizes.trained_layer * sizes.layers
    end = (size + 4) * outer + 4 * outer // shards - activations
    return max(begin, middle, end)


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
    less = LINE_BYTES - size
    more = {"q_proj": less, "o_proj": LINE_BYTES, "gate_proj": less, "down_proj": less}
    widths = {name: width for name, (_, width) in in_fp8(model, config, trains=True).items() if ".layers.0." in name}
    return sum(more.get(name.rpartition(".")[2], 0) * width for name, width in widths.items())


def _bytes(param: Tensor, dtype: torch.dtype) -> int:
    """Returns what a frozen parameter takes that is held in `dtype`, or in NF4 (Dettmers et al. 2023, section 3)."""
    return int(param.numel() * NF4_BYTES) if isinstance(param, NF4Tensor) else param.numel() * dtype.itemsize
