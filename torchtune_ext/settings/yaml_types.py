"""Compare YAML values with type annotations.

YAML does not read `No`, `42` and `Format: x` as text.
"""

import inspect
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableSequence, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from torchtune_ext.run.errors import UsageError, closest_match

TYPE_TEXTS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
# YAML represents each of these types as a list.
LIST_TYPES = (list, tuple, set, frozenset, Sequence, MutableSequence, Collection, Iterable)


def require_type(key: str, value: Any, kind: Any, default: Any = None) -> None:
    """Raise UsageError if a YAML value does not fit an annotation. Every value fits an unknown one.

    Args:
        key: the dotted config key, for messages.
        value: the value from YAML.
        kind: the annotation.
        default: the default value, for messages.
    """
    if not _fits(value, kind):
        kinds = [each for each in union_members(kind) if each is not NoneType]
        default_text = "" if default is None or default is inspect.Parameter.empty else f"; the default is {default!r}"
        hint = _rewrite_hint(key, value, kinds) or default_text
        raise UsageError(f"{key}={value!r} must be {kinds_text(*kinds)}{hint}")


def kinds_text(*kinds: Any) -> str:
    """Return what annotations permit: "text or null"; "" if they are unknown."""
    members = [each for kind in kinds for each in union_members(kind) if each not in (Any, inspect.Parameter.empty)]
    return " or ".join(dict.fromkeys("null" if each is NoneType else _kind_text(each) for each in members))


def type_error_text(key: str, value: Any, field: FieldInfo) -> str:
    """Return the message for a value that does not fit the field of a section."""
    kinds = [member for member in union_members(field.annotation) if member is not NoneType]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    description = f" ({field.description})" if field.description else ""
    if isinstance(value, str) and words and all(isinstance(word, str) for word in words):
        near = closest_match(value, words)
        others = [_kind_text(kind) for kind in kinds if get_origin(kind) is not Literal]
        suggestion = f"; did you mean {near!r}?" if near else ""
        return f"{key}={value!r} is unknown: use {_either([*map(repr, words), *others])}{suggestion}"
    null = ", or null" if NoneType in union_members(field.annotation) else ""
    # A value that is only out of range needs no rewrite hint.
    hint = "" if _fits(value, field.annotation) else _rewrite_hint(key, value, kinds)
    text = expected_text(field)
    if key.endswith("_s"):
        text = text.replace("a number", "a number of seconds", 1)
    return f"{key}={value!r} must be {text}{null}{hint or description}"


def expected_text(field: FieldInfo) -> str:
    """Return the values that a field takes, except null: "a whole number of at least 1"."""
    texts = []
    for member in _flatten_union(field.annotation):
        kind, *constraints = get_args(member) if get_origin(member) is Annotated else [member]
        bounds = [*constraints, *field.metadata] if kind in (int, float) else []
        texts += [] if kind is NoneType else [_kind_text(kind) + _bounds_text(bounds)]
    return " or ".join(dict.fromkeys(texts))


def _bounds_text(constraints: Iterable[Any]) -> str:
    """Return the range of a number: " of at least 1", or "" if it is unbounded."""
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "at most"}
    bounds = [
        f"{text} {getattr(constraint, name):g}"
        for constraint in constraints
        for name, text in words.items()
        if getattr(constraint, name, None) is not None
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def union_members(kind: Any) -> list[Any]:
    """Return the members of a union (or the annotation itself) without `Annotated` constraints."""
    members = [get_args(member)[0] if get_origin(member) is Annotated else member for member in _flatten_union(kind)]
    # A YAML value is never a tensor.
    return [member for member in members if getattr(member, "__name__", "") != "Tensor"] or members


def _flatten_union(kind: Any) -> list[Any]:
    union = get_origin(kind) in (Union, UnionType)
    return [member for part in get_args(kind) for member in _flatten_union(part)] if union else [kind]


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a YAML value fits a type annotation; True for an unknown annotation."""
    if len(members := union_members(kind)) > 1:
        return any(_fits(value, member) for member in members)
    kind = members[0]
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin in (int, float):
        return isinstance(value, int if origin is int else int | float) and not isinstance(value, bool)
    if origin in (bool, str, NoneType):
        return isinstance(value, origin) or (origin is bool and value in (0, 1))
    if origin in (Path, os.PathLike):
        return isinstance(value, str | os.PathLike)
    if origin is Literal:
        return value in inside
    # A component may take the dotted path of a function.
    if origin is Callable:
        return callable(value) or isinstance(value, str)
    # A string is also a sequence, but not a list of items.
    if origin in LIST_TYPES:
        if not isinstance(value, list | tuple) or len(value) != (_length(kind) or len(value)):
            return False
        each = inside if _length(kind) else inside[:1] * len(value) or [Any] * len(value)
        return all(map(_fits, value, each))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        each = inside[1] if len(inside) == 2 else Any
        return isinstance(value, Mapping) and all(_fits(item, each) for item in value.values())
    return True


def _length(kind: Any) -> int | None:
    """Return the number of items if the annotation is a tuple of fixed length; otherwise None."""
    # Many users write tuple[str] for tuple[str, ...], so one item is not a fixed length.
    fixed = get_origin(kind) is tuple and ... not in get_args(kind) and len(get_args(kind)) > 1
    return len(get_args(kind)) if fixed else None


def _kind_text(kind: Any) -> str:
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        return _either(list(map(repr, inside)))
    if origin in LIST_TYPES:
        items = " or ".join(map(_kind_text, union_members(inside[0]))) if inside and inside[0] is not Any else ""
        return f"a list{f' of {_length(kind)}' if _length(kind) else ''}{f', each item {items}' if items else ''}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        values = " or ".join(map(_kind_text, union_members(inside[1]))) if inside and inside[1] is not Any else ""
        return f"a mapping{f', each value {values}' if values else ''}"
    others = {Path: "a path", os.PathLike: "a path", Callable: "a function"}
    return (TYPE_TEXTS | others).get(origin) or f"a {getattr(origin, '__name__', origin)}"


def _either(texts: list[str]) -> str:
    """Join texts: "a, b or c"."""
    return " or ".join([*([", ".join(texts[:-1])] if texts[1:] else []), texts[-1]])


def _rewrite_hint(key: str, value: Any, kinds: list[Any]) -> str:
    """Return the end of a message: how to write the value so that YAML reads one of the kinds."""
    origins = [get_origin(kind) or kind for kind in kinds]
    if {str, Path} & set(origins) or (Literal in origins and isinstance(value, bool)):
        if isinstance(value, bool):
            words = "yes, on and true" if value else "no, off and false"
            quoted = json.dumps("yes" if value else "no")
            return f", and YAML reads {words} as a boolean: quote it, '{key}={quoted}'"
        only = " if the brackets are part of the text" if isinstance(value, list) else ""
        return f": quote it{only}, '{key}={json.dumps(_source_text(value), ensure_ascii=False)}'"
    if {int, float} & set(origins) and isinstance(value, str | float):
        try:
            number = float(value)
        except ValueError:
            return ""
        whole = number.is_integer()
        if not math.isfinite(number):
            return ""
        return f": {key}={int(number) if whole else number}" if float in origins or whole else ""
    if isinstance(value, str | int | float) and any(
        origin in LIST_TYPES and not _length(kind) for origin, kind in zip(origins, kinds, strict=True)
    ):
        return f": {key}=[{value}]"
    is_mapping = any(_kind_text(kind).startswith("a mapping") for kind in kinds)
    return f", as in {key}.NAME=VALUE" if is_mapping else ""


def _source_text(value: Any) -> str:
    """Return the text that YAML has parsed as a mapping, a list or a number."""
    if isinstance(value, Mapping):
        # YAML reads "{question}" and "Question:" as the same mapping. "{question}" is more common.
        braces = all(item is None and " " not in str(key) for key, item in value.items())
        parts = [f"{key}" if braces else f"{key}: {_source_text(item)}".rstrip() for key, item in value.items()]
        return f"{{{', '.join(parts)}}}" if braces else ", ".join(parts)
    return (
        f"[{', '.join(map(_source_text, value))}]" if isinstance(value, list) else str("" if value is None else value)
    )


def kind_of(value: Any) -> str:
    """Return the type name of a value with its article: "a list", "an int", "None"."""
    kind = type(value).__name__
    return f"a{'n' * (kind[:1].lower() in 'aeiou')} {kind}" if value is not None else "None"
