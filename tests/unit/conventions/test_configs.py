"""Every shipped config fits the recipe it belongs to, and the models it names can be built."""

import importlib
import math
import re

import pytest
import torch
from omegaconf import OmegaConf

from helpers.public_configs import write_config
from helpers.stand_ins import nf4_in_one_piece
from torchtune_ext.cli.cli import main
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.policy import memory
from torchtune_ext.policy.builder import build_on_meta
from torchtune_ext.recipes import grpo
from torchtune_ext.run.catalog import config_files, package_folder, recipe_files, recipe_for_name
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config
from torchtune_ext.setup.dry_run import make_plan, parse_machine

FILES = config_files(package_folder("configs"))
CONFIGS = {name: path for name, path in FILES.items() if recipe_for_name(name)}
PRESETS = [name.removeprefix("presets/") for name in FILES if name.startswith("presets/")]
NEEDED = {"output_dir": "x", "model_dir": "x", "max_steps": 1, "sampling": {"max_tokens": 8}} | {
    key: {"_component_": "x"} for key in ("model", "tokenizer", "task", "optimizer")
}


def module_of(name):
    recipe = next(r for r in recipe_files(package_folder("recipes"), package_folder("configs")) if name in r.configs)
    return importlib.import_module(f"torchtune_ext.recipes.{recipe.path.stem}")


def loaded(name):
    path = CONFIGS[name]
    module = module_of(name)
    return module, load_config(module.Config, OmegaConf.load(path))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_fits_its_recipe(name):
    _, cfg = loaded(name)
    if hasattr(cfg, "engine"):
        assert cfg.sampling.max_tokens < cfg.engine.max_model_len
        if hasattr(cfg, "row_tokens"):
            assert cfg.engine.max_model_len <= cfg.row_tokens, "a sequence that can be sampled must fit into a row"
    if hasattr(cfg, "evaluation"):
        every = cfg.checkpoints.every
        assert every % cfg.evaluation.every == 0 or every > cfg.max_steps, (
            "a checkpoint without an evaluation has no score"
        )


# Config, the words that its first lines name for another size, the model that it then trains, billions of parameters.
SIZES = [
    ("qwen2_5_0_5B_full", "", "Qwen2.5-0.5B-Instruct", 0.494),
    ("qwen2_5_3B_gsm8k", "", "Qwen2.5-3B-Instruct", 3.086),
    ("qwen2_5_7B_full", "", "Qwen2.5-7B-Instruct", 7.616),
    ("qwen2_5_7B_full", "model_dir=models/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", 8.030),
    ("qwen2_5_7B_full", "model_dir=models/Qwen3-8B", "Qwen3-8B", 8.191),
    ("qwen2_5_7B_full", "model_dir=models/Qwen2.5-3B-Instruct engine.devices=2", "Qwen2.5-3B-Instruct", 3.086),
    ("qwen2_5_7B_colocated", "", "Qwen2.5-7B-Instruct", 7.616),
    ("qwen2_5_7B_jsonl", "", "Qwen2.5-7B-Instruct", 7.616),
    ("qwen2_5_7B_node", "", "Qwen2.5-7B-Instruct", 7.616),
    ("qwen2_5_7B_node", "model_dir=models/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", 8.030),
    ("qwen2_5_7B_node", "model_dir=models/Qwen3-8B", "Qwen3-8B", 8.191),
    ("qwen2_5_14B_full", "", "Qwen2.5-14B-Instruct", 14.770),
    ("qwen2_5_32B_full", "", "Qwen2.5-32B-Instruct", 32.764),
    ("qwen2_5_32B_lora", "", "Qwen2.5-32B-Instruct", 33.032),
    ("qwen2_5_coder_14B_matmul", "", "Qwen2.5-Coder-14B-Instruct", 14.770),
    ("qwen2_5_7B_lora", "", "Qwen2.5-7B-Instruct", 7.696),
    ("qwen2_5_7B_lora", "model_dir=models/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct", 8.114),
    ("qwen2_5_7B_lora", "model_dir=models/Qwen3-8B", "Qwen3-8B", 8.278),
    ("qwen2_5_7B_lora", "model_dir=models/Qwen2.5-14B-Instruct engine.devices=2", "Qwen2.5-14B-Instruct", 14.908),
    ("qwen2_5_1_5B_lora_16G", "", "Qwen2.5-1.5B-Instruct", 1.581),
    ("qwen2_5_3B_lora_24G", "", "Qwen2.5-3B-Instruct", 3.146),
    ("qwen3_4B_lora_24G", "", "Qwen3-4B", 4.089),
    ("llama3_2_3B_lora_24G", "", "Llama-3.2-3B-Instruct", 3.261),
    ("qwen2_5_7B_lora_24G", "", "Qwen2.5-7B-Instruct", 7.696),
    ("qwen2_5_7B_lora_48G", "", "Qwen2.5-7B-Instruct", 7.696),
    ("qwen2_5_32B_qlora", "", "Qwen2.5-32B-Instruct", 33.032),
    ("qwen3_1_7B_atr_grpo_lora", "", "Qwen3-1.7B", 1.755),
    ("qwen3_1_7B_atr_grpo_lora", "output_dir=runs/qwen3_8B_atr_grpo_lora model_dir=models/Qwen3-8B", "Qwen3-8B", 8.278),
    ("qwen3_8B_full", "", "Qwen3-8B", 8.191),
    ("qwen3_8B_fp8", "", "Qwen3-8B-Base", 8.191),
    ("qwen2_5_7B_fp8", "", "Qwen2.5-7B", 7.616),
    (
        "qwen2_5_7B_fp8",
        "output_dir=runs/qwen2_5_32B_fp8 model_dir=models/Qwen2.5-32B engine.tensor_parallel_size=2 engine.devices=6,7",
        "Qwen2.5-32B",
        32.764,
    ),
]


def sized(name, words, public, folder):
    """A config with words of the command line, whose model_dir is a folder with the public config.json alone."""
    path = CONFIGS[f"grpo/{name}"]
    comment = " ".join(line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#"))
    assert all(word in comment for word in words.split()), "its first lines say these words"
    cfg = OmegaConf.merge(OmegaConf.load(path), OmegaConf.from_dotlist(words.split()))
    assert cfg.model_dir == f"models/{public}"
    cfg.model_dir = str(write_config(folder, public))
    module = module_of(f"grpo/{name}")
    return module, load_config(module.Config, cfg)


@pytest.mark.parametrize("name, words, public, billions", SIZES)
def test_dry_run_counts_match_published_model_sizes(name, words, public, billions, tmp_path):
    _, cfg = sized(name, words, public, tmp_path)
    assert cfg.engine.sleep or bool(cfg.engine.devices) != bool(cfg.engine.address)
    with nf4_in_one_piece():
        plan, _ = make_plan(cfg, parse_machine("1x80"))
    assert f"{plan.sizes.total_params / 1e9:.3f}" == f"{billions:.3f}"


def test_public_model_configs_are_all_in_sizes():
    small = ("tiny", "smollm2", "gemma3")
    named = {name for name in CONFIGS if name.startswith("grpo/") and not any(each in name for each in small)}
    assert named == {f"grpo/{name}" for name, *_ in SIZES}


def test_dry_run_without_config_json_reports_missing_folder():
    _, cfg = loaded("grpo/qwen2_5_7B_full")
    cfg.model_dir = cfg.model["model_dir"] = "models/Nobodys-7B"
    with pytest.raises(ValueError, match="model_dir='models/Nobodys-7B': folder not found, .*`hf download "):
        make_plan(cfg, parse_machine("1x80"))


def test_config_paths_expand_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    change = {"output_dir": "~/runs", "task": {"_component_": "x", "path": "~/rows.jsonl", "prompt": "~{question}"}}
    cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, **change}))
    assert cfg.output_dir == str(tmp_path / "runs") and cfg.task["path"] == str(tmp_path / "rows.jsonl")
    assert cfg.task["prompt"] == "~{question}"


@pytest.mark.parametrize("name", ["grpo/tiny", "grpo/qwen2_5_7B_lora"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits(preset, name):
    module = module_of(name)
    cfg = load_config(module.Config, OmegaConf.merge(OmegaConf.load(CONFIGS[name]), {"preset": preset}))
    assert isinstance(cfg.loss.instantiate(), PolicyLoss)


# What the papers say, as (loss, advantage, the rest); the docs' table has the same.
PUBLISHED = {
    "grpo": (dict(constraint="clip", clip_low=0.2, clip_high=0.2, importance="tis"), {}, {"aggregation": "sequence"}),
    "gdpo": (dict(clip_low=0.2, clip_high=0.2), {"combine": "normalize_then_sum"}, {"aggregation": "sequence"}),
    "clip_higher": (dict(clip_low=0.2, clip_high=0.28), {}, {"aggregation": "sequence"}),
    "atr_grpo": (dict(constraint="kl3", delta=0.02), {}, {"aggregation": "sequence"}),
    "exact_kl": (dict(constraint="kl", delta=0.02, top_k=16), {}, {"aggregation": "sequence"}),
    "dapo": (dict(clip_low=0.2, clip_high=0.28), {"truncated": "penalize", "penalty": 0.5, "overlong": 0.2},
             {"aggregation": "token", "refill_rounds": 3}),
    "dr_grpo": (dict(clip_low=0.2, clip_high=0.2), {"scale": "none"}, {"aggregation": "constant"}),
    "gspo": (dict(level="sequence", clip_low=3e-4, clip_high=4e-4, importance="none"), {}, {"aggregation": "sequence"}),
    "gmpo": (dict(level="geometric", clip_low=1 - math.exp(-0.4), clip_high=math.exp(0.4) - 1), {}, {}),
    "cispo": (dict(constraint="cispo", clip_low=1.0, clip_high=4.0), {}, {"aggregation": "token"}),
    "sapo": (dict(constraint="sapo", tau_positive=1.0, tau_negative=1.05), {}, {}),
    "dppo": (dict(constraint="tv", delta=0.2, old="sampler", old_kl_coef=2e-3, kl="k2"), {"scale": "none"}, {}),
    "distill": (dict(teacher_coef=1.0, reward_coef=0.0, constraint="clip"), {}, {"aggregation": "token"}),
    "self_distill": (dict(teacher_coef=1.0, reward_coef=0.0, constraint="clip"), {}, {"aggregation": "token"}),
    "two_sided": (dict(constraint="clip", dual_clip=4.0), {}, {}),
    "decoupled_ppo": (dict(constraint="clip", clip_low=0.2, clip_high=0.2, importance="full"), {}, {}),
    "icepop": (dict(importance="icepop", importance_low=None, importance_high=None), {}, {}),
    "pass_at_2": (dict(clip_low=0.2, clip_high=0.28), {"pass_k": 2}, {"aggregation": "token"}),
    "rloo": (dict(constraint="none"), {"baseline": "leave_one_out", "scale": "none"}, {"aggregation": "constant"}),
    "lite_ppo": (dict(constraint="clip"), {"baseline": "mean", "scale": "batch_std"}, {"aggregation": "token"}),
    "pass_at_k": (dict(constraint="clip"), {"pass_k": 4, "scale": "group_std"}, {}),
    "maxrl": (dict(clip_low=0.2, clip_high=0.2), {"baseline": "mean", "scale": "group_mean"}, {"aggregation": "token"}),
}  # fmt: skip


def test_presets_are_the_published_methods():
    assert sorted(PUBLISHED) == PRESETS
    for name, (loss_settings, advantage_settings, rest) in PUBLISHED.items():
        cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, "preset": name}))
        loss = cfg.loss.instantiate()
        for built, settings in ((loss, loss_settings), (cfg.advantage, advantage_settings)):
            for key, value in settings.items():
                assert getattr(built, key) == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)
        assert {key: getattr(cfg, key) for key in rest} == rest
        assert loss.kl_coef == loss.entropy_coef == 0.0


def test_presets_differ():
    losses = [load_config(grpo.Config, OmegaConf.create({**NEEDED, "preset": preset})) for preset in PRESETS]
    for cfg in losses:
        cfg.preset = "-"
    assert len({repr(cfg) for cfg in losses}) == len(PRESETS)


def test_preset_from_file_yields_to_custom_loss(tmp_path):
    (tmp_path / "mine.yaml").write_text("loss: {_component_: a.Loss, x: 1, y: 2}\nadvantage: {scale: none}\n")
    given = {**NEEDED, "preset": str(tmp_path / "mine.yaml"), "loss": {"y": 3}}
    cfg = load_config(grpo.Config, OmegaConf.create(given))
    assert cfg.loss == {"_component_": "a.Loss", "x": 1, "y": 3} and cfg.advantage == AdvantageConfig(scale="none")
    for name in ("Reinforce", "torchtune_ext.objective.loss.PolicyLoss"):
        cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, "loss": {"_component_": name}}))
        assert cfg.loss == {"_component_": name}  # nothing is left of the default preset's
    cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, "preset": None, "loss": {"_component_": "A"}}))
    assert cfg.aggregation == "sequence"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: grpo\n", "unknown key 'preset' in preset"),
        ("los: {}\n", "unknown key 'los' in preset"),
        ("- 1\n", "has no config keys"),
        ("a: [\n", "is not valid YAML"),
    ],
)
def test_bad_preset_files_are_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(grpo.Config, OmegaConf.create({**NEEDED, "preset": str(file)}))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"preset": "nothing.yaml"}, "preset=nothing.yaml: file not found"),
        (
            {"preset": "gspo", "loss": {"importance": "tis"}},
            "loss.importance='tis' has one weight per token, but loss.level='sequence'",
        ),
        ({"preset": "atr_grpo", "loss": {"delta": 0}}, "loss.delta=0 must be positive"),
        ({"preset": None}, "loss has no value"),
        ({"loss": None}, "loss has no value"),
        ({"preset": "atr_grpo", "loss": {"delta": "small"}}, "loss.delta='small' must be a number"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(grpo.Config, OmegaConf.create({**NEEDED, **change})).loss.instantiate()


def test_presets_are_listed_and_printed(capsys):
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == PRESETS and all(len(line) < 128 for line in listed)
    assert main(["presets", "gspo"]) == 0
    assert capsys.readouterr().out == FILES["presets/gspo"].read_text()
    with pytest.raises(SystemExit, match="2"):
        main(["presets", "gsop"])
    assert "error: preset='gsop' is unknown; did you mean 'gspo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "node, message",
    [
        (
            {"_component_": "torchtune_ext.objective.loss.PolicyLoss", "clip_low": 2.0},
            r"loss.clip_low=2.0 must lie in \(0, 1\]",
        ),
        (
            {"_component_": "torchtune_ext.objective.loss.PolicyLoss", "clip": 0.2},
            "unknown key 'loss.clip': .*PolicyLoss does not take it; did you mean 'clip_low'",
        ),
        (
            {"_component_": "torchtune_ext.objective.loss.GPROLoss"},
            "`loss:` _component_=torchtune_ext.objective.loss.GPROLoss",
        ),
        ({"_component_": "Mine"}, "`loss:` 'Mine' is not defined in the recipe"),
        ({"clip_low": 0.2}, "`loss:` needs a `_component_`"),
    ],
)
def test_components_that_cannot_be_built_are_named(node, message):
    with pytest.raises(ValueError, match=message):
        Component(node, "loss").instantiate()


def test_nested_config_overrides_recipe_and_keeps_types():
    given = {
        "engine": {"devices": 4, "extra_args": {"a": [1]}},
        "sampling": {"max_tokens": 8, "stop_token_ids": [5, 6]},
    }
    cfg = load_config(grpo.Config, OmegaConf.create({**NEEDED, **given}))
    assert cfg.engine.devices == "4" and cfg.engine.extra_args == {"a": [1]}
    assert cfg.sampling.with_default_stops([1]).stop_token_ids == (5, 6)


@pytest.mark.parametrize("size", [size for size in SIZES if "fp8" in size[0]], ids=lambda size: size[2])
def test_fp8_configs_train_and_sample_in_fp8(size, tmp_path):
    _, cfg = sized(*size[:3], tmp_path)
    assert cfg.precision.flow == "fp8_unified" and cfg.dtype == cfg.engine.dtype == "bfloat16"
    model = build_on_meta(cfg.model.instantiate)
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    shapes = memory.fp8_layer_shapes(model, cfg.precision, trains=True)
    layers = {"Qwen3-8B-Base": 253, "Qwen2.5-7B": 197, "Qwen2.5-32B": 449}[size[2]]
    assert len(linear) == layers and len(shapes) == layers - 1 and "lm_head" not in shapes
    # vLLM cuts whole blocks: in-features of o and down, out-features of the others.
    tensor_parallel = cfg.engine.tensor_parallel_size
    for kind, (out, features) in shapes.items():
        cut = features if kind.endswith(("o_proj", "down_proj")) else out
        assert cut % (128 * tensor_parallel) == 0, kind


def test_the_tiny_fp8_config_is_one_flow():
    _, cfg = loaded("grpo/tiny_fp8")
    assert cfg.precision.flow == "fp8_unified" and cfg.dtype == cfg.engine.dtype == "bfloat16"
