"""The engine receives the FP8 bytes that the trainer's forward used."""

import json
from collections import Counter

import pytest
import torch
from torchtune.models.llama3_1 import llama3_1

from helpers.fp8_bounds import quantization_error
from helpers.fp8_models import (
    BF16,
    CPU,
    F32,
    build_policy_from,
    gradients,
    make_rows,
    write_model_dir,
)
from torchtune_ext.kernels.fp8_quantize import (
    BLOCK_SIZE,
    TILE_BLOCK,
    Fp8Blocks,
    dequantize,
    quantize_weight,
)
from torchtune_ext.policy import from_config
from torchtune_ext.policy.fp8 import linear as fp8_linear
from torchtune_ext.policy.fp8.linear import Fp8Config
from torchtune_ext.policy.fp8.plan import convert_to_fp8, fp8_hf_tensors
from torchtune_ext.policy.hf_model import HFModel, load_weights, named_hf_tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("fp8") / "model")


def test_fp8_published_bytes_equal_forward_weights(source, monkeypatch):
    """In bfloat16, FSDP2 casts the float32 master weights."""
    policy = build_policy_from(source, Fp8Config(), BF16)
    with torch.no_grad():
        for param in policy.trainable_parameters():  # master weights that bfloat16 rounds
            param.mul_(1 + 2**-10 / 3)
    used = []

    def spy(weight):
        assert weight.dtype == BF16
        used.append(quantize_weight(weight))
        return used[-1]

    monkeypatch.setattr(fp8_linear, "quantize_weight", spy)
    gradients(policy, make_rows())
    order = ["q", "k", "v", "o", "gate", "up", "down"]
    names = [f"model.layers.{i}.{'self_attn' if n in 'qkvo' else 'mlp'}.{n}_proj" for i in range(2) for n in order]
    assert len(used) == 2 * len(names)
    # DGrad, from the last layer to the first, transposed
    used[len(names) :] = [q.T for q in used[len(names) :]]
    sent = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, BF16), policy.fp8_plan, F32))
    calls = Counter(
        (q.scales.numpy().tobytes(), q.values.contiguous().view(torch.uint8).numpy().tobytes()) for q in used
    )
    assert len(calls) == len(names) and set(calls.values()) == {2}
    for name, q in zip(names, used, strict=False):
        assert torch.equal(sent[f"{name}.weight"].view(torch.uint8), q.values.view(torch.uint8)), name
        assert torch.equal(sent[f"{name}.weight_scale_inv"], q.scales) and q.scales.dtype == F32
    plain = dict(named_hf_tensors(policy.model, source, BF16))
    scales = {f"{name}.weight_scale_inv" for name in names}
    assert sent.keys() == plain.keys() | scales
    for name in plain.keys() - {f"{name}.weight" for name in names}:
        assert sent[name].dtype == F32 and torch.equal(sent[name], plain[name].float())


def test_fp8_published_wrong_dtype_or_missing_weights_raise(source):
    policy = build_policy_from(source)
    with pytest.raises(ValueError, match="has dtype torch.bfloat16; expected torch.float32"):
        dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, BF16), policy.fp8_plan, BF16))
    some = ((n, t) for n, t in named_hf_tensors(policy.model, source, F32) if "layers.1" not in n)
    with pytest.raises(ValueError, match="7 layers in FP8 are missing from the tensors"):
        dict(fp8_hf_tensors(some, policy.fp8_plan, BF16))


def llama(folder, head_dim, heads=4, kv_heads=2):
    width = 384 if head_dim == 96 else heads * head_dim
    folder.mkdir()
    shape = {"model_type": "llama", "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "head_dim": head_dim, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 32}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    torch.manual_seed(0)
    model = llama3_1(32, 1, heads, kv_heads, width, 64, intermediate_dim=128)
    return model, HFModel(folder)


def test_fp8_llama_row_order_is_harmless_within_tile(tmp_path):
    """Hugging Face has the rows of a head in another order.

    A tile holds two complete heads of 64, so rounding and reordering commute. Heads of 96 cross tiles,
    so q, k and v are not in FP8.
    """
    model, names = llama(tmp_path / "whole", 64)
    receipt = convert_to_fp8(model, names, Fp8Config(), F32, CPU)
    assert {"q_proj", "k_proj"} <= {name.rpartition(".")[2] for name in receipt.fp8_layer_names}
    sent = dict(fp8_hf_tensors(named_hf_tensors(model, names, F32), receipt, F32))
    for part in ("q_proj", "k_proj"):
        used = quantize_weight(model.get_parameter(f"layers.0.attn.{part}.weight").detach())
        at = f"model.layers.0.self_attn.{part}.weight"
        _, reordered = names.to_hf(f"layers.0.attn.{part}.weight", used.values.float())
        assert not torch.equal(reordered, used.values.float())
        assert torch.equal(sent[at].float(), reordered) and torch.equal(sent[f"{at}_scale_inv"], used.scales)

    model, names = llama(tmp_path / "across", 96, kv_heads=4)
    weight = model.layers[0].attn.q_proj.weight.detach()
    weight *= torch.linspace(1, 4, 384)[:, None]  # rows that differ in size
    first, then = quantize_weight(weight), quantize_weight(names.to_hf("layers.0.attn.q_proj.weight", weight)[1])
    assert not torch.equal(names.to_hf("layers.0.attn.q_proj.weight", dequantize(first))[1], dequantize(then))
    receipt = convert_to_fp8(model, names, Fp8Config(), F32, CPU)
    assert {name.rpartition(".")[2] for name in receipt.fp8_layer_names} == {
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in receipt.layers}
    assert "across tiles of 128" in reasons["q_proj"] and "fuses it with q_proj" in reasons["v_proj"]


def test_fp8_published_weights_dequantize_to_trainer_weights(source):
    """weight * weight_scale_inv, tile by tile, is the weight to within half a step of E4M3."""
    policy = build_policy_from(source)
    sent = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, F32), policy.fp8_plan, BF16))
    model = from_config(str(source.path))
    load_weights(model, source)
    for name, weight in named_hf_tensors(model, source, F32):
        if f"{name}_scale_inv" in sent:
            scales = sent[f"{name}_scale_inv"]
            meant = sent[name].float() * scales.repeat_interleave(BLOCK_SIZE, 0).repeat_interleave(BLOCK_SIZE, 1)
            q = Fp8Blocks(sent[name], scales, TILE_BLOCK, tuple(weight.shape))
            assert ((meant.double() - weight.double()).abs() <= quantization_error(weight, q)).all()
