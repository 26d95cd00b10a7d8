"""What several constraints share: the clipped objective, its form for any other test, and the measures that tests are made of.

All tensors hold one value per label, [L]. An objective is to be maximized, and stands beside `cut_L` (bool): the labels at
which it has left no gradient.
"""

import math

import torch
from torch import Tensor


def clip(
    ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r, lower, upper) A) (PPO, arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476), and `cut_L`.

    With `dual` = c > upper, it is never below c A where A < 0: max(min(r A, clip(r) A), c A) (dual clip, arXiv 1912.09729). The
    two-sided clip of INTELLECT-2 (arXiv 2505.07291), min(min(r, c) A, clip(r) A), is the same function.
    """
    objective_L = torch.minimum(ratio_L * advantages_L, ratio_L.clamp(lower, upper) * advantages_L)
    cut_L = outward(ratio_L < lower, ratio_L > upper, advantages_L)
    if dual is not None:
        negative_L = advantages_L < 0
        objective_L = torch.where(negative_L, torch.maximum(objective_L, dual * advantages_L), objective_L)
        cut_L = cut_L | (negative_L & (ratio_L > dual))
    return objective_L, cut_L


def trust_region(ratio_L: Tensor, advantages_L: Tensor, inside_L: Tensor) -> tuple[Tensor, Tensor]:
    """min(r A, clip_C(r) A) for a test C that is no interval of r, and `cut_L`.

    clip_C(r) is r where `inside_L` (bool) holds, and 1 outside. The constant 1 is what makes the minimum right: outside, the
    minimum is r A where r moved against A, which is the way back, and the constant A where r moved with it.
    """
    cut_L = ~inside_L & outward(ratio_L < 1.0, ratio_L > 1.0, advantages_L)
    return torch.where(cut_L, advantages_L, ratio_L * advantages_L), cut_L


def nowhere(ratio_L: Tensor) -> Tensor:
    """The `cut_L` of a formula that leaves a gradient at every label."""
    return torch.zeros_like(ratio_L, dtype=torch.bool)


def outward(below_L: Tensor, above_L: Tensor, advantages_L: Tensor) -> Tensor:
    """The labels that left the region on the side to which their advantage pushes: these are what the minimum cuts."""
    return (below_L & (advantages_L < 0)) | (above_L & (advantages_L > 0))


def kl3_bounds(delta: float) -> tuple[float, float]:
    """The ratios l < 1 < u at which KL3 = r - 1 - log r reaches delta: ATR-GRPO as an asymmetric clip that costs nothing.

    KL3 is convex with its minimum 0 at r = 1, so KL3 <= delta exactly for l <= r <= u, with l = -W_0(-e^-(1 + delta)) and
    u = -W_-1(-e^-(1 + delta)) (Lambert's W; the form follows from r e^-r = e^-(1 + delta)). Near the branch point W loses half
    its digits, so d = log r is found by Newton's method on expm1(d) - d = delta, in float64.
    """
    root, bounds = math.sqrt(2.0 * delta), []
    # Both beginnings lie outside of the roots. The function is convex, so Newton's method never overshoots.
    for d in (-root - delta, math.log1p(root + delta)):
        for _ in range(100):
            step = (math.expm1(d) - d - delta) / math.expm1(d)
            d -= step
            if abs(step) <= 1e-16 * abs(d):
                break
        bounds.append(math.exp(d))
    return bounds[0], bounds[1]


def top_k_kl(old_top_LK: Tensor, top_LK: Tensor) -> Tensor:
    """KL(old || new) [L] in nats, over K tokens and the rest of the vocabulary as one token.

    Joining tokens never raises a KL divergence (data processing), so this is a lower bound of the whole one.

    Args:
        old_top_LK: log-probs of the old policy's K most likely tokens.
        top_LK: log-probs of the same tokens under the new policy.
    """
    tail_L, old_tail_L = _rest(top_LK), _rest(old_top_LK)
    head_L = (old_top_LK.exp() * (old_top_LK - top_LK)).sum(-1)
    return (head_L + old_tail_L.exp() * (old_tail_L - tail_L)).clamp(min=0.0)


def _rest(logprobs_LK: Tensor) -> Tensor:
    """log of the probability that the K tokens leave over. It is at least what float32 resolves beside 1."""
    return (1.0 - logprobs_LK.exp().sum(-1)).clamp(min=2.0**-24).log()
