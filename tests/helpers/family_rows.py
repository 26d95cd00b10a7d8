"""The rows of the conformance tests: tiny random models of transformers, at least one for each family."""

from contextlib import contextmanager

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

VOCAB = 80
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=600,
)
PLAIN = {"rope_type": "default", "rope_theta": 5e5}
# A wavelength of more than 2,048 positions is scaled: with this theta, a quarter of the frequencies of 16 numbers are between
# there and 8,192, and a quarter above.
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the default ids exceed the small vocabulary
UNTIED = {"tie_word_embeddings": False}
# A scale of the scores other than that of the heads, and a window shorter than a completion.
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 7} | SPECIAL
# RoPE rotates 12 of 16 numbers of a head. No test is longer than the original length.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
ROWS = {
    "qwen2": (Qwen2Config, {"rope_parameters": PLAIN}),
    "qwen2, untied": (Qwen2Config, {"rope_parameters": PLAIN, **UNTIED}),
    "qwen3": (Qwen3Config, {"rope_parameters": PLAIN, "head_dim": 32}),
    "qwen3, untied": (  # heads of half the width, all with shared keys
        Qwen3Config,
        {"rope_parameters": PLAIN, "head_dim": 8, "num_key_value_heads": 1, **UNTIED},
    ),
    "smollm3": (SmolLM3Config, {"rope_parameters": PLAIN, "no_rope_layers": [0, 1]} | SPECIAL),
    "mistral": (MistralConfig, {"rope_parameters": PLAIN, "head_dim": 32, "sliding_window": 5}),
    "mistral, untied": (MistralConfig, {"rope_parameters": PLAIN, "sliding_window": None, **UNTIED}),
    "olmo 2": (Olmo2Config, {"rope_parameters": PLAIN, **UNTIED} | SPECIAL),
    "gemma 2": (Gemma2Config, {"rope_parameters": PLAIN, "final_logit_softcapping": 8.0} | GEMMA),
    "gemma 3": (
        Gemma3TextConfig,
        {
            "rope_parameters": {
                "full_attention": PLAIN | {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "full_attention"],
        }
        | GEMMA,
    ),
    "phi 3": (
        Phi3Config,
        {"rope_parameters": PLAIN, "sliding_window": 6, "original_max_position_embeddings": 600, **UNTIED} | SPECIAL,
    ),
    "phi 4 mini": (
        Phi3Config,
        {
            "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.75},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 550,
        }
        | SPECIAL,
    ),
    "llama 3": (LlamaConfig, {"rope_parameters": PLAIN, **UNTIED}),
    "llama, tied": (LlamaConfig, {"rope_parameters": PLAIN}),
    "llama 3.1": (LlamaConfig, {"rope_parameters": {**SCALED, "factor": 8.0}, **UNTIED}),
    "llama 3.2": (LlamaConfig, {"rope_parameters": {**SCALED, "factor": 32.0}}),
}


@torch.no_grad()
def save(folder, kind, **changes):
    """Saves a random model of transformers, in which no weight has its default initial value."""
    config = kind(**{**SIZES, "tie_word_embeddings": True, **changes})
    # Only eager attention has the soft cap.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(0)
    # Gemma's norms multiply by 1 + weight.
    center = 0 if kind.model_type.startswith("gemma") else 1
    for name, param in sorted(model.named_parameters()):
        noise = torch.randn(param.shape, generator=generator)
        param.copy_((center + 0.5 * noise) if name.endswith("norm.weight") else 0.25 * noise)
    model.save_pretrained(folder)
    return model


@contextmanager
def float64_for_float32():
    """Inside the block, casts to float32 are casts to float64, as in norms, RoPE and softmax of both libraries."""
    to, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def doubled(values):
        return [torch.float64 if value is torch.float32 else value for value in values]

    def with_double(function):
        return lambda *args, **options: function(
            *doubled(args), **dict(zip(options, doubled(options.values()), strict=True))
        )

    torch.Tensor.to, torch.Tensor.float = with_double(to), lambda x: to(x, torch.float64)
    torch.nn.functional.softmax = with_double(softmax)
    try:
        yield
    finally:
        torch.nn.functional.softmax = softmax
        del torch.Tensor.to, torch.Tensor.float  # torch.Tensor inherits its own


def to_float64(model):
    """Converts a model of torchtune, with exact tables of RoPE."""
    model.double()
    with float64_for_float32():
        for module in model.modules():
            if hasattr(module, "build_rope_cache"):
                module.build_rope_cache(module.max_seq_len)
    return model
