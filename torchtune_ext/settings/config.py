"""Turns YAML into the settings of a recipe, one typed object. Beyond the recipe, only plain values are passed on."""

import json
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from torchtune_ext.run.catalog import NOT_REGULAR, owner
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.run.folder import own_folder
from torchtune_ext.run.output import labelled, say
from torchtune_ext.settings.command_line import check_words
from torchtune_ext.settings.components import Component, recipe_module, takes
from torchtune_ext.settings.kinds import TYPE_TEXTS, require_kind
from torchtune_ext.settings.presets import preset_file

T = TypeVar("T")

# `_references` reads a config with this resolver in place of oc.env. It returns its own text and does not look into the
# environment, so that no secret comes into the record of a run.
_MARK = "torchtune_ext.env"
_ENV = re.compile(r"\$\{\s*oc\.env\s*:")
_BARE = re.compile(r"[\w./+-]+")  # an argument of a resolver that needs no quotes
# The keys of paths. Below a component it may be any argument of such a name.
_PATH_KEYS = re.compile(r"([\w.]+[._])?(dir|path|file|folder)|preset|replay|tokenizer\.template")
_SHELL = re.compile(r"\$[A-Za-z_({]")  # what a shell replaces: $NAME, ${NAME}, $(command)
LONGEST_NAME, LONGEST_PATH = 255, 3900  # bytes; Linux takes 4,096, and a run writes files below its folder
_NO_READS = ("output_dir", "logging")  # keys whose values never name a file that the run reads
_RECORD = "_record"  # the attribute in which settings carry what `record` returns

# Advice behind the message about a value of a wrong type.
INSTEAD = {
    "resume_from_checkpoint": "; true goes on from the newest checkpoint of output_dir; to begin anew from any: model_dir=PATH",
    "evaluation.every": "; without held-out problems: evaluation.task=null",
}
# Recipes that are the same program as grpo_full, with the setting that their name promises and what happens without it.
PROMISED = {
    "grpo_lora": ("model.lora_attn_modules", "all weights are trained"),
    "grpo_async": ("staleness", "sampling and training take turns"),
}
MANY = 3  # with more unknown keys than that, a config is taken for one of another recipe


def load_config(schema: type[T], cfg: DictConfig) -> T:
    """Merges the YAML and the overrides of a recipe into its `Config` dataclass, and returns the settings.

    A field of `Config` whose type is a dataclass is a node of the YAML. A node with `_component_` becomes a `Component`
    for `instantiate`.

    Raises:
        ValueError: a key is unknown, a value has a wrong type, a required value is missing, a record refuses its
            values, or the preset is unknown.
    """
    defaults = {f.name: f.default for f in fields(schema)}
    try:
        preset = cfg.get("preset", defaults.get("preset"))
    except OmegaConfBaseException as error:
        raise Mistake(_unresolved(error, "preset")) from None
    foreign = [str(key) for key in cfg if key not in defaults]
    if len(foreign) > MANY:
        raise Mistake(
            f"this config has {len(foreign)} keys that the recipe does not know ({', '.join(foreign[:5])}, ...), so it is "
            f"written for another one{_whose(cfg)}; begin with a copy of one of ours: `tune cp` and a name that `tune ls` shows"
        )
    # The YAML and the command line replace keys of the preset.
    if preset is not None:
        cfg = _over(load_preset(_path("preset", preset), list(defaults)), cfg)
    cfg = _with_nodes(schema, cfg)
    _require_texts(schema, cfg)
    merged = _merged(schema, cfg)
    # Each run that an agent of Weights & Biases starts gets its own folder. It does so before references are resolved,
    # so that files which are named below the folder move along.
    if "output_dir" in merged:
        merged.output_dir = own_folder(str(merged._get_node("output_dir")._value()))
    # With references, for the record of the run.
    written = OmegaConf.to_container(merged)
    # `key=null` counts as missing, too, if the key has no default.
    nothing = {name for name, default in defaults.items() if default == MISSING and merged._get_node(name)._is_none()}
    try:
        missing = sorted(OmegaConf.missing_keys(merged) | nothing)
        if missing:
            preset_too = ", or name a preset, which brings it" if missing[0] == "loss" and preset is None else ""
            raise Mistake(
                f"{missing[0]} has no value; set it in the YAML or on the command line as {missing[0]}=...{preset_too}"
            )
        OmegaConf.resolve(merged)
    except ValidationError as error:
        raise Mistake(_wrong_type(error, merged, schema)) from None
    except OmegaConfBaseException as error:
        raise Mistake(_unresolved(error, error.full_key)) from None
    _expand_paths(merged)
    refused: list[str] = []
    settings = _instance(schema, merged, "", refused)
    # torch's generators take 64 bits.
    if abs(getattr(settings, "seed", 0)) >= 2**63:
        refused.append(f"seed={settings.seed} does not fit into 64 bits; set a smaller one")
    if refused:
        raise Mistake("\n".join(refused))
    setattr(settings, _RECORD, _record(merged, written, cfg, schema))
    return settings


def read_config(config: str, words: Sequence[str], recipe: str | None = None) -> Any:
    """Returns the settings of a run that samples, as its recipe reads them.

    Args:
        config: a file, or one of ours by its name.
        words: settings that replace those of the config, key=value.
        recipe: name, file or module of the recipe; None: the one that the config is written for.

    Raises:
        ValueError: there is no such config or recipe, it samples nothing, or as `load_config` says.
    """
    cfg = as_tune_reads(config, words)
    named = recipe or owner(config)
    if named is None:
        raise Mistake(
            f"--config {config}: written for which recipe? Add --recipe grpo_full, or your own: --recipe my_grpo.py"
        )
    schema = getattr(recipe_module(named, "--recipe "), "Config", None)
    if schema is None or "engine" not in _nodes(schema):
        raise Mistake(
            f"--config {config} is written for {named}, which samples nothing: its Config has no `engine`; take one of a "
            "GRPO recipe, grpo/tiny for instance"
        )
    return load_config(schema, cfg)


def as_tune_reads(config: str, words: Sequence[str], recipe: str | None = None) -> DictConfig:
    """Returns a config, a file or one of ours by its name, with key=value words over it, as torchtune merges them.

    Args:
        recipe: the file of the recipe for which the config has to be written; None: any recipe.

    Raises:
        ValueError: a word is wrong, there is no such config, or it is written for another recipe.
    """
    from torchtune.config._parse import TuneRecipeArgumentParser
    from torchtune.config._utils import _merge_yaml_and_cli_args

    argv = ["", "--config", config, *words]
    check_words(argv, recipe)
    parsed, settings = TuneRecipeArgumentParser().parse_known_args(argv[1:])
    return _merge_yaml_and_cli_args(Namespace(**vars(parsed)), settings)


def say_unset(recipe: str, words: Sequence[str]) -> None:
    """Prints a line if a config does not set what the name of its recipe promises. `words` stand behind the recipe."""
    if recipe in PROMISED and "--config" in words[:-1]:
        key, then = PROMISED[recipe]
        place = list(words).index("--config")
        cfg = as_tune_reads(words[place + 1], [*words[:place], *words[place + 2 :]])
        # If a reference leads nowhere, the recipe will say so when it reads the config.
        with suppress(OmegaConfBaseException):
            if not OmegaConf.select(cfg, key, default=None):
                say(labelled([("recipe", f"{recipe}, but {key} is not set: {then}")]))


def _with_nodes(schema: type, cfg: DictConfig) -> DictConfig:
    """Returns the config with a mapping for every node. Raises ValueError for a value that cannot become one."""
    cfg = cfg.copy()
    for node, kind in _nodes(schema).items():
        if node not in cfg:
            cfg[node] = {}
        value = cfg._get_node(node)
        if value._is_interpolation() or (isinstance(value, DictConfig) and not value._is_none()):
            continue
        # Some records name a key for a plain value: `precision: bf16` means a key of `precision`.
        if value._value() is None or (bare := getattr(kind, "BARE", None)) is None:
            raise Mistake(_no_mapping(node, value._value(), kind))
        cfg[node] = {bare: value._value()}
    return cfg


def _require_texts(kind: type, node: DictConfig, where: str = "") -> None:
    """Raises ValueError for a truth value or a decimal number where text belongs. OmegaConf would make text of it."""
    for spec in fields(kind):
        given = node._get_node(spec.name)
        if is_dataclass(spec.type) and isinstance(given, DictConfig) and not given._is_none():
            _require_texts(spec.type, given, f"{where}{spec.name}.")
        elif spec.type in (str, str | None) and given is not None and isinstance(given._value(), bool | float):
            require_kind(f"{where}{spec.name}", given._value(), spec.type)


def _expand_paths(node: DictConfig | ListConfig, where: str = "") -> None:
    """Replaces ~ at the beginning of paths by a user's folder. Raises ValueError for a value that cannot be a path."""
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        value, name = node[key], f"{where}.{key}".lstrip(".") if isinstance(node, DictConfig) else where
        if OmegaConf.is_config(value):
            _expand_paths(value, name)
        elif (path := _path(name, value)) != value:
            node[key] = path


def _path(key: str, value: Any) -> Any:
    """Returns the value of a key, as `_expand_paths` says."""
    # A shell replaces ~ only at the beginning of a word, not after `output_dir=`.
    if not isinstance(value, str) or not _PATH_KEYS.fullmatch(key) or "{{" in value or "{%" in value:
        return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value
    path = os.path.expanduser(value)
    try:
        names = os.fsencode(path).split(b"/")
    except UnicodeEncodeError:
        names = [b"\0"]
    if not path.strip():
        fix = "write . for the working directory" if key.endswith(("dir", "folder")) else "leave it out, or name a file"
        raise Mistake(f"{key}={value!r} is empty; expected a path. Fix: {fix}")
    if any(b"\0" in name for name in names):
        raise Mistake(f"{key}={value!r} holds a character that no path may have; expected the name of a file or folder")
    if max(map(len, names)) > LONGEST_NAME or sum(map(len, names)) + len(names) > LONGEST_PATH:
        raise Mistake(
            f"{key}={value[:40]}... is too long: a name has at most {LONGEST_NAME} bytes, a path {LONGEST_PATH:,}. Fix: choose "
            "a shorter one"
        )
    # A file to read may have any name.
    if key.split(".")[0] not in _NO_READS and os.path.exists(path):
        if not os.path.isfile(path) and not os.path.isdir(path):
            raise Mistake(f"{key}={value}: {NOT_REGULAR}")
        return path
    if path.startswith("~"):
        raise Mistake(f"{key}={value}: unknown user {path.split('/')[0][1:]!r}. Fix: write the whole path")
    if _SHELL.search(path):
        raise Mistake(
            f"{key}={value}: `$` has a meaning in a shell only, not in a setting. Fix: write ${{oc.env:NAME}} for a variable "
            "of the environment"
        )
    return path


def _merged(schema: type, cfg: DictConfig) -> DictConfig:
    """Returns the typed settings, still with references and missing values. Raises ValueError."""
    typed = OmegaConf.structured(schema)
    for node in _nodes(schema):
        # OmegaConf makes a frozen dataclass read-only, and then cannot merge into it.
        OmegaConf.set_readonly(typed._get_node(node), False)
    try:
        return OmegaConf.merge(typed, cfg)
    except ConfigKeyError as error:
        raise Mistake(_unknown(str(error.full_key or error.key), schema, cfg)) from None
    except ValidationError as error:
        raise Mistake(_wrong_type(error, cfg, schema)) from None
    except TypeError as error:
        # There is a mapping in place of a list or a plain value, or the other way round. OmegaConf does not say where,
        # so the message names all candidates.
        keys = ", ".join(
            f"{node}.{key}"
            for node in _nodes(schema)
            for key, value in (cfg.get(node) or {}).items()
            if OmegaConf.is_config(value)
        )
        raise Mistake(f"one of {keys} is a mapping and should not be, or is none and should be: {error}") from None


def _nodes(schema: type) -> dict[str, type]:
    """Returns the record types of the nodes of a recipe, by key."""
    return {spec.name: spec.type for spec in fields(schema) if is_dataclass(spec.type)}


def _instance(kind: type, node: DictConfig, where: str, refused: list[str]) -> Any:
    """Makes a record, and those in it, from typed values. A record that refuses them adds a message to `refused`."""
    values = {}
    for spec in fields(kind):
        key, value = f"{where}{spec.name}", node[spec.name]
        if is_dataclass(spec.type):
            values[spec.name] = _instance(spec.type, value, f"{key}.", refused)
            continue
        plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        # OmegaConf holds a tuple as a list.
        if get_origin(spec.type) is tuple:
            plain = tuple(plain)
        elif spec.type is Any and isinstance(plain, dict):
            # torchtune turns `key=null` into `key._component_=null`.
            off = spec.default is None and plain.get("_component_", "") is None
            plain = None if off else Component(plain, key)
        values[spec.name] = plain
    try:
        return kind(**values)
    except Mistake as error:
        # Someone with two mistakes in two nodes learns of both.
        refused.append(str(error))


def _unknown(key: str, schema: type, cfg: DictConfig) -> str:
    """Returns the message for an unknown key."""
    node, dot, below = key.partition(".")
    nodes, names = _nodes(schema), [spec.name for spec in fields(schema)]
    if dot:
        inside = [spec.name for spec in fields(nodes[node])]
        # In vLLM's SamplingParams, "n" is what `samples_per_prompt` is here.
        message = unknown_key(key, names if below == "n" else inside, f"`{node}:`")
        if node == "sampling" and below.startswith("stop"):
            return f"{message} There are no stop strings: a completion ends with one of these token ids"
        if node == "engine" and "did you mean" not in message:
            return f"unknown key {key!r} in `engine:`; an argument of vLLM itself is engine.extra_args.{below}"
        return message
    # A key at the top may belong in a node, or be an argument of a component, so these are known keys, too.
    inside = [f"{node}.{spec.name}" for node, kind in nodes.items() for spec in fields(kind)]
    components = [(name, cfg[name]) for name in names if name not in nodes and isinstance(cfg.get(name), DictConfig)]
    arguments = [f"{name}.{argument}" for name, node in components for argument in takes(node)]
    return unknown_key(key, [*names, *inside, *arguments])


def _no_mapping(node: str, value: Any, kind: type) -> str:
    """Returns the message for a plain value, or a list, in place of a node."""
    names = [spec.name for spec in fields(kind)]
    if value is None:
        off = f"; without held-out problems: {node}.task=null" if node == "evaluation" else ""
        return f"{node}=null is no mapping; leave it out{off}"
    example = f"{node}.to=[{value}]" if node == "logging" else f"{node}.{names[0]}=..."
    return f"{node}={value} is no mapping; write {example} (keys of `{node}:` are {', '.join(names)})"


def _wrong_type(error: ValidationError, cfg: DictConfig, schema: type) -> str:
    """Returns the message for a value that a knob does not take."""
    # The key of an entry of a list, "key[0]", stands for the list.
    key = str(error.full_key).split("[")[0]
    kind, node = schema, cfg
    for part in key.split("."):
        kind = next(spec.type for spec in fields(kind) if spec.name == part)
        node = node._get_node(part)
    value = node if OmegaConf.is_config(node) else node._value()
    kinds = [each for each in (get_args(kind) if isinstance(kind, UnionType) else [kind]) if each is not NoneType]
    instead = INSTEAD.get(key, "")
    if value is None:
        return f"{key} has no value; set it, as in {key}=..., or leave it out{instead}"
    if get_origin(kinds[0]) in (list, tuple) and not isinstance(value, ListConfig):
        return f"{key}={value!r} must be a list: {key}=[{value}]"
    if get_origin(kinds[0]) is dict:
        return f"{key}={value!r} must be a mapping, as in {key}.NAME=VALUE; leave it out, where nothing is set"
    if kinds[0] not in TYPE_TEXTS:
        return f"{error.full_key}: {error.msg or error}".split("\n")[0]
    return f"{key}={value} must be {TYPE_TEXTS[kinds[0]]}{', or null' if kind != kinds[0] else ''}{instead}"


def _whose(cfg: DictConfig) -> str:
    """Returns ", RECIPE" for the recipe that a config seems to be written for; "" if its keys do not tell."""
    for key, recipe in (("samples_per_prompt", "grpo_full"), ("num_problems", "warmup_sft")):
        if key in cfg:
            return f", {recipe}"
    return ""


def _unresolved(error: OmegaConfBaseException, key: str) -> str:
    """Returns the message for a reference, `${...}`, that leads nowhere."""
    text = str(error).splitlines()[0]
    variable = re.search(r"Environment variable '(\w+)' not found", text)
    if variable:
        name = variable[1]
        return (
            f"{key}: the environment variable {name} is not set: `export {name}=...`, or write "
            f"${{oc.env:{name},default}}"
        )
    known = re.search(r"Interpolation key '(\w+)' not found", text)
    if known and known[1] in os.environ:
        return f"{key}: {known[1]} is a variable of the environment, not a key: write ${{oc.env:{known[1]}}}"
    unknown = re.search(r"Unsupported interpolation type (\w+)", text)
    if unknown:
        return (
            f"{key}: ${{{unknown[1]}:...}} is unknown; expected ${{KEY}}, ${{oc.env:NAME}} or ${{divide:A,B}}. Fix: "
            f"let a shell fill it in, as in {key}=runs/$(date +%F)"
        )
    return f"{key}: {text}"


def record(cfg: Any) -> dict[str, Any]:
    """Returns the settings to keep and to show, from what `load_config` returned; of a node only what was given."""
    return getattr(cfg, _RECORD)


def _record(merged: DictConfig, written: dict[str, Any], cfg: DictConfig, schema: type) -> dict[str, Any]:
    plain = OmegaConf.to_container(merged)
    # A value that comes from the environment may be a secret token. Its reference, `${oc.env:NAME}`, takes its place.
    for path, text in _references(OmegaConf.create(_marked(written))).items():
        *above, last = path
        node = plain
        for key in above:
            node = node[key]
        node[last] = text
    for node in _nodes(schema):
        plain[node] = {key: plain[node][key] for key in cfg.get(node) or {}}
    return plain


def named_paths(cfg: Any) -> list[Path]:
    """Returns the existing files and folders that the settings name and a run may read."""
    paths: list[Path] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict | list | tuple):
            for value in node.values() if isinstance(node, dict) else node:
                walk(value)
        # Linux refuses longer paths, and Python those with a NUL.
        elif isinstance(node, str) and node and len(node) < 4096 and "\0" not in node and os.path.exists(node):
            paths.append(Path(node))

    walk({key: value for key, value in asdict(cfg).items() if key not in _NO_READS})
    return paths


def _marked(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _marked(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_marked(value) for value in node]
    return _ENV.sub(f"${{{_MARK}:", node) if isinstance(node, str) else node


def _references(node: DictConfig | ListConfig) -> dict[tuple, str]:
    """Returns the text of every value that comes from the environment, by the path of its keys."""
    references: dict[tuple, str] = {}
    for key in list(node) if isinstance(node, DictConfig) else range(len(node)):
        if OmegaConf.is_missing(node, key):
            continue
        # A value comes from the environment if reading it calls the resolver `_MARK`.
        _lookups.clear()
        try:
            value = node[key]
        except Exception:
            # Another resolver may fail when it gets a reference in place of a value. The settings are right all the
            # same: they have been resolved before.
            value = None
        if _lookups:
            # Where another resolver hides the reference, the text as it was written says where the value comes from.
            whole = isinstance(value, str) and f"${{{_MARK}:" in value
            text = value if whole else str(node._get_node(key)._value())
            references[(key,)] = text.replace(f"${{{_MARK}:", "${oc.env:")
        elif isinstance(value, DictConfig | ListConfig):
            references |= {(key, *path): text for path, text in _references(value).items()}
    return references


# The references that the resolver below has seen since the list was cleared.
_lookups: list[str] = []


def _reference(*arguments: Any) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return value if _BARE.fullmatch(value) or "${" in value else json.dumps(value, ensure_ascii=False)
        return json.dumps(value, default=str)

    text = f"${{{_MARK}:{','.join(map(written, arguments))}}}"
    _lookups.append(text)
    return text


def load_preset(preset: str, known: list[str]) -> dict[str, Any]:
    """Returns the keys of a preset: one of ours by its name, or one of the user by its path.

    Raises:
        ValueError: there is no such preset, the file is no YAML, or a key in it is not among the `known` ones.
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
    return OmegaConf.to_container(loaded)


def _over(preset: dict[str, Any], cfg: DictConfig) -> DictConfig:
    """Returns `preset` with the values of `cfg` written over it, node by node."""
    merged = OmegaConf.create(preset)
    for key in cfg:
        # `_get_node` keeps references, which have no value yet.
        mine, theirs = cfg._get_node(key), merged.get(key)
        both = isinstance(theirs, DictConfig) and isinstance(mine, DictConfig)
        # Another component replaces the node as a whole: it would not take the arguments of the preset's.
        merged[key] = OmegaConf.merge(theirs, mine) if both and "_component_" not in mine else mine
    return merged


def unknown_key(key: str, known: list[str], where: str = "the config") -> str:
    """Returns the error message for an unknown key, with the nearest known one."""
    near = nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"unknown key {key!r} in {where}; {hint}"


def divide(whole: int, by: int) -> int:
    """`${divide:512,${samples_per_prompt}}` of a config. Raises ValueError if the quotient is no whole number."""
    if not isinstance(whole, int) or not isinstance(by, int) or by < 1 or whole % by:
        raise Mistake(f"${{divide:{whole},{by}}} is no whole number; choose values that divide {whole}")
    return whole // by


with warnings.catch_warnings():
    # OmegaConf warns about this name of the function, but only this one is in all supported versions.
    warnings.filterwarnings("ignore", "register_new_resolver", UserWarning)
    OmegaConf.register_new_resolver(_MARK, _reference, replace=True)
    OmegaConf.register_new_resolver("divide", divide, replace=True)
