"""`torchtune-ext knobs` lists the knobs of a recipe, each with its default and its line of text.

    torchtune-ext knobs                                the knobs of grpo_full, those of its nodes, too
    torchtune-ext knobs warmup_sft                     those of another recipe, or of your copy of one: knobs my_grpo.py
    torchtune-ext knobs grpo_full engine               the keys of a node, or the arguments of what configs put there
    torchtune-ext knobs max_tokens                     a key, whatever node it is in
    torchtune-ext knobs torchtune_ext.tasks.math.Math  the arguments of any class or function

A knob is a field of `Config` in a recipe. If its type is a dataclass, it is a node, and its keys are the fields of that. If it
has no default and any type, it is a component, which the key `_component_` names. The text of a field is the comment behind it,
or else what the docstring says of it below "Args:".
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import yaml

from torchtune_ext.run.catalog import by_path, config_files, folder, recipe_files
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.run.terminal import width

RECIPE = "grpo_full"  # the recipe of a word that is no recipe
_LONGEST_DEFAULT = 24  # characters
NEEDED = "(needed)"  # stands for a default where there is none
_NONE = (dataclasses.MISSING, inspect.Parameter.empty, "???")  # "???": OmegaConf's word for it
_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(.*))?")
# An argument, or several, of a docstring: "first, count: text" or "lr (float, optional): text".
_SEVERAL = re.compile(r"^(\w+(?:, \w+)*)(?: \(.*\))?:(?:\s+(.*))?$")


@dataclass(frozen=True, slots=True)
class Knob:
    """A key that YAML may give."""

    name: str  # dotted, if it is in a node
    default: str  # as YAML writes it, or NEEDED
    text: str  # what it is; "" if its source does not say it
    component: bool = False  # whether `_component_` says what it is


@dataclass(frozen=True, slots=True)
class Section:
    """Some knobs that are listed together."""

    title: str
    knobs: list[Knob]


def is_recipe(word: str) -> bool:
    """Tells whether a word is a recipe: one of ours by its name, or a file."""
    ours = {recipe.name for recipe in recipe_files(folder("recipes"), folder("configs"))}
    return word in ours or word.endswith(".py")


def knobs_of(recipe: str) -> list[Knob]:
    """Returns the knobs of a recipe, ours by its name or another by its file. Raises ValueError if it is none."""
    from torchtune_ext.settings.components import recipe_module

    config = getattr(recipe_module(recipe, ""), "Config", None)
    if config is None:
        raise Mistake(f"{recipe}: no recipe: it has no class Config")
    return fields_of(config)


def components(name: str) -> list[str]:
    """Returns what the shipped configs and presets name as the component of a knob."""
    configs = [
        yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in config_files(folder("configs")).values()
    ]
    nodes = [config.get(name) for config in configs]
    return sorted({node["_component_"] for node in nodes if isinstance(node, dict) and "_component_" in node})


def listing(words: Sequence[str]) -> list[Section]:
    """Returns what the words of the command line ask for.

    Raises:
        ValueError: a word means nothing; the message gives the nearest one.
    """
    recipe, rest = RECIPE, list(words)
    if rest and is_recipe(rest[0]):
        recipe = rest.pop(0)
    if len(rest) > 1:
        raise Mistake(f"{' '.join(words)}: give a recipe, a knob, or a recipe and a knob, as in: {RECIPE} engine")
    knobs = knobs_of(recipe)
    if not rest:
        return [overview(recipe, knobs)]
    word = rest[0]
    if found := [
        knob for knob in knobs if word in (knob.name, knob.name.rpartition(".")[2], knob.name.partition(".")[0])
    ]:
        parts = [
            section for knob in found if knob.component for path in components(knob.name) for section in _of_path(path)
        ]
        return [Section(f"{recipe}, {word}:", found), *parts]
    if "." in word and word.partition(".")[0] not in {knob.name for knob in knobs}:
        return _of_path(word)
    recipes = [each.name for each in recipe_files(folder("recipes"), folder("configs"))]
    near = nearest(word, [*recipes, *sorted((knob.name for knob in knobs), key=lambda name: name.count("."))])
    of = f"{recipe} {word.partition('.')[0]}" if "." in word else recipe
    hint = f"did you mean {near}?" if near else f"`torchtune-ext knobs {of}` lists the knobs"
    raise Mistake(f"{word} is no recipe, and no knob of {recipe}; {hint}")


def overview(recipe: str, knobs: list[Knob]) -> Section:
    """Returns all knobs of a recipe under a title that says how they are given."""
    parts = ", ".join(knob.name for knob in knobs if knob.component)
    title = (
        f"{recipe}: `key: value` in YAML, key=value on the command line, and node.key=value for a key of a node. "
        f"`torchtune-ext knobs {recipe} NAME` says what there is for {parts}."
    )
    return Section(title, knobs)


def _of_path(path: str) -> list[Section]:
    """Returns the arguments of a class or function; of `PolicyLoss` also the options of each constraint."""
    component = by_path(path, path)
    if not callable(component):
        raise Mistake(f"{path}: it is neither a class nor a function")
    options = options_of(component)
    apart = {knob.name for knobs in options.values() for knob in knobs}
    own = [knob for knob in arguments_of(component) if knob.name not in apart]
    title = f"_component_: {path}  {_doc(component).partition(chr(10))[0]}".rstrip()
    return [Section(title, own), *(Section(f"with {title}", knobs) for title, knobs in options.items())]


def rendered(sections: Sequence[Section], width: int | None = None) -> str:
    """Returns sections as text.

    Args:
        width: characters of a line, for a terminal. None: a knob is one line, however long, for grep.
    """
    lines: list[str] = []
    for section in sections:
        lines += ["", *(_wrapped(section.title, width) if width else [section.title])]
        names = max((len(knob.name) for knob in section.knobs), default=0)
        defaults = max((len(_short(knob.default)) for knob in section.knobs), default=0)
        for knob in section.knobs:
            head = f"  {knob.name:<{names}}  {_short(knob.default):<{defaults}}  "
            room = max(30, width - len(head)) if width else max(1, len(knob.text))
            first, *more = _wrapped(knob.text, room)
            lines += [(head + first).rstrip(), *(" " * len(head) + line for line in more)]
        if not section.knobs:
            lines.append("  takes no arguments")
    return "\n".join(lines[1:])


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def _short(default: str) -> str:
    return default if len(default) <= _LONGEST_DEFAULT else default[: _LONGEST_DEFAULT - 3] + "..."


def print_help(recipe: str) -> None:
    """Prints the knobs of a recipe: the answer to `tune run RECIPE --help`."""
    print(f"usage: tune run [TORCHRUN-OPTIONS] {recipe} --config CONFIG [key=value ...]\n")
    print(rendered(listing([recipe]), width(sys.stdout)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext knobs`."""
    what = "a recipe (grpo_full without one), a knob, a recipe and a knob, or the dotted path of a class or function"
    parser.add_argument("words", nargs="*", metavar="NAME", help=what)


def main(args: argparse.Namespace) -> int:
    """Prints the list. Returns the exit status: 0, or 2 for a word that means nothing."""
    # A component may be in a module of the working directory.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    print(rendered(listing(args.words), width(sys.stdout)))
    return 0


def fields_of(record: Any) -> list[Knob]:
    """Returns the fields of a dataclass in their order, and those of a node behind it.

    Args:
        record: the class, or an instance with the defaults.
    """
    kind, texts, knobs = record if inspect.isclass(record) else type(record), {}, []
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= argument_texts(_doc(base)) | _comments(base)
    for spec in dataclasses.fields(kind):
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        default = default if record is kind else getattr(record, spec.name)
        text = texts.get(spec.name, "")
        if is_dataclass(spec.type):
            keys = fields_of(default if is_dataclass(default) else spec.type)
            knobs.append(Knob(spec.name, "{...}", text))
            knobs += [replace(key, name=f"{spec.name}.{key.name}") for key in keys]
        else:
            written = _written(default)
            knobs.append(Knob(spec.name, written, text, component=written == NEEDED and spec.type is Any))
    return knobs


def _written(default: Any) -> str:
    return NEEDED if any(default is none for none in _NONE[:2]) or default == _NONE[2] else as_yaml(default)


def _comments(kind: type) -> dict[str, str]:
    """Returns the comment behind each field of a dataclass, or else the comment lines directly above it."""
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


def _doc(component: Any) -> str:
    """Returns the docstring, but not the one that Python makes for a dataclass."""
    doc = inspect.cleandoc(component.__doc__ or "")
    return "" if doc.startswith(f"{component.__name__}(") else doc


def arguments_of(component: Callable[..., Any]) -> list[Knob]:
    """Returns the arguments of a class or function, without `params`, which a recipe gives an optimizer."""
    if is_dataclass(component):
        return fields_of(component)
    texts = argument_texts(_doc(component))
    if inspect.isclass(component):
        texts |= argument_texts(inspect.cleandoc(component.__init__.__doc__ or ""))
    taken = inspect.signature(component).parameters.items()
    return [Knob(name, _written(each.default), texts.get(name, "")) for name, each in taken if name != "params"]


def options_of(component: Any) -> dict[str, list[Knob]]:
    """Returns the options of each constraint, which `PolicyLoss` takes as keys of its own, by its name and formula."""
    from torchtune_ext.objective.constraints import CONSTRAINTS
    from torchtune_ext.objective.loss import PolicyLoss

    if component is not PolicyLoss:
        return {}
    return {
        f"constraint: {name}  {_doc(kind).partition(chr(10))[0]}": fields_of(kind) for name, kind in CONSTRAINTS.items()
    }


def argument_texts(doc: str) -> dict[str, str]:
    """Returns what a docstring says of each argument below its first "Args:". `first, count: text` serves both."""
    lines = doc.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip() == "Args:"), None)
    if start is None:
        return {}
    texts: dict[str, list[str]] = {}
    indent, current = None, []
    for line in lines[start + 1 :]:
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        indent = depth if indent is None else indent
        if depth < indent:
            break
        if depth > indent:
            current.append(line.strip())
        elif stated := _SEVERAL.match(line.strip()):
            current = [stated[2]] if stated[2] else []
            texts |= dict.fromkeys(stated[1].split(", "), current)
        else:
            current = []
    return {name: " ".join(parts) for name, parts in texts.items()}


def as_yaml(value: Any) -> str:
    """Returns a plain value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, bool | str) else repr(value)
