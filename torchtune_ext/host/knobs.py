"""`torchtune-ext knobs` lists the knobs of a recipe, each with its default and its line of text.

    torchtune-ext knobs                                the knobs of grpo_full
    torchtune-ext knobs warmup_sft                     those of another recipe, or of your copy of one: knobs my_grpo.py
    torchtune-ext knobs grpo_full engine               the keys of a node, or the arguments of what configs put there
    torchtune-ext knobs max_tokens                     a key, whatever node it is in, or an argument (lr)
    torchtune-ext knobs torchtune_ext.tasks.math.Math  the arguments of any class or function

A knob is a field of `Config` in a recipe. If its type is a dataclass, it is a node, and its keys are the fields of that. If it
has no default and any type, it is a component, which the key `_component_` names. The text of a field is the comment behind it,
or else what the docstring says of it below "Args:".
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, folder, recipe_files
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.run.terminal import width

RECIPE = "grpo_full"  # the recipe of a word that is no recipe
_LONGEST_DEFAULT = 24  # characters
NEEDED = "(needed)"  # stands for a default where there is none
_NONE = (dataclasses.MISSING, inspect.Parameter.empty, "???")  # "???": OmegaConf's word for it
_SEE = re.compile(r"^see `(\w+)`")  # the text of an argument that is explained elsewhere
# An argument, or several, of a docstring: "first, count: text" or "lr (float, optional): text".
_SEVERAL = re.compile(r"^(\w+(?:, \w+)*)(?: \(.*\))?:(?:\s+(.*))?$")


@dataclass(frozen=True, slots=True)
class Knob:
    """A key that YAML may give."""

    name: str
    default: str  # as YAML writes it, or NEEDED
    type: Any  # the annotation
    text: str  # what it is; "" if its source does not say it
    node: Any = None  # of a node: its record, with the defaults that the recipe gives it, or the class of it


@dataclass(frozen=True, slots=True)
class Section:
    """Some knobs that are listed together."""

    title: str
    knobs: list[Knob] | None  # None: there is only the title


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


def is_component(knob: Knob) -> bool:
    """Tells whether `_component_` says what a knob is."""
    return knob.default == NEEDED and knob.type is Any


def components(knob: Knob, recipe: str) -> list[str]:
    """Returns what the shipped configs of a recipe name as a component, the most frequent first, or else its default preset."""
    recipes = recipe_files(folder("recipes"), folder("configs"))
    paths = {each.path for each in recipes if each.name == recipe}
    own = [each for each in recipes if each.path in paths] or recipes
    files = {file for each in own for file in each.configs.values()}
    for configs in ([_loaded(file) for file in sorted(files)], [_default_preset(recipe)]):
        nodes = [config.get(knob.name) for config in configs]
        named = Counter(node["_component_"] for node in nodes if isinstance(node, dict) and "_component_" in node)
        if named:
            return [name for name, _ in named.most_common()]
    return []


def _default_preset(recipe: str) -> dict[str, Any]:
    """Returns the keys of the preset that a recipe has by default."""
    preset = next((knob.default for knob in knobs_of(recipe) if knob.name == "preset"), None)
    file = config_files(folder("configs")).get(f"presets/{preset}")
    return _loaded(file) if file else {}


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
    return _of_word(recipe, rest[0]) if rest else [overview(recipe)]


def overview(recipe: str) -> Section:
    """Returns all knobs of a recipe, without the keys of its nodes."""
    shown, nodes, preset = [], [], _default_preset(recipe)
    for knob in knobs_of(recipe):
        if knob.node or is_component(knob):
            nodes.append(knob.name)
        shown.append(replace(knob, default="(preset)") if is_component(knob) and preset.get(knob.name) else knob)
    title = (
        f"{recipe} has {len(shown)} knobs: `key: value` in YAML, key=value on the command line, and node.key=value for a key "
        f"of a node. `torchtune-ext knobs {recipe} NAME` says what is in {', '.join(nodes)}."
    )
    return Section(title, shown)


def _of_word(recipe: str, word: str) -> list[Section]:
    knobs = {knob.name: knob for knob in knobs_of(recipe)}
    if word in knobs:
        return _of_knob(recipe, knobs[word])
    if "." in word and word.partition(".")[0] not in knobs:
        return _of_component(word)
    keys = [key for knob in knobs.values() for key in _keys(knob)]
    if not (matches := _named(word, keys)):
        # Components come second: they have to be imported to be read.
        keys += [key for knob in knobs.values() if is_component(knob) for key in _arguments(recipe, knob)]
        matches = _named(word, keys)
    if matches:
        return [Section(f"{recipe}, {word}:", matches)]
    recipes = [each.name for each in recipe_files(folder("recipes"), folder("configs"))]
    near = nearest(word, [*recipes, *knobs, *(key.name for key in keys)])
    hint = f"did you mean {near}?" if near else f"`torchtune-ext knobs {recipe}` lists the knobs"
    raise Mistake(f"{word} is no recipe, and no knob of {recipe}; {hint}")


def _of_knob(recipe: str, knob: Knob) -> list[Section]:
    title = f"{recipe}, {knob.name}: {knob.text}"
    preset = _default_preset(recipe).get(knob.name)
    if isinstance(preset, dict) and (settings := {key: preset[key] for key in preset if key != "_component_"}):
        title += f"; the default preset sets {as_yaml(settings)}"
    if keys := _keys(knob):
        return [Section(title, keys)]
    if not is_component(knob):
        return [Section(f"{recipe}, {knob.name}:", [knob])]
    parts = [section for path in components(knob, recipe) for section in _of_component(path)]
    return [Section(title, None), *(replace(part, knobs=_below(knob, part.knobs)) for part in parts)]


def _named(word: str, keys: Sequence[Knob]) -> list[Knob]:
    """Returns the keys of that name, which may be dotted; several that say the same are one."""
    return list({key.text: key for key in keys if word in (key.name, key.name.rpartition(".")[2])}.values())


def _arguments(recipe: str, knob: Knob) -> list[Knob]:
    """Returns the arguments of what configs put in the place of a component."""
    return [key for section in _of_knob(recipe, knob)[1:] for key in section.knobs]


def _below(node: Knob, keys: Sequence[Knob]) -> list[Knob]:
    """Returns the keys of a node under their full names, as in engine.dtype."""
    return [replace(key, name=f"{node.name}.{key.name}") for key in keys]


def _keys(knob: Knob) -> list[Knob]:
    """Returns the keys of a node. A knob that is no node has none."""
    return _below(knob, fields_of(knob.node)) if knob.node else []


def _of_component(path: str) -> list[Section]:
    from torchtune_ext.run.catalog import by_path

    component = by_path(path, path)
    if not callable(component):
        raise Mistake(f"{path}: it is neither a class nor a function")
    summary = _doc(component).partition("\n")[0]
    options = options_of(component)
    apart = {knob.name for knobs in options.values() for knob in knobs}
    own = [knob for knob in arguments_of(component) if knob.name not in apart]
    sections = [Section(f"_component_: {path}  {summary}".rstrip(), own)]
    return sections + [Section(f"with {title}", knobs) for title, knobs in options.items()]


@functools.cache
def _loaded(file: Path) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(file.read_text(encoding="utf-8"), loader) or {}


def rendered(sections: Sequence[Section], width: int | None = None) -> str:
    """Returns sections as text.

    Args:
        width: characters of a line, for a terminal. None: a knob is one line, however long, for grep.
    """
    lines: list[str] = []
    for section in sections:
        lines += ["", *(_wrapped(section.title, width) if width else [section.title])]
        if section.knobs is None:
            continue
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
    print(rendered([overview(recipe)], width(sys.stdout)))


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
    """Returns the fields of a dataclass in their order. Args: record: the class, or an instance with the defaults."""
    kind, texts, knobs = record if inspect.isclass(record) else type(record), {}, []
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            texts |= argument_texts(_doc(base)) | _comments(base)
    for spec in dataclasses.fields(kind):
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        default = default if record is kind else getattr(record, spec.name)
        node = (default if is_dataclass(default) else spec.type) if is_dataclass(spec.type) else None
        knobs.append(Knob(spec.name, "{...}" if node else _written(default), spec.type, texts.get(spec.name, ""), node))
    return knobs


def _written(default: Any) -> str:
    return NEEDED if any(default is none for none in _NONE[:2]) or default == _NONE[2] else as_yaml(default)


def _comments(kind: type) -> dict[str, str]:
    """Returns the comment behind each field of a dataclass, or else the comment lines directly above it."""
    try:
        lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    except (OSError, TypeError):
        return {}  # `make_dataclass` made it
    comments = {}
    for node in ast.parse("\n".join(lines)).body[0].body:
        if isinstance(node, ast.AnnAssign):
            # The offsets of `ast` count bytes.
            behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
            above = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            if text := behind.lstrip("# ") or " ".join(above):
                comments[node.target.id] = text
    return comments


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
    return [
        Knob(name, _written(taken.default), taken.annotation, _followed(name, texts))
        for name, taken in inspect.signature(component).parameters.items()
        if name != "params"
    ]


def _followed(name: str, texts: dict[str, str]) -> str:
    """Returns the text of an argument; that of another class of ours, where its own is "see `CLASS`"."""
    text = texts.get(name, "")
    if not (see := _SEE.match(text)):
        return text
    ours = (module for path, module in sys.modules.copy().items() if path.startswith("torchtune_ext"))
    other = next(filter(None, (vars(module).get(see[1]) for module in ours)), None)
    return argument_texts(_doc(other)).get(name, text) if other is not None else text


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
