"""A tiny random Qwen2 in a folder, and its log-probs from transformers, a reference for the engine."""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512


def build(seed: int) -> Qwen2ForCausalLM:
    """Build 2 layers of width 64, tied embeddings, float32; with weights large enough for varied samples and log-probs."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # vLLM on CPU needs heads of 32 or more
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen2ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                scale = 0.15 if "embed" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def save(model: Qwen2ForCausalLM, path: Path) -> str:
    model.save_pretrained(path)
    return str(path)


def logprobs(model: Qwen2ForCausalLM, prompt: list[int], tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Return the log-probs [R] of `tokens` after `prompt`, float32."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    logits = logits / temperature if temperature else logits
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def stale_cache_logprobs(
    models: list[Qwen2ForCausalLM], prompt: list[int], tokens: np.ndarray, split: int
) -> np.ndarray:
    """Return the log-probs of `tokens[split:]` by the second model over the first model's KV cache. The cache lacks the last
    token that the first model sampled."""
    ids, prefix = torch.tensor([[*prompt, *tokens.tolist()]]), len(prompt) + split - 1
    with torch.no_grad():
        kept = models[0](ids[:, :prefix], use_cache=True).past_key_values
        logits = models[1](ids[:, prefix:-1], past_key_values=kept).logits[0].float()
    return logits.log_softmax(-1).gather(-1, ids[0, prefix + 1 :, None])[:, 0].numpy()


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, VOCABULARY, (count, length)).tolist()


def adapter(rank: int, targets: tuple[str, ...], seed: int = 3) -> tuple[dict[str, torch.Tensor], dict]:
    """Return the PEFT tensors of a random adapter on the layers with these names, and their config."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in build(0).named_parameters():
        stem = name.removesuffix(".weight")
        if stem != name and stem.endswith(targets):
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"base_model.model.{stem}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.1
    return tensors, {"r": rank, "lora_alpha": 2.0 * rank, "target_modules": list(targets)}


def merged(seed: int, tensors: dict[str, torch.Tensor], peft: dict) -> Qwen2ForCausalLM:
    """Return the model of a seed with a merged adapter."""
    model = build(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{stem}A.weight" in tensors:
                weight += peft["lora_alpha"] / peft["r"] * tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
    return model
