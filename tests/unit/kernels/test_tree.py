"""Packed trees against separate paths: one forward of stock torchtune per turn, in its sampled context."""

from copy import deepcopy
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torchtune import training
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings, qwen2
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
from torchtune_ext.kernels import linear_logprob, packed_attention
from torchtune_ext.kernels.packed_attention import dense_mask, segment_mask
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import RowCostModel, context_hashes, pack
from torchtune_ext.pipeline.prefix_tree import Tree, path_pairs
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
    "seeds", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.rest)], ids=["few", "many"]
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
                patch.setattr(logprobs, "packed_mask", lambda ends_T, *_: dense_mask(ends_T)[None])
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


def unpacked_attention(q, k, v, window, scale, softcap, **_):
    """Attention of one path by its formula."""
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def windowed_model(*layers):
    """A model whose layers have these options (window, scale, softcap), and a RoPE base of their own."""
    model = tiny_model(dtype=torch.float64)
    for base, layer, options in zip((10_000, 100), model.layers, layers, strict=True):
        layer.attn.pos_embeddings = Qwen2RotaryPositionalEmbeddings(8, 64, base)
        layer.attn.window, layer.attn.scale, layer.attn.softcap = options
    plain = deepcopy(model)
    for layer, options in zip(plain.layers, layers, strict=True):
        names = dict(zip(("window", "scale", "softcap"), options, strict=True))
        layer.attn._attention_call = partial(unpacked_attention, **names)
    return model, plain


# Each window from 1 to 40 keys, and in `many` 2,000 trees.
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 1040), marks=pytest.mark.rest)], ids=["few", "many"]
)
def test_windowed_trees_equal_every_path_alone(seeds, monkeypatch):
    """As above, in models with two masks: a window, and no or another window, scale and soft cap in the other layer."""
    for seed in seeds:
        groups, longest = trees(seed)
        window, other = 1 + seed % 40, None if seed % 2 else 1 + seed * 7 % 40
        model, plain = windowed_model((window, None, None), (other, *[(None, None), (0.3, 2.0)][seed // 2 % 2]))
        want, policy = reference(plain, groups, LOSS, "token", 0.9), PackedPolicy(model)
        rows, _ = pack(
            groups, longest + 7 + 40 * (seed % 3), pad_id=PAD, cost_model=RowCostModel(1, 8, 0.1, policy.windows)
        )
        monkeypatch.setattr(packed_attention, "WINDOW_QUERIES", 128 if seed % 4 else 5)
        assert_equal_to_plain(policy, rows, groups, LOSS, want, 0.9)
        if seed % 4 == 0:
            with monkeypatch.context() as patch:
                patch.setattr(logprobs, "packed_mask", dense_masks)
                model.zero_grad()
                assert_equal_to_plain(policy, rows, groups, LOSS, want, 0.9)


def dense_masks(ends_T, positions_T, windows, _):
    return {window: dense_mask(ends_T, positions_T, window)[None] for window in windows}


def test_attention_pairs_count_allowed_pairs_with_windows():
    for seed in range(20):
        for group in trees(seed)[0]:
            (row,) = pack([group], 1000)[0]
            for window in (None, 1, 7, 40):
                size = Tree(group).group_size(1000, {window: 1.0})
                pairs = path_pairs(size.prompt, {window: 1.0}) + sum(size.attention_pairs)
                assert pairs == dense_mask(row.ends_T, row.positions_T, window).sum()
            mixed = Tree(group).group_size(1000, {None: 0.25, 7: 0.75}).attention_pairs
            kinds = (Tree(group).group_size(1000, {window: 1.0}).attention_pairs for window in (None, 7))
            assert mixed == tuple(0.25 * whole + 0.75 * windowed for whole, windowed in zip(*kinds, strict=True))


def test_segment_mask_computes_few_pairs_outside_window():
    """A prompt of 3,000 tokens and completions of 600 and 1 tokens, in calls of at most 128 queries."""
    (row,) = pack(make_groups(np.random.default_rng(0), [(3000, [601, 601, 2])]), 9000)[0]
    computed = {}
    for window in (1, 100, 1000, 3600, None):
        calls = [(stack, call) for stack in segment_mask(row.ends_T, window).stacks for call in stack.calls]
        computed[window] = sum(stack.num_segments * mask.numel() for stack, (_, mask) in calls if mask is not None)
        tokens = row.tokens_T.numel()
        # The keys of a call begin with a whole chunk.
        assert window in (3600, None) or computed[window] <= tokens * (window + 2 * 127)
    assert computed[3600] == computed[None]


@pytest.mark.parametrize(
    "way", ["chunks", "checkpointing", "lora", "lora and checkpointing", "windows and checkpointing"]
)
def test_tree_packing_equals_plain_with_model_options(way, monkeypatch):
    model, plain = tiny_model(dtype=torch.float64), None
    if "windows" in way:
        model, plain = windowed_model((9, None, None), (None, 0.3, 2.0))
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
