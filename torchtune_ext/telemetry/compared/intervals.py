"""Intervals of means and of their differences, and what they need of Student's t.

Across seeds: the mean of n runs lies within t(n - 1) * s / sqrt(n). The difference of two means lies within t(v) * se, where
se^2 = a + b with a = s1^2 / n1 and b = s2^2 / n2, and v = (a + b)^2 / (a^2 / (n1 - 1) + b^2 / (n2 - 1)): Welch, "The
generalization of Student's problem when several different population variances are involved", Biometrika 34 (1947). It does
not take the spread of two settings for equal.

Across problems: of one run alone, an evaluation knows the interval of its own mean. The difference of two independent means
has se^2 = se1^2 + se2^2. Two runs that answer the same problems are not independent. Their errors go together as a rule,
so that the interval is rather too wide.

Where m pairs are looked at, each interval is of the level 1 - 0.05 / m (Bonferroni), so that all of them hold together in 95
of 100 cases; only then the pair that looks best may be picked.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

import numpy as np

LEVEL = 0.95
Z = 1.96  # Half an interval of `evaluation.accuracy` is so many standard errors.
_PLACES = 4001  # points of the integral of t's density; odd, for Simpson's rule


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval, whose ends are None where nothing says how wide it is."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None


def mean_of_seeds(values: Sequence[float]) -> Estimate:
    """Returns the mean over runs that differ in their seed, with its 95% t-interval; of one run, or of runs that have the very
    same result, only the mean."""
    mean = fmean(values)
    half = _half_mean(values)
    return Estimate(mean) if half is None else Estimate(mean, mean - half, mean + half)


def difference_of_seeds(first: Sequence[float], second: Sequence[float], pairs: int = 1) -> Estimate:
    """Returns the mean of `first` minus that of `second`, with Welch's interval where both have several runs.

    Args:
        first, second: the result of each run.
        pairs: so many pairs are looked at together.
    """
    difference = fmean(first) - fmean(second)
    if min(len(first), len(second)) < 2:
        return Estimate(difference)
    a, b = (variance(values) / len(values) for values in (first, second))
    if not a + b:
        return Estimate(difference)
    freedom = (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(second) - 1))
    half = t_quantile(_upper(pairs), freedom) * math.sqrt(a + b)
    return Estimate(difference, difference - half, difference + half)


def difference_of_problems(first: Estimate, second: Estimate, pairs: int = 1) -> Estimate:
    """Returns `first` minus `second`, two accuracies with their 95% intervals over problems. Where all problems have the same
    reward, the interval of an accuracy has no width. That says nothing of other problems, so the difference has none."""
    difference = first.value - second.value
    if not all(each.known and each.high > each.low for each in (first, second)):
        return Estimate(difference)
    error = math.hypot(first.high - first.low, second.high - second.low) / (2 * Z)
    half = NormalDist().inv_cdf(_upper(pairs)) * error
    return Estimate(difference, difference - half, difference + half)


def t_quantile(p: float, freedom: float) -> float:
    """Returns the value that Student's t with `freedom` degrees of freedom exceeds with probability 1 - p, for 0.5 <= p < 1.

    With t = sqrt(v) * tan(x) the density becomes that of x, C * cos(x)^(v - 1) on (-pi/2, pi/2), which is smooth and bounded
    for v >= 1. Its integral is halved until the angle is found.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    weights = np.ones(_PLACES)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        density = np.cos(np.linspace(0.0, angle, _PLACES)) ** (freedom - 1)
        below = 0.5 + scale * float(weights @ density) * angle / (3 * (_PLACES - 1))
        low, high = (angle, high) if below < p else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _half_mean(values: Sequence[float]) -> float | None:
    if len(values) < 2 or not (spread := variance(values)):
        return None
    return t_quantile(_upper(1), len(values) - 1) * math.sqrt(spread / len(values))


def _upper(pairs: int) -> float:
    return 1 - (1 - LEVEL) / (2 * max(1, pairs))
