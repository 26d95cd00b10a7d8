"""Reads what classes and functions take out of their source, without importing them.

A field or an argument has a name, a default and a text. The text is the comment behind a field, or above it, or else what the
docstring says of it below "Args:".
"""

import ast
import functools
import json
import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import folder

NEEDED = "(needed)"  # stands for a default where there is none
_GIVEN_BY_US = ("self", "params")  # arguments that no YAML gives; an optimizer gets its params from the recipe
_SEE = re.compile(r"^see `(\w+)`")  # the text of an argument that is explained elsewhere
_PIECE = re.compile(r"(?<=^ {8})\{(\w+)\}$", re.MULTILINE)  # an argument whose text torch keeps in a constant
# An argument, or several, of a docstring: "first, count: text" or "lr (float, optional): text".
_SEVERAL = re.compile(r"^(\w+(?:, \w+)*)(?: \(.*\))?:(?:\s+(.*))?$")


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
        raise ValueError(f"{path}: {where}")
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
