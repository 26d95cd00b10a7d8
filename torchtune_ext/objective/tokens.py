"""The labels of one row, as a loss and its constraint see them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """L labels of one row, with all labels of each of its completions. Log-probs are natural logarithms in float32."""

    # Log-probs of the labels under the policy in training, with their gradient.
    logprobs_L: Tensor
    # Entropy of that policy at every label, float32, in nats, with its gradient.
    entropy_L: Tensor
    # Log-probs under the proximal policy, from which the updates of a step start. None if the loss does not need them.
    old_logprobs_L: Tensor | None
    # Log-probs under the policy that sampled, as the sampler itself reported them.
    behavior_logprobs_L: Tensor
    # Log-probs under the reference policy. None if no KL term needs them.
    ref_logprobs_L: Tensor | None
    # The advantage of the label's completion, float32.
    advantages_L: Tensor
    # The version of the policy that sampled the label, int32.
    versions_L: Tensor
    # The index of the label's completion in the row, int64.
    samples_L: Tensor
    # The proximal policy's K highest log-probs. None if the loss does not need them, or if the policy in training still
    # is the proximal one.
    old_top_LK: Tensor | None = None
    # Log-probs of the same K tokens under the policy in training, without gradient.
    top_LK: Tensor | None = None
    # Log-probs under the teacher. None if there is no teacher.
    teacher_logprobs_L: Tensor | None = None
    # The version of the proximal policy; `versions_L` count from the same start. None if versions are not counted.
    version: int | None = None
