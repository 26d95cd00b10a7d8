"""`old: interpolated` (AReaL) against the real proximal policy, and by hand."""

import math
from dataclasses import replace

import pytest
import torch

from torchtune_ext.objective.loss import PolicyLoss, Tokens

VERSION = 7


def make_tokens(versions_L, logprobs_L, behavior_logprobs_L, proximal_logprobs_L=None):
    """Labels in completions of three, with advantages of both signs."""
    num = len(versions_L)
    return Tokens(
        logprobs_L=logprobs_L.clone().requires_grad_(),
        entropy_L=torch.ones(num, dtype=torch.float64),
        proximal_logprobs_L=proximal_logprobs_L,
        behavior_logprobs_L=behavior_logprobs_L,
        ref_logprobs_L=None,
        advantages_L=torch.tensor([2.0, -1.0], dtype=torch.float64)[torch.arange(num) // 3 % 2],
        versions_L=versions_L,
        completion_index_L=torch.arange(num) // 3,
        version=VERSION,
    )


def gradient(options, t):
    """Returns (loss, its gradient, metrics) of every label."""
    t = replace(t, logprobs_L=t.logprobs_L.detach().clone().requires_grad_())
    values_L, metrics = PolicyLoss(**options)(t)
    values_L.sum().backward()
    return values_L.detach(), t.logprobs_L.grad, metrics


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"constraint": "kl3", "delta": 1e-5},
        {"constraint": "cispo"},
        {"level": "sequence", "importance": "sequence_tis"},
    ],
)
def test_interpolated_loss_exact_for_equal_version_steps(options):
    options = {"importance": "full", **options}
    noise = torch.Generator().manual_seed(0)
    sampler, step = (torch.randn(30, dtype=torch.float64, generator=noise) for _ in range(2))
    sampler, step, staleness = sampler - 4, 0.02 * step, torch.arange(30) % 5
    t = make_tokens(VERSION - staleness, sampler + (staleness + 1) * step, sampler, sampler + staleness * step)
    for result, want in zip(gradient({"old": "interpolated", **options}, t)[:2], gradient(options, t)[:2], strict=True):
        assert (result - want).abs().max() < 1e-12 * want.abs().max()


def test_interpolated_current_version_token_equals_sampler_old_policy():
    logprobs = -torch.arange(1.0, 7.0, dtype=torch.float64)
    t = make_tokens(torch.full((6,), VERSION), logprobs, logprobs - 0.1)
    result, want = gradient({"old": "interpolated", "importance": "full"}, t), gradient({"old": "sampler"}, t)
    assert torch.equal(result[0], want[0]) and torch.equal(result[1], want[1])


def test_interpolated_loss_matches_hand_computed_example():
    """One token of staleness 3, so alpha = 3/4. log pi = -1.0 and log pi_sampler = -1.4.

    Hence log pi_old = -1.1, r = e^0.1 and w = e^0.3.
    """
    one = torch.ones(1, dtype=torch.float64)
    t = make_tokens(torch.tensor([4]), -one, -1.4 * one)
    values, slope, metrics = gradient({"old": "interpolated", "importance": "full"}, t)
    assert values.item() == slope.item() == pytest.approx(-2 * math.exp(0.1) * math.exp(0.3), rel=1e-14)
    assert metrics["ratio_max"].item() == pytest.approx(math.exp(0.1), rel=1e-14)


def test_interpolated_loss_missing_inputs_are_named():
    t = make_tokens(torch.tensor([4]), torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="loss.old='trainer' .*proximal"):
        PolicyLoss()(t)
    with pytest.raises(ValueError, match="loss.old='interpolated' needs Tokens.version"):
        PolicyLoss(old="interpolated")(replace(t, version=None))
    with pytest.raises(ValueError, match="loss.old='interpolated' .*constraint='kl'"):
        PolicyLoss(old="interpolated", constraint="kl", top_k=4)
