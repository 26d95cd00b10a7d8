"""Policy objectives: pure functions of flat tensors, one value per label.

The step multiplies a loss by the labels' weights (made in packing, they sum to one over an optimizer step) and sums, so
an objective knows nothing of rows, padding, ranks or accumulation. A loss of your own is a class with `__call__`::

    class MyLoss:
        def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
            ratio_L = (t.logprobs_L - t.old_logprobs_L).exp()
            return -ratio_L * t.advantages_L, {"ratio_max": ratio_L.detach()}
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an objective may look at: L labels of one row."""

    logprobs_L: Tensor  # float32, under the policy that is trained; carries the gradient
    entropy_L: Tensor  # float32, nats; carries a gradient too
    old_logprobs_L: Tensor  # float32, under the proximal policy: the one that this step's updates start from
    behavior_logprobs_L: Tensor  # float32, under the policy that sampled, as the sampler reported
    ref_logprobs_L: Tensor | None  # float32, under the reference; None when no KL term needs it
    advantages_L: Tensor  # float32
    versions_L: Tensor  # int32, policy version that sampled the label
    samples_L: Tensor  # int64, index of the completion in the row


def clipped_objective(ratio_L: Tensor, advantages_L: Tensor, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A), to be maximised (PPO, arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476)."""
    return torch.minimum(ratio_L * advantages_L, ratio_L.clamp(1.0 - low, 1.0 + high) * advantages_L)


def kl_k3(logprobs_L: Tensor, other_logprobs_L: Tensor) -> Tensor:
    """k3 = exp(d) - 1 - d with d = other - own log-prob: unbiased for KL(own || other) on own samples, never negative.

    Schulman, http://joschu.net/blog/kl-approx.html. expm1 keeps its relative precision near d = 0.
    """
    d = (other_logprobs_L - logprobs_L).clamp(-20.0, 20.0)
    return torch.expm1(d) - d


@dataclass(frozen=True, slots=True)
class GRPOLoss:
    """Clipped GRPO objective with optional KL to a reference, entropy bonus and truncated importance weight.

    loss = -w min(r A, clip(r) A) + kl_coef k3(pi, ref) - entropy_coef H, with r = pi / pi_old and
    w = min(pi_old / pi_behavior, importance_cap) (TIS: corrects what differs between trainer and sampler).

    Raises:
        ValueError: a coefficient outside its range.
    """

    clip_low: float = 0.2  # epsilon below 1
    clip_high: float = 0.2  # epsilon above 1
    kl_coef: float = 0.0  # 0: no reference is kept
    entropy_coef: float = 0.0
    importance_cap: float | None = 2.0  # None: no importance weight

    def __post_init__(self) -> None:
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(f"loss.clip_low={self.clip_low} must lie in (0, 1]; GRPO uses 0.2")
        if not self.clip_high > 0.0:
            raise ValueError(f"loss.clip_high={self.clip_high} must be positive; GRPO uses 0.2, DAPO 0.28")
        if self.kl_coef < 0.0:
            raise ValueError(f"loss.kl_coef={self.kl_coef} must not be negative; 0 turns the KL term off")
        if self.importance_cap is not None and self.importance_cap <= 0.0:
            raise ValueError(f"loss.importance_cap={self.importance_cap} must be positive, or null for no weight")

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics per label, all [L]. Metrics named `*_max` are reduced by maximum, others by weighted mean."""
        log_ratio_L = t.logprobs_L - t.old_logprobs_L
        ratio_L = log_ratio_L.clamp(-20.0, 20.0).exp()  # e^20: far outside any clip, inside float32
        objective_L = clipped_objective(ratio_L, t.advantages_L, self.clip_low, self.clip_high)
        if self.importance_cap is not None:
            importance_L = (t.old_logprobs_L - t.behavior_logprobs_L).clamp(-20.0, 20.0).exp()
            objective_L = objective_L * importance_L.clamp(max=self.importance_cap)
        loss_L = -objective_L
        below = (t.advantages_L < 0) & (ratio_L < 1.0 - self.clip_low)
        above = (t.advantages_L > 0) & (ratio_L > 1.0 + self.clip_high)
        metrics = {
            "clip_fraction": (below | above).float(),
            "approx_kl": kl_k3(t.old_logprobs_L, t.logprobs_L.detach()),
            "ratio_max": ratio_L.detach(),
            "entropy": t.entropy_L.detach(),
        }
        if self.entropy_coef:
            loss_L = loss_L - self.entropy_coef * t.entropy_L
        if self.kl_coef:
            if t.ref_logprobs_L is None:
                raise ValueError(f"loss.kl_coef={self.kl_coef} needs reference log-probs, but none were computed")
            kl_L = kl_k3(t.logprobs_L, t.ref_logprobs_L)
            loss_L = loss_L + self.kl_coef * kl_L
            metrics["kl_ref"] = kl_L.detach()
        return loss_L, metrics


@dataclass(frozen=True, slots=True)
class NLLLoss:
    """-advantage * log pi: the negative log-likelihood of supervised samples, which carry advantage 1."""

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -t.advantages_L * t.logprobs_L, {"entropy": t.entropy_L.detach(), "nll": -t.logprobs_L.detach()}
