"""`torchtune-ext knobs` says what there is: the same names and defaults as the classes themselves, each with a text."""

import importlib
import sys
from argparse import Namespace
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import omegaconf
import pytest
from tables import every_row
from torchtune import _recipe_registry

from torchtune_ext.cli import knobs, plugin
from torchtune_ext.cli.cli import main
from torchtune_ext.cli.knobs import NEEDED, as_yaml, fields_of
from torchtune_ext.run.catalog import folder, recipe_files

RECIPES = {recipe.name: recipe for recipe in recipe_files(folder("recipes"), folder("configs"))}


def default_of(spec: Any) -> str:
    """What a field of a dataclass should be listed with."""
    value = spec.default_factory() if spec.default_factory is not MISSING else spec.default
    return NEEDED if value is MISSING or value == omegaconf.MISSING else as_yaml(value)


def config_of(name: str) -> type:
    return importlib.import_module(f"torchtune_ext.recipes.{RECIPES[name].path.stem}").Config


@every_row("name", RECIPES)
def test_the_list_of_a_recipe_is_its_dataclass(name):
    listed = {knob.name: knob for knob in knobs.knobs_of(name)}
    top, nodes = [knob for knob in listed if "." not in knob], 0
    assert top == [spec.name for spec in fields(config_of(name))] and all(knob.text for knob in listed.values())
    for spec in fields(config_of(name)):
        if not is_dataclass(spec.type):
            assert listed[spec.name].default == default_of(spec)
            continue
        nodes += 1
        assert [knob for knob in listed if knob.startswith(f"{spec.name}.") and knob.count(".") == 1] == [
            f"{spec.name}.{field.name}" for field in fields(spec.type)
        ]
    assert nodes >= 3


def test_a_node_has_the_defaults_of_its_recipe():
    defaults = {knob.name: knob.default for knob in knobs.listing(["warmup_sft", "schedule"])[1]}
    assert defaults == {"schedule": "{...}", "schedule.decay": "cosine", "schedule.warmup": "20"}


@every_row(
    "words, expected",
    [
        ([], ["grpo_full: ", "  max_steps ", "  loss  ", "  engine.dtype "]),
        (["warmup_sft"], ["warmup_sft: ", "  num_problems  "]),
        (["grpo_lora", "engine"], ["grpo_lora, engine:", "  engine.gpu_memory_utilization  0.85  "]),
        (["engine"], ["grpo_full, engine:"]),
        (["max_steps"], ["  max_steps  (needed)  steps of sample"]),
        (["max_tokens"], ["  sampling.max_tokens  (needed)  tokens of a completion at most"]),
        (["grpo_full", "checkpoints.every"], ["  checkpoints.every  50  steps between checkpoints"]),
    ],
)
def test_what_is_asked_for_is_printed(words, expected, capsys):
    assert main(["knobs", *words]) == 0
    out = capsys.readouterr().out
    assert not [text for text in expected if text not in out], out


@every_row(
    "words, message",
    [
        (["enigne"], "enigne is no recipe, and no knob of grpo_full; did you mean engine?"),
        (["grpo_ful"], "did you mean grpo_full?"),
        (["warmup_sft", "batch_problem"], "no knob of warmup_sft; did you mean batch_problems?"),
        (["engine.dtpe"], "did you mean engine.dtype?"),
        (["max_token"], "did you mean sampling.max_tokens?"),
        (["zzz"], "`torchtune-ext knobs grpo_full` lists the knobs"),
        (["nothing.py"], "nothing.py: no such file"),
        (["grpo_full", "engine", "dtype"], "give a recipe, a knob, or a recipe and a knob"),
    ],
)
def test_a_word_that_means_nothing_is_named(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["knobs", *words])
    assert message in capsys.readouterr().err


def test_a_copied_recipe_is_listed_too(tmp_path, monkeypatch, capsys):
    text = (
        RECIPES["grpo_full"]
        .path.read_text()
        .replace("max_steps: int = MISSING", "mine: int = 3  # is new\n    max_steps: int = MISSING")
    )
    (tmp_path / "my_grpo.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["knobs", "my_grpo.py"]) == 0
    assert "is new" in capsys.readouterr().out
    assert main(["knobs", "my_grpo.py", "engine"]) == 0
    assert "engine.dtype" in capsys.readouterr().out


def test_lines_fit_the_terminal_and_pipes_get_one_line_each():
    title, listed = knobs.listing(["grpo_full"])
    long = knobs.rendered(title, listed).splitlines()
    assert len(long) == 1 + len(listed)
    short = knobs.rendered(title, listed, width=80).splitlines()
    assert len(short) > len(long) and max(map(len, short)) <= 80
    assert " ".join(" ".join(short).split()) == " ".join(" ".join(long).split())


LIMIT = 7


@dataclass
class Base:
    first: int = 1  # behind
    moved: str = "a b"  # replaced


class Plain:
    not_a_field: int = 0


@dataclass
class Mine(Base, Plain):
    # Above,
    # in two lines.
    above: float | None = None
    named: int = LIMIT  # a name
    made: dict = field(default_factory=lambda: {"x": (1, True)})  # made
    empty: list = field(default_factory=list)  # umlaut: ü
    moved: str = "c"  # here


def test_defaults_of_every_form_are_read():
    assert [(knob.name, knob.default, knob.text) for knob in fields_of(Mine)] == [
        ("first", "1", "behind"),
        ("moved", "c", "here"),
        ("above", "null", "Above, in two lines."),
        ("named", "7", "a name"),
        ("made", "{x: [1, true]}", "made"),
        ("empty", "[]", "umlaut: ü"),
    ]


@dataclass
class Known:
    needed: int
    text: str = "a b"
    many: list = field(default_factory=list)


def test_the_words_for_defaults_are_those_of_yaml():
    assert [default_of(spec) for spec in fields(Known)] == [NEEDED, '"a b"', "[]"]
    assert as_yaml({"a": [None, True, 1.5, "x/y", ""]}) == '{a: [null, true, 1.5, x/y, ""]}'


@pytest.mark.parametrize(
    ("recipe", "words", "listed"),
    [
        ("grpo_full", ["--help"], True),
        ("grpo_full", ["--config", "grpo/tiny", "-h"], True),
        ("grpo_full", ["--config", "grpo/tiny"], False),
        ("full_finetune_single_device", ["--help"], False),
    ],
)
def test_help_of_tune_run_lists_the_knobs_of_our_recipes(recipe, words, listed, capsys):
    class Run:
        def _run_cmd(self, args):
            print("theirs")

    plugin.guide(SimpleNamespace(Run=Run, get_all_recipes=_recipe_registry.get_all_recipes))
    Run()._run_cmd(Namespace(recipe=recipe, recipe_args=words, nnodes="1", nproc_per_node="1"))
    out = capsys.readouterr().out
    if listed:
        assert out.startswith(
            "usage: tune run [TORCHRUN-OPTIONS] grpo_full --config CONFIG [key=value ...]\n\ngrpo_full: "
        )
    else:
        assert out == "theirs\n"


def test_the_real_tune_run_prints_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune"])
    assert main(["run", "grpo_full", "--help"]) == 0
    assert "  samples_per_prompt " in capsys.readouterr().out
