"""`torchtune-ext knobs` lists the knobs of a recipe, each with its default and its line of text.

    torchtune-ext knobs                                the knobs of grpo_full
    torchtune-ext knobs warmup_sft                     those of another recipe, or of your copy of one: knobs my_grpo.py
    torchtune-ext knobs grpo_full engine               the keys of a node, or the arguments of what configs put there
    torchtune-ext knobs max_tokens                     a key, whatever node it is in
    torchtune-ext knobs torchtune_ext.tasks.math.Math  the arguments of any class or function

The source of all this are the files where a knob is defined. They are read and not imported (`source.py`), so that an answer
takes a moment, and torch is not needed. A knob is a field of `Config` in a recipe. If its comment says "fields of NAME", it is
a node, and its keys are the fields of the dataclass NAME. If it has no default and any type, it is a component, which the key
`_component_` names.
"""

import argparse
import functools
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from torchtune_ext.host.source import (
    NEEDED,
    Definition,
    Knob,
    as_yaml,
    class_anywhere,
    class_of,
    component,
    fields_of,
    options_of,
)
from torchtune_ext.run.catalog import config_files, folder, recipe_files

RECIPE = "grpo_full"  # the recipe of a word that is no recipe
_NODE = re.compile(r"\bfields of (\w+)", re.IGNORECASE)
_LONGEST_DEFAULT = 24  # characters


@dataclass(frozen=True, slots=True)
class Section:
    """Some knobs that are listed together."""

    title: str
    knobs: list[Knob] | None  # None: there is only the title


def recipe_paths() -> dict[str, Path]:
    """Returns the file of every recipe of ours by its name."""
    return {recipe.name: recipe.path for recipe in recipe_files(folder("recipes"), folder("configs"))}


def recipe_path(word: str) -> Path | None:
    """Returns the file of a recipe: one of ours by its name, or a copy by its path. None: it is no recipe."""
    if (path := recipe_paths().get(word)) is not None:
        return path
    path = Path(word)
    return path if path.suffix == ".py" and path.is_file() and class_of("Config", path) else None


def knobs_of(path: Path) -> list[Knob]:
    """Returns the knobs of the recipe in a file."""
    return fields_of(class_of("Config", path))


def node_class(knob: Knob, path: Path) -> Definition | None:
    """Returns the dataclass whose fields are the keys of a knob, or None if the knob is no node.

    Raises:
        ValueError: the text of the knob names a class that does not exist.
    """
    named = _NODE.search(knob.text)
    if named is None:
        return None
    found = class_of(named[1], path) or class_anywhere(named[1])
    if found is None:
        raise ValueError(f"the text of {knob.name!r} in {path} names the class {named[1]}, which does not exist")
    return found


def is_component(knob: Knob) -> bool:
    """Tells whether `_component_` says what a knob is."""
    return knob.default == NEEDED and knob.type == "Any"


def components(knob: Knob, path: Path) -> list[str]:
    """Returns what the shipped configs of a recipe name as a component, the most frequent first, or else its default preset."""
    recipes = recipe_files(folder("recipes"), folder("configs"))
    own = [recipe for recipe in recipes if recipe.path == path] or recipes
    files = {file for recipe in own for file in recipe.configs.values()}
    for configs in ([_loaded(file) for file in sorted(files)], [_default_preset(path)]):
        nodes = [config.get(knob.name) for config in configs]
        named = Counter(node["_component_"] for node in nodes if isinstance(node, dict) and "_component_" in node)
        if named:
            return [name for name, _ in named.most_common()]
    return []


def _default_preset(path: Path) -> dict[str, Any]:
    """Returns the keys of the preset that a recipe has by default."""
    preset = next((knob.default for knob in knobs_of(path) if knob.name == "preset"), None)
    file = config_files(folder("configs")).get(f"presets/{preset}")
    return _loaded(file) if file else {}


def listing(words: Sequence[str]) -> list[Section]:
    """Returns what the words of the command line ask for.

    Raises:
        ValueError: a word means nothing; the message gives the nearest one.
    """
    name, rest = RECIPE, list(words)
    if rest and (recipe_path(rest[0]) or rest[0].endswith(".py")):
        name = rest.pop(0)
    path = recipe_path(name)
    if path is None:
        raise ValueError(f"{name}: no such file, or no recipe: it has no class Config")
    if len(rest) > 1:
        raise ValueError(f"{' '.join(words)}: give a recipe, a knob, or a recipe and a knob, as in: {RECIPE} engine")
    return _of_word(name, path, rest[0]) if rest else [overview(name, path)]


def overview(name: str, path: Path) -> Section:
    """Returns all knobs of a recipe, without the keys of its nodes."""
    shown, nodes = [], []
    for knob in knobs_of(path):
        is_node = node_class(knob, path) is not None
        if is_node or is_component(knob):
            nodes.append(knob.name)
        if is_node and knob.default == "{}":
            shown.append(replace(knob, default="{...}"))
        elif is_component(knob) and _default_preset(path).get(knob.name):
            shown.append(replace(knob, default="(preset)"))
        else:
            shown.append(knob)
    title = (
        f"{name} has {len(shown)} knobs: `key: value` in YAML, key=value on the command line, and node.key=value for a key "
        f"of a node. `torchtune-ext knobs {name} NAME` says what is in {', '.join(nodes)}."
    )
    return Section(title, shown)


def _of_word(name: str, path: Path, word: str) -> list[Section]:
    knobs = {knob.name: knob for knob in knobs_of(path)}
    if word in knobs:
        return _of_knob(name, path, knobs[word])
    keys = [key for knob in knobs.values() for key in _keys(knob, path)]
    if asked := [key for key in keys if word in (key.name, key.name.rpartition(".")[2])]:
        return [Section(f"{name}, {word}:", asked)]
    if "." in word and word.partition(".")[0] not in knobs:
        return _of_component(word)
    known = [*recipe_paths(), *knobs, *(key.name for key in keys), *(key.name.rpartition(".")[2] for key in keys)]
    near = get_close_matches(word, known, n=1) or get_close_matches(word.rpartition(".")[2], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"`torchtune-ext knobs {name}` lists the knobs"
    raise ValueError(f"{word} is no recipe, and no knob of {name}; {hint}")


def _of_knob(name: str, path: Path, knob: Knob) -> list[Section]:
    title = f"{name}, {knob.name}: {knob.text}"
    preset = _default_preset(path).get(knob.name)
    if isinstance(preset, dict) and (settings := {key: preset[key] for key in preset if key != "_component_"}):
        title += f"; the default preset sets {as_yaml(settings)}"
    if keys := _keys(knob, path):
        return [Section(title, keys)]
    if not is_component(knob):
        return [Section(f"{name}, {knob.name}:", [knob])]
    parts = [section for component_path in components(knob, path) for section in _of_component(component_path)]
    named = [replace(part, knobs=_below(knob, part.knobs)) for part in parts]
    return [Section(title, None), *named]


def _below(node: Knob, keys: Sequence[Knob]) -> list[Knob]:
    """Returns the keys of a node under their full names, as in engine.dtype."""
    return [replace(key, name=f"{node.name}.{key.name}") for key in keys]


def _keys(knob: Knob, path: Path) -> list[Knob]:
    """Returns the keys of a node. A knob that is no node has none."""
    record = node_class(knob, path)
    return _below(knob, fields_of(record)) if record else []


def _of_component(path: str) -> list[Section]:
    found = component(path)
    sections = [Section(f"_component_: {path}  {found.summary}".rstrip(), found.knobs)]
    for title, knobs in options_of(found.definition).items():
        sections.append(Section(f"with {title}", knobs))
    return sections


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


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def offer_help(run: ModuleType) -> None:
    """Lets `tune run RECIPE --help` list the knobs of a recipe, where torchtune would say that --config is missing.

    Args:
        run: the module `torchtune._cli.run`.
    """
    theirs = run.Run._run_cmd

    @functools.wraps(theirs)
    def ours(self: Any, args: argparse.Namespace) -> None:
        path = recipe_path(args.recipe) if {"-h", "--help"} & set(args.recipe_args) else None
        if path is None:
            theirs(self, args)
            return
        print(f"usage: tune run [TORCHRUN-OPTIONS] {args.recipe} --config CONFIG [key=value ...]\n")
        print(rendered([overview(args.recipe, path)], _terminal_width()))

    run.Run._run_cmd = ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `torchtune-ext knobs`."""
    what = "a recipe (grpo_full without one), a knob, a recipe and a knob, or the dotted path of a class or function"
    parser.add_argument("words", nargs="*", metavar="NAME", help=what)


def main(args: argparse.Namespace) -> int:
    """Prints the list. Returns the exit status: 0, or 2 for a word that means nothing."""
    # A component may be in a module of the working directory.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        print(rendered(listing(args.words), _terminal_width()), flush=True)
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain again when it closes its output at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        print(f"torchtune-ext knobs: {error}", file=sys.stderr)
        return 2
    return 0
