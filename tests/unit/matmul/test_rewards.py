"""The order of outcomes is kept, and what normalization by group leaves of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured.check import OUTCOMES
from torchtune_ext.measured.matmul.rewards import FAILURES, KINDS, PUBLISHED, SLOWEST, failure, reward

# GFLOPS of one core up to those of the paper's node, on a machine whose peak is 1000.
SPEEDS = st.floats(1e-3, 999.0)


def at(gflops: float, naive: float = 2.0, peak: float = 1000.0) -> SimpleNamespace:
    """What a reward asks of a timing."""
    return SimpleNamespace(gflops=gflops, ratio=gflops / naive, peak_share=gflops / peak)


def advantages(rewards: list[float]) -> np.ndarray:
    """As GRPO normalizes a group."""
    values = np.array(rewards)
    return (values - values.mean()) / values.std()


def test_every_outcome_of_the_checker_has_a_reward():
    assert set(FAILURES) == set(PUBLISHED) == set(OUTCOMES) - {"ok"}
    for kind in KINDS:
        assert all(reward(outcome, kind=kind) < 0 for outcome in FAILURES)
        assert reward("noisy", kind=kind) is None


def test_the_published_tiers():
    assert [reward(outcome, kind="published") for outcome in FAILURES] == [-100, -100, -40, -30, -20, -10]
    assert reward("ok", at(549.0), "published") == 549.0


def test_figures_worked_by_hand():
    assert [failure(outcome) for outcome in FAILURES] == pytest.approx([-1, -5 / 6, -4 / 6, -3 / 6, -2 / 6, -1 / 6])
    assert reward("ok", at(2.0)) == 1.0
    assert reward("ok", at(16.0)) == pytest.approx(1.75)
    assert reward("ok", at(1.0)) == pytest.approx(0.75)
    assert reward("ok", at(2.0 * SLOWEST)) == reward("ok", at(SLOWEST)) == 0.0
    assert reward("ok", at(250.0), "peak_share") == 0.25


@pytest.mark.parametrize("kind", KINDS)
@given(a=SPEEDS, b=SPEEDS)
def test_the_order_of_outcomes_is_the_order_of_rewards(kind, a, b):
    slow, fast = sorted((a, b))
    ladder = [reward(outcome, kind=kind) for outcome in FAILURES]
    ladder += [reward("ok", at(slow), kind), reward("ok", at(fast), kind)]
    assert ladder == sorted(ladder)
    strict = [
        value for outcome, value in zip(FAILURES, ladder, strict=False) if kind != "published" or outcome != "forbidden"
    ]
    assert len(set(strict)) == len(strict) and strict[-1] < ladder[-2]
    # Below a 16th of the naive program all are one; elsewhere a doubling is never lost.
    if slow > 2.0 * SLOWEST and fast >= 2 * slow:
        assert ladder[-2] < ladder[-1]


@given(scale=st.floats(0.01, 100.0), speeds=st.lists(SPEEDS, min_size=2, max_size=8))
def test_a_faster_machine_does_not_change_the_log_reward(scale, speeds):
    """Speeds are those beside the naive program, so GFLOPS of the machine drop out."""
    here = [reward("ok", at(speed, naive=2.0)) for speed in speeds]
    there = [reward("ok", at(scale * speed, naive=scale * 2.0)) for speed in speeds]
    assert there == pytest.approx(here, abs=1e-9)


GROUP = ("format", "compile_error", "timeout", "runtime_error", "wrong_result", "wrong_result", "compile_error")


def spread_of_failures(kind: str, gflops: float) -> float:
    """The distance of the best from the worst failure, as a share of the group's whole range, after normalization."""
    found = advantages([*(reward(outcome, kind=kind) for outcome in GROUP), reward("ok", at(gflops), kind)])
    return float(np.ptp(found[:-1]) / np.ptp(found))


def test_published_failures_become_one_when_one_sample_succeeds():
    """With R GFLOPS beside penalties of at most 100 the failures share 90 / (R + 100) of the range: nothing, for large R.

    Ours share (1 - 1/6) / (1 + reward): that of a program 1000 times faster than the naive one is 3.5, so it is never below 0.18.
    """
    speeds = [20.0, 200.0, 549.0, 2000.0]
    published = [spread_of_failures("published", speed) for speed in speeds]
    assert published == pytest.approx([90 / (speed + 100) for speed in speeds])
    ours = [spread_of_failures("log_speedup", speed) for speed in speeds]
    assert ours == pytest.approx([(5 / 6) / (2 + math.log2(speed / 2.0) / 4) for speed in speeds])
    assert min(ours) > 0.18 and published[-1] < 0.05
    # The compiler's error against the wrong number: 30 points, over a deviation that one of 8 samples makes at least
    # sqrt(7)/8 of its distance to the nearest failure. Ours: 3 steps of 6 over a deviation of at most half of the range.
    lowest = 0.5 / ((1 + reward("ok", at(549.0))) / 2)
    for kind, low, high in (("published", 0.0, 30 / (559 * 7**0.5 / 8)), ("log_speedup", lowest, 2.0)):
        rewards = [*(reward(outcome, kind=kind) for outcome in GROUP), reward("ok", at(549.0), kind)]
        found = advantages(rewards)
        assert low < found[GROUP.index("wrong_result")] - found[GROUP.index("compile_error")] < high


def test_without_a_success_the_published_tiers_are_told_apart():
    """The difference is not in the tiers: it comes with the first success."""
    found = advantages([reward(outcome, kind="published") for outcome in GROUP])
    assert found[GROUP.index("wrong_result")] - found[GROUP.index("compile_error")] > 0.8


def test_bad_arguments():
    with pytest.raises(ValueError, match="published, log_speedup, peak_share"):
        reward("ok", at(1.0), "gflops")
    with pytest.raises(ValueError, match="wrong_result"):
        reward("wrong")
    with pytest.raises(ValueError, match="needs its speed"):
        reward("ok")
    with pytest.raises(ValueError, match="above 0"):
        reward("ok", at(float("nan")))
