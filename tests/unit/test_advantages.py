"""advantages.py against Python's statistics module, and what is left out of a group."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_ext.advantages import Group, Sample, with_advantages
from torchtune_ext.grading import Outcome
from torchtune_ext.tasks.task import Problem, Score

FAILED = Outcome("infra_failed", None, "the grader raised")
TIMED_OUT = Outcome("timed_out", None, "no answer")
REWARDS = st.sampled_from([-100.0, -1.0, 0.0, 0.1, 0.25, 1.0, 463.0])


def sample(reward: float | Outcome, finish_reason: str = "stop") -> Sample:
    outcome = reward if isinstance(reward, Outcome) else Outcome("scored", Score(reward, {}), "")
    tokens = np.array([1, 2, 3], dtype=np.int32)
    return Sample(tokens, np.zeros(3, np.float32), np.zeros(3, np.int32), "text", finish_reason, outcome)


def group(*samples: Sample) -> Group:
    problem = Problem("p", ({"role": "user", "content": "?"},), None)
    return Group(problem, np.array([0], dtype=np.int32), samples)


def advantages(*rewards: float | Outcome, **options) -> list[float]:
    (done,), _ = with_advantages([group(*map(sample, rewards))], **options)
    return [s.advantage for s in done.samples]


def test_by_hand():
    assert advantages(1.0, 0.0, 0.0, 1.0) == [1.0, -1.0, -1.0, 1.0]
    assert advantages(4.0, 0.0, 2.0, normalize="none") == [2.0, -2.0, 0.0]
    # mean 1/4, variance 3/16: 3/4 over sqrt(3)/4, and -1/4 over it
    assert advantages(1.0, 0.0, 0.0, 0.0) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


@settings(max_examples=200, deadline=None)
@given(rewards=st.lists(REWARDS, min_size=1, max_size=16))
def test_against_the_definition(rewards):
    for normalize in ("std", "none"):
        (done,), stats = with_advantages([group(*map(sample, rewards))], normalize)
        found = [s.advantage for s in done.samples]
        if len(set(rewards)) == 1:  # a group of one, too
            assert found == [0.0] * len(rewards)
            assert not any(s.trained for s in done.samples)
            assert (stats.groups, stats.no_signal) == (0, 1)
            continue
        scale = statistics.pstdev(rewards) if normalize == "std" else 1.0
        assert found == pytest.approx([(r - statistics.fmean(rewards)) / scale for r in rewards], rel=1e-9, abs=1e-9)
        assert all(s.trained for s in done.samples)
        assert (stats.groups, stats.no_signal) == (1, 0)


def test_equal_rewards_that_are_no_round_numbers_carry_no_signal():
    """The mean of ten times 0.1 is not 0.1: the deviations must not be blown up by their own size."""
    assert advantages(*[0.1] * 10) == [0.0] * 10
    assert advantages(*[0.1] * 10, normalize="none") == [0.0] * 10


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(REWARDS, min_size=2, max_size=8), places=st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_samples_nobody_could_grade_change_nothing(rewards, places):
    """Inserted anywhere, they are not trained, and the others get what they get without them."""
    mixed: list[float | Outcome] = list(rewards)
    for number, place in enumerate(places):
        mixed.insert(place, (FAILED, TIMED_OUT)[number % 2])
    (done,), stats = with_advantages([group(*map(sample, mixed))])
    left_out = [s for s in done.samples if s.outcome.score is None]
    assert [s.advantage for s in done.samples if s.outcome.score is not None] == advantages(*rewards)
    assert len(left_out) == stats.infra_failed == len(places)
    assert all(not s.trained and s.advantage == 0.0 for s in left_out)


def test_one_gradable_sample_has_no_baseline():
    assert advantages(1.0, FAILED, TIMED_OUT) == [0.0, 0.0, 0.0]
    assert advantages(FAILED, FAILED) == [0.0, 0.0]


def test_policy_failed_is_trained_with_its_score():
    bad = Outcome("policy_failed", Score(-1.0, {"failed": 1.0}), "")
    assert advantages(1.0, bad) == [1.0, -1.0]


@pytest.mark.parametrize(
    ("truncated", "expected", "trained"),
    [
        ("keep", [1.0, 0.0, -1.0], [True, True, True]),
        ("mask", [1.0, 0.0, -1.0], [True, True, False]),  # still in the mean
        ("penalise", [1.5, 0.5, -2.0], [True, True, True]),  # rewards 2, 1, -1.5
    ],
)
def test_truncated_samples(truncated, expected, trained):
    samples = sample(2.0), sample(1.0, "early_stop"), sample(0.0, "length")
    (done,), stats = with_advantages([group(*samples)], "none", truncated, truncated_penalty=1.5)
    assert [s.advantage for s in done.samples] == pytest.approx(expected)
    assert [s.trained for s in done.samples] == trained
    assert stats.truncated == 1


def test_a_penalty_alone_is_a_signal():
    samples = sample(1.0), sample(1.0, "length")
    (done,), _ = with_advantages([group(*samples)], "std", "penalise", truncated_penalty=0.5)
    assert [s.advantage for s in done.samples] == [1.0, -1.0]


def test_groups_stay_in_order_and_whole():
    groups = [group(sample(1.0), sample(0.0)), group(sample(2.0), sample(2.0)), group(sample(0.0), sample(FAILED))]
    done, stats = with_advantages(groups)
    assert [g.problem for g in done] == [g.problem for g in groups]
    for before, after in zip(groups, done, strict=True):
        assert [s.outcome for s in after.samples] == [s.outcome for s in before.samples]
        assert all(a.tokens is b.tokens for a, b in zip(after.samples, before.samples, strict=True))
    assert [[s.trained for s in g.samples] for g in done] == [[True, True], [False, False], [False, False]]
    assert (stats.groups, stats.no_signal, stats.infra_failed, stats.truncated) == (1, 2, 1, 0)
    assert groups[0].samples[0].trained is False  # the records given are not touched
    assert with_advantages([])[0] == []


def test_unknown_words_raise():
    with pytest.raises(ValueError, match="advantage='mean' is unknown"):
        with_advantages([], normalize="mean")
    with pytest.raises(ValueError, match="truncated='drop' is unknown"):
        with_advantages([], truncated="drop")
