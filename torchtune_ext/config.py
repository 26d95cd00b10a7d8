"""YAML -> checked settings. Called by recipes only; nothing below them sees a config."""

import difflib
import inspect
import os
import sys
from dataclasses import fields
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_ext.presets import preset_file

T = TypeVar("T")


def load_config(schema: type, cfg: DictConfig) -> DictConfig:
    """Merges a recipe's YAML and overrides into its `Config` dataclass. Where the recipe has the knob `preset`, the preset's
    keys come first: what the YAML or the command line says itself wins.

    Raises:
        ValueError: an unknown key (with the nearest known one), a wrong type, a missing required value, an unknown preset.
    """
    defaults = {f.name: f.default for f in fields(schema)}
    preset = cfg.get("preset", defaults.get("preset"))
    try:
        if preset is not None:
            cfg = _over(_load_preset(preset, list(defaults)), cfg)
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
    except ConfigKeyError as error:
        raise ValueError(unknown_key(str(error.full_key or error.key), [f.name for f in fields(schema)])) from None
    except ValidationError as error:
        raise ValueError(f"{error.full_key}: {error.msg or error}".split("\n")[0]) from None
    nothing = {name for name, default in defaults.items() if default == MISSING and merged._get_node(name)._is_none()}
    missing = sorted(OmegaConf.missing_keys(merged) | nothing)
    if missing:
        raise ValueError(f"{missing[0]} has no value; set it in the YAML or on the command line as {missing[0]}=...")
    try:
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    return merged


def _load_preset(preset: str, known: list[str]) -> DictConfig:
    file = preset_file(preset)
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"preset={preset}: {file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"preset={preset}: {file} holds no keys of a recipe")
    for key in loaded:
        if key == "preset" or key not in known:
            raise ValueError(unknown_key(str(key), [name for name in known if name != "preset"], f"preset {file}"))
    return loaded


def _over(preset: DictConfig, cfg: DictConfig) -> DictConfig:
    """`cfg` over `preset`, node by node. A node that names its component replaces the preset's as a whole."""
    merged = preset.copy()
    for key in cfg:
        mine, theirs = cfg._get_node(key), merged.get(key)
        both = isinstance(theirs, DictConfig) and isinstance(mine, DictConfig)
        merged[key] = OmegaConf.merge(theirs, mine) if both and "_component_" not in mine else mine
    return merged


def unknown_key(key: str, known: list[str], where: str = "the config") -> str:
    """The sentence for a key that nobody knows."""
    near = difflib.get_close_matches(key.split(".")[-1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r} in {where}; {hint}"


def build(record: type[T], values: Any, where: str, bare: str | None = None, **extra: Any) -> T:
    """A frozen settings record from a nested YAML node. What the node leaves out comes from `extra`, then the defaults.

    Args:
        bare: the field that a plain value in place of the node stands for.

    Raises:
        ValueError: an unknown key in the node, a wrong type; whatever the record's own checks say.
    """
    known = [f.name for f in fields(record)]
    if values is not None and not isinstance(values, DictConfig | dict):
        if bare is None:
            raise ValueError(f"{where}={values!r} must be a mapping with some of the keys {', '.join(known)}")
        values = {bare: values}
    node = OmegaConf.create({where: values or {}})
    for key in node[where]:
        if key not in known:
            raise ValueError(unknown_key(f"{where}.{key}", known, f"`{where}:`"))
    schema = OmegaConf.structured(record)
    OmegaConf.set_readonly(schema, False)
    try:
        checked = OmegaConf.merge({where: schema}, node)[where]
    except ValidationError as error:
        value = OmegaConf.select(node, error.full_key)
        if isinstance(value, str) and "ListConfig" in str(error.msg):
            raise ValueError(f"{error.full_key}={value!r} must be a list: {error.full_key}=[{value}]") from None
        raise ValueError(f"{error.full_key}: {error.msg}".split("\n")[0]) from None
    plain = OmegaConf.to_container(checked)
    missing = [key for key, value in plain.items() if value == MISSING and key not in extra]
    if missing:
        raise ValueError(f"{where}.{missing[0]} has no value; set it in the YAML or as {where}.{missing[0]}=...")
    given = {key: tuple(plain[key]) if isinstance(plain[key], list) else plain[key] for key in node[where]}
    return record(**{**extra, **given})


def has_component(node: DictConfig | None) -> bool:
    """Whether an optional node names something. `tune run ... key=null` arrives as `key._component_=null`."""
    return isinstance(node, DictConfig) and node.get("_component_") is not None


def instantiate(node: DictConfig, **extra: Any) -> Any:
    """Builds what `_component_` names: a dotted path, or a bare name defined in the (copied) recipe itself.

    Raises:
        ValueError: no such component, or arguments that it does not take.
    """
    where = f"`{node._key()}:`" if isinstance(node, DictConfig) else repr(node)
    if not has_component(node):
        raise ValueError(f"{where} needs a `_component_`, the dotted path of a class or function")
    arguments = OmegaConf.to_container(node, resolve=True)
    path = arguments.pop("_component_")
    component = _in_recipe(path) if "." not in path else _by_path(path, where)
    if component is None:
        raise ValueError(f"{where} the recipe that runs defines no {path!r}; give a dotted path, or define it there")
    try:
        inspect.signature(component).bind(**arguments, **extra)
    except TypeError as error:
        raise ValueError(f"{where} {path} was given arguments that it does not take: {error}") from error
    return component(**arguments, **extra)


def _by_path(path: str, where: str) -> Any:
    if os.getcwd() not in sys.path:  # a module beside the config may be named
        sys.path.append(os.getcwd())
    try:
        return _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        raise ValueError(f"{where} _component_={path}: {' '.join(str(error).split())}") from error


def _in_recipe(name: str) -> Any:
    """Looks a name up in the recipe that runs. `tune` runs it as `__main__` without entering it in sys.modules."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and name in frame.f_globals:
            return frame.f_globals[name]
        frame = frame.f_back
    return None
