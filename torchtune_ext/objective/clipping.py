"""Implements the clipped objectives that constraints share, and the KL values that they bound.

All tensors hold one value per label, [L]. Objectives are maximized. `clipped_L` (bool) marks the
labels without a gradient.
"""

import math

import torch
from torch import Tensor


def clip(
    ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns PPO's min(r A, clip(r, lower, upper) A), [L], and `clipped_L`.

    The clip is PPO's (arXiv 1707.06347), or DAPO's if asymmetric (arXiv 2503.14476). With `dual` =
    c > upper, the objective is max(min(r A, clip(r) A), c A) where A < 0 (dual clip, arXiv
    1912.09729).
    """
    objective_L = torch.minimum(ratio_L * advantages_L, ratio_L.clamp(lower, upper) * advantages_L)
    clipped_L = moved_outward(ratio_L < lower, ratio_L > upper, advantages_L)
    # Where A < 0, the minimum is r A for every r > upper, which is unbounded. The dual clip bounds
    # it. The two-sided clip of INTELLECT-2 (arXiv 2505.07291), min(min(r, c) A, clip(r) A), is the
    # same function.
    if dual is not None:
        negative_L = advantages_L < 0
        objective_L = torch.where(negative_L, torch.maximum(objective_L, dual * advantages_L), objective_L)
        clipped_L = clipped_L | (negative_L & (ratio_L > dual))
    return objective_L, clipped_L


def trust_region(ratio_L: Tensor, advantages_L: Tensor, inside_L: Tensor) -> tuple[Tensor, Tensor]:
    """Returns min(r A, clip_C(r) A), [L], and `clipped_L`; clip_C(r) is r if `inside_L`, else 1."""
    # Outside, clip_C is the constant 1. Where r moved in the direction of A, the minimum is A,
    # which has no gradient. Where r moved against A, the minimum is r A, whose gradient moves r
    # back.
    clipped_L = ~inside_L & moved_outward(ratio_L < 1.0, ratio_L > 1.0, advantages_L)
    return torch.where(clipped_L, advantages_L, ratio_L * advantages_L), clipped_L


def none_clipped(ratio_L: Tensor) -> Tensor:
    """Returns the `clipped_L` of an objective with a gradient at every label."""
    return torch.zeros_like(ratio_L, dtype=torch.bool)


def moved_outward(below_L: Tensor, above_L: Tensor, advantages_L: Tensor) -> Tensor:
    """Returns the labels outside the region in the direction of their advantage (bool [L])."""
    return (below_L & (advantages_L < 0)) | (above_L & (advantages_L > 0))


def kl3_bounds(delta: float) -> tuple[float, float]:
    """Returns the ratios l < 1 < u at which KL3 = r - 1 - log r equals delta.

    With them, ATR-GRPO (arXiv 2602.05494) is a clip.
    """
    # KL3 is convex with its minimum 0 at r = 1, so KL3 <= delta is equivalent to l <= r <= u. In
    # closed form l = -W_0(-e^-(1 + delta)) and u = -W_-1(-e^-(1 + delta)), but near its branch
    # point Lambert's W loses half of its digits. Newton's method on expm1(d) - d = delta with d =
    # log r keeps full precision.
    root, bounds = math.sqrt(2.0 * delta), []
    # Both starting points lie outside the roots. The function is convex, so Newton's method never
    # overshoots.
    for d in (-root - delta, math.log1p(root + delta)):
        for _ in range(100):
            step = (math.expm1(d) - d - delta) / math.expm1(d)
            d -= step
            if abs(step) <= 1e-16 * abs(d):
                break
        bounds.append(math.exp(d))
    return bounds[0], bounds[1]


def top_k_kl(proximal_top_LK: Tensor, top_LK: Tensor) -> Tensor:
    """Returns KL(old || new) [L] in nats over K tokens and one bucket for all other tokens.

    It is a lower bound of the full KL.

    Args:
        proximal_top_LK: log-probs of the old policy's K likeliest tokens.
        top_LK: log-probs of the same tokens under the new policy.
    """
    tail_L, old_tail_L = _tail_logprob(top_LK), _tail_logprob(proximal_top_LK)
    head_L = (proximal_top_LK.exp() * (proximal_top_LK - top_LK)).sum(-1)
    # A KL divergence is never negative, but rounding can make a tiny KL negative.
    return (head_L + old_tail_L.exp() * (old_tail_L - tail_L)).clamp(min=0.0)


def _tail_logprob(logprobs_LK: Tensor) -> Tensor:
    """Returns the log of the probability mass outside the K tokens, [L]."""
    # The sum may round to 1 or above. 2^-24 is the smallest difference to 1 that float32 resolves.
    return (1.0 - logprobs_LK.exp().sum(-1)).clamp(min=2.0**-24).log()
