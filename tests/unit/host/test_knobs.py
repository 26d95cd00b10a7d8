"""`torchtune-ext knobs` says what there is: the same names and defaults as the classes themselves, each with a text."""

import importlib
import inspect
import subprocess
import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import omegaconf
import pytest

import torchtune_ext
from torchtune_ext.host import knobs
from torchtune_ext.host.cli import main
from torchtune_ext.host.knobs import NEEDED, as_yaml, component, fields_of, options_of
from torchtune_ext.run.catalog import folder, recipe_files

PACKAGE = Path(torchtune_ext.__file__).parent
RECIPES = {recipe.name: recipe for recipe in recipe_files(folder("recipes"), folder("configs"))}


def default_of(spec: Any) -> str:
    """What a field of a dataclass should be listed with."""
    value = spec.default_factory() if spec.default_factory is not MISSING else spec.default
    return NEEDED if value is MISSING or value == omegaconf.MISSING else as_yaml(value)


def named(listed: list) -> list[tuple[str, str]]:
    return [(knob.name, knob.default) for knob in listed]


@pytest.mark.parametrize("name", RECIPES)
def test_the_list_of_a_recipe_is_its_dataclass(name):
    path = RECIPES[name].path
    module = importlib.import_module(f"torchtune_ext.recipes.{path.stem}")
    listed = knobs.knobs_of(path)
    assert named(listed) == [(spec.name, default_of(spec)) for spec in fields(module.Config)]
    assert all(knob.text for knob in listed)


@pytest.mark.parametrize("name", sorted({recipe.path.stem: recipe.name for recipe in RECIPES.values()}.values()))
def test_the_keys_of_every_node_are_the_fields_of_its_dataclass(name):
    path = RECIPES[name].path
    seen = 0
    for knob in knobs.knobs_of(path):
        record = knobs.node_class(knob, path)
        assert record is not None or not knob.type.startswith("dict"), (
            f"{knob.name}: its text should say `fields of NAME`"
        )
        if record is None:
            continue
        module = ".".join(record.path.relative_to(PACKAGE).with_suffix("").parts)
        known = getattr(importlib.import_module(f"torchtune_ext.{module}"), record.node.name)
        listed = fields_of(record)
        assert named(listed) == [(spec.name, default_of(spec)) for spec in fields(known)]
        assert not [knob.name for knob in listed if not knob.text], record.node.name
        seen += 1
    assert seen >= 3


def test_the_arguments_of_every_component_of_the_configs_are_listed():
    seen = set()
    for recipe in RECIPES.values():
        for knob in knobs.knobs_of(recipe.path):
            if not knobs.is_component(knob):
                continue
            found = knobs.components(knob, recipe.path)
            assert found, f"no config says what {knob.name} of {recipe.name} may be"
            for path in found:
                module, _, name = path.rpartition(".")
                taken = inspect.signature(getattr(importlib.import_module(module), name)).parameters
                described = component(path)
                options = {key.name for part in options_of(described.definition).values() for key in part}
                listed = {key.name for key in described.knobs} | options
                assert listed == set(taken) - {"params"}, path
                if path.startswith("torchtune_ext."):
                    assert not [key.name for key in described.knobs if not key.text], path
                seen.add(path)
    assert {"torch.optim.AdamW", "torchtune_ext.objective.loss.PolicyLoss", "torchtune_ext.tasks.math.Math"} <= seen


def test_options_of_constraints_have_their_own_defaults():
    from torchtune_ext.objective.constraints import CONSTRAINTS

    parts = options_of(component("torchtune_ext.objective.loss.PolicyLoss").definition)
    assert [title.split()[1] for title in parts] == list(CONSTRAINTS)
    for listed, kind in zip(parts.values(), CONSTRAINTS.values(), strict=True):
        assert named(listed) == [(spec.name, default_of(spec)) for spec in fields(kind)]
        assert all(knob.text for knob in listed), kind


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["grpo_full has ", "  max_steps ", "  loss  ", "(preset)"]),
        (["warmup_sft"], ["warmup_sft has ", "  num_problems  "]),
        (["grpo_lora", "engine"], ["grpo_lora, engine: ", "  engine.gpu_memory_utilization  0.85  "]),
        (["engine"], ["grpo_full, engine: "]),
        (["max_steps"], ["  max_steps  (needed)  steps of sample"]),
        (["max_tokens"], ["  sampling.max_tokens  (needed)  tokens of a completion at most"]),
        (["grpo_full", "checkpoints.every"], ["  checkpoints.every  50  steps between checkpoints"]),
        (
            ["loss"],
            [
                "objective per label; the default preset sets {importance: tis}",
                "  loss.kl_coef ",
                "with constraint: kl3",
                "  loss.delta      0.02",
            ],
        ),
        (["task"], ["torchtune_ext.tasks.temporal_clue.TemporalClue", "  task.cache_dir "]),
        (["torchtune_ext.tasks.jsonl.Jsonl"], ["  grader        null ", "dotted path of a function"]),
    ],
)
def test_what_is_asked_for_is_printed(words, expected, capsys):
    assert main(["knobs", *words]) == 0
    out = capsys.readouterr().out
    assert not [text for text in expected if text not in out], out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["enigne"], "enigne is no recipe, and no knob of grpo_full; did you mean engine?"),
        (["grpo_ful"], "did you mean grpo_full?"),
        (["warmup_sft", "batch_problem"], "no knob of warmup_sft; did you mean batch_problems?"),
        (["engine.dtpe"], "did you mean engine.dtype?"),
        (["max_token"], "did you mean max_tokens?"),
        (["zzz"], "`torchtune-ext knobs grpo_full` lists the knobs"),
        (["nothing.py"], "nothing.py: no such file"),
        (["torchtune_ext.tasks.math.Mth"], "math.py defines no class or function Mth"),
        (["torchtune_ext.nothing.Math"], "there is no module torchtune_ext.nothing"),
        (["grpo_full", "engine", "dtype"], "give a recipe, a knob, or a recipe and a knob"),
    ],
)
def test_a_word_that_means_nothing_is_named(words, message, capsys):
    assert main(["knobs", *words]) == 2
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
    section = knobs.overview("grpo_full", RECIPES["grpo_full"].path)
    long = knobs.rendered([section]).splitlines()
    assert len(long) == 1 + len(section.knobs)
    short = knobs.rendered([section], width=80).splitlines()
    assert len(short) > len(long) and max(map(len, short)) <= 80
    assert " ".join(" ".join(short).split()) == " ".join(" ".join(long).split())


def test_nothing_that_is_listed_is_imported():
    code = (
        "import sys; from torchtune_ext.host.cli import main; status = main(['knobs', 'grpo_full', 'optimizer']); "
        "print(status, sorted({'torch', 'vllm', 'torchtune', 'omegaconf', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "optimizer.weight_decay" in done.stdout and done.stdout.endswith("0 []\n")


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    command = [sys.executable, "-m", "torchtune_ext", "knobs", "task"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 0


def test_defaults_of_every_form_are_read(tmp_path):
    source = '''
from dataclasses import dataclass, field

LIMIT = 7


@dataclass
class Base:
    first: int = 1  # behind
    moved: str = "a b"  # replaced


class Plain:
    not_a_field: int = 0


@dataclass
class Mine(Base, Plain):
    """A record.

    Args:
        told: in the docstring,
            on two lines.
    """

    # Above,
    # in two lines.
    above: float | None = None
    named: int = LIMIT  # a name
    made: dict = field(default_factory=lambda: {"x": (1, True)})  # made
    empty: list = field(default_factory=list)  # umlaut: ü
    told: int = 2 * 3
    moved: str = "c"  # here
'''
    (tmp_path / "mine.py").write_text(source)
    found = fields_of(knobs.class_of("Mine", tmp_path / "mine.py"))
    assert [(knob.name, knob.default, knob.text) for knob in found] == [
        ("first", "1", "behind"),
        ("moved", "c", "here"),
        ("above", "null", "Above, in two lines."),
        ("named", "7", "a name"),
        ("made", "{x: [1, true]}", "made"),
        ("empty", "[]", "umlaut: ü"),
        ("told", "2 * 3", "in the docstring, on two lines."),
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

    knobs.offer_help(SimpleNamespace(Run=Run))
    Run()._run_cmd(SimpleNamespace(recipe=recipe, recipe_args=words))
    out = capsys.readouterr().out
    if listed:
        assert out.startswith(
            "usage: tune run [TORCHRUN-OPTIONS] grpo_full --config CONFIG [key=value ...]\n\ngrpo_full has "
        )
    else:
        assert out == "theirs\n"


def test_the_real_tune_run_prints_it(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune"])
    assert main(["run", "grpo_full", "--help"]) == 0
    assert "  samples_per_prompt " in capsys.readouterr().out
