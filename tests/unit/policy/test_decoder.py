"""All variants of `decoder`: packed rows equal single samples; and the KV cache works."""

from functools import partial

import numpy as np
import pytest
import torch
from torchtune import training
from torchtune.modules import TransformerSelfAttentionLayer

from helpers import adapters, unpacked_reference
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy.decoder import decoder, lora_decoder
from torchtune_ext.policy.logprobs import PackedPolicy

CPU = torch.device("cpu")
DIMS = {**adapters.DIMS, "head_dim": 16}  # 4 heads in a width of 32: twice as wide as the model
NORMS = ("sa_norm", "mlp_norm", "sa_scale", "mlp_scale")
KINDS = {
    "qwen3": {"qk_norm": "head"},
    "olmo2": {"qk_norm": "whole", "norms": NORMS[2:]},
    "smollm3": {"nope_layers": [1]},
    "gemma2": {"norms": NORMS, "gemma": True, "windows": [5, None], "softcap": 2.0, "scale": 0.5, "logit_softcap": 3.0},
    "gemma3": {"norms": NORMS, "gemma": True, "windows": [5, None], "window_rope_base": 1e4, "qk_norm": "head"},
    "phi3": {"rope": {"dim": 8, "factors": (1.0, 1.5, 2.0, 4.0), "magnitude": 1.1}, "windows": [3, 3]},
}


@torch.no_grad()
def randomize(model, std=0.2):
    """Randomizes all weights. With norm weights of one, a misplaced norm would hardly be visible."""
    generator = torch.Generator().manual_seed(0)
    for _, param in sorted(model.named_parameters()):
        noise = torch.randn(param.shape, generator=generator)
        param.copy_(1 + 0.5 * noise if param.dim() == 1 else std * noise)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_decoder_with_cache_gives_same_logits(kind):
    model = randomize(decoder(**DIMS, **KINDS[kind], tie_word_embeddings=True)).double().eval()
    ids = torch.randint(0, unpacked_reference.VOCAB, (2, 9))
    with torch.no_grad(), unpacked_reference.keep_float64():
        whole = model(ids)
        model.setup_caches(batch_size=2, dtype=torch.float64, decoder_max_seq_len=9)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        steps = [(0, 5), (5, 6), (6, 9)]  # the prompt, a token, three tokens
        parts = [
            model(ids[:, a:b], mask=mask[a:b].expand(2, -1, -1), input_pos=torch.arange(a, b)[None]) for a, b in steps
        ]
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-10 * whole.std()


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *(("qwen3", variant) for variant in ("tied", "untied", "checkpointing", "compiled")),
        ("olmo2", "untied"),
        ("smollm3", "tied"),
        *(("gemma2", variant) for variant in ("tied", "checkpointing", "compiled")),
        ("gemma3", "tied"),
        ("phi3", "untied"),
    ],
)
def test_packed_rows_equal_one_sample_at_a_time(kind, variant):
    groups = unpacked_reference.make_groups(np.random.default_rng(3), adapters.SHAPES)
    model = randomize(decoder(**DIMS, **KINDS[kind], tie_word_embeddings=variant != "untied")).double()
    loss = PolicyLoss(importance="tis", entropy_coef=0.01)
    want = unpacked_reference.reference(model, groups, loss, "token", 0.9)
    assert all(gradient.abs().max() > 0 for name, gradient in want.grads.items() if name.endswith("scale"))
    rows, _ = pack(groups, 64 if variant == "compiled" else 40)  # one row: one shape to compile
    policy = PackedPolicy(model)
    if variant == "compiled":
        torch._dynamo.reset()
        for layer in model.layers:
            layer.compile(backend="eager")
    if variant in ("checkpointing", "compiled"):
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    unpacked_reference.assert_equal_to_plain(policy, rows, groups, loss, want, 0.9)


@pytest.mark.parametrize(
    ("kind", "dora", "output"),
    [
        *(("qwen3", dora, output) for dora in (False, True) for output in (False, True)),
        ("olmo2", True, True),
        ("smollm3", False, False),
        ("gemma2", True, False),
        ("gemma3", False, False),
    ],
)
def test_packed_adapters_equal_merged_weights(kind, dora, output):
    build = partial(lora_decoder, **KINDS[kind])
    model = adapters.build_adapted_model(
        build, use_dora=dora, apply_lora_to_output=output, tie_word_embeddings=not output, head_dim=16
    ).double()
    for name, param in model.named_parameters():
        if name.endswith("scale"):
            torch.nn.init.normal_(param, 1.0, 0.5)
    stock = adapters.MergedReference(model, decoder(**DIMS, **KINDS[kind], tie_word_embeddings=not output))
    groups, loss = (
        unpacked_reference.make_groups(np.random.default_rng(3), adapters.SHAPES),
        PolicyLoss(importance="tis"),
    )
    want = unpacked_reference.reference(stock, groups, loss, "token", 0.9)
    assert len(want.grads) == (2 + dora) * (7 * 2 + output)
    unpacked_reference.assert_equal_to_plain(PackedPolicy(model), pack(groups, 40)[0], groups, loss, want, 0.9)
