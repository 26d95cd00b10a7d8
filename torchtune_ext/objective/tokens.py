"""The labels of one row as a loss, and the constraint in it, get to see them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """L labels of one row. All labels of a completion stand in the same row, so that sums over a completion need no other.

    Log-probs are natural logarithms in float32.
    """

    # These are under the policy that is trained, and carry the gradient.
    logprobs_L: Tensor
    # The entropy of that policy at every label is float32, in nats, and carries a gradient, too.
    entropy_L: Tensor
    # These are under the proximal policy, which is the one that the updates of a step start from. They are None where the loss
    # does not need them.
    old_logprobs_L: Tensor | None
    # These are under the policy that sampled, as the sampler itself reported them.
    behavior_logprobs_L: Tensor
    # These are under the reference policy, or None where no KL term needs them.
    ref_logprobs_L: Tensor | None
    # The advantages are float32. Every label has that of its completion.
    advantages_L: Tensor
    # The versions are int32. They say which version of the policy sampled the label.
    versions_L: Tensor
    # The samples are int64: the index of the label's completion in the row.
    samples_L: Tensor
    # These are the proximal policy's K highest log-probs. They are None where the loss does not need them, or where the policy
    # that is trained still is the proximal one.
    old_top_LK: Tensor | None = None
    # These belong to the same K tokens under the policy that is trained, and carry no gradient.
    top_LK: Tensor | None = None
    # These are under the teacher, or None where there is none.
    teacher_logprobs_L: Tensor | None = None
    # The version of the proximal policy; `versions_L` count from the same start. It is None where versions are not counted.
    version: int | None = None
