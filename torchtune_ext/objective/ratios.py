"""Likelihood ratios of the new policy to the old one, by token or by completion. All tensors hold one value per label, [L].

level        ratio that every label of a completion y gets                                   source
"token"      r_t = pi(y_t) / pi_old(y_t)                                                     PPO, arXiv 1707.06347
"sequence"   s = exp(mean_t log r_t)                                                         GSPO, arXiv 2507.18071
"geometric"  exp(mean_t clip_A(log r_t)): clipped token by token, then the geometric mean    GMPO, arXiv 2507.20673
"""

from torch import Tensor

# Each level stands here with the words that the opening line of a run has for it.
LEVELS = {"token": "per token", "sequence": "per sequence", "geometric": "in the geometric mean"}
# A ratio of e^20 lies far outside any constraint, and float32 still holds its square.
MAX_LOG = 20.0


def bounded_exp(log_ratio_L: Tensor) -> Tensor:
    """exp of a log ratio that is kept in +-20. No gradient flows out there: a ratio of e^20 has nothing left to teach."""
    return log_ratio_L.clamp(-MAX_LOG, MAX_LOG).exp()


def sample_sums(values_L: Tensor, samples_L: Tensor) -> Tensor:
    """Every label gets the sum of its completion's values. `samples_L` is the index of the label's completion, below L."""
    sums = values_L.new_zeros(values_L.shape).index_add(0, samples_L, values_L)
    return sums[samples_L]


def sample_means(values_L: Tensor, samples_L: Tensor) -> Tensor:
    """Every label gets the mean of its completion's values. `samples_L` is the index of the label's completion, below L."""
    return sample_sums(values_L, samples_L) / sample_sums(values_L.new_ones(values_L.shape), samples_L)
