"""Estimators of KL(own || other) from one sampled token, in nats (Schulman, http://joschu.net/blog/kl-approx.html).

Here d = log other - log own, and all tensors hold one value per label, [L].

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
    """-d, whose value has the right mean, while its own gradient has mean 0 (see `kl_penalty`)."""
    return logprobs_L - other_L


def kl_k2(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """d^2 / 2, which is biased in value and right in gradient."""
    return 0.5 * (logprobs_L - other_L).square()


def kl_k3(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """e^d - 1 - d, which keeps its relative precision at every d.

    Around 0 even expm1(d) - d would be all rounding, so the function uses its series there.
    """
    d = (other_L - logprobs_L).clamp(-MAX_LOG, MAX_LOG)
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    return torch.where(d.abs() < 1e-2, series, torch.expm1(d) - d)


def kl_penalty(name: str, logprobs_L: Tensor, other_L: Tensor, ratio_L: Tensor) -> Tensor:
    """The estimator as a term of a loss, whose gradient moves own towards other.

    Args:
        name: one of `KLS`.
        logprobs_L, other_L: log-probs of the labels under own, with its gradient, and under other.
        ratio_L: own / old by token, with its gradient; the samples came from old.
    """
    # Plain -d would have the gradient of log pi, whose mean is zero: the penalty would do nothing.
    if name == "k1":
        return ratio_L * kl_k1(logprobs_L, other_L).detach()
    if name == "k2":
        return kl_k2(logprobs_L, other_L)
    k3_L = kl_k3(logprobs_L, other_L)
    return ratio_L * k3_L if name == "k3_unbiased" else k3_L
