"""`torchtune-ext config` lists a recipe's config keys with defaults and descriptions.

    torchtune-ext config                            all keys of grpo_full, nested keys included
    torchtune-ext config warmup_sft                 another recipe, or your copy: my_grpo.py
    torchtune-ext config grpo_full engine           the keys of one section
    torchtune-ext config max_tokens                 one key, in any section
    torchtune-ext config loss                       the arguments of the usual class of a section
    torchtune-ext config Jsonl                      the arguments of one class
    torchtune-ext config --schema > schema.json     a JSON schema for editors that check YAML

`options.py` describes where keys, defaults and descriptions come from.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from torchtune_ext.cli.options import USUAL_COMPONENTS, Option, config_class, recipe_options
from torchtune_ext.run.catalog import recipe_files
from torchtune_ext.run.errors import UsageError, closest_match
from torchtune_ext.run.terminal import run_until_closed, terminal_width
from torchtune_ext.settings.sections import nested_section, option_fields

DEFAULT_RECIPE = "grpo_full"  # the recipe if the command names none
_MAX_DEFAULT_CHARS = 24
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def is_recipe(name: str) -> bool:
    """Returns whether an argument is a recipe: the name of one of ours, or a Python file."""
    ours = {recipe.name for recipe in recipe_files()}
    return name in ours or name.endswith(".py")


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
    options = recipe_options(recipe)
    if not rest:
        usual = USUAL_COMPONENTS["task"][0].rpartition(".")[2]
        return (
            f"{recipe}: `key: value` in YAML, key=value on the command line, and section.key=value for a key of a section. "
            "Another class in `_component_` takes other arguments; `torchtune-ext config task` lists all tasks",
            [option for option in options if not option.name.startswith("task.") or usual in option.components],
        )
    # A key matches by its name, its last part in any section, or its section, a class by its name.
    word = rest[0]
    if word.startswith("evaluation.task."):  # it takes the arguments of `task`
        word = word.removeprefix("evaluation.")
    if found := [
        option
        for option in options
        if word in (option.name, option.name.rpartition(".")[2], option.name.partition(".")[0], *option.components)
    ]:
        # The section or key itself comes before keys of the same name in other sections.
        found.sort(key=lambda option: word not in (option.name, option.name.partition(".")[0]))
        return f"{recipe}, {word}:", found
    recipes = [each.name for each in recipe_files()]
    # Of two names that are equally near, the less deeply nested name is the likelier.
    names = sorted((option.name for option in options), key=lambda name: name.count("."))
    near = closest_match(word, [*recipes, *names])
    of = f"{recipe} {word.partition('.')[0]}" if "." in word else recipe
    hint = f"did you mean {near}?" if near else f"`torchtune-ext config {of}` lists the keys"
    raise UsageError(f"{word}: neither a recipe nor a config key of {recipe}; {hint}")


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
        text = option.description
        # Descriptions of keys do not list the permitted values.
        text += f" ({option.values})" if "'" in option.values else ""
        text += f" [{', '.join(option.components)}]" if option.name.startswith("task.") else ""
        room = max(26, width - len(head)) if width else max(1, len(text))
        first, *more = _wrap_text(text, room)
        lines += [(head + first).rstrip(), *(" " * len(head) + line for line in more)]
    return "\n".join(lines)


def _wrap_text(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _shorten(default: str) -> str:
    return default if len(default) <= _MAX_DEFAULT_CHARS else default[: _MAX_DEFAULT_CHARS - 3] + "..."


def json_schema(config_class: type) -> dict[str, Any]:
    """Returns the JSON schema of a recipe's YAML. Any value may also be a reference, `${...}`."""
    schema = TypeAdapter(config_class).json_schema()
    definitions = schema.get("$defs", {})
    for name, field in option_fields(config_class).items():
        nested = nested_section(field)
        bare = getattr(nested, "SHORTHAND_KEY", None)
        if nested is not None and bare is not None:
            kinds = [schema["properties"][name], definitions[nested.__name__]["properties"][bare]]
            schema["properties"][name] = {"anyOf": kinds, "description": field.description}
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
    parser.usage = "torchtune-ext config [RECIPE] [KEY] [--schema]"
    text = "a recipe (default: grpo_full), then one config key or section"
    parser.add_argument("words", nargs="*", metavar="RECIPE or KEY", help=text)
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
