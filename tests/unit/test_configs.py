"""Every shipped config fits the recipe it belongs to, and the models it names can be built."""

import importlib
import re

import pytest
from omegaconf import OmegaConf

from torchtune_ext.catalog import config_files, folder, recipe_of
from torchtune_ext.config import build, instantiate, load_config
from torchtune_ext.sampling.records import EngineConfig, SamplingConfig

CONFIGS = config_files(folder("configs"))


def loaded(name):
    path = CONFIGS[name]
    module = importlib.import_module(f"torchtune_ext.recipes.{recipe_of(name, path)}")
    return module, load_config(module.Config, OmegaConf.load(path))


@pytest.mark.parametrize("name", CONFIGS)
def test_config_fits_its_recipe(name):
    _, cfg = loaded(name)
    if "engine" in cfg:
        engine = build(EngineConfig, cfg.engine, "engine")
        sampling = build(SamplingConfig, cfg.sampling, "sampling")
        assert sampling.max_tokens < engine.max_model_len
        if "row_tokens" in cfg:
            assert engine.max_model_len <= cfg.row_tokens, "a sequence that can be sampled must fit into a row"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("grpo/qwen2_5_0_5B_full", 0.494),
        ("grpo/qwen2_5_7B_full", 7.616),
        ("grpo/qwen2_5_14B_full", 14.770),
        ("grpo/qwen2_5_32B_full", 32.764),
        ("grpo/llama3_1_8B_full", 8.030),
        ("grpo/qwen2_5_7B_lora", 7.696),
        ("grpo/qwen2_5_14B_lora", 14.908),
        ("grpo/qwen2_5_32B_qlora", 33.032),
        ("grpo/llama3_1_8B_lora", 8.114),
    ],
)
def test_dry_run_knows_the_published_sizes(name, billions, capsys):
    module, cfg = loaded(name)
    cfg.dry_run = True
    run = module.recipe_main.__wrapped__
    run(cfg)
    out = capsys.readouterr().out
    assert out.startswith(f"{billions:.3f} B parameters")
    assert "AdamW moments" in out and "published weights" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_step": 3}, "unknown key 'max_step' in the config; did you mean 'max_steps'"),
        ({"seed": "one"}, "seed: Value 'one'"),
        ({"model_dir": "${nothing}"}, "nothing"),
    ],
)
def test_mistakes_are_named(change, message):
    module, _ = loaded("grpo/tiny")
    cfg = OmegaConf.merge(OmegaConf.load(CONFIGS["grpo/tiny"]), OmegaConf.create(change))
    with pytest.raises(ValueError, match=message):
        load_config(module.Config, cfg)


def test_a_missing_value_is_named():
    module, _ = loaded("grpo/tiny")
    cfg = OmegaConf.load(CONFIGS["grpo/tiny"])
    del cfg["output_dir"]
    with pytest.raises(ValueError, match="output_dir has no value; set it in the YAML"):
        load_config(module.Config, cfg)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            {"_component_": "torchtune_ext.objective.loss.GRPOLoss", "clip_low": 2.0},
            r"loss.clip_low=2.0 must lie in \(0, 1\]",
        ),
        (
            {"_component_": "torchtune_ext.objective.loss.GRPOLoss", "clip": 0.2},
            "`loss:` .*arguments that it does not take: .*'clip'",
        ),
        (
            {"_component_": "torchtune_ext.objective.loss.GPROLoss"},
            "`loss:` _component_=torchtune_ext.objective.loss.GPROLoss",
        ),
        ({"_component_": "Mine"}, "`loss:` the recipe that runs defines no 'Mine'"),
        ({"clip_low": 0.2}, "`loss:` needs a `_component_`"),
    ],
)
def test_components_that_cannot_be_built_are_named(node, message):
    with pytest.raises(ValueError, match=message):
        instantiate(OmegaConf.create({"loss": node}).loss)


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        (SamplingConfig, {"temperature": 1.0}, "sampling.max_tokens has no value; set it in the YAML"),
        (SamplingConfig, {"max_tokens": "many"}, "sampling.max_tokens: Value 'many'"),
        (SamplingConfig, {"max_tokens": 1.5}, "sampling.max_tokens: Value '1.5'"),
        (SamplingConfig, {"max_tokens": 8, "stop_token_ids": "x"}, "sampling.stop_token_ids"),
        (
            SamplingConfig,
            {"max_token": 8},
            "unknown key 'sampling.max_token' in `sampling:`; did you mean 'max_tokens'",
        ),
    ],
)
def test_nested_settings_are_checked(record, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(record, OmegaConf.create(values), "sampling")


def test_nested_settings_keep_their_types_and_win_over_what_the_recipe_brings():
    engine = build(EngineConfig, OmegaConf.create({"devices": 4, "extra_args": {"a": [1]}}), "engine")
    assert engine.devices == "4" and engine.extra_args == {"a": [1]}
    values = OmegaConf.create({"max_tokens": 8, "stop_token_ids": [5, 6]})
    sampling = build(SamplingConfig, values, "sampling", stop_token_ids=(1,), seed=3)
    assert sampling.stop_token_ids == (5, 6) and sampling.seed == 3
