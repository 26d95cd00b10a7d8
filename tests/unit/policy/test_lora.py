"""Adapters equal stock torchtune modules with merged weights, one sample at a time."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.models.qwen2 import qwen2
from torchtune.modules.peft import DoRALinear

from helpers import adapters, unpacked_reference
from helpers.adapters import (
    ATTENTION,
    CPU,
    DIMS,
    SHAPES,
    MergedReference,
    build_adapted_model,
    expected_merged_weight,
    perturb_adapters,
)
from helpers.learners import single_process_learner
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.policy.sharding import fill_param, gather_full
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.training.export import export_adapter
from torchtune_ext.training.mismatch import MAX_NOISE_RATIO, measure_update_effect
from torchtune_ext.training.trained_weights import AdapterConfig, FullWeights, LoRAWeights, select_trained_weights


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("where", ["tied", "untied", "output", "llama", "checkpointing"])
def test_packed_adapters_equal_merged_weights_sample_by_sample(dora, where):
    tied = where in ("tied", "checkpointing")
    if where == "llama":
        model, stock = build_adapted_model(lora_llama3_1, use_dora=dora), llama3_1(**DIMS)
    else:
        model = build_adapted_model(use_dora=dora, tie_word_embeddings=tied, apply_lora_to_output=where == "output")
        stock = qwen2(**DIMS, tie_word_embeddings=tied)
    model.double()
    groups = unpacked_reference.make_groups(np.random.default_rng(3), SHAPES)
    loss = PolicyLoss(importance="tis", entropy_coef=0.01)
    want = unpacked_reference.reference(MergedReference(model, stock), groups, loss, "token", 0.9)
    assert want.grads.keys() == lora.adapter_names(model)
    policy = PackedPolicy(model)
    if where == "checkpointing":
        from torchtune import training
        from torchtune.modules import TransformerSelfAttentionLayer

        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    unpacked_reference.assert_equal_to_plain(policy, pack(groups, 40)[0], groups, loss, want, 0.9)


def test_lora_full_rank_adapter_equals_full_training():
    """A is a fixed identity: y = W x + B x, so B learns what W would, and SGD gives the same model."""
    rank = DIMS["intermediate_dim"]
    model = build_adapted_model(rank=rank, perturb=False, tie_word_embeddings=True, lora_alpha=float(rank))
    for module in lora.adapted_modules(model).values():
        module.lora_a.weight.data = torch.eye(rank, module.lora_a.weight.shape[1])
        module.lora_a.weight.requires_grad_(False)
    for name, param in model.named_parameters():
        replaced = any(name == f"{n}.weight" for n in lora.adapted_modules(model))
        param.requires_grad_("lora_a" not in name and not replaced)
    full = qwen2(**DIMS, tie_word_embeddings=True).double()
    full.load_state_dict({n: p for n, p in model.double().named_parameters() if n not in lora.adapter_names(model)})
    groups = unpacked_reference.make_groups(np.random.default_rng(5), SHAPES)
    rows, _ = pack(groups, 64)
    losses = []
    for each in (model, full):
        policy = PackedPolicy(each)
        optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=0.05)
        values = []
        for _ in range(3):
            with unpacked_reference.keep_float64():
                values.append(
                    single_process_learner(policy, PolicyLoss(importance="tis")).forward_backward(rows)[1]["loss/total"]
                )
            optimizer.step()
            optimizer.zero_grad()
        losses.append(values)
    assert losses[0] == pytest.approx(losses[1], abs=1e-10)
    assert len({round(x, 6) for x in losses[1]}) == 3, "nothing was learned"


def write(folder, **more):
    """A model with layer sizes for NF4: multiples of 256 blocks of 64 values."""
    text = ["Write about something. Go on. The quick brown fox jumps over the lazy dog.\n"] * 8
    shape = ModelShape(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=256,
                  max_position_embeddings=128, vocab_size=400, **more)  # fmt: skip
    write_model(folder, make_tokenizer(text, ["x"], [], 400), shape, seed=3)
    return HFModel(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source") / "model")


def policy_of(source, dtype=torch.float32, **options):
    arguments = {"lora_attn_modules": ATTENTION, "apply_lora_to_mlp": True, "lora_rank": 4, **options}
    make = partial(from_config, str(source.path), **arguments)
    return build_policy(make, source, CPU, dtype), lora.adapter_spec(build_on_meta(make), source, arguments)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"quantize_base": True}], ids=["lora", "dora", "qlora"])
def test_lora_fresh_or_disabled_adapter_changes_nothing(source, options):
    policy, spec = policy_of(source, **options)
    model = policy.model
    assert spec.rank == 4 and spec.alpha == 16.0 and spec.dora == bool(options.get("use_dora"))
    assert spec.targets == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "up_proj")
    base = dict(lora.base_hf_tensors(model, source, torch.float32))
    fresh = dict(lora.merged_hf_tensors(model, source, torch.float32))
    stored = load_file(source.path / "model.safetensors")
    assert base.keys() == stored.keys() == fresh.keys()
    for name, tensor in base.items():
        # DoRA multiplies by norm / norm
        assert torch.allclose(tensor, fresh[name], rtol=1e-6, atol=0)
        if not spec.quantized or tensor.dim() < 2 or "embed" in name:
            assert torch.equal(tensor, stored[name])
        else:
            assert torch.equal(tensor, to_nf4(stored[name]).get_original_weight().to(torch.float32))
    row = pack(unpacked_reference.make_groups(np.random.default_rng(0), SHAPES), 64)[0][0]
    with torch.no_grad(), unpacked_reference.keep_float64():
        if spec.dora:
            lora.init_adapters(model.double(), seed=1)  # the magnitudes are the norms in float64
        before = policy(row).logprobs_L
        perturb_adapters(model)
        moved = policy(row).logprobs_L
        with lora.AdapterDisabledReference(model).activate():
            off = policy(row).logprobs_L
    assert (moved - before).abs().max() > 0.01
    bound = 1e-10 if spec.dora else 0.0  # the bias is added after the factor |W| / |W|, not before
    assert (off - before).abs().max() <= bound


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"quantize_base": True}], ids=["lora", "dora", "qlora"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_lora_adapters_equal_peft(source, tmp_path, family, options):
    """PEFT, the merged model, and W + s B A give our log-probs; other weights are unchanged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    if family == "qwen3":
        source = write(tmp_path / "qwen3", model_type=family, head_dim=128)
    policy, spec = policy_of(source, **options)
    perturb_adapters(policy.model)
    base = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    if spec.quantized:  # the adapter belongs to the base as rounded to NF4
        base.load_state_dict(dict(lora.base_hf_tensors(policy.model, source, torch.float32)), strict=False)
    stored = load_file(source.path / "model.safetensors")
    merged = dict(lora.merged_hf_tensors(policy.model, source, torch.float32))
    assert stored.keys() == merged.keys()
    for name, module in lora.adapted_modules(policy.model).items():
        hf_name, _ = source.to_hf(f"{name}.weight", module.lora_b.weight)
        del stored[hf_name]
        want, bound = expected_merged_weight(base.get_parameter(hf_name), module)
        assert ((merged[hf_name].double() - want).abs() <= bound).all(), name
    assert all(torch.equal(merged[name], tensor) for name, tensor in stored.items())

    export_adapter(tmp_path, policy.model, source, spec, merged_dtype=torch.float32)
    whole_model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    group = unpacked_reference.make_groups(np.random.default_rng(1), [(9, [14])])[0]
    row = pack([group], 64)[0][0]
    ids = torch.tensor([[*group.prompt_tokens, *group.samples[0].completion.tokens]])
    with torch.no_grad():
        ours = policy(row).logprobs_L
        for other in (with_adapter, whole_model):
            logp = other(ids).logits[0, 8:-1].log_softmax(-1).gather(1, ids[0, 9:, None])[:, 0]
            assert (logp - ours).abs().max() < adapters.PEFT_BOUND


def test_vllm_reads_the_saved_adapter(source, tmp_path):
    lora_model = pytest.importorskip("vllm.lora.lora_model")
    from vllm.lora.peft_helper import PEFTHelper

    policy, spec = policy_of(source)
    perturb_adapters(policy.model)
    export_adapter(tmp_path, policy.model, source, spec)
    helper = PEFTHelper.from_local_dir(str(tmp_path), max_position_embeddings=None)
    adapter = lora_model.LoRAModel.from_local_checkpoint(
        str(tmp_path), set(spec.targets), helper, lora_model_id=1, device="cpu"
    )
    b = policy.model.get_parameter("layers.1.attn.q_proj.lora_b.weight")
    loaded = adapter.loras["model.layers.1.self_attn.q_proj"]
    assert torch.equal(loaded.lora_b, b) and loaded.scaling == 4.0 and len(adapter.loras) == 14


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"quantize_base": True}], ids=["lora", "dora", "qlora"])
def test_in_bfloat16_only_adapters_have_float32_masters(source, options):
    policy, _ = policy_of(source, torch.bfloat16, **options)
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert {p.dtype for p in policy.trainable_parameters()} == {torch.float32}
    assert {p.dtype for p in frozen if not isinstance(p, NF4Tensor)} == {torch.bfloat16}
    row = pack(unpacked_reference.make_groups(np.random.default_rng(0), SHAPES), 64)[0][0]
    single_process_learner(policy, PolicyLoss()).forward_backward([row])
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.trainable_parameters())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("change", [0.001, -0.001, 0.002, 0.003, 0.005, -0.01])
@pytest.mark.parametrize("options", [{}, {"use_bias": True}, {"quantize_base": True}], ids=["plain", "bias", "nf4"])
def test_dora_bfloat16_follows_small_magnitude_changes(options, change, device):
    """m = |V| (1 + e) changes the output by e on average, although each value moves by discrete steps."""
    torch.manual_seed(0)
    layer = DoRALinear(256, 512, rank=4, alpha=8.0, **options)
    model = torch.nn.ModuleDict({"layer": layer})
    lora.freeze_base(model, torch.bfloat16)
    model.to(device)
    lora.init_adapters(model, seed=1)
    torch.nn.init.normal_(layer.lora_b.weight, std=1e-4)  # an adapter after few updates: far below a step of the output
    product = 2.0 * layer.lora_b.weight.detach().double() @ layer.lora_a.weight.detach().double()
    with torch.no_grad():
        layer.magnitude.copy_((gather_full(layer.weight).double() + product).norm(dim=1) * (1 + change))
        x = torch.randn(512, 256).to(device, torch.bfloat16)
        output = layer(x).double()
    # NF4 values are rounded at use.
    base = x.double() @ (gather_full(layer.weight).bfloat16().double() + product).T
    bias = 0.0 if layer.bias is None else layer.bias.detach().double()
    answer = ((output - bias - base) * base).sum() / base.pow(2).sum()
    # One rounding error is uniform within a step of 2^-7 of the power of two below: variance step^2 / 12.
    step = 2.0**-7 * 2.0 ** (base * (1 + change) + bias).abs().log2().floor()
    sigma = (base * step).pow(2).sum().div(12).sqrt() / base.pow(2).sum()
    assert sigma < 2e-5
    assert abs(answer - change) < 5 * sigma


def test_fill_and_whole_of_a_quantized_parameter():
    full = torch.randn(128, 256)
    param = torch.nn.Parameter(to_nf4(torch.zeros(128, 256)), requires_grad=False)
    fill_param(param, full)
    assert isinstance(param, NF4Tensor)
    assert torch.equal(gather_full(param), to_nf4(full).get_original_weight())


def rows_of(logprobs):
    groups = unpacked_reference.make_groups(np.random.default_rng(0), [(4, [len(logprobs)])])
    row = pack(groups, 200)[0][0]
    row.logprobs_L[:] = logprobs
    return [row]


def share_of(engine_logprobs, on, off):
    share = measure_update_effect(rows_of(engine_logprobs), [on], [off], "forgets the adapter")
    assert share.tokens == len(off)
    return share.slope, share.noise


def test_applied_share_distinguishes_adapter_from_base():
    torch.manual_seed(0)
    off = torch.randn(64)
    effect = 0.01 * torch.randn(64)
    noise = 0.001 * torch.randn(64)
    share, spread = share_of(off + effect + noise, off + effect, off)
    # The standard error of the slope over 64 tokens is 8 times smaller than of one token.
    assert abs(share - 1) < 4 * spread / 8 and spread < MAX_NOISE_RATIO
    share, spread = share_of(off + noise, off + effect, off)
    assert abs(share) < 4 * spread / 8 and spread < MAX_NOISE_RATIO
    assert share_of(off, off, off)[1] == float("inf")


@pytest.mark.parametrize("engine", [0.3, 1.0])  # noise of the engine, relative to the trainer's noise
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 2.0, 20.0])  # effect of the adapter over the trainer's noise
def test_applied_share_sound_engine_passes_at_any_noise(strength, engine):
    """All three log-probs have independent rounding noise, which differs between tokens."""
    generator, stopped, resolved = torch.Generator().manual_seed(0), 0, 0
    for _ in range(300):
        scale = torch.exp(0.7 * torch.randn(64, generator=generator))
        noise = [scale * torch.randn(64, generator=generator) for _ in range(3)]
        true = strength * torch.randn(64, generator=generator)
        share, spread = share_of(true + engine * noise[0], true + noise[1], noise[2])
        resolved += spread <= MAX_NOISE_RATIO
        stopped += spread <= MAX_NOISE_RATIO and share < 0.5
    assert stopped <= 3 and (resolved > 290 or strength < 20)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"lora_attn_modules": ["q_proj", "o_proj"]},
            "lora_attn_modules names ['o_proj'], which no layer has; available:",
        ),
        ({"lora_rank": 0}, "lora_rank=0"),
        ({"lora_rank": 0, "use_dora": True}, "lora_rank=0"),
        ({"lora_attn_modules": []}, "configures LoRA, but the model has no adapters"),
        ({"lora_attn_modules": [], "use_dora": True}, "model.use_dora=True without model.lora_attn_modules"),
        *(({"lora_alpha": value}, f"model.lora_alpha={float(value)}: expected") for value in (0, -16, float("nan"))),
        *(({"lora_dropout": value}, f"model.lora_dropout={value}: expected") for value in (1.0, float("nan"))),
        ({"quantize_base": True, "ranks": 4}, "1 groups of 256 NF4 blocks, which is not divisible by 4 shards"),
    ],
)
def test_adapters_that_cannot_be_are_named(source, options, message):
    arguments = {"lora_attn_modules": ["q_proj"], "lora_rank": 4, **options}
    ranks = arguments.pop("ranks", 1)
    make = partial(from_config, str(source.path), **arguments)
    with pytest.raises(ValueError) as error:
        lora.adapter_spec(build_on_meta(make), source, arguments, ranks)
    assert message in str(error.value)


def test_attention_dropout_of_a_builder_is_refused():
    """Packed attention would silently ignore attention dropout."""
    for builder in (partial(qwen2, **DIMS), partial(lora_llama3_1, ["q_proj"], lora_rank=2, lora_alpha=2, **DIMS)):
        build_on_meta(builder)
        with pytest.raises(ValueError, match="model.attn_dropout=0.1"):
            build_on_meta(partial(builder, attn_dropout=0.1))


def test_model_without_adapters_trains_all_unless_adapters_requested(source):
    model = build_on_meta(partial(from_config, str(source.path)))
    assert isinstance(select_trained_weights(model, source, {"model_dir": "m"}, AdapterConfig()), FullWeights)
    assert isinstance(
        select_trained_weights(model, source, {"_component_": "exploration.qwen2"}, AdapterConfig()), FullWeights
    )
    for node in ({"lora_rank": 8}, {"_component_": "torchtune.models.qwen2.lora_qwen2"}, {"_component_": "my.qlora"}):
        with pytest.raises(ValueError, match="configures LoRA, but the model has no adapters"):
            select_trained_weights(model, source, node, AdapterConfig())
    with pytest.raises(ValueError, match="adapters.publish=merged, .*`model:`"):
        select_trained_weights(model, source, {}, AdapterConfig(publish="merged"))


SPEC = lora.AdapterSpec(4, 8.0, 0.0, ("q_proj",), dora=False, quantized=False)


@pytest.mark.parametrize(
    ("changes", "way", "engine", "message"),
    [
        ({}, "disk", {}, "publish='disk' is unknown"),
        ({"dora": True}, "adapter", {}, "vLLM does not support DoRA. Fix: set adapters.publish=merged"),
        ({"rank": 1024}, "adapter", {}, "model.lora_rank=1024 makes an adapter of rank 1024"),
        ({"rank": 256, "fused": {"qkv_proj": 3}}, "adapter", {}, "model.lora_rank=256 makes an adapter of rank 768"),
        ({}, "adapter", {"lora_rank": 8}, "the recipe sets them from `model:`"),
        ({"dropout": 0.1, "targets": ("lm_head",)}, "merged", {}, "apply_lora_to_output"),
    ],
)
def test_lora_unsupported_publish_modes_are_refused_early(changes, way, engine, message):
    with pytest.raises(ValueError) as error:
        LoRAWeights(replace(SPEC, **changes), AdapterConfig(publish=way)).configure_engine(EngineConfig(**engine))
    assert message in str(error.value)


def test_lora_rank_above_vllm_limit_is_merged():
    part = LoRAWeights(replace(SPEC, rank=256, fused={"qkv_proj": 3}), AdapterConfig())
    assert part.configure_engine(EngineConfig()).lora_rank is None and part.publish_mode == "merged"


@pytest.mark.parametrize(("gpus", "way"), [(False, "adapter"), (True, "merged")])
def test_lora_publish_mode_follows_gpus_not_torch_build(monkeypatch, gpus, way):
    """CUDA builds also run on machines without a GPU. On a GPU, vLLM applies adapters only in half precision."""
    monkeypatch.setattr("torchtune_ext.training.trained_weights.on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    part, exact = LoRAWeights(SPEC, AdapterConfig()), EngineConfig(dtype="float32")
    assert part.configure_engine(exact).lora_rank == (None if gpus else SPEC.rank) and part.publish_mode == way
    assert (
        part.configure_engine(EngineConfig(dtype="bfloat16")).lora_rank == SPEC.rank and part.publish_mode == "adapter"
    )
    with pytest.raises(ValueError, match="half precision") if gpus else nullcontext():
        LoRAWeights(SPEC, AdapterConfig(publish="adapter")).configure_engine(exact)


@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.rest)], ids=["lora", "dora"])
def test_compiled_layers_share_their_code(dora, monkeypatch):
    """Ten layers, trained, scored and disabled, would exceed dynamo's recompile limit without shared code."""
    torch._dynamo.reset()
    monkeypatch.setitem(DIMS, "num_layers", 10)
    model = build_adapted_model(use_dora=dora, tie_word_embeddings=True)
    policy = PackedPolicy(model)
    for layer in model.layers:
        layer.compile(backend="eager")
    rows, _ = pack(unpacked_reference.make_groups(np.random.default_rng(3), SHAPES), 40)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        learner = single_process_learner(policy, PolicyLoss())
        learner.forward_backward(rows)
        learner.logprobs(rows)
        with lora.AdapterDisabledReference(model).activate():
            learner.logprobs(rows)


def test_lora_layers_share_rope_table_with_equal_base(source):
    policy, _ = policy_of(source)
    tables = {id(layer.attn.pos_embeddings) for layer in policy.model.layers}
    assert len(tables) == 1 and len(policy.model.layers) == 2
    # A layer with another base keeps its own table.
    model = build_on_meta(partial(from_config, str(source.path), lora_attn_modules=ATTENTION))
    other = model.layers[1].attn.pos_embeddings
    other.base *= 2
    lora.share_rope(model)
    assert model.layers[1].attn.pos_embeddings is other and model.layers[0].attn.pos_embeddings is not other
