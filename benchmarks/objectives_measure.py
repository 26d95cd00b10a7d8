"""Entropy and KL of the final weights of a run of `objectives.py`.

The training metrics (`loss/entropy`, `loss/approx_kl`) cover the trained groups, which differ between methods. So entropy and
KL are measured here under equal conditions: the final weights answer the held-out questions at temperature 1 in transformers,
and at every token of these answers

    entropy = -sum_v p(v) log p(v)                    mean over tokens, nats
    KL = sum_v p(v) (log p(v) - log p_0(v))           summed over the tokens of an answer, mean over answers, nats

are exact over the vocabulary, with p_0 the policy after the warm-up. The sum is the KL divergence of whole answers.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.settings.components import Component

SAMPLES = 4  # answers to every held-out question


@torch.no_grad()
def measure(folder: Path, step: int, start: Path) -> dict[str, float]:
    """Return entropy and KL of the weights after `step`; `start`: the model after the warm-up."""
    cfg = json.loads((folder / "run.json").read_text())["config"]
    task, tokenizer = Component(cfg["evaluation"]["task"], "task").instantiate(), ChatTokenizer(start)
    prompts = [tokenizer.prompt_ids(task[i].messages) for i in range(len(task))]
    model, initial = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (folder / "checkpoints" / f"step_{step:06d}", start)
    )
    torch.manual_seed(0)
    width = max(map(len, prompts))
    tokens = torch.tensor([[tokenizer.pad_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    tokens, mask = (x.repeat_interleave(SAMPLES, dim=0) for x in (tokens, mask))
    answers = model.generate(
        tokens, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=cfg["sampling"]["max_tokens"], eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
    )[:, width:]  # fmt: skip
    ended = (answers == tokenizer.eos_id).cumsum(1)
    written = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_id))  # with the token that ends the turn
    whole, mask = torch.cat([tokens, answers], dim=1), torch.cat([mask, written.long()], dim=1)
    p, q = (_logprobs(m, whole, mask, width) for m in (model, initial))
    entropy = -(p.exp() * p).sum(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return {"entropy": entropy[written].mean().item(), "KL": (kl * written).sum(1).mean().item()}


def _logprobs(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """Return the log-probs [N, R, V] of the answers, which begin at position `width`."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    return logits[:, width - 1 : -1].float().log_softmax(-1)
