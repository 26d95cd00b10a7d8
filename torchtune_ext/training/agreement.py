"""Do trainer and sampler agree on the tokens that were sampled? Measured raw, before any clipping or masking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune_ext.objective.kl import kl_k3
from torchtune_ext.packing import Row
from torchtune_ext.policy.logprobs import LabelScores
from torchtune_ext.training.breakdown import bucket_means, buckets

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)  # what a wrong one is looked for among

FEW_TOKENS = 1000  # the mean of fewer may be that of one token


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences d = trainer - sampler log-prob over sampled tokens, all ranks."""

    mean_abs: float
    p99_abs: float
    max_abs: float
    mean: float  # signed: far from zero means that one side renormalises
    k1: float  # mean of -d: estimates KL(sampler || trainer), of either sign
    k3: float  # mean of exp(d) - 1 - d: estimates the same, never negative
    ess: float  # effective sample size of the weights w = exp(d) as a share of the tokens: (sum w)^2 / (n sum w^2)
    by_bucket: dict[str, float]  # mean |d| by place in the completion and by age, as in breakdown.py
    tokens: int

    @property
    def first_abs(self) -> float:
        """Mean |d| over the first token of each completion."""
        return self.by_bucket.get("at_0", 0.0)

    def metrics(self, prefix: str) -> dict[str, float]:
        names = ("mean_abs", "p99_abs", "max_abs", "k1", "k3", "ess")
        buckets = {f"{prefix}/mean_abs_{bucket}": value for bucket, value in self.by_bucket.items()}
        return {f"{prefix}/{name}": getattr(self, name) for name in names} | buckets


class Disagreement(RuntimeError):
    """Trainer and sampler do not run the same policy."""


def mismatch(rows: Sequence[Row], scored: Sequence[LabelScores], version: int | None = None) -> Mismatch:
    """Compares the trainer's log-probs with those the sampler reported in `rows`; a collective.

    Args:
        version: of the trainer's policy, for the age of the samples.
    """
    parts = [
        torch.cat([(scores.logprobs_L.cpu().double() - row.logprobs_L.double())[None], buckets(row, version).double()])
        for row, scores in zip(rows, scored, strict=True)
    ]
    found = _gathered(torch.cat(parts, dim=1) if parts else torch.empty(3, 0, dtype=torch.float64))
    d, where = found[0], found[1:].long()
    if not d.numel():
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, 0)
    size = d.abs()
    weights = (d - d.max()).exp()  # the share does not change when all weights are scaled
    return Mismatch(
        mean_abs=size.mean().item(),
        p99_abs=size.kthvalue(max(1, round(0.99 * d.numel()))).values.item(),
        max_abs=size.max().item(),
        mean=d.mean().item(),
        k1=-d.mean().item(),
        k3=kl_k3(torch.zeros_like(d), d).mean().item(),
        ess=(weights.sum().square() / (d.numel() * weights.square().sum())).item(),
        by_bucket=bucket_means(size, where),
        tokens=d.numel(),
    )


def applied_share(rows: Sequence[Row], on: Sequence[LabelScores], off: Sequence[LabelScores]) -> tuple[float, float]:
    """How much of an adapter the sampler applies, from log-probs of its tokens; a collective.

    The least-squares slope of (sampler - off) on (on - off): 1 for a sampler that applies the adapter, 0 for one that samples
    from the base model, whatever the size of the adapter's effect.

    Args:
        on, off: what the trainer says of each row with and without the adapter.

    Returns:
        The slope, and the noise of a token around it in units of the effect (infinite while the adapter has no effect). On and
        off share the noise of off, which draws the slope towards 1/2 where noise and effect are alike: believe it only where
        the second value is small.
    """
    sampler = [row.logprobs_L.double() for row in rows]
    base = [scores.logprobs_L.cpu().double() for scores in off]
    effect = torch.cat([a.logprobs_L.cpu().double() - b for a, b in zip(on, base, strict=True)])
    seen = torch.cat([a - b for a, b in zip(sampler, base, strict=True)])
    both = _gathered(torch.stack([effect, seen]))
    effect, seen = both[0], both[1]
    size = effect.square().sum().item()
    if size == 0.0:
        return 0.0, float("inf")
    slope = (effect * seen).sum().item() / size
    noise = (seen - slope * effect).square().mean().item()
    return slope, (noise / effect.square().mean().item()) ** 0.5


def _gathered(values: Tensor) -> Tensor:
    """[K, n] of every rank as [K, sum of n]."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    parts: list[Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    return torch.cat(parts, dim=1)


def require_agreement(
    rows: Sequence[Row],
    scored: Sequence[LabelScores],
    limit: float,
    temperature: float,
    rescore: Callable[[float], list[LabelScores]],
    when: str,
    version: int | None = None,
) -> Mismatch:
    """Measures the mismatch and stops the run if its mean is above `limit` (or not a number).

    Args:
        rescore: scores the same rows under another temperature; used to find the cause.
        when: "before the first update", "after publishing version 7": opens the message.

    Raises:
        Disagreement: with the figures and the likely cause.
    """
    found = mismatch(rows, scored, version)
    if found.tokens == 0 or found.mean_abs <= limit:
        return found
    cause = diagnose(found, limit, temperature, lambda t: mismatch(rows, rescore(t)))
    raise Disagreement(
        f"{when}: trainer and sampler disagree on {found.tokens} sampled tokens: mean |d log-prob| {found.mean_abs:.4g} "
        f"(max_mismatch={limit:g}), 99th percentile {found.p99_abs:.4g}, max {found.max_abs:.4g}, signed mean "
        f"{found.mean:+.4g}. Likely cause: {cause}"
    )


def diagnose(found: Mismatch, limit: float, temperature: float, at: Callable[[float], Mismatch]) -> str:
    """Names the likely cause of a mismatch by trying the known ones; `at(T)` measures it under temperature T."""
    tried = {t: at(t).mean_abs for t in TEMPERATURES if abs(t - temperature) > 1e-6}
    best = min(tried, key=tried.__getitem__)
    if tried[best] <= max(limit, 0.1 * found.mean_abs):
        return (
            f"temperature: the sampler's log-probs are those of temperature {best:g}, the trainer scores at "
            f"{temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )
    if found.mean < 0 and abs(found.mean) > 0.9 * found.mean_abs:
        return (
            "top-p / top-k: the sampler's log-probs are higher than the trainer's on nearly every token, as after "
            "renormalising over a part of the vocabulary. Sample with top_p=1 and top_k off, and see that the engine "
            "does not take them from generation_config.json (generation_config='vllm')"
        )
    if found.first_abs > 5 * found.mean_abs:
        return (
            "prompt or chat template: the first tokens of the completions disagree far more than the rest, so the "
            "engine saw other prompt ids than the trainer (template, added BOS, re-tokenised text)"
        )
    if found.mean_abs < 0.2 and abs(found.mean) < 0.3 * found.mean_abs:
        return (
            "dtype: small errors of both signs, as from different precision. Give engine and trainer the same dtype "
            "(engine.dtype, dtype; precision=fp8_unified where the engine is in FP8), or raise max_mismatch if this model is "
            "known to be that noisy"
        )
    noise = "; or rounding (dtype, precision), which so few tokens cannot rule out: then raise max_mismatch"
    few = found.mean_abs < 0.2 and found.tokens < FEW_TOKENS
    return (
        "weights: no change of sampling parameters explains it, so the engine runs other weights than the trainer: a "
        "publication or adapter that was not applied, a stale prefix cache, another checkpoint, or a model definition "
        "that differs (rope_base, norm_eps, tied embeddings)" + noise * few
    )
