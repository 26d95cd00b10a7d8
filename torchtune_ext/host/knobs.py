"""`torchtune-ext knobs` lists the knobs of a recipe, each with its default and its line of text.

    torchtune-ext knobs                                the knobs of grpo_full
    torchtune-ext knobs warmup_sft                     those of another recipe, or of your copy of one: knobs my_grpo.py
    torchtune-ext knobs grpo_full engine               the keys of a node, or the arguments of what configs put there
    torchtune-ext knobs max_tokens                     a key, whatever node it is in
    torchtune-ext knobs torchtune_ext.tasks.math.Math  the arguments of any class or function

The source of all this are the files where a knob is defined. They are read and not imported, so that an answer
takes a moment, and torch is not needed. A knob is a field of `Config` in a recipe. If its comment says "fields of NAME", it is
a node, and its keys are the fields of the dataclass NAME. If it has no default and any type, it is a component, which the key
`_component_` names.
"""

import argparse
import ast
import functools
import json
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, folder, recipe_files
from torchtune_ext.run.errors import Mistake

RECIPE = "grpo_full"  # the recipe of a word that is no recipe
_NODE = re.compile(r"\bfields of (\w+)", re.IGNORECASE)
_LONGEST_DEFAULT = 24  # characters
NEEDED = "(needed)"  # stands for a default where there is none
_GIVEN_BY_US = ("self", "params")  # arguments that no YAML gives; an optimizer gets its params from the recipe
_SEE = re.compile(r"^see `(\w+)`")  # the text of an argument that is explained elsewhere
_PIECE = re.compile(r"(?<=^ {8})\{(\w+)\}$", re.MULTILINE)  # an argument whose text torch keeps in a constant
# An argument, or several, of a docstring: "first, count: text" or "lr (float, optional): text".
_SEVERAL = re.compile(r"^(\w+(?:, \w+)*)(?: \(.*\))?:(?:\s+(.*))?$")


# A field or an argument has a name, a default and a text. The text is the comment behind a field, or above it, or else what
# the docstring says of it below "Args:".
@dataclass(frozen=True, slots=True)
class Knob:
    """A key that YAML may give."""

    name: str
    default: str  # as YAML writes it, or NEEDED
    type: str  # the annotation, as it is written
    text: str  # what it is; "" if its source does not say it


@dataclass(frozen=True, slots=True)
class Definition:
    """A statement that defines a name, and the file in which it stands."""

    node: ast.stmt
    path: Path


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
        raise Mistake(f"the text of {knob.name!r} in {path} names the class {named[1]}, which does not exist")
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
        raise Mistake(f"{name}: no such file, or no recipe: it has no class Config")
    if len(rest) > 1:
        raise Mistake(f"{' '.join(words)}: give a recipe, a knob, or a recipe and a knob, as in: {RECIPE} engine")
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
    raise Mistake(f"{word} is no recipe, and no knob of {name}; {hint}")


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


@dataclass(frozen=True, slots=True)
class Component:
    """A class or function that YAML may name."""

    knobs: list[Knob]  # its arguments
    summary: str  # the first line of its docstring
    definition: Definition


@functools.cache
def _parsed(path: Path) -> tuple[ast.Module, list[str]]:
    text = path.read_text(encoding="utf-8")
    return ast.parse(text), text.splitlines()


def module_file(name: str) -> Path | None:
    """Returns the file of a module by its dotted name, or None if there is none. Nothing is imported."""
    first, *rest = name.split(".")
    if first == "torchtune_ext" and rest and rest[0] in ("recipes", "kernels"):
        base = folder(rest.pop(0))
    else:
        try:
            spec = find_spec(first)
        except ValueError:
            return None
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            return None
        if not spec.submodule_search_locations:
            return None if rest else Path(spec.origin)
        base = Path(next(iter(spec.submodule_search_locations)))
    path = base.joinpath(*rest)
    return next((file for file in (path / "__init__.py", path.with_name(path.name + ".py")) if file.is_file()), None)


def definition(name: str, path: Path) -> Definition | None:
    """Returns what a name means at the top of a file: what defines it there, or in the file from which it is imported."""
    tree = _parsed(path)[0]
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            defined = []
        if name in defined:
            return Definition(node, path)
    # Some packages import what they offer only when it is asked for, in a function.
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            file = _imported_from(node, path) if name == (alias.asname or alias.name) else None
            if file is not None and file != path:
                return definition(alias.name, file)
    return None


def _imported_from(node: ast.ImportFrom, path: Path) -> Path | None:
    if not node.level:
        return module_file(node.module)
    there = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    return next((file for file in (there / "__init__.py", there.with_name(there.name + ".py")) if file.is_file()), None)


def class_of(name: str, path: Path) -> Definition | None:
    """Returns the class of a name in a file, or None if the name means something else or nothing."""
    found = definition(name, path)
    return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def class_anywhere(name: str) -> Definition | None:
    """Returns the class of this name that the package defines, wherever that is, or None."""
    root = module_file("torchtune_ext").parent
    stated = re.compile(rf"^class {name}\b", re.MULTILINE)
    files = (file for file in sorted(root.rglob("*.py")) if stated.search(file.read_text(encoding="utf-8")))
    return next((class_of(name, file) for file in files), None)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _bases(cls: Definition) -> list[Definition]:
    named = [definition(base.id, cls.path) for base in cls.node.bases if isinstance(base, ast.Name)]
    return [base for base in named if base is not None]


def fields_of(cls: Definition) -> list[Knob]:
    """Returns the fields of a dataclass in their order, those of the dataclasses that it derives from first."""
    found: dict[str, Knob] = {}
    for base in _bases(cls):
        if isinstance(base.node, ast.ClassDef) and _is_dataclass(base.node):
            found |= {knob.name: knob for knob in fields_of(base)}
    lines = _parsed(cls.path)[1]
    texts = argument_texts(ast.get_docstring(cls.node) or "")
    for node in cls.node.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in (kind := ast.unparse(node.annotation)):
            name = node.target.id
            text = _comment(node, lines) or texts.get(name, "")
            found[name] = Knob(name, _default(node.value, cls.path), kind, text)
    return list(found.values())


def _comment(node: ast.AnnAssign, lines: list[str]) -> str:
    """Returns the comment behind a field, or else the comment lines that stand directly above it."""
    # The offsets of `ast` count bytes.
    behind = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().strip()
    if behind.startswith("#"):
        return behind.lstrip("# ")
    above: list[str] = []
    number = node.lineno - 2
    while number >= 0 and lines[number].strip().startswith("#"):
        above.insert(0, lines[number].strip().lstrip("# "))
        number -= 1
    return " ".join(above)


def argument_texts(doc: str) -> dict[str, str]:
    """Returns what a docstring says of each argument below its first "Args:". `first, count: text` serves both."""
    lines = doc.splitlines()
    start = next((number for number, line in enumerate(lines) if line.strip() == "Args:"), None)
    if start is None:
        return {}
    found: dict[str, list[str]] = {}
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
            found |= dict.fromkeys(stated[1].split(", "), current)
        else:
            current = []
    return {name: " ".join(parts) for name, parts in found.items()}


def component(path: str) -> Component:
    """Returns the arguments of a class or function by its dotted path.

    Raises:
        ValueError: there is none, or what is there is neither a class nor a function.
    """
    module, _, name = path.rpartition(".")
    file = module_file(module) if module else None
    found = definition(name, file) if file is not None else None
    if found is None or not isinstance(found.node, ast.ClassDef | ast.FunctionDef):
        where = f"{file} defines no class or function {name}" if file else f"there is no module {module or path}"
        raise Mistake(f"{path}: {where}")
    doc = ast.get_docstring(found.node) or ""
    summary = doc.partition("\n")[0]
    if isinstance(found.node, ast.ClassDef) and _is_dataclass(found.node):
        return Component(fields_of(found), summary, found)
    called = _constructor(found) if isinstance(found.node, ast.ClassDef) else found
    if called is None:
        return Component([], summary, found)
    texts = argument_texts(doc) or argument_texts(_joined(found.path))
    texts |= argument_texts(ast.get_docstring(called.node) or "")
    return Component([_followed(knob, found.path) for knob in _arguments(called, texts)], summary, found)


def _joined(path: Path) -> str:
    """Returns the text of a file with its constants in place: torch joins the docstring of an optimizer of such pieces."""

    def piece(match: re.Match) -> str:
        found = definition(match[1], path)
        value = found.node.value if found is not None and isinstance(found.node, ast.Assign) else None
        return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else match[0]

    return _PIECE.sub(piece, "\n".join(_parsed(path)[1]))


def _followed(knob: Knob, path: Path) -> Knob:
    """Returns the knob with the text of another class, where its own text is "see `CLASS`"."""
    see = _SEE.match(knob.text)
    other = class_of(see[1], path) or class_anywhere(see[1]) if see else None
    called = _constructor(other) if other is not None else None
    if called is None:
        return knob
    text = argument_texts(ast.get_docstring(other.node) or "").get(knob.name)
    return replace(knob, text=text) if text else knob


def _constructor(cls: Definition) -> Definition | None:
    for node in cls.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return Definition(node, cls.path)
    made = (_constructor(base) for base in _bases(cls) if isinstance(base.node, ast.ClassDef))
    return next((found for found in made if found is not None), None)


def _arguments(function: Definition, texts: dict[str, str]) -> list[Knob]:
    spec = function.node.args
    names = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(names) - len(spec.defaults)) + spec.defaults
    pairs = [*zip(names, defaults, strict=True), *zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    return [
        Knob(
            name.arg,
            _default(default, function.path),
            ast.unparse(name.annotation) if name.annotation else "",
            texts.get(name.arg, ""),
        )
        for name, default in pairs
        if name.arg not in _GIVEN_BY_US
    ]


def options_of(loss: Definition) -> dict[str, list[Knob]]:
    """Returns the options of each constraint, which `PolicyLoss` takes as keys of its own, by its name and formula.

    They come from the table `CONSTRAINTS` of the module that makes the class it derives from; other components have none.
    """
    if not isinstance(loss.node, ast.ClassDef):
        return {}
    for base in _bases(loss):
        table = definition("CONSTRAINTS", base.path) if isinstance(base.node, ast.Assign) else None
        if table is not None:
            pairs = zip(table.node.value.keys, table.node.value.values, strict=True)
            classes = {ast.literal_eval(key): class_of(value.id, base.path) for key, value in pairs}
            docs = {name: (ast.get_docstring(cls.node) or "").partition("\n")[0] for name, cls in classes.items()}
            return {f"constraint: {name}  {docs[name]}": fields_of(cls) for name, cls in classes.items()}
    return {}


def _default(value: ast.expr | None, path: Path) -> str:
    """Returns a default as YAML writes it, or as Python does if it is more than a literal."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        value = given.get("default", given.get("default_factory"))
        if isinstance(value, ast.Lambda):
            value = value.body
        elif isinstance(value, ast.Name):
            value = ast.parse({"dict": "{}", "list": "[]", "tuple": "()"}.get(value.id, value.id), mode="eval").body
    if isinstance(value, ast.Name) and value.id != "MISSING":
        found = definition(value.id, path)
        if found is not None and isinstance(found.node, ast.Assign):
            value = found.node.value
    if value is None or (isinstance(value, ast.Name) and value.id == "MISSING"):
        return NEEDED
    try:
        return as_yaml(ast.literal_eval(value))
    except ValueError:
        return ast.unparse(value)


def as_yaml(value: Any) -> str:
    """Returns a plain value in YAML's flow style."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    return json.dumps(value, ensure_ascii=False) if value is None or isinstance(value, bool | str) else repr(value)
