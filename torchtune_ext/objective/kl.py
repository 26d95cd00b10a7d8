"""Estimators of KL(own || other) from one sampled token, in nats (Schulman, http://joschu.net/blog/kl-approx.html).

Here d = log other - log own, and all tensors hold one value per label, [L].
"""

import torch
from torch import Tensor

from torchtune_ext.objective.ratios import MAX_LOG_RATIO

# With r = own / old:
#
# name            value                its mean on own samples             its gradient on own samples
# "k1"            -d                   KL                                  of r sg(-d): that of KL (see `kl_penalty`)
# "k2"            d^2 / 2              KL + O(d^3)                         that of KL
# "k3"            e^d - 1 - d          KL, never negative                  that of KL(other || own)
# "k3_unbiased"   r (e^d - 1 - d)      KL, also on samples of pi_old       that of KL (DeepSeek-V3.2, arXiv 2512.02556)
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_unbiased")


def kl_k1(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """-d: right in the mean of its value, but its own gradient has mean 0."""
    return logprobs_L - other_L


def kl_k2(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """d^2 / 2: biased in value, right in gradient."""
    return 0.5 * (logprobs_L - other_L).square()


def kl_k3(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """e^d - 1 - d, with full relative precision at every d."""
    d = (other_L - logprobs_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Near 0 even expm1(d) - d is all rounding. For |d| < 1e-2 the first term left out of the series is below 1e-13 of
    # its sum.
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    return torch.where(d.abs() < 1e-2, series, torch.expm1(d) - d)


def kl_penalty(name: str, logprobs_L: Tensor, other_L: Tensor, ratio_L: Tensor) -> Tensor:
    """The estimator as a term of a loss; its gradient moves own towards other.

    Args:
        name: one of `KLS`.
        logprobs_L, other_L: log-probs of the labels under own, with its gradient, and under other.
        ratio_L: own / old by token, with its gradient; the samples came from old.
    """
    # The gradient of plain -d is that of log pi, whose mean is 0: the penalty would do nothing. So -d acts as a reward,
    # held constant, whose policy gradient comes from the ratio.
    if name == "k1":
        return ratio_L * kl_k1(logprobs_L, other_L).detach()
    if name == "k2":
        return kl_k2(logprobs_L, other_L)
    k3_L = kl_k3(logprobs_L, other_L)
    # With the ratio, the mean is over samples of own, not of old, and its gradient counts how own changes that mean.
    return ratio_L * k3_L if name == "k3_unbiased" else k3_L
