"""Reads and checks the config.json of a model directory."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune_ext.policy.families import FAMILIES, LAYER_TYPES, Family, HFConfig
from torchtune_ext.run.errors import UsageError, UsageFileError, closest_match
from torchtune_ext.run.json_files import read_json_object

# Defaults of transformers' classes for missing keys of config.json; vLLM uses them, too.
# `save_pretrained` omits keys with default values, and old files lack newer keys.
_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as attention heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_type": "default",
    "tie_word_embeddings": False,
}
# model_type of a folder with a vision tower -> model_type and architecture of its text model.
MULTIMODAL = {"gemma3": ("gemma3_text", "Gemma3ForCausalLM")}
# Keys that a multimodal folder may have outside of its text_config.
_SHARED_KEYS = ("quantization_config", "torch_dtype", "dtype", "eos_token_id")
# For these keys null is a value: no window, no cap.
_NULLABLE = ("sliding_window", "final_logit_softcapping", "attn_logit_softcapping")
# Part of a model_type -> why such families are unsupported.
_UNSUPPORTED_REASONS = {
    "moe": "it is a mixture of experts",
    "mixtral": "it is a mixture of experts",
    "gemma3n": "its layers share keys and values",
    "qwen3_5": "its recurrent layers would carry state from one packed sequence into the next",
    "qwen3_next": "its recurrent layers would carry state from one packed sequence into the next",
    "mamba": "its recurrent layers would carry state from one packed sequence into the next",
}


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_list_of(kind: type | tuple[type, ...]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


# Key -> check of its value, and a description of valid values.
_SIZE, _NUMBER = (_is_size, "a whole number above 0"), (_is_number, "a number above 0")
_OBJECT = (lambda value: isinstance(value, dict), "a JSON object")
_VALUE_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _SIZE
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "no_rope_layer_interval"), _SIZE),
    **dict.fromkeys(("sliding_window_pattern", "original_max_position_embeddings"), _SIZE),
    "sliding_window": (lambda value: type(value) is int and value >= 0, "a whole number, or null"),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "rope_local_base_freq", "factor", "query_pre_attn_scalar"), _NUMBER),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "partial_rotary_factor"), _NUMBER),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config", "text_config"), _OBJECT),
    **dict.fromkeys(LAYER_TYPES, _OBJECT),  # RoPE settings of each type of layer
    "tie_word_embeddings": (lambda value: isinstance(value, bool), "true or false"),
    "no_rope_layers": (_is_list_of(int), "a list of 0 and 1, one for each layer"),
    "short_factor": (_is_list_of((int, float)), "a list of numbers"),
    "layer_types": (_is_list_of(str), "a list of strings"),
}


def read_hf_config(model_dir: str | Path) -> dict[str, Any]:
    """Reads a model directory's `config.json`.

    Raises:
        UsageFileError: the file is missing or damaged.
        UsageError: the family is unsupported, or a value has a wrong type.
    """
    path = Path(model_dir)
    file = path / "config.json"
    if not file.is_file():
        from torchtune_ext.policy.hub import missing_config_hint

        raise UsageFileError(f"model_dir={str(model_dir)!r}: {missing_config_hint(path)}")
    config = read_json_object(file)
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in MULTIMODAL:
        _require_value_types(config, file)
        kind, architecture = MULTIMODAL[kind]
        shared = {name: config[name] for name in _SHARED_KEYS if name in config}
        config = {**shared, **(config.get("text_config") or {}), "model_type": kind, "architectures": [architecture]}
    cause = next((f": {reason}" for part, reason in _UNSUPPORTED_REASONS.items() if part in str(kind)), "")
    if not isinstance(kind, str) or kind not in FAMILIES:
        nearest = closest_match(str(kind), FAMILIES)
        raise UsageError(
            f"{file} has model_type={kind!r}, which is not supported{cause}; use a model of one of these types: "
            f"{', '.join(sorted(FAMILIES))}{f' (the nearest is {nearest})' if nearest else ''}"
        )
    # RoPE sections are checked first, because `complete_config` flattens them.
    _require_value_types(config, file)
    for section in ("rope_parameters", "rope_scaling"):
        _require_value_types(config.get(section) or {}, file)
    _require_value_types(full := complete_config(config), file)
    layers = full["num_hidden_layers"]
    rotated = int(full["head_dim"] * full.get("partial_rotary_factor", 1.0)) // 2
    for key, length, of_what in (
        ("no_rope_layers", layers, f"layer of {layers}"),
        ("layer_types", layers, f"layer of {layers}"),
        ("short_factor", rotated, f"pair of {rotated} that RoPE rotates"),
    ):
        if full.get(key) and len(full[key]) != length and not (key == "no_rope_layers" and len(full[key]) > length):
            raise UsageError(
                f"{file} has {len(full[key])} {key}; expected one for each {of_what}. Fix: copy config.json again from the "
                "model repository"
            )
    return config


def _require_value_types(config: HFConfig, file: Path) -> None:
    """Raises UsageError if a used key has a value of another type. null counts as missing."""
    for key, (fits, expected) in _VALUE_TYPES.items():
        value = config.get(key)
        if value is not None and not fits(value):
            raise UsageError(
                f"{file} has {key}={value!r}; expected {expected}. Fix: copy config.json again from the model repository"
            )


def complete_config(config: HFConfig) -> dict[str, Any]:
    """Adds the family's defaults to a config, and moves RoPE settings to the top level."""
    family = FAMILIES[config["model_type"]]
    # For these keys null is a value, as in transformers. For other keys null counts as missing.
    null = {
        "tie_word_embeddings",
        *_NULLABLE,
        *(key for key, values in family.supported_values.items() if None in values),
    }
    given = {key: value for key, value in _flatten_rope(config).items() if value is not None or key in null}
    full = {**_DEFAULTS, **family.defaults, **given}
    # As in vLLM, 0 also means no window.
    full["sliding_window"] = full.get("sliding_window") or None
    full["num_key_value_heads"] = full["num_key_value_heads"] or full["num_attention_heads"]
    full["head_dim"] = full["head_dim"] or full["hidden_size"] // full["num_attention_heads"]
    if full["rope_type"] == "llama3":
        full.setdefault("original_max_position_embeddings", full["max_position_embeddings"])
    return full


def _flatten_rope(config: HFConfig) -> dict[str, Any]:
    """Moves RoPE settings to the top level of a config."""
    flat = dict(config)
    # The section is "rope_parameters" in transformers 5 and "rope_scaling" in transformers 4.
    for section in ("rope_parameters", "rope_scaling"):
        rope = dict(config.get(section) or {})
        if rope.keys() & set(LAYER_TYPES):
            # transformers 5 has a section for each type of Gemma 3's layers.
            local = rope.pop("sliding_attention", None) or {}
            keys = {"rope_theta": "rope_local_base_freq", "rope_type": "rope_local_type"}
            flat |= {keys[key]: value for key, value in local.items() if key in keys}
            rope = dict(rope.pop("full_attention", None) or {})
        # Earlier versions of transformers called the key "type".
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
        flat |= rope
    return flat


def builder_arguments(model_dir: str | Path) -> tuple[Family, dict[str, Any]]:
    """Returns the family of a model directory, and the arguments of its builder.

    Raises:
        UsageFileError: config.json is missing or damaged.
        UsageError: the family's builder does not support a value of config.json.
    """
    file = Path(model_dir) / "config.json"
    given = _flatten_rope(read_hf_config(model_dir))
    config = complete_config(given)
    family = FAMILIES[config["model_type"]]
    for key, values in family.supported_values.items():
        if key in config and not _is_supported(family, key, value := config[key]):
            possible = " or ".join(str(value) for value in values if value is not None) or "null"
            others = [name for name, other in FAMILIES.items() if _is_supported(other, key, value)]
            nearest = closest_match(config["model_type"], others) or next(iter(others), None)
            found = f"has {key}={value!r}" if key in given else f"lacks {key}, which defaults to {value!r}"
            raise UsageError(
                f"{file} {found}, but the builder of {config['model_type']} supports only {possible}"
                f"{f' ({nearest} supports it)' if nearest else ''}; use another model, or set model._component_ to your own "
                "builder"
            )
    try:
        arguments = family.arguments(config)
    except KeyError as error:
        raise UsageError(f"{file} lacks {error.args[0]}. Fix: copy it again from the model repository") from None
    _require_heads(config, "head_dim" in arguments, file)
    return family, arguments


def _is_supported(family: Family, key: str, value: Any) -> bool:
    """Whether the builder of a family supports a value of config.json."""
    # `layer_types` has a type for each layer; only the set of types matters.
    value = sorted(set(value)) if key == "layer_types" and value else value
    return value in family.supported_values[key] if key in family.supported_values else key in family.defaults


def _require_heads(config: HFConfig, has_head_dim: bool, file: Path) -> None:
    """Checks that the builder supports the heads of a config.

    Args:
        config: a complete config.
        has_head_dim: the builder takes head_dim.
        file: the config.json, for messages.

    Raises:
        UsageError: the builder does not support the heads.
    """
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], config["hidden_size"]
    # torchtune's attention requires this even if head_dim is independent of hidden_size.
    for key, dividend, divisor_key, divisor in (
        ("hidden_size", size, "num_attention_heads", heads),
        ("num_attention_heads", heads, "num_key_value_heads", kv_heads),
    ):
        if dividend % divisor:
            raise UsageError(
                f"{file} has {key}={dividend}, which is not a multiple of {divisor_key}={divisor}, as torchtune's attention "
                "needs; use another model, or set model._component_ to your own builder"
            )
    # Only the builders of decoder.py take head_dim. torchtune's builders compute it.
    if not has_head_dim and config["head_dim"] != size // heads:
        raise UsageError(
            f"{file} has head_dim={config['head_dim']}, but the builder of {config['model_type']} supports only "
            f"hidden_size / num_attention_heads = {size // heads}; use another model, or set model._component_ to your own "
            "builder"
        )
