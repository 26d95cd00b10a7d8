"""Packed rows against the plain computation: one sample at a time, stock torchtune forward, whole logits, no mask tricks."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from learners import alone
from torch.nn.attention.flex_attention import create_block_mask
from torchtune import training
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerSelfAttentionLayer
from unpacked import PAD, make_groups, packed_logprobs_by_sample, reference, relative_error, tiny_model, trained_samples

from torchtune_ext.kernels.packed_attention import block_mask, dense_mask, packed_attention, segment_mask
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.packing import Layout, pack
from torchtune_ext.policy.logprobs import PackedPolicy

shapes_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=6)), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Samples that cancel each other.
@example(shapes=[(5, [5, 1])], seed=5, slack=0, aggregation="sequence", pad=False, kl=True, ranks=2)
@given(shapes=shapes_strategy, seed=st.integers(0, 2**31), slack=st.integers(0, 30), aggregation=st.sampled_from(["token", "sequence"]),
       pad=st.booleans(), kl=st.booleans(), ranks=st.integers(1, 3))  # fmt: skip
def test_logprobs_and_gradients(shapes, seed, slack, aggregation, pad, kl, ranks):
    rng = np.random.default_rng(seed)
    groups = make_groups(rng, shapes, untrained=0.2)
    if not trained_samples(groups):
        return
    row_tokens = max(p + max(c) - 1 for p, c in shapes) + slack  # small slack: groups are split over rows
    loss = PolicyLoss(importance="tis", kl_coef=0.1 if kl else 0.0, entropy_coef=0.01)
    model, ref_model = tiny_model(), None
    if kl:
        ref_model = tiny_model()
        with torch.no_grad():
            for p in ref_model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    want_loss, want_grads, want_logprobs, sizes = reference(model, groups, loss, aggregation, 0.9, ref_model)

    rows, stats = pack(groups, row_tokens, aggregation, pad_id=PAD, layout=Layout(ranks, 8 if pad else None))
    assert stats.labels == sum(len(s.completion.tokens) for _, s in trained_samples(groups))
    assert sum(row.weights_L.sum().item() for row in rows) == pytest.approx(1.0, abs=1e-5)
    policy = PackedPolicy(model)
    ref_logprobs = None
    if kl:
        with torch.no_grad():
            ref_logprobs = [PackedPolicy(ref_model)(row, 0.9) for row in rows]
    gradient = alone(policy, loss, temperature=0.9).forward_backward(rows, reference=ref_logprobs)

    got_logprobs = packed_logprobs_by_sample(rows, gradient.logprobs, groups)
    assert got_logprobs.keys() == want_logprobs.keys()
    for key, want in want_logprobs.items():
        assert (got_logprobs[key].double() - want).abs().max() < 1e-5
    assert gradient.loss == pytest.approx(want_loss, rel=1e-5, abs=1e-5)
    got_grads = {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(got_grads, want_grads, sizes) < 1e-5


@pytest.mark.parametrize("variant", ["untied", "llama", "checkpointing", "dense"])
def test_variants(variant):
    rng = np.random.default_rng(3)
    groups = make_groups(rng, [(7, [5, 1, 9, 3]), (4, [12, 11]), (1, [1, 1])])
    loss = PolicyLoss(importance="tis")
    model = tiny_model(tied=variant != "untied", builder=llama3_2 if variant == "llama" else qwen2)
    want_loss, want_grads, _, sizes = reference(model, groups, loss, "token", 1.0)
    rows, _ = pack(groups, 64)
    policy = PackedPolicy(model)
    if variant == "checkpointing":
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if variant == "dense":  # the reference mask itself, through the stock SDPA call
        import torchtune_ext.policy.logprobs as module

        original = module.packed_mask
        module.packed_mask = lambda row: dense_mask(row.group_ids_T, row.parent_ids_T)[None]
    try:
        got_loss = alone(policy, loss).forward_backward(rows).loss
    finally:
        if variant == "dense":
            module.packed_mask = original
    got = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    assert got_loss == pytest.approx(want_loss, rel=1e-5)
    assert relative_error(got, want_grads, sizes) < 1e-5


@settings(max_examples=40, deadline=None)
@given(shapes=shapes_strategy, seed=st.integers(0, 2**31), pad=st.integers(1, 6))
def test_segment_attention_equals_dense_mask_in_float64(shapes, seed, pad):
    groups = make_groups(np.random.default_rng(seed), shapes)
    row_tokens = sum(p + sum(c) - len(c) for p, c in shapes)
    rows, _ = pack(groups, row_tokens, layout=Layout(tile=pad))
    (row,) = rows
    T = row.tokens_T.numel()
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 2, T, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    upstream = torch.randn(1, 2, T, 8, dtype=torch.float64)
    upstream[:, :, row.group_ids_T < 0] = 0.0  # nobody reads padding
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_mask(row.group_ids_T, row.parent_ids_T)[None, None]
    )
    fast = packed_attention(q, k, v, segment_mask(row.segments, T), 0.0, True)
    real = row.group_ids_T >= 0
    assert (dense[:, :, real] - fast[:, :, real]).abs().max() < 1e-12
    for a, b in zip(
        torch.autograd.grad(dense, (q, k, v), upstream), torch.autograd.grad(fast, (q, k, v), upstream), strict=True
    ):
        assert (a - b).abs().max() < 1e-11


def test_too_long_a_sample_is_an_error_that_names_the_knob():
    groups = make_groups(np.random.default_rng(0), [(5, [8])])
    with pytest.raises(ValueError, match=r"row_tokens=11 .*at least 12"):
        pack(groups, 11)
    assert pack(groups, 12)[1].rows == 1


def test_rho_is_the_saving_of_shared_prompts():
    groups = make_groups(np.random.default_rng(0), [(100, [51] * 16)])
    _, stats = pack(groups, 4096)
    assert stats.metrics()["pack/rho"] == pytest.approx(16 * 150 / (100 + 16 * 50))


def test_empty_rows_keep_ranks_in_step_and_change_nothing():
    groups = make_groups(np.random.default_rng(0), [(5, [8, 3])])
    rows, _ = pack(groups, 64, layout=Layout(ranks=4))
    assert [r.num_labels for r in rows] == [8, 3, 0, 0]
    model = tiny_model()
    policy = PackedPolicy(model)
    learner = alone(policy, PolicyLoss())
    first = learner.forward_backward(rows[:2]).loss
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert learner.forward_backward(rows).loss == first
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 300, 1024, 2500])
def test_block_mask_is_the_one_that_torch_makes_of_a_whole_mask(num_tokens):
    groups = torch.randint(0, 6, (num_tokens,)).sort().values
    parents = torch.where(torch.rand(num_tokens) < 0.5, groups - 1, groups)
    dense = dense_mask(groups, parents)
    whole = create_block_mask(lambda b, h, i, j: dense[i, j], None, None, num_tokens, num_tokens, device="cpu")
    ours = block_mask(groups, parents)
    for table in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, table), getattr(whole, table)), table
    assert ours.seq_lengths == whole.seq_lengths
    places = torch.arange(num_tokens)
    assert torch.equal(ours.mask_mod(None, None, places[:, None], places[None]), dense)
