"""Advantages against Python's statistics module, and samples that are excluded from a group."""

import itertools
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    "options, message",
    [
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
        (
            {"truncated": "penalize", "penalty": 0.5, "overlong": 0.2},
            "advantage (baseline mean, scale group_std), truncated samples: penalize by 0.5 over the last 20%",
        ),
    ],
)
def test_advantage_config_text_describes_options(options, words):
    assert str(AdvantageConfig(**options)) == words
