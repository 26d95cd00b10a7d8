"""Every argument that a YAML gives to a `_component_`, in configs/ and in the pages of docs/, is one that it takes."""

import importlib
import inspect
import re

import pytest
import yaml
from omegaconf import OmegaConf

from helpers.nodes import component
from torchtune_ext.run.catalog import config_files
from torchtune_ext.settings.yaml_types import require_type


def nodes(tree, where=""):
    """Yields (place, node) of all nodes with a `_component_`."""
    if isinstance(tree, dict):
        if "_component_" in tree:
            yield where, tree
        for key, value in tree.items():
            yield from nodes(value, f"{where}.{key}".lstrip("."))


def check(tree):
    components = list(nodes(tree))
    for where, node in components:
        module, _, name = node["_component_"].rpartition(".")
        if not module or module.startswith("my_"):  # a component in a file of the user
            continue
        component = getattr(importlib.import_module(module), name)
        given = {key: value for key, value in node.items() if key != "_component_"}
        try:
            bound = inspect.signature(component, eval_str=True).bind_partial(**given)
            for key, value in bound.arguments.items():
                # A reference has another type than its value.
                if "${" not in str(value):
                    require_type(key, value, bound.signature.parameters[key].annotation)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{where}: {node['_component_']}: {error}") from None
    return len(components)


def test_configs_pass_only_valid_component_arguments(repo_root):
    for name, path in config_files(repo_root / "configs").items():
        try:
            check(OmegaConf.to_container(OmegaConf.load(path)))
        except AssertionError as error:
            raise AssertionError(f"configs/{name}.yaml: {error}") from None


def test_docs_pass_only_valid_component_arguments(repo_root):
    pages = [repo_root / "README.md", *sorted((repo_root / "docs").rglob("*.md"))]
    count = 0
    for page in pages:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
            if language in ("", "yaml") and "_component_" in block:
                try:
                    count += check(OmegaConf.to_container(OmegaConf.create(block)))
                except (AssertionError, yaml.YAMLError) as error:
                    raise AssertionError(f"{page.name}: {error} in\n{block}") from None
    assert count > 5


@pytest.mark.parametrize("wrong", ["preset", "pathh"])
def test_invalid_component_argument_is_detected(wrong):
    tree = {"task": {"_component_": "torchtune_ext.tasks.math.Math", wrong: "aime2024"}}
    with pytest.raises(AssertionError, match=f"task: .*Math: got an unexpected keyword argument '{wrong}'"):
        check(tree)


def test_an_argument_of_another_kind_is_found():
    with pytest.raises(AssertionError, match="task: .*Math: count='8' must be a whole number: count=8"):
        check({"task": {"_component_": "torchtune_ext.tasks.math.Math", "count": "8"}})


GENERATED = (
    "torchtune_ext.tasks.temporal_clue.TemporalClue",
    "torchtune_ext.tasks.arithmetic.Arithmetic",
    "torchtune_ext.measured.matmul.Matmul",
)


def test_tasks_that_read_no_file_can_be_made(repo_root):
    count = 0
    for name, path in config_files(repo_root / "configs").items():
        cfg = OmegaConf.load(path)
        for where in ("task", "evaluation.task"):
            node = OmegaConf.select(cfg, where)
            if node is None or node._component_ not in GENERATED or "path" in node:
                continue
            try:
                assert len(component(node).instantiate()) != 0
            except ValueError as error:
                raise AssertionError(f"configs/{name}.yaml: {where}: {error}") from None
            count += 1
    assert count > 10
