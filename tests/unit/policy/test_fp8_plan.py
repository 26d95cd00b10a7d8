"""The FP8 plan selects the layers that vLLM quantizes; its table; unsupported settings and models."""

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.fp8_models import (
    BF16,
    CPU,
    F32,
    build_policy_from,
    write_model_dir,
)
from torchtune_ext.kernels.fp8_quantize import (
    FP8_DTYPE,
)
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.fp8 import plan as fp8
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8Config
from torchtune_ext.policy.fp8.plan import fp8_hf_tensors, make_fp8_plan
from torchtune_ext.policy.hf_model import HFModel, named_hf_tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("fp8") / "model")


def hugging_face_linears(source):
    """Names and shapes of transformers' model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.path))
    return {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


@pytest.mark.parametrize(
    ("changes", "skip", "converted"),
    [
        ({}, (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ({"num_key_value_heads": 1}, (), {"o_proj", "gate_proj", "up_proj", "down_proj"}),  # k and v: 64, so q stays, too
        ({"intermediate_size": 320}, (), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 5}, (), {"down_proj"}),  # 320 features in
        ({}, ("up_proj", "o_proj"), {"q_proj", "k_proj", "v_proj", "down_proj"}),
        ({"model_type": "qwen3", "head_dim": 128}, (), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
    ids=["whole", "narrow keys", "narrow mlp", "odd width", "asked", "qwen3"],
)  # fmt: skip
def test_trainer_and_vllm_quantize_the_same_layers(tmp_path, changes, skip, converted):
    source = write_model_dir(tmp_path / "model", **changes)
    policy = build_policy(partial(from_config, str(source.path)), source, CPU, F32, fp8=Fp8Config(skip=skip))
    receipt = policy.fp8_plan
    assert {layer.name: layer.shape for layer in receipt.layers} == hugging_face_linears(source)
    assert {name.rpartition(".")[2] for name in receipt.fp8_layer_names} == converted
    assert len(receipt.fp8_layer_names) == 2 * len(converted)
    stored = {
        source.to_hf(f"{n}.weight", m.weight)[0]
        for n, m in policy.model.named_modules()
        if isinstance(m, Fp8BlockLinear)
    }
    assert stored == {f"{name}.weight" for name in receipt.fp8_layer_names}
    assert dict(policy.model.named_parameters()).keys() == dict(from_config(str(source.path)).named_parameters()).keys()

    vllm_fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    config = vllm_fp8.Fp8Config.from_config(receipt.quantization_config())
    mapping = Qwen2ForCausalLM.packed_modules_mapping
    assert sorted(mapping.values()) == sorted(map(list, fp8.FUSED_GROUPS))
    parts = {f"model.layers.{i}.{at}": mapping.get(at.rpartition(".")[2], [at.rpartition(".")[2]]) for i in range(2)
             for at in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}  # fmt: skip
    for name, shards in parts.items():
        skipped = vllm_fp8.is_layer_skipped(
            name, config.ignored_layers, mapping, match_mode=config.ignored_layers_match_mode
        )
        assert skipped == (f"{name.rpartition('.')[0]}.{shards[0]}" not in receipt.fp8_layer_names), name


def test_receipt(source):
    receipt = build_policy_from(source).fp8_plan
    vocabulary = source.config["vocab_size"]
    inside = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 384)
    assert receipt.fp8_fraction == pytest.approx(inside / (inside + 256 * vocabulary))
    assert {(gemm, shape) for gemm, shape, _ in receipt.choices} == {
        (gemm, shape)
        for gemm in ("fprop", "dgrad", "wgrad")
        for shape in ((256, 256), (128, 256), (384, 256), (256, 384))
    }
    assert all(
        c.backend == "reference" and "not scaled_mm, deep_gemm, torchao: it needs a CUDA device" in c.reason
        for _, _, c in receipt.choices
    )
    table = receipt.format_table()
    assert "14 of 15 linear layers" in table and "4 x k_proj" not in table and len(table.splitlines()) == 10
    assert "output head" in table
    assert "reference for fprop, dgrad, wgrad of 256x256, 128x256, 384x256, 256x384 (not scaled_mm" in table
    planned = make_fp8_plan(build_policy_from(source, None).model, source, Fp8Config(), BF16)
    assert planned.layers == receipt.layers and not planned.choices


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"use_dora": True}, "DoRA: engines get the merged weight"), ({"quantize_base": True}, "its weight is NF4")],
    ids=str,
)
def test_adapters_that_keep_their_layers_out(source, options, reason):
    make = partial(from_config, str(source.path), lora_attn_modules=["q_proj"], lora_rank=4, **options)
    receipt = build_policy(make, source, CPU, F32, fp8=Fp8Config()).fp8_plan
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in receipt.layers}
    assert reason in reasons["q_proj"] and "fuses it with q_proj" in reasons["k_proj"] == reasons["v_proj"]
    assert {name.rpartition(".")[2] for name in receipt.fp8_layer_names} == {
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "cublas"}, "precision.backend='cublas' is unknown"),
        ({"backward": "full"}, "set precision.save_activations=full"),
        ({"skip": "o_proj"}, r"precision.skip=.* must be a list, .*\[o_proj\]"),
        (
            {"skip": ("w1",)},
            "precision.skip names 'w1', which matches no layer; give a kind, down_proj, .* like 'model.layers.0.self_attn.q_proj'",
        ),
        ({"skip": ("down_prj",)}, "precision.skip names 'down_prj', which matches no layer; did you mean 'down_proj'?"),
        ({"skip": ("model.layers.7.mlp.up_proj",)}, "did you mean 'model.layers.1.mlp.up_proj'?"),
        (
            {"backend": "scaled_mm"},
            "precision.backend=scaled_mm cannot run fprop of model.layers.0.self_attn.q_proj: it needs a CUDA device",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(source, options, message):
    with pytest.raises(ValueError, match=message):
        build_policy_from(source, Fp8Config(**options))


def test_fp8_plan_without_fitting_layer_is_refused(tmp_path):
    source = write_model_dir(
        tmp_path / "narrow", hidden_size=64, num_attention_heads=2, num_key_value_heads=1, intermediate_size=320
    )
    with pytest.raises(ValueError, match=r"2 x q_proj .*64 (.|\n)*model_dir="):
        build_policy_from(source)


def test_a_quantized_checkpoint_is_refused(tmp_path, source):
    policy = build_policy_from(source)
    folder = tmp_path / "quantized"
    folder.mkdir()
    weights = dict(fp8_hf_tensors(named_hf_tensors(policy.model, source, F32), policy.fp8_plan, BF16))
    save_file(weights, folder / "model.safetensors")
    assert load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].dtype == FP8_DTYPE
    for quantization in (policy.fp8_plan.quantization_config(), None):
        (folder / "config.json").write_text(json.dumps(source.config | {"quantization_config": quantization}))
        for config in (Fp8Config(), None):
            with pytest.raises(ValueError, match="use the model in bfloat16"):
                build_policy_from(HFModel(folder), config)
