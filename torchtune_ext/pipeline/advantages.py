"""Computes advantages from the rewards of each group, and selects the samples to train on."""

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from pydantic import Field

from torchtune_ext.grading.environments import TRUNCATED_REASONS
from torchtune_ext.pipeline.evaluation import SOLVED_REWARD
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.run.errors import UsageError
from torchtune_ext.settings.sections import config_section
from torchtune_ext.tasks.task import require_part

log = logging.getLogger(__name__)

TIE_TOLERANCE = 1e-9  # rewards of a group that differ by less, relative to their magnitude, are equal
WHOLE_REWARD = {"": 1.0}  # `parts` if none are given
ROUNDING_TOLERANCE = 1e-13  # largest relative difference by rounding between sums of the same numbers


@dataclass(frozen=True, slots=True)
class AdvantageStats:
    """Counts over the groups of one step."""

    num_nonzero_groups: int  # groups with a nonzero advantage
    no_signal: int  # zero-variance groups: all graded samples have the same reward
    infra_failed: int  # samples whose grader or environment raised or crashed; not in the baseline
    # Samples whose grader or environment timed out. They are in the baseline, with reward 0, if the
    # grader belongs to this package.
    timed_out: int
    lone_turns: int | None = None  # turns that only one sample of the group reached; None without `credit: turn`

    def metrics(self) -> dict[str, float]:
        """Returns the counts by metric name."""
        names = ["no_signal", "infra_failed", "timed_out"] + ["lone_turns"] * (self.lone_turns is not None)
        return {"groups/used": float(self.num_nonzero_groups)} | {
            f"groups/{name}": float(getattr(self, name)) for name in names
        }


@config_section("advantage")
class AdvantageConfig:
    """The `advantage:` section of a config: advantage = (value - baseline) / scale.

    name            baseline            scale          value                          source
    GRPO            "mean"              "group_std"    R                              arXiv 2402.03300
    Dr.GRPO         "mean"              "none"         R                              arXiv 2503.20783
    RLOO            "leave_one_out"     "none"         R                              arXiv 2402.14740
    LitePPO         "mean"              "batch_std"    R                              arXiv 2508.08221
    pass@k          "mean"              "group_std"    mean best of k, pass_k = k     arXiv 2508.10751
    MaxRL           "mean"              "group_mean"   R, 0 or 1                      arXiv 2602.02710

    With `parts`, R is their weighted sum. GDPO (`combine: normalize_then_sum`, arXiv 2601.05242)
    computes GRPO's advantages of each part, and whitens their weighted sum over the step:
    advantage = (sum - mean of all sums) / standard deviation of all sums.

    Raises:
        UsageError: options exclude each other, or a value is out of range.
    """

    baseline: Literal["mean", "leave_one_out"] = Field(
        default="mean", description="mean reward of the group, or of the other samples of the group"
    )
    scale: Literal["group_std", "batch_std", "group_mean", "none"] = Field(
        default="group_std",
        description="standard deviation of the group's rewards or of all rewards of the step, the group's mean "
        "(rewards of 0 and 1), or none",
    )
    pass_k: int = Field(
        default=1,
        ge=1,
        description="above 1: value = best reward of k samples, averaged over all subsets of k that include the sample",
    )
    credit: Literal["episode", "turn"] = Field(
        default="episode",
        description="one advantage per episode, or per turn (its return, compared with samples that reached it)",
    )
    rewards: Literal["graded", "shuffled"] = Field(
        default="graded",
        description="shuffled: a placebo that permutes the rewards of each group at random; rollouts keep the graded ones",
    )
    length_coef: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="adds length_coef x (mean length - own length) / maximum length to the advantages of right answers "
        "(reward >= 1), mean and maximum over the group's right answers",
    )
    truncated: Literal["keep", "mask", "penalize"] = Field(
        default="keep", description="truncated samples: keep, mask (count in the baseline only), or penalize"
    )
    penalty: float = Field(
        default=1.0, ge=0, description="subtracted from the reward of a truncated sample; needs truncated=penalize"
    )
    overlong: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="last fraction of max_tokens over which the penalty grows from 0 to `penalty` (DAPO: 0.2)",
    )
    parts: dict[str, float] = Field(
        default_factory=dict,
        description="weights of reward parts whose sum replaces the reward, e.g. {correct: 1.0, short: 0.5}",
    )
    combine: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="normalize the sum of the parts, or each part within its group and the sum over the step (GDPO)",
    )

    def __post_init__(self) -> None:
        if self.pass_k > 1 and (self.baseline, self.scale) not in (("mean", "group_std"), ("mean", "none")):
            raise UsageError(
                f"advantage.pass_k={self.pass_k} defines its own baseline and standard deviation. Fix: use baseline=mean, "
                f"and scale=group_std or none, not baseline={self.baseline}, scale={self.scale}"
            )
        if self.scale == "group_mean" and (self.baseline != "mean" or self.truncated == "penalize"):
            raise UsageError(
                f"advantage.scale=group_mean needs rewards of 0 and 1, and their mean as the baseline. Fix: use baseline=mean, "
                f"and truncated=keep or mask, not baseline={self.baseline}, truncated={self.truncated}"
            )
        if self.credit == "turn" and (self.pass_k > 1 or self.scale in ("batch_std", "group_mean")):
            raise UsageError(
                f"advantage.credit=turn compares turns of one group. Fix: use pass_k=1, and scale=group_std or none, not "
                f"pass_k={self.pass_k}, scale={self.scale}"
            )
        if self.rewards == "shuffled" and self.credit == "turn":
            raise UsageError(
                "advantage.rewards=shuffled permutes one advantage per completion. Fix: use credit=episode, not credit=turn"
            )
        if self.overlong and self.truncated != "penalize":
            raise UsageError(
                f"advantage.overlong={self.overlong} requires truncated=penalize, not {self.truncated}. Fix: "
                "set overlong=0 (it "
                "may come from `preset`)"
            )
        self._check_parts()

    def _check_parts(self) -> None:
        weights = self.parts.values()
        if self.parts and not (all(map(math.isfinite, weights)) and any(weights)):
            raise UsageError(f"advantage.parts={self.parts}: expected finite weights, at least one of them not 0")
        if self.parts and self.credit == "turn":
            raise UsageError(
                "advantage.parts with credit=turn: a turn has one reward, without parts. Fix: set credit=episode"
            )
        if self.combine == "normalize_then_sum" and not (
            self.uses_formula and self.credit == "episode" and self.truncated != "penalize"
        ):
            raise UsageError(
                "advantage.combine=normalize_then_sum defines its own baseline and scale, and has no reward to penalize. "
                "Fix: use baseline=mean, scale=group_std, pass_k=1, credit=episode, and truncated=keep or mask, not "
                f"baseline={self.baseline}, scale={self.scale}, pass_k={self.pass_k}, credit={self.credit}, "
                f"truncated={self.truncated}"
            )

    @property
    def uses_formula(self) -> bool:
        """Whether the recipe's `group_relative_advantages` applies, not a formula of these keys."""
        return (self.baseline, self.scale, self.pass_k) == ("mean", "group_std", 1)

    def __str__(self) -> str:
        return self.describe(f"(baseline {self.baseline}, scale {self.scale})")

    def describe(self, formula: str) -> str:
        """Return the text of the advantage, with the name of its formula."""
        penalty = f" by {self.penalty:g}" if self.truncated == "penalize" else ""
        overlong = f" over the last {self.overlong:.0%}" if self.overlong else ""
        words = {
            f"advantage {formula}": True,
            "placebo: shuffled rewards": self.rewards == "shuffled",
            f"{self._parts_text()} normalized, then summed": self.combine == "normalize_then_sum",
            f"of {self._parts_text()}": self.parts and self.combine == "sum_then_normalize",
            "per turn": self.credit == "turn",
            f"best of {self.pass_k}": self.pass_k > 1,
            f"right answers compete on length by {self.length_coef:g}": self.length_coef > 0,
            f"truncated samples: {self.truncated}{penalty}{overlong}": self.truncated != "keep",
        }
        return ", ".join(word for word, shown in words.items() if shown)

    def _parts_text(self) -> str:
        return " + ".join(f"{weight:g} {name}" for name, weight in self.parts.items())


def default_formula(rewards_G: np.ndarray) -> np.ndarray:
    """GRPO's advantages of a group, both [G]; the rewards are not all equal."""
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def assign_advantages(
    groups: list[Group],
    config: AdvantageConfig,
    max_tokens: int | None = None,
    train_all: bool = False,
    formula: Callable[[np.ndarray], np.ndarray] = default_formula,
) -> tuple[list[Group], AdvantageStats]:
    """Sets the advantage of every sample, and whether it is trained on.

    Args:
        groups: graded groups. Samples without a score are not in the baseline and not trained on.
        config: how to compute advantages. Standard deviations are population values (ddof 0).
        max_tokens: maximum tokens of a completion; required by `config.overlong`.
        train_all: also train on zero-variance groups, because the loss has terms (KL, entropy) that
            do not depend on advantages.
        formula: rewards [G] of a group with different rewards -> advantages [G]. Used if `config`
            has the default baseline, scale and pass_k.

    Returns:
        All groups in order, and the counts. In a zero-variance group every advantage is 0.

    Raises:
        UsageError: `config.overlong` is set without `max_tokens`, `scale` is "group_mean" and a reward
            is not 0 or 1, or a sample lacks a part.
    """
    if config.overlong and max_tokens is None:
        raise UsageError(
            f"advantage.overlong={config.overlong} is a fraction of max_tokens, but max_tokens=None. Fix: pass max_tokens"
        )
    graded = [[s for s in group.samples if s.score is not None] for group in groups]
    if config.scale == "group_mean":
        _require_binary_rewards(groups, config)
    rewards = [np.array([_shaped_reward(s, config, max_tokens) for s in samples]) for samples in graded]
    batch_std = np.concatenate(rewards).std() if config.scale == "batch_std" and any(map(len, rewards)) else 1.0
    whitened: list[np.ndarray | None] = [None] * len(groups)
    if config.combine == "normalize_then_sum":
        whitened = _whitened_part_advantages(graded, config, formula)
    results, used, lone_turns = [], 0, 0
    for group, samples, rewards_G, whitened_G in zip(groups, graded, rewards, whitened, strict=True):
        # If all grader rewards are equal, only the length penalty differs. Dividing by the std
        # would inflate the penalty.
        if config.overlong and _all_equal(np.array([_base_reward(sample, config) for sample in samples])):
            values = None
        elif config.combine == "normalize_then_sum":
            values = whitened_G
        elif config.credit == "turn":
            values, lone = _turn_advantages(samples, rewards_G, config, formula)
            lone_turns += lone
        else:
            values = _group_advantages(rewards_G, config, batch_std, formula)
        if config.length_coef:
            values = _add_length_term(values, samples, config)
        if values is not None and config.rewards == "shuffled":
            values = _shuffle(values, samples)
        used += values is not None
        if values is None and train_all:
            values = np.zeros(len(samples))
        # Samples hold arrays and are not hashable. Their ids are stable while `graded` references
        # them.
        by_sample = {} if values is None else dict(zip(map(id, samples), values, strict=True))
        results.append(
            replace(group, samples=tuple(_set_advantage(s, by_sample.get(id(s)), config) for s in group.samples))
        )
    kinds = Counter(s.outcome.kind for g in groups for s in g.samples if s.outcome)
    return results, AdvantageStats(
        num_nonzero_groups=used,
        no_signal=len(groups) - used,
        infra_failed=kinds["infra_failed"],
        timed_out=kinds["timed_out"],
        lone_turns=lone_turns if config.credit == "turn" else None,
    )


def select_groups(groups: list[Group], size: int) -> tuple[list[Group], list[Group]]:
    """Selects the groups of a step after refill rounds have replaced zero-variance groups.

    Args:
        groups: groups with advantages, in sampling order.
        size: number of groups per step.

    Returns:
        The selected groups, at most `size`, and all groups; groups that were not selected have
        `in_loss=False`. Both lists are in sampling order.
    """
    # Groups with nonzero advantages come first. The sort is stable, so ties keep the sampling
    # order.
    chosen = set(sorted(range(len(groups)), key=lambda i: not groups[i].has_nonzero_advantage)[:size])
    selected = [group for i, group in enumerate(groups) if i in chosen]
    return selected, [group if i in chosen else _exclude_from_loss(group) for i, group in enumerate(groups)]


def _exclude_from_loss(group: Group) -> Group:
    return replace(group, samples=tuple(replace(sample, in_loss=False) for sample in group.samples))


def _group_advantages(
    rewards_G: np.ndarray, config: AdvantageConfig, batch_std: float, formula: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray | None:
    """Returns the advantages of a group, float64 [G], or None for a zero-variance group."""
    # A baseline needs two samples, and pass@k needs k.
    if len(rewards_G) < max(2, config.pass_k):
        return None
    values_G, mean, std = rewards_G, rewards_G.mean(), rewards_G.std()
    if config.pass_k > 1:
        values_G, mean, std = best_of_k(rewards_G, config.pass_k)
    if _all_equal(values_G):
        return None
    if config.uses_formula:
        return formula(rewards_G)
    advantages_G = values_G - mean
    # For sample i: R_i - mean of the others = G / (G - 1) * (R_i - mean of all).
    if config.baseline == "leave_one_out":
        advantages_G = advantages_G * len(rewards_G) / (len(rewards_G) - 1)
    return advantages_G / {"group_std": std, "batch_std": batch_std, "group_mean": mean, "none": 1.0}[config.scale]


def _whitened_part_advantages(
    graded: list[list[Sample]], config: AdvantageConfig, formula: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray | None]:
    """Returns GDPO's advantages of each group (arXiv 2601.05242), float64 [G]; None: zero variance in every part."""
    sums = []
    for samples in graded:
        sum_G = np.zeros(len(samples))
        for name, weight in (config.parts or WHOLE_REWARD).items():
            part_G = np.array([_part(sample, name) for sample in samples])
            # A part whose values are all equal does not distinguish samples.
            if (advantages_G := _group_advantages(part_G, config, 1.0, formula)) is not None:
                sum_G += weight * advantages_G
        sums.append(sum_G)
    # As in TRL, zero-variance groups count in the standard deviation.
    step = np.concatenate([np.zeros(0), *sums])
    return [None if _all_equal(sum_G) else (sum_G - step.mean()) / step.std() for sum_G in sums]


def _turn_advantages(
    samples: list[Sample],
    rewards_G: np.ndarray,
    config: AdvantageConfig,
    formula: Callable[[np.ndarray], np.ndarray],
) -> tuple[list[np.ndarray] | None, int]:
    """Computes one advantage per turn.

    Returns:
        For each sample the advantages of its turns, float64 [turns], or None for a zero-variance
        group; and the number of lone turns. Only one sample reached a lone turn, so its advantage
        is 0.
    """
    # The value of a turn is its reward-to-go: the reward of the episode minus the rewards of
    # earlier turns.
    rewards_to_go = [
        reward - np.cumsum([0.0, *s.turn_rewards])[: len(s.completion.sampled_spans)]
        for s, reward in zip(samples, rewards_G, strict=True)
    ]
    advantages, lone = [np.zeros(len(turns)) for turns in rewards_to_go], 0
    for t in range(max(map(len, rewards_to_go), default=0)):
        reached = [i for i, turns in enumerate(rewards_to_go) if t < len(turns)]
        lone += len(reached) == 1
        values = _group_advantages(np.array([rewards_to_go[i][t] for i in reached]), config, 1.0, formula)
        for i, value in zip(reached, () if values is None else values, strict=False):
            advantages[i][t] = value
    return advantages if any(map(np.any, advantages)) else None, lone


def _require_binary_rewards(groups: list[Group], config: AdvantageConfig) -> None:
    # With other rewards the mean may be close to 0 or negative, and the advantages change their
    # size or sign.
    for group in groups:
        for sample in group.samples:
            if sample.score is not None and (reward := _base_reward(sample, config)) not in (0.0, 1.0):
                raise UsageError(
                    f"advantage.scale=group_mean (MaxRL): problem {group.problem.id!r} has a completion with reward "
                    f"{reward:g}; expected 0 or 1. Fix: return 0 or 1 from the grader, or from the agent and agent.on_error, "
                    "or set another scale"
                )


def _add_length_term(
    values: Sequence[Any] | np.ndarray | None, samples: list[Sample], config: AdvantageConfig
) -> Sequence[Any] | np.ndarray | None:
    """Adds length_coef * (mean length - length) / maximum length, over the right answers of the group, to their advantages.

    The terms of a group sum to 0, and wrong answers keep their advantage, so none is paid for brevity.
    """
    # The term is added after the division by the standard deviation, which would inflate it in a
    # group of right answers. Since `length_coef` <= 1, a right answer (1) stays above a wrong one (0).
    right_G = np.array([_base_reward(sample, config) >= SOLVED_REWARD for sample in samples], dtype=bool)
    lengths_G = np.array([len(sample.completion.sampled_indices) for sample in samples])
    if np.unique(lengths_G[right_G]).size < 2:
        return values
    terms_G = (
        config.length_coef * np.where(right_G, lengths_G[right_G].mean() - lengths_G, 0.0) / lengths_G[right_G].max()
    )
    if values is None:
        return terms_G
    return [value + term for value, term in zip(values, terms_G, strict=True)]


def _shuffle(advantages_G: Sequence[Any] | np.ndarray, samples: list[Sample]) -> np.ndarray:
    """Returns the advantages of a group in a random order, as if its rewards had been permuted."""
    # The sampled tokens and their versions are the seed, so that refills, replays and resumed runs
    # get the same order.
    arrays = [array for s in samples for array in (s.completion.tokens, s.completion.versions)]
    return np.random.default_rng(zlib.crc32(np.concatenate(arrays).tobytes())).permutation(advantages_G)


def _all_equal(values_G: np.ndarray) -> bool:
    # A test for std == 0 would miss rewards that differ only by rounding in their last bits.
    # Dividing by such a small std would turn the rounding into large advantages.
    if len(values_G) == 0:
        return True
    magnitude, spread = max(1.0, np.abs(values_G).max()), np.ptp(values_G)
    if ROUNDING_TOLERANCE * magnitude < spread <= TIE_TOLERANCE * magnitude:
        _warn_of_ties()
    return spread <= TIE_TOLERANCE * magnitude


@cache
def _warn_of_ties() -> None:
    log.warning(
        "advantage: rewards of a group differ by less than %g, absolute or relative, and count as equal: it is a "
        "zero-variance group. Scale the rewards up, or subtract a constant",
        TIE_TOLERANCE,
    )


def best_of_k(rewards_G: np.ndarray, k: int) -> tuple[np.ndarray, float, float]:
    """Computes statistics of the best reward in subsets of k of the G samples (arXiv 2508.10751).

    The formulas hold for any rewards.

    Returns:
        The mean [G] over the subsets that include sample i, the mean over all subsets, and the
        standard deviation over all subsets.
    """
    order = np.argsort(rewards_G, kind="stable")
    r, n = rewards_G[order], len(rewards_G)
    # In ascending order the last sample of a subset is its best, so subsets can be counted instead
    # of listed. Sample i is the best of a subset if the other k - 1 samples come from the i samples
    # below it. `best` is the probability of this event.
    best = np.array([math.comb(i, k - 1) for i in range(n)]) / math.comb(n, k)
    mean = float(best @ r)
    std = math.sqrt(max(0.0, float(best @ (r - mean) ** 2)))
    total = math.comb(n - 1, k - 1)
    # The probability that i is the best of a subset that includes i.
    best_given_included = np.array([math.comb(i, k - 1) for i in range(n)]) / total
    # The probability that j is the best of a subset that includes i, for i below j. The other k - 2
    # samples are chosen from the j - 1 samples that are below j and are not i.
    above = np.array([math.comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(n)]) / total
    later = np.concatenate([np.cumsum((above * r)[::-1])[::-1][1:], [0.0]])
    values_G = np.empty(n)
    values_G[order] = best_given_included * r + later
    return values_G, mean, std


def _raw_reward(sample: Sample) -> float:
    assert sample.score is not None  # only graded samples get here
    return sample.score.reward


def _part(sample: Sample, name: str) -> float:
    """Returns a part of the score; "": the reward."""
    assert sample.score is not None  # only graded samples get here
    if not name:
        return _raw_reward(sample)
    # An episode that is truncated, or whose agent fails, may end without a score of the task.
    if sample.score.parts.get("agent_failed") or (sample.completion.turns and _is_truncated(sample)):
        return sample.score.parts.get(name, 0.0)
    return require_part(sample.score, name)


def _base_reward(sample: Sample, config: AdvantageConfig) -> float:
    """Returns the weighted sum of the parts, or without `parts` the grader's reward."""
    return sum(weight * _part(sample, name) for name, weight in (config.parts or WHOLE_REWARD).items())


def _shaped_reward(sample: Sample, config: AdvantageConfig, max_tokens: int | None) -> float:
    """Returns the grader's reward minus the penalty of `truncated: penalize`."""
    reward = _base_reward(sample, config)
    if config.truncated != "penalize":
        return reward
    penalty_fraction = float(_is_truncated(sample))
    # Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13). max_tokens limits each turn of a
    # episode, so the longest turn counts.
    if config.overlong and max_tokens is not None:
        buffer = config.overlong * max_tokens
        longest = max(stop - start for start, stop in sample.completion.sampled_spans)
        penalty_fraction = max(penalty_fraction, min(1.0, (longest - (max_tokens - buffer)) / buffer))
    return reward - config.penalty * penalty_fraction


def _is_truncated(sample: Sample) -> bool:
    # Truncated by max_tokens or by a limit of the episode.
    return sample.completion.finish_reason in TRUNCATED_REASONS


def _set_advantage(sample: Sample, advantage: float | np.ndarray | None, config: AdvantageConfig) -> Sample:
    # An agent may end without a response of the policy.
    if advantage is None or not len(sample.completion.tokens):
        return replace(sample, advantage=0.0, turn_advantages=(), in_loss=False)
    trained = not (config.truncated == "mask" and _is_truncated(sample))
    turns = tuple(advantage.tolist()) if isinstance(advantage, np.ndarray) else ()
    return replace(sample, advantage=float(np.mean(advantage)), turn_advantages=turns, in_loss=trained)
