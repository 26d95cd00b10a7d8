"""YAML values are compared with the annotations of arguments."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
import torch

from torchtune_ext.recipes import grpo
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.config import load_config, merge_config
from torchtune_ext.settings.yaml_types import require_type

OPTIONAL = Optional[int]  # noqa: UP045 (as in torch)


@pytest.mark.parametrize(
    "value, kind",
    [
        ("x", str), (3, int), (3, float), (0.5, float), (True, bool), (1, bool), (None, int | None), (None, OPTIONAL),
        ("a/b", Path), ("a/b", str | os.PathLike), ([1, 0.5], tuple[float, float]), ([0.9, 0.95], tuple[float | torch.Tensor, float]),
        ([], Sequence[str]), (["a", "b"], tuple[str]), (["a"], list[str]), (["a"], Iterable[str]), ([1, "a"], list), ([[1]], Sequence[Sequence[int]]),
        ({"a": 1}, dict), ({"a": [1]}, Mapping[str, int | Sequence[int]]), (5, int | Sequence[int] | Mapping[int, float]),
        ("q_proj", Literal["q_proj"]), ("x", "Unknown"), (3, Any), (3, torch.dtype), ("my.f", str | Callable), ("my.f", Callable | None),
    ],
)  # fmt: skip
def test_a_value_that_fits_its_annotation_passes(value, kind):
    require_type("task.key", value, kind)


@pytest.mark.parametrize(
    "value, kind, says",
    [
        ({"Format": "a number only"}, str | None, """={'Format': 'a number only'} must be text: quote it, 'k="Format: a number only"'"""),
        ({"Answer": {"question": None}}, str, """must be text: quote it, 'k="Answer: {question}"'"""),
        ({"question": None}, str, """must be text: quote it, 'k="{question}"'"""),
        ({"Only this": None}, str, """must be text: quote it, 'k="Only this:"'"""),
        (False, str, """=False must be text, and YAML reads no, off and false as a boolean: quote it, 'k="no"'"""),
        (42, str, """=42 must be text: quote it, 'k="42"'"""),
        (10.0, Path, """=10.0 must be a path: quote it, 'k="10.0"'"""),
        (["a", "b"], str | Callable, """must be text or a function: quote it if the brackets are part of the text, 'k="[a, b]"'"""),
        (1e6, int, "=1000000.0 must be a whole number: k=1000000"),
        ("10", int | None, "='10' must be a whole number: k=10"),
        ("1e-5", float, "='1e-5' must be a number: k=1e-05"),
        (3, Callable | None, "=3 must be a function"),
        (True, int, "=True must be a whole number"),
        (True, float, "=True must be a number"),
        ("maybe", bool, "='maybe' must be true or false"),
        ("fast", float | torch.Tensor, "='fast' must be a number"),
        ("q_proj", Sequence[str], "='q_proj' must be a list, each item text: k=[q_proj]"),
        ([1], Sequence[str], "=[1] must be a list, each item text"),
        ([0.9], tuple[float, float], "=[0.9] must be a list of 2, each item a number"),
        (True, dict[str, Any] | None, "=True must be a mapping, as in k.NAME=VALUE"),
        ({"a": "x"}, Mapping[str, int], "must be a mapping"),
        ("o_proj", Literal["q_proj", "v_proj"], "='o_proj' must be 'q_proj' or 'v_proj'"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(value, kind, says):
    with pytest.raises(ValueError) as raised:
        require_type("k", value, kind)
    assert says in str(raised.value)


class Odd:
    """Annotations that differ from the types of the defaults, and one only for type checkers."""

    def __init__(self, name: str = 3, limit: int = None, mode: "Mode" = "fast"):  # noqa: F821, RUF013
        pass


def test_value_of_the_type_of_default_passes():
    node = {"_component_": f"{__name__}.Odd", "name": 4, "limit": None, "mode": "slow"}
    assert Component(node, "task").resolve_call()[0] is Odd


@pytest.mark.parametrize(
    "word, text", [("output_dir=no", '"no"'), ("output_dir=1e3", '"1000.0"'), ("precision=on", '"yes"')]
)
def test_recipe_text_that_yaml_misreads_is_refused(word, text):
    key = word.partition("=")[0].replace("precision", "precision.flow")
    with pytest.raises(ValueError, match=rf"{key}=\S+ must be .*: quote it, '{key}={text}'"):
        load_config(grpo.Config, merge_config("grpo/tiny", [word]))
