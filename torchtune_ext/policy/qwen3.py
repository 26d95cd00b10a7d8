"""Builds the dense Qwen3 models, which torchtune 0.6.1 lacks, with its modules and the arguments of its builders.

    tune run grpo_lora --config grpo/qwen3_1_7B_atr_grpo_lora

Qwen3 (Qwen Team 2025, arXiv:2505.09388, section 2) is Qwen2 with three changes in its attention:

* q and k of each head pass through an RMSNorm *before* RoPE; `MultiHeadAttention` norms after it, which is another model;
* the size of a head is 128 whatever the width: 0.6B has 16 heads of 128 in a width of 1024;
* q, k and v have no bias.

Every builder of a published size takes what its general form takes, so that `max_seq_len: 8192` in the YAML is enough to make
the RoPE table shorter.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import LORA_ATTN_MODULES, DoRALinear, LoRALinear

from torchtune_ext.run.errors import Mistake


class Qwen3Attention(MultiHeadAttention):
    """torchtune's attention, except that q and k are normed first and rotated then."""

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Returns [B, T, D].

        Args:
            x: [B, T, D], of which the queries are made.
            y: the same for keys and values; None reads them from the cache.
        """
        q = self._rotated(self.q_norm(_heads(self.q_proj(x), self.num_heads)), input_pos)
        if y is None:
            k, v = self.kv_cache.k_cache, self.kv_cache.v_cache
        else:
            k = self._rotated(self.k_norm(_heads(self.k_proj(y), self.num_kv_heads)), input_pos)
            v = _heads(self.v_proj(y), self.num_kv_heads).transpose(1, 2)
            if self.kv_cache is not None and self.cache_enabled:
                k, v = self.kv_cache.update(k, v)
        queries_per_key = self.num_heads // self.num_kv_heads
        attended = self._attention_call(
            q,
            k.repeat_interleave(queries_per_key, dim=1),
            v.repeat_interleave(queries_per_key, dim=1),
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None and self.is_causal,
        )
        return self.output_proj(attended.transpose(1, 2).flatten(2))

    def _rotated(self, heads: Tensor, input_pos: Tensor | None) -> Tensor:
        """Rotates [B, T, H, head_dim] by position and returns [B, H, T, head_dim]."""
        return self.pos_embeddings(heads, input_pos=input_pos).transpose(1, 2)


def _heads(projected: Tensor, num_heads: int) -> Tensor:
    """Cuts [B, T, H * head_dim] into heads and returns [B, T, H, head_dim]."""
    return projected.unflatten(-1, (num_heads, -1))


def _plain(name: str, width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=False)


def qwen3(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int = 128,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    linear: Callable[[str, int, int], nn.Module] = _plain,
) -> TransformerDecoder:
    """Builds a Qwen3 decoder. The arguments are those of torchtune's `qwen2`, and two more.

    Args:
        head_dim: the size of queries, keys and values, which does not depend on `embed_dim`.
        linear: makes a linear layer of its name ("q_proj", "k_proj", "v_proj", "output_proj", "mlp", "output"), its inputs
            and its outputs.
    """
    rope = Qwen2RotaryPositionalEmbeddings(dim=head_dim, max_seq_len=max_seq_len, base=rope_base)
    layers = nn.ModuleList()
    for _ in range(num_layers):
        attention = Qwen3Attention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=linear("q_proj", embed_dim, num_heads * head_dim),
            k_proj=linear("k_proj", embed_dim, num_kv_heads * head_dim),
            v_proj=linear("v_proj", embed_dim, num_kv_heads * head_dim),
            output_proj=linear("output_proj", num_heads * head_dim, embed_dim),
            pos_embeddings=rope,
            q_norm=RMSNorm(head_dim, eps=norm_eps),
            k_norm=RMSNorm(head_dim, eps=norm_eps),
            max_seq_len=max_seq_len,
            attn_dropout=attn_dropout,
        )
        mlp = FeedForward(
            gate_proj=linear("mlp", embed_dim, intermediate_dim),
            down_proj=linear("mlp", intermediate_dim, embed_dim),
            up_proj=linear("mlp", embed_dim, intermediate_dim),
        )
        norms = {name: RMSNorm(embed_dim, eps=norm_eps) for name in ("sa_norm", "mlp_norm")}
        layers.append(TransformerSelfAttentionLayer(attn=attention, mlp=mlp, **norms))
    embeddings = nn.Embedding(vocab_size, embed_dim)
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=RMSNorm(embed_dim, eps=norm_eps),
        output=TiedLinear(embeddings) if tie_word_embeddings else linear("output", embed_dim, vocab_size),
    )


def lora_qwen3(
    lora_attn_modules: list[LORA_ATTN_MODULES],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int = 128,
    attn_dropout: float = 0.0,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds a Qwen3 decoder with adapters. The arguments are those of torchtune's `lora_qwen2`, and `head_dim`.

    Args:
        lora_attn_modules: names adapted layers of attention, out of "q_proj", "k_proj", "v_proj", "output_proj".
        apply_lora_to_mlp: adapts the gate, up and down projections.
        apply_lora_to_output: adapts the output head, where it is not tied to the embeddings.
        quantize_base: holds the weights below the adapters in NF4, but not that of the output head.

    Raises:
        ValueError: no `lora_attn_modules`, or an adapter on a tied output head.
    """
    if not lora_attn_modules:
        raise Mistake(f"Must pass one or more of {LORA_ATTN_MODULES.__args__} as lora_attn_modules")
    if apply_lora_to_output and tie_word_embeddings:
        raise Mistake(
            "apply_lora_to_output=True, but this model has no output head of its own (tie_word_embeddings=True); set "
            "apply_lora_to_output=False"
        )
    adapted = {*lora_attn_modules, "mlp" if apply_lora_to_mlp else "", "output" if apply_lora_to_output else ""}

    def linear(name: str, width: int, out: int) -> nn.Module:
        if name not in adapted:
            return nn.Linear(width, out, bias=False)
        kind = DoRALinear if use_dora else LoRALinear
        quantized = quantize_base and name != "output"
        return kind(width, out, lora_rank, lora_alpha, lora_dropout, quantize_base=quantized)

    return qwen3(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
        head_dim=head_dim,
        attn_dropout=attn_dropout,
        norm_eps=norm_eps,
        rope_base=rope_base,
        tie_word_embeddings=tie_word_embeddings,
        linear=linear,
    )


def _published(layers: int, width: int, heads: int, mlp_width: int, tied: bool) -> dict[str, Any]:
    """Returns the arguments of a size (arXiv:2505.09388, table 1, and the models' config.json).

    All sizes have 8 heads of keys and values.
    """
    return dict(
        vocab_size=151936,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        embed_dim=width,
        intermediate_dim=mlp_width,
        max_seq_len=40960,
        tie_word_embeddings=tied,
    )


_SIZES = {
    "0.6B": _published(28, 1024, 16, 3072, tied=True),
    "1.7B": _published(28, 2048, 16, 6144, tied=True),
    "4B": _published(36, 2560, 32, 9728, tied=True),
    "8B": _published(36, 4096, 32, 12288, tied=False),
    "14B": _published(40, 5120, 40, 17408, tied=False),
    "32B": _published(64, 5120, 64, 25600, tied=False),
}
qwen3_0_6b, lora_qwen3_0_6b = partial(qwen3, **_SIZES["0.6B"]), partial(lora_qwen3, **_SIZES["0.6B"])
qwen3_1_7b, lora_qwen3_1_7b = partial(qwen3, **_SIZES["1.7B"]), partial(lora_qwen3, **_SIZES["1.7B"])
qwen3_4b, lora_qwen3_4b = partial(qwen3, **_SIZES["4B"]), partial(lora_qwen3, **_SIZES["4B"])
qwen3_8b, lora_qwen3_8b = partial(qwen3, **_SIZES["8B"]), partial(lora_qwen3, **_SIZES["8B"])
qwen3_14b, lora_qwen3_14b = partial(qwen3, **_SIZES["14B"]), partial(lora_qwen3, **_SIZES["14B"])
qwen3_32b, lora_qwen3_32b = partial(qwen3, **_SIZES["32B"]), partial(lora_qwen3, **_SIZES["32B"])
