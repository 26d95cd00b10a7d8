"""Typed sections of a config: pydantic dataclasses with type, range, default and help text."""

import functools
from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo

from torchtune_ext.run.errors import MAX_DURATION_S, UsageError, closest_match
from torchtune_ext.settings.components import Component
from torchtune_ext.settings.yaml_types import expected_text, type_error_text, union_members

T = TypeVar("T")

# For the decorator of a recipe's `Config`: `@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True)`.
FORBID_UNKNOWN_KEYS = ConfigDict(extra="forbid")


def _in_64_bits(seed: int) -> int:
    if not -(2**63) <= seed < 2**63:
        raise UsageError("does not fit into 64 bits. Fix: set a smaller seed")
    return seed


Seed = Annotated[int, AfterValidator(_in_64_bits)]

# System calls count a timeout in milliseconds in 32 bits, which overflow after 24.8 days.
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S)]


@dataclass_transform(field_specifiers=(Field,), frozen_default=True)
def config_section(key: str) -> Callable[[type[T]], type[T]]:
    """Make a frozen pydantic dataclass of the config keys below `key`; it raises UsageError."""

    def decorate(cls: type[T]) -> type[T]:
        section: Any = dataclass(config=FORBID_UNKNOWN_KEYS, frozen=True, slots=True)(cls)
        init = section.__init__

        # Code that constructs a section gets the same messages as a config.
        @functools.wraps(init)
        def validated_init(self: Any, /, *args: Any, **values: Any) -> None:  # `self` may be a key, too
            messages = coerce_yaml_values(section, values, f"{key}.")
            try:
                init(self, *args, **values)
            except ValidationError as error:
                for detail in error.errors(include_url=False):
                    messages.setdefault(*_init_error_text(section, key, values, detail))
            if messages:
                raise UsageError("\n".join(messages.values()))

        section.__init__ = validated_init
        return section

    return decorate


def option_fields(section: Any) -> dict[str, FieldInfo]:
    """Return the pydantic fields of a section by name."""
    return section.__pydantic_fields__


def nested_section(field: FieldInfo) -> type | None:
    """Return the section type of a field that is a YAML mapping; None for other fields."""
    section: Any = field.annotation
    return section if is_pydantic_dataclass(section) else None


def option_error_text(key: str, field: FieldInfo, value: Any, error: Any) -> str:
    """Return the message for a value of a known key that pydantic refused with `error`."""
    optional = NoneType in union_members(field.annotation)
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
        return text if nested_section(field) else f"{key}={value} {text}"
    if error["type"] == "missing" or (value is None and not optional and field.is_required()):
        return f"{key} has no value. Fix: set it in the YAML, or {key}=... on the command line"
    if error["type"] == "component":
        text = f": {key}._component_={value}" if isinstance(value, str) else ""
        return f"`{key}:` {error['msg']}{text}{f', or {key}=null' if optional else ''}"
    if (section := nested_section(field)) is not None:
        names = list(option_fields(section))
        if value is None:
            return f"{key}=null is not a mapping. Fix: remove it"
        if shorthand_key := getattr(section, "SHORTHAND_KEY", None):
            plain = expected_text(option_fields(section)[shorthand_key])
            return f"{key}={value} must be {plain}, or a mapping with some of the keys {', '.join(names)}"
        example = f"[{value}]" if "list" in expected_text(option_fields(section)[names[0]]) else "..."
        return f"{key}={value} is not a mapping. Fix: write {key}.{names[0]}={example} (keys: {', '.join(names)})"
    if value is None and not optional:
        return f"{key} has no value. Fix: set {key}=..., or remove the key"
    return type_error_text(key, value, field)


def coerce_yaml_values(section: type, plain: dict[str, Any], where: str = "") -> dict[str, str]:
    """Convert values of `plain`, in place, to the types of their fields.

    An integer becomes text where the field takes text (`output_dir=2026`). A float does not,
    because YAML rewrites it, and a boolean is neither text nor a number. Pydantic converts numeric
    text ("8", "1e-6") to a number.

    Args:
        section: the section type whose fields describe `plain`.
        plain: the values by name.
        where: the prefix of the keys in messages.

    Returns:
        A message for each value that cannot be converted, by its dotted key.
    """
    messages = {}
    for name, field in option_fields(section).items():
        key, value = f"{where}{name}", plain.get(name)
        kinds = union_members(field.annotation)
        if (nested := nested_section(field)) is not None:
            messages |= coerce_yaml_values(nested, value, f"{key}.") if isinstance(value, dict) else {}
        # torchtune rewrites `key=null` to `key._component_=null`.
        elif Component in kinds:
            is_null = isinstance(value, dict) and value.get("_component_", "") is None and NoneType in kinds
            plain[name] = None if is_null else value if not isinstance(value, dict) else Component(value, key)
        elif isinstance(value, bool | float) and type(value) not in kinds and {str, int, float} & set(kinds):
            if isinstance(value, bool) or not {int, float} & set(kinds):
                messages[key] = type_error_text(key, value, field)
        elif isinstance(value, list | tuple) and any(isinstance(item, bool) for item in value):
            messages[key] = type_error_text(key, value, field)
        elif type(value) is int and str in kinds and not {int, float, bool} & set(kinds):
            plain[name] = str(value)
    return messages


def unknown_key_text(key: str, known: list[str], where: str = "the config") -> str:
    """Return the error message for an unknown key, with the closest known key."""
    near = closest_match(key, known)
    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r} in {where}; {hint}"


def _init_error_text(section: type, key: str, values: dict[str, Any], error: Any) -> tuple[str, str]:
    """Return the key and the message for an invalid section that code constructs."""
    if not error["loc"]:
        return key, str(error["ctx"]["error"]) if error["type"] == "value_error" else f"{key}: {error['msg']}"
    name, fields = error["loc"][0], option_fields(section)
    if error["type"] in ("unexpected_positional_argument", "multiple_argument_values"):
        return key, f"{key}: {error['msg']}"
    # Pydantic locates a positional argument by its index.
    name = list(fields)[name] if isinstance(name, int) else name
    full = f"{key}.{name}"
    if name not in fields:
        return full, unknown_key_text(full, [f"{key}.{field_name}" for field_name in fields], f"`{key}:`")
    # An error may concern an item of a list.
    return full, option_error_text(full, fields[name], values.get(name, error["input"]), error)
