"""Packed rows equal a plain computation: one sample at a time, stock torchtune forward, full logits."""

from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtune import training
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer

from helpers.learners import single_process_learner
from helpers.unpacked_reference import (
    PAD,
    as_conversations,
    assert_equal_to_plain,
    make_groups,
    reference,
    tiny_model,
    trained_samples,
    with_content,
)
from torchtune_ext.kernels.packed_attention import (
    TILE_SIZE,
    block_mask,
    dense_mask,
    packed_attention,
    packed_mask,
    pad_ends,
    segment_mask,
)
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import logprobs
from torchtune_ext.policy.logprobs import PackedPolicy

shapes_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=4
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=25)
# Samples that cancel each other.
@example(shapes=[(5, [5, 1])], seed=5, slack=0, aggregation="sequence", pad=False, kl=True, ranks=2)
# The gradient of k's bias in the last layer, zero except for RoPE, is 10,000 times smaller than the embeddings' gradient: in
# float32 it is off by 5e-5 of itself, which is 5e-9 of these.
@example(shapes=[(1, [10, 2])], seed=1, slack=0, aggregation="token", pad=True, kl=True, ranks=1)
@given(shapes=shapes_strategy, seed=st.integers(0, 2**31), slack=st.integers(0, 30), aggregation=st.sampled_from(["token", "sequence"]),
       pad=st.booleans(), kl=st.booleans(), ranks=st.integers(1, 3))  # fmt: skip
def test_logprobs_and_gradients(dtype, shapes, seed, slack, aggregation, pad, kl, ranks):
    groups = make_groups(np.random.default_rng(seed), shapes, untrained=0.2)
    if not trained_samples(groups):
        return
    row_tokens = max(p + max(c) - 1 for p, c in shapes) + slack  # small slack: groups are split over rows
    loss = PolicyLoss(importance="tis", kl_coef=0.1 if kl else 0.0, entropy_coef=0.01)
    model, ref_model = tiny_model(dtype=dtype), None
    if kl:
        ref_model, noise = tiny_model(dtype=dtype), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in ref_model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=noise))
    want = reference(model, groups, loss, aggregation, 0.9, ref_model)
    rows, stats = pack(groups, row_tokens, aggregation, pad_id=PAD, cost_model=RowCostModel(ranks, 8 if pad else None))
    assert stats.labels == sum(len(s.completion.tokens) for _, s in trained_samples(groups))
    # The weights sum to one, except for float32 rounding.
    assert abs(sum(row.loss_weights_L.double().sum().item() for row in rows) - 1.0) < 2**-24 + 1e-12
    assert_equal_to_plain(PackedPolicy(model), rows, groups, loss, want, 0.9, ref_model)


@pytest.mark.parametrize("variant", ["untied", "llama", "checkpointing", "dense"])
def test_variants(variant, monkeypatch):
    groups = make_groups(np.random.default_rng(3), [(7, [5, 1, 9, 3]), (4, [12, 11]), (1, [1, 1])])
    loss = PolicyLoss(importance="tis")
    model = tiny_model(variant != "untied", llama3_2 if variant == "llama" else qwen2, torch.float64)
    want = reference(model, groups, loss, "token", 1.0)
    rows, _ = pack(groups, 64)
    policy = PackedPolicy(model)
    if variant == "checkpointing":
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if variant == "dense":  # the reference mask itself, through the stock SDPA call
        monkeypatch.setattr(logprobs, "packed_mask", lambda ends_T, *_: dense_mask(ends_T)[None])
    assert_equal_to_plain(policy, rows, groups, loss, want, 1.0)


@pytest.mark.parametrize(
    "row_tokens, aggregation, mask",
    [(200, "token", "segments"), (200, "sequence", "dense"), (40, "sequence", "segments"), (40, "token", "dense")],
)
def test_conversations(row_tokens, aggregation, mask, monkeypatch):
    """Environment tokens are labels of a separate term only. "dense" is the plain mask in the stock SDPA call."""
    rng = np.random.default_rng(5)
    shapes = [(7, [26, 1, 19, 8]), (4, [12, 23, 1]), (1, [9, 30])]
    groups = with_content(rng, as_conversations(rng, make_groups(rng, shapes)))
    assert len({bool(sample.turn_advantages) for _, sample in trained_samples(groups)}) == 2
    samples = [sample.completion for _, sample in trained_samples(groups)]
    turns = [stop - start for sample in samples for start, stop in sample.turns]
    assert 1 in turns and max(len(sample.turns) for sample in samples) > 3
    loss = PolicyLoss(importance="tis", entropy_coef=0.01, environment_coef=0.05)
    model = tiny_model(dtype=torch.float64)
    want = reference(model, groups, loss, aggregation, 0.9)
    rows, stats = pack(groups, row_tokens, aggregation)
    assert sum(row.env_labels_E.numel() for row in rows) == sum(len(sample.content_indices) for sample in samples) > 9
    assert (stats.rows == 1) == (row_tokens == 200) and stats.labels == sum(turns)
    if mask == "dense":
        monkeypatch.setattr(logprobs, "packed_mask", lambda ends_T, *_: dense_mask(ends_T)[None])
    assert_equal_to_plain(PackedPolicy(model), rows, groups, loss, want, 0.9)


def test_window_beyond_longest_path_shares_the_mask():
    ends_T, positions_T = torch.tensor([5, 3, 3, 5, 5]), torch.tensor([0, 1, 2, 1, 2])
    shared = packed_mask(ends_T, positions_T, (None, 2, 3), max_path_len=3)
    assert shared[3] is shared[None] is not shared[2]
    alone = packed_mask(ends_T, positions_T, (3,), max_path_len=3)
    qkv = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = packed_attention(*qkv, segment_mask(ends_T, 3), 0.0, True)
    assert (packed_attention(*qkv, alone, 0.0, True, window=3) - expected).abs().max() < 1e-12


@settings(max_examples=40)
@given(
    shapes=shapes_strategy,
    seed=st.integers(0, 2**31),
    pad=st.integers(1, 6),
    window=st.none() | st.integers(1, 25),
    scale=st.sampled_from([None, 0.7]),
    softcap=st.sampled_from([None, 1.5]),
)
def test_segment_attention_equals_dense_mask_in_float64(shapes, seed, pad, window, scale, softcap):
    groups = make_groups(np.random.default_rng(seed), shapes)
    row_tokens = sum(p + sum(c) - len(c) for p, c in shapes)
    rows, _ = pack(groups, row_tokens, cost_model=RowCostModel(tile=pad))
    (row,) = rows
    T = row.tokens_T.numel()
    draw = partial(torch.randn, 1, 2, T, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    q, k, v = (draw(requires_grad=True) for _ in range(3))
    upstream = draw()
    scores = q @ k.mT * (scale or 8**-0.5)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    allowed = dense_mask(row.ends_T, row.positions_T, window)
    dense = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    with mock.patch("torchtune_ext.kernels.packed_attention.WINDOW_QUERIES", 1 + seed % 7):
        fast = packed_attention(q, k, v, segment_mask(row.ends_T, window), 0.0, True, scale=scale, softcap=softcap)
    want, result = (torch.autograd.grad(out, (q, k, v), upstream) for out in (dense, fast))
    # Relative to v, which is averaged, and to the largest gradient: gradients of q and k are zero if a token sees only itself.
    assert (dense - fast).abs().max() < 1e-12 * v.abs().max()
    size = max(grad.abs().max() for grad in want)
    assert max((a - b).abs().max() for a, b in zip(want, result, strict=True)) < 1e-12 * size


def test_pack_too_long_sample_error_names_row_tokens():
    groups = make_groups(np.random.default_rng(0), [(5, [8])])
    with pytest.raises(ValueError, match=r"row_tokens=11: .*at least 12"):
        pack(groups, 11)
    assert pack(groups, 12)[1].rows == 1


def test_rho_is_the_saving_of_shared_prompts():
    groups = make_groups(np.random.default_rng(0), [(100, [51] * 16)])
    _, stats = pack(groups, 4096)
    assert stats.metrics()["pack/rho"] == pytest.approx(16 * 150 / (100 + 16 * 50))


def test_pack_empty_rows_leave_gradients_unchanged():
    groups = make_groups(np.random.default_rng(0), [(5, [8, 3])])
    rows, _ = pack(groups, 64, cost_model=RowCostModel(ranks=4))
    assert [r.num_labels for r in rows] == [8, 3, 0, 0]
    model = tiny_model()
    policy = PackedPolicy(model)
    learner = single_process_learner(policy, PolicyLoss())
    first = learner.forward_backward(rows[:2])[1]["loss/total"]
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert learner.forward_backward(rows)[1]["loss/total"] == first
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize("num_tokens", [1, 127, 128, 300, 1024, 2500])
def test_block_mask_equals_mask_from_dense(num_tokens, window):
    draw = torch.Generator().manual_seed(num_tokens)
    ends = torch.arange(num_tokens) + torch.randint(1, num_tokens + 1, (num_tokens,), generator=draw)
    positions = dense_mask(ends).sum(dim=1) - 1
    dense = dense_mask(ends, positions, window)
    whole = create_block_mask(lambda b, h, i, j: dense[i, j], None, None, num_tokens, num_tokens, device="cpu")
    ours = block_mask(ends, positions, window)
    for table in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, table), getattr(whole, table)), table
    assert ours.seq_lengths == whole.seq_lengths
    places = torch.arange(num_tokens)
    assert torch.equal(ours.mask_mod(None, None, places[:, None], places[None]), dense)


@pytest.mark.parametrize(
    "options", [{}, {"window": 150, "scale": 0.3, "softcap": 2.0}], ids=["plain", "window, scale and cap"]
)
@pytest.mark.parametrize("tiles, computed", [(1, 1), (3, 3), (5, 6), (9, 12), (13, 16)])
def test_packed_attention_padded_to_compiled_length_equals_reference(tiles, computed, options, monkeypatch):
    """FlexAttention without compilation; on a CPU compilation gives the same result, without a backward."""
    monkeypatch.setattr("torchtune_ext.kernels.packed_attention._flex_attention", flex_attention)
    T, draw = tiles * TILE_SIZE, torch.Generator().manual_seed(tiles)
    ends = torch.arange(T) + torch.randint(1, T + 1, (T,), generator=draw)
    ends = ends.clamp(max=T)
    positions, window = dense_mask(ends).sum(dim=1) - 1, options.get("window")
    mask = block_mask(pad_ends(ends), positions, window)
    assert mask.seq_lengths == (computed * TILE_SIZE, computed * TILE_SIZE)
    q, k, v = torch.randn(3, 1, 2, T, 16, dtype=torch.float64, generator=draw).unbind()
    dense = {window: dense_mask(ends, positions, window)[None]}
    reference = packed_attention(q, k, v, dense, 0.0, False, **options)
    assert (packed_attention(q, k, v, {window: mask}, 0.0, False, **options) - reference).abs().max() < 1e-12
