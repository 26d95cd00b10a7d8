"""`from_config` for every family: against transformers, and against torchtune's builders of published sizes."""

import copy
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtune.models import llama3, llama3_1, llama3_2, qwen2_5
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3ForCausalLM

from helpers.family_rows import LONGROPE, ROWS, SCALED, SIZES, VOCAB, save
from helpers.public_configs import PUBLIC, write_config
from torchtune_ext import policy
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.policy.families import FAMILIES
from torchtune_ext.policy.hf_config import complete_config, read_hf_config
from torchtune_ext.policy.hf_model import HFModel, load_weights
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.setup.checks import max_positions
from torchtune_ext.training.export import export_model

LENGTH = 512
# Position times frequency is rounded to 24 bits: an error of up to 512 / 2^24 = 3e-5 radians, in each
# of two layers.
LIMIT = 3e-4
CASES = ROWS
KINDS = [case for case in CASES if "tied" not in case]


def loaded(folder, **options):
    model = from_config(str(folder), **options)
    load_weights(model, HFModel(folder), new_params=lora.adapter_names(model))
    return model.eval()


@torch.no_grad()
def logprobs(model):
    ids = torch.randint(0, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    out = model(ids)
    return (out if isinstance(out, torch.Tensor) else out.logits).double().log_softmax(-1)


def test_a_norm_out_of_place_would_show(tmp_path):
    kind, changes = CASES["qwen3"]
    want = logprobs(save(tmp_path, kind, **changes))
    for name in ("q_norm", "k_norm"):
        ours = loaded(tmp_path)
        setattr(ours.layers[1].attn, name, None)
        assert (logprobs(ours) - want).abs().max() > 100 * LIMIT


def test_family_tied_checkpoint_may_store_output_head(tmp_path):
    kind, changes = CASES["qwen2"]
    theirs = save(tmp_path, kind, **changes)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": torch.zeros_like(tensors["model.embed_tokens.weight"])}, file)
    assert (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max() < LIMIT


def test_family_duplicate_weight_files_are_read_once(tmp_path):
    """Some Mistral folders have shards with Hugging Face's names and one file with other names."""
    theirs = save(tmp_path, *CASES["mistral, untied"][:1], **CASES["mistral, untied"][1])
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    (tmp_path / "model.safetensors").unlink()
    save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, tmp_path / "consolidated.safetensors")
    source = HFModel(tmp_path)
    assert len(source.files()) > 1 and all(file.name.startswith("model-") for file in source.files())
    assert (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max() < LIMIT


def test_missing_output_layer_names_the_tying_key(tmp_path):
    save(tmp_path, *CASES["qwen2"][:1], **CASES["qwen2"][1])
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"lacks 1 of the model's weights .*output.weight.*tie_word_embeddings: true"):
        HFModel(tmp_path).require_fits(from_config(str(tmp_path)))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "version https://git-lfs"]
)
def test_damaged_index_of_weights_is_named(content, tmp_path):
    save(tmp_path, *CASES["qwen2"][:1], **CASES["qwen2"][1])
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="model.safetensors.index.json "):
        HFModel(tmp_path).files()


def test_stray_weights_next_to_model_are_refused(tmp_path):
    """vLLM reads all of them. If no file has the usual name, all files are read."""
    save(tmp_path, *CASES["qwen2"][:1], **CASES["qwen2"][1])
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="holds adapter_model.safetensors in addition"):
        HFModel(tmp_path).files()
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert [file.name for file in HFModel(tmp_path).files()] == ["weights.safetensors"]


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
def test_another_scale_of_rope_would_show(factor, tmp_path):
    theirs = save(tmp_path, LlamaConfig, rope_parameters={**SCALED, "factor": factor})
    for other in (1.0, 8.0, 32.0):
        config = json.loads((tmp_path / "config.json").read_text())
        config["rope_parameters"] = {**SCALED, "factor": other}
        (tmp_path / "config.json").write_text(json.dumps(config))
        far = (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max()
        assert far < LIMIT if other == factor else far > 0.05


@pytest.mark.parametrize("case", KINDS)
def test_family_transformers_4_and_5_configs_load_identically(case, tmp_path):
    kind, changes = CASES[case]
    theirs = save(tmp_path, kind, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    assert "rope_theta" not in config
    if "full_attention" in rope:
        config["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
    config |= {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = None if rope["rope_type"] == "default" else rope
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max() < LIMIT


def sizes_of_transformers(folder):
    """The sizes of the model that transformers builds, in our names; None if it must be refused."""
    config = AutoConfig.from_pretrained(folder)
    heads, rope, layers = config.num_attention_heads, config.rope_parameters, config.num_hidden_layers
    local, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    if config.model_type == "llama" and rope.get("original_max_position_embeddings", 8192) != 8192:
        return None
    sizes = {
        "vocab_size": config.vocab_size,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "embed_dim": config.hidden_size,
        "intermediate_dim": config.intermediate_size,
        "max_seq_len": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "rope_base": rope["rope_theta"],
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.model_type == "llama":
        return sizes | {"scale_factor": rope["factor"] if rope["rope_type"] == "llama3" else 1}
    if config.model_type == "smollm3":
        sizes["nope_layers"] = [i for i in range(layers) if not config.no_rope_layers[i]]
    if config.model_type in ("mistral", "phi3"):
        sizes["windows"] = [config.sliding_window] * layers
    if config.model_type == "phi3":
        sizes["rope"] = {"dim": int(config.hidden_size // heads * rope["partial_rotary_factor"])}
    if config.model_type.startswith("gemma"):
        sizes |= {
            "windows": [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types],
            "window_rope_base": local and local["rope_theta"],
            "rope": {"factors": (rope["factor"],)} if rope["rope_type"] == "linear" else {},
            "softcap": config.attn_logit_softcapping,
            "scale": config.query_pre_attn_scalar**-0.5,
            "logit_softcap": config.final_logit_softcapping,
        }
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return sizes if config.model_type == "qwen2" else sizes | {"head_dim": width}


@pytest.mark.parametrize("case", [case for case in KINDS if case != "phi 4 mini"])
def test_missing_key_of_config_means_transformers_default(case, tmp_path, monkeypatch):
    kind, changes = CASES[case]
    unusual = {"hidden_size": 512, "num_attention_heads": 32, "max_position_embeddings": 9000, "rms_norm_eps": 1e-4}
    whole = kind(**{**SIZES, **changes, **unusual, "tie_word_embeddings": False}).to_dict()
    # transformers derives these keys from others and checks them.
    made = {"layer_types", "model_type"} | {"head_dim"} - set(changes)
    whole = {key: value for key, value in whole.items() if key not in made}
    whole["no_rope_layers"] = [0, 1] * 20
    monkeypatch.setitem(FAMILIES, kind.model_type, replace(FAMILIES[kind.model_type], build=lambda **sizes: sizes))
    for key in [(key,) for key in whole] + [("rope_parameters", key) for key in whole["rope_parameters"]]:
        config = copy.deepcopy(whole)
        del (config if len(key) == 1 else config[key[0]])[key[-1]]
        (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind.model_type}))
        try:
            theirs = sizes_of_transformers(tmp_path)
        except KeyError:
            theirs = None
        if theirs is None:
            with pytest.raises(ValueError, match="lacks"):
                from_config(str(tmp_path))
        else:
            assert from_config(str(tmp_path)) == theirs, key


@pytest.mark.parametrize(
    "key", ["rope_theta", "rms_norm_eps", "intermediate_size", "num_key_value_heads", "head_dim", "vocab_size"]
)
def test_null_in_config_means_missing_key(key, tmp_path):
    configs = []
    for value in ({key: None}, {}):
        config = {name: each for name, each in PUBLIC[QWEN].items() if name != key} | value
        (tmp_path / "config.json").write_text(json.dumps(config))
        configs.append(complete_config(read_hf_config(tmp_path)))
    assert configs[0] == configs[1]


def test_null_tie_word_embeddings_means_untied(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smollm3", "tie_word_embeddings": None}))
    assert not complete_config(read_hf_config(tmp_path))["tie_word_embeddings"]


def test_smollm3_without_tie_word_embeddings_is_tied(tmp_path):
    """transformers 4 wrote SmolLM3-3B's config.json without the key, because it has its default."""
    kind, changes = CASES["smollm3"]
    theirs = save(tmp_path, kind, **changes)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert HFModel(tmp_path).tied_embeddings and (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max() < LIMIT


@pytest.mark.parametrize("case", KINDS)
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_family_fresh_adapters_keep_logprobs(case, options, tmp_path):
    kind, changes = CASES[case]
    theirs = save(tmp_path, kind, **changes)
    adapter = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4, "lora_alpha": 8.0}
    model = loaded(tmp_path, **adapter, **options)
    lora.init_adapters(model, seed=0)
    assert len(lora.adapted_modules(model)) == 2 * 5
    assert (logprobs(model) - logprobs(theirs)).abs().max() < LIMIT


ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
BUILDERS = {  # builders of torchtune for the same model without and with adapters
    "Qwen2.5-0.5B-Instruct": (qwen2_5.qwen2_5_0_5b, qwen2_5.lora_qwen2_5_0_5b),
    "Qwen2.5-3B-Instruct": (qwen2_5.qwen2_5_3b, qwen2_5.lora_qwen2_5_3b),
    "Qwen2.5-7B": (qwen2_5.qwen2_5_7b_base, qwen2_5.lora_qwen2_5_7b_base),
    "Qwen2.5-7B-Instruct": (qwen2_5.qwen2_5_7b_instruct, qwen2_5.lora_qwen2_5_7b_instruct),
    "Qwen2.5-14B-Instruct": (qwen2_5.qwen2_5_14b_instruct, qwen2_5.lora_qwen2_5_14b_instruct),
    "Qwen2.5-Coder-14B-Instruct": (qwen2_5.qwen2_5_14b_instruct, qwen2_5.lora_qwen2_5_14b_instruct),
    "Qwen2.5-32B": (qwen2_5.qwen2_5_32b_base, qwen2_5.lora_qwen2_5_32b_base),
    "Qwen2.5-32B-Instruct": (qwen2_5.qwen2_5_32b_instruct, qwen2_5.lora_qwen2_5_32b_instruct),
    "Meta-Llama-3-8B-Instruct": (llama3.llama3_8b, llama3.lora_llama3_8b),
    "Llama-3.1-8B-Instruct": (llama3_1.llama3_1_8b, llama3_1.lora_llama3_1_8b),
    "Llama-3.2-1B-Instruct": (llama3_2.llama3_2_1b, llama3_2.lora_llama3_2_1b),
    "Llama-3.2-3B-Instruct": (llama3_2.llama3_2_3b, llama3_2.lora_llama3_2_3b),
}


def described(model):
    """All properties by which two models without weights may differ."""
    ropes = [layer.attn.pos_embeddings for layer in model.layers]
    return {
        "parameters": {name: (param.shape, type(param)) for name, param in model.named_parameters()},
        "eps": {module.eps for module in model.modules() if hasattr(module, "eps")},
        "rope": {(rope.dim, rope.base, rope.max_seq_len, getattr(rope, "scale_factor", 1)) for rope in ropes},
        "heads": {(layer.attn.num_heads, layer.attn.num_kv_heads, layer.attn.head_dim) for layer in model.layers},
        "longest": model.max_seq_len,
        "output": type(model.output),
        "adapters": {name: (m.alpha, m.rank) for name, m in model.named_modules() if hasattr(m, "lora_a")},
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_published_sizes_are_those_of_torchtunes_builders(name, tmp_path):
    plain, adapted = BUILDERS[name]
    model_dir = str(write_config(tmp_path, name))
    assert described(build_on_meta(partial(from_config, model_dir))) == described(build_on_meta(plain))
    options = {"apply_lora_to_mlp": True, "lora_rank": 32, "lora_alpha": 64}
    theirs = build_on_meta(partial(adapted, ATTENTION, **options))
    assert described(
        build_on_meta(partial(from_config, model_dir, lora_attn_modules=ATTENTION, **options))
    ) == described(theirs)


def test_family_shorter_rope_table_is_supported(tmp_path):
    model = build_on_meta(partial(from_config, str(write_config(tmp_path, "Qwen3-1.7B")), max_seq_len=100))
    assert model.max_seq_len == 100 and len(model.layers[0].attn.pos_embeddings.cache) == 100


def test_longrope_beyond_original_length_is_refused(tmp_path):
    kind, changes = CASES["phi 4 mini"]
    save(tmp_path, kind, **changes)
    assert from_config(str(tmp_path)).max_seq_len == max_positions(HFModel(tmp_path)) == 550
    assert from_config(str(tmp_path), max_seq_len=150).max_seq_len == 150
    with pytest.raises(ValueError, match="model.max_seq_len=551 is above original_max_position_embeddings=550"):
        from_config(str(tmp_path), max_seq_len=551)


def test_window_of_zero_is_no_window(tmp_path):
    for name in ("mistral", "qwen3"):
        kind, changes = CASES[name]
        save(tmp_path, kind, **changes)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": 0}))
        assert {getattr(layer.attn, "window", None) for layer in from_config(str(tmp_path)).layers} == {None}


def test_gemma_embeddings_round_their_scale_as_transformers(tmp_path):
    kind, changes = CASES["gemma 3"]
    theirs = save(tmp_path, kind, **changes, hidden_size=72).bfloat16()
    ours = loaded(tmp_path).bfloat16()
    ids = torch.arange(VOCAB)
    assert torch.equal(ours.tok_embeddings(ids), theirs.model.embed_tokens(ids))
    assert not torch.equal(ours.tok_embeddings(ids), (theirs.model.embed_tokens.weight.float() * 72**0.5).bfloat16())


@pytest.mark.parametrize("prefix, vision", [("language_model.model.", ""), ("model.language_model.", "model.")])
def test_multimodal_folder_trains_only_its_text_model(prefix, vision, tmp_path):
    kind, changes = CASES["gemma 3"]
    theirs = save(tmp_path, kind, **changes)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in load_file(file).items()}
    others = {f"{vision}{part}.weight": torch.zeros(3) for part in ("vision_tower.x", "multi_modal_projector.y")}
    save_file(tensors | others, file)
    text = json.loads(config.read_text())
    del text["dtype"]
    config.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}))
    source = HFModel(tmp_path)
    assert source.raw_config["dtype"] == "bfloat16"
    adapted = from_config(str(tmp_path), lora_attn_modules=["q_proj"])
    with pytest.raises(ValueError, match="adapters of multimodal folders are unsupported"):
        lora.adapter_spec(adapted, source, {})
    source.require_fits(from_config(str(tmp_path)))
    (tmp_path / "ours").mkdir()
    export_model(tmp_path / "ours", loaded(tmp_path), source, torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert (logprobs(exported) - logprobs(theirs)).abs().max() < LIMIT
    assert (logprobs(loaded(tmp_path)) - logprobs(theirs)).abs().max() < LIMIT


def test_new_model_from_shape_initializes_or_is_refused(tmp_path):
    shape = ModelShape(model_type="qwen3", hidden_size=64, head_dim=64, num_hidden_layers=2, num_attention_heads=2,
                  num_key_value_heads=1, intermediate_size=48, vocab_size=400, max_position_embeddings=600)  # fmt: skip
    write_model(tmp_path, make_tokenizer(["some text\n"] * 9, ["x"], [], 400), shape, seed=0)
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), loaded(tmp_path)
    assert isinstance(theirs, Qwen3ForCausalLM) and ours.layers[0].attn.head_dim == 64
    assert (logprobs(ours) - logprobs(theirs)).abs().max() < LIMIT
    for change, message in (
        ({"model_type": "qwen9"}, "shape.model_type='qwen9' is unknown"),
        ({"model_type": "qwen2", "head_dim": 64}, "shape.head_dim=64 must be hidden_size / num_attention_heads"),
        ({"model_type": "qwen3", "head_dim": 48}, "heads of 48 .* make it a multiple of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelShape(**change)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
QWEN, LLAMA = "Qwen3-1.7B", "Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (
            QWEN,
            {"model_type": "mamba"},
            f"has model_type='mamba', .* recurrent layers .* a model of one of these types: {', '.join(sorted(FAMILIES))}",
        ),
        (
            QWEN,
            {"model_type": "gemma3n_text"},
            r"which is not supported: its layers share keys and values; use .* \(the nearest is gemma3_text\)",
        ),
        (QWEN, {"model_type": "qwen3_moe"}, "which is not supported: it is a mixture of experts; use"),
        (
            LLAMA,
            {"sliding_window": 4096},
            r"has sliding_window=4096, .* llama supports only null \(mistral supports it\)",
        ),
        (
            QWEN,
            {"partial_rotary_factor": 0.5},
            r"=0.5, .* qwen3 supports only 1 \(phi3 supports it\); use another model",
        ),
        (QWEN, {"final_logit_softcapping": 30.0}, r"has final_logit_softcapping=30.0, .* null \(gemma2 supports it\)"),
        (
            QWEN,
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            r"has attn_logit_softcapping=50.0, .* gemma3_text supports only null \(gemma2 supports it\)",
        ),
        (QWEN, {"model_type": "gemma2", "use_bidirectional_attention": True}, "has use_bidirectional_attention=True"),
        (QWEN, {"model_type": "gemma2", "sliding_window": None}, "lacks sliding_window. Fix"),
        (
            QWEN,
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "has 1 layer_types; expected .* layer of 28",
        ),
        (QWEN, {"model_type": "gemma3", "text_config": 3}, "has text_config=3; expected a JSON object"),
        (QWEN, {"model_type": "phi3", "resid_pdrop": 0.1}, "has resid_pdrop=0.1, .* phi3 supports only 0;"),
        (QWEN, {"model_type": "phi3", "rope_scaling": YARN}, "has rope_type='yarn', .* default or longrope or su;"),
        (QWEN, {"model_type": "phi3", "rope_scaling": {"type": "su"}}, "lacks short_factor. Fix"),
        (QWEN, {"model_type": "phi3", "rope_scaling": LONGROPE}, "has 6 short_factor; expected .* pair of 64 that"),
        (QWEN, {"rope_parameters": YARN}, "has rope_type='yarn', but the builder of qwen3 supports only default"),
        (QWEN, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "has rope_type='yarn'"),
        (
            QWEN,
            {"use_sliding_window": True},
            "has use_sliding_window=True, but the builder of qwen3 supports only False",
        ),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"] * 14}, "has layer_types=.*gemma2 supports it"),
        (QWEN, {"attention_bias": True}, "has attention_bias=True"),
        (
            LLAMA,
            {"rope_scaling": YARN},
            "has rope_type='yarn', but the builder of llama supports only default or llama3",
        ),
        (
            LLAMA,
            {"rope_scaling": {**SCALED, "factor": 8.0, "high_freq_factor": 8.0}},
            "has high_freq_factor=8.0, .* only 4",
        ),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192}},
            "config.json lacks factor. Fix: copy it again from the model repository",
        ),
        (LLAMA, {"head_dim": 64}, "has head_dim=64, but the builder of llama supports only .* = 128"),
        (LLAMA, {"hidden_act": "gelu"}, "has hidden_act='gelu', but the builder of llama supports only silu"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}},
            "lacks original_max_position_embeddings, which defaults to 131072, but the builder of llama supports only 8192",
        ),
        (
            LLAMA,
            {"num_attention_heads": 48},
            "has hidden_size=4096, which is not a multiple of num_attention_heads=48",
        ),
        (QWEN, {"num_key_value_heads": 3}, "num_attention_heads=16, .* not a multiple of num_key_value_heads=3"),
        *((QWEN, {"num_hidden_layers": value}, "config.json has num_hidden_layers=") for value in (0, "2", 2.0, True)),
        (QWEN, {"vocab_size": "320"}, "has vocab_size='320'; expected a whole number above 0"),
        (QWEN, {"rope_theta": "10000"}, "has rope_theta='10000'; expected a number above 0"),
        (QWEN, {"rope_parameters": {"rope_theta": -1}}, "has rope_theta=-1; expected"),
        (QWEN, {"rope_scaling": ["yarn"]}, r"has rope_scaling=\['yarn'\]; expected a JSON object"),
        (QWEN, {"rms_norm_eps": "1e-6"}, "has rms_norm_eps='1e-6'; expected a number above 0"),
        (QWEN, {"rms_norm_eps": float("nan")}, "has rms_norm_eps=nan; expected"),
        (QWEN, {"quantization_config": "awq"}, "has quantization_config='awq'; expected a JSON object"),
        (QWEN, {"tie_word_embeddings": "yes"}, "has tie_word_embeddings='yes'; expected true or false"),
        (QWEN, {"layer_types": "full_attention"}, "has layer_types='full_attention'; expected a list of strings"),
        (QWEN, {"model_type": ["qwen3"]}, r"has model_type=\['qwen3'\], which is not supported"),
        (
            QWEN,
            {"model_type": "smollm3", "no_rope_layers": [1]},
            "has 1 no_rope_layers; expected one for each layer of 28",
        ),
    ],
)
def test_directories_that_would_be_misread_are_refused(name, change, message, tmp_path):
    folder = write_config(tmp_path, name)
    config = {key: value for key, value in (PUBLIC[name] | change).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        build_on_meta(partial(from_config, str(folder)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "model.use_dora=True without model.lora_attn_modules"),
        ({"quantize_base": True}, "model.quantize_base=True without model.lora_attn_modules"),
        ({"lora_attn_modules": ["q_proj"], "lora_rank": 0}, "model.lora_rank=0 must be at least 1"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build_on_meta(partial(from_config, str(write_config(tmp_path, LLAMA)), **options))


def test_layers_that_nf4_cannot_hold_are_named(tmp_path):
    folder = write_config(tmp_path, QWEN)
    sizes = dict(hidden_size=640, num_attention_heads=10, num_key_value_heads=1, head_dim=64, num_hidden_layers=1)

    def make(intermediate_size, *layers):
        config = PUBLIC[QWEN] | sizes | {"intermediate_size": intermediate_size}
        (folder / "config.json").write_text(json.dumps(config))
        build_on_meta(
            partial(from_config, str(folder), quantize_base=True, apply_lora_to_mlp=True, lora_attn_modules=layers)
        )

    make(1536, "q_proj")
    with pytest.raises(ValueError, match=r"v_proj \(64 x 640\); set model.lora_attn_modules=\[q_proj\]$"):
        make(1536, "q_proj", "v_proj")
    with pytest.raises(ValueError, match=r"w1 \(1000 x 640\).*=\[q_proj\] model.apply_lora_to_mlp=False$"):
        make(1000, "q_proj", "v_proj")
    with pytest.raises(ValueError, match="QLoRA: set model.quantize_base=False"):
        make(1536, "v_proj")
    # torchtune's builder for Llama also stores layers without adapters in NF4.
    folder = write_config(tmp_path, LLAMA)
    (folder / "config.json").write_text(json.dumps(PUBLIC[LLAMA] | sizes))
    with pytest.raises(ValueError, match="does not support QLoRA"):
        build_on_meta(partial(from_config, str(folder), quantize_base=True, lora_attn_modules=["q_proj"]))


def test_policy_package_reexports_families_and_rejects_unknown_names():
    assert from_config.__module__ == "torchtune_ext.policy.builder" and policy.families.FAMILIES is FAMILIES
    with pytest.raises(AttributeError, match="has no attribute 'from_confg'"):
        policy.from_confg  # noqa: B018


def test_policy_package_import_loads_no_torch():
    """An engine process imports the package for its plugin, and must not import torchtune."""
    check = "import sys, torchtune_ext.policy; assert not {'torch', 'torchtune'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


@pytest.mark.parametrize(
    "files, message",
    [
        (["checkpoints/step_000004/config.json"], "its newest checkpoint is the model .*/checkpoints/step_000004"),
        (["checkpoints/step_000004/merged/config.json"], "its newest checkpoint is the model .*/step_000004/merged"),
        (
            ["adapter_config.json", "merged/config.json"],
            "holds an adapter and no model; the merged model is .*/merged",
        ),
        (["adapter_config.json"], "adapters.save_merged=True also saves the merged model"),
        (
            ["small.Q4_1.gguf"],
            "`torchtune-ext gguf .*/small.Q4_1.gguf OUT` converts small.Q4_1.gguf to a model directory",
        ),
    ],
)
def test_hf_model_invalid_folder_suggests_model_location(files, message, tmp_path):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    with pytest.raises(ValueError, match=message):
        HFModel(folder)
