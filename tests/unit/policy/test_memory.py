"""The estimated memory of the policy equals torch's count."""

import importlib
import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.mem_tracker import MemTracker

from helpers.fp8_models import CPU, write_model_dir
from helpers.public_configs import PUBLIC, write_config
from helpers.unpacked_reference import make_groups
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hub import hub_model_config
from torchtune_ext.policy.memory import GIB, ModelSizes, trainer_memory

SIZE = dict(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=1024)
LORA = dict(lora_attn_modules=["q_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=4)


def policy_of(folder, dtype, checkpointing=False, kind="qwen2", **adapters):
    source = write_model_dir(folder, model_type=kind, head_dim=64, max_position_embeddings=1024, **SIZE)
    make = partial(from_config, str(source.path), **adapters)
    policy = build_policy(make, source, CPU, dtype, activation_checkpointing=checkpointing)
    for layer in policy.model.layers:
        # On a GPU attention is one fused call, which saves its inputs, its output and a number per query.
        layer.attn._attention_call = lambda q, k, v, **_: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return policy, build_on_meta(make)


def one_row():
    return pack(make_groups(np.random.default_rng(0), [(40, [240] * 4)]), 1000)[0][0]


def learn(policy, row):
    policy(row).logprobs_L.sum().backward()


@pytest.mark.parametrize("adapters", [{}, LORA], ids=["all", "adapters"])
def test_weights_gradients_and_moments_are_those_of_torch(tmp_path, adapters):
    policy, meta = policy_of(tmp_path / "m", torch.float32, **adapters)
    optimizer, row = torch.optim.AdamW(policy.trainable_parameters()), one_row()
    learn(policy, row)
    optimizer.step()
    rows = trainer_memory(ModelSizes(meta, torch.float32), 1000, 1, False)
    trained = policy.trainable_parameters()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.numel() > 1]
    assert rows["weights, float32 master"] == sum(p.nbytes for p in trained)
    assert rows["gradients, float32"] == sum(p.grad.nbytes for p in trained)
    assert rows["optimizer state"] == sum(value.nbytes for value in moments)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert rows["frozen weights, as stored"] == sum(p.nbytes for p in frozen)
    assert rows["RoPE table, float32"] == sum(buffer.nbytes for buffer in policy.model.buffers())
    assert bool(frozen) == bool(adapters)


@pytest.mark.parametrize(
    ("dtype", "checkpointing", "kind"),
    [(torch.float32, False, "qwen2"), (torch.bfloat16, True, "qwen3"), (torch.bfloat16, False, "qwen2")],
)
def test_the_rows_bound_the_peak_that_torch_tracks(tmp_path, dtype, checkpointing, kind):
    """A forward and backward with existing gradients and moments.

    The sum of the entries is an upper bound, because they do not all peak at the same time. The
    difference is at most a quarter of the peak here: logits or unsharded gradients, and one layer of
    three.
    """
    policy, meta = policy_of(tmp_path / "m", dtype, checkpointing, kind)
    optimizer, row = torch.optim.AdamW(policy.trainable_parameters()), one_row()
    for param in policy.trainable_parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    tracker = MemTracker()
    tracker.track_external(policy.model, optimizer)
    with tracker:
        learn(policy, row)
    peak = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    estimate = sum(trainer_memory(ModelSizes(meta, dtype), row.tokens_T.numel(), 1, checkpointing).values())
    assert peak <= estimate <= 1.25 * peak


@pytest.mark.parametrize(
    "name, tokens, checkpointing, optimizer_bytes, planned",
    [
        ("Qwen2.5-0.5B", 14848, False, 8.0, 29.0),
        ("Qwen2.5-0.5B", 16128, False, 8.0, 30.7),
        ("Qwen2.5-3B", 14848, True, 8.0, 54.6),
        ("Qwen2.5-7B", 14848, True, 0.0, 71.7),
    ],
)
def test_memory_plan_equals_published_h100_figures(tmp_path, name, tokens, checkpointing, optimizer_bytes, planned):
    """The column "planned GiB" of benchmarks/results/one_h100.md, beside the measured peaks."""
    (tmp_path / "config.json").write_text(json.dumps(hub_model_config(name)))
    sizes = ModelSizes(build_on_meta(partial(from_config, str(tmp_path))), torch.bfloat16)
    rows = trainer_memory(sizes, tokens, 1, checkpointing, optimizer_bytes)
    assert f"{sum(rows.values()) / GIB:.1f}" == f"{planned}"


def test_memory_plan_divides_only_sharded_tensors_among_ranks(tmp_path):
    path = write_config(tmp_path, "Qwen2.5-7B-Instruct")
    sizes = ModelSizes(build_on_meta(partial(from_config, str(path))), torch.bfloat16)
    alone, four = (trainer_memory(sizes, 16384, ranks, True) for ranks in (1, 4))
    for name in ("weights, float32 master", "gradients, float32", "optimizer state"):
        assert alone[name] == pytest.approx(4 * four[name], abs=4)
    assert alone["optimizer state"] == 8 * 7_615_616_512  # two moments for each parameter of Qwen2.5 7B
    same = ("activations of a row of 16384 tokens", "logits of one chunk, with gradient")
    assert all(alone[name] == four[name] > 0 for name in same)
    large = trainer_memory(sizes, 16384, 1, True, gpu_bytes=85 * 10**9)
    assert large[same[1]] == 4 * alone[same[1]] == 8 << 29  # logits and probabilities
    # The output projection's gradient: summed up in float32, 4 bytes, and then rounded to bfloat16, 2.
    assert four["unsharded gradients, before the reduction"] >= 6 * 152064 * 3584


@pytest.mark.parametrize(
    "name, builder",
    [
        ("Qwen2.5-1.5B", "qwen2_5.qwen2_5_1_5b_base"),
        ("Qwen2.5-Coder-3B-Instruct", "qwen2_5.qwen2_5_3b"),
        ("Qwen2.5-Math-7B", "qwen2_5.qwen2_5_7b_base"),
        ("Qwen2.5-72B-Instruct", "qwen2_5.qwen2_5_72b_instruct"),
        ("Llama-3.1-70B-Instruct", "llama3_1.llama3_1_70b"),
        ("Llama-3.2-3B", "llama3_2.llama3_2_3b"),
    ],
)
def test_published_sizes_are_those_of_torchtune(tmp_path, name, builder):
    """Models whose config.json is not in `PUBLIC`, which test_families.py compares."""
    module, _, function = builder.partition(".")
    theirs = build_on_meta(getattr(importlib.import_module(f"torchtune.models.{module}"), function))
    (tmp_path / "config.json").write_text(json.dumps(hub_model_config(name)))
    ours = build_on_meta(partial(from_config, str(tmp_path)))
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (ours, theirs)]
    assert shapes[0] == shapes[1]


def test_published_sizes_are_those_of_config_json():
    for name, config in PUBLIC.items():
        if config["model_type"] == "gemma3_text":  # the sizes of Gemma are not known without its folder
            continue
        known = hub_model_config(name)
        same = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        for key in (*same, "vocab_size", "tie_word_embeddings", "model_type"):
            assert known[key] == config[key], (name, key)
    assert hub_model_config("Qwen2.5-7B-of-mine") is None and hub_model_config("Gemma-3-4b") is None
