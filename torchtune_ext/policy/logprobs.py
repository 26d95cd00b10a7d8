"""Adapts a torchtune decoder to map packed rows to log-probs of their labels."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchtune.modules import TiedLinear, TransformerDecoder

from torchtune_ext.kernels.indexing import gather_rows
from torchtune_ext.kernels.linear_logprob import linear_gather, linear_logprob, linear_top_k
from torchtune_ext.kernels.packed_attention import packed_mask, use_packed_attention
from torchtune_ext.pipeline.packing import Row
from torchtune_ext.policy.lora import effective_weight
from torchtune_ext.run.errors import UsageError

if TYPE_CHECKING:
    from torchtune_ext.policy.fp8.plan import Fp8Plan


@dataclass(frozen=True, slots=True)
class LabelLogprobs:
    """The policy's log-probs and entropies at the labels of one row."""

    # Log-prob of each label at the sampling temperature, float32, nats.
    logprobs_L: Tensor
    # Entropy of the distribution at each label, float32, nats.
    entropy_L: Tensor
    # Log-probs of the K tokens that `top_k` or `top_ids_LK` requests, float32, without gradient, and
    # their ids, int64.
    top_LK: Tensor | None = None
    top_ids_LK: Tensor | None = None
    # Log-prob of each environment label, float32, nats, if requested.
    env_logprobs_E: Tensor | None = None

    def detach(self) -> "LabelLogprobs":
        """Returns the values without gradient, and without the environment labels."""
        return replace(
            self, logprobs_L=self.logprobs_L.detach(), entropy_L=self.entropy_L.detach(), env_logprobs_E=None
        )


class PackedPolicy:
    """Wraps a torchtune decoder with packed attention. It returns log-probs instead of logits.

    Args:
        model: the decoder, which is modified.
        fp8: the layers that compute in FP8, if any.
    """

    def __init__(self, model: TransformerDecoder, fp8: "Fp8Plan | None" = None):
        self.model = model
        self.fp8_plan = fp8
        # With dropout, two forward passes in training mode differ.
        self.has_dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        # Cost of attention per query-key pair divided by the cost of the weights per token, both in
        # multiplications.
        layers: list[Any] = [*model.layers]  # torch types a layer's attributes as any tensor or module
        pairs = sum(2 * layer.attn.num_heads * layer.attn.head_dim for layer in layers)
        weights = sum(p.numel() for p in model.layers.parameters()) + model.tok_embeddings.weight.numel()
        self.attention_pair_cost = pairs / weights
        # The size of the RoPE cache limits positions, not the length of a packed row.
        self.max_positions = model.max_seq_len
        # `__call__` stores its arguments here for `_unembed`, because the decoder's forward does
        # not pass them through.
        self._row: Row | None = None
        self._temperature = 1.0
        self._top_k = 0
        self._top_ids_LK: Tensor | None = None
        self._environment = False
        self._top_logprobs: tuple[Tensor | None, Tensor | None] = (None, None)
        # Both lines set attributes on instances, so parameters keep torchtune's names, and FSDP2,
        # activation checkpointing and compile can wrap the model later.
        self.windows = use_packed_attention(model)  # window -> fraction of the layers that have it
        model.unembed = self._unembed  # pyright: ignore[reportAttributeAccessIssue]  # the return type differs

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters for the optimizer: all parameters, or only adapters."""
        return [param for param in self.model.parameters() if param.requires_grad]

    def __call__(
        self,
        row: Row,
        temperature: float = 1.0,
        top_k: int = 0,
        top_ids_LK: Tensor | None = None,
        environment: bool = False,
    ) -> LabelLogprobs:
        """Computes log-probs of a row's labels.

        Args:
            row: a packed row on the model's device.
            temperature: sampling temperature.
            top_k: also score the `top_k` most likely tokens at every label.
            top_ids_LK: also score these token ids at every label. It replaces `top_k`.
            environment: also score the environment labels.

        Raises:
            UsageError: a sequence is longer than the model's `max_seq_len`.
        """
        if row.max_path_len > self.max_positions:
            raise UsageError(
                f"model.max_seq_len={self.max_positions} is too short for a sequence of {row.max_path_len} tokens. Fix: "
                "raise model.max_seq_len, or lower sampling.max_tokens"
            )
        # torchtune compares the *row* with max_seq_len, but only positions index the RoPE cache.
        self.model.max_seq_len = max(self.max_positions, row.tokens_T.numel())
        self._row, self._temperature = row, temperature
        self._top_k, self._top_ids_LK, self._environment = top_k, top_ids_LK, environment
        try:
            logprobs_L, entropy_L = self.model(
                row.tokens_T[None],
                mask=packed_mask(row.ends_T, row.positions_T, self.windows, row.max_path_len),
                input_pos=row.positions_T[None],
            )
            if not environment:
                return LabelLogprobs(logprobs_L, entropy_L, *self._top_logprobs)
            logprobs_L, env_logprobs_E = logprobs_L.tensor_split([row.num_labels])
            return LabelLogprobs(logprobs_L, entropy_L[: row.num_labels], *self._top_logprobs, env_logprobs_E)
        finally:
            self._row, self._top_k, self._top_ids_LK, self._top_logprobs = None, 0, None, (None, None)

    def _unembed(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Replaces `TransformerDecoder.unembed`: [1, T, D] -> log-probs and entropies, [L] each.

        With `environment`, both are [L + E]: the environment labels follow.
        """
        # This runs inside the forward, when FSDP2 has gathered the weights.
        assert self._row is not None
        output = self.model.output
        weight_VD = effective_weight(output.tied_module if isinstance(output, TiedLinear) else output)
        hidden_TD, labels_L = self.model.norm(hidden_BTD)[0], self._row.labels_L
        hidden_LD = gather_rows(hidden_TD, self._row.hidden_index_L)
        weight_VD = weight_VD.to(hidden_LD.dtype)
        scaling = self._temperature, getattr(self.model, "logit_softcap", None)
        if self._top_ids_LK is not None:
            top_LK = linear_gather(hidden_LD, weight_VD, self._top_ids_LK, *scaling)
            self._top_logprobs = top_LK, self._top_ids_LK
        elif self._top_k:
            self._top_logprobs = linear_top_k(hidden_LD, weight_VD, self._top_k, *scaling)
        if self._environment:
            # A second call would have another gradient of the weight's size.
            hidden_LD = torch.cat([hidden_LD, gather_rows(hidden_TD, self._row.env_sources_E)])
            labels_L = torch.cat([labels_L, self._row.env_labels_E])
        return linear_logprob(hidden_LD, weight_VD, labels_L, *scaling)
