"""The setting `precision:` -> what trainer and engine are told, and what is published."""

import json
import re
from functools import partial

import pytest
import torch
from torchtune.models.qwen2 import qwen2

from torchtune_ext.kernels.fp8_quantize import quantise_weight
from torchtune_ext.policy import scratch
from torchtune_ext.policy.memory import estimate
from torchtune_ext.policy.shard import build_policy
from torchtune_ext.policy.weights import HFModel
from torchtune_ext.sampling.records import EngineConfig
from torchtune_ext.training.precision import Precision, PrecisionConfig

SHAPE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384)


@pytest.fixture
def source(tmp_path):
    config = SHAPE | {"model_type": "qwen2", "vocab_size": 100, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return HFModel(tmp_path)


def make_model():
    return qwen2(100, 2, 4, 2, 256, 384, 64, tie_word_embeddings=True)


def planned(source, dtype="bfloat16", engine=None, **settings):
    return Precision(PrecisionConfig(**settings), make_model, source, dtype, engine or EngineConfig())


def test_bf16_changes_nothing(source):
    engine = EngineConfig(dtype="float32")
    found = planned(source, engine=engine)
    assert found.trainer is None and found.sampler is None and found.engine is engine
    stream = iter([("a", torch.zeros(1))])
    assert found.published({torch.float32: stream}.get) is stream
    assert planned(source, engine=EngineConfig(dtype="auto")).engine_dtype == torch.bfloat16


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
def test_both_fp8_flows_give_the_engine_the_same(source, flow):
    found = planned(source, flow=flow)
    assert (found.trainer is not None) == (flow == "fp8_unified")
    told = found.engine.quantization
    assert told["weight_block_size"] == [128, 128] and told["modules_to_not_convert"] == ["lm_head"]
    weight = torch.randn(384, 256).bfloat16()
    names = sorted(found.sampler.converted)
    shapes = {layer.name: layer.shape for layer in found.sampler.layers}
    stream = [(f"{name}.weight", torch.randn(shapes[name]).bfloat16()) for name in names if "gate" not in name]
    stream += [(f"{name}.weight", weight) for name in names if "gate" in name]
    sent = dict(found.published({torch.bfloat16: stream}.get))
    gate = next(name for name in names if "gate" in name)
    want = quantise_weight(weight)
    assert torch.equal(sent[f"{gate}.weight"].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(sent[f"{gate}.weight_scale_inv"], want.scales)


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
def test_receipt_of_a_run(flow, tmp_path, capsys):
    text = ["The quick brown fox jumps over the lazy dog. x\n"] * 8
    shape = scratch.Shape(**SHAPE, max_position_embeddings=256, vocab_size=300)
    scratch.write_model(tmp_path / "model", scratch.make_tokenizer(text, ["x"], [], 300), shape, seed=3)
    make, model = partial(scratch.qwen2_from_config, str(tmp_path / "model")), HFModel(tmp_path / "model")
    found = Precision(PrecisionConfig(flow=flow), make, model, "bfloat16", EngineConfig())
    policy = build_policy(make, model, torch.device("cpu"), found.dtype, fp8=found.trainer)
    before = torch.random.get_rng_state()
    found.write_receipt(str(tmp_path / "run"), policy, 4096, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    found.write_mismatch(0.0123, 64, "after publishing version 0")
    found.write_mismatch(9.9, 64, "after publishing version 1")  # the first is enough
    lines = (tmp_path / "run" / "fp8.txt").read_text()
    assert lines == capsys.readouterr().out and "14 of 15 linear layers" in lines and "9.9" not in lines
    assert "mismatch after publishing version 0: mean |trainer - sampler log-prob| 0.0123 on 64 tokens" in lines
    held = sum(p.numel() for p in policy.model.parameters())
    in_fp8 = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 384)
    bytes_ = 2 * (held - in_fp8) + in_fp8 + 4 * in_fp8 / 128**2
    assert f"weights of {bytes_ / 2**20:.2f} MiB in place of {held / 2**19:.2f}" in lines
    if flow == "fp8_rollout":
        assert "trainer: none of them, bfloat16" in lines and "reference for" not in lines
    else:
        assert "reference for fprop, dgrad, wgrad of 256x256, 128x256" in lines
        assert f"at most {1 / (1 - policy.fp8.share / 2):.2f}x bfloat16" in lines
        measured = float(re.search(r"measured ([0-9.]+)x with 128 tokens on this CPU", lines)[1])
        assert 0 < measured < 10


def test_a_dry_run_counts_what_fp8_takes(source):
    """Without a model directory, by the same rule as with one."""

    def need(trainer=None, engine=None, make=make_model):
        return estimate(make, 1000, torch.bfloat16, 1, False, trainer, engine)

    config, plain = PrecisionConfig(flow="fp8_unified", skip=("o_proj",)), need()
    fp8 = need(*config.sides)
    converted = [
        layer.shape
        for layer in planned(source, flow="fp8_unified", skip=("o_proj",)).sampler.layers
        if not layer.reason
    ]
    assert len(converted) == 12
    numbers = sum(out * width for out, width in converted)
    total = sum(p.numel() for p in make_model().parameters())
    (weights,) = fp8.engine.values()
    assert weights == pytest.approx(2 * (total - numbers) + numbers * (1 + 4 / 128**2), abs=1)
    assert fp8.host["published weights in shared memory"] == weights
    (kept,), (kept_plain,) = ([v for k, v in n.device.items() if "activations" in k] for n in (fp8, plain))
    # q, k and v read one tensor of 256 features, gate and up another, down_proj one of 384: 33/32 bytes in place of 2
    assert kept_plain - kept == pytest.approx(2 * 1000 * (256 + 256 + 384) * (2 - 33 / 32), abs=1)
    assert need(None, config).device == plain.device


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flow": "fp8_unify"}, "precision.flow='fp8_unify' is unknown; did you mean 'fp8_unified'"),
        (
            {"flow": "fp8_unified", "recipe": "rowwise"},
            "precision.recipe='rowwise': the engine computes in blocks only",
        ),
        ({"flow": "fp8_rollout", "power_of_two": True}, "precision.power_of_two=true"),
        ({"skip": ("down_proj",)}, r"precision.skip=\('down_proj',\) with precision.flow=bf16, which has no FP8"),
        ({"dtype": "float16"}, "dtype='float16': use 'bfloat16' or 'float32'"),
        (
            {"flow": "fp8_rollout", "engine": EngineConfig(dtype="float32")},
            "engine.dtype=float32 with quantised weights",
        ),
        ({"flow": "fp8_unified", "dtype": "float32"}, "precision.flow=fp8_unified with dtype=float32"),
    ],
)
def test_bad_settings_are_named(source, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(source, **settings)
