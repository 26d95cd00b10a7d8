"""Tables and plots of `objectives.py`, out of what its runs left: metrics.jsonl, and the last weights measured again.

What a run logs while it trains (`loss/entropy`, `loss/approx_kl`) is over the groups that it trains on, which differ between
methods. So entropy and KL are measured here on equal terms: the last weights answer the held-out questions at temperature 1
under transformers, and at every token of these answers

    entropy = -sum_v p(v) log p(v)                    mean over tokens, nats
    KL = sum_v p(v) (log p(v) - log p_0(v))           summed over the tokens of an answer, mean over answers, nats

are exact over the vocabulary, with p_0 the policy after the warm-up. The sum is the KL divergence of whole answers.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, PreTrainedModel

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.host.config import instantiate
from torchtune_ext.telemetry.metrics import read_metrics

if TYPE_CHECKING:
    from objectives import Run

# 97.5% quantiles of Student's t by degrees of freedom, from one; above 15 that of 15, which is wider
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
SAMPLES = 4  # answers to every held-out question, for entropy and KL
LAST_STEPS = 10  # of which shares and lengths are the mean
STARTED = ("eval/accuracy_sampled", "eval/accuracy_greedy", "eval/pass_at_8")
CLIPPING = ("loss/clip_fraction", "loss/masked_fraction")


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to."""

    run: "Run"
    values: dict[str, float]  # column -> value
    rewards: list[float]  # mean reward of every step's samples


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95% interval (Student's t); nan for one value."""
    if len(values) < 2:
        return values[0], math.nan
    return mean(values), T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))


def read(run: "Run", start: Path) -> Result:
    lines = read_metrics(run.folder / "metrics.jsonl")
    last, steps = lines[-1], lines[1:]
    measured = run.folder / "measured.json"
    if not measured.is_file():
        measured.write_text(json.dumps(measure(run.folder, last["step"], start)))
    values = {
        "sampled": last["eval/accuracy_sampled"],
        "greedy": last["eval/accuracy_greedy"],
        "pass@8": last["eval/pass_at_8"],
        **json.loads(measured.read_text()),
        **{name: over_steps(steps, name) for name in CLIPPING},
        "tokens": mean(line["length/mean"] for line in steps[-LAST_STEPS:]),
        "s/step": sorted(_learning_s(line) for line in steps)[len(steps) // 2],
    }
    return Result(run, values, [line["reward/mean"] for line in steps])


def over_steps(steps: list[dict[str, float]], name: str) -> float:
    """Mean over the steps that made an update, which needs a group with a signal; nan where none did."""
    values = [line[name] for line in steps if name in line]
    return mean(values) if values else math.nan


def _learning_s(line: dict[str, float]) -> float:
    """Seconds of a step without its evaluation and its checkpoint."""
    return line["time/step"] - line.get("time/eval", 0.0) - line.get("time/save", 0.0)


@torch.no_grad()
def measure(folder: Path, step: int, start: Path) -> dict[str, float]:
    """Entropy and KL of the last weights of a run, see above."""
    cfg = OmegaConf.create(json.loads((folder / "run.json").read_text())["config"])
    task, tokenizer = instantiate(cfg.evaluation.task), ChatTokenizer(start)
    prompts = [tokenizer.prompt_ids(list(task[i].messages)) for i in range(len(task))]
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
        max_new_tokens=cfg.sampling.max_tokens, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
    )[:, width:]  # fmt: skip
    ended = (answers == tokenizer.eos_id).cumsum(1)
    written = (ended == 0) | ((ended == 1) & (answers == tokenizer.eos_id))  # with the token that ends the turn
    whole, mask = torch.cat([tokens, answers], dim=1), torch.cat([mask, written.long()], dim=1)
    p, q = (_logprobs(m, whole, mask, width) for m in (model, initial))
    entropy = -(p.exp() * p).sum(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    return {"entropy": entropy[written].mean().item(), "KL": (kl * written).sum(1).mean().item()}


def _logprobs(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> torch.Tensor:
    """[N, R, V] of the answers, which begin at `width`."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    return logits[:, width - 1 : -1].float().log_softmax(-1)


def grouped(results: list[Result], updates: int) -> dict[str, list[Result]]:
    """Method -> its runs by seed, in the order of the plan."""
    found: dict[str, list[Result]] = {}
    for result in results:
        if result.run.updates == updates:
            found.setdefault(result.run.method, []).append(result)
    return found


COLUMNS = {
    "sampled": ("sampled", 3),
    "greedy": ("greedy", 3),
    "pass@8": ("pass@8", 3),
    "entropy": ("entropy, nats/token", 3),
    "KL": ("KL to the start, nats/answer", 2),
    "loss/clip_fraction": ("`loss/clip_fraction`", 4),
    "loss/masked_fraction": ("`loss/masked_fraction`", 4),
    "tokens": ("tokens", 2),
    "s/step": ("s/step", 2),
}
DIFFERENCES = ("sampled", "greedy", "pass@8", "entropy", "KL")


def table(methods: dict[str, list[Result]]) -> str:
    """Mean over seeds ± half of the 95% interval."""
    rows = [["method", "seeds", *(head for head, _ in COLUMNS.values())]]
    for method, results in methods.items():
        cells = [cell([r.values[name] for r in results], digits) for name, (_, digits) in COLUMNS.items()]
        rows.append([method, str(len(results)), *cells])
    return markdown(rows)


def paired(methods: dict[str, list[Result]]) -> str:
    """Differences to grpo, seed by seed."""
    base = {r.run.seed: r.values for r in methods.get("grpo", [])}
    rows = [["method - grpo", "seeds", *(COLUMNS[name][0] for name in DIFFERENCES)]]
    for method, results in methods.items():
        pairs = [(r.values, base[r.run.seed]) for r in results if r.run.seed in base]
        if method == "grpo" or not pairs:
            continue
        cells = [cell([a[name] - b[name] for a, b in pairs], COLUMNS[name][1], "+") for name in DIFFERENCES]
        rows.append([method, str(len(pairs)), *cells])
    return markdown(rows)


def cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean ± half of the 95% interval; the mean alone for one value."""
    center, half = interval(values)
    return f"{center:{sign}.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row has the titles."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def report(results: list[Result]) -> str:
    """The tables, in Markdown."""
    first = read_metrics(results[0].run.folder / "metrics.jsonl")[0]
    start = ", ".join(f"{key.removeprefix('eval/')} {first[key]:.3f}" for key in STARTED)
    parts = [f"After the warm-up: {start}."]
    for updates in sorted({result.run.updates for result in results}):
        methods = grouped(results, updates)
        parts += [f"{updates} update{'s' if updates > 1 else ''} a batch:", table(methods), paired(methods)]
    return "\n\n".join(parts) + "\n"
