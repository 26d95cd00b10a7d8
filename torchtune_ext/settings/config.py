"""Load the YAML config of a recipe into one typed settings object.

The result holds no OmegaConf nodes.
"""

import json
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Container, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic.fields import FieldInfo

from torchtune_ext.run.catalog import NOT_REGULAR_HINT, recipe_for_config
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.folder import run_output_dir
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.settings.command_line import check_arguments
from torchtune_ext.settings.components import Component, import_recipe
from torchtune_ext.settings.presets import find_preset
from torchtune_ext.settings.sections import (
    coerce_yaml_values,
    nested_section,
    option_error_text,
    option_fields,
    unknown_key_text,
)
from torchtune_ext.settings.yaml_types import union_members

T = TypeVar("T")

# This resolver returns the reference `${...}` itself. To find the values that come from the
# environment, `_env_references` uses it in place of oc.env. So run.json contains no secrets.
_ENV_RESOLVER = "torchtune_ext.env"
_ENV = re.compile(r"\$\{\s*oc\.env\s*:")
_BARE = re.compile(r"[\w./+-]+")  # a resolver argument that needs no quotes
# The keys that hold paths. Any component argument with such a name also matches.
_PATH_KEYS = re.compile(r"([\w.]+[._])?(dir|path|file|folder)|preset|replay|tokenizer\.template")
_SHELL = re.compile(r"\$[A-Za-z_({]")  # shell syntax: $NAME, ${NAME}, $(command)
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 3900  # bytes; Linux allows 4,096, and a run writes files below its folder
_NON_INPUT_KEYS = ("output_dir", "logging")  # keys that never name an input file of the run
_SNAPSHOT_ATTRIBUTE = "_settings_snapshot"  # the attribute that stores the result of `settings_snapshot`

# Old name -> new name of config keys. The old name works until the next version.
RENAMED_KEYS = {"depth": "prefetch_steps"}
# Config key -> hint that is appended to the message about an invalid value.
HINTS = {
    "resume_from_checkpoint": ". To start from other weights, set model_dir=PATH",
    "evaluation": ". To run without held-out problems, set evaluation.task=null",
    "evaluation.every": ". To run without held-out problems, set evaluation.task=null",
}
# Recipe name that shares a file -> the config key that it implies, and the behavior without it.
IMPLIED_KEYS = {
    "grpo_lora": ("model.lora_attn_modules", "all weights are trained"),
    "grpo_async": ("staleness", "sampling and training alternate"),
}
MAX_UNKNOWN_KEYS = 3  # a config with more unknown keys is reported as written for another recipe


def load_config(schema: type[T], cfg: DictConfig) -> T:
    """Validate the YAML and the overrides of a recipe against its `Config`.

    `Config` is a pydantic dataclass with `config=FORBID_UNKNOWN_KEYS`. A field with such a
    dataclass as its type is a YAML mapping; a field of type `Component` becomes a `Component`.
    Defaults are filled in before references are resolved, so `${...}` may name an unset key.

    Args:
        schema: the `Config` class of the recipe.
        cfg: the YAML merged with the command-line overrides.

    Returns:
        An instance of `schema`.

    Raises:
        UsageError: a key is unknown, a value has a wrong type or is out of range, a required value
            is missing, or the preset is unknown. The message has one line per error.
    """
    _require_dataclass(schema)
    known = option_fields(schema)
    cfg = _with_current_keys(cfg, known)
    try:
        preset = cfg.get("preset", known["preset"].get_default() if "preset" in known else None)
    except OmegaConfBaseException as error:
        raise UsageError(_reference_error_text(error, "preset")) from None
    unknown = [str(key) for key in cfg if key not in known]
    if len(unknown) > MAX_UNKNOWN_KEYS:
        raise UsageError(
            f"{len(unknown)} keys of this config are unknown to the recipe ({', '.join(unknown[:5])}, ...): it is written for "
            f"another recipe{_guess_recipe(cfg)}. Fix: copy one of our configs: `tune cp` and a name from `tune ls`"
        )
    if dotted := [str(key) for key in cfg if "." in str(key)]:
        above, _, below = dotted[0].partition(".")
        raise UsageError(
            f"{dotted[0]}: dotted keys work only on the command line. Fix: write `{above}: {{{below}: ...}}` in YAML"
        )
    # The YAML and the command line override the keys of the preset.
    if preset is not None:
        cfg = _merge_preset(load_preset(_expand_path("preset", preset), list(known)), cfg)
    given = _expand_shorthand(schema, cfg)
    merged = given.copy()
    _fill_defaults(schema, merged)
    # Each run that a W&B agent starts gets its own folder. The folder is set before references are
    # resolved, so paths that refer to `output_dir` follow it.
    folder = _get_node(merged, "output_dir")
    if folder is not None and type(folder._value()) in (str, int) and not folder._is_missing():
        merged.output_dir = run_output_dir(str(folder._value()))
    unresolved: Any = OmegaConf.to_container(merged)  # run.json keeps the references
    try:
        for key in OmegaConf.missing_keys(merged):
            raise UsageError(f"{key} has no value. Fix: set it in the YAML, or {key}=... on the command line")
        _read_numbers(schema, merged)
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise UsageError(_reference_error_text(error, str(error.full_key))) from None
    plain = _expand_paths(OmegaConf.to_container(merged))
    settings, messages = _validate(schema, plain, unresolved)
    if settings is None or messages:
        raise UsageError("\n".join(messages))
    setattr(settings, _SNAPSHOT_ATTRIBUTE, _make_snapshot(settings, plain, unresolved, given))
    return settings


def _with_current_keys(cfg: DictConfig, known: Container[str]) -> DictConfig:
    """Return the config with the current names of renamed keys; warn about each old name."""
    cfg = cfg.copy()
    for old, new in RENAMED_KEYS.items():
        if old in cfg and old not in known and new in known and new not in cfg:
            warnings.warn(f"{old}: deprecated config key. Fix: rename it to {new}", FutureWarning, stacklevel=2)
            cfg[new] = cfg._get_node(old)
            del cfg[old]
    return cfg


def _require_dataclass(schema: Any) -> None:
    """Raise UsageError if the `Config` of a recipe is not a pydantic dataclass."""
    if not is_pydantic_dataclass(schema):
        raise UsageError(
            f"{schema.__module__}.{schema.__qualname__} is not a pydantic dataclass. Fix: decorate it with "
            "@dataclass(config=FORBID_UNKNOWN_KEYS, kw_only=True), as in recipes/grpo.py"
        )
    for name, field in option_fields(schema).items():
        if isinstance(field.default, str) and field.default == MISSING:
            raise UsageError(f"{schema.__qualname__}.{name}: remove `= MISSING`; a field without a default is required")


def _validate(schema: type[T], plain: dict[str, Any], unresolved: dict[str, Any]) -> tuple[T | None, list[str]]:
    """Validate plain values against a schema.

    Args:
        schema: the `Config` class.
        plain: the values; converted in place.
        unresolved: the same values with their references, because a message must show
            `${oc.env:TOKEN}` and not the secret.

    Returns:
        The settings (None after a pydantic error), and a message for each invalid value.
    """
    messages, settings = coerce_yaml_values(schema, plain), None
    try:
        settings = TypeAdapter(schema).validate_python(plain)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key, field = _locate_error(schema, detail["loc"])
            # Pydantic reports every alternative of a union as a separate error; keep the first.
            messages.setdefault(key, _describe_error(schema, plain, unresolved, key, field, detail))
    return settings, list(messages.values())


def read_config(config: str, overrides: Sequence[str], recipe: str | None = None) -> Any:
    """Load the settings of a run that samples.

    Args:
        config: a YAML file, or the name of one of our configs.
        overrides: `key=value` settings that override the config.
        recipe: name, file or module of the recipe; None: the recipe that the config is written for.

    Raises:
        UsageError: the config or recipe is missing, the recipe has no engine, or a setting is
            invalid (`load_config`).
    """
    cfg = merge_config(config, overrides)
    named = recipe or recipe_for_config(config)
    if named is None:
        raise UsageError(
            f"--config {config}: the recipe is unknown. Fix: add --recipe grpo_full, or your own: --recipe my_grpo.py"
        )
    schema: Any = getattr(import_recipe(named, "--recipe "), "Config", None)
    if schema is not None:
        _require_dataclass(schema)
    if schema is None or "engine" not in option_fields(schema):
        raise UsageError(
            f"--config {config} is written for {named}, which does not sample: its Config has no `engine`. Fix: use the "
            "config of a GRPO recipe, such as grpo/tiny"
        )
    return load_config(schema, cfg)


def merge_config(config: str, overrides: Sequence[str], recipe: str | None = None) -> DictConfig:
    """Merge `key=value` overrides into a config as torchtune does.

    Args:
        config: a YAML file, or the name of one of our configs.
        overrides: the `key=value` arguments.
        recipe: the recipe file that the config must be written for; None: any recipe.

    Raises:
        UsageError: an override is invalid, the config is missing, or it is written for another
            recipe.
    """
    from torchtune.config._parse import TuneRecipeArgumentParser
    from torchtune.config._utils import _merge_yaml_and_cli_args

    argv = ["", "--config", config, *overrides]
    check_arguments(argv, recipe)
    parsed, settings = TuneRecipeArgumentParser().parse_known_args(argv[1:])
    return _merge_yaml_and_cli_args(Namespace(**vars(parsed)), settings)


def warn_if_setting_missing(recipe: str, arguments: Sequence[str]) -> None:
    """Print a line if a config does not set the key that the name of its recipe implies.

    Args:
        recipe: the name of the recipe.
        arguments: the command-line arguments after the recipe.
    """
    if recipe in IMPLIED_KEYS and "--config" in arguments[:-1]:
        key, consequence = IMPLIED_KEYS[recipe]
        index = list(arguments).index("--config")
        cfg = merge_config(arguments[index + 1], [*arguments[:index], *arguments[index + 2 :]])
        # The recipe reports unresolvable references when it loads the config.
        with suppress(OmegaConfBaseException):
            if not OmegaConf.select(cfg, key, default=None):
                print_text(format_labels([("recipe", f"{recipe}, but {key} is not set: {consequence}")]))


def _expand_shorthand(schema: type, given: DictConfig) -> DictConfig:
    """Expand values by `SHORTHAND_KEY`: `precision: bf16` becomes `precision: {flow: bf16}`."""
    given = given.copy()
    for name, field in option_fields(schema).items():
        shorthand_key = getattr(nested_section(field), "SHORTHAND_KEY", None)
        value = _get_node(given, name)
        if shorthand_key is None or value is None or value._is_interpolation() or OmegaConf.is_config(value):
            continue
        given[name] = {shorthand_key: value._value()}
    return given


def _read_numbers(section: type, node: Any) -> None:
    """Replace references to numeric text in place: N="4" makes `${oc.env:N}` 4 in an int field."""
    for name, field in option_fields(section).items():
        if name not in node or not (value := _get_node(node, name)):
            continue
        if (nested := nested_section(field)) is not None and isinstance(value, DictConfig):
            _read_numbers(nested, value)
        elif value._is_interpolation() and {int, float} & set(union_members(field.annotation)):
            kind: Any = field.annotation
            resolved = node[name]
            with suppress(ValidationError):
                node[name] = TypeAdapter(kind).validate_python(resolved) if isinstance(resolved, str) else resolved


def _get_node(config: Any, key: Any) -> Any:
    """Return the OmegaConf node at a key without resolving references; None for a missing key."""
    return config._get_node(key)


def _fill_defaults(section: type, node: Any, instance: Any = None) -> None:
    """Write the defaults of missing keys into a node, in the types that YAML would give.

    Args:
        section: the section type of the node.
        node: the OmegaConf node; changed in place.
        instance: an instance of `section` that provides the defaults; None: the field defaults.
    """
    for name, field in option_fields(section).items():
        nested, required = nested_section(field), field.is_required() and instance is None
        default = field.get_default(call_default_factory=True) if instance is None else getattr(instance, name)
        if name not in node and nested is not None:
            node[name] = {} if required else _tuples_to_lists(asdict(default))
        elif name not in node and not required:
            node[name] = _tuples_to_lists(default)
        if nested is not None and isinstance(value := _get_node(node, name), DictConfig) and not value._is_none():
            _fill_defaults(nested, value, None if required else default)


def _tuples_to_lists(value: Any) -> Any:
    """Convert the tuples in a plain value to lists."""
    if isinstance(value, dict):
        return {key: _tuples_to_lists(item) for key, item in value.items()}
    return [_tuples_to_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _expand_paths(value: Any, key: str = "") -> Any:
    """Expand a leading ~ in the paths of a plain value.

    Raises:
        UsageError: the value of a path key is not a valid path.
    """
    if isinstance(value, dict):
        return {name: _expand_paths(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    return [_expand_paths(item, key) for item in value] if isinstance(value, list) else _expand_path(key, value)


def _expand_path(key: str, value: Any) -> Any:
    """Expand the value of one key (`_expand_paths`)."""
    # A shell expands ~ only at the beginning of an argument, not after `output_dir=`.
    if not isinstance(value, str) or not _PATH_KEYS.fullmatch(key) or "{{" in value or "{%" in value:
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value
    path = os.path.expanduser(value)
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        names = [b"\0"]
    if not path.strip():
        is_folder = key.endswith(("dir", "folder"))
        fix = "write `.` for the working directory" if is_folder else "leave it out, or name a file"
        raise UsageError(f"{key}={value!r} is empty; expected a path. Fix: {fix}")
    if any(b"\0" in name for name in names):
        raise UsageError(
            f"{key}={value!r} contains a character that is invalid in a path; expected the name of a file or folder"
        )
    if max(map(len, names)) > MAX_NAME_BYTES or sum(map(len, names)) + len(names) > MAX_PATH_BYTES:
        raise UsageError(
            f"{key}={value[:40]}... is too long; expected at most {MAX_NAME_BYTES} bytes in a name and "
            f"{MAX_PATH_BYTES:,} in a path. Fix: choose a shorter one"
        )
    # An existing input file may have any name.
    if key.split(".")[0] not in _NON_INPUT_KEYS and os.path.exists(path):
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise UsageError(f"{key}={value}: {NOT_REGULAR_HINT}")
        return path
    if path.startswith("~"):
        raise UsageError(f"{key}={value}: unknown user {path.split('/')[0][1:]!r}. Fix: write the full path")
    if _SHELL.search(path):
        raise UsageError(
            f"{key}={value}: `$` is shell syntax, which a setting does not support. Fix: write ${{oc.env:NAME}} for an "
            "environment variable"
        )
    return path


def _locate_error(schema: type, location: tuple) -> tuple[str, FieldInfo | None]:
    """Return the key of a pydantic error and its field; the field of an unknown key is None."""
    section, field, names = schema, None, []
    for name in location:
        names.append(str(name))
        field = option_fields(section).get(name)
        if field is None or (nested := nested_section(field)) is None:
            break
        section = nested
    return ".".join(names), field


def _describe_error(
    schema: type, plain: dict[str, Any], unresolved: dict[str, Any], key: str, field: FieldInfo | None, error: Any
) -> str:
    """Return the message for a pydantic error."""
    if field is None:
        return _describe_unknown_key(key, schema, plain)
    *above, last = key.split(".")
    value, reference = (reduce(getitem, above, tree).get(last) for tree in (plain, unresolved))
    value = reference if "${" in str(reference) else value
    if key == "loss" and value is None and plain.get("preset") is None:
        return f"{option_error_text(key, field, value, error)}, or name a preset, which sets it"
    return option_error_text(key, field, value, error) + HINTS.get(key, "")


def _describe_unknown_key(key: str, schema: type, plain: dict[str, Any]) -> str:
    """Return the message for an unknown key with the closest known key."""
    section, dot, below = key.partition(".")
    names = list(option_fields(schema))
    nested = {name: kind for name, field in option_fields(schema).items() if (kind := nested_section(field))}
    if dot:
        inside = list(option_fields(nested[section]))
        # `n` of vLLM's SamplingParams corresponds to `samples_per_prompt`.
        message = unknown_key_text(key, names if below == "n" else inside, f"`{section}:`")
        if section == "sampling" and below.startswith("stop"):
            return f"{message} Stop strings are not supported: a completion ends with one of these token ids"
        if section == "engine" and "did you mean" not in message:
            return f"unknown key {key!r} in `engine:`. Fix: pass an argument of vLLM as engine.extra_args.{below}"
        return message
    # A top-level key may also belong into a section, or be an argument of a component.
    inside = [f"{name}.{below}" for name, kind in nested.items() for below in option_fields(kind)]
    components = [(name, node) for name in names if isinstance(node := plain.get(name), Component)]
    arguments = [f"{name}.{argument}" for name, component in components for argument in component.argument_names()]
    return unknown_key_text(key, [*names, *inside, *arguments])


def _guess_recipe(keys: Container[Any]) -> str:
    """Return ", RECIPE" for the recipe that the keys of a config point to, or ""."""
    recipes = {"samples_per_prompt": "grpo_full", "num_problems": "warmup_sft"}
    return next((f", {recipe}" for key, recipe in recipes.items() if key in keys), "")


def _reference_error_text(error: OmegaConfBaseException, key: str) -> str:
    """Return the message for a `${...}` reference that cannot be resolved."""
    text = str(error).splitlines()[0]
    if variable := re.search(r"Environment variable '(\w+)' not found", text):
        name = variable[1]
        return (
            f"{key}: the environment variable {name} is not set. Fix: `export {name}=...`, or write "
            f"${{oc.env:{name},default}}"
        )
    if (known := re.search(r"Interpolation key '(\w+)' not found", text)) and known[1] in os.environ:
        return f"{key}: {known[1]} is an environment variable, not a key. Fix: write ${{oc.env:{known[1]}}}"
    if unknown := re.search(r"Unsupported interpolation type (\w+)", text):
        return (
            f"{key}: ${{{unknown[1]}:...}} is unknown; expected ${{KEY}}, ${{oc.env:NAME}} or ${{divide:A,B}}. Fix: "
            f"let a shell fill it in, as in {key}=runs/$(date +%F)"
        )
    return f"{key}: {text}"


def settings_snapshot(settings: object) -> dict[str, Any]:
    """Return the settings to store and to show.

    A section contains only the keys that were given.

    Args:
        settings: the result of `load_config`.
    """
    return getattr(settings, _SNAPSHOT_ATTRIBUTE)


def _make_snapshot(
    settings: Any, plain: dict[str, Any], unresolved: dict[str, Any], given: DictConfig
) -> dict[str, Any]:
    snapshot = {}
    for name, field in option_fields(type(settings)).items():
        value = getattr(settings, name)
        if nested_section(field):
            keys = given.get(name) or {}
            snapshot[name] = {key: _snapshot_value(plain[name][key], getattr(value, key)) for key in keys}
        else:
            snapshot[name] = _snapshot_value(plain.get(name), value)
    # A value from the environment may be a secret token, so its reference is stored instead.
    for path, text in _env_references(OmegaConf.create(_mark_env_references(unresolved))).items():
        *above, last = path
        node = snapshot
        for key in above:
            node = node[key] if isinstance(node, list) or (isinstance(node, dict) and key in node) else None
        if isinstance(node, list) or (isinstance(node, dict) and last in node):
            node[last] = text
    return snapshot


def _snapshot_value(plain: Any, value: Any) -> Any:
    """Return the stored form of a value: containers as given, plain values as parsed."""
    return deepcopy(plain) if isinstance(plain, dict | list) and value is not None else value


def named_paths(settings: Any) -> list[Path]:
    """Return the existing files and folders that the settings name as inputs."""
    paths: list[Path] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict | list | tuple):
            for value in node.values() if isinstance(node, dict) else node:
                walk(value)
        # Linux refuses longer paths, and Python refuses paths with a NUL.
        elif isinstance(node, str) and node and len(node) < 4096 and "\0" not in node and os.path.exists(node):
            paths.append(Path(node))

    walk({key: value for key, value in asdict(settings).items() if key not in _NON_INPUT_KEYS})
    return paths


def _mark_env_references(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _mark_env_references(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_mark_env_references(value) for value in node]
    return _ENV.sub(f"${{{_ENV_RESOLVER}:", node) if isinstance(node, str) else node


def _env_references(node: DictConfig | ListConfig) -> dict[tuple, str]:
    """Return the reference text of each value from the environment, by its key path."""
    references: dict[tuple, str] = {}
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        # A value comes from the environment if reading it calls the resolver `_ENV_RESOLVER`.
        _lookups.clear()
        try:
            value = node[key]
        except Exception:  # noqa: BLE001 (the code of a resolver)
            # A user's resolver may raise if it receives the text `${...}` instead of a value. The
            # settings are valid nevertheless, because they were resolved before.
            value = None
        if _lookups:
            # If another resolver hides the reference, store the text of the YAML.
            whole = isinstance(value, str) and f"${{{_ENV_RESOLVER}:" in value
            text = str(value if whole else _get_node(node, key)._value())
            references[(key,)] = text.replace(f"${{{_ENV_RESOLVER}:", "${oc.env:")
        elif isinstance(value, DictConfig | ListConfig):
            references |= {(key, *path): text for path, text in _env_references(value).items()}
    return references


# The references that `_resolve_env` has seen since the list was cleared.
_lookups: list[str] = []


def _resolve_env(*arguments: Any) -> str:
    def quote(value: Any) -> str:
        if isinstance(value, str):
            return value if _BARE.fullmatch(value) or "${" in value else json.dumps(value, ensure_ascii=False)
        return json.dumps(value, default=str)

    text = f"${{{_ENV_RESOLVER}:{','.join(map(quote, arguments))}}}"
    _lookups.append(text)
    return text


def load_preset(preset: str, known: list[str]) -> dict[str, Any]:
    """Load the keys of a preset.

    Args:
        preset: the name of one of our presets, or the path of a YAML file.
        known: the config keys of the recipe.

    Raises:
        UsageError: the preset was not found, is not valid YAML, or has an unknown key.
    """
    file = find_preset(preset)
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise UsageError(f"preset={preset}: {file} is not valid YAML ({text}). Fix: correct it") from None
    if not isinstance(loaded, DictConfig):
        raise UsageError(f"preset={preset}: {file} has no config keys; expected `key: value` lines")
    loaded = _with_current_keys(loaded, known)
    for key in loaded:
        if key == "preset" or key not in known:
            raise UsageError(unknown_key_text(str(key), [name for name in known if name != "preset"], f"preset {file}"))
    values: Any = OmegaConf.to_container(loaded)
    return values


def _merge_preset(preset: dict[str, Any], given: DictConfig) -> DictConfig:
    """Merge the values of `given` over `preset`, section by section."""
    merged = OmegaConf.create(preset)
    for key in given:
        # `_get_node` keeps references, which are not resolved yet.
        given_node, preset_node = _get_node(given, key), merged.get(key)
        are_sections = isinstance(preset_node, DictConfig) and isinstance(given_node, DictConfig)
        # A different component would not take the arguments of the preset's component.
        is_merged = are_sections and "_component_" not in given_node
        merged[key] = OmegaConf.merge(preset_node, given_node) if is_merged else given_node
    return merged


def divide(dividend: int, divisor: int) -> int:
    """Resolve `${divide:512,${samples_per_prompt}}` in a config.

    Raises:
        UsageError: the quotient is not a whole number.
    """
    if not isinstance(dividend, int) or not isinstance(divisor, int) or divisor < 1 or dividend % divisor:
        raise UsageError(
            f"${{divide:{dividend},{divisor}}} is not a whole number. Fix: set {divisor} to a divisor of {dividend}"
        )
    return dividend // divisor


with warnings.catch_warnings():
    # OmegaConf deprecates this function name, but all supported versions have it.
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
    OmegaConf.register_new_resolver(_ENV_RESOLVER, _resolve_env, replace=True)
    OmegaConf.register_new_resolver("divide", divide, replace=True)
