"""`torchtune-ext config` lists the fields of the sections themselves, and its schema accepts what `load_config` accepts."""

import importlib
import json
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass
from torchtune import _recipe_registry

from torchtune_ext.cli import config, plugin
from torchtune_ext.cli.cli import main
from torchtune_ext.cli.config import find_options, format_options, json_schema
from torchtune_ext.cli.options import REQUIRED_MARK, argument_descriptions, arguments_of, format_yaml, list_options
from torchtune_ext.run.catalog import config_files, package_folder, recipe_files
from torchtune_ext.settings.sections import FORBID_UNKNOWN_KEYS, config_section, nested_section, option_fields

RECIPES = {recipe.name: recipe for recipe in recipe_files(package_folder("recipes"), package_folder("configs"))}


def config_of(name):
    return importlib.import_module(f"torchtune_ext.recipes.{RECIPES[name].path.stem}").Config


@pytest.mark.parametrize("name", RECIPES)
def test_listing_has_every_field_with_description(name):
    listed = {option.name: option for option in list_options(config_of(name))}
    fields = option_fields(config_of(name))
    assert [key for key in listed if "." not in key] == list(fields)
    assert all(option.description for option in listed.values())
    nested = {key: section for key, field in fields.items() if (section := nested_section(field))}
    assert len(nested) >= 3
    for key, section in nested.items():
        assert [each for each in listed if each.startswith(f"{key}.")] == [
            f"{key}.{name}" for name in option_fields(section)
        ]


def test_nested_mapping_has_defaults_of_its_recipe():
    defaults = {option.name: option.default for option in find_options(["warmup_sft", "schedule"])[1]}
    assert defaults == {"schedule": "{...}", "schedule.decay": "cosine", "schedule.warmup": "20"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["grpo_full: ", "  max_steps ", "  loss  ", "  engine.dtype "]),
        (["warmup_sft"], ["warmup_sft: ", "  num_problems  "]),
        (["grpo_lora", "engine"], ["grpo_lora, engine:", "  engine.gpu_memory_utilization  0.85  "]),
        (["engine"], ["grpo_full, engine:"]),
        (["max_steps"], ["  max_steps  (required)  training steps"]),
        (["max_tokens"], ["  sampling.max_tokens  (required)  maximum tokens of a completion"]),
        (["grpo_full", "checkpoints.every"], ["  checkpoints.every  50  steps between checkpoints"]),
        (["schedule.decay"], ["('constant', 'linear' or 'cosine')"]),
        (
            ["clip_low"],
            ["  loss.clip_low  0.2  constraint clip: how far the ratio may fall below 1; constraint cispo: "],
        ),
        (["importance_high"], ["  loss.importance_high  null  upper bound of the importance weight"]),
        (["lora_alpha"], ["  model.lora_alpha  16.0  an adapter's output is scaled by lora_alpha / lora_rank"]),
        (["lr"], ["  optimizer.lr  0.001  learning rate"]),
        (
            ["count"],
            ["  engine.count  null ", "  task.count    null  number of questions; null: all", "[Jsonl, Math]"],
        ),
        (["loss"], ["  loss  ", "  loss.entropy_coef  "]),
        (["evaluate", "task"], ["  task.dataset  ", "  task.kernels  "]),
        (["evaluation.task.count"], ["  task.count  null  number of questions; null: all"]),
        (["Math"], ["  task.format_reward  "]),
    ],
)
def test_config_prints_requested_options(words, expected, capsys):
    assert main(["config", *words]) == 0
    out = capsys.readouterr().out
    assert not [text for text in expected if text not in out], out
    assert main(["knobs", *words]) == 0  # the name before
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enigne"], "enigne: neither a recipe nor a config key of grpo_full; did you mean engine?"),
        (["grpo_ful"], "did you mean grpo_full?"),
        (["warmup_sft", "batch_problem"], "config key of warmup_sft; did you mean batch_problems?"),
        (["engine.dtpe"], "did you mean engine.dtype?"),
        (["max_token"], "did you mean sampling.max_tokens?"),
        (["gate"], "did you mean max_mismatch?"),
        (["learning_rate"], "did you mean optimizer.lr?"),
        (["zzz"], "`torchtune-ext config grpo_full` lists the keys"),
        (["nothing.py"], "nothing.py: file not found"),
        (["grpo_full", "engine", "dtype"], "give a recipe, a config key, or both"),
        (["--schema", "engine"], "--schema engine: expected a recipe"),
    ],
)
def test_config_unknown_argument_is_an_error(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["config", *words])
    assert message in capsys.readouterr().err


def test_config_lists_copied_recipe(tmp_path, monkeypatch, capsys):
    text = RECIPES["grpo_full"].path.read_text()
    (tmp_path / "my_grpo.py").write_text(
        text.replace("    max_steps: int", '    mine: int = Field(3, description="is new")\n    max_steps: int')
    )
    monkeypatch.chdir(tmp_path)
    assert main(["config", "my_grpo.py"]) == 0
    assert "is new" in capsys.readouterr().out
    assert main(["config", "my_grpo.py", "engine"]) == 0
    assert "engine.dtype" in capsys.readouterr().out


def test_config_listing_fits_terminal_one_key_per_line():
    title, listed = find_options(["grpo_full"])
    long = format_options(title, listed).splitlines()
    assert len(long) == 1 + len(listed)
    short = format_options(title, listed, width=80).splitlines()
    assert len(short) > len(long) and max(map(len, short)) <= 80
    assert " ".join(" ".join(short).split()) == " ".join(" ".join(long).split())


@config_section("inner")
class Inner:
    needed: int = Field(description="n")
    many: tuple[str, ...] = Field(default=(), description="m")


@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)
class Mine:
    inner: Inner = Field(description="i")
    own: Inner = Field(default=Inner(needed=7, many=("a b",)), description="o")
    made: dict = Field(default_factory=lambda: {"x": (1, True)}, description="d")


def test_options_show_defaults_as_yaml():
    assert [(option.name, option.default, option.description) for option in list_options(Mine)] == [
        ("inner", "{...}", "i"),
        ("inner.needed", REQUIRED_MARK, "n"),
        ("inner.many", "[]", "m"),
        ("own", "{...}", "o"),
        ("own.needed", "7", "n"),
        ("own.many", '["a b"]', "m"),
        ("made", "{x: [1, true]}", "d"),
    ]
    assert format_yaml({"a": [None, True, 1.5, "x/y", ""]}) == '{a: [null, true, 1.5, x/y, ""]}'


class Base:
    """A base.

    Args:
        first, last: ends of
            the range; None: all.
    """


class Derived(Base):
    """A class.

    Args:
        first: as in `Base`.
        last: see `Base`. The default is the number of items.
        **rest: not a key.

    Raises:
        UsageError: never.
    """

    def __init__(self, first: int, last: int | None = None, **rest):
        pass


def test_arguments_are_described_by_docstrings(monkeypatch):
    monkeypatch.setattr(f"{__name__}.Derived.__module__", "torchtune_ext.cli")
    monkeypatch.setattr("torchtune_ext.cli.Base", Base, raising=False)
    monkeypatch.setattr(Base, "__module__", "torchtune_ext.cli")
    assert argument_descriptions(Derived) == {
        "first": "ends of the range; null: all.",
        "last": "ends of the range; null: all. The default is the number of items.",
        "**rest": "not a key.",
    }
    listed = arguments_of("task", f"{__name__}.Derived")
    assert [(each.name, each.default, each.values) for each in listed] == [
        ("task.first", REQUIRED_MARK, "a whole number"),
        ("task.last", "null", "a whole number or null"),
    ]


def test_optimizer_arguments_are_one_sentence():
    described = {each.name: each.description for each in arguments_of("optimizer", "torch.optim.AdamW")}
    assert described["optimizer.weight_decay"] == "weight decay coefficient" and "optimizer.params" not in described
    assert all(described.values()) and "(default" not in str(described)


def test_schema_accepts_every_shipped_config():
    count = 0
    for recipe in RECIPES.values():
        schema = json_schema(config_of(recipe.name))
        Draft202012Validator.check_schema(schema)
        for name in recipe.configs:
            cfg = OmegaConf.to_container(OmegaConf.load(config_files(package_folder("configs"))[name]))
            assert not list(Draft202012Validator(schema).iter_errors(cfg)), name
            count += 1
    assert count > 25


@pytest.mark.parametrize(
    ("given", "valid"),
    [
        ({"max_steps": "${oc.env:STEPS}", "precision": "bf16", "engine": "${other}"}, True),
        ({"precision": {"flow": "fp8_unified"}, "evaluation": {"task": None}}, True),
        ({"max_step": 3}, False),
        ({"max_steps": 0}, False),
        ({"max_steps": "many"}, False),
        ({"engine": {"dtype": "float8"}}, False),
        ({"engine": {"enigne": 1}}, False),
        ({"precision": "fp8"}, False),
        ({"task": "my_task.Sums"}, False),
    ],
)
def test_schema_refuses_what_load_config_refuses(given, valid):
    assert Draft202012Validator(json_schema(config_of("grpo_full"))).is_valid(given) == valid


@pytest.mark.parametrize(
    ("recipe", "words", "listed"),
    [
        ("grpo_full", ["--help"], True),
        ("grpo_full", ["--config", "grpo/tiny", "-h"], True),
        ("grpo_full", ["--config", "grpo/tiny"], False),
        ("full_finetune_single_device", ["--help"], False),
    ],
)
def test_tune_run_help_lists_our_config_keys(recipe, words, listed, capsys):
    class Run:
        def _run_cmd(self, args):
            print("theirs")

    plugin.wrap_tune_run(SimpleNamespace(Run=Run, get_all_recipes=_recipe_registry.get_all_recipes))
    Run()._run_cmd(Namespace(recipe=recipe, recipe_args=words, nnodes="1", nproc_per_node="1"))
    out = capsys.readouterr().out
    if listed:
        assert out.startswith(
            "usage: tune run [TORCHRUN-OPTIONS] grpo_full --config CONFIG [key=value ...]\n\ngrpo_full: "
        )
    else:
        assert out == "theirs\n"


def test_real_tune_run_prints_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune"])
    assert main(["run", "grpo_full", "--help"]) == 0
    assert "  samples_per_prompt " in capsys.readouterr().out


def test_schema_command_prints_json(capsys):
    assert main(["config", "--schema", "evaluate"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema(config.config_class("evaluate"))
