"""The table of the model families: builders, names of weights, supported values and defaults."""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torchtune.models.convert_weights import get_mapped_key, hf_to_tune, tune_to_hf
from torchtune.models.llama3_1 import llama3_1, lora_llama3_1
from torchtune.models.llama3_2 import llama3_2, lora_llama3_2
from torchtune.models.qwen2 import lora_qwen2, qwen2, qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.models.qwen2._convert_weights import _FROM_HF
from torchtune.modules import TransformerDecoder

from torchtune_ext.policy.decoder import decoder, lora_decoder

HFConfig = Mapping[str, Any]  # the content of a config.json

LAYER_TYPES = ("full_attention", "sliding_attention")
LONGROPE_TYPES = ("longrope", "su")  # "su" in old files

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
_GEMMA_TO_TUNE = _OLMO2_TO_TUNE | {"model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.mlp_norm.scale"}
_TO_HF = {tune: hf for names in (_TO_TUNE, _OLMO2_TO_TUNE) for hf, tune in names.items()}
_GEMMA_TO_HF = _TO_HF | {tune: hf for hf, tune in _GEMMA_TO_TUNE.items()}
# Fused layer -> its parts, in order. Phi-3's files hold fused layers, and vLLM fuses them in every
# family.
FUSED_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def hf_name(name: str) -> str:
    """Returns Hugging Face's name of a torchtune weight, before fusing.

    It is the same in all families, except for the norm before Gemma's MLP.
    """
    return get_mapped_key(name, _TO_HF)


def _rename_weights(weights: dict[str, Tensor], names: dict[str, str], **_: int) -> dict[str, Tensor]:
    return {get_mapped_key(name, names): weight for name, weight in weights.items()}


def _split_weights(
    weights: dict[str, Tensor], num_heads: int, num_kv_heads: int, head_dim: int, dim: int
) -> dict[str, Tensor]:
    """Splits fused layers and renames them to torchtune's names."""
    split = {}
    for name, weight in weights.items():
        fused = name.split(".")[-2]
        sizes = [head_dim * heads for heads in (num_heads, num_kv_heads, num_kv_heads)]
        if fused == "gate_up_proj":
            sizes = [weight.shape[0] // 2] * 2
        parts = weight.split(sizes) if fused in FUSED_PARTS else [weight]
        for part, values in zip(FUSED_PARTS.get(fused, (fused,)), parts, strict=True):
            split[name.replace(f".{fused}.", f".{part}.")] = values
    return _rename_weights(split, _TO_TUNE)


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


def _mistral_arguments(config: HFConfig) -> dict[str, Any]:
    return _decoder_arguments(config) | {"windows": [config["sliding_window"]] * config["num_hidden_layers"]}


def _gemma_arguments(config: HFConfig) -> dict[str, Any]:
    kinds = config.get("layer_types") or [
        LAYER_TYPES[(layer + 1) % config["sliding_window_pattern"] > 0] for layer in range(config["num_hidden_layers"])
    ]
    if "sliding_attention" in kinds and config["sliding_window"] is None:
        raise KeyError("sliding_window")
    return _decoder_arguments(config) | {
        "windows": [config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds],
        "window_rope_base": config.get("rope_local_base_freq"),
        "rope": {"factors": (config["factor"],)} if config["rope_type"] == "linear" else {},
        "softcap": config["attn_logit_softcapping"],
        "scale": config["query_pre_attn_scalar"] ** -0.5,
        "logit_softcap": config["final_logit_softcapping"],
    }


def _phi3_arguments(config: HFConfig) -> dict[str, Any]:
    rope = {"dim": int(config["head_dim"] * config["partial_rotary_factor"])}
    longest, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    if config["rope_type"] in LONGROPE_TYPES:
        # Beyond the original length, all frequencies would change (`long_factor`).
        stretch = math.log(max(1.0, longest / original)) / math.log(original)
        rope |= {"factors": tuple(config["short_factor"]), "magnitude": math.sqrt(1 + stretch)}
        longest = min(longest, original)
    return _mistral_arguments(config) | {"max_seq_len": longest, "rope": rope}


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
    # Whether the files hold the layers of `FUSED_PARTS` fused.
    fused: bool = False


_PLAIN_SUPPORTED = {
    "hidden_act": ("silu",),
    "rope_type": ("default",),
    "use_sliding_window": (False, None),
    "layer_types": (["full_attention"], None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
_QWEN_SUPPORTED = _PLAIN_SUPPORTED | {"partial_rotary_factor": (1, None)}
_GEMMA_SUPPORTED = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "layer_types": (*([kind] for kind in LAYER_TYPES), list(LAYER_TYPES), None),
    "rope_type": ("default",),
    "use_bidirectional_attention": (False, None),
    "attention_bias": (False, None),
}
_LLAMA_SUPPORTED = _QWEN_SUPPORTED | {
    "rope_type": ("default", "llama3"),
    "sliding_window": (None,),
    "low_freq_factor": (1,),
    "high_freq_factor": (4,),
    "original_max_position_embeddings": (8192,),
}


def _decoder_family(
    arguments: Callable[[HFConfig], dict[str, Any]],
    to_tune: dict[str, str] = _TO_TUNE,
    supported_values: Mapping[str, tuple] = _QWEN_SUPPORTED,
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
    fused: bool = False,
    **options: Any,
) -> Family:
    """Makes a family that decoder.py builds.

    Args:
        arguments: complete config -> arguments of the builder.
        to_tune: Hugging Face name -> torchtune's name.
        supported_values: supported values.
        defaults: defaults of missing keys.
        fused: whether the files hold fused layers.
        options: further arguments of the builder.
    """
    return Family(
        build=partial(decoder, **options),
        build_lora=partial(lora_decoder, **options),
        to_tune=_split_weights if fused else partial(_rename_weights, names=to_tune),
        to_hf=partial(_rename_weights, names=_GEMMA_TO_HF if to_tune is _GEMMA_TO_TUNE else _TO_HF),
        arguments=arguments,
        supported_values=supported_values,
        defaults=defaults,
        fused=fused,
    )


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GEMMA_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA_NORMS = ("sa_norm", "sa_scale", "mlp_norm", "mlp_scale")
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
        _mistral_arguments,
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
        norms=("sa_scale", "mlp_scale"),
    ),
    "gemma2": _decoder_family(
        _gemma_arguments, _GEMMA_TO_TUNE, _GEMMA_SUPPORTED, _GEMMA_DEFAULTS, norms=_GEMMA_NORMS, gemma=True
    ),
    "gemma3_text": _decoder_family(
        _gemma_arguments,
        _GEMMA_TO_TUNE,
        # transformers and vLLM ignore attn_logit_softcapping in Gemma 3.
        _GEMMA_SUPPORTED
        | {"rope_type": ("default", "linear"), "rope_local_type": ("default",), "attn_logit_softcapping": (None,)},
        _GEMMA_DEFAULTS
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        norms=_GEMMA_NORMS,
        gemma=True,
        qk_norm="head",
    ),
    "phi3": _decoder_family(
        _phi3_arguments,
        supported_values=_PLAIN_SUPPORTED
        | {
            "rope_type": ("default", *LONGROPE_TYPES),
            "factor": (None,),
            "attention_factor": (None,),
            "resid_pdrop": (0,),
            "embd_pdrop": (0,),
        },
        defaults={
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
            "sliding_window": None,
        },
        fused=True,
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
