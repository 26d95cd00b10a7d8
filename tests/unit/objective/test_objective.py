"""PolicyLoss against each paper's formula in Python floats: values, gradients and errors."""

import math
import re
from dataclasses import dataclass, fields

import pytest
import torch

from torchtune_ext.objective.clipping import clip
from torchtune_ext.objective.constraints import CONSTRAINTS, Constraint
from torchtune_ext.objective.importance import off_policy_labels
from torchtune_ext.objective.loss import NLLLoss, PolicyLoss, Tokens

# Two completions, of three and two labels, with one advantage each; ratios on both sides of every bound.
RATIOS = [1.5, 0.7, 1.05, 0.5, 1.35]
ADVANTAGES = [2.0, 2.0, 2.0, -1.5, -1.5]
SAMPLES = [0, 0, 0, 1, 1]
OLD = [-1.0, -2.0, -0.5, -0.9, -1.2]
SAMPLER = [-1.2, -2.0, -0.1, -3.0, -0.7]  # pi_old / pi_sampler: 1.22, 1, 0.67, 8.2, 0.61
REFERENCE = [-1.1, -1.0, -0.6, -2.5, -0.9]
ENTROPY = [0.3, 0.9, 0.1, 1.1, 0.6]
NEW = [old + math.log(r) for old, r in zip(OLD, RATIOS, strict=True)]


def tokens(new=NEW, old=OLD, sampler=SAMPLER, ref=REFERENCE, advantages=ADVANTAGES, samples=SAMPLES, **top):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    entropy = (ENTROPY * len(new))[: len(new)]
    return Tokens(
        logprobs_L=tensor(new).requires_grad_(),
        entropy_L=tensor(entropy).requires_grad_(),
        proximal_logprobs_L=tensor(old),
        behavior_logprobs_L=tensor(sampler),
        ref_logprobs_L=None if ref is None else tensor(ref),
        advantages_L=tensor(advantages),
        versions_L=torch.zeros(len(new), dtype=torch.int32),
        completion_index_L=torch.tensor(samples),
        **top,
    )


def value_and_gradient(loss, t):
    values_L, metrics = loss(t)
    values_L.sum().backward()
    return values_L.tolist(), t.logprobs_L.grad.tolist(), {name: m.tolist() for name, m in metrics.items()}


def by_token(objective):
    """Returns (values, gradients in log pi) of -objective(r, A); objective returns (value, slope in r)."""
    pairs = [objective(r, a) for r, a in zip(RATIOS, ADVANTAGES, strict=True)]
    return [-v for v, _ in pairs], [-slope * r for (_, slope), r in zip(pairs, RATIOS, strict=True)]


def interval(low, high, dual=None):
    def objective(r, a):
        free, held = r * a, min(max(r, low), high) * a
        value, slope = (free, a) if free <= held else (held, 0.0)
        if dual is not None and a < 0 and dual * a > value:
            value, slope = dual * a, 0.0
        return value, slope

    return objective


def two_sided(low, high, bound):
    """INTELLECT-2: min(min(r, bound) A, clip(r) A)."""

    def objective(r, a):
        capped, held = min(r, bound) * a, min(max(r, low), high) * a
        if capped <= held:
            return capped, a if r < bound else 0.0
        return held, 0.0

    return objective


def soft_gate(r, a):
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return 4 / tau * gate * a, 4 * gate * (1 - gate) * a


@pytest.mark.parametrize(
    "settings, objective",
    [
        ({}, interval(0.8, 1.2)),
        ({"clip_low": 0.2, "clip_high": 0.28}, interval(0.8, 1.28)),
        ({"clip_low": 0.4, "clip_high": 0.6}, interval(0.6, 1.6)),
        ({"dual_clip": 1.3}, interval(0.8, 1.2, dual=1.3)),
        ({"dual_clip": 1.3}, two_sided(0.8, 1.2, 1.3)),
        ({"constraint": "kl3", "delta": 0.02}, interval(0.813105115213116, 1.213549707151730)),
        ({"constraint": "kl3", "delta": 0.1}, interval(0.616816831791706, 1.516221161425022)),
        ({"constraint": "sapo"}, soft_gate),
        ({"constraint": "spo"}, lambda r, a: (r * a - abs(a) / 0.4 * (r - 1) ** 2, a - abs(a) / 0.2 * (r - 1))),
        (
            {"constraint": "spo", "epsilon": 0.4},
            lambda r, a: (r * a - abs(a) / 0.8 * (r - 1) ** 2, a - abs(a) / 0.4 * (r - 1)),
        ),
        ({"constraint": "none"}, lambda r, a: (r * a, a)),
    ],
)
def test_constraints_of_token_ratios(settings, objective):
    values, gradients, metrics = value_and_gradient(PolicyLoss(**settings), tokens())
    want_values, want_gradients = by_token(objective)
    assert values == pytest.approx(want_values, abs=1e-12)
    assert gradients == pytest.approx(want_gradients, abs=1e-12)
    assert metrics["clip_fraction"] == [float(g == 0.0) for g in want_gradients]


def test_the_dual_clip_leaves_small_positive_advantages_alone():
    ratio, advantages = torch.tensor([2.0, 0.5]), torch.tensor([0.25, 0.25])
    objective, cut = clip(ratio, advantages, 0.8, 1.2, dual=3.0)
    assert objective.tolist() == pytest.approx([0.3, 0.125]) and cut.tolist() == [True, False]


def test_clip_does_not_count_labels_without_advantage():
    objective, clipped = clip(torch.tensor([2.0, 0.5]), torch.zeros(2), 0.8, 1.2)
    assert objective.tolist() == [0.0, 0.0] and clipped.tolist() == [False, False]


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    values, gradients, metrics = value_and_gradient(
        PolicyLoss(constraint="cispo", clip_low=0.4, clip_high=0.3), tokens()
    )
    weights = [min(max(r, 0.6), 1.3) for r in RATIOS]
    assert values == pytest.approx(
        [-w * a * new for w, a, new in zip(weights, ADVANTAGES, NEW, strict=True)], abs=1e-12
    )
    assert gradients == pytest.approx([-w * a for w, a in zip(weights, ADVANTAGES, strict=True)], abs=1e-12)
    assert metrics["clip_fraction"] == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_spo_gradient_zero_at_bound_reverses_beyond():
    """The maximum lies at r = 1 + sgn(A) epsilon. epsilon = 1/4 makes all values exact in binary."""
    ratio = torch.tensor([1.25, 1.0, 1.5, 0.75, 1.0, 0.5], dtype=torch.float64, requires_grad=True)
    t = tokens([-1.0] * 6, [-1.0] * 6, [-1.0] * 6, None, [2.0, 2.0, 2.0, -3.0, -3.0, -3.0], [0] * 6)
    objective, _ = CONSTRAINTS["spo"](epsilon=0.25)(t, ratio, t.proximal_logprobs_L)
    objective.sum().backward()
    assert ratio.grad.tolist() == [0.0, 2.0, -2.0, 0.0, -3.0, 3.0]
    assert str(PolicyLoss(constraint="spo")) == "SPO 0.2 per token"


def test_total_variation_drops_tokens_past_bound_by_advantage():
    moved = [math.exp(new) - math.exp(old) for new, old in zip(NEW, OLD, strict=True)]
    assert [round(m, 3) for m in moved] == [0.184, -0.041, 0.03, -0.203, 0.105]
    for delta, dropped in ((0.15, [1, 0, 0, 1, 0]), (0.19, [0, 0, 0, 1, 0]), (0.21, [0] * 5), (0.02, [1, 0, 1, 1, 0])):
        _, gradients, metrics = value_and_gradient(PolicyLoss(constraint="tv", delta=delta), tokens())
        want = [0.0 if d else -r * a for d, r, a in zip(dropped, RATIOS, ADVANTAGES, strict=True)]
        # With delta 0.02 the second and the last label are outside, and the gradient moves them back.
        assert gradients == pytest.approx(want, abs=1e-12)
        assert metrics["clip_fraction"] == dropped


def test_exact_kl_over_the_stored_top_k():
    old = torch.tensor([[0.7, 0.2], [0.5, 0.25], [0.6, 0.3], [0.9, 0.05], [0.4, 0.4]], dtype=torch.float64)
    new = torch.tensor([[0.5, 0.3], [0.5, 0.25], [0.61, 0.3], [0.3, 0.6], [0.5, 0.3]], dtype=torch.float64)
    kl = [
        sum(p * math.log(p / q) for p, q in zip([*ps, 1 - sum(ps)], [*qs, 1 - sum(qs)], strict=True))
        for ps, qs in zip(old.tolist(), new.tolist(), strict=True)
    ]
    delta = 0.03
    outside = [d > delta for d in kl]
    assert outside == [True, False, False, True, False]
    t = tokens(proximal_top_LK=old.log(), top_LK=new.log())
    values, gradients, metrics = value_and_gradient(PolicyLoss(constraint="kl", delta=delta, top_k=2), t)
    # labels 0 and 3 moved in the direction of their advantages (1.5 and 2, 0.5 and -1.5): constant A, no gradient
    assert values == pytest.approx([-2.0, -1.4, -2.1, 1.5, 1.35 * 1.5], abs=1e-12)
    assert gradients == pytest.approx([0.0, -1.4, -2.1, 0.0, 1.35 * 1.5], abs=1e-12)
    assert metrics["clip_fraction"] == [1.0, 0.0, 0.0, 1.0, 0.0]
    # bounds just above and just below the measured KL
    for factor, cut in ((1.0 + 1e-9, 0.0), (1.0 - 1e-9, 1.0)):
        tight = PolicyLoss(constraint="kl", delta=kl[0] * factor, top_k=2)
        assert tight(t)[1]["clip_fraction"].tolist()[0] == cut


def test_exact_kl_without_stored_log_probs():
    loss = PolicyLoss(constraint="kl", top_k=2)
    with pytest.raises(ValueError, match="needs the proximal policy's top-k"):
        loss(tokens())
    assert loss(tokens(new=OLD))[1]["clip_fraction"].tolist() == [0.0] * 5  # the current policy equals the old policy


@dataclass(frozen=True)
class Push(Constraint):
    """A custom constraint, as in docs/how_to/algorithms.md. `factor` is not an option of other constraints."""

    delta: float = 0.1
    factor: float = 2.0

    def __call__(self, t, ratio_L, old_L):
        clipped_L = (ratio_L - 1).abs() > self.delta
        return self.factor * (ratio_L * t.advantages_L).masked_fill(clipped_L, 0.0), clipped_L


def test_custom_constraint_can_be_registered(monkeypatch):
    monkeypatch.setitem(CONSTRAINTS, "push", Push)
    for delta, inside in ((None, [0, 0, 1, 0, 0]), (0.4, [0, 1, 1, 0, 1])):
        loss = PolicyLoss(constraint="push", delta=delta)
        _, gradients, metrics = value_and_gradient(loss, tokens())
        want = [-2.0 * r * a * i for r, a, i in zip(RATIOS, ADVANTAGES, inside, strict=True)]
        assert gradients == pytest.approx(want, abs=1e-12)
        assert metrics["clip_fraction"] == [1.0 - i for i in inside]
        assert loss.delta == (delta or 0.1)
        assert str(loss) == f"Push(delta={loss.delta}, factor=2.0) per token"
    for settings, message in (
        ({"clip_low": 0.2}, "loss.clip_low=0.2 contradicts loss.constraint='push', whose options are delta, factor;"),
        (
            {"level": "sequence"},
            "loss.level='sequence' does not support constraint='push'; expected clip, kl3, ",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            PolicyLoss(constraint="push", **settings)


def test_constraint_options_are_all_policy_loss_keys():
    keys = {field.name for field in fields(PolicyLoss)}
    for name, kind in CONSTRAINTS.items():
        assert {field.name for field in fields(kind)} <= keys, name
        assert "token" in kind.levels, name


def sequence_ratios():
    first = math.exp(sum(math.log(r) for r in RATIOS[:3]) / 3)
    second = math.exp(sum(math.log(r) for r in RATIOS[3:]) / 2)
    return [first] * 3 + [second] * 2  # 1.033, 0.822


@pytest.mark.parametrize(("low", "high", "cut"), [(0.2, 0.28, (0, 0)), (0.1, 0.28, (0, 1)), (3e-4, 4e-4, (1, 1))])
def test_sequence_level_gspo(low, high, cut):
    loss = PolicyLoss(level="sequence", clip_low=low, clip_high=high)
    values, gradients, metrics = value_and_gradient(loss, tokens())
    objective = interval(1 - low, 1 + high)
    pairs = [objective(s, a) for s, a in zip(sequence_ratios(), ADVANTAGES, strict=True)]
    assert values == pytest.approx([-v for v, _ in pairs], abs=1e-12)
    # d s / d log r_t = s / |y|, and each of the |y| labels has s once
    want = [-slope * s for (_, slope), s in zip(pairs, sequence_ratios(), strict=True)]
    assert gradients == pytest.approx(want, abs=1e-12)
    assert metrics["clip_fraction"] == [cut[0]] * 3 + [cut[1]] * 2


def test_geometric_level_gmpo():
    """GMPO, eq. 4: clip tokens in log space by the sign of the advantage, then take the geometric mean."""
    loss = PolicyLoss(level="geometric", clip_low=1 - math.exp(-0.2), clip_high=math.exp(0.2) - 1)
    values, gradients, metrics = value_and_gradient(loss, tokens())
    kept = []
    for r, a in zip(RATIOS, ADVANTAGES, strict=True):
        x, sign = math.log(r), math.copysign(1, a)
        kept.append(sign * min(sign * x, sign * min(max(x, -0.2), 0.2)))
    assert kept == pytest.approx([0.2, math.log(0.7), math.log(1.05), -0.2, math.log(1.35)])
    means = [math.exp(sum(kept[:3]) / 3)] * 3 + [math.exp(sum(kept[3:]) / 2)] * 2
    assert values == pytest.approx([-m * a for m, a in zip(means, ADVANTAGES, strict=True)], abs=1e-12)
    cut = [1.0, 0.0, 0.0, 1.0, 0.0]
    want = [0.0 if c else -m * a for c, m, a in zip(cut, means, ADVANTAGES, strict=True)]
    assert gradients == pytest.approx(want, abs=1e-12)
    assert metrics["clip_fraction"] == cut


WEIGHTS = [math.exp(old - sampler) for old, sampler in zip(OLD, SAMPLER, strict=True)]
PRODUCTS = [math.prod(WEIGHTS[:3])] * 3 + [math.prod(WEIGHTS[3:])] * 2  # 0.82, 4.95
MEANS = [p ** (1 / n) for p, n in zip(PRODUCTS, [3, 3, 3, 2, 2], strict=True)]  # 0.94, 2.23


@pytest.mark.parametrize(
    "settings, weights",
    [
        ({}, [1.0] * 5),
        ({"importance": "full"}, WEIGHTS),
        ({"importance": "tis"}, [min(w, 2.0) for w in WEIGHTS]),
        ({"importance": "tis", "importance_high": 1.1}, [min(w, 1.1) for w in WEIGHTS]),
        ({"importance": "mis"}, [w if w <= 3 else 0.0 for w in WEIGHTS]),
        ({"importance": "icepop", "importance_low": 0.65}, [w if 0.65 <= w <= 5 else 0.0 for w in WEIGHTS]),
        ({"importance": "icepop"}, [w if 0.5 <= w <= 5 else 0.0 for w in WEIGHTS]),
        ({"importance": "sequence_tis"}, PRODUCTS),
        ({"importance": "sequence_tis", "importance_high": 2.0}, [min(w, 2.0) for w in PRODUCTS]),
        ({"importance": "sequence_mis"}, [*PRODUCTS[:3], 0.0, 0.0]),
        ({"importance": "geometric_mask", "importance_low": 0.9, "importance_high": 1.1}, [1.0, 1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_importance_weights(settings, weights):
    values, gradients, metrics = value_and_gradient(PolicyLoss(**settings), tokens())
    want_values, want_gradients = by_token(interval(0.8, 1.2))
    assert values == pytest.approx([w * v for w, v in zip(weights, want_values, strict=True)], abs=1e-12)
    assert gradients == pytest.approx([w * g for w, g in zip(weights, want_gradients, strict=True)], abs=1e-12)
    assert metrics["masked_fraction"] == [float(w == 0.0) for w in weights]


# Mean log pi_sampler - log pi of both completions.
DRIFTS = [
    sum(sampler - new for sampler, new in zip(SAMPLER[part], NEW[part], strict=True)) / len(NEW[part])
    for part in (slice(3), slice(3, 5))
]


@pytest.mark.parametrize("shift, dropped", [(-1e-9, True), (1e-9, False)])
@pytest.mark.parametrize("negative", [0, 1])
def test_off_policy_mask_drops_drifted_negative_completions(negative, shift, dropped):
    """DeepSeek-V3.2: M = 0 where A < 0 and mean log(pi_old / pi) > delta; only one completion has A < 0."""
    advantages = [-1.5 if sample == negative else 2.0 for sample in SAMPLES]
    behavior = [logprob + 2.0 for logprob in SAMPLER]  # both completions drifted
    bound = DRIFTS[negative] + 2.0 + shift
    t, plain = (tokens(sampler=behavior, advantages=advantages) for _ in range(2))
    loss = PolicyLoss(importance="tis", kl_coef=0.1, off_policy_mask=bound)
    values, gradients, metrics = value_and_gradient(loss, t)
    want, want_gradients, _ = value_and_gradient(PolicyLoss(importance="tis", kl_coef=0.1), plain)
    kl, kl_gradients, _ = value_and_gradient(PolicyLoss(reward_coef=0.0, kl_coef=0.1), tokens(sampler=behavior))
    mask = [dropped and sample == negative for sample in SAMPLES]
    # The KL term keeps every label.
    assert values == pytest.approx([k if m else v for m, v, k in zip(mask, want, kl, strict=True)], abs=1e-12)
    expected = [k if m else g for m, g, k in zip(mask, want_gradients, kl_gradients, strict=True)]
    assert gradients == pytest.approx(expected, abs=1e-12)
    assert metrics["masked_fraction"] == mask
    assert str(PolicyLoss(off_policy_mask=0.5)) == "clip 0.2/0.2 per token, off-policy mask 0.5 nats"


def test_off_policy_mask_equals_trl():
    """TRL's `get_off_policy_mask` on padded completions, restated, with random numbers in float64."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 7, (50,), generator=generator)
    mask = torch.arange(6) < lengths[:, None]
    new, sampling = (-torch.rand(50, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    drift = ((sampling - new) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
    kept = (advantages >= 0) | (drift <= 0.1)
    index = torch.arange(50)[:, None].expand_as(mask)[mask]
    dropped = off_policy_labels((sampling - new)[mask], advantages.expand_as(mask)[mask], index, 0.1)
    assert dropped.tolist() == (~kept).expand_as(mask)[mask].tolist()
    assert 0 < dropped.sum() < (advantages.expand_as(mask)[mask] < 0).sum()


def test_the_sampler_as_the_old_policy():
    shifted = [sampler + math.log(r) for sampler, r in zip(SAMPLER, RATIOS, strict=True)]
    result = value_and_gradient(PolicyLoss(old="sampler"), tokens(new=shifted))
    want = value_and_gradient(PolicyLoss(), tokens())
    assert result[0] == pytest.approx(want[0], abs=1e-12) and result[1] == pytest.approx(want[1], abs=1e-12)


@pytest.mark.parametrize(
    ("kl", "value", "slope"),  # value and slope in log pi, for d = log ref - log pi and r = pi / pi_old
    [
        ("k1", lambda d, r: -r * d, lambda d, r: -r * d),
        ("k2", lambda d, r: d * d / 2, lambda d, r: -d),
        ("k3", lambda d, r: math.exp(d) - 1 - d, lambda d, r: 1 - math.exp(d)),
        (
            "k3_unbiased",
            lambda d, r: r * (math.exp(d) - 1 - d),
            lambda d, r: r * (math.exp(d) - 1 - d + 1 - math.exp(d)),
        ),
    ],
)
def test_kl_to_reference_and_old_policy_match_formulas(kl, value, slope):
    plain_values, plain_gradients, _ = value_and_gradient(PolicyLoss(constraint="none"), tokens())
    for name, other in (("kl_coef", REFERENCE), ("old_kl_coef", OLD)):
        values, gradients, metrics = value_and_gradient(PolicyLoss(constraint="none", kl=kl, **{name: 0.1}), tokens())
        pairs = [(o - new, r) for o, new, r in zip(other, NEW, RATIOS, strict=True)]
        assert values == pytest.approx(
            [p + 0.1 * value(*x) for p, x in zip(plain_values, pairs, strict=True)], abs=1e-12
        )
        want = [p + 0.1 * slope(*x) for p, x in zip(plain_gradients, pairs, strict=True)]
        assert gradients == pytest.approx(want, abs=1e-12)
        assert ("kl_ref" in metrics) == (name == "kl_coef")


def test_teacher_surrogate_is_clipped_by_own_advantage():
    """The teacher's surrogate clips by the sign of its own advantage, here on other labels than the reward's."""
    teacher = [-0.5, -3.0, -0.4, -0.2, -4.0]
    gaps = [logprob - old for logprob, old in zip(teacher, OLD, strict=True)]
    loss = PolicyLoss(teacher_coef=0.5, reward_coef=2.0)
    t = tokens(teacher_logprobs_L=torch.tensor(teacher, dtype=torch.float64))
    clipped, pairs = interval(0.8, 1.2), zip(RATIOS, ADVANTAGES, gaps, strict=True)
    both = [(clipped(r, a), clipped(r, gap)) for r, a, gap in pairs]
    values, gradient, metrics = value_and_gradient(loss, t)
    assert values == pytest.approx([-2.0 * reward - 0.5 * taught for (reward, _), (taught, _) in both])
    slopes = [-r * (2.0 * reward + 0.5 * taught) for r, ((_, reward), (_, taught)) in zip(RATIOS, both, strict=True)]
    assert gradient == pytest.approx(slopes) and any(slopes)
    assert metrics["kl_teacher"] == pytest.approx([-gap for gap in gaps])
    assert metrics["teacher_surprise"] == [0.0] * 5  # exp(-4) is 1.8%
    assert str(loss).endswith("0.5 teacher, 2 rewards")
    with pytest.raises(ValueError, match="loss.teacher_coef=0.5 .*teacher_logprobs_L"):
        loss(tokens())


def test_teacher_gradient_equals_prime_rl_and_sdpo():
    """At the first update, with a small mismatch: prime-rl's `ref_kl_loss_fn` and SDPO's sampled-token loss, restated.

    prime-rl's trust region and its penalty of the squared log-ratio are left out.
    """
    teacher, behavior = (
        [-0.5, -3.0, -0.4, -0.2, -4.0],
        [old + d for old, d in zip(OLD, [0.1, -0.2, 0, -0.3, 0.2], strict=True)],
    )
    loss = PolicyLoss(teacher_coef=1.0, reward_coef=0.0, importance="tis")
    t = tokens(new=OLD, sampler=behavior, teacher_logprobs_L=torch.tensor(teacher, dtype=torch.float64))
    _, gradient, _ = value_and_gradient(loss, t)
    target, sampled = torch.tensor(teacher, dtype=torch.float64), torch.tensor(behavior, dtype=torch.float64)
    logprobs = torch.tensor(OLD, dtype=torch.float64, requires_grad=True)
    prime_rl = -(target - logprobs).detach() * (logprobs - sampled).exp()
    # SDPO with `is_clip` = 2 and, at the first update, the ratio of trainer to sampler.
    sdpo = (logprobs - target).detach() * logprobs * (logprobs - sampled).detach().exp().clamp(max=2.0)
    for peer in (prime_rl, sdpo):
        (want,) = torch.autograd.grad(peer.sum(), logprobs, retain_graph=True)
        assert gradient == pytest.approx(want.tolist(), abs=1e-12)


def test_teacher_expected_gradient_equals_reverse_kl_gradient():
    """A tabular policy of three tokens and two steps, with every answer weighted by its probability.

    The expected gradient equals the gradient of KL(policy || teacher), summed over the states with a fixed state
    distribution.
    """
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))  # [state, token]
    logits.requires_grad_()
    policy, teacher = logits.log_softmax(-1), teacher.log_softmax(-1)
    loss, expected = PolicyLoss(constraint="none", teacher_coef=1.0, reward_coef=0.0), 0.0
    for first in range(3):
        for second in range(3):
            # Token k leads from state 0 to state 1 + k.
            places = torch.tensor([0, 1 + first]), torch.tensor([first, second])
            logprobs = policy[places]
            values_L, _ = loss(
                Tokens(
                    logprobs_L=logprobs,
                    entropy_L=torch.zeros(2, dtype=torch.float64),
                    proximal_logprobs_L=logprobs.detach(),
                    behavior_logprobs_L=logprobs.detach(),
                    ref_logprobs_L=None,
                    advantages_L=torch.zeros(2, dtype=torch.float64),
                    versions_L=torch.zeros(2, dtype=torch.int32),
                    completion_index_L=torch.zeros(2, dtype=torch.int64),
                    teacher_logprobs_L=teacher[places],
                )
            )
            expected += logprobs.detach().sum().exp() * values_L.sum()
    visits = torch.cat([torch.ones(1, dtype=torch.float64), policy[0].detach().exp()])
    divergence = (visits * (policy.exp() * (policy - teacher)).sum(-1)).sum()
    (ours,), (exact,) = (torch.autograd.grad(each, logits, retain_graph=True) for each in (expected, divergence))
    assert exact.abs().max() > 0.1 and (ours - exact).abs().max() < 1e-14


def test_entropy_bonus():
    t = tokens()
    values, _, metrics = value_and_gradient(PolicyLoss(entropy_coef=0.05), t)
    plain, _, _ = value_and_gradient(PolicyLoss(), tokens())
    assert values == pytest.approx([v - 0.05 * h for v, h in zip(plain, ENTROPY, strict=True)], abs=1e-12)
    assert t.entropy_L.grad.tolist() == pytest.approx([-0.05] * 5)
    assert metrics["entropy"] == ENTROPY


# Entropies of updates around the target 0.5, one of them equal to it.
ENTROPIES = [0.6, 0.4, 0.5, 0.3, 0.7, 0.8, 0.9, 0.8, 0.9, 0.45, 0.51, 0.2]


def test_adaptive_entropy_coefficient_follows_skywork_and_trl():
    """Skywork-OR1's `EntController` and TRL's adaptive entropy, restated: coefficient and gate after each update."""
    loss, value, applied = PolicyLoss(entropy_coef=0.01, entropy_target=0.5, entropy_delta=0.004), 0.01, 0.01
    for entropy in ENTROPIES:
        t = tokens()
        values, _, metrics = value_and_gradient(loss, t)
        plain, _, _ = value_and_gradient(PolicyLoss(), tokens())
        assert values == pytest.approx([v - applied * h for v, h in zip(plain, ENTROPY, strict=True)], abs=1e-12)
        assert metrics["entropy_coef"] == pytest.approx([applied] * 5, abs=1e-15)
        assert (t.entropy_L.grad is None) == (applied == 0.0)
        loss.observe({"loss/entropy": entropy})
        # TRL: <=; Skywork: <. TRL bounds the coefficient by 0 and 1, Skywork by 0 and 0.005 of its scripts.
        value = max(value + 0.004, 0.0) if entropy <= 0.5 else max(value - 0.004, 0.0)
        applied = value if entropy <= 0.5 else 0.0
    assert loss.adaptive_state == pytest.approx({"entropy_coef": value, "applied_entropy_coef": applied}, abs=1e-15)
    assert value > 0.0 and loss == PolicyLoss(entropy_coef=0.01, entropy_target=0.5, entropy_delta=0.004)
    assert str(loss).endswith("entropy 0.01 +- 0.004 towards 0.5 nats") and loss.needs_all_groups


def test_entropy_coefficient_without_target_is_fixed():
    loss = PolicyLoss(entropy_coef=0.05)
    loss.observe({"loss/entropy": 0.1})
    assert loss.adaptive_state == {} and "entropy_coef" not in loss(tokens())[1]


def test_kl_without_reference_is_an_error():
    with pytest.raises(ValueError, match="kl_coef"):
        PolicyLoss(kl_coef=0.1)(tokens(ref=None))


def test_nll():
    t = tokens(advantages=[1.0, 1.0, 0.0, 1.0, 0.5])
    want = [-NEW[0], -NEW[1], 0.0, -NEW[3], -0.5 * NEW[4]]
    assert NLLLoss()(t)[0].tolist() == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"clip_low": 0.0}, "loss.clip_low=0.0 must lie in (0, 1]"),
        ({"clip_low": 1.5}, "loss.clip_low=1.5 must lie in (0, 1]"),
        ({"clip_high": -0.1}, "loss.clip_high=-0.1 must be positive"),
        ({"clip_high": "0.2"}, "loss.clip_high='0.2': expected a number"),
        (
            {"constraint": "kl3", "clip_low": 0.2},
            "loss.clip_low=0.2 contradicts loss.constraint='kl3', whose options are delta",
        ),
        ({"constraint": "kl3", "delta": 0.0}, "loss.delta=0.0 must be positive; kl3 uses 0.02"),
        ({"constraint": "kl3", "delta": -0.02}, "loss.delta=-0.02 must be positive"),
        ({"constraint": "kl3", "delta": float("nan")}, "loss.delta=nan: expected a number"),
        ({"delta": 0.02}, "loss.delta=0.02 contradicts loss.constraint='clip'"),
        ({"constraint": "tv", "delta": 1.0}, "loss.delta=1.0 never clips"),
        ({"constraint": "kl", "delta": 0.1}, "loss.top_k=None: constraint='kl' needs"),
        ({"constraint": "sapo", "tau_positive": 0.0}, "loss.tau_positive=0.0 must be positive"),
        ({"constraint": "spo", "epsilon": 0.0}, "loss.epsilon=0.0 must be positive"),
        (
            {"epsilon": 0.2},
            "loss.epsilon=0.2 contradicts loss.constraint='clip', whose options are clip_low, clip_high",
        ),
        ({"constraint": "kl4"}, "loss.constraint='kl4': unknown value; expected one of"),
        ({"level": "tokens"}, "loss.level='tokens': unknown value; expected one of"),
        (
            {"level": "sequence", "importance": "tis"},
            "loss.importance='tis' has one weight per token, but loss.level='sequence'",
        ),
        ({"level": "geometric", "importance": "full"}, "loss.importance='full' has one weight per token"),
        ({"level": "sequence", "constraint": "tv"}, "loss.level='sequence' does not support constraint='tv'"),
        ({"level": "geometric", "constraint": "cispo"}, "loss.level='geometric' does not support constraint='cispo'"),
        ({"level": "geometric", "dual_clip": 3.0}, "loss.dual_clip=3.0 does not support loss.level='geometric'"),
        ({"dual_clip": 1.2}, "loss.dual_clip=1.2 must lie above the upper clip bound 1.2"),
        ({"old": "sampler", "importance": "tis"}, "loss.importance='tis' contradicts loss.old='sampler'"),
        ({"importance": "is"}, "loss.importance='is': unknown value; expected one of"),
        ({"importance_high": 2.0}, "loss.importance_high=2.0: importance='none' does not have this bound"),
        (
            {"importance": "tis", "importance_low": 0.1},
            "loss.importance_low=0.1: importance='tis' does not have this bound",
        ),
        ({"importance": "tis", "importance_high": 0.0}, "loss.importance_high=0.0: expected above 0"),
        (
            {"importance": "icepop", "importance_low": 6.0},
            "loss.importance_low=6.0 must lie in [0, importance_high=5.0)",
        ),
        ({"off_policy_mask": 0.0}, "loss.off_policy_mask=0.0: expected above 0, often 0.5"),
        ({"entropy_target": -0.1}, "loss.entropy_target=-0.1: expected above 0, often 0.2"),
        ({"entropy_target": "low"}, "loss.entropy_target='low': expected a number"),
        ({"entropy_delta": 0}, "loss.entropy_delta=0: expected above 0, often 0.005"),
        ({"entropy_target": 0.2, "entropy_coef": -0.1}, "loss.entropy_coef=-0.1 with an entropy_target"),
        ({"off_policy_mask": "0.5"}, "loss.off_policy_mask='0.5': expected a number"),
        ({"off_policy_mask": 0.5, "reward_coef": 0.0}, "loss.off_policy_mask=0.5 with reward_coef=0: the mask selects"),
        ({"kl": "k4"}, "loss.kl='k4': unknown value"),
        ({"kl_coef": None}, "loss.kl_coef=None: expected a number"),
        ({"entropy_coef": float("nan")}, "loss.entropy_coef=nan: expected a number"),
        ({"importance": ["tis"]}, "loss.importance=['tis']: unknown value"),
        ({"constraint": "kl", "top_k": 16.5}, "loss.top_k=16.5: constraint='kl' needs a whole number"),
        ({"constraint": "kl", "top_k": 16, "old": "sampler"}, "loss.old='sampler' does not support constraint='kl'"),
        ({"kl_coef": -1.0}, "loss.kl_coef=-1.0: expected 0 or more"),
        ({"old_kl_coef": -1.0}, "loss.old_kl_coef=-1.0: expected 0 or more"),
    ],
)
def test_contradictions_and_bad_values_are_named(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PolicyLoss(**settings)
