"""Importance weights w = pi_old / pi_sampler: what differs between the policy that the updates start from and the one that
sampled (another engine, another precision, older weights). They multiply the objective and carry no gradient.

method            of                       weight                         default bounds   source
"none"                                     1
"full"            every label              w                                               decoupled PPO, arXiv 2505.24298
"tis"             every label              min(w, high)                   2                TIS (verl)
"mis"             every label              w inside [low, high], else 0   0, 3             MIS (TRL)
"icepop"          every label              the same                       0.5, 5           IcePop, arXiv 2510.18855
"sequence_tis"    product over completion  min(w, high)                   10               sequence TIS (verl)
"sequence_mis"    product over completion  w inside [low, high], else 0   0, 3             MIS by sequence (TRL's default)
"geometric_mask"  geometric mean over it   1 inside [low, high], else 0   0.99, 1.01       geometric mask (SkyRL)
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtune_ext.objective.ratios import bounded_exp, sample_means, sample_sums


@dataclass(frozen=True, slots=True)
class Method:
    """How one method makes weights."""

    level: str  # "token", "sequence" or "geometric"
    outside: str  # what happens out of bounds: "keep", "truncate" or "mask"
    low: float | None = None  # bounds; None: there is none
    high: float | None = None
    weighted: bool = True  # False: what is inside weighs 1

    def within(self, low: float | None, high: float | None) -> "Method":
        """The method with other bounds; None leaves its own."""
        return replace(self, low=self.low if low is None else low, high=self.high if high is None else high)


METHODS = {
    "none": Method("token", "keep", weighted=False),
    "full": Method("token", "keep"),
    "tis": Method("token", "truncate", high=2.0),
    "mis": Method("token", "mask", low=0.0, high=3.0),
    "icepop": Method("token", "mask", low=0.5, high=5.0),
    "sequence_tis": Method("sequence", "truncate", high=10.0),
    "sequence_mis": Method("sequence", "mask", low=0.0, high=3.0),
    "geometric_mask": Method("geometric", "mask", low=0.99, high=1.01, weighted=False),
}


def importance_weights(log_weight_L: Tensor, samples_L: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """(weights_L, masked_L bool: weight 0).

    Args:
        log_weight_L: log pi_old - log pi_sampler of every label.
        samples_L: index of the label's completion.
    """
    log_weight_L = log_weight_L.detach()
    if method.level == "sequence":
        log_weight_L = sample_sums(log_weight_L, samples_L)
    elif method.level == "geometric":
        log_weight_L = sample_means(log_weight_L, samples_L)
    weight_L = bounded_exp(log_weight_L)
    masked_L = torch.zeros_like(weight_L, dtype=torch.bool)
    if method.outside == "truncate":
        weight_L = weight_L.clamp(max=method.high)
    elif method.outside == "mask":
        masked_L = (weight_L < method.low) | (weight_L > method.high)
    if not method.weighted:
        weight_L = torch.ones_like(weight_L)
    return weight_L.masked_fill(masked_L, 0.0), masked_L
