"""Rewards of one group -> advantages. Groups without signal, and samples nobody could grade, are not trained on."""

from dataclasses import dataclass, replace

import numpy as np

from torchtune_ext.grading import Outcome
from torchtune_ext.tasks.task import Problem

TIE = 1e-9  # rewards of a group that lie this close, relative to their size, carry no signal


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt with what became of it."""

    tokens: np.ndarray  # [R] int32, ids as sampled, with the stop token when it was sampled
    logprobs: np.ndarray  # [R] float32, log-probs of `tokens` under the sampling temperature
    versions: np.ndarray  # [R] int32, policy version that sampled each token
    text: str  # decoded `tokens`, for graders and people
    finish_reason: str  # "stop", "length", "early_stop", "deadline" or "abort"
    outcome: Outcome  # what the grader said, or why it could not
    advantage: float = 0.0  # set by `with_advantages`
    trained: bool = False  # False: kept for the record, not packed


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and all its completions."""

    problem: Problem
    prompt_tokens: np.ndarray  # [P] int32
    samples: tuple[Sample, ...]  # G of them


@dataclass(frozen=True, slots=True)
class AdvantageStats:
    """What became of the groups of one step."""

    groups: int  # groups that carry signal
    no_signal: int  # groups whose gradable samples all have the same reward
    infra_failed: int  # samples that could not be graded (raised, hung or crashed); not in the baseline
    truncated: int  # samples cut by max_tokens or a deadline

    def metrics(self) -> dict[str, float]:
        names = ("no_signal", "infra_failed")
        return {"groups/used": float(self.groups)} | {f"groups/{name}": float(getattr(self, name)) for name in names}


def with_advantages(
    groups: list[Group], normalize: str = "std", truncated: str = "keep", truncated_penalty: float = 0.0
) -> tuple[list[Group], AdvantageStats]:
    """Sets advantage and `trained` of every sample.

    A = R - mean(R) over the gradable samples of the group, divided by their population standard deviation for
    `normalize="std"` (GRPO, arXiv 2402.03300) or left so for "none" (Dr.GRPO, arXiv 2503.20783).

    Args:
        groups: as graded; samples whose outcome has no score are left out of the baseline.
        normalize: "std" or "none".
        truncated: what happens to samples that `max_tokens` or a deadline cut: "keep" (trained as they are), "mask" (in
            the baseline, not trained) or "penalise" (`truncated_penalty` is taken off the reward).

    Returns:
        All groups in order, those without signal with no trained sample, and the counts.
    """
    if normalize not in ("std", "none"):
        raise ValueError(f"advantage={normalize!r} is unknown; use 'std' (GRPO) or 'none' (Dr.GRPO)")
    if truncated not in ("keep", "mask", "penalise"):
        raise ValueError(f"truncated={truncated!r} is unknown; use 'keep', 'mask' or 'penalise'")
    done, used, no_signal = [], 0, 0
    for group in groups:
        gradable = [s for s in group.samples if s.outcome.score is not None]
        penalty = truncated_penalty if truncated == "penalise" else 0.0
        rewards = np.array([s.outcome.score.reward - penalty * _cut(s) for s in gradable], dtype=np.float64)
        # not std == 0: rounding makes equal rewards differ in their last bits, and dividing by std would blow that up
        if len(rewards) < 2 or np.ptp(rewards) <= TIE * max(1.0, np.abs(rewards).max()):
            no_signal += 1
            done.append(replace(group, samples=tuple(replace(s, advantage=0.0, trained=False) for s in group.samples)))
            continue
        used += 1
        advantages = rewards - rewards.mean()
        if normalize == "std":
            advantages /= rewards.std()
        by_sample = dict(zip(map(id, gradable), advantages.tolist(), strict=True))
        done.append(replace(group, samples=tuple(_set(s, by_sample.get(id(s)), truncated) for s in group.samples)))
    return done, AdvantageStats(
        groups=used,
        no_signal=no_signal,
        infra_failed=sum(s.outcome.score is None for g in groups for s in g.samples),
        truncated=sum(_cut(s) for g in groups for s in g.samples),
    )


def _cut(sample: Sample) -> bool:
    return sample.finish_reason in ("length", "deadline")


def _set(sample: Sample, advantage: float | None, truncated: str) -> Sample:
    if advantage is None:
        return replace(sample, advantage=0.0, trained=False)
    return replace(sample, advantage=advantage, trained=not (truncated == "mask" and _cut(sample)))
