"""The methods of the learner, and the inputs that a loss requests."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import unpacked_reference
from helpers.learners import single_process_learner
from torchtune_ext.kernels.packed_attention import packed_mask
from torchtune_ext.objective.loss import LossRequirements, NLLLoss, PolicyLoss, loss_requirements
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import logprobs
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.recipes.grpo import GRPORecipe
from torchtune_ext.training.checkpoints import RunState
from torchtune_ext.training.learner import ScheduleConfig, make_reference, make_schedule, mean_over_updates

# (prompt tokens, tokens of each completion)
GROUPS = [(7, [5, 1, 9]), (4, [12, 11])]


class ReferenceLoss:
    """A user's loss, which only declares its requirements."""

    needs_reference = True
    needs_all_groups = True

    def __call__(self, t):
        return (t.logprobs_L - t.ref_logprobs_L).square(), {}


class MinimalLoss:
    def __call__(self, t):
        assert t.ref_logprobs_L is None and t.proximal_top_LK is None
        return -t.advantages_L * t.logprobs_L, {}


class Calls(TorchDispatchMode):
    """Records the operations and their keyword arguments. `torch.tensor` is `lift_fresh`."""

    def __init__(self):
        super().__init__()
        self.calls = []

    @property
    def operations(self):
        return [func for func, *_ in self.calls]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def rows():
    return pack(unpacked_reference.make_groups(np.random.default_rng(0), GROUPS), 40)[0]


def make_learner(loss, **options):
    policy = PackedPolicy(unpacked_reference.tiny_model())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.1)
    return single_process_learner(policy, loss, optimizer=optimizer, **options)


def test_learner_custom_loss_reference_stays_fixed():
    learner = make_learner(ReferenceLoss())
    packed = rows()
    start = [scores.logprobs_L for scores in learner.logprobs(packed)]
    with torch.no_grad():
        for param in learner.policy.trainable_parameters():
            param.add_(0.05 * torch.randn_like(param))
    moved = [param.detach().clone() for param in learner.policy.trainable_parameters()]
    (reference,) = learner.reference_logprobs([packed])
    assert all(torch.equal(a.logprobs_L, b) for a, b in zip(reference, start, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(learner.policy.trainable_parameters(), moved, strict=True))
    losses = []
    for _ in range(5):
        _, metrics = learner.forward_backward(packed, reference=learner.reference_logprobs([packed])[0])
        losses.append(learner.step(metrics, advice=str)["loss/total"])
    assert losses[-1] < 0.5 * losses[0]


def test_reference_on_gpu_uses_same_pinned_memory(monkeypatch):
    """Every copy to or from the GPU is asynchronous, between the parameters and two blocks that are pinned once."""
    model, blocks = unpacked_reference.tiny_model(), []
    monkeypatch.setattr("torchtune_ext.training.learner.pin", blocks.append)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    start = [p.detach().clone() for p in model.parameters()]
    reference = make_reference(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    with Calls() as calls:
        for _ in range(3):
            with reference.activate():
                assert all(map(torch.equal, model.parameters(), start))
            assert all(torch.equal(p, value + 1.0) for p, value in zip(model.parameters(), start, strict=True))
    copies = [(args, kwargs) for func, args, kwargs in calls.calls if func is torch.ops.aten.copy_.default]
    assert len(copies) == 9 * len(start)
    assert all([*args[2:], *kwargs.values()] == [True] for args, kwargs in copies)
    memory = {block.untyped_storage().data_ptr() for block in blocks}
    memory |= {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(blocks) == 2 and {t.untyped_storage().data_ptr() for args, _ in copies for t in args[:2]} <= memory


def test_loss_receives_teacher_logprobs_per_label():
    """Each label has the teacher's log-prob of its token, whatever the order of completions in rows."""
    groups = [
        replace(g, samples=tuple(replace(s, teacher_logprobs=-s.completion.tokens / np.float32(8)) for s in g.samples))
        for g in unpacked_reference.make_groups(np.random.default_rng(0), GROUPS)
    ]
    received = []

    class RecordingLoss(MinimalLoss):
        def __call__(self, t):
            received.append(t.teacher_logprobs_L)
            return super().__call__(t)

    packed = pack(groups, 20)[0]
    make_learner(RecordingLoss()).forward_backward(packed)
    assert len(packed) > 1 and all(map(torch.equal, received, [-row.labels_L / 8 for row in packed]))
    first = replace(groups[0], samples=(replace(groups[0].samples[0], teacher_logprobs=None), *groups[0].samples[1:]))
    assert any(row.teacher_logprobs_L is None for row in pack([first, groups[1]], 40)[0])


def test_learner_skips_inputs_not_requested_by_loss():
    learner = make_learner(MinimalLoss())
    assert learner.reference_logprobs([rows(), rows()]) == [None, None]
    learner.forward_backward(rows())


@pytest.mark.parametrize(
    "loss, proximal, reference, all_groups, top_k",
    [
        (PolicyLoss(), True, False, False, 0),
        (PolicyLoss(old="sampler"), False, False, False, 0),
        (PolicyLoss(old="interpolated", importance="full"), False, False, False, 0),
        (PolicyLoss(kl_coef=0.1), True, True, True, 0),
        (PolicyLoss(entropy_coef=0.1), True, False, True, 0),
        (PolicyLoss(constraint="kl", top_k=16), True, False, False, 16),
        (NLLLoss(), False, False, False, 0),
        (MinimalLoss(), True, False, False, 0),
        (ReferenceLoss(), True, True, True, 0),
        (lambda t: (t.logprobs_L, {}), True, False, False, 0),
    ],
)
def test_loss_requirements_follow_attributes(loss, proximal, reference, all_groups, top_k):
    needs = loss_requirements(loss)
    assert needs == LossRequirements(proximal, reference, False, all_groups, top_k)


def test_proximal_logprobs_first_update_skips_forward():
    learner = make_learner(PolicyLoss(constraint="kl", top_k=4))
    first, second = learner.proximal_logprobs([rows(), rows()])
    assert first is None and [scores.top_LK.shape[-1] for scores in second] == [4] * len(second)
    # That forward pass has no top k, which a second iteration of the first update needs.
    assert learner.proximal_logprobs([rows()], iterations=2)[0][0].top_LK.shape[-1] == 4
    assert make_learner(PolicyLoss()).proximal_logprobs([rows()], iterations=2) == [None]
    learner.policy.has_dropout = True  # with dropout every forward pass is a different policy
    assert None not in learner.proximal_logprobs([rows(), rows()])


@pytest.mark.parametrize("options", [{"old": "sampler"}, {"old": "interpolated", "importance": "full"}])
def test_learner_computes_proximal_logprobs_only_if_loss_needs(options):
    learner = make_learner(PolicyLoss(**options))
    assert learner.proximal_logprobs([rows(), rows()]) == [None, None]
    learner.step(learner.forward_backward(rows(), version=0)[1], advice=str)
    # The second update gets no proximal log-probs, and log-probs of the current policy would be wrong.
    moved = learner.forward_backward(rows(), version=0)[1]["loss/ratio_max"]
    assert moved != pytest.approx(1.0, abs=1e-6)
    # With dropout the learner computes them for the first update, too, for the mismatch gate.
    learner.policy.has_dropout = True
    first, later = learner.proximal_logprobs([rows(), rows()])
    assert first is not None
    assert later is None


@pytest.mark.parametrize("loss", [PolicyLoss(), PolicyLoss(importance="tis"), NLLLoss()])
def test_learner_update_synchronizes_device_twice(loss, monkeypatch):
    """Once for the numbers of all rows and once for the gradient norm, for any number of rows and metrics."""
    learner, packed, reads = make_learner(loss, max_grad_norm=1.0), rows() * 3, []
    # On a CPU `packed_mask` reads the row's ends back, so the masks are computed before the count.
    masks = {id(row.ends_T): packed_mask(row.ends_T, row.positions_T) for row in packed}
    monkeypatch.setattr(logprobs, "packed_mask", lambda ends_T, *_: masks[id(ends_T)])
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, name=name, method=method: reads.append(name) or method(*args)
        )
    learner.step(learner.forward_backward(packed)[1], advice=str)
    assert len(packed) > 2
    assert reads == ["tolist", "item"]
    # A copy from main memory to a GPU waits, too: rows make no tensor from Python numbers.
    with Calls() as calls:
        learner.forward_backward(packed)
    assert torch.ops.aten.mm.default in calls.operations
    assert torch.ops.aten.lift_fresh.default not in calls.operations


def test_learner_non_finite_gradient_skips_update():
    learner = make_learner(MinimalLoss())
    before = [param.detach().clone() for param in learner.policy.trainable_parameters()]
    _, metrics = learner.forward_backward(rows())
    learner.policy.trainable_parameters()[0].grad[0] = torch.nan
    with pytest.raises(RuntimeError, match="gradient norm nan: look there"):
        learner.step(metrics, advice=lambda: "look there")
    assert all(torch.equal(a, b) for a, b in zip(learner.policy.trainable_parameters(), before, strict=True))
    assert learner.update_index == 0 and all(param.grad is None for param in learner.policy.trainable_parameters())


def test_learner_learning_rate_follows_planned_update_count():
    policy = PackedPolicy(unpacked_reference.tiny_model())
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=2.0)
    learner = single_process_learner(
        policy,
        MinimalLoss(),
        optimizer=optimizer,
        schedule=make_schedule(ScheduleConfig(decay="linear"), 8),
        max_grad_norm=None,
    )
    for updates, rate in ((0, 2.0), (6, 0.5), (7, 0.25)):
        learner.update_index = updates
        _, metrics = learner.forward_backward(rows())
        wanted = [p.detach() - rate * p.grad for p in policy.trainable_parameters()]
        assert learner.step(metrics, advice=str)["optim/lr"] == rate
        assert all(torch.equal(p, want) for p, want in zip(policy.trainable_parameters(), wanted, strict=True))
        assert learner.update_index == updates + 1


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 8])
def test_schedule_after_its_end_stays_within_bounds(decay, warmup):
    factor = make_schedule(ScheduleConfig(decay, warmup), 8)
    assert all(0 <= factor(update) <= 1 for update in range(100))
    ends = 1.0 if decay == "constant" else 0.0
    assert all(factor(update) == ends for update in range(max(8, warmup), 100)) or warmup == 8


def make_recipe(learner, updates_per_step=1, iterations_per_step=1, state=None):
    """A recipe in `state` without engine and run folder."""
    recipe = object.__new__(GRPORecipe)
    recipe.cfg = SimpleNamespace(updates_per_step=updates_per_step, iterations_per_step=iterations_per_step)
    recipe.learner, recipe.policy, recipe.optimizer = learner, learner.policy, learner.optimizer
    state = state or asdict(RunState(0, 0, {}, {}))
    recipe.checkpoints = SimpleNamespace(load=lambda *_: state, failed_update_advice=str)
    recipe.problems, recipe.source = Mock(), Mock()
    recipe.engine, recipe.progress, recipe.mismatch_gate = None, MagicMock(), MagicMock()
    recipe.mismatch_gate.check.return_value.metrics.return_value = {}
    recipe.load_checkpoint(Path())
    return recipe


def run_steps(updates_per_step, decay, warmup, state, steps, iterations=1):
    """Runs `steps` steps of the recipe after `state`. Returns its state and the learning rate of every update."""
    schedule, rates = make_schedule(ScheduleConfig(decay, warmup), 6 * updates_per_step * iterations), []
    learner = make_learner(MinimalLoss(), schedule=lambda update: rates.append(schedule(update)) or rates[-1])
    recipe = make_recipe(learner, updates_per_step, iterations, state)
    for _ in range(steps):
        recipe.step += 1
        # The first step has a zero-variance group, so an update is skipped.
        recipe.update([[]] * max(1, updates_per_step - (recipe.step == 1)))
    return asdict(RunState(recipe.step, 0, {}, {})), rates


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("before, after", [(4, 1), (1, 4), (4, 4)])
def test_resume_with_other_updates_keeps_schedule(decay, warmup, before, after):
    """Each step has the learning rates of a run with the current `updates_per_step` from its start."""
    start = asdict(RunState(0, 0, {}, {}))
    state, first = run_steps(before, decay, warmup, start, 2)
    whole = make_schedule(ScheduleConfig(decay, warmup), 6 * after)
    _, second = run_steps(after, decay, warmup, json.loads(json.dumps(state)), 4)
    assert len(first) == max(1, before - 1) + before
    assert second == [whole(update) for update in range(2 * after, 6 * after)]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("before, after", [(1, 3), (3, 1), (2, 3)])
def test_iterations_resume_keeps_schedule(decay, before, after):
    """The schedule counts every update of every iteration, also of a run that resumes with other iterations."""
    state, first = run_steps(2, decay, 3, asdict(RunState(0, 0, {}, {})), 2, iterations=before)
    whole = make_schedule(ScheduleConfig(decay, 3), 6 * 2 * after)
    _, second = run_steps(2, decay, 3, json.loads(json.dumps(state)), 4, iterations=after)
    assert len(first) == (1 + 2) * before
    assert second == [whole(update) for update in range(2 * 2 * after, 6 * 2 * after)]


def trl_updates(model, groups, iterations, lr):
    """TRL's loss and its reuse of a batch, one completion at a time: all groups in order, `iterations` times.

    `old_per_token_logps` are those of the policy before the first update; the importance weight is TIS. Returns the losses
    and the fractions of clipped tokens.
    """

    def logprobs(group, sample):
        ids = torch.tensor([*group.prompt_tokens, *sample.completion.tokens])
        scores = model(ids[None, :-1])[0][len(group.prompt_tokens) - 1 :].log_softmax(-1)
        return scores.gather(1, ids[len(group.prompt_tokens) :, None])[:, 0]

    with torch.no_grad():
        old = [[logprobs(group, sample) for sample in group.samples] for group in groups]
    losses, clipped = [], []
    for group, old_logprobs in list(zip(groups, old, strict=True)) * iterations:
        losses.append(torch.zeros((), dtype=torch.float64))
        clipped.append([])
        for sample, old_R in zip(group.samples, old_logprobs, strict=True):
            ratio_R = (logprobs(group, sample) - old_R).exp()
            gain_R = torch.minimum(ratio_R * sample.advantage, ratio_R.clamp(0.8, 1.2) * sample.advantage)
            tis_R = (old_R - torch.tensor(sample.completion.logprobs).double()).exp().clamp(max=2.0)
            losses[-1] = losses[-1] - (tis_R * gain_R).mean() * float(np.float32(1 / len(group.samples)))
            clipped[-1] += (gain_R < ratio_R * sample.advantage).tolist()
        for param, grad in zip(model.parameters(), torch.autograd.grad(losses[-1], [*model.parameters()]), strict=True):
            param.data -= lr * grad
    return [loss.item() for loss in losses], [sum(each) / len(each) for each in clipped]


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_iterations_equal_unpacked_trl_in_float64(iterations):
    """Weights and metrics of a step whose two updates are made several times, on packed rows and one completion at a time."""
    # Lengths are powers of 2, so that the float32 weights of labels are exact.
    groups = unpacked_reference.make_groups(np.random.default_rng(0), [(7, [4, 1, 8, 2]), (4, [8, 16])])
    updates = [pack([group], 30, aggregation="sequence")[0] for group in groups]
    plain = unpacked_reference.tiny_model(dtype=torch.float64)
    policy = PackedPolicy(unpacked_reference.tiny_model(dtype=torch.float64))
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.2)
    with unpacked_reference.keep_float64():
        losses, clipped = trl_updates(plain, groups, iterations, 0.2)
        recipe = make_recipe(
            single_process_learner(policy, PolicyLoss(importance="tis"), optimizer=optimizer), 2, iterations
        )
        recipe.step = 1
        metrics = recipe.update(updates)
    for param, expected in zip(policy.model.parameters(), plain.parameters(), strict=True):
        assert (param - expected).abs().max() < 1e-10
    assert metrics["loss/total"] == pytest.approx(np.mean(losses), abs=1e-10)
    assert metrics["loss/clip_fraction"] == pytest.approx(np.mean(clipped), abs=1e-6)
    assert iterations == 1 or any(clipped[2:])
    assert recipe.learner.update_index == 2 * iterations
    # The mismatch gate sees the log-probs before the first update of the step, once.
    (((rows, scored, _, version), _),) = recipe.mismatch_gate.check.call_args_list
    assert rows is updates[0] and len(scored) == len(rows) and version == 0
    recipe.progress.training_bar.assert_called_once_with(sum(map(len, updates)) * iterations)


@pytest.mark.parametrize(
    "options", [{}, {"constraint": "kl", "delta": 1e-3, "top_k": 8}, {"old": "sampler"}, {"kl_coef": 0.1}]
)
def test_iterations_equal_given_proximal_logprobs(options):
    """Any loss gets the log-probs of the policy before the step in every iteration; the first update needs no own pass."""
    loss, updates = PolicyLoss(**options), [rows(), rows()]
    recipe, manual = make_recipe(make_learner(loss), 2, 3), make_learner(loss)
    recipe.step = 1
    metrics = recipe.update(updates)
    proximal = [manual.logprobs(update, top_k=loss.top_k or 0) for update in updates]
    reference = [proximal[i] if loss.kl_coef else None for i in range(2)]
    done = []
    for i in [0, 1] * 3:
        done.append(manual.step(manual.forward_backward(updates[i], proximal[i], reference[i], 0)[1], advice=str))
    for param, expected in zip(recipe.policy.model.parameters(), manual.policy.model.parameters(), strict=True):
        assert (param - expected).abs().max() < 1e-6
    assert metrics == pytest.approx(mean_over_updates(done), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss", [PolicyLoss(entropy_coef=0.01), PolicyLoss(level="sequence"), NLLLoss()])
def test_gradient_repeated_is_bitwise_equal(loss):
    """Sums are deterministic with several threads and rows that operations split among them.

    `index_add` accumulates the gradients of all first labels of a group at one index, and the sums
    of a completion at another. A replay is bitwise equal only if the order of additions is fixed.
    """
    packed = pack(unpacked_reference.make_groups(np.random.default_rng(0), [(9, [12] * 256)]), 40_000)[0]
    learner, threads = make_learner(loss), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first = None
        for _ in range(12):
            learner.forward_backward(packed)
            gradient = torch.cat([param.grad.flatten() for param in learner.policy.trainable_parameters()])
            learner.optimizer.zero_grad()
            assert first is None or torch.equal(gradient, first)
            first = gradient
    finally:
        torch.set_num_threads(threads)


def adaptive_updates(learner, count):
    """Returns the entropy coefficients of `count` updates, and the weights after them."""
    coefs = []
    for _ in range(count):
        _, metrics = learner.forward_backward(rows())
        coefs.append(learner.step(metrics, advice=str)["loss/entropy_coef"])
    return coefs, [param.detach().clone() for param in learner.policy.trainable_parameters()]


def test_resumed_entropy_coefficient_continues_exactly():
    """The state of a checkpoint, through JSON, continues the coefficients and the weights bit for bit."""
    loss = {"entropy_coef": 0.1, "entropy_target": 9.0, "entropy_delta": 0.03}
    learner = make_learner(PolicyLoss(**loss))
    first, weights = adaptive_updates(learner, 2)
    state = json.loads(json.dumps(asdict(RunState(2, 0, {}, {}, loss=learner.loss_state))))
    second, end = adaptive_updates(learner, 2)
    assert first + second == pytest.approx([0.1, 0.13, 0.16, 0.19])
    resumed = make_learner(PolicyLoss(**loss))
    with torch.no_grad():
        for param, value in zip(resumed.policy.trainable_parameters(), weights, strict=True):
            param.copy_(value)
    resumed.loss_state.update(RunState.from_recipe_state(state).loss)
    again, resumed_end = adaptive_updates(resumed, 2)
    assert again == second and all(map(torch.equal, resumed_end, end))
    assert make_learner(MinimalLoss()).loss_state == {}


def test_mean_over_updates_averages_metrics_and_keeps_maximum():
    updates = [
        {"loss": 1.0, "ratio_max": 3.0},
        {"loss": 2.0, "ratio_max": 5.0, "staleness_1": 7.0},
        {"loss": 6.0, "ratio_max": 4.0},
    ]
    assert mean_over_updates(updates) == {"loss": 3.0, "ratio_max": 5.0, "staleness_1": 7.0}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_maximum_over_updates_keeps_nan(place):
    values = [{"ratio_max": math.nan if i == place else float(i)} for i in range(3)]
    assert math.isnan(mean_over_updates(values)["ratio_max"])


def test_logprobs_restore_training_mode(monkeypatch):
    learner = make_learner(MinimalLoss())
    for mode in (False, True):
        learner.policy.model.train(mode)
        learner.logprobs(rows())
        assert learner.policy.model.training is mode
    with pytest.raises(ZeroDivisionError):
        learner.logprobs(1 / 0 for _ in range(1))
    assert learner.policy.model.training
