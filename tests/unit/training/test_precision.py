"""The section `precision:` -> settings of trainer and engine, and the published weights."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torchtune.models.qwen2 import lora_qwen2, qwen2

from torchtune_ext.kernels import fp8_gemm
from torchtune_ext.kernels.fp8_quantize import quantize_weight
from torchtune_ext.policy import from_config, scratch
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.fp8 import plan as fp8
from torchtune_ext.policy.fp8.plan import linear_layers
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.memory import ModelSizes, trainer_memory
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.training import precision as precision_module
from torchtune_ext.training.precision import (
    Precision,
    PrecisionConfig,
    chosen_dtype,
    computes_in_bfloat16,
    dtype_note,
)

SHAPE = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384)


@pytest.fixture
def source(tmp_path):
    config = SHAPE | {"model_type": "qwen2", "vocab_size": 100, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return HFModel(tmp_path)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def make_model():
    return qwen2(100, 2, 4, 2, 256, 384, 64, tie_word_embeddings=True)


def planned(source, dtype="bfloat16", engine=None, device=CPU, make=make_model, adapter=(), **settings):
    return Precision(
        PrecisionConfig(**settings), build_on_meta(make), source, dtype, engine or EngineConfig(), device, *adapter
    )


def test_precision_bf16_leaves_config_unchanged(source):
    engine = EngineConfig(dtype="float32")
    precision = planned(source, engine=engine)
    assert precision.trainer_fp8 is None and precision.engine_fp8 is None and precision.engine == engine
    stream = iter([("a", torch.zeros(1))])
    assert precision.convert_for_engine({torch.float32: stream}.get) is stream
    assert planned(source, engine=EngineConfig(dtype="auto")).engine_dtype == torch.bfloat16


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
def test_precision_fp8_flows_give_engine_identical_weights(source, flow):
    precision = planned(source, flow=flow)
    assert (precision.trainer_fp8 is not None) == (flow == "fp8_unified")
    quantization = precision.engine.quantization
    assert quantization["weight_block_size"] == [128, 128] and quantization["modules_to_not_convert"] == ["lm_head"]
    weight = torch.randn(384, 256).bfloat16()
    names = sorted(precision.engine_fp8.fp8_layer_names)
    shapes = {layer.name: layer.shape for layer in precision.engine_fp8.layers}
    stream = [(f"{name}.weight", torch.randn(shapes[name]).bfloat16()) for name in names if "gate" not in name]
    stream += [(f"{name}.weight", weight) for name in names if "gate" in name]
    sent = dict(precision.convert_for_engine({torch.bfloat16: stream}.get))
    gate = next(name for name in names if "gate" in name)
    want = quantize_weight(weight)
    assert torch.equal(sent[f"{gate}.weight"].view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(sent[f"{gate}.weight_scale_inv"], want.scales)


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
def test_receipt_of_a_run(flow, tmp_path, capsys):
    text = ["The quick brown fox jumps over the lazy dog. x\n"] * 8
    shape = scratch.ModelShape(**SHAPE, max_position_embeddings=256, vocab_size=300)
    scratch.write_model(tmp_path / "model", scratch.make_tokenizer(text, ["x"], [], 300), shape, seed=3)
    make, model = partial(from_config, str(tmp_path / "model")), HFModel(tmp_path / "model")
    precision = Precision(PrecisionConfig(flow=flow), build_on_meta(make), model, "bfloat16", EngineConfig(), CPU)
    policy = build_policy(make, model, CPU, precision.dtype, fp8=precision.trainer_fp8)
    (tmp_path / "run").mkdir()
    precision.write_fp8_report(str(tmp_path / "run"), policy)
    lines = (tmp_path / "run" / "fp8.txt").read_text()
    assert lines == capsys.readouterr().out and "14 of 15 linear layers" in lines
    assert "engine: 14 weights in FP8, sent after each step" in lines
    if flow == "fp8_rollout":
        assert "trainer: no weight in FP8, all in bfloat16" in lines and "reference for" not in lines
    else:
        assert "reference for fprop, dgrad, wgrad of 256x256, 128x256" in lines


def test_dry_run_counts_fp8_memory(source):
    """Without a model directory the plan follows the same rule."""

    def need(trainer=None, engine=None, make=make_model):
        return ModelSizes(build_on_meta(make), torch.bfloat16, (trainer, engine))

    def kept(sizes):
        (bytes_,) = [v for k, v in trainer_memory(sizes, 1000, 1, False).items() if "activations" in k]
        return bytes_

    config, plain = PrecisionConfig(flow="fp8_unified", skip=("o_proj",)), need()
    fp8 = need(*config.fp8_configs)
    converted = [
        layer.shape
        for layer in planned(source, flow="fp8_unified", skip=("o_proj",)).engine_fp8.layers
        if not layer.reason
    ]
    assert len(converted) == 12
    numbers = sum(out * width for out, width in converted)
    total = sum(p.numel() for p in make_model().parameters())
    assert fp8.engine_bytes == pytest.approx(2 * (total - numbers) + numbers * (1 + 4 / 128**2), abs=1)
    # q, k and v share an input of 256 features, gate and up another, down_proj has 384 features: 33/32
    # bytes instead of 2
    assert kept(plain) - kept(fp8) == pytest.approx(2 * 1000 * (256 + 256 + 384) * (2 - 33 / 32), abs=1)
    assert trainer_memory(need(None, config), 1000, 1, False) == trainer_memory(plain, 1000, 1, False)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"flow": "fp8_unify"}, "precision.flow='fp8_unify' is unknown.*did you mean 'fp8_unified'"),
        (
            {"flow": "fp8_rollout", "backend": "deep_gemm"},
            "precision.backend='deep_gemm' with precision.flow=fp8_rollout, which has no FP8 in the trainer",
        ),
        (
            {"flow": "fp8_rollout", "engine": EngineConfig(tensor_parallel_size=2)},
            "engine.tensor_parallel_size=2 splits model.layers.0.self_attn.k_proj, 128 x 256, into shards of 64 out-features",
        ),
        (
            {"flow": "fp8_unified", "engine": EngineConfig(tensor_parallel_size=2), "skip": ("q_proj", "gate_proj")},
            r"down_proj, 256 x 384, into shards of 192 in-features.*or exclude the layers with precision.skip=\[down_proj\]",
        ),
        ({"skip": ("down_proj",)}, r"precision.skip=\('down_proj',\) with precision.flow=bf16, which has no FP8"),
        (
            {"flow": "fp8_rollout", "engine": EngineConfig(dtype="float32")},
            "precision.flow=fp8_rollout with engine.dtype=float32",
        ),
        (
            {"flow": "fp8_unified", "engine": EngineConfig(dtype="float16")},
            "engine.dtype=float16: FP8 requires bfloat16. Fix: set engine.dtype=bfloat16",
        ),
        (
            {"flow": "fp8_unified", "backend": "scaled_mm"},
            "precision.backend=scaled_mm cannot run fprop of model.layers.0.self_attn.q_proj: it needs a CUDA device",
        ),
        ({"flow": "fp8_unified", "dtype": "float32"}, "precision.flow=fp8_unified with dtype=float32"),
    ],
)
def test_bad_settings_are_named(source, settings, message):
    with pytest.raises(ValueError, match=message):
        planned(source, **settings)


@pytest.mark.parametrize("flow", ["fp8_rollout", "fp8_unified"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_another_gpu_than_hopper_is_refused(source, monkeypatch, flow, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    with pytest.raises(ValueError, match=f"precision.flow={flow} on a Some GPU: .*precision=bf16"):
        planned(source, flow=flow, device=GPU)
    assert planned(source, device=GPU).engine_fp8 is None


def test_a_hopper_without_a_fast_backend_is_refused(source, monkeypatch):
    """Emulation on a GPU is used only on request."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name in ("_deep_gemm_module", "_torchao_module"):
        monkeypatch.setattr(fp8_gemm, name, lambda: ImportError("there is none"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(fp8, "_permutation_reason", lambda *_: None)  # compares values, which fake tensors do not have
    with FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="precision.backend=auto: cuda:0 .*fprop .*CUDA 12.9"):
            planned(source, flow="fp8_unified", device=GPU)
        precision = planned(source, flow="fp8_unified", device=GPU, backend="reference")
    assert {choice.backend for *_, choice in precision.engine_fp8.choices} == {"reference"}
    assert planned(source, flow="fp8_rollout", device=GPU).engine_fp8.choices == ()


@pytest.mark.parametrize("kind", ["dora", "nf4"])
def test_precision_untrainable_fp8_layer_is_quantized_in_engine(source, kind):
    """The published weight is unsharded and merged, whatever the trainer stores."""

    def make():
        widths = dict(vocab_size=100, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=256, intermediate_dim=384)
        options = dict(lora_rank=4, lora_alpha=8, use_dora=kind == "dora", quantize_base=kind == "nf4")
        return lora_qwen2(["q_proj", "v_proj"], True, **widths, max_seq_len=64, tie_word_embeddings=True, **options)

    way = "merged" if kind == "dora" else "adapter"
    alone = planned(source, flow="fp8_rollout", make=make, adapter=(object(), way))
    assert len(alone.engine_fp8.fp8_layer_names) == 14
    weights = ModelSizes(build_on_meta(make), torch.bfloat16, (None, alone.engine_fp8.config)).engine_bytes
    adapters = sum(p.numel() for n, p in make().named_parameters() if "lora" in n or "magnitude" in n)
    total = sum(p.numel() for p in make().parameters()) - adapters
    assert weights >= 2 * total - alone.engine_fp8.num_fp8_params * (1 - 4 / 128**2) - 1
    config = PrecisionConfig(flow="fp8_unified")
    layers, _ = linear_layers(build_on_meta(make), config, trains=True)
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in layers}
    assert reasons["o_proj"] is None and ("DoRA" if kind == "dora" else "NF4") in reasons["q_proj"]
    assert "fuses it with q_proj" in reasons["k_proj"]


@pytest.mark.parametrize("flow", ["bf16", "fp8_rollout", "fp8_unified"])
def test_a_quantized_checkpoint_is_refused_in_every_flow(source, flow):
    """Before the engine starts, which would sample with other weights than the trained ones."""
    source.config["quantization_config"] = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        planned(source, flow=flow)


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("tiny_fp8/warmup/model", "tune run warmup_sft --config warmup/tiny_fp8"),
        (
            "Qwen3-8B",
            "hf download Qwen/Qwen3-8B config.json --local-dir .*Qwen3-8B` the file that a plan of other models needs",
        ),
    ],
    ids=["tiny", "other"],
)
def test_hf_model_missing_folder_reports_download_command(tmp_path, folder, command):
    with pytest.raises(ValueError, match=f"folder not found, relative to .*`{command}"):
        HFModel(tmp_path / folder)


def test_the_dtype_follows_the_device(monkeypatch):
    assert (
        chosen_dtype("auto", "cuda") == "bfloat16"
        and dtype_note("auto", "cuda") == " (dtype=auto: this GPU computes in bfloat16)"
    )
    monkeypatch.setattr(precision_module, "computes_in_bfloat16", lambda device: device == "cuda")
    assert chosen_dtype("auto", "cpu") == "float32" and chosen_dtype("auto", "cpu", fp8=True) == "bfloat16"
    assert "does not compute in bfloat16)" in dtype_note("auto", "cpu")
    assert "slow" in dtype_note("bfloat16", "cpu") and dtype_note("float32", "cpu") == ""
    assert chosen_dtype("bfloat16", "cpu") == "bfloat16"


@pytest.mark.parametrize(
    "flags, able",
    [
        ("fpu avx2 fma", False),
        ("avx512f avx512_bf16 vnni", True),
        ("amx_bf16 amx_tile", True),
        ("asimd bf16 i8mm", True),
    ],
)
def test_computes_in_bfloat16_follows_processor_flags(flags, able, monkeypatch):
    file = SimpleNamespace(read_text=lambda **options: f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(precision_module, "Path", lambda name: file)
    computes_in_bfloat16.cache_clear()
    assert computes_in_bfloat16("cpu") == able
    computes_in_bfloat16.cache_clear()
