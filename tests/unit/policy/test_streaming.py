"""Layer-by-layer log-probs equal the policy's log-probs, in every precision."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.fp8_models import BF16, CPU, F32, build_policy_from, make_rows, write_model_dir
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.fp8.linear import Fp8Config
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.streaming import streamed_logprobs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("streamed") / "model")


def builder(source):
    return partial(from_config, str(source.path))


def policy_said(policy, rows, temperature):
    with torch.no_grad():
        return torch.cat([policy(row, temperature).logprobs_L for row in rows])


@pytest.mark.parametrize(("dtype", "fp8"), [(F32, None), (BF16, None), (BF16, Fp8Config())], ids=["f32", "bf16", "fp8"])
def test_equal_to_the_policy(source, dtype, fp8):
    """The operations are the same in the same order, so the results are bit-identical."""
    rows, policy = make_rows(), build_policy_from(source, fp8, dtype)
    weights = lora.merged_tensors(policy.model)
    logprobs = torch.cat(
        streamed_logprobs(rows, weights, builder(source), dtype, CPU, temperature=0.8, fp8_plan=policy.fp8_plan)
    )
    assert torch.equal(logprobs, policy_said(policy, rows, 0.8)) and logprobs.std() > 0.01


def test_adapters_are_merged(source):
    rows = make_rows()
    make = partial(from_config, str(source.path), lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True)
    policy = build_policy(make, source, CPU, F32)
    for name, param in policy.model.named_parameters():
        if name.endswith("lora_b.weight"):
            torch.nn.init.normal_(param, std=0.05)
    logprobs = torch.cat(streamed_logprobs(rows, lora.merged_tensors(policy.model), make, F32, CPU))
    without = torch.cat(streamed_logprobs(rows, lora.base_tensors(policy.model), make, F32, CPU))
    want = policy_said(policy, rows, 1.0)
    assert (logprobs - want).abs().max() < 1e-4 < 1e-2 < (without - want).abs().mean()


def test_streamed_teacher_supports_separate_output_layer(tmp_path):
    write_model_dir(tmp_path / "model")
    config, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": False}))
    tensors = load_file(weights)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}, weights)
    source = HFModel(tmp_path / "model")
    rows, policy = make_rows(), build_policy_from(source, None)
    logprobs = torch.cat(streamed_logprobs(rows, lora.merged_tensors(policy.model), builder(source), F32, CPU))
    assert torch.equal(logprobs, policy_said(policy, rows, 1.0))


def test_no_rows(source):
    """A rank without rows still takes part in gathering the weights."""
    taken = []
    weights = ((taken.append(name), (name, weight))[1] for name, weight in source.tensors())
    assert streamed_logprobs([], weights, builder(source), F32, CPU) == [] and len(taken) == len(list(source.tensors()))
