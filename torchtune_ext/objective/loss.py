"""Policy objectives: pure functions of flat tensors, one value per label.

The step multiplies a loss by the labels' weights (made in packing, they sum to one over an optimizer step) and sums, so
an objective knows nothing of rows, padding, ranks or accumulation. A loss of your own is a class with `__call__`::

    class MyLoss:
        def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
            ratio_L = (t.logprobs_L - t.old_logprobs_L).exp()
            return -ratio_L * t.advantages_L, {"ratio_max": ratio_L.detach()}

What it needs beside these it says by attributes, which `needs_of` reads: `needs_reference = True` for log-probs under a
reference policy, `top_k = 16` for those of the proximal policy's 16 likeliest tokens, and `needs_all_groups = True` for a
term that acts where the advantage is 0 (a KL penalty, an entropy bonus): else groups without signal, whose advantages are 0,
are not trained on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from torchtune_ext.objective.checks import resolved
from torchtune_ext.objective.clipping import cispo, clip, kl3_bounds, sapo, top_k_kl, trust_region
from torchtune_ext.objective.describe import describe
from torchtune_ext.objective.importance import METHODS, importance_weights
from torchtune_ext.objective.kl import kl_k3, kl_penalty
from torchtune_ext.objective.ratios import MAX_LOG, bounded_exp, sample_means


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an objective may look at: L labels of one row. The labels of a completion are all in the same row."""

    logprobs_L: Tensor  # float32, under the policy that is trained; carries the gradient
    entropy_L: Tensor  # float32, nats; carries a gradient too
    old_logprobs_L: Tensor  # float32, under the proximal policy: the one that this step's updates start from
    behavior_logprobs_L: Tensor  # float32, under the policy that sampled, as the sampler reported
    ref_logprobs_L: Tensor | None  # float32, under the reference; None when no KL term needs it
    advantages_L: Tensor  # float32
    versions_L: Tensor  # int32, policy version that sampled the label
    samples_L: Tensor  # int64, index of the completion in the row
    # float32, the proximal policy's K highest log-probs; None: not stored, or pi = pi_old.
    old_top_LK: Tensor | None = None
    # float32, log-probs of the same K tokens under the policy that is trained, without gradient.
    top_LK: Tensor | None = None


Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss asks for beside the log-probs of the policy that is trained."""

    reference: bool  # log-probs under a reference
    all_groups: bool  # groups without signal, too
    top_k: int  # so many of the proximal policy's likeliest tokens at every label


def needs_of(loss: Loss) -> Needs:
    """What a loss says that it needs. One of the user's own may be silent: it needs nothing."""
    return Needs(
        reference=bool(getattr(loss, "needs_reference", False)),
        all_groups=bool(getattr(loss, "needs_all_groups", False)),
        top_k=getattr(loss, "top_k", None) or 0,
    )


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The frame of all clipped policy objectives: a ratio, a constraint, an importance weight, KL terms, an entropy bonus.

    loss = -w J_C(r, A) + kl_coef KL(pi, ref) + old_kl_coef KL(pi, old) - entropy_coef H, with r = pi / pi_old at a level
    (`ratios.py`), J_C the constrained objective (`clipping.py`), w = pi_old / pi_sampler (`importance.py`) and KL an
    estimator (`kl.py`). Published methods are settings of it: configs/presets/. An option that stays None has the default of
    the constraint or method that it belongs to; given beside any other, it is an error.

    Raises:
        ValueError: an unknown word, an option that does not belong to the others, or a value outside its range.
    """

    level: str = "token"  # of the ratio: "token", "sequence" (GSPO) or "geometric" (GMPO)
    constraint: str = "clip"  # "clip", "kl3", "kl", "tv", "cispo", "sapo" or "none"
    clip_low: float | None = None  # clip (0.2), cispo (1): epsilon below 1
    clip_high: float | None = None  # clip (0.2), cispo (4): epsilon above 1
    dual_clip: float | None = None  # clip, kl3: bound of the ratio where the advantage is negative
    delta: float | None = None  # kl3, kl (0.02), tv (0.2): the distance that is allowed
    top_k: int | None = None  # kl (required): tokens of the proximal policy that are stored
    tau_positive: float | None = None  # sapo (1): how narrow the gate is where the advantage is positive
    tau_negative: float | None = None  # sapo (1.05): and where it is negative
    old: str = "trainer"  # whose log-probs are pi_old: "trainer" (proximal policy) or "sampler" (as it reported them)
    importance: str = "none"  # weights for what differs between pi_old and the sampler: a method of importance.py
    importance_low: float | None = None  # bounds in place of the method's own
    importance_high: float | None = None
    kl_coef: float = 0.0  # KL to the reference; 0: no reference is kept
    old_kl_coef: float = 0.0  # KL to the old policy
    kl: str = "k3"  # estimator of both: "k1", "k2", "k3" or "k3_unbiased"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in resolved(settings).items():
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return describe({field.name: getattr(self, field.name) for field in fields(self)})

    @property
    def needs_reference(self) -> bool:
        return bool(self.kl_coef)

    @property
    def needs_all_groups(self) -> bool:
        """KL and entropy act on every sample, also where all rewards of its group are equal."""
        return any((self.kl_coef, self.old_kl_coef, self.entropy_coef))

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics per label, all [L]. Metrics named `*_max` are reduced by maximum, others by mean over labels."""
        old_L = t.old_logprobs_L if self.old == "trainer" else t.behavior_logprobs_L
        token_ratio_L = bounded_exp(t.logprobs_L - old_L)
        objective_L, cut_L = self._constrained(t, old_L, token_ratio_L)
        method = METHODS[self.importance].within(self.importance_low, self.importance_high)
        weight_L, masked_L = importance_weights(t.old_logprobs_L - t.behavior_logprobs_L, t.samples_L, method)
        loss_L = -weight_L * objective_L
        metrics = {
            "clip_fraction": cut_L.float(),
            "masked_fraction": masked_L.float(),
            "approx_kl": kl_k3(old_L, t.logprobs_L.detach()),
            "ratio_max": token_ratio_L.detach(),
            "entropy": t.entropy_L.detach(),
        }
        if self.entropy_coef:
            loss_L = loss_L - self.entropy_coef * t.entropy_L
        if self.old_kl_coef:
            loss_L = loss_L + self.old_kl_coef * kl_penalty(self.kl, t.logprobs_L, old_L, token_ratio_L)
        if self.kl_coef:
            if t.ref_logprobs_L is None:
                raise ValueError(f"loss.kl_coef={self.kl_coef} needs reference log-probs, but none were computed")
            kl_L = kl_penalty(self.kl, t.logprobs_L, t.ref_logprobs_L, token_ratio_L)
            loss_L = loss_L + self.kl_coef * kl_L
            metrics["kl_ref"] = kl_L.detach()
        return loss_L, metrics

    def _constrained(self, t: Tokens, old_L: Tensor, token_ratio_L: Tensor) -> tuple[Tensor, Tensor]:
        """(objective_L, cut_L) of the constraint at the level of the ratio."""
        advantages_L, ratio_L, log_ratio_L = t.advantages_L, token_ratio_L, t.logprobs_L - old_L
        if self.level == "sequence":
            ratio_L = bounded_exp(sample_means(log_ratio_L, t.samples_L))
        match self.constraint:
            case "clip" | "kl3":
                lower, upper = self.interval()
                if self.level == "geometric":
                    return _geometric(log_ratio_L, advantages_L, lower, upper, t.samples_L)
                return clip(ratio_L, advantages_L, lower, upper, self.dual_clip)
            case "kl":
                return trust_region(ratio_L, advantages_L, self._top_k_kl(t, log_ratio_L) <= self.delta)
            case "tv":
                moved_L = (t.logprobs_L.exp() - old_L.exp()).abs()
                return trust_region(ratio_L, advantages_L, moved_L <= self.delta)
            case "cispo":
                return cispo(t.logprobs_L, ratio_L, advantages_L, *self.interval())
            case "sapo":
                return sapo(ratio_L, advantages_L, self.tau_positive, self.tau_negative)
        return ratio_L * advantages_L, torch.zeros_like(ratio_L, dtype=torch.bool)

    def _top_k_kl(self, t: Tokens, log_ratio_L: Tensor) -> Tensor:
        if t.top_LK is not None:
            return top_k_kl(t.old_top_LK, t.top_LK)
        if log_ratio_L.count_nonzero():
            raise ValueError("loss.constraint='kl' needs the proximal policy's top-k log-probs, but none were stored")
        return torch.zeros_like(log_ratio_L)  # the policy is the old one

    def interval(self) -> tuple[float, float]:
        """The ratios between which a gradient is left, of an interval constraint."""
        if self.constraint == "kl3":
            return kl3_bounds(self.delta)
        return 1.0 - self.clip_low, 1.0 + self.clip_high


def _geometric(
    log_ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, samples_L: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(mean_t sgn(A) min(sgn(A) log r_t, sgn(A) clip(log r_t))) A (GMPO, arXiv 2507.20673, eq. 4)."""
    low, high = -float("inf") if lower <= 0 else math.log(lower), math.log(upper)
    sign_L = advantages_L.sign()
    log_ratio_L = log_ratio_L.clamp(-MAX_LOG, MAX_LOG)
    kept_L, cut_L = clip(log_ratio_L, sign_L, low, high)
    return sample_means(sign_L * kept_L, samples_L).exp() * advantages_L, cut_L


@dataclass(frozen=True, slots=True)
class NLLLoss:
    """-advantage * log pi: the negative log-likelihood of supervised samples, which carry advantage 1."""

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -t.advantages_L * t.logprobs_L, {"entropy": t.entropy_L.detach(), "nll": -t.logprobs_L.detach()}
