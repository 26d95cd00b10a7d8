"""YAML -> checked settings. Called by recipes only; nothing below them sees a config."""

import difflib
import inspect
import json
import os
import re
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from torchtune_ext.host.presets import preset_file

T = TypeVar("T")

# `record` reads a config with this resolver in the place of oc.env: it gives itself, as text, and asks nobody.
_MARK = "torchtune_ext.env"
_ENV = re.compile(r"\$\{\s*oc\.env\s*:")
_BARE = re.compile(r"[\w./+-]+")  # an argument of a resolver that needs no quotes
_NO_READS = ("output_dir", "logging")  # keys whose text never names what a run reads


MOVED = {  # old key -> new one
    "save_every": "checkpoints.every",
    "keep_last": "checkpoints.keep_last",
    "eval_task": "evaluation.task",
    "eval_every": "evaluation.every",
    "eval_samples": "evaluation.samples",
    "grader_workers": "grader.workers",
    "grader_timeout_s": "grader.timeout_s",
    "lr_schedule": "schedule.decay",
    "lr_warmup": "schedule.warmup",
    "metrics": "logging.to",
    "publish": "adapters.publish",
    "save_merged": "adapters.save_merged",
    "precision.recipe": "precision.scaling",
}


def load_config(schema: type, cfg: DictConfig) -> DictConfig:
    """Merges a recipe's YAML and overrides into its `Config` dataclass. Where the recipe has the knob `preset`, the preset's
    keys come first: what the YAML or the command line says itself wins.

    Raises:
        ValueError: an unknown key (with the nearest known one), a wrong type, a missing required value, an unknown preset.
    """
    defaults = {f.name: f.default for f in fields(schema)}
    preset = cfg.get("preset", defaults.get("preset"))
    _refuse_moved(cfg, list(defaults))
    try:
        if preset is not None:
            cfg = _over(load_preset(preset, list(defaults)), cfg)
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
    except ConfigKeyError as error:
        raise ValueError(unknown_key(str(error.full_key or error.key), [f.name for f in fields(schema)])) from None
    except ValidationError as error:
        raise ValueError(f"{error.full_key}: {error.msg or error}".split("\n")[0]) from None
    nothing = {name for name, default in defaults.items() if default == MISSING and merged._get_node(name)._is_none()}
    missing = sorted(OmegaConf.missing_keys(merged) | nothing)
    if missing:
        raise ValueError(f"{missing[0]} has no value; set it in the YAML or on the command line as {missing[0]}=...")
    written = OmegaConf.to_container(merged)
    try:
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    OmegaConf.get_cache(merged)[_MARK] = _references(OmegaConf.create(_marked(written)))
    return merged


def _refuse_moved(cfg: DictConfig, known: list[str], where: str = "the config") -> None:
    """Names all keys of an earlier version at once, since a YAML that has one has several."""
    keys = [str(key) for key in cfg]
    for name in list(keys):
        if isinstance(node := cfg._get_node(name), DictConfig) and not (node._is_none() or node._is_interpolation()):
            keys += [f"{name}.{key}" for key in node]
    moved = {key: MOVED[key] for key in keys if key not in known and MOVED.get(key, "").split(".")[0] in known}
    if moved:
        found = ", ".join(f"{old!r} is {new}" for old, new in moved.items())
        raise ValueError(f"unknown key{'s' * (len(moved) > 1)} of an earlier version in {where}: now {found}")


def record(cfg: DictConfig) -> dict[str, Any]:
    """The settings to keep and to show, from what `load_config` returned: all values but those that come from the environment.

    A token may stand there, so their references, `${oc.env:NAME}`, are kept as they were written.
    """
    plain = OmegaConf.to_container(cfg)
    for path, text in OmegaConf.get_cache(cfg).get(_MARK, {}).items():
        *above, last = path
        node = plain
        for key in above:
            node = node[key]
        node[last] = text
    return plain


def named_paths(cfg: DictConfig) -> list[Path]:
    """The existing files and folders that the settings name: what a run may read. Without `output_dir`."""
    found: list[Path] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict | list):
            for value in node.values() if isinstance(node, dict) else node:
                walk(value)
        elif isinstance(node, str) and node and len(node) < 4096 and "\0" not in node and os.path.exists(node):
            found.append(Path(node))

    plain = OmegaConf.to_container(cfg)
    walk({key: value for key, value in plain.items() if key not in _NO_READS})
    return found


def _marked(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _marked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_marked(value) for value in node]
    return _ENV.sub(f"${{{_MARK}:", node) if isinstance(node, str) else node


def _references(node: DictConfig | ListConfig) -> dict[tuple, str]:
    """Path -> text of every value that asks for the environment; how it does so is seen by reading it."""
    found: dict[tuple, str] = {}
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        _asked.clear()
        try:
            value = node[key]
        except Exception:
            # A resolver may say anything to a reference in the place of a value. The settings are resolved already.
            value = None
        if _asked:
            whole = isinstance(value, str) and f"${{{_MARK}:" in value
            text = value if whole else str(node._get_node(key)._value())
            found[(key,)] = text.replace(f"${{{_MARK}:", "${oc.env:")
        elif isinstance(value, DictConfig | ListConfig):
            found |= {(key, *path): text for path, text in _references(value).items()}
    return found


_asked: list[str] = []  # what the resolver below was asked for since the list was cleared


def _reference(*arguments: Any) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return value if _BARE.fullmatch(value) or "${" in value else json.dumps(value, ensure_ascii=False)
        return json.dumps(value, default=str)

    text = f"${{{_MARK}:{','.join(map(written, arguments))}}}"
    _asked.append(text)
    return text


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)  # the name that all our versions know
    OmegaConf.register_new_resolver(_MARK, _reference, replace=True)


def load_preset(preset: str, known: list[str]) -> DictConfig:
    """The keys of a preset, of ours or of the user's.

    Args:
        known: knobs of the recipe, of which it may set some.

    Raises:
        ValueError: there is no such preset, it is no YAML, or a key in it is unknown.
    """
    file = preset_file(preset)
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise ValueError(f"preset={preset}: {file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig):
        raise ValueError(f"preset={preset}: {file} holds no keys of a recipe")
    _refuse_moved(loaded, known, f"preset {file}")
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
