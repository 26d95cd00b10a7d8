"""Makes a small model from scratch: a tokenizer trained on a task's text, random Qwen weights."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtune_ext.chat import CHATML
from torchtune_ext.run.errors import UsageError
from torchtune_ext.settings.sections import config_section

SPECIAL_TOKENS = ("<|im_end|>", "<|im_start|>", "<|pad|>")
# The roles as the chat template writes them.
ROLE_PREFIXES = ("user\n", "assistant\n", "system\n")
# model_type -> its class in transformers.
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# A line in at least this fraction of the prompts becomes one token.
COMMON_LINE_FRACTION = 0.5


@config_section("shape")
class ModelShape:
    """The sizes of a Qwen2 or Qwen3 model with tied embeddings, named as in config.json."""

    model_type: Literal["qwen2", "qwen3"] = Field(default="qwen2", description="architecture")
    hidden_size: int = Field(default=128, ge=1, description="width of the residual stream")
    num_hidden_layers: int = Field(default=4, ge=1, description="transformer layers")
    num_attention_heads: int = Field(default=4, ge=1, description="query heads")
    num_key_value_heads: int = Field(default=2, ge=1, description="key and value heads")
    head_dim: int | None = Field(
        default=None, ge=1, description="width of a head; null: hidden_size / num_attention_heads"
    )
    intermediate_size: int = Field(default=384, ge=1, description="width of the MLP")
    max_position_embeddings: int = Field(default=1024, ge=1, description="maximum sequence length in tokens")
    rope_theta: float = Field(default=10000.0, gt=0, description="RoPE base")
    vocab_size: int = Field(default=1024, ge=1, description="maximum vocabulary; the tokenizer may need fewer tokens")

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"shape: hidden_size={self.hidden_size} must be a multiple of num_attention_heads="
                f"{self.num_attention_heads}, and num_attention_heads a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}"
            )
        if self.model_type == "qwen2" and self.head_size * self.num_attention_heads != self.hidden_size:
            raise UsageError(
                f"shape.head_dim={self.head_dim} must be hidden_size / num_attention_heads in Qwen2; leave it out, or set "
                "shape.model_type=qwen3"
            )
        if self.head_size % 32:
            raise UsageError(
                f"shape: heads of {self.head_size} (head_dim, or hidden_size / num_attention_heads) are not supported by "
                "vLLM's attention kernels; make it a multiple of 32"
            )

    @property
    def head_size(self) -> int:
        """The width of queries, keys and values."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def make_tokenizer(
    prompts: Sequence[str], solutions: Sequence[str], answers: Iterable[str], vocab_size: int
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer. Any text decodes to itself.

    Args:
        prompts: prompts of the task. Each line that many prompts share becomes a token.
        solutions: further texts to train on.
        answers: each answer becomes a token.
        vocab_size: maximum number of tokens.
    """
    lines = Counter(line for prompt in prompts for line in set(re.findall(r"[^\n]+\n*", prompt)))
    common = sorted(
        line for line, count in lines.items() if count >= COMMON_LINE_FRACTION * len(prompts) and len(line) > 3
    )
    words = sorted({*answers, *ROLE_PREFIXES})
    tokenizer = Tokenizer(models.BPE())
    # Without the usual split into words, a phrase like " was in the room just west of the " can
    # become one token.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # BPE is trained on the text between the words and lines with their own tokens. An alternation
    # takes its first match, so the longest come first; `(?!)` matches nothing.
    splitter = re.compile("|".join(re.escape(s) for s in sorted([*common, *words], key=len, reverse=True)) or r"(?!)")
    pieces = [piece for text in [*prompts, *solutions] for piece in splitter.split(text) if piece]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(words) - len(common),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=max(2, len(prompts) // 200),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*words, *common]])
    return tokenizer


def write_model(folder: Path, tokenizer: Tokenizer, shape: ModelShape, seed: int) -> None:
    """Writes a model directory in Hugging Face format, with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    end, _, pad = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    vocab = (tokenizer.get_vocab_size() + 63) // 64 * 64
    config = {
        "architectures": [ARCHITECTURES[shape.model_type]],
        "model_type": shape.model_type,
        "vocab_size": vocab,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "chat_template.jinja").write_text(CHATML)
    save_file(_random_weights(shape, vocab, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _random_weights(shape: ModelShape, vocab: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width, ffn = shape.hidden_size, shape.intermediate_size
    heads, kv = shape.head_size * shape.num_attention_heads, shape.head_size * shape.num_key_value_heads

    def normal(*size: int, std: float) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * std

    # Scaling by fan-in preserves a variance of 1. The usual 0.02 suits widths of thousands and
    # leaves a narrow model's attention flat. Outputs into the residual stream are also scaled by
    # depth, because each layer adds two outputs.
    std, residual = width**-0.5, (2 * shape.num_hidden_layers) ** -0.5
    weights = {"model.embed_tokens.weight": normal(vocab, width, std=std), "model.norm.weight": torch.ones(width)}
    for i in range(shape.num_hidden_layers):
        prefix = f"model.layers.{i}."
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, width, std=std)
            if shape.model_type == "qwen2":
                weights[f"{prefix}self_attn.{name}_proj.bias"] = torch.zeros(rows)
            elif name != "v":
                weights[f"{prefix}self_attn.{name}_norm.weight"] = torch.ones(shape.head_size)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(width, heads, std=residual * heads**-0.5)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(ffn, width, std=std)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(ffn, width, std=std)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(width, ffn, std=residual * ffn**-0.5)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(width)
        weights[f"{prefix}post_attention_layernorm.weight"] = torch.ones(width)
    return weights
