"""The running mean of log-probs that ends a completion early."""

import math

import numpy as np
import pytest

from torchtune_ext.sampling.backend import EngineRequest
from torchtune_ext.sampling.types import SamplingConfig


def watched(threshold, decay=0.992, min_tokens=64):
    rule = dict(early_stop_logprob=threshold, early_stop_decay=decay, early_stop_min_tokens=min_tokens)
    return EngineRequest([1], SamplingConfig(max_tokens=1000, **rule), None)


def update(call, logprobs):
    """Return the number of tokens to keep after an early stop."""
    assert call.add([1] * len(logprobs), logprobs) == (call.num_kept is not None)
    return call.num_kept


def mean(call):
    return call._sum / (1.0 - call.sampling.early_stop_decay ** len(call.tokens))


def weighted_mean(values, decay):
    """The same mean by its definition: normalized weights decay^(t - i)."""
    weights = decay ** np.arange(len(values))[::-1]
    return float((weights * values).sum() / weights.sum())


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.992])
def test_mean_is_the_normalised_weighted_mean(decay):
    values = np.random.default_rng(0).normal(-2, 1, 300)
    watch = watched(-100.0, decay)
    for count, value in enumerate(values, 1):
        assert update(watch, [value]) is None
        assert mean(watch) == pytest.approx(weighted_mean(values[:count], decay), rel=1e-9)


def test_early_stop_constant_logprobs_mean_is_unbiased():
    """Without bias correction the mean would be -0.04 after one token of -5, and would not trigger."""
    watch = watched(-100.0)
    for _ in range(50):
        update(watch, [-5.0])
        assert mean(watch) == pytest.approx(-5.0)


def test_early_stop_fires_below_threshold_after_min_tokens():
    assert update(watched(-3.0, min_tokens=10), [-4.0] * 50) == 10
    assert update(watched(-3.0, min_tokens=10), [-2.9] * 50) is None
    values = [-1.0] * 100 + [-20.0] * 100
    expected = next(t for t in range(1, 201) if weighted_mean(np.array(values[:t]), 0.992) < -3.0 and t >= 64)
    assert 100 < expected < 200
    assert update(watched(-3.0), values) == expected


@pytest.mark.parametrize("size", [1, 3, 64, 200])
def test_result_does_not_depend_on_how_tokens_arrive(size):
    values = (np.random.default_rng(1).normal(-2.5, 2, 400)).tolist()
    whole = update(watched(-2.8, 0.95, 5), values)
    watch, fired = watched(-2.8, 0.95, 5), None
    for start in range(0, 400, size):
        fired = update(watch, values[start : start + size])
        if fired is not None:
            break
    assert fired == whole is not None


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_early_stop_non_finite_logprob_fires(bad):
    assert update(watched(-3.0, min_tokens=2), [-0.1, -0.1, bad, -0.1]) == 3


def test_early_stop_invalid_config_keys_raise():
    with pytest.raises(ValueError, match="sampling.early_stop_logprob=3.0 must be a number below 0"):
        SamplingConfig(max_tokens=8, early_stop_logprob=3.0)
    with pytest.raises(ValueError, match="sampling.early_stop_decay=1.0 must be"):
        SamplingConfig(max_tokens=8, early_stop_decay=1.0)
