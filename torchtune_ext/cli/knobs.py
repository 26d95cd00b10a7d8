"""`torchtune-ext knobs` lists the knobs of a recipe, each with its default and its line of text.

    torchtune-ext knobs                                the knobs of grpo_full, those of its nodes, too
    torchtune-ext knobs warmup_sft                     those of another recipe, or of your copy of one: knobs my_grpo.py
    torchtune-ext knobs grpo_full engine               the keys of a node
    torchtune-ext knobs max_tokens                     a key, whatever node it is in

A knob is a field of `Config` in a recipe. A field whose type is a dataclass is a node, and the fields of that are its
keys. A field of type `Any` without a default is a component: its key `_component_` names a class.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from torchtune_ext.run.catalog import folder, recipe_files
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.run.terminal import width

RECIPE = "grpo_full"  # where words are looked up if none names a recipe
_LONGEST_DEFAULT = 24  # characters
NEEDED = "(needed)"  # stands for a default where there is none
# A field in the source of a dataclass: its name, type and default, and the comment behind it.
_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(.*))?")


@dataclass(frozen=True, slots=True)
class Knob:
    """A key that YAML may give."""

    name: str  # dotted, if it is in a node
    default: str  # as YAML writes it, or NEEDED
    text: str  # what it is; "" if its source does not say it
    component: bool = False  # whether `_component_` says what it is


def is_recipe(word: str) -> bool:
    """Tells whether a word is a recipe: the name of one of ours, or a file."""
    ours = {recipe.name for recipe in recipe_files(folder("recipes"), folder("configs"))}
    return word in ours or word.endswith(".py")


def knobs_of(recipe: str) -> list[Knob]:
    """Returns the knobs of a recipe, ours by name or another by file. Raises ValueError if it is none."""
    from torchtune_ext.settings.components import recipe_module

    config = getattr(recipe_module(recipe, ""), "Config", None)
    if config is None:
        raise Mistake(f"{recipe}: no recipe: it has no class Config")
    return fields_of(config)


def listing(words: Sequence[str]) -> tuple[str, list[Knob]]:
    """Returns a title and the knobs that the words ask for. Raises ValueError for an unknown word."""
    recipe, rest = RECIPE, list(words)
    if rest and is_recipe(rest[0]):
        recipe = rest.pop(0)
    if len(rest) > 1:
        raise Mistake(f"{' '.join(words)}: give a recipe, a knob, or a recipe and a knob, as in: {RECIPE} engine")
    knobs = knobs_of(recipe)
    if not rest:
        parts = ", ".join(knob.name for knob in knobs if knob.component)
        return (
            f"{recipe}: `key: value` in YAML, key=value on the command line, and node.key=value for a key of a node. "
            f"What the class takes that `_component_` names in {parts}: python -m pydoc CLASS",
            knobs,
        )
    # A knob may be named in full, by its last part, whatever node it is in, or by its node.
    word = rest[0]
    if found := [
        knob for knob in knobs if word in (knob.name, knob.name.rpartition(".")[2], knob.name.partition(".")[0])
    ]:
        takes = " its class takes what `python -m pydoc CLASS` shows" if any(knob.component for knob in found) else ""
        return f"{recipe}, {word}:{takes}", found
    recipes = [each.name for each in recipe_files(folder("recipes"), folder("configs"))]
    # Of two names that are equally near, the one that is less deep in nodes is the likelier.
    near = nearest(word, [*recipes, *sorted((knob.name for knob in knobs), key=lambda name: name.count("."))])
    of = f"{recipe} {word.partition('.')[0]}" if "." in word else recipe
    hint = f"did you mean {near}?" if near else f"`torchtune-ext knobs {of}` lists the knobs"
    raise Mistake(f"{word} is no recipe, and no knob of {recipe}; {hint}")


def rendered(title: str, knobs: Sequence[Knob], width: int | None = None) -> str:
    """Returns knobs under their title as text, in lines of `width` characters. None: a knob is one line, for grep."""
    lines = _wrapped(title, width) if width else [title]
    names = max(len(knob.name) for knob in knobs)
    defaults = max(len(_short(knob.default)) for knob in knobs)
    for knob in knobs:
        head = f"  {knob.name:<{names}}  {_short(knob.default):<{defaults}}  "
        # On a narrow terminal the text overflows rather than becoming a column of single words.
        room = max(30, width - len(head)) if width else max(1, len(knob.text))
        first, *more = _wrapped(knob.text, room)
        lines += [(head + first).rstrip(), *(" " * len(head) + line for line in more)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _short(default: str) -> str:
    return default if len(default) <= _LONGEST_DEFAULT else default[: _LONGEST_DEFAULT - 3] + "..."


def print_help(recipe: str) -> None:
    """Prints the knobs of a recipe: the answer to `tune run RECIPE --help`."""
    print(f"usage: tune run [TORCHRUN-OPTIONS] {recipe} --config CONFIG [key=value ...]\n")
    print(rendered(*listing([recipe]), width(sys.stdout)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext knobs`."""
    what = "a recipe (grpo_full without one), a knob, or a recipe and a knob"
    parser.add_argument("words", nargs="*", metavar="NAME", help=what)


def main(args: argparse.Namespace) -> int:
    """Prints the list. Returns the exit status: 0, or 2 for a word that means nothing."""
    print(rendered(*listing(args.words), width(sys.stdout)))
    return 0


def fields_of(record: Any) -> list[Knob]:
    """Returns the fields of a dataclass (the class, or an instance with the defaults), those of a node behind it."""
    kind, texts, knobs = record if inspect.isclass(record) else type(record), {}, []
    # Inherited fields have their comments in the class that declares them. From the oldest base on, later ones win.
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= _comments(base)
    for spec in dataclasses.fields(kind):
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        default = default if record is kind else getattr(record, spec.name)
        text = texts.get(spec.name, "")
        if is_dataclass(spec.type):
            keys = fields_of(default if is_dataclass(default) else spec.type)
            knobs.append(Knob(spec.name, "{...}", text))
            knobs += [replace(key, name=f"{spec.name}.{key.name}") for key in keys]
        else:
            # "???" is OmegaConf's mark for a value that has to be given.
            written = NEEDED if default is dataclasses.MISSING or default == "???" else as_yaml(default)
            knobs.append(Knob(spec.name, written, text, component=written == NEEDED and spec.type is Any))
    return knobs


def _comments(kind: type) -> dict[str, str]:
    """Returns the comment behind each field of a dataclass, or else the comment lines directly above it."""
    # Comments are not in the class at run time, only in its source.
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        return {}  # `make_dataclass` made it
    comments, above = {}, []
    for line in source.splitlines():
        if field := _FIELD.fullmatch(line):
            comments[field[1]] = field[2] or " ".join(above)
        above = [*above, line.strip().lstrip("# ")] if line.startswith("    #") else []
    return {name: text for name, text in comments.items() if text}


def as_yaml(value: Any) -> str:
    """A plain value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    # Other strings could be read as something else in YAML. JSON's quotes, null, true and false are YAML, too.
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, bool | str) else repr(value)
