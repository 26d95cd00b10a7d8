"""Two FSDP2 ranks on gloo give the gradients of one process, with and without checkpointing, KL, empty rows and FP8; and four
ranks that are two copies of the weights, each of two parts, train, publish and resume as one process does."""

import json

import pytest
import torch

from helpers import recipe_runs as runs
from helpers.forked_runs import forked_ranks
from helpers.tiny_runs import write_tiny_model

GROUPS = """
from dataclasses import replace

import numpy as np

from torchtune_ext.pipeline.groups import Group, Sample
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem


def groups_of(shapes):
    rng, made = np.random.default_rng(0), []
    for g, (prompt, lengths) in enumerate(shapes):
        samples = tuple(
            Sample(
                Completion(rng.integers(0, 300, n).astype(np.int32), rng.normal(-4, 1, n).astype(np.float32), np.zeros(n, np.int32), "stop"),
                advantage=float(rng.normal()), in_loss=True,
            )
            for n in lengths
        )
        if g == 1:  # a conversation whose second turn forgets a part of its first, and whose third goes on from all
            turns = replace(
                samples[0].completion, turns=((0, 6), (9, 12), (14, 20)), kept_prefix_lens=(4, 7, 12),
                content_spans=((7, 9), (12, 14)),
            )
            samples = (replace(samples[0], completion=turns), samples[1])
        made.append(Group(Problem(f"p{g}", (), None), rng.integers(0, 300, prompt).astype(np.int32), samples))
    return made
"""

GRADIENTS = """
import json
from pathlib import Path

import torch
from rollouts import groups_of
from torch.distributed.tensor import DTensor

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.fp8.plan import Fp8Config, fp8_hf_tensors
from torchtune_ext.policy.lora import base_hf_tensors, merged_hf_tensors
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.training.distributed import close_ranks, init_ranks
from torchtune_ext.training.learner import Learner, make_reference

groups = groups_of([(9, [5, 1, 12]), (4, [20, 3]), (15, [2, 2, 2, 2]), (6, [9])])
loss = PolicyLoss(constraint="kl", delta=1e-4, top_k=8, importance="tis", kl_coef=0.2, entropy_coef=0.01, environment_coef=0.5)


def gradients(ranks, folder, checkpointing, row_tokens, lora, fp8):
    world_size, fp8 = ranks.world_size, Fp8Config() if fp8 else None
    torch.manual_seed(0)  # of the adapters, whatever the cases before have drawn
    source = HFModel(folder)
    policy = build_policy(lambda: from_config(folder, **lora), source, ranks.device, torch.float32, world_size, checkpointing, fp8=fp8)
    reference = make_reference(policy.model)
    learner = Learner(policy, loss, ranks)
    with torch.no_grad():
        for i, p in enumerate(policy.trainable_parameters()):  # move away from the reference, the same on one and on two ranks
            p.add_(1e-3) if lora else p.mul_(1.0 + 0.01 * (i % 7))
    before = {n: t.clone() for n, t in merged_hf_tensors(policy.model, source, torch.float32)}
    rows, _ = pack(groups, row_tokens, cost_model=RowCostModel(2))  # the same rows on one rank: FP8 scales tokens that share a row
    share = rows[ranks.rank :: world_size] if world_size > 1 else rows
    with reference.activate():
        ref = learner.logprobs(share, top_k=8)
    after = dict(merged_hf_tensors(policy.model, source, torch.float32))
    assert all(torch.equal(before[n], after[n]) for n in before), "the reference did not give the weights back"
    _, metrics = learner.forward_backward(share, proximal=ref, reference=ref)
    assert 0.0 < metrics["loss/clip_fraction"] < 1.0, "the constraint must cut some labels and leave others"
    grads = {clean_name(n): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad) for n, p in policy.model.named_parameters() if p.requires_grad}
    sent = {}
    if fp8:
        sent = dict(fp8_hf_tensors(base_hf_tensors(policy.model, source, torch.float32), policy.fp8_plan, torch.bfloat16))
    # Roundings of 2^-24 of all numbers that are added up one after the other, as in assert_equal_to_plain of tests/helpers/unpacked_reference.py
    rounding = 2.0**-24 * sum(sum(p.shape) for p in policy.model.parameters() if p.dim() == 2)
    return metrics.pop("loss/total"), metrics, grads, sent, rounding


# All on one rank, then all on two: what takes time is to import PyTorch, and not the few rows.
ranks = init_ranks("cpu")
for name, case in json.loads(Path("cases.json").read_text()).items():
    result = gradients(ranks, **case)
    if ranks.is_main:
        torch.save(result, f"{name}_{ranks.world_size}.pt")
close_ranks()
"""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WIDE = {"hidden_size": 256, "intermediate_size": 256}  # half of an NF4 tensor must hold whole groups of 256 x 64 values
QWEN3 = {"model_type": "qwen3", "head_dim": 64}
LORA = {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "apply_lora_to_mlp": True, "lora_rank": 4}
MODELS = {"plain": {}, "qwen3": QWEN3, "wide": WIDE}
CASES = {
    name: {"checkpointing": bool(checkpointing), "row_tokens": row_tokens, "lora": lora, "folder": model, "fp8": fp8}
    for name, (checkpointing, row_tokens, lora, model, fp8) in {
        "plain": (0, 40, {}, "plain", False),
        "checkpointing": (1, 40, {}, "plain", False),
        "one round": (0, 400, {}, "plain", False),
        "qwen3": (1, 40, {}, "qwen3", False),
        "lora": (1, 40, LORA, "plain", False),
        "dora": (0, 400, LORA | {"use_dora": True}, "plain", False),
        "qlora": (0, 40, LORA | {"quantize_base": True}, "wide", False),
        "fp8": (1, 40, {}, "wide", True),
    }.items()
}


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """A folder in which the script has run on one rank and on two."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, shape in MODELS.items():
        write_tiny_model(folder / name, **shape)
    for name, text in {"rollouts.py": GROUPS, "gradients.py": GRADIENTS, "cases.json": json.dumps(CASES)}.items():
        (folder / name).write_text(text)
    for ranks in (1, 2):
        forked_ranks(folder, "gradients.py", ranks=ranks)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(computed, case):
    one, two = (torch.load(computed / f"{case}_{ranks}.pt") for ranks in (1, 2))
    rounding = one[4]
    assert abs(one[0] - two[0]) < rounding
    for name in one[1]:
        assert abs(one[1][name] - two[1][name]) <= rounding * max(1, abs(one[1][name])), name
    scale = max(g.abs().max() for g in one[2].values())
    for name, gradient in one[2].items():
        # A gradient that is zero in truth holds the rounding of larger ones.
        error = (gradient - two[2][name]).abs().max() / max(gradient.abs().max(), 1e-3 * scale)
        assert error < rounding, (name, error, rounding)
    assert bool(one[3]) == CASES[case]["fp8"] and one[3].keys() == two[3].keys()
    assert all(torch.equal(one[3][n].float(), two[3][n].float()) for n in one[3])


MESH = """
import json
import sys
from pathlib import Path

import torch
from rollouts import groups_of
from torch.distributed.tensor import DTensor

from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel, clean_name
from torchtune_ext.policy.lora import adapter_hf_tensors, merged_hf_tensors
from torchtune_ext.policy.sharding import gather_full
from torchtune_ext.training.distributed import RanksConfig, close_ranks, init_ranks
from torchtune_ext.training.manifest import Identity
from torchtune_ext.training.learner import Learner
from torchtune_ext.training.checkpoints import Checkpoints

folder, lora = sys.argv[1], json.loads(sys.argv[2])
source, saved = HFModel(folder), Path("c")
groups = groups_of([(9, [5, 1, 12]), (4, [20, 3]), (15, [2, 2, 2, 2]), (6, [9]), (8, [11, 7])] * 3)
rows, _ = pack(groups, 40, cost_model=RowCostModel(4))
assert len(rows) > 4, "several rows for a rank: the copies sum their gradients with the last one"


class Run:
    # A policy that learns; the momentum of its optimizer is a state that a checkpoint must carry.
    def __init__(self, ranks, shard_within):
        self.ranks = ranks
        self.policy = build_policy(
            lambda: from_config(folder, **lora), source, ranks.device, torch.float32, ranks.world_size, not lora,
            shard_within=shard_within,
        )
        self.optimizer = torch.optim.SGD(self.policy.trainable_parameters(), lr=0.1, momentum=0.9)
        self.learner = Learner(
            self.policy, PolicyLoss(importance="tis", kl_coef=0.2), ranks, optimizer=self.optimizer,
            max_grad_norm=0.05,
        )
        self.checkpoints = Checkpoints(saved, Identity("run", "model", "base") if ranks.is_main else None)

    def update(self):
        share = self.ranks.local_slice(rows)
        reference = self.learner.logprobs(share) if not self.trained() else self.learner.reference_logprobs([share])[0]
        _, metrics = self.learner.forward_backward(share, reference=reference)
        return self.learner.step(metrics, advice=lambda: "none")

    def trained(self):
        return bool(self.optimizer.state)

    def weights(self):
        sent = dict(merged_hf_tensors(self.policy.model, source, torch.float32))
        if lora:
            sent |= dict(adapter_hf_tensors(self.policy.model, source, torch.float32))
        mine = {clean_name(n): gather_full(p).clone() for n, p in self.policy.model.named_parameters() if p.requires_grad}
        return {"sent": {n: t.clone() for n, t in sent.items()}, "mine": mine}

    def save(self):
        def export(place):
            for _ in merged_hf_tensors(self.policy.model, source, torch.float32):
                pass

        self.checkpoints.save(1, self.policy.model, self.optimizer, export, {})

    def load(self):
        self.checkpoints.load(self.checkpoints.verify_latest(), self.policy.model, self.optimizer)


def same(found, wanted):
    return all(torch.equal(found[kind][n], wanted[kind][n]) for kind in wanted for n in wanted[kind])


def four(ranks):
    run = Run(ranks, ranks.shard_within)
    cut = [p for p in run.policy.model.parameters() if isinstance(p, DTensor)]
    assert cut and {tuple(p.device_mesh.shape) for p in cut} == {(2, 2)}
    mesh = cut[0].device_mesh
    groups = [torch.distributed.group.WORLD, *(mesh.get_group(dim) for dim in ("replicate", "shard"))]
    limits = [group._get_backend(ranks.device).options._timeout for group in groups]
    assert limits[0].total_seconds() == 600 and limits == limits[:1] * 3, limits
    first = run.weights()
    said = [run.update()]
    after = [first, run.weights()]
    run.save()
    said.append(run.update())
    after.append(run.weights())
    # The copies are copies: what the ranks of the other one hold is the same, bit for bit.
    for p in cut:
        local = p._local_tensor if p.requires_grad else gather_full(p)
        there = [torch.empty_like(local) for _ in range(2)]
        torch.distributed.all_gather(there, local.detach(), group=p.device_mesh.get_group(0))
        assert torch.equal(*there)

    flat = Run(ranks, None)  # the same four ranks with one copy of the weights: another mesh
    assert {p.device_mesh.ndim for p in flat.policy.model.parameters() if isinstance(p, DTensor)} == {1}
    flat.load()
    assert same(flat.weights(), after[1])
    said.append(flat.update())
    after.append(flat.weights())
    back = Run(ranks, ranks.shard_within)
    back.load()
    assert same(back.weights(), after[1])
    said.append(back.update())
    after.append(back.weights())
    assert same(after[-1], after[2]), "a run that goes on makes the update that it would have made"
    if ranks.is_main:
        torch.save((said, after), "four.pt")


def close(found, wanted, first, rounding):
    # Sums of another order, of what the update moved, beside the rounding of the weights themselves.
    moved = max((wanted[n] - first[n]).abs().max().item() for n in wanted)
    assert moved > 1e-4, moved
    for n in wanted:
        bound = rounding * moved + 4 * 2.0**-24 * wanted[n].abs().max().item()
        worst = (found[n] - wanted[n]).abs().max().item()
        assert worst <= bound, (n, worst, bound)


def one(ranks):
    said, after = torch.load("four.pt")
    run = Run(ranks, None)
    first = run.weights()
    assert same(first, after[0])
    rounding = 2.0**-24 * sum(sum(p.shape) for p in run.policy.model.parameters() if p.dim() == 2)
    for wanted, weights in ((run.update(), run.weights()), (run.update(), run.weights())):
        found, mesh = said.pop(0), after.pop(1)
        for name in ("loss/total", "optim/grad_norm"):
            assert abs(found[name] - wanted[name]) <= rounding * abs(wanted[name]), (name, found[name], wanted[name])
        assert wanted["optim/grad_norm"] > 0.05, "the gradient was shortened, by its norm over all ranks"
        for kind in first:
            close(mesh[kind], weights[kind], first[kind], rounding)
    flat, _ = after[1:]
    for kind in first:
        close(flat[kind], weights[kind], first[kind], rounding)
    alone = Run(ranks, None)
    alone.load()  # a checkpoint of four ranks, on one
    alone.update()
    for kind in first:
        close(alone.weights()[kind], weights[kind], first[kind], rounding)
    print("four ranks are one")


ranks = init_ranks("cpu", RanksConfig(shard_within=2) if len(sys.argv) > 3 else None)
four(ranks) if ranks.world_size == 4 else one(ranks)
close_ranks()
"""


@pytest.mark.parametrize(
    ("lora", "shape"),
    [
        ({}, {}),
        pytest.param(LORA | {"quantize_base": True}, WIDE | {"num_key_value_heads": 2}, marks=pytest.mark.rest),
    ],
    ids=["all weights", "QLoRA"],
)
def test_fsdp_two_by_two_mesh_equals_one_rank(tmp_path, lora, shape):
    runs.make_workspace(tmp_path, **shape)
    (tmp_path / "rollouts.py").write_text(GROUPS)
    (tmp_path / "mesh.py").write_text(MESH)
    arguments = ["mesh.py", str(tmp_path / "model"), json.dumps(lora)]
    forked_ranks(tmp_path, *arguments, "2 x 2", ranks=4)
    assert "four ranks are one" in forked_ranks(tmp_path, *arguments, ranks=1)
