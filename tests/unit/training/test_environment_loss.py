"""The cross-entropy on the environment's content (`environment_coef`, ECHO): formula, what it leaves alone, and ranks.

With conversations, trees and agents, against a forward per path: test_packed_equals_unpacked, test_tree, test_agent_histories.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.learners import single_process_learner
from helpers.records import make_sample
from helpers.unpacked_reference import as_branched_conversations, keep_float64, make_groups, tiny_model, with_content
from torchtune_ext.objective.loss import PolicyLoss, loss_requirements
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.setup.config_checks import check_environment_loss
from torchtune_ext.tasks.guess_number import GuessNumber
from torchtune_ext.tasks.task import Problem

COEF = 0.05


def conversations(seed=3):
    rng = np.random.default_rng(seed)
    return with_content(rng, as_branched_conversations(rng, make_groups(rng, [(7, [26, 19, 8]), (4, [12, 23])])))


def train(rows, loss, dtype=torch.float64):
    """Return the gradient, the proximal log-probs and the metrics of one pass over the rows."""
    policy = PackedPolicy(tiny_model(dtype=dtype))
    with keep_float64():
        scores, metrics = single_process_learner(policy, loss, temperature=0.9).forward_backward(rows)
    gradient = torch.cat([param.grad.flatten() for param in policy.trainable_parameters()])
    return gradient, torch.cat([score.logprobs_L for score in scores]), metrics


def test_environment_loss_equals_formula_by_hand():
    """A prompt of two tokens, a turn, a reply with content in its middle, and a turn; the advantage is 0."""
    sample = make_sample([5, 6, 7, 8, 9, 10, 11], in_loss=True)
    completion = replace(sample.completion, turns=((0, 2), (6, 7)), content_spans=((3, 5),))
    group = Group(Problem("p", (), None), np.array([1, 2], np.int32), (replace(sample, completion=completion),))
    (row,) = pack([group], 64)[0]
    assert (row.env_labels_E.tolist(), row.env_sources_E.tolist()) == ([8, 9], [4, 5])
    assert row.labels_L.tolist() == [5, 6, 11] and row.env_weights_E.tolist() == [0.5, 0.5]
    model = tiny_model(dtype=torch.float64)
    with keep_float64():
        logits = model(torch.tensor([[1, 2, 5, 6, 7, 8, 9, 10]]))[0] / 0.9
        cross_entropy = torch.nn.functional.cross_entropy(logits[[4, 5]], torch.tensor([8, 9]))
        (COEF * cross_entropy).backward()
    gradient, _, metrics = train([row], PolicyLoss(environment_coef=COEF))
    assert metrics["loss/environment_nll"] == pytest.approx(cross_entropy.item(), abs=1e-12)
    assert metrics["loss/total"] == pytest.approx(COEF * cross_entropy.item(), abs=1e-12)
    expected = torch.cat([param.grad.flatten() for param in model.parameters()])
    assert (gradient - expected).abs().max() < 1e-12


def test_coefficient_zero_leaves_every_bit():
    groups = conversations()
    bare = [
        replace(g, samples=tuple(replace(s, completion=replace(s.completion, content_spans=())) for s in g.samples))
        for g in groups
    ]
    (first, scores, metrics), (second, same_scores, same_metrics) = (
        train(pack(each, 50)[0], PolicyLoss(importance="tis"), torch.float32) for each in (groups, bare)
    )
    assert torch.equal(first, second) and torch.equal(scores, same_scores) and metrics == same_metrics
    assert "loss/environment_nll" not in metrics
    # Without content the metric is missing, not 0.
    without_content = train(pack(bare, 50)[0], PolicyLoss(importance="tis", environment_coef=COEF), torch.float32)
    assert torch.equal(without_content[0], first) and "loss/environment_nll" not in without_content[2]


def test_environment_labels_change_only_their_term():
    """Log-probs for the gate, and metrics over labels, do not see them; the gradient gets the term and nothing else."""
    rows = pack(conversations(), 50, "sequence")[0]
    plain, scores, metrics = train(rows, PolicyLoss(importance="tis"))
    both, other_scores, other_metrics = train(rows, PolicyLoss(importance="tis", environment_coef=COEF))
    twice, _, _ = train(rows, PolicyLoss(importance="tis", environment_coef=2 * COEF))
    assert (scores - other_scores).abs().max() < 1e-12
    term = COEF * other_metrics.pop("loss/environment_nll")
    assert other_metrics.pop("loss/total") == pytest.approx(metrics.pop("loss/total") + term, abs=1e-12)
    assert other_metrics == pytest.approx(metrics, abs=1e-12)
    assert (both - plain).abs().max() > 1e-4 and (twice - plain - 2 * (both - plain)).abs().max() < 1e-12


@pytest.mark.parametrize("row_tokens, ranks", [(50, 1), (50, 3), (100, 2), (400, 1)])
def test_environment_loss_is_equal_for_any_ranks(row_tokens, ranks):
    """The denominator spans the update: the ranks' gradients, each of its own share, add up to the gradient of one row."""
    groups, loss = conversations(), PolicyLoss(reward_coef=0.0, environment_coef=COEF)
    (row,) = pack(groups, 1000)[0]
    expected, _, metrics = train([row], loss)
    rows = pack(groups, row_tokens, cost_model=RowCostModel(ranks))[0]
    shares = [train(rows[rank::ranks], loss) for rank in range(ranks)]
    assert (sum(gradient for gradient, _, _ in shares) - expected).abs().max() < 1e-12
    total = sum(share.get("loss/environment_nll", 0.0) for _, _, share in shares)
    assert total == pytest.approx(metrics["loss/environment_nll"], abs=1e-12)
    assert sum(each.env_weights_E.double().sum() for each in rows) == pytest.approx(1.0, abs=1e-6)


def test_environment_loss_needs_zero_variance_groups():
    needs = loss_requirements(PolicyLoss(environment_coef=COEF))
    assert needs.train_zero_advantage and needs.environment_coef == COEF
    assert str(PolicyLoss(environment_coef=COEF)).endswith(", environment 0.05")


def test_environment_loss_without_environment_is_refused():
    loss, single_turn = PolicyLoss(environment_coef=COEF), SimpleNamespace(grade=None)
    with pytest.raises(ValueError, match="loss.environment_coef=0.05, but the task SimpleNamespace has no environment"):
        check_environment_loss(loss, single_turn, None)
    check_environment_loss(PolicyLoss(), single_turn, None)
    game = GuessNumber()
    tokenizer = SimpleNamespace(
        eos_id=0, template=SimpleNamespace(name="x"), turn_boundary_ids=lambda *_: [1], content_spans=lambda *_: []
    )
    with pytest.raises(ValueError, match="chat template 'x' does not write the content of a reply as it is"):
        check_environment_loss(loss, game, tokenizer)
