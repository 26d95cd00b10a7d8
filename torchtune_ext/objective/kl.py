"""Estimators of KL(own || other) from one sampled token, d = log other - log own (Schulman, http://joschu.net/blog/kl-approx.html).

name            value                its mean on own samples             its gradient on own samples
"k1"            -d                   KL                                  of r sg(-d): that of KL (see `kl_penalty`)
"k2"            d^2 / 2              KL + O(d^3)                         that of KL
"k3"            e^d - 1 - d          KL, never negative                  that of KL(other || own)
"k3_unbiased"   r (e^d - 1 - d)      KL, also on samples of pi_old       that of KL (DeepSeek-V3.2, arXiv 2512.02556)
"""

import torch
from torch import Tensor

from torchtune_ext.objective.ratios import MAX_LOG

KLS = ("k1", "k2", "k3", "k3_unbiased")


def kl_k1(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    return logprobs_L - other_L


def kl_k2(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    return 0.5 * (logprobs_L - other_L).square()


def kl_k3(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """e^d - 1 - d, with its relative precision at every d: by its series where even expm1(d) - d is rounding."""
    d = (other_L - logprobs_L).clamp(-MAX_LOG, MAX_LOG)
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    return torch.where(d.abs() < 1e-2, series, torch.expm1(d) - d)


def kl_penalty(name: str, logprobs_L: Tensor, other_L: Tensor, ratio_L: Tensor) -> Tensor:
    """The estimator as a term of a loss, whose gradient moves own towards other.

    Args:
        ratio_L: own / old by token, with its gradient; the samples came from old.
    """
    if name == "k1":  # plain -d would have the gradient of log pi, whose mean is zero: a penalty that does nothing
        return ratio_L * kl_k1(logprobs_L, other_L).detach()
    if name == "k2":
        return kl_k2(logprobs_L, other_L)
    k3_L = kl_k3(logprobs_L, other_L)
    return ratio_L * k3_L if name == "k3_unbiased" else k3_L
