"""What the constraints share: two clipped objectives and the measures that they clip by.

All tensors hold one value per label, [L]. An objective is to be maximized; its `cut_L` (bool) marks the labels at which
it leaves no gradient.
"""

import math

import torch
from torch import Tensor


def clip(
    ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """PPO's min(r A, clip(r, lower, upper) A) (arXiv 1707.06347; asymmetric: DAPO, arXiv 2503.14476), and `cut_L`.

    With `dual` = c > upper it is max(min(r A, clip(r) A), c A) where A < 0 (dual clip, arXiv 1912.09729).
    """
    objective_L = torch.minimum(ratio_L * advantages_L, ratio_L.clamp(lower, upper) * advantages_L)
    cut_L = moved_outward(ratio_L < lower, ratio_L > upper, advantages_L)
    # Where A < 0, the minimum is r A for every r > upper, which has no bound. The dual clip bounds it. The two-sided
    # clip of INTELLECT-2 (arXiv 2505.07291), min(min(r, c) A, clip(r) A), is the same function.
    if dual is not None:
        negative_L = advantages_L < 0
        objective_L = torch.where(negative_L, torch.maximum(objective_L, dual * advantages_L), objective_L)
        cut_L = cut_L | (negative_L & (ratio_L > dual))
    return objective_L, cut_L


def trust_region(ratio_L: Tensor, advantages_L: Tensor, inside_L: Tensor) -> tuple[Tensor, Tensor]:
    """min(r A, clip_C(r) A), where clip_C(r) is r where `inside_L` (bool) holds and 1 elsewhere, and `cut_L`."""
    # With the constant 1 outside, the minimum is A, without a gradient, where r moved with A. Where r moved against A
    # it is r A, whose gradient leads back.
    cut_L = ~inside_L & moved_outward(ratio_L < 1.0, ratio_L > 1.0, advantages_L)
    return torch.where(cut_L, advantages_L, ratio_L * advantages_L), cut_L


def no_cut(ratio_L: Tensor) -> Tensor:
    """The `cut_L` of a formula that leaves a gradient at every label."""
    return torch.zeros_like(ratio_L, dtype=torch.bool)


def moved_outward(below_L: Tensor, above_L: Tensor, advantages_L: Tensor) -> Tensor:
    """The labels that left the region on the side to which their advantage pushes. Only these lose their gradient."""
    return (below_L & (advantages_L < 0)) | (above_L & (advantages_L > 0))


def kl3_bounds(delta: float) -> tuple[float, float]:
    """The ratios l < 1 < u at which KL3 = r - 1 - log r reaches delta: ATR-GRPO (arXiv 2602.05494) as a clip."""
    # KL3 is convex with its minimum 0 at r = 1, so KL3 <= delta is the same as l <= r <= u. In closed form
    # l = -W_0(-e^-(1 + delta)) and u = -W_-1(-e^-(1 + delta)), but near its branch point Lambert's W loses half its
    # digits. Newton's method on expm1(d) - d = delta, where d = log r, keeps them.
    root, bounds = math.sqrt(2.0 * delta), []
    # Both starts lie outside the roots. The function is convex, so Newton's method never overshoots.
    for d in (-root - delta, math.log1p(root + delta)):
        for _ in range(100):
            step = (math.expm1(d) - d - delta) / math.expm1(d)
            d -= step
            if abs(step) <= 1e-16 * abs(d):
                break
        bounds.append(math.exp(d))
    return bounds[0], bounds[1]


def top_k_kl(old_top_LK: Tensor, top_LK: Tensor) -> Tensor:
    """KL(old || new) [L] in nats, over K tokens and the rest of the vocabulary as one: a lower bound of the whole KL.

    Args:
        old_top_LK: log-probs of the old policy's K most likely tokens.
        top_LK: log-probs of the same tokens under the new policy.
    """
    tail_L, old_tail_L = _tail_logprob(top_LK), _tail_logprob(old_top_LK)
    head_L = (old_top_LK.exp() * (old_top_LK - top_LK)).sum(-1)
    # A KL divergence is never negative, but rounding can make a tiny one so.
    return (head_L + old_tail_L.exp() * (old_tail_L - tail_L)).clamp(min=0.0)


def _tail_logprob(logprobs_LK: Tensor) -> Tensor:
    """log of the probability that the K tokens leave over."""
    # The sum may round to 1 or above. 2^-24 is the smallest difference to 1 that float32 resolves.
    return (1.0 - logprobs_LK.exp().sum(-1)).clamp(min=2.0**-24).log()
