"""Properties of every policy loss: equivalences, finite differences, extreme values, independence of packing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torchtune.models.qwen2 import qwen2

from helpers import unpacked_reference
from helpers.learners import single_process_learner
from helpers.records import make_sample
from helpers.unpacked_reference import keep_float64
from torchtune_ext.objective.clipping import kl3_bounds
from torchtune_ext.objective.constraints import CONSTRAINTS
from torchtune_ext.objective.kl import kl_k3
from torchtune_ext.objective.loss import PolicyLoss, Tokens
from torchtune_ext.objective.ratios import sample_means, sample_sums
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import RowCostModel, pack, pack_updates
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.run.catalog import package_folder
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

PRESETS = {
    path.stem: OmegaConf.to_container(OmegaConf.load(path))
    for path in sorted((package_folder("configs") / "presets").glob("*.yaml"))
}
LOSSES = {name: {k: v for k, v in keys["loss"].items() if k != "_component_"} for name, keys in PRESETS.items()} | {
    **{kl: {"kl_coef": 0.1, "kl": kl} for kl in ("k1", "k2", "k3_unbiased")},
    "k3": {"kl_coef": 0.1, "entropy_coef": 0.02},
    "sequence_mis": {"importance": "sequence_mis"},
    "sequence kl3": {
        "level": "sequence",
        "constraint": "kl3",
        "delta": 1e-3,
        "importance": "geometric_mask",
        "importance_low": 0.8,
        "importance_high": 1.25,
    },
    "sequence cispo": {"level": "sequence", "constraint": "cispo"},
    "interpolated": {"old": "interpolated", "importance": "full"},
    "off_policy_mask": {"importance": "tis", "off_policy_mask": 0.05},
    "entropy_target": {"entropy_coef": 0.02, "entropy_target": 1.0},
}
# The same properties must hold for every other constraint.
NAMED = {options.get("constraint", "clip") for options in LOSSES.values()}
LOSSES |= {name: {"constraint": name} for name in CONSTRAINTS if name not in NAMED}


def random_tokens(seed, num=40, spread=0.4, dtype=torch.float64, top_k=4, lengths=None):
    """Labels with random log-probs, in completions of random lengths, with every optional field filled."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, num) if lengths is None else lengths
    samples = np.repeat(np.arange(len(lengths)), lengths)[:num]

    def near(x, size):
        return np.minimum(x + size * rng.normal(size=x.shape), -1e-3)

    old = -rng.exponential(1.5, len(samples))
    advantages = rng.normal(size=len(samples))[samples]
    tops = [torch.tensor(rng.normal(size=(len(samples), 9)) * 2, dtype=dtype) for _ in range(2)]
    fields = [near(old, spread), rng.random(len(samples)), old, near(old, 0.1), near(old, 0.5), advantages]
    new, entropy, old, sampler, ref, advantages = (torch.tensor(x, dtype=dtype) for x in fields)
    return Tokens(
        logprobs_L=new.requires_grad_(),
        entropy_L=entropy.requires_grad_(),
        proximal_logprobs_L=old,
        behavior_logprobs_L=sampler,
        ref_logprobs_L=ref,
        advantages_L=advantages,
        versions_L=torch.tensor(rng.integers(3, 8, len(samples)), dtype=torch.int32),
        completion_index_L=torch.tensor(samples),
        proximal_top_LK=tops[0].log_softmax(-1)[:, :top_k],
        top_LK=(tops[0] + 0.2 * tops[1]).log_softmax(-1)[:, :top_k],
        teacher_logprobs_L=-ref.abs() - 0.1,
        version=7,
    )


def run(loss, t):
    """Returns loss values, gradient and metrics; `t` gets a new leaf tensor."""
    t = replace(t, logprobs_L=t.logprobs_L.detach().clone().requires_grad_())
    values_L, metrics = loss(t)
    values_L.sum().backward()
    return values_L.detach(), t.logprobs_L.grad, metrics


def assert_same(one, other, t):
    for a, b in zip(run(one, t)[:2], run(other, t)[:2], strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max())


# --- equivalences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "low", "high"),
    [
        (0.005, 0.0967, 0.1034),
        (0.01, 0.1348, 0.1482),
        (0.02, 0.1869, 0.2135),
        (0.05, 0.2838, 0.3504),
        (0.2, 0.5068, 0.7722),
    ],
)
def test_published_bounds_of_kl3(delta, low, high):
    lower, upper = kl3_bounds(delta)
    assert (1 - lower, upper - 1) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@settings(max_examples=300)
@given(exponent=st.floats(-10, 300))
def test_kl3_bounds_reach_delta(exponent):
    """In float64. exp in the bounds and log here keep d within eps (1 + |d|).

    The relative change of expm1(d) - d is at most 1 + 2 / |d| times as large, and its own rounding is 2 eps / |d|.
    """
    delta, eps = 10.0**exponent, np.finfo(float).eps
    lower, upper = kl3_bounds(delta)
    assert 0 <= lower < 1 < upper
    for w in (lower, upper) if delta < 700 else (upper,):  # e^-700 is close to the smallest normal float64
        d = math.log(w)
        rel = eps * ((1 + 2 / abs(d)) * (2 + abs(d)) + 2 / abs(d))
        assert math.expm1(d) - d == pytest.approx(delta, rel=rel)


@pytest.mark.parametrize("delta", [0.005, 0.02, 0.1, 1.0])
def test_atr_is_an_asymmetric_clip(delta):
    lower, upper = kl3_bounds(delta)
    for seed in range(5):
        t = random_tokens(seed)
        atr, asymmetric = PolicyLoss(constraint="kl3", delta=delta), PolicyLoss(clip_low=1 - lower, clip_high=upper - 1)
        assert_same(atr, asymmetric, t)
        # the direct test KL3 <= delta gives the same result for every label whose advantage pushes outward
        kl3 = kl_k3(t.proximal_logprobs_L, t.logprobs_L.detach())
        outward = t.advantages_L * (t.logprobs_L.detach() - t.proximal_logprobs_L) > 0
        assert atr(t)[1]["clip_fraction"].bool().tolist() == (outward & (kl3 > delta)).tolist()


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_on_policy_all_constraints_have_the_policy_gradient(name):
    t = random_tokens(1)
    t = replace(t, logprobs_L=t.proximal_logprobs_L.clone().requires_grad_(), top_LK=t.proximal_top_LK)
    options = {"top_k": 4} if name == "kl" else {}
    _, gradient, _ = run(PolicyLoss(constraint=name, **options), t)
    assert (gradient + t.advantages_L).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["full", "tis", "mis", "icepop", "sequence_tis", "sequence_mis", "geometric_mask"])
def test_importance_weights_one_when_sampler_is_old_policy(name):
    t = random_tokens(2)
    t = replace(t, behavior_logprobs_L=t.proximal_logprobs_L)
    assert_same(PolicyLoss(importance=name), PolicyLoss(), t)


def test_sequence_methods_equal_token_methods_on_single_labels():
    t = random_tokens(3, lengths=[1] * 40)
    for options in ({}, {"constraint": "kl3"}, {"constraint": "sapo"}, {"constraint": "cispo"}, {"constraint": "none"}):
        assert_same(PolicyLoss(level="sequence", **options), PolicyLoss(**options), t)
    assert_same(PolicyLoss(level="geometric"), PolicyLoss(), t)
    bounds = {"importance_high": 1.1}
    assert_same(PolicyLoss(importance="sequence_tis", **bounds), PolicyLoss(importance="tis", **bounds), t)


def test_policy_loss_wide_bounds_never_clip():
    t = random_tokens(4)
    assert_same(PolicyLoss(clip_low=1.0, clip_high=1e6), PolicyLoss(constraint="none"), t)
    assert_same(PolicyLoss(constraint="kl3", delta=60.0), PolicyLoss(constraint="none"), t)
    assert_same(PolicyLoss(constraint="kl", delta=1e3, top_k=4), PolicyLoss(constraint="none"), t)


def test_policy_loss_is_independent_of_other_completions():
    """The loss of a label depends only on its own completion."""
    t = random_tokens(5)
    for options in LOSSES.values():
        loss, kept = PolicyLoss(**options), {name: [] for name in ("values", "gradients")}
        values, gradients, _ = run(loss, t)
        for sample in reversed(range(int(t.completion_index_L.max()) + 1)):
            at = t.completion_index_L == sample
            cut = {
                f: getattr(t, f)[at].detach() for f in Tokens.__slots__ if f not in ("completion_index_L", "version")
            }
            isolated = Tokens(
                **cut, completion_index_L=torch.zeros(int(at.sum()), dtype=torch.int64), version=t.version
            )
            result = run(loss, isolated)
            kept["values"].insert(0, result[0])
            kept["gradients"].insert(0, result[1])
        assert torch.cat(kept["values"]).tolist() == pytest.approx(values.tolist(), rel=1e-12)
        assert torch.cat(kept["gradients"]).tolist() == pytest.approx(gradients.tolist(), rel=1e-12, abs=1e-15)


def test_sample_sums_and_means():
    values, samples = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 0, 1, 2])
    assert sample_sums(values, samples).tolist() == [3.0, 3.0, 4.0, 8.0]
    assert sample_means(values, samples).tolist() == [1.5, 1.5, 4.0, 8.0]
    assert sample_means(torch.empty(0), torch.empty(0, dtype=torch.int64)).tolist() == []


# --- gradients and numbers ---------------------------------------------------------------------------------------------


# Their value is not the integral of their gradient. test_objective.py tests them by hand.
STOPPED = {"cispo", "sequence cispo", "k1", "interpolated"}


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in STOPPED])
def test_gradcheck(name):
    t = random_tokens(6, num=12)

    def values(logprobs_L, entropy_L):
        return PolicyLoss(**LOSSES[name])(replace(t, logprobs_L=logprobs_L, entropy_L=entropy_L))[0]

    assert torch.autograd.gradcheck(values, (t.logprobs_L, t.entropy_L))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_log_ratios_give_finite_losses(name, dtype):
    """Log-ratios up to +-80 to the old, sampling and reference policies, for both signs of the advantage."""
    cases = torch.cartesian_prod(*[torch.tensor([-80.0, -20.0, 0.0, -1e-3])] * 4)
    new, old, sampler, ref = (column.repeat(2).to(dtype) for column in cases.T)
    sign = torch.tensor([1.0, -1.0]).repeat_interleave(len(cases)).to(dtype)
    tops = torch.tensor([[-80.0, -60.0], [0.0, -80.0], [-0.5, -1.0]]).to(dtype)[torch.arange(len(new)) % 3]
    t = Tokens(new, sign * 0, old, sampler, ref, sign, torch.zeros(len(new), dtype=torch.int32),
               torch.arange(len(new)) // 3, tops, tops.flip(0), teacher_logprobs_L=ref, version=1)  # fmt: skip
    values, gradients, metrics = run(PolicyLoss(**LOSSES[name]), t)
    assert torch.isfinite(values).all() and torch.isfinite(gradients).all()
    assert all(torch.isfinite(m).all() for m in metrics.values())


@pytest.mark.parametrize("d", [1e-7, 1e-5, 1e-4, 1e-3, 0.0099, 0.0101, 0.1, 1.0, -1e-5, -1e-3, -0.5])
def test_k3_keeps_its_relative_precision(d):
    """Against the series in exact fractions of d; below 1e-3, e^d - 1 - d in float32 is only rounding error."""
    exact = sum(d**n / math.factorial(n) for n in range(2, 30))
    single = torch.tensor(d, dtype=torch.float32)
    # three roundings of the series; above it, cancellation in expm1(d) - d costs eps |d| of d^2 / 2, at most 2 eps / 0.01
    bound = 4 * 2**-24 if abs(d) < 1e-2 else 2 * 2**-24 / min(abs(d), 1.0) + 4 * 2**-24
    rounded = sum(single.item() ** n / math.factorial(n) for n in range(2, 30))  # exact value of the float32 d
    assert kl_k3(torch.zeros(()), single).item() == pytest.approx(rounded, rel=bound)
    double = torch.tensor(d, dtype=torch.float64)
    assert kl_k3(torch.zeros_like(double), double).item() == pytest.approx(exact, rel=1e-13)


# --- independent of rows -----------------------------------------------------------------------------------------------------

BOUND = 1e-10  # in float64, relative to the loss of a label (about 1) and to the largest gradient


def tiny_model():
    torch.manual_seed(0)
    model = qwen2(60, 2, 4, 2, 32, 48, 64, tie_word_embeddings=True)
    with torch.no_grad():
        model.tok_embeddings.weight.mul_(0.1)  # log-probs around -4, as in the groups
    return model.double()


SHAPES = [(7, [5, 1, 9]), (4, [12, 11]), (2, [1, 6, 3, 2])]  # (prompt tokens, tokens of each completion)


def make_groups(seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    groups = []
    for g, (prompt, lengths) in enumerate(shapes):
        samples = []
        for n in lengths:
            ids, noise, advantage = rng.integers(0, 60, n), 0.3 * rng.normal(size=n), float(rng.normal())
            heard = {"advantage": advantage, "teacher_logprobs": (2 * noise - 4).astype(np.float32)}
            samples.append(make_sample(ids, noise - 4, 3 + np.arange(n) % 5, in_loss=True, **heard))
        groups.append(Group(Problem(f"g{g}", (), None), rng.integers(0, 60, prompt).astype(np.int32), tuple(samples)))
    return groups


@keep_float64()
def loss_and_gradients(groups, options, aggregation, row_tokens, tile=None, turned=False, ranks=1):
    """One update after the policy has changed, so that ratios differ from one. Of several ranks, the last one's metrics."""
    rows, _ = pack(groups, row_tokens, aggregation, 16, cost_model=RowCostModel(ranks, tile))
    # Rows hold float32; the interpolated old policy needs one dtype for sampler and trainer.
    rows = [
        replace(row, logprobs_L=row.logprobs_L.double(), teacher_logprobs_L=row.teacher_logprobs_L.double())
        for row in (rows[::-1] if turned else rows)
    ]
    policy, total = PackedPolicy(tiny_model()), 0.0
    learners = [Learner(policy, PolicyLoss(**options), Ranks(r, ranks, torch.device("cpu"))) for r in range(ranks)]
    shares = [learner.ranks.local_slice(rows) for learner in learners]
    olds = [learners[0].logprobs(share, top_k=options.get("top_k") or 0) for share in shares]
    with torch.no_grad():
        for i, param in enumerate(policy.model.parameters()):
            param.add_(0.03 * torch.rand(param.shape, generator=torch.Generator().manual_seed(i)) - 0.015)
    for learner, share, old in zip(learners, shares, olds, strict=True):
        _, metrics = learner.forward_backward(share, old, old if options.get("kl_coef") else None, version=7)
        total += metrics["loss/total"]
    # As in FSDP, the gradient is the mean over ranks.
    return total, torch.cat([p.grad.flatten() for p in policy.model.parameters()]) / ranks, metrics


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_loss_is_invariant_to_rows_padding_order(name, aggregation):
    """One row, many rows (micro-batches), padding, another order of rows, another order of groups."""
    options, groups = LOSSES[name], make_groups()
    want_loss, want, want_metrics = loss_and_gradients(groups, options, aggregation, 200)
    assert want.abs().max() > 1e-4, "the case must have a gradient to compare"
    for change in (
        {"row_tokens": 26},
        {"row_tokens": 26, "turned": True},
        {"row_tokens": 200, "tile": 128},
        {"row_tokens": 26, "tile": 20},
    ):
        total, gradients, metrics = loss_and_gradients(groups, options, aggregation, **change)
        assert abs(total - want_loss) < BOUND
        assert (gradients - want).abs().max() < BOUND * want.abs().max()
        assert metrics == pytest.approx(want_metrics, rel=BOUND, abs=BOUND)
    turned_loss, _, _ = loss_and_gradients(groups[::-1], options, aggregation, 200)
    assert abs(turned_loss - want_loss) < BOUND


METHODS = PRESETS | {"length": PRESETS["grpo"] | {"advantage": {"length_coef": 0.5}}}


@pytest.mark.parametrize("name", METHODS)
def test_preset_gradient_is_invariant_to_division(name):
    """From rewards to the gradient, with the preset's advantages and aggregation: any division of the same samples into rows
    (micro-batches) and ranks, in any order."""
    keys, rng = METHODS[name], np.random.default_rng(0)
    options = {key: value for key, value in keys["loss"].items() if key != "_component_"}
    rewards = [[1, 0, 0, 1, 0], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    groups = make_groups(0, [(7, [5, 1, 9, 4, 2]), (4, [12, 15, 3, 8, 6]), (2, [1, 6, 3, 2, 7])])
    graded = [
        replace(g, samples=tuple(replace(s, outcome=Score(float(r))) for s, r in zip(g.samples, rs, strict=True)))
        for g, rs in zip(groups, rewards, strict=True)
    ]
    train_all = PolicyLoss(**options).needs_all_groups
    groups, _ = assign_advantages(graded, AdvantageConfig(**keys.get("advantage", {})), 16, train_all)
    total, want, _ = loss_and_gradients(groups, options, keys["aggregation"], 400)
    assert want.abs().max() > 1e-4, "the case must have a gradient to compare"
    for row_tokens, ranks in ((26, 1), (45, 2), (26, 3)):
        groups = [replace(g, samples=tuple(g.samples[i] for i in rng.permutation(5))) for g in groups[1:] + groups[:1]]
        divided = loss_and_gradients(groups, options, keys["aggregation"], row_tokens, ranks=ranks)
        assert abs(divided[0] - total) < BOUND
        assert (divided[1] - want).abs().max() < BOUND * want.abs().max()


# --- zero-variance groups ---------------------------------------------------------------------------------------------


@keep_float64()
def step_of(rewards: list[list[float]], loss: PolicyLoss, aggregation: str, num_updates: int = 1):
    """Labels, loss and gradient of each update of a step whose groups have these rewards (completions of 1 to 9 tokens)."""
    rng, groups = np.random.default_rng(1), []
    for g, rewards_G in enumerate(rewards):
        samples = [
            make_sample(rng.integers(0, 60, n), np.full(n, -4.0), outcome=Score(reward, {}))
            for n, reward in zip(range(1, 99, 2), rewards_G, strict=False)
        ]
        groups.append(Group(Problem(f"g{g}", (), None), rng.integers(0, 60, 5).astype(np.int32), tuple(samples)))
    groups, _ = assign_advantages(groups, AdvantageConfig(), train_all=loss.needs_all_groups)
    updates, _ = pack_updates(groups, num_updates, 400, aggregation=aggregation, aggregation_constant=16)
    results = []
    for rows in updates:
        policy = PackedPolicy(tiny_model())
        learner = single_process_learner(policy, loss)
        scored = learner.logprobs(rows)
        ref = [replace(s, logprobs_L=s.logprobs_L - 0.5) for s in scored] if loss.kl_coef else None
        total = learner.forward_backward(rows, scored, ref)[1]["loss/total"]
        gradient = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
        results.append((sum(row.num_labels for row in rows), total, gradient))
    return results


SIGNAL, SILENT = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("term", ["kl_coef", "old_kl_coef", "entropy_coef"])
def test_kl_and_entropy_train_zero_variance_groups(term):
    """Zero-variance groups have no policy gradient, but the gradient of these terms over all their labels."""
    loss = PolicyLoss(**{term: 0.1}, kl="k2")
    ((labels, total, gradient),) = step_of([SILENT, SILENT], loss, "token")
    assert labels == 2 * (1 + 3 + 5 + 7)
    if term == "old_kl_coef":  # the policy is the old one
        assert total == 0.0
    else:
        assert abs(total) > 1e-3 and gradient.norm() > 1e-3
    assert step_of([SILENT, SILENT], PolicyLoss(), "token") == []  # no other term acts on them


def test_a_constant_divides_by_all_completions():
    """Dr.GRPO: other groups only divide the gradient of a group by the number of groups, whatever their rewards."""
    ((_, alone, want),) = step_of([SIGNAL], PolicyLoss(), "constant")
    ((_, among, result),) = step_of([SIGNAL] + [SILENT] * 31, PolicyLoss(), "constant")
    assert abs(among - alone / 32) < BOUND
    assert (result - want / 32).abs().max() < BOUND * (want / 32).abs().max()


def test_a_constant_is_a_positive_number_of_tokens():
    groups = unpacked_reference.make_groups(np.random.default_rng(0), [(4, [3, 2])])
    ((row,),) = pack_updates(groups, 1, 40, aggregation="constant", aggregation_constant=1)[0]
    assert row.loss_weights_L.tolist() == [0.5] * 5
    for constant in (0, None):
        with pytest.raises(ValueError, match=f"aggregation_constant={constant}: "):
            pack_updates(groups, 1, 40, aggregation="constant", aggregation_constant=constant)


def test_constant_aggregation_step_updates_sum_to_whole_step():
    """Three of eight groups have nonzero advantages. Four updates, one of them empty, average to one update."""
    rewards = [SILENT, SIGNAL, SILENT, SIGNAL, SILENT, SILENT, SIGNAL, SILENT]
    ((_, _, want),) = step_of(rewards, PolicyLoss(), "constant")
    parts = step_of(rewards, PolicyLoss(), "constant", num_updates=4)
    assert len(parts) == 3
    assert (sum(gradient for _, _, gradient in parts) / 4 - want).abs().max() < BOUND * want.abs().max()


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_mean_aggregation_counts_only_kept_completions(aggregation):
    ((_, _, want),) = step_of([SIGNAL], PolicyLoss(), aggregation)
    ((_, _, dropped),) = step_of([SIGNAL] + [SILENT] * 3, PolicyLoss(), aggregation)
    assert torch.equal(dropped, want)
    tiny = PolicyLoss(entropy_coef=1e-14)  # a negligible term keeps all groups
    ((_, _, kept),) = step_of([SIGNAL] + [SILENT] * 3, tiny, aggregation)
    assert (kept - want / 4).abs().max() < BOUND * want.abs().max()


class Constant:
    """A loss with known metrics."""

    def __call__(self, t):
        first_L = t.completion_index_L == 0
        return t.logprobs_L, {"first": first_L.float(), "first_max": first_L.float()}


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_loss_metrics_are_label_means_for_any_aggregation(aggregation):
    groups = make_groups()[:1]  # completions of 5, 1 and 9 labels
    rows, _ = pack(groups, 200, aggregation, 16)
    _, metrics = single_process_learner(PackedPolicy(tiny_model()), Constant()).forward_backward(rows)
    assert {name: value for name, value in metrics.items() if name != "loss/total"} == {
        "loss/first": pytest.approx(5 / 15),
        "loss/first_max": 1.0,
    }


def test_a_metric_of_another_shape_is_named():
    class Scalar(Constant):
        def __call__(self, t):
            return t.logprobs_L, {"mean": t.logprobs_L.mean()}

    rows, _ = pack(make_groups(), 200)
    with pytest.raises(ValueError, match="metric 'mean' of loss Scalar has shape"):
        single_process_learner(PackedPolicy(tiny_model()), Scalar()).forward_backward(rows)
