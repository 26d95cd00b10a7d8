"""Estimates KL(own || other) per sampled token, in nats; own is the trained policy.

The estimators k1, k2 and k3 are Schulman's (http://joschu.net/blog/kl-approx.html), with
d = log other - log own. All tensors hold one value per label, [L].
"""

import torch
from torch import Tensor

from torchtune_ext.objective.ratios import MAX_LOG_RATIO

# With r = own / old:
#
# name           value            mean on samples of own  gradient on samples of own
# "k1"           -d               KL                      grad KL, as r sg(-d) (see `kl_penalty`)
# "k2"           d^2 / 2          KL + O(d^3)             grad KL
# "k3"           e^d - 1 - d      KL, never negative      grad KL(other || own)
# "k3_unbiased"  r (e^d - 1 - d)  KL, on samples of old   grad KL (DeepSeek-V3.2, arXiv 2512.02556)
KL_ESTIMATORS = ("k1", "k2", "k3", "k3_unbiased")


def kl_k1(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """Returns -d, whose mean is the KL. The mean of its own gradient is 0."""
    return logprobs_L - other_L


def kl_k2(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """Returns d^2 / 2, whose value is biased and whose gradient is unbiased."""
    return 0.5 * (logprobs_L - other_L).square()


def kl_k3(logprobs_L: Tensor, other_L: Tensor) -> Tensor:
    """Returns e^d - 1 - d, with full relative precision at every d."""
    d = (other_L - logprobs_L).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Near 0 even expm1(d) - d is dominated by rounding. For |d| < 1e-2 the first omitted term of
    # the series is below 1e-13 of its sum.
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d / 720))))
    return torch.where(d.abs() < 1e-2, series, torch.expm1(d) - d)


def kl_penalty(name: str, logprobs_L: Tensor, other_L: Tensor, ratio_L: Tensor) -> Tensor:
    """Returns the estimator as a loss term, whose gradient moves own towards other.

    Args:
        name: one of `KL_ESTIMATORS`.
        logprobs_L: log-probs of the labels under own, with gradient.
        other_L: log-probs of the labels under other.
        ratio_L: own / old per token, with gradient, where old is the policy that sampled.
    """
    # The gradient of plain -d equals the gradient of log pi, whose mean is 0: the penalty would
    # have no effect. So -d acts as a constant reward, whose policy gradient comes from the ratio.
    if name == "k1":
        return ratio_L * kl_k1(logprobs_L, other_L).detach()
    if name == "k2":
        return kl_k2(logprobs_L, other_L)
    k3_L = kl_k3(logprobs_L, other_L)
    # The ratio turns the mean over samples of old into a mean over samples of own. Its gradient
    # includes the change of the sampling distribution.
    return ratio_L * k3_L if name == "k3_unbiased" else k3_L
