"""The sizes of public models, so that a run can be planned while nothing has been downloaded yet, not even config.json."""

import re
from typing import Any

# Layers, width, heads, heads of keys and values, width of the MLP, and whether input and output embedding are one. Those of
# Qwen2.5 and Llama are the sizes of torchtune's builders, those of Qwen3 come from its config.json on the hub.
_SIZES = {
    "Qwen2.5-0.5B": (24, 896, 14, 2, 4864, True),
    "Qwen2.5-1.5B": (28, 1536, 12, 2, 8960, True),
    "Qwen2.5-3B": (36, 2048, 16, 2, 11008, True),
    "Qwen2.5-7B": (28, 3584, 28, 4, 18944, False),
    "Qwen2.5-14B": (48, 5120, 40, 8, 13824, False),
    "Qwen2.5-32B": (64, 5120, 40, 8, 27648, False),
    "Qwen2.5-72B": (80, 8192, 64, 8, 29568, False),
    "Qwen3-1.7B": (28, 2048, 16, 8, 6144, True),
    "Qwen3-8B": (36, 4096, 32, 8, 12288, False),
    "Llama-3-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-8B": (32, 4096, 32, 8, 14336, False),
    "Llama-3.1-70B": (80, 8192, 64, 8, 28672, False),
    "Llama-3.2-1B": (16, 2048, 32, 8, 8192, True),
    "Llama-3.2-3B": (28, 3072, 24, 8, 8192, True),
}
_VOCABULARY = {"Qwen2.5": 152064, "Qwen3": 151936, "Llama": 128256}
_SMALL_VOCABULARY = 151936  # of Qwen2.5 up to 3B
_TYPES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama"}


def published_config(name: str) -> dict[str, Any] | None:
    """Returns what the config.json of a public model says of its sizes, or None for a name that is not known.

    Args:
        name: of the model, as its folder is called: "Qwen2.5-7B-Instruct". What it was tuned for counts for nothing.
    """
    base = re.sub(r"-(Instruct|Base)$", "", name).replace("-Coder-", "-").replace("-Math-", "-").removeprefix("Meta-")
    if base not in _SIZES:
        return None
    layers, width, heads, kv_heads, mlp, tied = _SIZES[base]
    family = base.split("-")[0]
    return {
        "model_type": _TYPES[family],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if family == "Qwen3" else width // heads,
        "intermediate_size": mlp,
        "vocab_size": _SMALL_VOCABULARY if family == "Qwen2.5" and tied else _VOCABULARY[family],
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
