"""The setting `precision:` -> what trainer and engine are told, and what is published."""

import json

import pytest
import torch
from torchtune.models.qwen2 import qwen2

from torchtune_ext.kernels.fp8_quantize import quantise_weight
from torchtune_ext.policy.weights import HFModel
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.training.precision import PrecisionConfig, plan_precision

SHAPE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384)


@pytest.fixture
def source(tmp_path):
    config = SHAPE | {"model_type": "qwen2", "vocab_size": 100, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return HFModel(tmp_path)


def make_model():
    return qwen2(100, 2, 4, 2, 256, 384, 64, tie_word_embeddings=True)


def planned(source, dtype=torch.bfloat16, **settings):
    return plan_precision(PrecisionConfig(**settings), make_model, source, dtype)


def test_bf16_changes_nothing(source):
    found, config = planned(source), EngineConfig()
    assert found.trainer is None and found.sampler is None and found.engine_config(config) is config
    stream = iter([("a", torch.zeros(1))])
    assert found.published(stream, torch.bfloat16) is stream


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
def test_both_fp8_flows_give_the_engine_the_same(source, flow, tmp_path, capsys):
    found = planned(source, flow=flow)
    assert (found.trainer is not None) == (flow == "fp8_unified")
    told = found.engine_config(EngineConfig()).quantization
    assert told["weight_block_size"] == [128, 128] and told["modules_to_not_convert"] == ["lm_head"]
    weight = torch.randn(384, 256).bfloat16()
    names = sorted(found.sampler.converted)
    shapes = {layer.name: layer.shape for layer in found.sampler.layers}
    stream = [(f"{name}.weight", torch.randn(shapes[name]).bfloat16()) for name in names if "gate" not in name]
    stream += [(f"{name}.weight", weight) for name in names if "gate" in name]
    sent = dict(found.published(stream, torch.bfloat16))
    gate = next(name for name in names if "gate" in name)
    want = quantise_weight(weight)
    assert torch.equal(sent[f"{gate}.weight"].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(sent[f"{gate}.weight_scale_inv"], want.scales)
    found.write_receipt(str(tmp_path / "run"))
    text = (tmp_path / "run" / "fp8.txt").read_text()
    assert text == capsys.readouterr().out and "14 of 15 linear layers" in text
    assert ("trainer: the same" in text) == (flow == "fp8_unified")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": "fp8_unify"}, "precision.flow='fp8_unify' is unknown; did you mean 'fp8_unified'"),
        (
            {"flow": "fp8_unified", "recipe": "rowwise"},
            "precision.recipe='rowwise': the engine computes in blocks only",
        ),
        ({"flow": "fp8_rollout", "power_of_two": True}, "precision.power_of_two=true"),
        ({"flow": "fp8_unified", "dtype": torch.float32}, "precision.flow=fp8_unified with dtype=float32"),
    ],
)
def test_bad_settings_are_named(source, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(source, **settings)
