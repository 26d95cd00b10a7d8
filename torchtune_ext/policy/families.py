"""The model families, and `from_config`, which builds a model of any of them."""

import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtune.models.convert_weights import get_mapped_key, hf_to_tune, tune_to_hf
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import lora_qwen2, qwen2, qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.models.qwen2._convert_weights import _FROM_HF
from torchtune.modules import TransformerDecoder

from torchtune_ext.policy.decoder import decoder, lora_decoder
from torchtune_ext.run.catalog import package_folder
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.json_files import read_json_object

HFConfig = Mapping[str, Any]  # the content of a config.json

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# NF4 has a scale for each block of 64 values, and a second scale for each 256 scales. Both
# divisions must be exact.
NF4_MULTIPLE = 64 * 256
# A path that begins with one of these names is a local folder, not a model id on the hub.
_LOCAL_FOLDER_NAMES = ("models", "model", "runs", "run", "checkpoints", "data", "weights", "tmp")

# Qwen3 has the names of Qwen2 and two more, for the norms of q and k. Llama's names are a subset.
# In Hugging Face's names, post_attention_layernorm means two norms: after attention in OLMo 2,
# before the MLP in other families. So the map to torchtune depends on the family, and only the map
# to Hugging Face is shared.
_TO_TUNE = _FROM_HF | {
    f"model.layers.{{}}.self_attn.{x}_norm.weight": f"layers.{{}}.attn.{x}_norm.scale" for x in ("q", "k")
}
_OLMO2_TO_TUNE = _TO_TUNE | {
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.sa_scale.scale",
    "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.mlp_scale.scale",
}
_TO_HF = {tune: hf for names in (_TO_TUNE, _OLMO2_TO_TUNE) for hf, tune in names.items()}
# Layers, width, heads, key/value heads, width of the MLP, and whether the embeddings are tied.
# Sizes of Qwen2.5 and Llama come from torchtune's builders, sizes of Qwen3 from config.json on the
# hub.
_HUB_MODEL_SIZES = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 11008, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, False),
    "Qwen3-1.7B": (28, 2048, 16, 8, 6144, True),
    "Qwen3-4B": (36, 2560, 32, 8, 9728, True),
    "Qwen3-8B": (36, 4096, 32, 8, 12288, False),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-70B": (80, 8192, 64, 8, 28672, False),
    "Llama-3.2-1B": (16, 2048, 32, 8, 8192, True),
    "Llama-3.2-3B": (28, 3072, 24, 8, 8192, True),
    "SmolLM2-135M": (30, 576, 9, 3, 1536, True),
}
_VOCAB_SIZES = {"Qwen2.5": 152064, "Qwen3": 151936, "Llama": 128256, "SmolLM2": 49152}
_SMALL_VOCAB_SIZE = 151936  # vocabulary of Qwen2.5 up to 3B
_MODEL_TYPES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama", "SmolLM2": "llama"}


def hf_name(name: str) -> str:
    """Returns Hugging Face's name of a torchtune weight, which is the same in all families."""
    return get_mapped_key(name, _TO_HF)


def _rename_weights(weights: dict[str, Tensor], names: dict[str, str], **_: int) -> dict[str, Tensor]:
    return {get_mapped_key(name, names): weight for name, weight in weights.items()}


def _builder_arguments(config: HFConfig) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": config["rope_theta"],
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def _decoder_arguments(config: HFConfig) -> dict[str, Any]:
    return _builder_arguments(config) | {"head_dim": config["head_dim"]}


def _smollm3_arguments(config: HFConfig) -> dict[str, Any]:
    # Despite its name, `no_rope_layers` has a 1 for each layer with RoPE.
    interval, layers = config["no_rope_layer_interval"], range(config["num_hidden_layers"])
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in layers]
    return _decoder_arguments(config) | {"nope_layers": [i for i in layers if not has_rope[i]]}


def _llama_arguments(config: HFConfig) -> dict[str, Any]:
    # A factor of 1 does not change any frequency, as in Llama 3.0.
    scale_factor = 1
    if config["rope_type"] == "llama3":
        # All three factors must exist: a missing one raises KeyError, which `from_config` reports.
        scale_factor, _, _ = (config[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    return _builder_arguments(config) | {"scale_factor": scale_factor}


def _build_llama(
    tied: Callable, untied: Callable, *lora_args: Any, tie_word_embeddings: bool, **rest: Any
) -> TransformerDecoder:
    # torchtune's builders of Llama 3.1 and 3.2 differ only in defaults and in tied embeddings.
    return tied(*lora_args, tie_word_embeddings=True, **rest) if tie_word_embeddings else untied(*lora_args, **rest)


@dataclass(frozen=True, slots=True)
class Family:
    """How to build a model of a family and convert its weights."""

    # torchtune's builder, or a builder with the same arguments.
    build: Callable[..., TransformerDecoder]
    # Builds the same model with adapters; takes torchtune's LoRA arguments.
    build_lora: Callable[..., TransformerDecoder]
    # Converts weights from Hugging Face's names and layout to torchtune's, and back.
    to_tune: Callable[..., dict[str, Tensor]]
    to_hf: Callable[..., dict[str, Tensor]]
    # Converts a complete config (`complete_config`) into arguments of the builders.
    arguments: Callable[[HFConfig], dict[str, Any]]
    # Key of config.json -> values that the builders support. A key that is absent and has no
    # default is not checked.
    supported_values: Mapping[str, tuple]
    # Defaults of missing keys, if they differ from `_DEFAULTS`.
    defaults: Mapping[str, Any]


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
_QWEN_SUPPORTED = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "use_sliding_window": (False, None),
    "layer_types": (["full_attention"], None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
_LLAMA_SUPPORTED = {
    "hidden_act": ("silu",),
    "rope_type": ("default", "llama3"),
    "low_freq_factor": (1,),
    "high_freq_factor": (4,),
    "original_max_position_embeddings": (8192,),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}


def _decoder_family(
    arguments: Callable[[HFConfig], dict[str, Any]],
    to_tune: dict[str, str] = _TO_TUNE,
    supported_values: Mapping[str, tuple] = types.MappingProxyType({}),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    **options: Any,
) -> Family:
    """Makes a family that decoder.py builds. Converting its weights only renames them.

    Args:
        arguments: complete config -> arguments of the builder.
        to_tune: Hugging Face name -> torchtune's name.
        supported_values: supported values, in addition to Qwen's.
        defaults: defaults of missing keys.
        options: further arguments of the builder.
    """
    return Family(
        build=partial(decoder, **options),
        build_lora=partial(lora_decoder, **options),
        to_tune=partial(_rename_weights, names=to_tune),
        to_hf=partial(_rename_weights, names=_TO_HF),
        arguments=arguments,
        supported_values=_QWEN_SUPPORTED | dict(supported_values),
        defaults=defaults,
    )


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
# The keys are the model_type of config.json (qwen2 for Qwen2.5). Converting Llama's weights permutes
# them, because torchtune's Llama rotates neighboring values of q and k. To add a family, add a
# line. If torchtune has no builder for it, write one first, as decoder.py does for four families.
FAMILIES = {
    "qwen2": Family(
        build=qwen2,
        build_lora=lora_qwen2,
        to_tune=qwen2_hf_to_tune,
        to_hf=qwen2_tune_to_hf,
        arguments=_builder_arguments,
        supported_values=_QWEN_SUPPORTED,
        defaults=_QWEN_DEFAULTS,
    ),
    "qwen3": _decoder_family(_decoder_arguments, defaults=_QWEN_DEFAULTS | {"head_dim": 128}, qk_norm="head"),
    "smollm3": _decoder_family(
        _smollm3_arguments,
        defaults={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
    ),
    "mistral": _decoder_family(
        _decoder_arguments,
        supported_values={"sliding_window": (None,)},
        defaults={
            "vocab_size": 32000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
    ),
    "olmo2": _decoder_family(
        _decoder_arguments,
        _OLMO2_TO_TUNE,
        defaults={"vocab_size": 50304, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        qk_norm="whole",
        post_norm=True,
    ),
    "llama": Family(
        build=partial(_build_llama, llama3_2, llama3_1),
        build_lora=partial(_build_llama, lora_llama3_2, lora_llama3_1),
        to_tune=hf_to_tune,
        to_hf=tune_to_hf,
        arguments=_llama_arguments,
        supported_values=_LLAMA_SUPPORTED,
        defaults={"vocab_size": 32000, "max_position_embeddings": 2048},
    ),
}


# Part of a model_type -> why such families are unsupported.
_UNSUPPORTED_REASONS = {
    "moe": "it is a mixture of experts",
    "mixtral": "it is a mixture of experts",
    "gemma2": "some of its layers use a sliding window",
    "gemma3": "some of its layers use a sliding window",
    "qwen3_5": "its recurrent layers would carry state from one packed sequence into the next",
    "qwen3_next": "its recurrent layers would carry state from one packed sequence into the next",
    "mamba": "its recurrent layers would carry state from one packed sequence into the next",
}


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


# Key -> check of its value, and a description of valid values.
_SIZE, _NUMBER = (_is_size, "a whole number above 0"), (_is_number, "a number above 0")
_OBJECT = (lambda value: isinstance(value, dict), "a JSON object")
_VALUE_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _SIZE
    ),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "no_rope_layer_interval"), _SIZE),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "factor"), _NUMBER),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), _OBJECT),
    "tie_word_embeddings": (lambda value: isinstance(value, bool), "true or false"),
    "no_rope_layers": (_is_list_of(int), "a list of 0 and 1, one for each layer"),
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
        raise UsageFileError(f"model_dir={str(model_dir)!r}: {_missing_config_hint(path)}")
    config = read_json_object(file)
    kind = config.get("model_type")
    cause = next((f": {reason}" for part, reason in _UNSUPPORTED_REASONS.items() if part in str(kind)), "")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UsageError(
            f"{file} has model_type={kind!r}, which is not supported{cause}; use a model of one of these types: "
            f"{', '.join(sorted(FAMILIES))}"
        )
    # RoPE sections are checked first, because `complete_config` flattens them.
    _require_value_types(config, file)
    _require_value_types(full := complete_config(config), file)
    if len(full.get("no_rope_layers") or range(full["num_hidden_layers"])) < full["num_hidden_layers"]:
        raise UsageError(
            f"{file} has {len(full['no_rope_layers'])} no_rope_layers; expected one for each of the "
            f"{full['num_hidden_layers']} layers. Fix: copy config.json again from the model repository"
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
    null = {"tie_word_embeddings", *(key for key, values in family.supported_values.items() if None in values)}
    given = {key: value for key, value in _flatten_rope(config).items() if value is not None or key in null}
    full = {**_DEFAULTS, **family.defaults, **given}
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
        # Earlier versions of transformers called the key "type".
        if "type" in rope:
            rope.setdefault("rope_type", rope.pop("type"))
        flat |= rope
    return flat


def _missing_config_hint(path: Path) -> str:
    """Explains why a model directory has no config.json, and how to get a valid directory."""
    # Likely errors come first: a file, a run's folder, an adapter, a GGUF file, a warm-up that was
    # never run.
    if path.is_file():
        return "it is a file; set it to a model directory in Hugging Face format, with config.json and the weights"
    for pattern in ("config.json", "merged/config.json"):
        if models := sorted(path.glob(f"checkpoints/step_*/{pattern}")):
            return f"it is the folder of a run; its newest checkpoint is the model {models[-1].parent}"
    if (path / "adapter_config.json").is_file():
        merged = path / "merged"
        hint = (
            f"the merged model is {merged}"
            if merged.is_dir()
            else "adapters.save_merged=True also saves the merged model"
        )
        return f"it holds an adapter and no model; {hint}"
    if files := sorted(path.glob("*.gguf")):
        return f"has no config.json; `torchtune-ext gguf {files[0]} OUT` converts {files[0].name} to a model directory"
    problem = "has no config.json" if path.is_dir() else f"folder not found, relative to {Path.cwd()}"
    if path.parts[-2:] == ("warmup", "model"):
        name = f"warmup/{path.parts[-3] if len(path.parts) > 2 else 'tiny'}"
        config = f" --config {name}" if (package_folder("configs") / f"{name}.yaml").is_file() else ""
        return f"{problem}: `tune run warmup_sft{config}` creates it"
    steps = [folder.name for folder in sorted(path.parent.glob("step_*/"))]
    if path.name.startswith("step_") and not path.is_dir() and steps:
        return f"{problem}; the checkpoints in {path.parent} are {', '.join(steps)}"
    # "Qwen/Qwen3-8B" may be a model id on the hub, but "models/Qwen3-8B" is most likely a folder.
    hub = _HUB_ID.fullmatch(str(path)) and path.parts[0] not in _LOCAL_FOLDER_NAMES and not path.is_dir()
    name = path.name or "MODEL"
    owner, place = (path.parts[0], f"models/{name}") if hub else (hub_owner(name), str(path))
    hint = (
        f"`hf download {owner}/{name} --local-dir {place}` fetches a model, and `hf download {owner}/{name} "
        f"config.json --local-dir {place}` the file that a plan of other models needs"
    )
    if hub:
        return f"{problem}. If it is a model id on the Hugging Face hub: {hint}; then set model_dir={place}"
    return f"{problem}; set it to a directory in Hugging Face format: {hint}"


def hub_owner(name: str) -> str:
    """Guesses the owner of a model on the hub from its name; "OWNER" if unknown."""
    owners = {"Qwen": "Qwen", "Llama-": "meta-llama", "DeepSeek-": "deepseek-ai", "SmolLM": "HuggingFaceTB"}
    owners |= {"Mistral-": "mistralai", "OLMo-2-": "allenai"}
    return next((owner for begin, owner in owners.items() if name.startswith(begin)), "OWNER")


def from_config(
    model_dir: str,
    max_seq_len: int | None = None,
    lora_attn_modules: Sequence[str] = (),
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16.0,
    lora_dropout: float = 0.0,
    use_dora: bool = False,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Builds the torchtune model that `config.json` describes, with adapters if requested.

    Args:
        model_dir: the model directory.
        max_seq_len: maximum sequence length in tokens, and rows of the RoPE table; None: the value
            of config.json.
        lora_attn_modules: attention layers with an adapter: some of q_proj, k_proj, v_proj,
            output_proj.
        apply_lora_to_mlp: adapters on the three layers of the MLP.
        apply_lora_to_output: an adapter on the output layer, if it is not tied to the embeddings.
        lora_rank: rank of the adapters.
        lora_alpha: an adapter's output is scaled by lora_alpha / lora_rank.
        lora_dropout: fraction of an adapter's inputs that is dropped in training.
        use_dora: adapters are DoRA adapters, with a magnitude for each row of a weight.
        quantize_base: frozen weights of adapted layers are stored in NF4 (QLoRA). Llama's builders
            also store frozen layers without adapters in NF4.

    Raises:
        UsageFileError: config.json is missing or damaged.
        UsageError: the family's builder does not support a value of config.json, or the adapters
            are invalid.
    """
    given, file = _flatten_rope(read_hf_config(model_dir)), Path(model_dir) / "config.json"
    config = complete_config(given)
    family = FAMILIES[config["model_type"]]
    for key, values in family.supported_values.items():
        value = config.get(key)
        # `layer_types` has a type for each layer; only the set of types matters.
        if (sorted(set(value)) if key == "layer_types" and value else value) not in values and key in config:
            possible = " or ".join(str(value) for value in values if value is not None) or "null"
            found = f"has {key}={value!r}" if key in given else f"lacks {key}, which defaults to {value!r}"
            raise UsageError(
                f"{file} {found}, but the builder of {config['model_type']} supports only {possible}; use another model, or "
                "set model._component_ to your own builder"
            )
    try:
        arguments = family.arguments(config)
    except KeyError as error:
        raise UsageError(f"{file} lacks {error.args[0]}. Fix: copy it again from the model repository") from None
    _require_heads(config, "head_dim" in arguments, file)
    if max_seq_len is not None:
        arguments["max_seq_len"] = max_seq_len
    switches = {
        "apply_lora_to_mlp": apply_lora_to_mlp,
        "apply_lora_to_output": apply_lora_to_output,
        "use_dora": use_dora,
        "quantize_base": quantize_base,
    }
    if lora_attn_modules:
        numbers = {"lora_rank": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
        if lora_rank < 1:
            raise UsageError(f"model.lora_rank={lora_rank} must be at least 1")
        if apply_lora_to_output and arguments.get("tie_word_embeddings"):
            raise UsageError(
                "apply_lora_to_output=True, but this model has no separate output head (tie_word_embeddings=True); set "
                "apply_lora_to_output=False"
            )
        build = partial(family.build_lora, **numbers, **arguments)
        if quantize_base:
            _require_nf4(build, list(lora_attn_modules), switches)
        return build(list(lora_attn_modules), **switches)
    if names := [name for name, value in switches.items() if value]:
        raise UsageError(
            f"model.{names[0]}=True without model.lora_attn_modules: the model has no adapters; set "
            f"model.lora_attn_modules=[q_proj, v_proj], for instance, or leave out model.{names[0]}"
        )
    return family.build(**arguments)


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


def _require_nf4(build: Callable[..., TransformerDecoder], modules: list[str], switches: dict[str, bool]) -> None:
    """Raises UsageError if NF4 cannot hold a weight of `build(modules, **switches)`."""

    def fits_nf4(modules: list[str], switches: dict[str, bool]) -> bool:
        try:
            with torch.device("meta"):
                build(modules, **switches)
        except AssertionError:  # raised by torchao
            return False
        return True

    if fits_nf4(modules, switches):
        return
    with torch.device("meta"):
        plain = build(modules, **switches | {"quantize_base": False})
    not_nf4_divisible = {
        name.rpartition(".")[2]: tuple(weight.shape)
        for name, module in plain.layers[0].named_modules()
        if (weight := getattr(module, "weight", None)) is not None
        and ".lora_" not in name
        and weight.numel() % NF4_MULTIPLE
    }
    # Some builders also store layers without adapters in NF4, so the suggestion is tried.
    targets = [name for name in modules if name not in not_nf4_divisible]
    adapts_mlp = {"w1", "w2", "w3"} & set(not_nf4_divisible) and switches["apply_lora_to_mlp"]
    fewer_switches = {"apply_lora_to_mlp": False} if adapts_mlp else {}
    advice = "so this model does not support QLoRA: set model.quantize_base=False"
    if targets and fits_nf4(targets, switches | fewer_switches):
        advice = f"set model.lora_attn_modules=[{', '.join(targets)}]"
        if fewer_switches:
            advice += " model.apply_lora_to_mlp=False"
    raise UsageError(
        f"model.quantize_base=True: NF4 needs a multiple of {NF4_MULTIPLE} values per weight, which does not hold for "
        f"{', '.join(f'{name} ({rows} x {columns})' for name, (rows, columns) in not_nf4_divisible.items())}; {advice}"
    )


def hub_model_config(name: str) -> dict[str, Any] | None:
    """Returns the config.json sizes of a public model by its name on the hub; None if unknown."""
    # A run can thus be planned before any download. Fine-tuned variants have the sizes of their
    # base.
    base = re.sub(r"-(Instruct|Base)$", "", name).replace("-Coder-", "-").replace("-Math-", "-").removeprefix("Meta-")
    if base not in _HUB_MODEL_SIZES:
        return None
    layers, width, heads, kv_heads, mlp, tied = _HUB_MODEL_SIZES[base]
    family = base.split("-")[0]
    return {
        "model_type": _MODEL_TYPES[family],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if family == "Qwen3" else width // heads,
        "intermediate_size": mlp,
        "vocab_size": _SMALL_VOCAB_SIZE if family == "Qwen2.5" and tied else _VOCAB_SIZES[family],
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
