"""Computes importance weights w = pi_old / pi_behavior, which multiply the objective.

They carry no gradient. They correct for the mismatch between the policy from which the updates
start and the behavior policy, which sampled: another engine, another precision, older weights.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtune_ext.objective.ratios import bounded_exp, sample_means, sample_sums
from torchtune_ext.run.errors import UsageError


@dataclass(frozen=True, slots=True)
class ImportanceMethod:
    """The parameters of an importance-weight method."""

    # The name of the method in the run header.
    display_name: str
    # The weight of one label ("token"), or the product ("sequence") or geometric mean ("geometric")
    # of the weights in a completion.
    level: str
    # Weights out of bounds are kept ("keep"), set to the upper bound ("truncate"), or set to 0
    # ("mask").
    out_of_bounds: str
    # None means that the method does not have this bound.
    low: float | None = None
    high: float | None = None
    # If False, weights within the bounds become 1.
    keeps_ratio: bool = True

    def with_bounds(self, low: float | None, high: float | None) -> "ImportanceMethod":
        """Returns the method with other bounds. None keeps the default bound."""
        return replace(self, low=self.low if low is None else low, high=self.high if high is None else high)

    def __str__(self) -> str:
        if self.low is not None:
            return f"{self.display_name} in [{self.low:g}, {self.high:g}]"
        return self.display_name if self.high is None else f"{self.display_name} <= {self.high:g}"


# method            w of               weight                         source
# "none"                               1
# "full"            label              w                              decoupled PPO, arXiv 2505.24298
# "tis"             label              min(w, high)                   TIS (verl)
# "mis"             label              w in [low, high], else 0       MIS (TRL)
# "icepop"          label              w in [low, high], else 0       IcePop, arXiv 2510.18855
# "sequence_tis"    sequence, product  min(w, high)                   sequence TIS (verl)
# "sequence_mis"    sequence, product  w in [low, high], else 0       sequence MIS (TRL's default)
# "geometric_mask"  geometric mean     1 if w in [low, high], else 0  geometric mask (SkyRL)
IMPORTANCE_METHODS = {
    "none": ImportanceMethod("no weight", "token", "keep", keeps_ratio=False),
    "full": ImportanceMethod("importance weight", "token", "keep"),
    "tis": ImportanceMethod("TIS", "token", "truncate", high=2.0),
    "mis": ImportanceMethod("MIS", "token", "mask", low=0.0, high=3.0),
    "icepop": ImportanceMethod("IcePop", "token", "mask", low=0.5, high=5.0),
    "sequence_tis": ImportanceMethod("sequence TIS", "sequence", "truncate", high=10.0),
    "sequence_mis": ImportanceMethod("sequence MIS", "sequence", "mask", low=0.0, high=3.0),
    "geometric_mask": ImportanceMethod("geometric mask", "geometric", "mask", low=0.99, high=1.01, keeps_ratio=False),
}


def check_importance(name: str, low: float | None, high: float | None, level: str, old: str) -> None:
    """Checks the importance settings of a loss.

    Args:
        name: a key of `IMPORTANCE_METHODS`.
        low: lower bound that replaces the method's default; None if not set.
        high: upper bound that replaces the method's default; None if not set.
        level: level of the ratio, a key of `RATIO_LEVELS`.
        old: source of pi_old, one of `OLD_POLICIES`.

    Raises:
        UsageError: the method contradicts `level` or `old`, or a bound is invalid for the method.
    """
    method = IMPORTANCE_METHODS[name]
    # If pi_old is the behavior policy, every weight is 1.
    if name != "none" and old == "sampler":
        raise UsageError(
            f"loss.importance={name!r} contradicts loss.old='sampler': the ratio to the behavior policy already corrects for "
            "it. Fix: set loss.importance=none, or loss.old=trainer"
        )
    if name != "none" and level != "token" and method.level == "token":
        raise UsageError(
            f"loss.importance={name!r} has one weight per token, but loss.level={level!r} has one ratio per completion. Fix: "
            "set loss.importance to sequence_tis, sequence_mis, geometric_mask or none"
        )
    for bound, value, default in (("low", low, method.low), ("high", high, method.high)):
        if value is not None and default is None:
            raise UsageError(
                f"loss.importance_{bound}={value}: importance={name!r} does not have this bound. Fix: remove it"
            )
    if high is not None and not high > 0.0:
        raise UsageError(f"loss.importance_high={high}: expected above 0; otherwise all samples would be masked")
    bounded_method = method.with_bounds(low, high)
    # A method with a lower bound has an upper one.
    if (
        bounded_method.low is not None
        and bounded_method.high is not None
        and not 0.0 <= bounded_method.low < bounded_method.high
    ):
        raise UsageError(
            f"loss.importance_low={bounded_method.low} must lie in [0, importance_high={bounded_method.high}): weights "
            "between the two bounds are kept"
        )


def importance_weights(
    log_weight_L: Tensor, completion_index_L: Tensor, method: ImportanceMethod
) -> tuple[Tensor, Tensor]:
    """Returns (weights_L, masked_L); masked_L (bool) marks out-of-bounds weights set to 0.

    Args:
        log_weight_L: log pi_old - log pi_behavior of every label, in nats.
        completion_index_L: index of the label's completion.
    """
    log_weight_L = log_weight_L.detach()
    if method.level == "sequence":
        log_weight_L = sample_sums(log_weight_L, completion_index_L)
    elif method.level == "geometric":
        log_weight_L = sample_means(log_weight_L, completion_index_L)
    weight_L = bounded_exp(log_weight_L)
    masked_L = torch.zeros_like(weight_L, dtype=torch.bool)
    if method.out_of_bounds == "truncate":
        weight_L = weight_L.clamp(max=method.high)
    elif method.out_of_bounds == "mask":
        assert method.low is not None and method.high is not None  # masking methods have both
        masked_L = (weight_L < method.low) | (weight_L > method.high)
    # Replace weights by 1 only after the bounds have been applied to the real weights.
    if not method.keeps_ratio:
        weight_L = torch.ones_like(weight_L)
    return weight_L.masked_fill(masked_L, 0.0), masked_L


def off_policy_labels(drift_L: Tensor, advantages_L: Tensor, completion_index_L: Tensor, bound: float) -> Tensor:
    """Returns the labels that the off-policy sequence mask drops (DeepSeek-V3.2, arXiv 2512.02556), bool [L].

    They have a negative advantage, and the mean drift of their completion is above the bound.

    Args:
        drift_L: log pi_behavior - log pi of every label, in nats.
        advantages_L: advantage of every label.
        completion_index_L: index of the label's completion.
        bound: the paper's delta, in nats per token.
    """
    # The paper and TRL measure from the policy that sampled, so that the drift includes the
    # trainer/engine mismatch. slime may measure from the proximal policy.
    return (advantages_L < 0) & (sample_means(drift_L.detach(), completion_index_L) > bound)
