"""Builds dense decoders that torchtune 0.6.1 lacks, with torchtune's modules and builder arguments.

They are Qwen2 without biases and with heads of any width, and optionally with:

* an RMSNorm on q and k before RoPE: over each head (Qwen3, arXiv:2505.09388, section 2) or over all
  heads together (OLMo 2, arXiv:2501.00656, section 3.2, which also norms the outputs of attention
  and MLP, not their inputs);
* layers without RoPE (SmolLM3: every fourth);
* attention to a window of the last keys (Mistral; some layers of Gemma);
* Gemma's scaled embeddings, norms, GELU and soft caps (Gemma 2, arXiv:2408.00118, section 2; Gemma 3,
  arXiv:2503.19786, section 2). torchtune's `gemma2` caps hidden states instead of logits;
* RoPE on a part of each head, with scaled frequencies (Phi-4-mini, arXiv:2503.01743, section 2).
"""

import types
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
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

from torchtune_ext.kernels.packed_attention import packed_attention


class Rope(Qwen2RotaryPositionalEmbeddings):
    """RoPE of the first `dim` values of each head, with scaled frequencies.

    Args:
        dim: number of rotated values of each head.
        max_seq_len: number of positions.
        base: base of the frequencies.
        factors: divisors of the frequencies, either dim / 2 or one.
        magnitude: multiplies cosines and sines.
    """

    def __init__(
        self, dim: int, max_seq_len: int, base: float, factors: Sequence[float] = (1.0,), magnitude: float = 1.0
    ):
        self.factors, self.magnitude = tuple(factors), magnitude
        super().__init__(dim, max_seq_len, base)

    def rope_init(self) -> None:
        """Computes frequencies, and the table of cosines and sines."""
        powers = self.base ** (torch.arange(0, self.dim, 2).float() / self.dim)
        self.register_buffer("theta", 1.0 / (torch.tensor(self.factors) * powers), persistent=False)
        self.build_rope_cache(self.max_seq_len)

    def build_rope_cache(self, max_seq_len: int = 4096) -> None:
        super().build_rope_cache(max_seq_len)
        self.cache *= self.magnitude

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Rotates x [B, T, H, head_dim]."""
        if x.shape[-1] == self.dim:
            return super().forward(x, input_pos=input_pos)
        rotated, rest = x.split([self.dim, x.shape[-1] - self.dim], dim=-1)
        return torch.cat([super().forward(rotated, input_pos=input_pos), rest], dim=-1)


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + scale. torchtune's `GemmaRMSNorm` saves more for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        """Norms x [..., D]."""
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.scale.float(), self.eps).to(x.dtype)


class Decoder(TransformerDecoder):
    """torchtune's decoder with a soft cap of its logits."""

    # Cap of the logits; None: no cap.
    logit_softcap: float | None = None

    def unembed(self, h: Tensor) -> Tensor:
        """Maps hidden states [B, T, D] to capped logits [B, T, V]."""
        logits: Any = super().unembed(h)
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)


class Attention(MultiHeadAttention):
    """torchtune's attention, but q and k are normed before RoPE instead of after it.

    Args:
        window: number of keys that a query sees, including its own; None: all.
        softcap: soft cap of the scores; None: no cap.
        scale: scale of the scores; None: 1 / sqrt(head_dim).
        arguments: arguments of torchtune's class.
    """

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None

    def __init__(
        self, window: int | None = None, softcap: float | None = None, scale: float | None = None, **arguments: Any
    ):
        super().__init__(**arguments)
        self.window, self.softcap, self.scale = window, softcap, scale
        self._attention_call = partial(packed_attention, window=window, scale=scale, softcap=softcap)

    def forward(
        self, x: Tensor, y: Tensor | None = None, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Attends from queries of x [B, T, D] to keys and values of y [B, T, D] -> [B, T, D]."""
        q = self._norm_and_rotate(self.q_proj(x), self.q_norm, input_pos)
        # As in torchtune, y=None means that all keys and values are in the cache.
        if y is None:
            assert self.kv_cache is not None
            k, v = self.kv_cache.get_buffer("k_cache"), self.kv_cache.get_buffer("v_cache")
        else:
            k = self._norm_and_rotate(self.k_proj(y), self.k_norm, input_pos)
            v = self.v_proj(y).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2)
            if self.kv_cache is not None and self.cache_enabled:
                k, v = self.kv_cache.update(k, v)
        if self.window is not None and self.kv_cache is not None and mask is not None:
            # In the cache, the index of a key is its position.
            assert input_pos is not None
            mask = mask & (input_pos[..., None] - torch.arange(k.shape[2], device=k.device) < self.window)
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

    def _norm_and_rotate(self, projected: Tensor, norm: RMSNorm | None, input_pos: Tensor | None) -> Tensor:
        """Norms [B, T, H * head_dim], applies RoPE and returns [B, H, T, head_dim]."""
        # A norm as wide as the projection norms all heads together.
        if norm is not None and norm.scale.numel() == projected.shape[-1]:
            projected, norm = norm(projected), None
        heads = projected.unflatten(-1, (-1, self.head_dim))
        if norm is not None:
            heads = norm(heads)
        if self.pos_embeddings is not None:
            heads = self.pos_embeddings(heads, input_pos=input_pos)
        return heads.transpose(1, 2)


def _plain_linear(name: str, width: int, out: int) -> nn.Module:
    return nn.Linear(width, out, bias=False)


def _mlp(
    linear: Callable[[str, int, int], nn.Module], width: int, inner_width: int, activation: nn.Module
) -> FeedForward:
    return FeedForward(
        gate_proj=linear("mlp", width, inner_width),
        down_proj=linear("mlp", inner_width, width),
        up_proj=linear("mlp", width, inner_width),
        activation=activation,
    )


def decoder(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    head_dim: int,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = False,
    qk_norm: str | None = None,
    norms: Sequence[str] = ("sa_norm", "mlp_norm"),
    nope_layers: Collection[int] = (),
    windows: Sequence[int | None] = (),
    window_rope_base: float | None = None,
    rope: Mapping[str, Any] = types.MappingProxyType({}),
    gemma: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    linear: Callable[[str, int, int], nn.Module] = _plain_linear,
) -> TransformerDecoder:
    """Builds a decoder. Arguments that are not listed are arguments of torchtune's `qwen2`.

    Args:
        head_dim: width of queries, keys and values, independent of `embed_dim`.
        qk_norm: norm of q and k: "head": over each head; "whole": over all heads together; None:
            no norm.
        norms: norms of each layer. "sa_norm" and "mlp_norm" norm the inputs of attention and MLP,
            "sa_scale" and "mlp_scale" their outputs, as torchtune's layer names them.
        nope_layers: indices of the layers without RoPE, from 0.
        windows: argument of `Attention`, for each layer; empty: None.
        window_rope_base: RoPE base of layers with a window, without `rope`; None: as other layers.
        rope: further arguments of `Rope`.
        gemma: embeddings are scaled by sqrt(embed_dim), norms by 1 + scale, and the MLP has GELU.
        softcap: argument of `Attention`, as `scale`.
        logit_softcap: soft cap of the logits; None: no cap.
        linear: makes a layer from its name ("q_proj", "k_proj", "v_proj", "output_proj", "mlp",
            "output"), in-features and out-features.
    """
    whole_rope = Rope(**{"dim": head_dim, "max_seq_len": max_seq_len, "base": rope_base, **rope})
    window_rope = whole_rope if window_rope_base is None else Rope(head_dim, max_seq_len, window_rope_base)
    norm = partial(OffsetRMSNorm if gemma else RMSNorm, eps=norm_eps)
    layers = nn.ModuleList()
    for number in range(num_layers):
        window = windows[number] if windows else None
        attention = Attention(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_proj=linear("q_proj", embed_dim, num_heads * head_dim),
            k_proj=linear("k_proj", embed_dim, num_kv_heads * head_dim),
            v_proj=linear("v_proj", embed_dim, num_kv_heads * head_dim),
            output_proj=linear("output_proj", num_heads * head_dim, embed_dim),
            pos_embeddings=None if number in nope_layers else window_rope if window else whole_rope,
            max_seq_len=max_seq_len,
            window=window,
            softcap=softcap,
            scale=scale,
            q_norm=norm(head_dim * (num_heads if qk_norm == "whole" else 1)) if qk_norm else None,
            k_norm=norm(head_dim * (num_kv_heads if qk_norm == "whole" else 1)) if qk_norm else None,
        )
        mlp = _mlp(linear, embed_dim, intermediate_dim, nn.GELU(approximate="tanh") if gemma else nn.SiLU())
        layer_norms = {name: norm(embed_dim) for name in norms}
        layers.append(TransformerSelfAttentionLayer(attn=attention, mlp=mlp, **layer_norms))
    embeddings = (GemmaNormEmbeddings if gemma else nn.Embedding)(vocab_size, embed_dim)
    model = Decoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=norm(embed_dim),
        output=TiedLinear(embeddings) if tie_word_embeddings else linear("output", embed_dim, vocab_size),
    )
    model.logit_softcap = logit_softcap
    return model


def lora_decoder(
    lora_attn_modules: list[LORA_ATTN_MODULES],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    *,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
    **arguments: Any,
) -> TransformerDecoder:
    """Builds a decoder with adapters.

    Args:
        lora_attn_modules: adapted attention layers: some of "q_proj", "k_proj", "v_proj",
            "output_proj".
        apply_lora_to_mlp: adapts the gate, up and down projections.
        apply_lora_to_output: adapts the output head, if it is not tied to the embeddings.
        lora_rank: rank of the adapters.
        lora_alpha: an adapter's output is scaled by lora_alpha / lora_rank.
        lora_dropout: fraction of an adapter's inputs that is dropped in training.
        use_dora: adapters are DoRA adapters.
        quantize_base: stores base weights of adapted layers in NF4, except the output head.
        arguments: arguments of `decoder`.
    """
    adapted = {*lora_attn_modules, "mlp" if apply_lora_to_mlp else "", "output" if apply_lora_to_output else ""}

    def linear(name: str, width: int, out: int) -> nn.Module:
        if name not in adapted:
            return _plain_linear(name, width, out)
        kind = DoRALinear if use_dora else LoRALinear
        return kind(width, out, lora_rank, lora_alpha, lora_dropout, quantize_base=quantize_base and name != "output")

    return decoder(**arguments, linear=linear)
