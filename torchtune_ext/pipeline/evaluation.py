"""Computes mean reward with its 95% interval and unbiased pass@k from graded groups."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import Field

from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.sections import config_section

log = logging.getLogger(__name__)

# 97.5% quantiles of the normal distribution and of Student's t with 1 to 29 degrees of freedom: the
# half-width of a 95% interval in standard errors.
Z_95 = 1.96
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
MAX_UNGRADED_FRACTION = 0.01  # above this fraction, a warning accompanies the accuracy
SOLVED_REWARD = 1.0 - 1e-9  # the smallest reward that pass@k counts as correct


@config_section("evaluation")
class EvaluationConfig:
    """The keys of `evaluation:`, the held-out evaluation of a training run."""

    task: Component | None = Field(default=None, description="held-out problems, all evaluated; null: no evaluation")
    every: int = Field(
        default=10, ge=1, description="steps between evaluations; also before the first and after the last step"
    )
    samples: int = Field(
        default=1,
        ge=1,
        description="samples per held-out problem at the training temperature, in addition to a greedy one",
    )


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The mean reward over problems, with its 95% interval and its counts.

    The interval treats problems as independent, but not the samples of one problem.
    """

    mean: float  # mean over problems of the mean reward of a problem's graded samples
    low: float  # lower end of the 95% interval of `mean`
    high: float  # upper end of the 95% interval of `mean`
    pass_at: dict[int, float]  # k -> probability that at least one of k samples is correct
    problems: int  # problems with at least one graded sample
    ungraded: int  # samples without a score because of an infrastructure failure

    @property
    def has_partial_rewards(self) -> bool:
        """Whether some rewards lie strictly between 0 and 1, so `mean` is not an accuracy."""
        return _differs(self.mean, self.pass_at.get(1))


def compute_accuracy(groups: Sequence[Group], ks: Sequence[int] = (1,)) -> Accuracy:
    """Computes the accuracy of graded groups.

    Args:
        groups: graded groups.
        ks: values of k for pass@k. A k that exceeds the number of graded samples of any problem is
            omitted from the result.

    Raises:
        UsageError: no sample could be graded.
    """
    rewards = [[s.score.reward for s in g.samples if s.score is not None] for g in groups]
    ungraded = sum(len(g.samples) for g in groups) - sum(map(len, rewards))
    rewards = [r for r in rewards if r]
    if not rewards:
        # The message includes the cause, because a held-out evaluation does not store its groups.
        causes = (
            f"problem {g.problem.id!r} {s.outcome.kind}: {s.outcome.cause}"
            for g in groups
            for s in g.samples
            if isinstance(s.outcome, Ungraded)
        )
        raise UsageError(f"none of {ungraded} samples could be graded; the first: {next(causes, 'it was not graded')}")
    if ungraded > MAX_UNGRADED_FRACTION * (total := sum(len(g.samples) for g in groups)):
        log.warning("evaluation: the accuracy excludes %d of %d samples, which could not be graded", ungraded, total)
    # Samples of one problem are not independent, so the interval is computed from the problems'
    # means.
    means = np.array([np.mean(r) for r in rewards])
    pass_at = {
        k: float(np.mean([pass_at_k(len(r), sum(x >= SOLVED_REWARD for x in r), k) for r in rewards]))
        for k in ks
        if all(len(r) >= k for r in rewards)
    }
    return Accuracy(float(means.mean()), *confidence_interval(means), pass_at, len(rewards), ungraded)


def confidence_interval(means: np.ndarray) -> tuple[float, float]:
    """Returns the 95% interval of the mean over independent problems, from their means [problems].

    Uses Wilson's interval (JASA 22, 1927) if all means lie in [0, 1], else Student's. Student's
    interval is undefined for a single problem; both ends are the mean then.
    """
    count, mean = len(means), float(means.mean())
    variance = float(means.var(ddof=1)) / count if count > 1 else math.inf
    # A variance that is estimated from few problems is itself uncertain, which Student's t
    # includes.
    t = T_95[count - 2] if 2 <= count < 2 + len(T_95) else Z_95
    if means.min() < 0 or means.max() > 1:
        half = t * math.sqrt(variance) if count > 1 else 0.0
        return mean - half, mean + half
    # Wilson's interval stays in [0, 1] and has a width even if all means are equal. Its sample size
    # is the number of problems at which a binomial proportion would have the variance of this mean
    # (Franco et al., J. Surv. Stat. Methodol. 7, 2019).
    binomial_variance = mean * (1 - mean)
    # A mean of numbers in [0, 1] has at most the variance of a binomial proportion over as many
    # problems.
    effective = max(count, binomial_variance / variance) if 0 < variance < math.inf else count
    z = t if effective > count else Z_95
    center = (mean + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * math.sqrt(binomial_variance / effective + z**2 / (4 * effective**2))
    return max(0.0, center - half), min(1.0, center + half)


def has_partial_rewards(values: Mapping[str, float | None]) -> bool:
    """Returns `Accuracy.has_partial_rewards` from the metrics of an evaluation."""
    return any(
        _differs(values.get(f"eval/reward_{kind}"), values.get(f"eval/solved_{kind}")) for kind in ("sampled", "greedy")
    )


def _differs(mean: float | None, solved: float | None) -> bool:
    return mean is not None and solved is not None and not math.isclose(mean, solved, abs_tol=1e-9)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimates pass@k without bias: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).

    Args:
        n: number of samples.
        c: number of correct samples among them.
        k: number of samples per attempt.

    Raises:
        UsageError: k is not between 1 and n.
    """
    if not 1 <= k <= n:
        raise UsageError(f"pass@k with k={k} needs 1 <= k <= n={n} samples")
    # Fewer than k samples are wrong, so every subset of k samples contains a correct one.
    if n - c < k:
        return 1.0
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))
