"""Do trainer and sampler agree on the tokens that were sampled? Measured raw, before any clipping or masking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune_ext.objective.kl import kl_k3
from torchtune_ext.packing import Row
from torchtune_ext.policy.logprobs import LabelLogprobs
from torchtune_ext.training.breakdown import bucket_means, buckets
from torchtune_ext.training.outcome import gathered

TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0)  # what a wrong one is looked for among

FEW_TOKENS = 1000  # the mean of fewer may be that of one token
RESOLVED = 0.25  # noise of a token over the effect of a change on it, above which nothing is concluded
CARRIERS = 16  # tokens that have to carry the effect: one that carries all of it hides its own noise


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Differences d = trainer - sampler log-prob over sampled tokens, all ranks."""

    mean_abs: float
    p99_abs: float
    max_abs: float
    mean: float  # signed: far from zero means that one side renormalizes
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


def mismatch(
    rows: Sequence[Row], said: Sequence[LabelLogprobs], version: int | None = None, present_only: bool = False
) -> Mismatch:
    """Compares the trainer's log-probs with those the sampler reported in `rows`; a collective.

    Args:
        said: what the trainer says of the labels of each row.
        version: of the trainer's policy, for the age of the samples.
        present_only: leave out what was sampled under another version.
    """
    parts = [
        torch.cat([(ours.logprobs_L.cpu().double() - row.logprobs_L.double())[None], buckets(row, version).double()])
        for row, ours in zip(rows, said, strict=True)
    ]
    if present_only:
        parts = [part[:, row.versions_L == version] for part, row in zip(parts, rows, strict=True)]
    found = torch.cat(gathered(torch.cat(parts, dim=1) if parts else torch.empty(3, 0, dtype=torch.float64)), dim=1)
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


@dataclass(frozen=True, slots=True)
class Applied:
    """How much of a change of the weights (an update, an adapter) the sampler shows on its tokens, all ranks."""

    slope: float  # 1: it has the change; 0: it has not
    noise: float  # of a token around the slope, over the effect of the change on it; infinite where there is no effect
    tokens: int
    carriers: float  # how many tokens carry the effect e: (sum e^2)^2 / sum e^4, between 1 and all of them
    otherwise: str  # what the sampler does if it has not, for the message

    @property
    def resolved(self) -> bool:
        """Whether the slope says anything: its own error is then about RESOLVED / sqrt(CARRIERS) = 0.06 at most."""
        return self.carriers >= CARRIERS and self.noise <= RESOLVED

    @property
    def missing(self) -> bool:
        return self.resolved and self.slope < 0.5


def applied_share(rows: Sequence[Row], on: Sequence[LabelLogprobs], off: Sequence[Tensor], otherwise: str) -> Applied:
    """How much of a change of the weights the sampler has taken over, from log-probs of its tokens; a collective.

    The least-squares slope of (sampler - off) on (on - off), whatever the size of the change's effect. Both share the noise
    of off. With the trainer's noise alike in on and off a sampler that has the change shows at least 1/2 on average, and one
    that has it not at most 1/2, at any size of the effect; the two come apart as the effect grows out of the noise.

    Args:
        on: what the trainer says of each row with the change.
        off: [L] of each row, the trainer's log-probs without it; NaN where they are not known, which is left out.
        otherwise: what a sampler without the change does, for messages.
    """
    parts = [
        torch.stack([ours.logprobs_L.cpu().double() - old, row.logprobs_L.double() - old])
        for row, ours, old in zip(rows, on, (old.cpu().double() for old in off), strict=True)
    ]
    found = torch.cat(gathered(torch.cat(parts, dim=1)), dim=1)
    effect, seen = found[:, ~found.isnan().any(dim=0)]
    size = effect.square().mean().item() if len(effect) else 0.0
    if size == 0.0:
        return Applied(0.0, float("inf"), len(effect), 0.0, otherwise)
    slope = (effect * seen).mean().item() / size
    noise = (seen - slope * effect).square().mean().item()
    carriers = len(effect) * size**2 / effect.pow(4).mean().item()
    return Applied(slope, (noise / size) ** 0.5, len(effect), carriers, otherwise)


class Agreement:
    """The gate that a run passes only where trainer and sampler agree.

    Args:
        logprobs: (rows, temperature) -> what the trainer says of their labels; used to find the cause of a disagreement.
        temperature: of sampling.
        limit: mean |d log-prob| above which they disagree (`max_mismatch`).
    """

    def __init__(
        self, logprobs: Callable[[Sequence[Row], float], list[LabelLogprobs]], temperature: float, limit: float
    ):
        self._logprobs, self._temperature, self._limit = logprobs, temperature, limit

    def require(
        self,
        rows: Sequence[Row],
        said: Sequence[LabelLogprobs],
        when: str,
        version: int | None = None,
        applied: Sequence[Applied] = (),
    ) -> Mismatch:
        """Measures the mismatch and stops the run if its mean is above the limit (or not a number), or if a change is missing.

        A token that an earlier version sampled differs because the policy has moved since, which is no fault: where `version`
        is given, the limit holds for the tokens of this version alone.

        Args:
            said: what the trainer says of the labels of each row.
            when: "before the first update", "after publishing version 7": opens the message.
            version: of the trainer's policy, which the engine has as well.
            applied: what is known of changes that the sampler has to show.

        Returns:
            The mismatch of all tokens, of whatever age.

        Raises:
            Disagreement: with the figures and the likely cause.
        """
        everything = mismatch(rows, said, version)
        present_only = version is not None
        found = mismatch(rows, said, version, present_only) if present_only else everything
        if (found.tokens == 0 or found.mean_abs <= self._limit) and not any(change.missing for change in applied):
            return everything

        def at(temperature: float) -> Mismatch:
            return mismatch(rows, self._logprobs(rows, temperature), version, present_only)

        cause = diagnose(found, self._limit, self._temperature, at, applied)
        raise Disagreement(
            f"{when}: trainer and sampler disagree on {found.tokens} sampled tokens: mean |d log-prob| {found.mean_abs:.4g} "
            f"(max_mismatch={self._limit:g}), 99th percentile {found.p99_abs:.4g}, max {found.max_abs:.4g}, signed mean "
            f"{found.mean:+.4g}. Likely cause: {cause}"
        )


def diagnose(
    found: Mismatch,
    limit: float,
    temperature: float,
    at: Callable[[float], Mismatch],
    applied: Sequence[Applied] = (),
) -> str:
    """Names the likely cause of a mismatch by trying the known ones; `at(T)` measures it under temperature T."""
    for change in applied:
        if change.missing:  # rounding leaves the slope at 1, so this is none
            return (
                f"weights: {change.otherwise}; of the effect of the change on the log-probs of {change.tokens} sampled tokens "
                f"the engine shows {change.slope:.2f}"
            )
    tried = {t: at(t).mean_abs for t in TEMPERATURES if abs(t - temperature) > 1e-6}
    best = min(tried, key=tried.__getitem__)
    if tried[best] <= max(limit, 0.1 * found.mean_abs):
        return (
            f"temperature: the sampler's log-probs are those of temperature {best:g}, the trainer computes at "
            f"{temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )
    if found.mean < 0 and abs(found.mean) > 0.9 * found.mean_abs:
        return (
            "top-p / top-k: the sampler's log-probs are higher than the trainer's on nearly every token, as after "
            "renormalizing over a part of the vocabulary. Sample with top_p=1 and top_k off, and see that the engine "
            "does not take them from generation_config.json (generation_config='vllm')"
        )
    if found.first_abs > 5 * found.mean_abs:
        return (
            "prompt or chat template: the first tokens of the completions disagree far more than the rest, so the "
            "engine saw other prompt ids than the trainer (template, added BOS, re-tokenized text)"
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
