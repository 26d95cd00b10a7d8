"""The statistics of benchmarks/sandbox_cost.py."""

import itertools

import numpy as np
import pytest
from sandbox_cost import mann_whitney, u_statistic
from tables import every_row


def all_u(first: list[float], second: list[float]) -> np.ndarray:
    """U of all ways to deal the numbers to two groups; the first is that of these two."""
    pooled, n, m = np.array([*first, *second]), len(first), len(second)
    wins = (pooled[:, None] > pooled) + 0.5 * (pooled[:, None] == pooled)
    chosen = np.array(list(itertools.combinations(range(n + m), n)))
    # Pairs within the group count n^2 / 2 whatever the numbers are.
    return wins.sum(1)[chosen].sum(1) - n * n / 2


@every_row("seed", range(6))
@every_row("numbers", [2, 4, 1000])
def test_u_and_its_variance_are_those_of_all_permutations(seed, numbers):
    rng = np.random.default_rng(seed)
    first, second = list(rng.integers(0, numbers, 8)), list(rng.integers(0, numbers, 6))
    every = all_u(first, second)
    u, mean, variance = u_statistic(first, second)
    assert u == every[0] and mean == every.mean()
    assert variance == pytest.approx(every.var(), rel=1e-12)


@every_row("seed", range(6))
def test_p_is_near_that_of_all_permutations(seed):
    """Without ties, 8 numbers and 8: the normal curve is as near as tables say, 0.01."""
    rng = np.random.default_rng(seed)
    first, second = list(rng.normal(size=8)), list(rng.normal(size=8) + seed % 3)
    every = np.abs(all_u(first, second) - 32)
    assert mann_whitney(first, second) == pytest.approx((every >= every[0]).mean(), abs=0.01)


def test_equal_numbers_and_far_ones():
    assert mann_whitney([1.0] * 5, [1.0] * 9) == 1.0
    assert mann_whitney(list(range(30)), list(range(100, 130))) < 1e-9
