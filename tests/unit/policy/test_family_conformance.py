"""Every family against transformers and PEFT, in float64: logits, gradients, weights and adapters both ways, packed rows."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import adapters, unpacked_reference
from helpers.family_rows import ROWS, VOCAB, float64_for_float32, save, to_float64
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.families import FAMILIES
from torchtune_ext.policy.fp8 import Fp8Config
from torchtune_ext.policy.fp8.plan import make_fp8_plan
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.policy.memory import ModelSizes, trainer_memory
from torchtune_ext.training.export import export_adapter, export_model

LENGTH = 64  # several windows
ADAPTER = {
    "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
    "apply_lora_to_mlp": True,
    "lora_rank": 4,
    "lora_alpha": 8.0,
}
ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=ROWS)
def row(request, tmp_path):
    """The saved model of a row: transformers' model and the folder."""
    kind, changes = ROWS[request.param]
    return save(tmp_path / "theirs", kind, **changes), HFModel(tmp_path / "theirs")


def build(source):
    model = from_config(str(source.path))
    load_weights(model, source)
    return model.eval()


def adapted(source, **options):
    """A model with effective adapters, and their settings."""
    arguments = ADAPTER | options
    model = from_config(str(source.path), **arguments)
    lora.freeze_base(model, torch.float32)
    load_weights(model, source, new_params=lora.adapter_names(model))
    lora.init_adapters(model.eval(), seed=0)
    adapters.perturb_adapters(model)
    return model, lora.adapter_spec(
        build_on_meta(partial(from_config, str(source.path), **arguments)), source, arguments
    )


def logits(model):
    result = model(ids)
    return result if isinstance(result, torch.Tensor) else result.logits


def float64_logits(model):
    with torch.no_grad(), float64_for_float32():
        return logits(model)


def test_every_family_has_a_conformance_row():
    assert {kind.model_type for kind, _ in ROWS.values()} == set(FAMILIES)


def test_family_float64_logits_and_gradients_equal_transformers(row):
    theirs, source = row
    ours, theirs = to_float64(build(source)), theirs.double()
    outputs = []
    with float64_for_float32():
        upstream = torch.randn(1, LENGTH, VOCAB, generator=torch.Generator().manual_seed(2)).double()
        for model in (ours, theirs):
            outputs.append(logits(model))
            (outputs[-1] * upstream).sum().backward()
    assert (outputs[0] - outputs[1]).abs().max() < 1e-10 * outputs[1].std()
    grads = dict(source.fuse(source.to_hf(name, p.grad) for name, p in ours.named_parameters()))
    want = {name: p.grad for name, p in theirs.named_parameters()}
    assert grads.keys() == want.keys()
    for name, grad in want.items():
        assert (grads[name] - grad).abs().max() < 1e-10 * grad.abs().max(), name


def test_family_exported_weights_equal_transformers_weights(row, tmp_path):
    theirs, source = row
    (tmp_path / "ours").mkdir()
    export_model(tmp_path / "ours", build(source), source, torch.float32)
    stored = theirs.state_dict()
    returned = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    assert stored.keys() == returned.keys()
    assert all(torch.equal(stored[name], returned[name]) for name in stored)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"lora_attn_modules": ["v_proj"], "apply_lora_to_mlp": False}],
    ids=["lora", "dora", "only v_proj"],
)
def test_family_exported_adapter_in_peft_equals_ours(row, options, tmp_path):
    peft = pytest.importorskip("peft")
    theirs, source = row
    model, spec = adapted(source, **options)
    for folder in ("adapter", "whole"):
        (tmp_path / folder).mkdir()
    export_adapter(tmp_path / "adapter", model, source, spec)
    export_model(tmp_path / "whole", model, source, torch.float32)
    other = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32, attn_implementation="eager")
    want = float64_logits(to_float64(model))
    assert (float64_logits(other.double()) - want).abs().max() < 1e-9 * want.std()
    # Merging rounds each weight to float32.
    assert (float64_logits(whole.double().eval()) - want).abs().max() < 1e-4 * want.std()
    plain = float64_logits(to_float64(build(source)))
    assert (plain - want).abs().max() > 0.1 * want.std()


def test_dora_on_part_of_fused_layer_is_refused(tmp_path):
    kind, changes = ROWS["phi 3"]
    save(tmp_path, kind, **changes)
    with pytest.raises(ValueError, match="the files hold qkv_proj fused.*lora_attn_modules=.q_proj, k_proj, v_proj"):
        adapted(HFModel(tmp_path), use_dora=True, lora_attn_modules=["q_proj"])


def test_family_packed_rows_equal_unpacked_sequences(row):
    _, source = row
    model = to_float64(build(source)).train()
    groups = unpacked_reference.make_groups(np.random.default_rng(3), adapters.SHAPES)
    loss = PolicyLoss(importance="tis", entropy_coef=0.01)
    want = unpacked_reference.reference(model, groups, loss, "token", 0.9)
    assert all(gradient.abs().max() > 0 for name, gradient in want.grads.items() if name.endswith("scale"))
    unpacked_reference.assert_equal_to_plain(PackedPolicy(model), pack(groups, 40)[0], groups, loss, want, 0.9)


def test_family_fp8_plan_and_memory_cover_all_weights(row, tmp_path):
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    # Wide enough for tiles of 128.
    config |= {"hidden_size": 512, "intermediate_size": 256, "head_dim": 128, "num_key_value_heads": 4}
    if "rope_parameters" in config and "short_factor" in config["rope_parameters"]:
        config["rope_parameters"] |= {key: [1.0] * 48 for key in ("short_factor", "long_factor")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = HFModel(tmp_path)
    model = build_on_meta(partial(from_config, str(tmp_path)))
    plan = make_fp8_plan(model, source, Fp8Config(), torch.bfloat16)
    assert {layer.name.rpartition(".")[2] for layer in plan.layers if layer.reason is None} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    sizes = ModelSizes(model, torch.bfloat16)
    assert sizes.total_params == sum(p.numel() for p in model.parameters())
    norms = [module for module in model.layers[0].modules() if hasattr(module, "eps")]
    # The inputs of all norms are saved in float32.
    assert sizes.layer_bytes_per_token > 4 * sum(norm.scale.numel() for norm in norms)
    assert trainer_memory(sizes, 100, 1, False)["RoPE table, float32"] == sum(b.nbytes for b in model.buffers())
