"""The order of outcomes is kept. What normalization by group leaves of it: test_matmul_rewards.py."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.measured.check import OUTCOMES
from torchtune_ext.measured.matmul.rewards import (
    FAILURES,
    MIN_SPEEDUP,
    PUBLISHED_PENALTIES,
    REWARD_KINDS,
    failure_reward,
    program_reward,
)

# GFLOPS of one core up to those of the paper's node, on a machine whose peak is 1000.
SPEEDS = st.floats(1e-3, 999.0)


def at(gflops: float, naive: float = 2.0, peak: float = 1000.0) -> SimpleNamespace:
    """What a reward asks of a timing."""
    return SimpleNamespace(gflops=gflops, speedup=gflops / naive, roofline_fraction=gflops / peak)


def test_every_outcome_of_the_checker_has_a_reward():
    assert set(FAILURES) == set(PUBLISHED_PENALTIES) == set(OUTCOMES) - {"ok"}
    for kind in REWARD_KINDS:
        assert all(program_reward(outcome, kind=kind) < 0 for outcome in FAILURES)
        assert program_reward("noisy", kind=kind) is None


def test_the_published_tiers():
    assert [program_reward(outcome, kind="published") for outcome in FAILURES] == [-100, -100, -40, -30, -20, -10]
    assert program_reward("ok", at(549.0), "published") == 549.0


def test_matmul_rewards_match_hand_computed_examples():
    assert [failure_reward(outcome) for outcome in FAILURES] == pytest.approx(
        [-1, -5 / 6, -4 / 6, -3 / 6, -2 / 6, -1 / 6]
    )
    assert program_reward("ok", at(2.0)) == 1.0
    assert program_reward("ok", at(16.0)) == pytest.approx(1.75)
    assert program_reward("ok", at(1.0)) == pytest.approx(0.75)
    assert program_reward("ok", at(2.0 * MIN_SPEEDUP)) == program_reward("ok", at(MIN_SPEEDUP)) == 0.0
    assert program_reward("ok", at(250.0), "peak_share") == 0.25


@pytest.mark.parametrize("kind", REWARD_KINDS)
@given(a=SPEEDS, b=SPEEDS)
def test_matmul_reward_order_follows_outcome_order(kind, a, b):
    slow, fast = sorted((a, b))
    ladder = [program_reward(outcome, kind=kind) for outcome in FAILURES]
    ladder += [program_reward("ok", at(slow), kind), program_reward("ok", at(fast), kind)]
    assert ladder == sorted(ladder)
    strict = [
        value for outcome, value in zip(FAILURES, ladder, strict=False) if kind != "published" or outcome != "forbidden"
    ]
    assert len(set(strict)) == len(strict) and strict[-1] < ladder[-2]
    # Below a 16th of the naive program all are one; elsewhere a doubling is never lost.
    if slow > 2.0 * MIN_SPEEDUP and fast >= 2 * slow:
        assert ladder[-2] < ladder[-1]


@given(scale=st.floats(0.01, 100.0), speeds=st.lists(SPEEDS, min_size=2, max_size=8))
def test_log_reward_is_independent_of_machine_speed(scale, speeds):
    """Speeds are those beside the naive program, so GFLOPS of the machine drop out."""
    here = [program_reward("ok", at(speed, naive=2.0)) for speed in speeds]
    there = [program_reward("ok", at(scale * speed, naive=scale * 2.0)) for speed in speeds]
    assert there == pytest.approx(here, abs=1e-9)
