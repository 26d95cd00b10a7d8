"""Turns YAML into checked settings. Only recipes call this; nothing that they use sees a config."""

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from torchtune_ext.advantages import AdvantageConfig
from torchtune_ext.evaluation import EvaluationConfig
from torchtune_ext.grading import GraderConfig
from torchtune_ext.host.components import has_component as has_component
from torchtune_ext.host.components import instantiate as instantiate
from torchtune_ext.host.presets import preset_file
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.policy.scratch import Shape
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.run.folder import own_folder
from torchtune_ext.sampling.records import EngineConfig, SamplingConfig
from torchtune_ext.source import RolloutConfig
from torchtune_ext.telemetry.metrics import LoggingConfig
from torchtune_ext.training.distributed import RanksConfig
from torchtune_ext.training.learner import ScheduleConfig
from torchtune_ext.training.precision import PrecisionConfig
from torchtune_ext.training.state import CheckpointConfig
from torchtune_ext.training.trained import AdapterConfig

T = TypeVar("T")


@dataclass
class _Nothing:
    """Has no fields."""


# The records of the nodes of all recipes. A key that stands at the top, but belongs into one of them, is told its place.
NODES: dict[str, type] = {
    "adapters": AdapterConfig,
    "advantage": AdvantageConfig,
    "checkpoints": CheckpointConfig,
    "engine": EngineConfig,
    "evaluation": EvaluationConfig,
    "grader": GraderConfig,
    "logging": LoggingConfig,
    "precision": PrecisionConfig,
    "rollouts": RolloutConfig,
    "ranks": RanksConfig,
    "sampling": SamplingConfig,
    "schedule": ScheduleConfig,
    "shape": Shape,
}
# The arguments of components that are asked for most.
COMPONENT_KEYS = {
    "optimizer": ("lr", "betas", "weight_decay", "eps"),
    "loss": [field.name for field in fields(PolicyLoss)],
    "model": ("lora_rank", "lora_alpha", "lora_attn_modules", "lora_dropout", "use_dora", "quantize_base"),
    "tokenizer": ("template",),
    "task": ("bench",),
}

# `_references` reads a config with this resolver in place of oc.env. The resolver returns its own text and does not
# look into the environment, so that no secret comes into the record of a run.
_MARK = "torchtune_ext.env"
_ENV = re.compile(r"\$\{\s*oc\.env\s*:")
_BARE = re.compile(r"[\w./+-]+")  # an argument of a resolver that needs no quotes
_NO_READS = ("output_dir", "logging")  # keys whose values never name a file that the run reads

# What OmegaConf's messages about a wrong type hold, and what was wanted then.
WANTED = {"to Integer": "a whole number", "to Float": "a number", "valid bool": "true or false"}

MANY = 3  # with more unknown keys than that, a config is taken for one of another recipe


def load_config(schema: type, cfg: DictConfig) -> DictConfig:
    """Merges the YAML and the overrides of a recipe into its `Config` dataclass, and returns the settings.

    If the recipe has the knob `preset`, the keys of the preset come first, and what the YAML or the command line says
    replaces them. A run that an agent of Weights & Biases has started gets an `output_dir` of its own (`own_folder`).

    Raises:
        ValueError: a key is unknown (the message gives the nearest known one), a value has a wrong type, a required
            value is missing, or the preset is unknown.
    """
    defaults = {f.name: f.default for f in fields(schema)}
    preset = cfg.get("preset", defaults.get("preset"))
    foreign = [str(key) for key in cfg if key not in defaults]
    if len(foreign) > MANY:
        raise Mistake(
            f"this config has {len(foreign)} keys that the recipe does not know ({', '.join(foreign[:5])}, ...), so it is "
            "written for another one; begin with a copy of one of ours: `tune cp` and a name that `tune ls` shows"
        )
    try:
        if preset is not None:
            cfg = _over(load_preset(preset, list(defaults)), cfg)
        merged = OmegaConf.merge(OmegaConf.structured(schema), cfg)
    except ConfigKeyError as error:
        raise Mistake(unknown_key(str(error.full_key or error.key), _all_keys(defaults))) from None
    except ValidationError as error:
        raise Mistake(_wrong_type(error, cfg, {f.name: f.type for f in fields(schema)})) from None
    nothing = {name for name, default in defaults.items() if default == MISSING and merged._get_node(name)._is_none()}
    if "output_dir" in merged:
        # Before references are resolved, so that what names a file below it goes along.
        merged.output_dir = own_folder(str(merged._get_node("output_dir")._value()))
    written = OmegaConf.to_container(merged)
    try:
        missing = sorted(OmegaConf.missing_keys(merged) | nothing)
        if missing:
            raise Mistake(f"{missing[0]} has no value; set it in the YAML or on the command line as {missing[0]}=...")
        OmegaConf.resolve(merged)
    except OmegaConfBaseException as error:
        raise Mistake(_unresolved(error)) from None
    OmegaConf.get_cache(merged)[_MARK] = _references(OmegaConf.create(_marked(written)))
    return merged


def _all_keys(known: Iterable[str]) -> list[str]:
    """Returns the knobs of a recipe and the keys of its nodes as dotted names, so that a key in the wrong place is found."""
    below = [f"{node}.{field.name}" for node in known for field in fields(NODES.get(node, _Nothing))]
    return [
        *known,
        *below,
        *(f"{node}.{key}" for node, keys in COMPONENT_KEYS.items() if node in known for key in keys),
    ]


def _wrong_type(error: ValidationError, cfg: DictConfig, types: Mapping[str, Any]) -> str:
    """Returns the message for a value that a knob does not take."""
    key = str(error.full_key).split(".")[0].split("[")[0]
    value = OmegaConf.select(cfg, key) if key in cfg else None
    if key in NODES and not isinstance(value, DictConfig):
        names = [field.name for field in fields(NODES[key])]
        if value is None:
            off = f"; without held-out problems: {key}.task=null" if key == "evaluation" else ""
            return f"{key}=null is no mapping; leave it out{off}"
        example = f"{key}.to=[{value}]" if key == "logging" else f"{key}.{names[0]}=..."
        return f"{key}={value} is no mapping; write {example} (keys of `{key}:` are {', '.join(names)})"
    if str(types.get(key)).startswith("list") and not isinstance(value, ListConfig):
        return f"{key}={value} must be a list: {key}=[{value}]"
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    what = next((text for kind, text in wanted.items() if types.get(key) in (kind, kind | None)), None)
    if what is None or isinstance(value, DictConfig | ListConfig):
        return f"{error.full_key}: {error.msg or error}".split("\n")[0]
    null = ", or null" if types[key] not in wanted else ""
    return f"{key}={value} must be {what}{null}"


def _unresolved(error: OmegaConfBaseException) -> str:
    """Returns the message for a reference, `${...}`, that leads nowhere."""
    text = str(error).splitlines()[0]
    variable = re.search(r"Environment variable '(\w+)' not found", text)
    if variable:
        name = variable[1]
        return (
            f"{error.full_key}: the environment variable {name} is not set: `export {name}=...`, or write "
            f"${{oc.env:{name},default}}"
        )
    return f"{error.full_key}: {text}"


def record(cfg: DictConfig) -> dict[str, Any]:
    """Returns the settings to keep and to show, from what `load_config` returned.

    Values that come from the environment are left out, because one of them may be a secret token. In their place stand
    their references, `${oc.env:NAME}`, as they were written.
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
    """Returns the existing files and folders that the settings name, without `output_dir`: a run may read them."""
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
    """Returns the text of every value that comes from the environment, by the path of its keys.

    The function reads each value once. A value comes from the environment if reading it calls the resolver `_MARK`.
    """
    found: dict[tuple, str] = {}
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        _asked.clear()
        try:
            value = node[key]
        except Exception:
            # Another resolver may fail when it gets a reference in place of a value. That is no fault of the settings,
            # which have been resolved before.
            value = None
        if _asked:
            whole = isinstance(value, str) and f"${{{_MARK}:" in value
            text = value if whole else str(node._get_node(key)._value())
            found[(key,)] = text.replace(f"${{{_MARK}:", "${oc.env:")
        elif isinstance(value, DictConfig | ListConfig):
            found |= {(key, *path): text for path, text in _references(value).items()}
    return found


_asked: list[str] = []  # the references that the resolver below was given since the list was cleared


def _reference(*arguments: Any) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return value if _BARE.fullmatch(value) or "${" in value else json.dumps(value, ensure_ascii=False)
        return json.dumps(value, default=str)

    text = f"${{{_MARK}:{','.join(map(written, arguments))}}}"
    _asked.append(text)
    return text


with warnings.catch_warnings():
    # OmegaConf warns about this name of the function, but it is the one that all supported versions have.
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
    OmegaConf.register_new_resolver(_MARK, _reference, replace=True)


def load_preset(preset: str, known: list[str]) -> DictConfig:
    """Returns the keys of a preset: one of ours by its name, or one of the user by its path.

    Args:
        known: the knobs of the recipe. A preset may set some of them.

    Raises:
        ValueError: there is no such preset, the file is no YAML, or a key in it is unknown.
    """
    file = preset_file(preset)
    try:
        loaded = OmegaConf.load(file)
    except yaml.YAMLError as error:
        raise Mistake(f"preset={preset}: {file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, DictConfig):
        raise Mistake(f"preset={preset}: {file} holds no keys of a recipe")
    for key in loaded:
        if key == "preset" or key not in known:
            raise Mistake(unknown_key(str(key), [name for name in known if name != "preset"], f"preset {file}"))
    return loaded


def _over(preset: DictConfig, cfg: DictConfig) -> DictConfig:
    """Returns `preset` with the values of `cfg` written over it, node by node.

    A node of `cfg` that names a component replaces the node of the preset as a whole.
    """
    merged = preset.copy()
    for key in cfg:
        mine, theirs = cfg._get_node(key), merged.get(key)
        both = isinstance(theirs, DictConfig) and isinstance(mine, DictConfig)
        merged[key] = OmegaConf.merge(theirs, mine) if both and "_component_" not in mine else mine
    return merged


def unknown_key(key: str, known: list[str], where: str = "the config") -> str:
    """Returns the error message for an unknown key, with the nearest known one."""
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r} in {where}; {hint}"


def build(record: type[T], values: Any, where: str, bare: str | None = None, **extra: Any) -> T:
    """Makes a frozen settings record from a nested YAML node.

    A value that the node leaves out comes from `extra`, or else from the defaults of the record.

    Args:
        record: the dataclass to make.
        values: the node; None stands for an empty one.
        where: the key of the node, for messages.
        bare: the field that gets the value if a plain value stands in place of the node.

    Raises:
        ValueError: a key in the node is unknown, a value has a wrong type or is missing, or a check of the record
            fails.
    """
    known = [f.name for f in fields(record)]
    if values is not None and not isinstance(values, DictConfig | dict):
        if bare is None:
            raise Mistake(f"{where}={values!r} must be a mapping with some of the keys {', '.join(known)}")
        values = {bare: values}
    node = OmegaConf.create({where: values or {}})
    for key in node[where]:
        if key not in known:
            raise Mistake(unknown_key(f"{where}.{key}", known, f"`{where}:`"))
    schema = OmegaConf.structured(record)
    OmegaConf.set_readonly(schema, False)
    try:
        checked = OmegaConf.merge({where: schema}, node)[where]
    except ValidationError as error:
        value = OmegaConf.select(node, error.full_key)
        if not isinstance(value, DictConfig | ListConfig) and "ListConfig" in str(error.msg):
            raise Mistake(f"{error.full_key}={value!r} must be a list: {error.full_key}=[{value}]") from None
        wanted = next((text for word, text in WANTED.items() if word in str(error.msg)), None)
        text = f"{error.full_key}={value} must be {wanted}" if wanted else f"{error.full_key}: {error.msg}"
        raise Mistake(text.split("\n")[0]) from None
    except TypeError as error:
        # OmegaConf does not say where: a list or a plain value is needed, and there is a mapping, or the other way round.
        found = ", ".join(f"{where}.{key}" for key, value in node[where].items() if OmegaConf.is_config(value))
        raise Mistake(f"one of {found} is a mapping and should not be, or is none and should be: {error}") from None
    plain = OmegaConf.to_container(checked)
    missing = [key for key, value in plain.items() if value == MISSING and key not in extra]
    if missing:
        raise Mistake(f"{where}.{missing[0]} has no value; set it in the YAML or as {where}.{missing[0]}=...")
    given = {key: tuple(plain[key]) if isinstance(plain[key], list) else plain[key] for key in node[where]}
    return record(**{**extra, **given})


# What a config may compute: `${divide:512,${samples_per_prompt}}` is 512 divided by another setting, a whole number.
def divide(whole: int, by: int) -> int:
    """Returns the quotient. Raises ValueError if it is no whole number."""
    if not isinstance(whole, int) or not isinstance(by, int) or by < 1 or whole % by:
        raise Mistake(f"${{divide:{whole},{by}}} is no whole number; choose values that divide {whole}")
    return whole // by


with warnings.catch_warnings():
    # OmegaConf warns about this name of the function, but it is the one that all supported versions have.
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
    OmegaConf.register_new_resolver("divide", divide, replace=True)
