"""PolicyLoss against an example worked by hand in float64, finite differences, and the equivalences it must have."""

import math

import pytest
import torch

from torchtune_ext.objective.loss import PolicyLoss, NLLLoss, Tokens, clipped_objective, kl_k3


def tokens(logprobs, old=None, advantages=None, behavior=None, ref=None, entropy=None):
    def as_tensor(x, like):
        return torch.tensor(x, dtype=torch.float64) if x is not None else like.detach().clone()

    new = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    old = as_tensor(old, new)
    return Tokens(
        logprobs_L=new,
        entropy_L=as_tensor(entropy, torch.zeros_like(new)).requires_grad_(),
        old_logprobs_L=old,
        behavior_logprobs_L=as_tensor(behavior, old),
        ref_logprobs_L=None if ref is None else torch.tensor(ref, dtype=torch.float64),
        advantages_L=as_tensor(advantages, torch.ones_like(new)),
        versions_L=torch.zeros(len(logprobs), dtype=torch.int32),
        samples_L=torch.zeros(len(logprobs), dtype=torch.int64),
    )


def test_by_hand():
    # ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages +2, -2, +2, -2, +1; clip to [0.8, 1.28]
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0]
    old = [-1.0] * 5
    t = tokens([math.log(r) - 1.0 for r in ratios], old, advantages)
    loss, metrics = PolicyLoss(clip_low=0.2, clip_high=0.28)(t)
    #        min(3, 2.56)  min(-3, -2.56)  min(1, 1.6)  min(-1, -1.6)  1.1
    want = [-2.56, 3.0, -1.0, 1.6, -1.1]
    assert loss.tolist() == pytest.approx(want, abs=1e-12)
    loss.sum().backward()
    # the gradient -A r lives where the minimum takes the unclipped branch
    assert t.logprobs_L.grad.tolist() == pytest.approx([0.0, 3.0, -1.0, 0.0, -1.1], abs=1e-12)
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert metrics["ratio_max"].max().item() == pytest.approx(1.5)


def test_kl_entropy_and_importance_by_hand():
    t = tokens(
        [-1.0, -2.0],
        old=[-1.0, -2.0],
        behavior=[-1.5, -4.0],
        ref=[-1.2, -1.0],
        advantages=[1.0, 1.0],
        entropy=[0.5, 0.7],
    )
    loss, metrics = PolicyLoss(kl_coef=0.1, entropy_coef=0.01, importance_cap=2.0)(t)
    k3 = [math.exp(-0.2) - 1 + 0.2, math.exp(1.0) - 1 - 1.0]
    importance = [math.exp(0.5), 2.0]  # exp(2) is cut at 2
    want = [-importance[i] + 0.1 * k3[i] - 0.01 * [0.5, 0.7][i] for i in range(2)]
    assert loss.tolist() == pytest.approx(want, abs=1e-12)
    assert metrics["kl_ref"].tolist() == pytest.approx(k3, abs=1e-12)


def test_on_policy_gradient_is_the_policy_gradient():
    t = tokens([-0.3, -2.0, -5.0], advantages=[1.0, -0.5, 2.0])
    PolicyLoss(importance_cap=None)(t)[0].sum().backward()
    assert t.logprobs_L.grad.tolist() == [-1.0, 0.5, -2.0]


def test_gradcheck():
    torch.manual_seed(0)
    fixed = [torch.randn(7, dtype=torch.float64) for _ in range(4)]

    def f(new, entropy):
        ids = torch.zeros(7, dtype=torch.int64)
        t = Tokens(new, entropy, fixed[0], fixed[1], fixed[2], fixed[3], ids.int(), ids)
        return PolicyLoss(kl_coef=0.3, entropy_coef=0.2)(t)[0]

    args = [torch.randn(7, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(f, args)


def test_wide_log_ratios_stay_finite():
    t = tokens(
        [-80.0, 0.0, -80.0, 0.0],
        old=[0.0, -80.0, 0.0, -80.0],
        ref=[0.0, -80.0, -80.0, 0.0],
        advantages=[1.0, 1.0, -1.0, -1.0],
    )
    loss, _ = PolicyLoss(kl_coef=0.1)(t)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(t.logprobs_L.grad).all()


def test_k3_keeps_its_precision_near_zero():
    d = 1e-4
    got = kl_k3(torch.tensor([0.0]), torch.tensor([d])).item()  # float32; exp(d) - 1 - d would be all rounding
    assert got == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-2)


def test_clip_is_symmetric_in_its_arguments():
    ratio = torch.tensor([0.5, 1.0, 2.0])
    assert clipped_objective(ratio, torch.ones(3), 0.2, 0.5).tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert clipped_objective(ratio, -torch.ones(3), 0.2, 0.5).tolist() == pytest.approx([-0.8, -1.0, -2.0])


@pytest.mark.parametrize(
    ("knob", "value"),
    [("clip_low", 0.0), ("clip_low", 1.5), ("clip_high", -0.1), ("kl_coef", -1.0), ("importance_cap", 0.0)],
)
def test_a_bad_knob_is_named(knob, value):
    with pytest.raises(ValueError, match=f"loss.{knob}={value}"):
        PolicyLoss(**{knob: value})


def test_kl_without_reference_is_an_error():
    with pytest.raises(ValueError, match="kl_coef"):
        PolicyLoss(kl_coef=0.1)(tokens([-1.0]))


def test_nll():
    t = tokens([-1.0, -2.0], advantages=[1.0, 0.0])
    assert NLLLoss()(t)[0].tolist() == [1.0, 0.0]
