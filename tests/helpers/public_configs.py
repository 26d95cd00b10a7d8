"""config.json of public models, transcribed by hand."""

import json
from pathlib import Path


def _config(model_type, layers, width, heads, kv_heads, mlp, vocab, positions, tied, theta, eps, **more):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        **more,
    }


def _qwen2_5(*sizes, vocab=152064, positions=32768, tied=False, eps=1e-6):
    window = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    return _config("qwen2", *sizes, vocab, positions, tied, 1e6, eps, **window)


def _qwen3(*sizes, positions=40960, tied=False):
    more = {"head_dim": 128, "attention_bias": False, "rope_scaling": None, "use_sliding_window": False}
    return _config("qwen3", *sizes, 151936, positions, tied, 1e6, 1e-6, **more)


def _llama3(*sizes, factor=None, tied=False, **more):
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    scaling = {"factor": factor, "rope_type": "llama3", **scaling} if factor else None
    positions = 131072 if factor else 8192
    more = {"attention_bias": False, "rope_scaling": scaling, **more}
    return _config("llama", *sizes, 128256, positions, tied, 5e5, 1e-5, **more)


_GEMMA3 = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_local_base_freq": 10000.0,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}

# Layers, width, heads, heads of keys and values, width of the MLP.
PUBLIC = {
    "Qwen2.5-0.5B-Instruct": _qwen2_5(24, 896, 14, 2, 4864, vocab=151936, tied=True),
    "Qwen2.5-1.5B-Instruct": _qwen2_5(28, 1536, 12, 2, 8960, vocab=151936, tied=True),
    "Qwen2.5-3B-Instruct": _qwen2_5(36, 2048, 16, 2, 11008, vocab=151936, tied=True),
    "Qwen2.5-7B": _qwen2_5(28, 3584, 28, 4, 18944, positions=131072),
    "Qwen2.5-7B-Instruct": _qwen2_5(28, 3584, 28, 4, 18944),
    "Qwen2.5-14B-Instruct": _qwen2_5(48, 5120, 40, 8, 13824),
    "Qwen2.5-Coder-14B-Instruct": _qwen2_5(48, 5120, 40, 8, 13824),
    "Qwen2.5-32B": _qwen2_5(64, 5120, 40, 8, 27648, positions=131072, eps=1e-5),
    "Qwen2.5-32B-Instruct": _qwen2_5(64, 5120, 40, 8, 27648),
    "Qwen3-1.7B": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 32, 8, 12288),
    "Qwen3-8B-Base": _qwen3(36, 4096, 32, 8, 12288, positions=32768),
    "Meta-Llama-3-8B-Instruct": _llama3(32, 4096, 32, 8, 14336),
    "Llama-3.1-8B-Instruct": _llama3(32, 4096, 32, 8, 14336, factor=8.0, mlp_bias=False),
    "Llama-3.2-1B-Instruct": _llama3(16, 2048, 32, 8, 8192, factor=32.0, tied=True, head_dim=64, mlp_bias=False),
    "SmolLM2-135M-Instruct": _config(
        "llama", 30, 576, 9, 3, 1536, 49152, 8192, True, 1e5, 1e-5, attention_bias=False, mlp_bias=False
    ),
    "gemma-3-270m": _config(
        "gemma3_text", 18, 640, 4, 1, 2048, 262144, 32768, True, 1e6, 1e-6, **_GEMMA3, query_pre_attn_scalar=256
    ),
    "Llama-3.2-3B-Instruct": _llama3(28, 3072, 24, 8, 8192, factor=32.0, tied=True, head_dim=128, mlp_bias=False),
}


def write_config(folder: Path, name: str) -> Path:
    """Write the config.json of a public model, without weights, into a folder of its name."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(PUBLIC[name]))
    return path
