"""Advantages against Python's statistics module, and samples that are excluded from a group."""

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchtune_ext.pipeline.advantages as advantages_module
from helpers.records import make_sample
from torchtune_ext.grading import Outcome, Ungraded
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages, best_of_k, select_groups
from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.tasks.task import Problem, Score

FAILED = Ungraded("infra_failed", "the grader raised")
TIMED_OUT = Ungraded("timed_out", "no answer")
REWARDS = st.sampled_from([-100.0, -1.0, 0.0, 0.1, 0.25, 1.0, 463.0])


def sample(reward: float | Outcome, finish_reason: str = "stop", length: int = 3) -> Sample:
    outcome = reward if isinstance(reward, Outcome) else Score(reward, {})
    return make_sample(range(length), finish_reason=finish_reason, text="text", outcome=outcome)


def group(*samples: Sample) -> Group:
    problem = Problem("p", ({"role": "user", "content": "?"},), None)
    return Group(problem, np.array([0], dtype=np.int32), samples)


def advantages(*rewards: float | Outcome, **options) -> list[float]:
    (done,), _ = assign_advantages([group(*map(sample, rewards))], AdvantageConfig(**options))
    return [s.advantage for s in done.samples]


def test_advantages_match_hand_computed_examples():
    assert advantages(1.0, 0.0, 0.0, 1.0) == [1.0, -1.0, -1.0, 1.0]
    assert advantages(4.0, 0.0, 2.0, scale="none") == [2.0, -2.0, 0.0]
    # mean 1/4, variance 3/16: 3/4 over sqrt(3)/4, and -1/4 over it
    assert advantages(1.0, 0.0, 0.0, 0.0) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


def conversation(*rewards: float, answered: bool = True) -> Sample:
    """One turn of two tokens per reward; a truncated last turn gets no answer from the environment."""
    turns = tuple((3 * t, 3 * t + 2) for t in range(len(rewards)))
    talk = make_sample(range(3 * len(rewards)), finish_reason="completed" if answered else "length")
    return replace(
        talk,
        completion=replace(talk.completion, turns=turns),
        outcome=Score(sum(rewards), {}),
        turn_rewards=rewards if answered else rewards[:-1],
    )


def test_turns_are_compared_with_turns():
    talks = [conversation(1.0, 0.0), conversation(0.0, 1.0), conversation(0.0, 0.0, 2.0), conversation(0.0)]
    (done,), stats = assign_advantages([group(*talks)], AdvantageConfig(credit="turn", scale="none"))
    # Returns: 1 1 2 0 from the first turn, 0 1 2 from the second, 2 from the third.
    assert [s.turn_advantages for s in done.samples] == [(0.0, -1.0), (0.0, 0.0), (1.0, 1.0, 0.0), (-1.0,)]
    assert [s.advantage for s in done.samples] == [-0.5, 0.0, 2 / 3, -1.0]
    assert all(s.in_loss for s in done.samples)
    assert stats.metrics() == {
        "groups/used": 1.0,
        "groups/no_signal": 0,
        "groups/infra_failed": 0,
        "groups/timed_out": 0,
        "groups/lone_turns": 1,
    }
    assert "groups/lone_turns" not in assign_advantages([group(*talks)], AdvantageConfig())[1].metrics()


def test_equal_episodes_may_differ_by_turn():
    talks = [conversation(1.0, 0.0), conversation(0.0, 1.0)]
    (whole,), _ = assign_advantages([group(*talks)], AdvantageConfig())
    (turns,), stats = assign_advantages([group(*talks)], AdvantageConfig(credit="turn"))
    assert not whole.has_nonzero_advantage and turns.has_nonzero_advantage and stats.num_nonzero_groups == 1
    assert [s.turn_advantages for s in turns.samples] == [(0.0, -1.0), (0.0, 1.0)]


def test_turn_credit_truncated_episode_penalizes_all_turns():
    talks = [conversation(0.0, 0.0, answered=False), conversation(0.0, 0.0)]
    config = AdvantageConfig(credit="turn", scale="none", truncated="penalize", penalty=1.0)
    (done,), _ = assign_advantages([group(*talks)], config)
    assert [s.turn_advantages for s in done.samples] == [(-0.5, -0.5), (0.5, 0.5)]


def test_episode_without_a_response_is_not_trained_on():
    """An agent may return a reward without a request."""
    empty = replace(conversation(), outcome=Score(1.0))
    for credit in "turn", "episode":
        (given,), _ = assign_advantages(
            [group(empty, conversation(1.0), conversation(0.0))], AdvantageConfig(credit=credit)
        )
        first, *others = given.samples
        assert not first.in_loss and first.advantage == 0 and first.turn_advantages == ()
        assert all(sample.in_loss and sample.advantage for sample in others)


@settings(max_examples=200)
@given(
    rewards=st.lists(REWARDS, min_size=2, max_size=9),
    options=st.sampled_from([("mean", "group_std"), ("leave_one_out", "none")]),
)
def test_one_turn_is_an_episode(rewards, options):
    baseline, scale = options
    config = AdvantageConfig(baseline=baseline, scale=scale, credit="turn")
    (done,), _ = assign_advantages([group(*map(sample, rewards), sample(FAILED))], config)
    whole = advantages(*rewards, FAILED, baseline=baseline, scale=scale)
    assert [s.advantage for s in done.samples] == whole
    assert done.has_nonzero_advantage == any(whole)


@settings(max_examples=200)
@given(rewards=st.lists(REWARDS, min_size=1, max_size=16))
def test_against_the_definition(rewards):
    for scaling in ("group_std", "none"):
        (done,), stats = assign_advantages([group(*map(sample, rewards))], AdvantageConfig(scale=scaling))
        values = [s.advantage for s in done.samples]
        if len(set(rewards)) == 1:  # also a group of one sample
            assert values == [0.0] * len(rewards)
            assert not any(s.in_loss for s in done.samples)
            assert (stats.num_nonzero_groups, stats.no_signal) == (0, 1)
            continue
        scale = statistics.pstdev(rewards) if scaling == "group_std" else 1.0
        assert values == pytest.approx([(r - statistics.fmean(rewards)) / scale for r in rewards], rel=1e-9, abs=1e-9)
        assert all(s.in_loss for s in done.samples)
        assert (stats.num_nonzero_groups, stats.no_signal) == (1, 0)


def test_equal_fractional_rewards_have_zero_advantage():
    """The mean of ten times 0.1 is not 0.1: rounding must not be divided by its own std."""
    assert advantages(*[0.1] * 10) == [0.0] * 10
    assert advantages(*[0.1] * 10, scale="none") == [0.0] * 10


@pytest.mark.parametrize(
    "rewards, warns",
    [
        ((1e-10, 0.0), True),
        ((1e9, 1e9 + 0.5), True),
        ((0.1 + 0.2, 0.3), False),
        ((1e12 + 1e-3, 1e12), False),
        ((1e-8, 0.0), False),
    ],
)
def test_advantages_nearly_equal_rewards_warn_once(caplog, rewards, warns):
    advantages_module._warn_of_ties.cache_clear()
    caplog.clear()
    for _ in range(2):
        advantages(*rewards)
    assert len(caplog.messages) == warns


def test_advantages_each_kind_of_failure_is_counted():
    hung = Score(0.0, {"timed_out": 1.0}, "no answer within 10 s")
    samples = map(sample, (1.0, hung, FAILED, TIMED_OUT, TIMED_OUT, Ungraded("noisy", "disturbed")))
    (done,), stats = assign_advantages([group(*samples)], AdvantageConfig())
    assert [s.in_loss for s in done.samples] == [True, True, False, False, False, False]
    assert [s.advantage for s in done.samples[:2]] == [1.0, -1.0]
    assert (stats.infra_failed, stats.timed_out) == (1, 3)


@settings(max_examples=100)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), places=st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_ungraded_samples_leave_other_advantages_unchanged(rewards, places):
    """At any position they are not trained on and do not change the advantages of other samples."""
    mixed: list[float | Outcome] = list(rewards)
    for number, place in enumerate(places):
        mixed.insert(place, (FAILED, TIMED_OUT)[number % 2])
    (done,), stats = assign_advantages([group(*map(sample, mixed))], AdvantageConfig())
    left_out = [s for s in done.samples if s.score is None]
    assert [s.advantage for s in done.samples if s.score is not None] == advantages(*rewards)
    assert len(left_out) == stats.infra_failed + stats.timed_out == len(places)
    assert stats.timed_out == len(places) // 2
    assert all(not s.in_loss and s.advantage == 0.0 for s in left_out)


def test_one_gradable_sample_has_no_baseline():
    assert advantages(1.0, FAILED, TIMED_OUT) == [0.0, 0.0, 0.0]
    assert advantages(FAILED, FAILED) == [0.0, 0.0]


def test_policy_failed_is_trained_with_its_score():
    bad = Score(-1.0, {"failed": 1.0})
    assert advantages(1.0, bad) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("truncated", "expected", "trained"),
    [
        ("keep", [1.0, 0.0, -1.0], [True, True, True]),
        ("mask", [1.0, 0.0, -1.0], [True, True, False]),  # still in the baseline
        ("penalize", [1.5, 0.5, -2.0], [True, True, True]),  # rewards 2, 1, -1.5
    ],
)
def test_truncated_samples(truncated, expected, trained):
    samples = sample(2.0), sample(1.0, "early_stop"), sample(0.0, "length")
    (done,), _ = assign_advantages([group(*samples)], AdvantageConfig(scale="none", truncated=truncated, penalty=1.5))
    assert [s.advantage for s in done.samples] == pytest.approx(expected)
    assert [s.in_loss for s in done.samples] == trained


def test_truncation_penalty_alone_gives_nonzero_advantages():
    samples = sample(1.0), sample(1.0, "length")
    (done,), _ = assign_advantages([group(*samples)], AdvantageConfig(truncated="penalize", penalty=0.5))
    assert [s.advantage for s in done.samples] == [1.0, -1.0]


def test_groups_stay_in_order_and_whole():
    groups = [group(sample(1.0), sample(0.0)), group(sample(2.0), sample(2.0)), group(sample(0.0), sample(FAILED))]
    done, stats = assign_advantages(groups, AdvantageConfig())
    assert [g.problem for g in done] == [g.problem for g in groups]
    for before, after in zip(groups, done, strict=True):
        assert [s.outcome for s in after.samples] == [s.outcome for s in before.samples]
        assert all(a.completion is b.completion for a, b in zip(after.samples, before.samples, strict=True))
    assert [[s.in_loss for s in g.samples] for g in done] == [[True, True], [False, False], [False, False]]
    assert (stats.num_nonzero_groups, stats.no_signal, stats.infra_failed, stats.timed_out) == (1, 2, 1, 0)
    assert groups[0].samples[0].in_loss is False  # the input records are not changed
    assert assign_advantages([], AdvantageConfig())[0] == []


def test_extra_loss_terms_train_zero_variance_groups():
    groups = [
        group(sample(1.0), sample(0.0)),
        group(sample(2.0), sample(2.0), sample(2.0, "length"), sample(FAILED)),
        group(sample(TIMED_OUT), sample(FAILED)),
    ]
    done, stats = assign_advantages(groups, AdvantageConfig(truncated="mask"), train_all=True)
    assert [[s.in_loss for s in g.samples] for g in done] == [[True, True], [True, True, False, False], [False, False]]
    assert [[s.advantage for s in g.samples] for g in done] == [[1.0, -1.0], [0.0] * 4, [0.0] * 2]
    assert [g.has_nonzero_advantage for g in done] == [True, False, False]
    assert (stats.num_nonzero_groups, stats.no_signal) == (1, 2)


@settings(max_examples=200)
@given(signal=st.lists(st.booleans(), max_size=12), size=st.integers(1, 12), train_all=st.booleans())
def test_select_groups_replaces_last_zero_variance_groups_first(signal, size, train_all):
    signal = [flag and sum(signal[:i]) < size for i, flag in enumerate(signal)]  # refills end with enough groups
    groups, _ = assign_advantages(
        [group(sample(1.0), sample(0.0 if flag else 1.0)) for flag in signal], AdvantageConfig(), train_all=train_all
    )
    kept, drawn = select_groups(groups, size)
    replaced = [g for g in drawn if not any(g is k for k in kept)]
    assert len(kept) == min(size, len(groups)) and len(kept) + len(replaced) == len(groups)
    assert all(a.samples[0].completion is b.samples[0].completion for a, b in zip(drawn, groups, strict=True))
    assert sum(g.has_nonzero_advantage for g in kept) == sum(signal)
    assert [any(g is k for k in kept) for g in groups] == _expected(signal, size)
    assert not any(s.in_loss for g in replaced for s in g.samples)
    assert all(g.has_nonzero_advantage or train_all == any(s.in_loss for s in g.samples) for g in kept)


def test_select_groups_excess_groups_drop_the_last():
    """Stored groups, including replaced ones, may get other advantages in a replay."""
    groups, _ = assign_advantages([group(sample(1.0), sample(0.0)) for _ in range(4)], AdvantageConfig())
    kept, drawn = select_groups(groups, 2)
    assert [any(g is k for k in kept) for g in drawn] == [True, True, False, False] and len(kept) == 2
    assert [g.samples[0].in_loss for g in drawn] == [True, True, False, False]


def _expected(signal: list[bool], size: int) -> list[bool]:
    silent = [i for i, flag in enumerate(signal) if not flag][: max(0, size - sum(signal))]
    return [flag or i in silent for i, flag in enumerate(signal)]


@pytest.mark.parametrize("rewards", [(1, 0, 0, 0), (1, 1, 0), (1, 0), (0, 0, 0), (1, 1), (0, 1, 0, 0, 1, 1, 0)])
def test_maxrl_advantages_equal_prime_rl(rewards):
    """Of prime-rl's `MaxRLAlgorithm`. SkyRL and the authors add 1e-6 to the mean."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mean = rewards.mean()
    theirs = torch.zeros_like(rewards) if mean <= 0 else (rewards - mean) / mean
    assert advantages(*rewards.tolist(), scale="group_mean") == pytest.approx(theirs.tolist(), rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_maxrl_expected_gradient_is_truncated_likelihood(n):
    """Over all groups of n samples of a policy that is right with probability p: the gradient of the first n - 1 terms of
    log p = -sum of (1 - p)^k / k. The paper's n-th term is lost because a group without a right sample has advantage 0."""
    logit = torch.tensor(-1.2, dtype=torch.float64, requires_grad=True)
    p = logit.sigmoid()
    (want,) = torch.autograd.grad(-sum((1 - p) ** k / k for k in range(1, n)), logit)
    expected, p = 0.0, p.item()
    for right in range(n + 1):
        values = advantages(*[1.0] * right, *[0.0] * (n - right), scale="group_mean")
        scores = [1 - p] * right + [-p] * (n - right)  # gradients of the log-probs in the logit
        chance = math.comb(n, right) * p**right * (1 - p) ** (n - right)
        expected += chance * statistics.fmean(a * score for a, score in zip(values, scores, strict=True))
    assert expected == pytest.approx(want.item(), rel=1e-12)


def test_maxrl_rejects_rewards_other_than_binary():
    assert advantages(1.0, FAILED, 0.0, scale="group_mean") == [1.0, 0.0, -1.0]
    message = "problem 'p' has a completion with reward 0.5; expected 0 or 1. Fix: return 0 or 1"
    with pytest.raises(ValueError, match=message):
        advantages(1.0, 0.5, scale="group_mean")


def test_leave_one_out_baseline_is_mean_of_others():
    values = advantages(4.0, 0.0, 2.0, 1.0, baseline="leave_one_out", scale="none")
    assert values == pytest.approx([4 - 3 / 3, 0 - 7 / 3, 2 - 5 / 3, 1 - 6 / 3])


def test_batch_std_without_graded_samples_is_silent(recwarn):
    _, stats = assign_advantages([group(sample(FAILED), sample(TIMED_OUT))], AdvantageConfig(scale="batch_std"))
    assert not recwarn and stats.num_nonzero_groups == 0


def test_batch_std_is_that_of_all_gradable_rewards():
    groups = [
        group(sample(1.0), sample(0.0), sample(FAILED)),
        group(sample(1.0), sample(1.0)),
        group(sample(3.0), sample(0.0)),
    ]
    done, _ = assign_advantages(groups, AdvantageConfig(scale="batch_std"))
    deviation = statistics.pstdev([1.0, 0.0, 1.0, 1.0, 3.0, 0.0])
    assert [s.advantage for s in done[0].samples] == pytest.approx([0.5 / deviation, -0.5 / deviation, 0.0])
    assert [s.advantage for s in done[2].samples] == pytest.approx([1.5 / deviation, -1.5 / deviation])


@settings(max_examples=100)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), k=st.integers(1, 8))
def test_best_of_k_against_all_subsets(rewards, k):
    k = min(k, len(rewards))
    subsets = list(itertools.combinations(range(len(rewards)), k))
    best = [max(rewards[i] for i in subset) for subset in subsets]
    values, mean, deviation = best_of_k(np.array(rewards), k)
    for i in range(len(rewards)):
        own = [b for subset, b in zip(subsets, best, strict=True) if i in subset]
        assert values[i] == pytest.approx(statistics.fmean(own), abs=1e-9)
    assert mean == pytest.approx(statistics.fmean(best), abs=1e-9)
    assert deviation == pytest.approx(statistics.pstdev(best), rel=1e-9, abs=1e-9)


def test_pass_k_binary_rewards_match_published_formula():
    n, wrong, k = 8, 6, 3
    values = advantages(*[1.0] * (n - wrong), *[0.0] * wrong, pass_k=k)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean))
    right = (1 - mean) / deviation
    other = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
    assert values == pytest.approx([right] * (n - wrong) + [other] * wrong)


def test_pass_k_without_wrong_subset_has_zero_advantage():
    assert advantages(1.0, 1.0, 1.0, 0.0, pass_k=2) == [0.0] * 4  # every pair contains a correct sample
    assert advantages(1.0, 0.0, pass_k=4) == [0.0, 0.0]  # fewer graded samples than k


@pytest.mark.parametrize(("length", "expected"), [(3, 0.0), (16, 0.0), (18, 0.5), (20, 1.0)])
def test_overlong_penalty_grows_over_the_last_share(length, expected):
    """max_tokens 20, overlong 0.2: from 16 tokens on (DAPO, eq. 13)."""
    long = sample(1.0, length=length)
    config = AdvantageConfig(scale="none", truncated="penalize", penalty=2.0, overlong=0.2)
    (done,), _ = assign_advantages([group(long, sample(0.0))], config, max_tokens=20)
    assert done.samples[0].advantage == pytest.approx((1.0 - 2.0 * expected) / 2)


def test_overlong_penalty_alone_leaves_zero_variance_group():
    """DAPO resamples groups that are all right or all wrong; an overlong token must not create an advantage."""
    long = sample(1.0, length=17)
    config = AdvantageConfig(truncated="penalize", penalty=0.5, overlong=0.2)
    (done,), stats = assign_advantages([group(long, *[sample(1.0)] * 15)], config, max_tokens=20)
    assert stats.no_signal == 1 and not any(s.in_loss for s in done.samples)
    with pytest.raises(ValueError, match="advantage.overlong=0.2 is a fraction of max_tokens"):
        assign_advantages([], config)


def of_lengths(pairs, **options):
    """Advantages of completions with these (reward, length)."""
    (done,), _ = assign_advantages([group(*(sample(r, length=n) for r, n in pairs))], AdvantageConfig(**options))
    return [s.advantage for s in done.samples]


def test_length_term_matches_hand_computed_example():
    pairs = [(1.0, 10), (1.0, 20), (0.0, 5), (1.0, 30), (0.0, 50)]
    plain = of_lengths(pairs)
    # The right answers have 20 tokens on average and at most 30.
    terms = [0.3 * (20 - n) / 30 if r else 0.0 for r, n in pairs]
    assert of_lengths(pairs, length_coef=0.3) == pytest.approx([a + b for a, b in zip(plain, terms, strict=True)])
    turns = of_lengths(pairs, length_coef=0.3, credit="turn")
    assert turns == pytest.approx(of_lengths(pairs, length_coef=0.3))


@pytest.mark.parametrize("lengths", [(3, 9, 7, 7), (1, 2), (40, 8, 8)])
def test_length_term_of_right_answers_equals_prime_rl(lengths):
    """Of prime-rl's `GRPOAlgorithm` with a penalty on output tokens, for a group that is all right: elsewhere prime-rl
    pays wrong answers for brevity, too, and scales the penalty by the fraction of right answers."""
    rewards, output, weight = torch.ones(len(lengths)).double(), torch.tensor(lengths).double(), 0.25
    shaped = rewards - rewards.mean() * weight * (output / output.max().clamp(min=1))
    ours = of_lengths([(1.0, n) for n in lengths], length_coef=weight, scale="none")
    assert ours == pytest.approx((shaped - shaped.mean()).tolist(), rel=1e-12, abs=1e-15)
    # The standard deviation does not inflate the term.
    assert of_lengths([(1.0, n) for n in lengths], length_coef=weight) == ours


@settings(max_examples=200)
@given(
    pairs=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 60)), min_size=2, max_size=9),
    options=st.sampled_from(
        [{}, {"scale": "none"}, {"scale": "group_mean"}, {"scale": "none", "baseline": "leave_one_out"}]
    ),
)
def test_length_never_pays_wrong_answers(pairs, options):
    plain, ours = of_lengths(pairs, **options), of_lengths(pairs, length_coef=1.0, **options)
    right = [i for i, (reward, _) in enumerate(pairs) if reward]
    wrong = [i for i, (reward, _) in enumerate(pairs) if not reward]
    assert [ours[i] for i in wrong] == [plain[i] for i in wrong]
    assert sum(ours) == pytest.approx(sum(plain), abs=1e-9)
    assert all(ours[i] > ours[j] for i in right for j in wrong)
    assert all((ours[i] > ours[j]) == (pairs[i][1] < pairs[j][1]) for i in right for j in right)


def test_length_term_trains_groups_of_right_answers():
    config = AdvantageConfig(length_coef=0.5, truncated="penalize", overlong=0.2)
    groups = [
        group(*(sample(reward, length=n) for n in lengths))
        for reward, lengths in ((1.0, (4, 8)), (1.0, (4, 4)), (0.0, (4, 8)), (0.25, (4, 8)))
    ]
    done, stats = assign_advantages(groups, config, max_tokens=20)
    assert [[s.advantage for s in g.samples] for g in done] == [[0.125, -0.125], [0.0] * 2, [0.0] * 2, [0.0] * 2]
    assert [g.samples[0].in_loss for g in done] == [True, False, False, False] and stats.no_signal == 3


def test_shuffled_rewards_permute_advantages_of_each_group():
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.25]
    orders, sums = set(), np.zeros(len(rewards))
    for version in range(400):
        samples = [make_sample([5, i], versions=[version] * 2, outcome=Score(r, {})) for i, r in enumerate(rewards)]
        mixed = group(sample(FAILED), *samples)
        (done,), stats = assign_advantages([mixed], AdvantageConfig(rewards="shuffled"))
        values = [s.advantage for s in done.samples[1:]]
        assert sorted(values) == sorted(advantages(*rewards)) and stats.num_nonzero_groups == 1
        assert [s.outcome for s in done.samples] == [s.outcome for s in mixed.samples], "rollouts keep what was graded"
        assert not done.samples[0].in_loss and all(s.in_loss for s in done.samples[1:])
        (again,), _ = assign_advantages([done], AdvantageConfig(rewards="shuffled"))
        assert [s.advantage for s in again.samples[1:]] == values, "the same order after a refill"
        orders.add(tuple(values))
        sums += values
    # Each position has each advantage (standard deviation 1) equally often: five standard errors of a mean of 400.
    assert len(orders) > 50 and np.abs(sums / 400).max() < 5 / 400**0.5
    assert advantages(1.0, 1.0, rewards="shuffled") == [0.0, 0.0]


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"rewards": "shuffled", "credit": "turn"},
            "advantage.rewards=shuffled permutes one .* Fix: use credit=episode",
        ),
        ({"length_coef": 1.5}, "advantage.length_coef=1.5 must be"),
        ({"baseline": "median"}, "advantage.baseline='median' is unknown"),
        ({"scale": "std"}, "advantage.scale='std' is unknown: use 'group_std'"),
        ({"truncated": "drop"}, "advantage.truncated='drop' is unknown"),
        ({"pass_k": 0}, "advantage.pass_k=0 must be"),
        ({"pass_k": 2, "baseline": "leave_one_out"}, "advantage.pass_k=2 defines its own baseline"),
        ({"credit": "token"}, "advantage.credit='token' is unknown"),
        (
            {"credit": "turn", "scale": "batch_std"},
            "advantage.credit=turn compares turns of one group. Fix: use pass_k=1, and scale=",
        ),
        (
            {"credit": "turn", "pass_k": 2},
            "advantage.credit=turn compares turns of one group. Fix: use pass_k=1, and scale=",
        ),
        ({"pass_k": 2, "scale": "batch_std"}, "advantage.pass_k=2 defines its own baseline"),
        ({"pass_k": 2, "scale": "group_mean"}, "advantage.pass_k=2 defines its own baseline"),
        ({"credit": "turn", "scale": "group_mean"}, "advantage.credit=turn compares turns of one group"),
        (
            {"scale": "group_mean", "baseline": "leave_one_out"},
            "group_mean needs .* use baseline=mean, .*=leave_one_out",
        ),
        (
            {"scale": "group_mean", "truncated": "penalize"},
            "and truncated=keep or mask, not baseline=mean, truncated=penal",
        ),
        ({"penalty": -1.0}, "advantage.penalty=-1.0 must be"),
        ({"overlong": 1.5, "truncated": "penalize"}, "advantage.overlong=1.5 must be"),
        ({"overlong": 0.2}, "advantage.overlong=0.2 requires truncated=penalize, not keep"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AdvantageConfig(**options)


@pytest.mark.parametrize(
    "options, words",
    [
        ({}, "advantage (baseline mean, scale group_std)"),
        ({"pass_k": 2, "scale": "none"}, "advantage (baseline mean, scale none), best of 2"),
        ({"truncated": "mask", "overlong": 0.0}, "advantage (baseline mean, scale group_std), truncated samples: mask"),
        ({"truncated": "penalize"}, "advantage (baseline mean, scale group_std), truncated samples: penalize by 1"),
        ({"length_coef": 0.2}, "advantage (baseline mean, scale group_std), right answers compete on length by 0.2"),
        ({"rewards": "shuffled"}, "advantage (baseline mean, scale group_std), placebo: shuffled rewards"),
        (
            {"truncated": "penalize", "penalty": 0.5, "overlong": 0.2},
            "advantage (baseline mean, scale group_std), truncated samples: penalize by 0.5 over the last 20%",
        ),
    ],
)
def test_advantage_config_text_describes_options(options, words):
    assert str(AdvantageConfig(**options)) == words
