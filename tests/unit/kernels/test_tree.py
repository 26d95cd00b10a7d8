"""Packed trees against separate paths: one forward of stock torchtune per turn, in its sampled context."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torchtune import training
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer

from helpers import adapters, fp8_models
from helpers.unpacked_reference import (
    PAD,
    as_branched_conversations,
    assert_equal_to_plain,
    make_groups,
    packed_logprobs_by_sample,
    paths_of,
    reference,
    tiny_model,
    trained_samples,
    with_content,
)
from torchtune_ext.kernels import linear_logprob
from torchtune_ext.kernels.packed_attention import dense_mask, segment_mask
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import RowCostModel, context_hashes, pack
from torchtune_ext.policy import logprobs
from torchtune_ext.policy.logprobs import PackedPolicy

LOSS = PolicyLoss(importance="tis", entropy_coef=0.01, environment_coef=0.05)


def trees(seed, number=2, length=34):
    """Groups of conversations of up to eight turns, and the places of the largest group."""
    rng = np.random.default_rng(seed)
    shapes = [
        (int(rng.integers(1, 8)), rng.integers(1, length, int(rng.integers(1, 3))).tolist()) for _ in range(number)
    ]
    groups = with_content(rng, as_branched_conversations(rng, make_groups(rng, shapes)))
    return groups, max(p + max(c) for p, c in shapes)


def depth_of(row):
    """The number of runs on the deepest path from a root to a leaf."""
    return 1 + max(len(stack.ancestors) for stack in segment_mask(row.ends_T).stacks)


# Two trees per seed.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1100), marks=pytest.mark.rest)], ids=["few", "many"]
)
def test_a_packed_tree_equals_every_path_alone(seeds, monkeypatch):
    """Loss, log-probs and gradients in float64, to 1e-10 of the summed magnitudes; the dense mask agrees."""
    depths, kinds = set(), set()
    for seed in seeds:
        groups, longest = trees(seed)
        aggregation, row_tokens = ["token", "sequence"][seed % 2], longest + 7 + 40 * (seed % 3)
        cost_model = RowCostModel(1 + seed % 2, 8 if seed % 5 == 0 else None)
        model = tiny_model(dtype=torch.float64)
        want, policy = reference(model, groups, LOSS, aggregation, 0.9), PackedPolicy(model)
        rows, stats = pack(groups, row_tokens, aggregation, pad_id=PAD, cost_model=cost_model)
        assert stats.labels == sum(len(s.completion.sampled_indices) for _, s in trained_samples(groups))
        assert_equal_to_plain(policy, rows, groups, LOSS, want, 0.9)
        if seed % 4 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(logprobs, "packed_mask", lambda ends_T: dense_mask(ends_T)[None])
                model.zero_grad()
                assert_equal_to_plain(policy, rows, groups, LOSS, want, 0.9)
        depths |= {depth_of(row) for row in rows}
        for row in rows:
            sources = row.hidden_index_L.tolist()
            kinds |= {"content"} if row.env_labels_E.numel() else set()
            kinds |= {"content and turn after one token"} if {*row.env_sources_E.tolist()} & {*sources} else set()
            kinds |= {"several labels"} if len(set(sources)) < len(sources) else set()
        for group, sample in trained_samples(groups):
            path, begin, parents = len(group.prompt_tokens), 0, sample.completion.parents
            kinds |= {"siblings"} if len(set(parents)) < len(parents) else set()
            # Two conversations in turns: A1 B1 A2 B2.
            kinds |= {"interleaved"} if any(b > a >= 0 for a, b in pairwise(parents)) else set()
            for (start, stop), keeps in zip(sample.completion.turns, sample.completion.kept_prefix_lens, strict=True):
                kinds |= {"one token"} if stop - start == 1 else set()
                kinds |= {"nothing kept"} if not keeps else set()
                kinds |= {"inside the prompt"} if 0 < keeps < len(group.prompt_tokens) else set()
                kinds |= {"inside a turn"} if path - keeps in (1, 2) and begin and not parents else set()
                path, begin = keeps + stop - begin, stop
    branches = {"inside the prompt", "inside a turn", "nothing kept", "siblings", "interleaved"}
    assert kinds == {"several labels", "one token", "content", "content and turn after one token", *branches}
    assert {1, 2, 3, 4, 5, 6} <= depths


@pytest.mark.parametrize("way", ["chunks", "checkpointing", "lora", "lora and checkpointing"])
def test_tree_packing_equals_plain_with_model_options(way, monkeypatch):
    model, plain = tiny_model(dtype=torch.float64), None
    if way == "chunks":
        monkeypatch.setattr(linear_logprob, "CHUNK_ELEMENTS", 5 * 61)  # five labels per chunk
    if "lora" in way:
        model = adapters.build_adapted_model(tie_word_embeddings=False).double()
        plain = adapters.MergedReference(model, qwen2(**adapters.DIMS, tie_word_embeddings=False))
    groups, longest = trees(7, number=4)
    want = reference(plain or model, groups, LOSS, "token", 0.9)
    policy = PackedPolicy(model)
    if "checkpointing" in way:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    assert_equal_to_plain(policy, pack(groups, longest + 30)[0], groups, LOSS, want, 0.9)


def test_trees_in_fp8(tmp_path):
    """Packed trees score like paths, apart from input rounding, which moves a few values to neighboring codes.

    A sum of k float32 products has other last bits in another row: sqrt(k) 2^-24 of its size. Codes are 2^-4 of a value
    apart, so a share of 2 sqrt(k) 2^-20 of all inputs is rounded to the neighboring code, an error of sqrt(12) times the
    deviation of a usual rounding. Errors add up like independent ones.
    """
    source = fp8_models.write_model_dir(tmp_path)
    policy, in_full = (
        fp8_models.build_policy_from(source),
        PackedPolicy(fp8_models.build_policy_from(source, None).model),
    )
    groups, _ = trees(3, length=90)
    rows = pack(groups, 1000)[0]
    packed = packed_logprobs_by_sample(rows, fp8_models.gradients(policy, rows)[1], groups)
    gaps, rounding = [], []
    for group, sample in trained_samples(groups):
        alone, full = [], []
        for ids, places in paths_of(group, sample):
            prompt, turn = np.array(ids[: places[0]], np.int32), sample.completion
            turn = type(turn)(np.array(ids)[places], np.zeros(len(places)), np.zeros(len(places)), "stop")
            one = Group(group.problem, prompt, (type(sample)(turn, in_loss=True),))
            (row,) = pack([one], 1000)[0]
            with torch.no_grad():
                alone.append(policy(row).logprobs_L)
                full.append(in_full(row).logprobs_L)
        gaps.append((torch.cat(alone) - packed[id(sample)]).abs())
        rounding.append((torch.cat(alone) - torch.cat(full)).abs())
    assert torch.cat(gaps).median() < 1e-5
    moved = 2 * 384**0.5 * 2.0**-20  # sums of at most 384 products
    assert torch.cat(gaps).mean() < (12 * moved) ** 0.5 * torch.cat(rounding).mean()


def test_tree_labels_with_equal_context_share_hash():
    """Labels after equal paths have equal hashes, wherever they are; labels after other paths differ."""
    groups, longest = trees(11, number=3)
    hashes = {}
    for row_tokens in (longest, 500):
        labels = {}
        for row in pack(groups, row_tokens)[0]:
            for number in range(int(row.completion_index_L.max()) + 1):
                at = (row.completion_index_L == number).tolist()
                key = tuple(row.logprobs_L[torch.tensor(at)].tolist())
                labels[key] = [each for each, own in zip(context_hashes(row)[1].tolist(), at, strict=True) if own]
        hashes[row_tokens] = labels
    assert hashes[longest] == hashes[500]
    paths = {}
    for group, sample in trained_samples(groups):
        own = iter(hashes[500][tuple(sample.completion.logprobs[sample.completion.sampled_indices].tolist())])
        for ids, places in paths_of(group, sample):
            for place in places:
                paths.setdefault(tuple(ids[: place + 1]), set()).add(next(own))
    assert all(len(each) == 1 for each in paths.values())
    assert len(set().union(*paths.values())) == len(paths)
