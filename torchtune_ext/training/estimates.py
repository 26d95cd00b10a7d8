"""Means and slopes with standard errors over contexts, for the mismatch tests."""

import math
from dataclasses import dataclass

import numpy as np

# Allowed deviation in standard errors. It is high, because every step of a long run is tested.
NUM_STD_ERRORS = 5.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean or a least-squares slope, with contexts as independent observations."""

    value: float
    error: float  # standard error of the value
    contexts: float  # effective number of contexts: (sum w)^2 / sum w^2 of their weights w
    min_value: float  # the value without the context that raises it most

    @property
    def margin(self) -> float:
        """Margin of error: `NUM_STD_ERRORS` standard errors, and more for few contexts."""
        return students_t_quantile(self.contexts - 1) * self.error if self.contexts >= 2 else math.inf


def fit_slope(y_N: np.ndarray, x_N: np.ndarray, contexts_N: np.ndarray) -> Estimate:
    """Fits y = slope * x. Context ids start at 0."""
    # The code avoids dot products, because NumPy's BLAS threads would compete with torch's threads.
    weights = np.bincount(contexts_N, np.square(x_N))
    total_weight = float(weights.sum())
    slope = float((x_N * y_N).sum()) / total_weight if total_weight else 0.0
    num_contexts = total_weight**2 / float(np.square(weights).sum()) if total_weight else 0.0
    if num_contexts < 2:
        return Estimate(slope, math.inf, num_contexts, -math.inf)
    # The jackknife: the change of the slope without each context.
    changes = np.bincount(contexts_N, x_N * (y_N - slope * x_N)) / (total_weight - weights)
    return Estimate(slope, math.sqrt(np.square(changes).sum()), num_contexts, slope - float(changes.max()))


def mean_with_error(y_N: np.ndarray, contexts_N: np.ndarray) -> Estimate:
    """The mean of y: the slope on x = 1. Context ids start at 0."""
    return fit_slope(y_N, np.ones(len(y_N)), contexts_N)


def students_t_quantile(degrees_of_freedom: float) -> float:
    """Student's t quantile at the tail probability of `NUM_STD_ERRORS` standard deviations.

    The approximation is at most 10% too large.
    """
    # Wallace, A normal approximation to the t distribution (1959), solved for t.
    deviations = NUM_STD_ERRORS * (8 * degrees_of_freedom + 3) / (8 * degrees_of_freedom + 1)
    return math.sqrt(degrees_of_freedom * math.expm1(deviations**2 / degrees_of_freedom))
