"""Likelihood ratios of the new policy to the old one, by token or by completion; one value per label, [L]."""

from torch import Tensor

from torchtune_ext.kernels.indexing import add_rows_at, gather_rows
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.run.errors import UsageError

# pi_old            log-probs
# "trainer"         of the proximal policy, from which the updates of a step start
# "sampler"         of the policy that sampled, as the sampler reported them
# "interpolated"    between the sampler's and those of the policy in training, by age: `interpolated`
OLD_POLICIES = ("trainer", "sampler", "interpolated")

# level        ratio that every label of a completion y gets                                   source
# "token"      r_t = pi(y_t) / pi_old(y_t)                                                     PPO, arXiv 1707.06347
# "sequence"   s = exp(mean_t log r_t)                                                         GSPO, arXiv 2507.18071
# "geometric"  exp(mean_t clip_A(log r_t)): clipped token by token, then the geometric mean    GMPO, arXiv 2507.20673
#
# The values are the words for a level in the opening line of a run.
RATIO_LEVELS = {"token": "per token", "sequence": "per sequence", "geometric": "in the geometric mean"}
# A ratio of e^20 lies far outside any constraint, and float32 still holds its square.
MAX_LOG_RATIO = 20.0


def old_logprobs(old: str, t: Tokens) -> Tensor:
    """log pi_old of every label, in nats, without gradient. Raises ValueError if `t` lacks it."""
    stored = {"trainer": t.old_logprobs_L, "sampler": t.behavior_logprobs_L}
    logprobs_L = interpolate_old_logprobs(t) if old == "interpolated" else stored[old]
    if logprobs_L is None:
        raise UsageError(f"loss.old={old!r} needs log-probs of the proximal policy, but none were computed")
    return logprobs_L


def interpolate_old_logprobs(t: Tokens) -> Tensor:
    """The proximal policy's log-probs without a pass through it (AReaL, `prox_logp` by "loglinear" approximation):

        log pi_old = log pi_sampler + alpha (log pi - log pi_sampler),   alpha = (v_old - v_sampler) / (v - v_sampler)

    Raises:
        ValueError: the version of the proximal policy is not known.
    """
    if t.version is None:
        raise UsageError("loss.old='interpolated' needs the version of the proximal policy (Tokens.version)")
    # This assumes that each version moved the policy by the same step. The policy in training, pi, is on its way to the
    # next version, so v = v_old + 1, and a label of age a = v_old - v_sampler has alpha = a / (a + 1).
    age_L = (t.version - t.versions_L).to(t.behavior_logprobs_L.dtype)
    return t.behavior_logprobs_L.lerp(t.logprobs_L.detach(), age_L / (age_L + 1))


def bounded_exp(log_ratio_L: Tensor) -> Tensor:
    """exp of a log ratio clamped to +-20. Outside, there is no gradient."""
    return log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sample_sums(values_L: Tensor, samples_L: Tensor) -> Tensor:
    """Every label gets the sum of its completion's values. `samples_L`: index of the label's completion, below L."""
    # L labels belong to at most L completions, so L places hold every sum.
    return gather_rows(add_rows_at(values_L.new_zeros(values_L.shape), samples_L, values_L), samples_L)


def sample_means(values_L: Tensor, samples_L: Tensor) -> Tensor:
    """Every label gets the mean of its completion's values. `samples_L`: index of the label's completion, below L."""
    return sample_sums(values_L, samples_L) / sample_sums(values_L.new_ones(values_L.shape), samples_L)
