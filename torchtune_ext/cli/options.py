"""The config keys of a recipe and the arguments of the usual components, with defaults and descriptions.

`torchtune-ext config` prints them, and scripts/reference.py writes docs/reference/config.md from
them. Keys are fields of the recipe's `Config` and of its nested sections. Arguments and their
descriptions come from signatures and from the section `Args:` of docstrings.
"""

import inspect
import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from types import NoneType
from typing import Any

from torchtune_ext.run.catalog import import_object
from torchtune_ext.run.errors import UsageError
from torchtune_ext.settings.components import Component, argument_parameters, import_recipe
from torchtune_ext.settings.sections import nested_section, option_fields
from torchtune_ext.settings.yaml_types import expected_text, kinds_text, union_members

# Section -> the usual components, the most usual first.
USUAL_COMPONENTS = {
    "model": ["torchtune_ext.policy.from_config"],
    "tokenizer": ["torchtune_ext.chat.ChatTokenizer"],
    "loss": ["torchtune_ext.objective.loss.PolicyLoss"],
    "optimizer": ["torch.optim.AdamW"],
    "task": [
        "torchtune_ext.tasks.jsonl.Jsonl",
        "torchtune_ext.tasks.math.Math",
        "torchtune_ext.tasks.temporal_clue.TemporalClue",
        "torchtune_ext.tasks.arithmetic.Arithmetic",
        "torchtune_ext.tasks.guess_number.GuessNumber",
        "torchtune_ext.tasks.reasoning_gym.ReasoningGym",
        "torchtune_ext.tasks.reasoning_gym.ReasoningGymCurriculum",
        "torchtune_ext.tasks.tool_class.ToolClass",
        "torchtune_ext.tasks.skyrl_gym.SkyRLGym",
        "torchtune_ext.tasks.textarena.TextArena",
        "torchtune_ext.tasks.selection.NearLevel",
        "torchtune_ext.measured.matmul.Matmul",
        "torchtune_ext.measured.matmul.CompileAndFix",
    ],
}
REQUIRED_MARK = "(required)"  # shown for a key that has no default
# An entry of `Args:`, such as "first, seed: ...", or "lr (float, optional): ..." of torch.
_ENTRY = re.compile(r"(\**\w+(?:, \**\w+)*)(?: \(.*?\))?:(?: (.*)|$)")
# A description that refers to the same argument of another class.
_REFERENCE = re.compile(r"(?:see|as in) `(\w+)`\.\s*")
_YAML_WORDS = {"None": "null", "True": "true", "False": "false"}


@dataclass(frozen=True, slots=True)
class Option:
    """A config key, or an argument of a component."""

    name: str  # dotted if the key is in a section
    default: str  # in YAML, or REQUIRED_MARK
    description: str
    values: str = ""  # type or permitted values
    is_component: bool = False  # whether `_component_` names a class
    components: tuple[str, ...] = ()  # names of the classes that take the argument; empty: a key of the recipe


def config_class(recipe: str) -> type:
    """Returns the class `Config` of a recipe.

    Args:
        recipe: name of one of our recipes, or the file of another recipe.

    Raises:
        UsageError: the recipe has no `Config`.
    """
    config: Any = getattr(import_recipe(recipe, ""), "Config", None)
    if not hasattr(config, "__pydantic_fields__"):
        raise UsageError(f"{recipe}: not a recipe; expected a pydantic dataclass `Config` in it")
    return config


def recipe_options(recipe: str) -> list[Option]:
    """Returns the keys of a recipe, and after each component the arguments of the usual classes."""
    options = []
    for option in list_options(config_class(recipe)):
        options.append(option)
        arguments = []
        for path in USUAL_COMPONENTS.get(option.name, ()) if option.is_component else ():
            # A class is left out if the package that it needs is not installed.
            with suppress(UsageError):
                arguments += arguments_of(option.name, path)
        options += _merged(arguments)
    return options


def list_options(section: type, default: Any = None, prefix: str = "") -> list[Option]:
    """Returns the keys of a section; the instance `default`, if given, supplies the defaults."""
    options = []
    for name, field in option_fields(section).items():
        required = field.is_required() and default is None
        value = getattr(default, name, None) if default is not None else field.get_default(call_default_factory=True)
        description = field.description or ""
        if (nested := nested_section(field)) is not None:
            options.append(Option(f"{prefix}{name}", "{...}", description, "section"))
            options += list_options(nested, None if required else value, f"{prefix}{name}.")
        else:
            kinds = union_members(field.annotation)
            values = "component" if (is_component := Component in kinds) else expected_text(field)
            values += " or null" if NoneType in kinds else ""
            text = REQUIRED_MARK if required else format_yaml(value)
            options.append(Option(f"{prefix}{name}", text, description, values, is_component))
    return options


def arguments_of(section: str, path: str) -> list[Option]:
    """Returns the arguments of the class or function at a dotted path as keys of a section."""
    component, owner = import_object(path, section), path.rpartition(".")[2]
    if owner == "PolicyLoss":
        return _loss_arguments(section, component)
    described = argument_descriptions(component)
    options = []
    for name, parameter in argument_parameters(component).items():
        # The recipe passes the parameters of the model. Other arguments without a name are not keys.
        if name == "params" or parameter.kind is parameter.VAR_KEYWORD:
            continue
        required = parameter.default is parameter.empty
        default = REQUIRED_MARK if required else format_yaml(parameter.default)
        values = kinds_text(parameter.annotation)
        options.append(Option(f"{section}.{name}", default, described.get(name, ""), values, components=(owner,)))
    return options


def _loss_arguments(section: str, loss: type) -> list[Option]:
    """Returns the arguments of `PolicyLoss`. Options of a constraint have its default and description."""
    from torchtune_ext.objective.constraints import CONSTRAINTS

    described, options = argument_descriptions(loss), []
    for name, parameter in argument_parameters(loss).items():
        owners = {key: kind for key, kind in CONSTRAINTS.items() if name in {field.name for field in fields(kind)}}
        # An option that the default constraint lacks has the default of the first constraint with it.
        default = format_yaml(getattr(next(iter(owners.values())), name) if owners else parameter.default)
        texts: dict[str, list[str]] = {}
        for key, kind in owners.items():
            value = format_yaml(getattr(kind, name))
            other = "" if value == default else f" (default {value})"
            texts.setdefault(argument_descriptions(kind)[name].rstrip(".") + other, []).append(key)
        text = "; ".join(f"constraint {', '.join(keys)}: {text}" for text, keys in texts.items()) or described[name]
        values = kinds_text(parameter.annotation)
        options.append(Option(f"{section}.{name}", default, text, values, components=(loss.__name__,)))
    return options


def argument_descriptions(component: Any) -> dict[str, str]:
    """Returns the descriptions in `Args:` of a docstring in Google's style, by argument."""
    lines = inspect.cleandoc(component.__doc__ or "").partition("\nArgs:\n")[2].splitlines()
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in takewhile(lambda each: not each or each.startswith(" "), lines):
        entry = _ENTRY.fullmatch(line[4:])
        if entry is not None:
            names = entry[1].split(", ")
        for name in names:
            texts[name] = f"{texts.get(name, '')} {entry[2] or '' if entry else line.strip()}".strip()
    module = sys.modules[component.__module__]
    for name, text in texts.items():
        # Docstrings of other projects are long, and repeat the default.
        if not component.__module__.startswith("torchtune_ext."):
            texts[name] = re.split(r" \(default|(?<=\w)\. ", text)[0].replace("`_", "`")
            continue
        if reference := _REFERENCE.match(text):
            named = argument_descriptions(_named_class(component, module, reference[1]))[name]
            text = f"{named} {text[reference.end() :]}".strip()
        texts[name] = re.sub(r"\b(None|True|False)\b", lambda word: _YAML_WORDS[word[0]], text)
    return texts


def _named_class(component: Any, module: Any, name: str) -> Any:
    # The class is imported by the module of the component, or by a module of a base class.
    modules = [module, *(sys.modules[base.__module__] for base in getattr(component, "__mro__", ()))]
    return next(getattr(each, name) for each in modules if hasattr(each, name))


def _merged(options: Sequence[Option]) -> list[Option]:
    """Returns the options with equal arguments of several classes as one."""
    merged: dict[Option, tuple[str, ...]] = {}
    for option in options:
        key = replace(option, components=())
        merged[key] = merged.get(key, ()) + option.components
    return [replace(option, components=components) for option, components in merged.items()]


def format_yaml(value: Any) -> str:
    """Returns a plain value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_yaml, value)) + "]"
    # YAML could read other strings as another type. JSON's quotes and words are valid YAML.
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, bool | str) else repr(value)
