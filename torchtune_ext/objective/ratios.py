"""Computes likelihood ratios of the new to the old policy, per token or completion, [L]."""

from torch import Tensor

from torchtune_ext.kernels.indexing import add_rows_at, gather_rows
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.run.errors import UsageError

# pi_old            log-probs
# "trainer"         of the proximal policy, from which the updates of a step start
# "sampler"         of the behavior policy, which sampled the tokens, as the engine reported them
# "interpolated"    between behavior and current policy, by staleness (`interpolate_old_logprobs`)
OLD_POLICIES = ("trainer", "sampler", "interpolated")

# level        ratio of every label of a completion y          source
# "token"      r_t = pi(y_t) / pi_old(y_t)                     PPO, arXiv 1707.06347
# "sequence"   s = exp(mean_t log r_t)                         GSPO, arXiv 2507.18071
# "geometric"  exp(mean_t clip_A(log r_t)), clipped per token  GMPO, arXiv 2507.20673
#
# The values name a level in the run header.
RATIO_LEVELS = {"token": "per token", "sequence": "per sequence", "geometric": "in the geometric mean"}
# A ratio of e^20 lies far outside any constraint, and float32 can represent its square.
MAX_LOG_RATIO = 20.0


def old_logprobs(old: str, t: Tokens) -> Tensor:
    """Returns log pi_old of every label, in nats, without gradient.

    Raises:
        UsageError: `t` does not hold these log-probs.
    """
    stored = {"trainer": t.proximal_logprobs_L, "sampler": t.behavior_logprobs_L}
    logprobs_L = interpolate_old_logprobs(t) if old == "interpolated" else stored[old]
    if logprobs_L is None:
        raise UsageError(
            f"loss.old={old!r} needs Tokens.proximal_logprobs_L, but they are None. Fix: pass `proximal` to forward_backward"
        )
    return logprobs_L


def interpolate_old_logprobs(t: Tokens) -> Tensor:
    """Approximates the proximal policy's log-probs without a forward pass.

    As AReaL's `prox_logp` with the "loglinear" approximation::

        log pi_old = log pi_behavior + alpha (log pi - log pi_behavior)
        alpha = (v_old - v_behavior) / (v - v_behavior)

    Raises:
        UsageError: the version of the proximal policy is unknown.
    """
    if t.version is None:
        raise UsageError(
            "loss.old='interpolated' needs Tokens.version, the version of the proximal policy, but it is None"
        )
    # This assumes that each version moved the policy by the same step. The current policy pi
    # becomes the next version, so v = v_old + 1, and a label of staleness s = v_old - v_behavior has
    # alpha = s / (s + 1).
    staleness_L = (t.version - t.versions_L).to(t.behavior_logprobs_L.dtype)
    return t.behavior_logprobs_L.lerp(t.logprobs_L.detach(), staleness_L / (staleness_L + 1))


def bounded_exp(log_ratio_L: Tensor) -> Tensor:
    """Returns exp of a log ratio that is clamped to +-20. Clamped values have no gradient."""
    return log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sample_sums(values_L: Tensor, completion_index_L: Tensor) -> Tensor:
    """Returns for every label the sum of its completion's values, [L].

    Args:
        values_L: one value per label.
        completion_index_L: int64, index of the label's completion, below L.
    """
    # L labels belong to at most L completions, so L entries hold all sums.
    return gather_rows(
        add_rows_at(values_L.new_zeros(values_L.shape), completion_index_L, values_L), completion_index_L
    )


def sample_means(values_L: Tensor, completion_index_L: Tensor) -> Tensor:
    """Returns for every label the mean of its completion's values; arguments as `sample_sums`."""
    return sample_sums(values_L, completion_index_L) / sample_sums(
        values_L.new_ones(values_L.shape), completion_index_L
    )
