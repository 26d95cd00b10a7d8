"""`torchtune-ext config` lists a recipe's config keys with defaults and descriptions.

    torchtune-ext config                            all keys of grpo_full, nested keys included
    torchtune-ext config warmup_sft                 another recipe, or your copy: my_grpo.py
    torchtune-ext config grpo_full engine           the keys of one section
    torchtune-ext config max_tokens                 one key, in any section
    torchtune-ext config --schema > schema.json     a JSON schema for editors that check YAML

The keys are the fields of the recipe's `Config` and of its nested records.
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from pydantic import TypeAdapter

from torchtune_ext.run.catalog import import_object, package_folder, recipe_files
from torchtune_ext.run.errors import UsageError, closest_match
from torchtune_ext.run.terminal import run_until_closed, terminal_width
from torchtune_ext.settings.components import Component, import_recipe
from torchtune_ext.settings.records import nested_record, option_fields
from torchtune_ext.settings.yaml_types import expected_text, union_members

DEFAULT_RECIPE = "grpo_full"  # the recipe if the command names none
_MAX_DEFAULT_CHARS = 24
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}
# Section -> a usual component. Arguments of components are not config keys of the recipe.
USUAL_COMPONENTS = {
    "loss": "torchtune_ext.objective.loss.PolicyLoss",
    "model": "torchtune.models.qwen2.lora_qwen2",
    "optimizer": "torch.optim.AdamW",
}
REQUIRED_MARK = "(required)"  # shown for a key that has no default


@dataclass(frozen=True, slots=True)
class Option:
    """A config key."""

    name: str  # dotted if the key is in a section
    default: str  # in YAML, or REQUIRED_MARK
    description: str
    component: bool = False  # whether `_component_` names a class


def is_recipe(name: str) -> bool:
    """Returns whether an argument is a recipe: the name of one of ours, or a Python file."""
    ours = {recipe.name for recipe in recipe_files(package_folder("recipes"), package_folder("configs"))}
    return name in ours or name.endswith(".py")


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


def list_options(record: type, default: Any = None, prefix: str = "") -> list[Option]:
    """Returns the keys of a record; the instance `default`, if given, supplies the defaults."""
    options = []
    for name, field in option_fields(record).items():
        required = field.is_required() and default is None
        value = getattr(default, name, None) if default is not None else field.get_default(call_default_factory=True)
        description = field.description or ""
        if (nested := nested_record(field)) is not None:
            options.append(Option(f"{prefix}{name}", "{...}", description))
            options += list_options(nested, None if required else value, f"{prefix}{name}.")
        else:
            text, values = REQUIRED_MARK if required else format_yaml(value), expected_text(field)
            # Allowed values are appended, so a description need not list them.
            description += f" ({values})" if "'" in values else ""
            component = Component in union_members(field.annotation)
            options.append(Option(f"{prefix}{name}", text, description, component))
    return options


def find_options(words: Sequence[str]) -> tuple[str, list[Option]]:
    """Returns a title and the keys that the arguments select.

    Raises:
        UsageError: an argument is neither a recipe nor a config key.
    """
    recipe, rest = DEFAULT_RECIPE, list(words)
    if rest and is_recipe(rest[0]):
        recipe = rest.pop(0)
    if len(rest) > 1:
        raise UsageError(f"{' '.join(words)}: give a recipe, a config key, or both, as in: {DEFAULT_RECIPE} engine")
    options = list_options(config_class(recipe))
    if not rest:
        parts = ", ".join(option.name for option in options if option.component)
        return (
            f"{recipe}: `key: value` in YAML, key=value on the command line, and section.key=value for a key of a section. "
            f"Arguments of the class that `_component_` names in {parts}: python -m pydoc CLASS",
            options,
        )
    # A key matches by its full name, by its last part in any section, or by its section.
    word = rest[0]
    if found := [
        option
        for option in options
        if word in (option.name, option.name.rpartition(".")[2], option.name.partition(".")[0])
    ]:
        component = any(option.component for option in found)
        arguments = " `python -m pydoc CLASS` shows the arguments of the class" if component else ""
        return f"{recipe}, {word}:{arguments}", found
    recipes = [each.name for each in recipe_files(package_folder("recipes"), package_folder("configs"))]
    # Of two names that are equally near, the less deeply nested name is the likelier.
    names = sorted((option.name for option in options), key=lambda name: name.count("."))
    near = closest_match(word, [*recipes, *names])
    of = f"{recipe} {word.partition('.')[0]}" if "." in word else recipe
    hint = f"did you mean {near}?" if near else f"`torchtune-ext config {of}` lists the keys"
    hint = _component_hint(word, {option.name for option in options if option.component}) or hint
    raise UsageError(f"{word}: neither a recipe nor a config key of {recipe}; {hint}")


def _component_hint(word: str, sections: Collection[str]) -> str:
    """Returns advice if `word` is an argument of a usual component in `sections`, else ""."""
    for section, path in USUAL_COMPONENTS.items():
        parameters = signature(import_object(path, section)).parameters if section in sections else {}
        name = word.removeprefix(f"{section}.")
        if name in parameters:
            return f"set {section}.{name}, an argument of the class: python -m pydoc {path}"
    return ""


def format_options(title: str, options: Sequence[Option], width: int | None = None) -> str:
    """Returns the title and the keys as text.

    Args:
        title: the first line.
        options: the keys to list.
        width: characters per line; None: one line per key, for grep.
    """
    lines = _wrap_text(title, width) if width else [title]
    names = max(len(option.name) for option in options)
    defaults = max(len(_shorten(option.default)) for option in options)
    for option in options:
        head = f"  {option.name:<{names}}  {_shorten(option.default):<{defaults}}  "
        # On a narrow terminal the text overflows, which is easier to read than one word per line.
        room = max(30, width - len(head)) if width else max(1, len(option.description))
        first, *more = _wrap_text(option.description, room)
        lines += [(head + first).rstrip(), *(" " * len(head) + line for line in more)]
    return "\n".join(lines)


def _wrap_text(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _shorten(default: str) -> str:
    return default if len(default) <= _MAX_DEFAULT_CHARS else default[: _MAX_DEFAULT_CHARS - 3] + "..."


def json_schema(record: type) -> dict[str, Any]:
    """Returns the JSON schema of a recipe's YAML. Any value may also be a reference, `${...}`."""
    schema = TypeAdapter(record).json_schema()
    definitions = schema.get("$defs", {})
    for name, field in option_fields(record).items():
        nested = nested_record(field)
        bare = getattr(nested, "SHORTHAND_KEY", None)
        if nested is not None and bare is not None:
            plain = definitions[nested.__name__]["properties"][bare]
            schema["properties"][name] = {
                "anyOf": [schema["properties"][name], plain],
                "description": field.description,
            }
    for each in (schema, *definitions.values()):
        # A preset or the command line may set a required key that the file leaves out.
        each.pop("required", None)
        each["properties"] = {
            name: {"anyOf": [_as_yaml_reads(value), _REFERENCE], "description": value.get("description", "")}
            for name, value in each["properties"].items()
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _as_yaml_reads(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a value that also permits references in lists, and integers as text."""
    schema = {
        key: [_as_yaml_reads(each) for each in value] if key == "anyOf" else value for key, value in schema.items()
    }
    if "items" in schema:
        schema["items"] = {"anyOf": [schema["items"], _REFERENCE]}
    if schema.get("type") == "string" and "enum" not in schema:
        schema["type"] = ["string", "integer"]
    return schema


def print_help(recipe: str) -> None:
    """Prints the help of `tune run RECIPE --help`: usage, and the config keys of the recipe."""
    text = format_options(*find_options([recipe]), terminal_width(sys.stdout))
    usage = f"usage: tune run [TORCHRUN-OPTIONS] {recipe} --config CONFIG [key=value ...]"
    run_until_closed(lambda: print(f"{usage}\n\n{text}"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext config`."""
    parser.add_argument("words", nargs="*", metavar="NAME", help="a recipe (default: grpo_full), a config key, or both")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of the recipe's YAML")


def main(args: argparse.Namespace) -> int:
    """Prints the list or the schema, and returns the exit status.

    Raises:
        UsageError: an argument is neither a recipe nor a config key.
    """
    if args.schema:
        if len(args.words) > 1 or not all(map(is_recipe, args.words)):
            raise UsageError(f"--schema {' '.join(args.words)}: expected a recipe; `tune ls` lists them")
        print(json.dumps(json_schema(config_class(*args.words or [DEFAULT_RECIPE])), indent=2))
    else:
        print(format_options(*find_options(args.words), terminal_width(sys.stdout)))
    return 0


def format_yaml(value: Any) -> str:
    """Returns a plain value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {format_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_yaml, value)) + "]"
    # YAML could read other strings as another type. JSON's quotes, null, true and false are valid
    # YAML.
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, bool | str) else repr(value)
