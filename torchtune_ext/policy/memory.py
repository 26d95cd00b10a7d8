"""Estimates the policy's memory on a training device from the shapes of a meta model."""

from typing import Any

import torch
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_ext.kernels.fp8_quantize import LINE_BYTES_PER_VALUE, TILE_BYTES_PER_VALUE
from torchtune_ext.kernels.linear_logprob import chunk_elements
from torchtune_ext.policy import lora
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.fp8.plan import linear_layers

GIB = 1 << 30
# 4 bits per value, 8 bits per block of 64 values, and a float32 per 256 blocks.
FROZEN_ROW = "frozen weights, as stored"
NF4_BYTES_PER_VALUE = 0.5 + 1 / 64 + 4 / (64 * 256)


class ModelSizes:
    """Sizes of a model that determine its memory: numbers of values, unless the name says bytes.

    Args:
        model: the model; it may be on the meta device. Its layers then share RoPE tables as in
            `lora.freeze_base`.
        compute_dtype: dtype of forward and backward.
        fp8: FP8 settings of trainer and engine, as in `PrecisionConfig.fp8_configs`.
        engine_dtype: dtype of the engine; None: `compute_dtype`.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        compute_dtype: torch.dtype,
        fp8: tuple[Fp8Config | None, Fp8Config | None] = (None, None),
        engine_dtype: torch.dtype | None = None,
    ):
        trainer_fp8, engine_fp8 = fp8
        params, adapters = dict(model.named_parameters()), lora.adapter_names(model)
        trained = adapters or params.keys()
        if adapters:
            lora.share_rope(model)
        frozen = [param for name, param in params.items() if name not in trained]
        layers: list[Any] = [*model.layers]  # torch types a layer's attributes as any tensor or module
        layer, itemsize = layers[0], compute_dtype.itemsize
        attn = layer.attn

        self.dtype = compute_dtype
        self.total_params = sum(p.numel() for p in params.values())
        self.trained_params = sum(params[name].numel() for name in trained)
        # Frozen weights in the trainer: NF4 (Dettmers et al. 2023, section 3), or the compute
        # dtype.
        self.frozen_bytes = sum(
            int(p.numel() * NF4_BYTES_PER_VALUE) if isinstance(p, NF4Tensor) else p.numel() * itemsize for p in frozen
        )
        self.layers = len(model.layers)
        self.layer_params = sum(p.numel() for p in layer.parameters())
        # Embedding, output projection, last norm.
        self.non_layer_params = self.total_params - self.layer_params * self.layers
        in_layer = dict(layer.named_parameters(prefix="layers.0"))
        self.trained_layer_params = sum(p.numel() for name, p in in_layer.items() if name in trained)
        # The largest tensor, and the largest tensor in NF4.
        self.largest_param = max(p.numel() for p in params.values())
        self.largest_nf4 = max((p.numel() for p in params.values() if isinstance(p, NF4Tensor)), default=0)
        self.width, self.vocab = model.tok_embeddings.embedding_dim, model.tok_embeddings.num_embeddings
        self.mlp = layer.mlp.w1.weight.shape[0]  # width inside the MLP
        # The output projection, if it gets a gradient. In a model with adapters, it gets a gradient
        # only if it has an adapter.
        own_head = not isinstance(model.output, TiedLinear) and any(name.startswith("output.") for name in adapters)
        self.trained_head_params = self.vocab * self.width if own_head or not adapters else 0
        self.rope_bytes = sum(buffer.nbytes for buffer in model.buffers())  # not sharded
        # Keys and values per token in all layers, and the heads of one layer.
        self.kv_values_per_token = 2 * sum(block.attn.num_kv_heads * block.attn.head_dim for block in layers)
        self.heads, self.kv_heads = attn.num_heads, attn.num_kv_heads

        # Logits and probabilities of a chunk exist at the same time, in float32; with a soft cap
        # also its slope.
        self.bytes_per_logit = 12 if getattr(model, "logit_softcap", None) else 8

        # For the backward, an uncompiled layer saves per token: the float32 inputs of its norms,
        # including the norms of q and k; the inputs of the linear layers of attention and MLP;
        # attention's inputs q, k and v (with expanded heads), its output and log-sum-exp; the
        # angles of RoPE in float32; gate, up, SiLU and their product.
        norm_inputs = (attn.num_heads + attn.num_kv_heads) * attn.head_dim if attn.q_norm else 0
        norms = sum(
            hasattr(layer.get_submodule(name), "eps") for name in ("sa_norm", "sa_scale", "mlp_norm", "mlp_scale")
        )
        float32_values = norms * self.width + norm_inputs + attn.num_heads + 2 * attn.head_dim
        activation_bytes = (
            itemsize * (2 * self.width + 4 * attn.num_heads * attn.head_dim + 4 * self.mlp) + 4 * float32_values
        )
        self.layer_bytes_per_token = activation_bytes + _fp8_saved_bytes(model, trainer_fp8, itemsize)
        # Bytes of all weights in the engine, without adapters. Layers in FP8 are stored as tiles.
        engine_itemsize = (engine_dtype or compute_dtype).itemsize
        fp8_params = sum(
            out * width for out, width in fp8_layer_shapes(model, engine_fp8, trainer_fp8 is not None).values()
        )
        base_params = self.total_params - sum(params[name].numel() for name in adapters)
        self.engine_bytes = int(engine_itemsize * base_params - (engine_itemsize - TILE_BYTES_PER_VALUE) * fp8_params)

    @property
    def has_frozen_params(self) -> bool:
        """Whether a part of the model is frozen, as the base of adapters is."""
        return self.trained_params < self.total_params


def trainer_memory(
    sizes: ModelSizes,
    row_tokens: int,
    world_size: int,
    activation_checkpointing: bool,
    optimizer_bytes: float = 8.0,
    shard_within: int | None = None,
    gpu_bytes: int = 0,
) -> dict[str, int]:
    """Estimates the memory of each training device, without the allowances of a GPU.

    The entries do not all peak at the same time, so their sum is an upper bound of the peak.

    Args:
        sizes: sizes of the model.
        row_tokens: tokens of a packed row.
        world_size: number of training devices over which FSDP2 shards.
        activation_checkpointing: whether the backward recomputes layers.
        optimizer_bytes: bytes of optimizer state per trained value; AdamW has two moments in
            float32.
        shard_within: number of devices that share one copy of the states (HSDP); None: all.
        gpu_bytes: memory of each GPU, which determines the chunks of logits; 0: a CPU.

    Returns:
        Name of an entry -> bytes.
    """
    shards = min(shard_within or world_size, world_size)
    itemsize, layer_bytes = sizes.dtype.itemsize, sizes.layer_bytes_per_token * row_tokens
    # In addition to saved activations, the backward of an MLP holds three gradients of its width.
    # The last norm and the log-probs save their inputs and hold a gradient.
    other_bytes = row_tokens * (3 * itemsize * sizes.mlp + sizes.width * (4 + 2 * itemsize))
    # With checkpointing, each layer saves its input, and one layer at a time saves its activations.
    inputs = sizes.layers * row_tokens * sizes.width * itemsize
    activation_bytes = (inputs + layer_bytes if activation_checkpointing else sizes.layers * layer_bytes) + other_bytes
    chunk = min(chunk_elements(gpu_bytes), row_tokens * sizes.vocab)
    # On one device only a model without adapters goes through FSDP2 (`build_policy`).
    sharded = world_size > 1 or (itemsize < 4 and not sizes.has_frozen_params)
    # FSDP2 gathers the next layer while one computes. Frozen weights are gathered in their stored
    # dtype, which may be NF4.
    gathered = sizes.non_layer_params + 2 * sizes.layer_params
    bytes_per_value = (
        sizes.frozen_bytes / (sizes.total_params - sizes.trained_params) if sizes.has_frozen_params else itemsize
    )
    return {
        FROZEN_ROW: sizes.frozen_bytes // shards,
        "weights, float32 master": 4 * sizes.trained_params // shards,
        "gradients, float32": 4 * sizes.trained_params // shards,
        f"activations of a row of {row_tokens} tokens": int(activation_bytes),
        "logits of one chunk, with gradient": sizes.bytes_per_logit * chunk,
        "unsharded gradients, before the reduction": _gradients_in_flight(
            sizes, sharded, shards, int(activation_bytes)
        ),
        "optimizer state": int(optimizer_bytes * sizes.trained_params) // shards,
        "RoPE table, float32": sizes.rope_bytes,
        f"gathered weights, {str(sizes.dtype)[6:]}": int(bytes_per_value * gathered) if sharded else 0,
        "largest NF4 weight while it is dequantized": (8 + itemsize) * sizes.largest_nf4,
    }


def _gradients_in_flight(sizes: ModelSizes, sharded: bool, shards: int, activations: int) -> int:
    """The peak bytes of unsharded gradients in the backward."""
    itemsize = sizes.dtype.itemsize
    # First, the output projection's gradient is summed in float32 and then rounded.
    begin = (4 + itemsize) * sizes.trained_head_params
    if not sharded:
        return begin
    # Then this gradient stays in memory until the end, in addition to the gradient of one layer and
    # two float32 copies that FSDP2 reduces.
    middle = itemsize * sizes.trained_head_params + (itemsize + 8) * sizes.trained_layer_params
    # Finally, FSDP2 reduces the gradients of embedding and output projection together, after the
    # activations have been freed.
    outer = sizes.trained_params - sizes.trained_layer_params * sizes.layers
    end = (itemsize + 4) * outer + 4 * outer // shards - activations
    return max(begin, middle, end)


def fp8_layer_shapes(model: TransformerDecoder, config: Fp8Config | None, trains: bool) -> dict[str, tuple[int, int]]:
    """Returns Hugging Face name -> (out-features, in-features) of the layers in FP8."""
    layers = linear_layers(model, config, trains)[0] if config else ()
    return {layer.name: layer.shape for layer in layers if layer.reason is None}


def _fp8_saved_bytes(model: TransformerDecoder, config: Fp8Config | None, itemsize: int) -> float:
    """The additional saved bytes per token of the first layer with FP8; they may be negative."""
    if config is None or config.save_activations != "fp8" or lora.adapter_names(model):
        return 0.0
    # A layer in FP8 saves the columns of its input instead of the input, and layers with the same
    # input save them once. The input of o_proj is attention's output, which attention saves anyway,
    # so its columns are additional.
    replaced_input = LINE_BYTES_PER_VALUE - itemsize
    added_bytes = {
        "q_proj": replaced_input,
        "o_proj": LINE_BYTES_PER_VALUE,
        "gate_proj": replaced_input,
        "down_proj": replaced_input,
    }
    widths = {
        name: width for name, (_, width) in fp8_layer_shapes(model, config, trains=True).items() if ".layers.0." in name
    }
    return sum(added_bytes.get(name.rpartition(".")[2], 0) * width for name, width in widths.items())
