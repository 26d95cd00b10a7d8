"""Advantages of weighted reward parts: worked out by hand, against TRL's formula, and every mistake by name."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers.records import make_sample
from torchtune_ext.grading import Outcome, Ungraded
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.tasks.task import Problem, Score

WEIGHTS = {"correct": 1.0, "short": 0.5}
GDPO = AdvantageConfig(parts=WEIGHTS, combine="normalize_then_sum")
FAILED = Ungraded("infra_failed", "the grader raised")


def group(*outcomes: tuple[float, float] | Outcome) -> Group:
    """A group of (correct, short), whose total reward is without meaning."""
    scores = [
        Score(7.0, dict(zip(WEIGHTS, each, strict=True))) if isinstance(each, tuple) else each for each in outcomes
    ]
    samples = tuple(make_sample(range(3), outcome=score) for score in scores)
    return Group(Problem("p", ({"role": "user", "content": "?"},), None), np.array([0], dtype=np.int32), samples)


def advantages(groups: list[Group], config: AdvantageConfig = GDPO, **options) -> list[list[float]]:
    return [[sample.advantage for sample in group.samples] for group in assign_advantages(groups, config, **options)[0]]


def test_gdpo_matches_hand_computed_example():
    """Both parts are 1, -1 after normalization, whatever their range; the sums are 3/2, 1/2, -1/2, -3/2 and four zeros."""
    groups = [group((1, 100), (1, 0), (0, 100), (0, 0)), group((1, 5), (1, 5), (1, 5), (1, 5))]
    scale = math.sqrt((2 * 1.5**2 + 2 * 0.5**2) / 8)
    first, second = advantages(groups)
    assert first == pytest.approx([1.5 / scale, 0.5 / scale, -0.5 / scale, -1.5 / scale])
    assert second == [0.0] * 4


def test_gdpo_separates_rewards_that_grpo_merges():
    """The paper's example: with two samples, GRPO's advantages do not tell one right part from two."""
    groups = [group((0, 0), (1, 0)), group((0, 0), (1, 1))]
    summed = AdvantageConfig(parts={"correct": 1.0, "short": 1.0})
    assert advantages(groups, summed) == [[-1.0, 1.0], [-1.0, 1.0]]
    whitened = AdvantageConfig(parts=summed.parts, combine="normalize_then_sum")
    assert advantages(groups, whitened) == [pytest.approx([-x, x]) for x in (1 / 2.5**0.5, 2 / 2.5**0.5)]


def trl_advantages(parts_PGK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """`normalize_then_sum` of TRL 1.16.0 with its eps of 1e-4 left out; NaN: an ungraded sample."""

    def deviation(values: torch.Tensor, mean: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
        count = values.isfinite().sum(dim, keepdim=True)
        return ((values - mean).square().nansum(dim, keepdim=True) / (count - 1)).sqrt()

    mean_P1K = parts_PGK.nanmean(1, keepdim=True)
    std_P1K = deviation(parts_PGK, mean_P1K, (1,))
    normalized_PGK = torch.where(std_P1K > 0, (parts_PGK - mean_P1K) / std_P1K, 0.0 * parts_PGK)
    sums_PG = (normalized_PGK * weights_K).sum(-1)
    mean = sums_PG.nanmean()
    return ((sums_PG - mean) / deviation(sums_PG, mean, (0, 1))).nan_to_num()


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_equals_trl_up_to_sample_deviation(seed):
    """TRL's standard deviations have N - 1: the factor of groups cancels, that of N samples of the step remains."""
    rng = np.random.default_rng(seed)
    parts_PGK = rng.normal(size=(6, 8, 2)) * (1.0, 40.0)
    parts_PGK[0, :, 0] = 0.25  # one part without variance
    parts_PGK[1] = parts_PGK[1, :1]  # a zero-variance group
    ours = advantages([group(*map(tuple, parts_GK)) for parts_GK in parts_PGK])
    theirs = trl_advantages(torch.tensor(parts_PGK), torch.tensor(list(WEIGHTS.values()), dtype=torch.float64))
    num_samples = parts_PGK.shape[0] * parts_PGK.shape[1]
    assert np.array(ours) == pytest.approx(theirs.numpy() * math.sqrt(num_samples / (num_samples - 1)), abs=1e-9)
    assert np.std(ours) == pytest.approx(1.0) and np.mean(ours) == pytest.approx(0.0, abs=1e-12)


def test_gdpo_without_parts_whitens_the_reward():
    """As in TRL with one reward function. A run refuses it, since GDPO is for several."""
    groups = [group(Score(4.0), Score(0.0)), group(Score(1.0), Score(1.0))]
    assert advantages(groups, AdvantageConfig(combine="normalize_then_sum")) == [
        pytest.approx([2**0.5, -(2**0.5)]),
        [0.0, 0.0],
    ]


def test_gdpo_ungraded_samples_leave_others_unchanged():
    plain = [group((1, 3), (0, 5), (1, 9)), group((0, 1), (1, 1))]
    mixed = [group((1, 3), FAILED, (0, 5), (1, 9)), group((0, 1), (1, 1), FAILED), group(FAILED, FAILED)]
    first, second = advantages(plain)
    assert advantages(mixed) == [[first[0], 0.0, *first[1:]], [*second, 0.0], [0.0, 0.0]]
    assert advantages([group(FAILED)]) == [[0.0]] and advantages([]) == []


def test_gdpo_cancelling_parts_are_zero_variance():
    """Both parts differ, their weighted sum does not; rounding must not become an advantage."""
    config = AdvantageConfig(parts={"correct": 1.0, "short": -1.0}, combine="normalize_then_sum")
    (done, other), stats = assign_advantages([group((0.1, 0.3), (0.7, 2.1), (0.2, 0.6)), group((1, 0), (0, 1))], config)
    assert [sample.in_loss for sample in done.samples] == [False] * 3 and stats.no_signal == 1
    assert [sample.advantage for sample in other.samples] == pytest.approx([2.5**0.5, -(2.5**0.5)])


def test_gdpo_uses_recipe_formula_for_each_part():
    """A recipe's own formula applies to each part, and the step's mean is subtracted."""
    groups = [group((1, 0), (0, 4), (0, 0)), group((1, 0), (1, 0), (0, 0))]
    sums = np.array([[1, 2, 0], [0, 0, -1]])
    ours = advantages(groups, formula=lambda rewards_G: rewards_G - np.median(rewards_G))
    assert np.array(ours) == pytest.approx((sums - sums.mean()) / sums.std())


def test_parts_replace_reward_as_base():
    parts, sums = [(1.0, 2.0), (0.0, 4.0), (1.0, 4.0), (0.0, 0.0)], [2.0, 2.0, 3.0, 0.0]
    for options in ({}, {"scale": "batch_std"}, {"baseline": "leave_one_out", "scale": "none"}, {"pass_k": 2}):
        with_parts = advantages([group(*parts)], AdvantageConfig(parts=WEIGHTS, **options))
        assert with_parts == advantages([group(*map(Score, sums))], AdvantageConfig(**options))
    assert advantages([group(*parts)], AdvantageConfig(parts={"short": 1.0}, scale="none")) == [[-0.5, 1.5, 1.5, -2.5]]


def test_hung_text_has_zero_in_every_part():
    hung = Score(0.0, {"timed_out": 1.0}, "no answer within 10 s")
    for combine in ("sum_then_normalize", "normalize_then_sum"):
        config = AdvantageConfig(parts=WEIGHTS, combine=combine)
        assert advantages([group((1, 1), hung, (0, 2))], config) == advantages([group((1, 1), (0, 0), (0, 2))], config)


def test_unfinished_episode_has_zero_in_missing_parts():
    (scored,) = advantages([group((1, 1), (0, 0), (0, 2))])
    failed = Score(-1.0, {"agent_failed": 1.0}, "the agent raised")
    assert advantages([group((1, 1), failed, (0, 2))]) == [scored]
    one = group((1, 1), Score(0.0), (0, 2))
    cut = one.samples[1]
    completion = replace(cut.completion, turns=((0, 3),), finish_reason="length")
    samples = (one.samples[0], replace(cut, completion=completion), one.samples[2])
    assert advantages([replace(one, samples=samples)]) == [scored]


def test_length_control_judges_answers_by_parts():
    """Texts with a format part only are wrong answers, whatever the sum of the parts is."""
    one = group((0, 1), (0, 1))
    longer = replace(one.samples[1], completion=make_sample(range(9)).completion)
    one = replace(one, samples=(one.samples[0], longer))
    assert advantages([one], AdvantageConfig(parts={"correct": 1.0}, length_coef=0.5)) == [[0.0, 0.0]]


@pytest.mark.parametrize("combine", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(
    "score, message",
    [
        (Score(1.0, {"correct": 1.0}), r"advantage.parts.short: a Score of the grader lacks the part 'short'; it has correct\. Fix: return it"),
        (Score(1.0, {"correct": 1.0, "shrt": 1.0}), "lacks the part 'short'; did you mean 'shrt'[?] Fix: "),
        (Score(1.0), "lacks the part 'correct'; it has no parts. Fix: "),
    ],
)  # fmt: skip
def test_missing_part_is_named(combine, score, message):
    with pytest.raises(ValueError, match=message):
        advantages([group((1, 1), score)], AdvantageConfig(parts=WEIGHTS, combine=combine))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"parts": {"correct": math.inf}}, r"advantage.parts=\{'correct': inf\}: expected finite weights, at least one of them not 0"),
        ({"parts": {"correct": 0.0}}, r"advantage.parts=\{'correct': 0.0\}: expected finite weights, at least one"),
        ({"parts": {"correct": "much"}}, r"advantage.parts=\{'correct': 'much'\} must be a mapping, each value a number"),
        ({"parts": ["correct"]}, r"must be a mapping, each value a number, as in advantage.parts.NAME=VALUE"),
        ({"parts": WEIGHTS, "credit": "turn"}, "advantage.parts with credit=turn: .* Fix: set credit=episode"),
        ({"combine": "whiten"}, "advantage.combine='whiten' is unknown: use"),
    ],
)  # fmt: skip
def test_bad_parts_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**options)


@pytest.mark.parametrize(
    "key, value",
    [("scale", "none"), ("baseline", "leave_one_out"), ("pass_k", 2), ("credit", "turn"), ("truncated", "penalize")],
)
def test_gdpo_other_formulas_are_refused(key, value):
    with pytest.raises(ValueError, match=f"advantage.combine=normalize_then_sum .* not .*{key}={value}"):
        AdvantageConfig(combine="normalize_then_sum", **{key: value})


def test_header_text_names_the_parts():
    base = "advantage (baseline mean, scale group_std)"
    assert str(AdvantageConfig(parts=WEIGHTS)) == f"{base}, of 1 correct + 0.5 short"
    assert str(GDPO) == f"{base}, 1 correct + 0.5 short normalized, then summed"
