"""The keys and the code that docs/how_to/algorithms.md shows are those of the objective."""

import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import yaml

from helpers.page_commands import blocks
from torchtune_ext.objective.constraints import CONSTRAINTS
from torchtune_ext.objective.importance import IMPORTANCE_METHODS
from torchtune_ext.objective.loss import PolicyLoss, Tokens, loss_requirements
from torchtune_ext.pipeline.advantages import AdvantageConfig
from torchtune_ext.recipes import grpo


@pytest.fixture
def page(repo_root):
    return repo_root / "docs" / "how_to" / "algorithms.md"


def block(page, language, start):
    """Returns the one block of a language that contains `start`."""
    (text,) = [text for kind, text in blocks(page) if kind == language and start in text]
    return text


def test_page_keys_are_the_defaults(page):
    text = block(page, "yaml", "aggregation:")
    shown = yaml.safe_load(text)
    loss = {key: value for key, value in shown["loss"].items() if key != "_component_"}
    assert PolicyLoss(**loss) == PolicyLoss(importance="tis")
    assert AdvantageConfig(**shown["advantage"]) == AdvantageConfig()
    assert set(shown["advantage"]) == {field.name for field in fields(AdvantageConfig)}
    optional = re.findall(r"^  # (\w+):", text, re.MULTILINE)
    assert {*loss, *optional} == {field.name for field in fields(PolicyLoss)}
    defaults = {field.name: field.default for field in fields(grpo.Config)}
    assert (shown["aggregation"], shown["refill_rounds"]) == tuple(
        getattr(defaults[key], "default", defaults[key]) for key in ("aggregation", "refill_rounds")
    )
    for names, key in ((CONSTRAINTS, "constraint"), (IMPORTANCE_METHODS, "importance")):
        (comment,) = re.findall(rf"^  {key}: \w+ +# (.*)$", text, re.MULTILINE)
        assert comment.split(", ") == list(names)


def test_page_table_names_every_field_of_tokens(page):
    table = page.read_text(encoding="utf-8").partition("| field of `Tokens` |")[2].partition("\n\n")[0]
    named = [name for cells in re.findall(r"^\|(.*?)\|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", cells)]
    assert sorted(named) == sorted(field.name for field in fields(Tokens))


def test_page_code_defines_loss_constraint_and_advantage(page):
    names: dict[str, Any] = {"np": np}
    for start in ("def group_relative_advantages", "class Unclipped", "class Push"):
        exec(block(page, "python", start), names)
    assert PolicyLoss(constraint="push", delta=0.05).delta == 0.05
    assert names["group_relative_advantages"](np.array([1.0, 0.0, 1.0, 1.0])).tolist() == [0.0, -1.0, 0.0, 0.0]
    assert loss_requirements(names["Unclipped"]()).proximal_logprobs
    del CONSTRAINTS["push"]


def test_page_names_line_of_the_advantage_function(repo_root):
    page = (repo_root / "docs" / "how_to" / "algorithms.md").read_text()
    (line,) = re.findall(r"my_grpo\.py:(\d+)", page)
    recipe = (repo_root / "recipes" / "grpo.py").read_text().splitlines()
    assert recipe[int(line) - 1].startswith("def group_relative_advantages(")
