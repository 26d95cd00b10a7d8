"""Defines the input of a loss and its constraint: the labels of one row."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """The L labels of one row. Log-probs are float32, in nats.

    A row holds all labels of each of its completions.
    """

    # Log-probs of the labels under the current policy, with gradient.
    logprobs_L: Tensor
    # Entropy of the current policy at every label, float32, in nats, with gradient.
    entropy_L: Tensor
    # Log-probs under the proximal policy, from which the updates of a step start. None if the loss
    # does not need them.
    proximal_logprobs_L: Tensor | None
    # Log-probs under the behavior policy, which sampled the labels, as the engine reported them.
    behavior_logprobs_L: Tensor
    # Log-probs under the reference policy. None if no KL term needs them.
    ref_logprobs_L: Tensor | None
    # The advantage of the label's completion, or with `credit: turn` of its turn, float32.
    advantages_L: Tensor
    # The policy version that sampled the label, int32.
    versions_L: Tensor
    # The index of the label's completion in the row, int64.
    completion_index_L: Tensor
    # The proximal policy's K highest log-probs. None if the loss does not need them, or if the
    # current policy still equals the proximal policy.
    proximal_top_LK: Tensor | None = None
    # Log-probs of the same K tokens under the current policy, without gradient.
    top_LK: Tensor | None = None
    # Log-probs under the teacher. None without a teacher.
    teacher_logprobs_L: Tensor | None = None
    # The version of the proximal policy, on the same scale as `versions_L`. None if versions are
    # unknown.
    version: int | None = None

    # Deprecated names, for custom losses of an earlier commit. Fix: use the names above.
    @property
    def old_logprobs_L(self) -> Tensor | None:  # noqa: N802
        return self.proximal_logprobs_L

    @property
    def samples_L(self) -> Tensor:  # noqa: N802
        return self.completion_index_L

    @property
    def old_top_LK(self) -> Tensor | None:  # noqa: N802
        return self.proximal_top_LK
