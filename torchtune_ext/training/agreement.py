"""Checks that trainer and sampler agree on the sampled tokens, before any clipping or masking.

test        asks for                                  sees                                   is blind to
scale       mean |d| <= twice the rounding + chance   other weights, rope                    what rounding hides
sharpness   d has no part that goes with log p + H    a temperature, under the rounding too  other weights, top-p
identity    mean exp(d) = 1 on many tokens            top-p, top-k, any renormalization      temperature, weights
arrival     versions, checksums, the effect of an     a lost publication, an old tensor or   what happens behind them
            update on tokens (`applied_share`)        adapter                                and hides in the noise

d is the trainer's log-prob minus the sampler's, in nats; H is the entropy.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune_ext.objective.kl import kl_k3
from torchtune_ext.packing import Row
from torchtune_ext.policy.logprobs import LabelLogprobs
from torchtune_ext.run.errors import Failure
from torchtune_ext.run.output import labelled, say
from torchtune_ext.training.buckets import AGE_0, bucket_means, buckets
from torchtune_ext.training.collectives import gathered, rank

log = logging.getLogger(__name__)

SAMPLER_ADVICE = (
    "Sample with top_p=1 and top_k off, and see that the engine does not take them from generation_config.json "
    "(generation_config='vllm')"
)
TRUNCATED = (
    "top-p / top-k: the sampler's log-probs are higher than the trainer's on nearly every token, as after renormalizing over a "
    f"part of the vocabulary. {SAMPLER_ADVICE}"
)

# The cause in a replay: nothing is sampled there, so no setting of an engine can be at fault.
MOVED = (
    "the policy of this replay has moved away from the one that sampled, as under other settings it may (the first lines "
    "name them), or it computes in another precision. If that is meant, set max_mismatch above the figure"
)

# Fewest tokens of the present version that are judged. Of fewer, a single one may decide the mean.
TOO_FEW = 32
# The latest tokens that are judged together, over several steps: a small step by itself leaves much to chance.
RECENT = 1 << 15
# Lowest automatic limit of mean |d|, in nats. Float32 on both sides differs by 1e-7 to 1e-5, and the smallest fault by
# far more.
LEAST_LIMIT = 0.001
# Under other settings a replay moves away from what was sampled, and nothing is wrong.
REPLAY_LIMIT = 0.05
MEASURED_ROWS = 4  # rows of a rank on which the rounding is measured
# Standard errors that a mean may be off. They are many, since every step of a long run is tested.
ERRORS = 5.0
FLOOR = 0.005  # distance from 1 that the mean of exp(d) may have besides
# Largest sharpness that is tolerated: a temperature of 0.98 or 1.02.
SHARPEST = 0.02
# Another temperature is named as the cause only where it leaves at most this share of the squares of d.
UNEXPLAINED = 0.25
# A sampler that draws from less than this share of the probability is not truncated: it is another model.
LEAST_KEPT = 0.1
# Limit of (noise of a token) / (effect of a change on it). Above it nothing is concluded.
RESOLVED = 0.25
# Fewest tokens that must carry the effect. A single one would fit the slope exactly and show no noise.
CARRIERS = 16


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The differences d = trainer's - sampler's log-prob (nats) over the sampled tokens of all ranks."""

    mean_abs: float  # mean |d|
    p99_abs: float  # 99th percentile of |d|
    max_abs: float  # largest |d|
    mean: float  # mean d; far from 0 one side renormalizes. -mean is k1, an estimate of KL(sampler || trainer)
    k3: float  # mean of exp(d) - 1 - d, an estimate of KL(sampler || trainer) that is never negative
    ess: float  # effective sample size of the weights w = exp(d) as a share of the tokens: (sum w)^2 / (n sum w^2)
    by_bucket: dict[str, float]  # mean |d| by place in the completion and by age, as in `bucket_means`
    tokens: int  # number of tokens compared
    error: float  # standard error of the mean |d|, as of independent tokens

    def metrics(self, prefix: str) -> dict[str, float]:
        """The measures by their names in the log, which begin with `prefix`."""
        values = {"k1": -self.mean} | {
            name: getattr(self, name) for name in ("mean_abs", "p99_abs", "max_abs", "k3", "ess")
        }
        values |= {f"mean_abs_{bucket}": value for bucket, value in self.by_bucket.items()}
        return {f"{prefix}/{name}": value for name, value in values.items()}


class Disagreement(Failure):
    """Trainer and sampler do not compute the same policy."""


def _differences(
    rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], version: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns d, (log p + H, cluster) [2, tokens] and `buckets` [2, tokens] of all ranks' tokens. A collective."""
    # All travels as one tensor, so that the ranks gather once.
    here = torch.empty(5, 0, dtype=torch.float64)
    if rows:
        ours, theirs = (torch.cat([each.logprobs_L for each in many]).cpu().double() for many in (logprobs, rows))
        entropy = torch.cat([each.entropy_L for each in logprobs]).cpu().double()
        # With the mean of both sides as log p, the rounding of the trainer moves d and log p alike, and that of the
        # sampler moves them apart. Where both round equally, the two cancel in their product.
        here = torch.stack([ours - theirs, (ours + theirs) / 2 + entropy, _clusters(rows) + rank() * 2.0**32])
        here = torch.cat([here, torch.cat([buckets(row, version) for row in rows], dim=1).double()])
    everywhere = torch.cat(gathered(here), dim=1)
    return everywhere[0], everywhere[1:3], everywhere[3:].long()


def _clusters(rows: Sequence[Row]) -> Tensor:
    """A number per label for the place in its group that it is sampled behind."""
    # Samples of a group that are the same until there have the same hidden state, so they are rounded alike.
    places, groups = [], 0
    for row in rows:
        # Each group begins at position 0.
        group_T = groups + (row.positions_T == 0).cumsum(0)
        places.append((group_T << 32 | row.positions_T)[row.sources_L])
        groups = int(group_T[-1])
    return torch.cat(places).unique(return_inverse=True)[1]


def _measured(d: Tensor, where: Tensor) -> Mismatch:
    if not d.numel():
        return Mismatch(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, 0, 0.0)
    size = d.abs()
    # Subtracting the maximum avoids an overflow. `ess` does not change when all weights are scaled.
    weights = (d - d.max()).exp()
    return Mismatch(
        mean_abs=size.mean().item(),
        p99_abs=size.kthvalue(max(1, round(0.99 * d.numel()))).values.item(),
        max_abs=size.max().item(),
        mean=d.mean().item(),
        k3=kl_k3(torch.zeros_like(d), d).mean().item(),
        ess=(weights.sum().square() / (d.numel() * weights.square().sum())).item(),
        by_bucket=bucket_means(size, where),
        tokens=d.numel(),
        error=(size.var(correction=0).item() / d.numel()) ** 0.5,
    )


@dataclass(frozen=True, slots=True)
class Applied:
    """How much of a change of the weights (an update, an adapter) the sampler shows on the tokens of all ranks."""

    slope: float  # 1: the sampler has the change; 0: it does not have it
    noise: float  # deviation of a token from the slope / effect of the change on it; infinite without any effect
    tokens: int  # number of tokens compared
    carriers: float  # number of tokens that carry the effect e: (sum e^2)^2 / sum e^4, between 1 and `tokens`
    otherwise: str  # what the sampler does if it does not have the change, for the message

    @property
    def resolved(self) -> bool:
        """Whether the slope is reliable."""
        # Its standard error is then at most about RESOLVED / sqrt(CARRIERS) = 0.06, far below the 1/2 of `missing`.
        return self.carriers >= CARRIERS and self.noise <= RESOLVED

    @property
    def missing(self) -> bool:
        """Whether the slope is reliable and shows that the sampler lacks the change."""
        return self.resolved and self.slope < 0.5


def applied_share(rows: Sequence[Row], on: Sequence[Tensor], off: Sequence[Tensor], otherwise: str) -> Applied:
    """Measures how much of a change of the weights the sampler has taken over, by its log-probs. A collective.

    Args:
        rows: packed rows of this rank; they hold the sampler's log-probs.
        on, off: the trainer's log-probs of each row with the change and without, [L]. Labels with NaN are left out.
        otherwise: what a sampler without the change does, for messages.
    """
    parts = [
        torch.stack([new.cpu().double() - old, row.logprobs_L.double() - old])
        for row, new, old in zip(rows, on, (old.cpu().double() for old in off), strict=True)
    ]
    changes = torch.cat(gathered(torch.cat(parts, dim=1)), dim=1)
    effect, response = changes[:, ~changes.isnan().any(dim=0)]
    # The slope of (sampler - off) on (on - off), by least squares, does not depend on the size of the effect. Both
    # differences contain the noise of `off`. If the trainer's noise is the same in `on` and `off`, a sampler with the
    # change has a slope of at least 1/2 on average, and one without it at most 1/2. The larger the effect is compared
    # with the noise, the more the two differ.
    size = effect.square().mean().item() if len(effect) else 0.0
    if size == 0.0:
        return Applied(0.0, float("inf"), len(effect), 0.0, otherwise)
    slope = (effect * response).mean().item() / size
    noise = (response - slope * effect).square().mean().item()
    carriers = len(effect) * size**2 / effect.pow(4).mean().item()
    return Applied(slope, (noise / size) ** 0.5, len(effect), carriers, otherwise)


class Agreement:
    """Stops the run when trainer and sampler disagree.

    Args:
        limit: largest mean |d| in nats. "auto": twice the rounding, at least 0.001, and what chance adds on few tokens.
        rounding: a collective: rows -> mean |d| between the coarser precision and float32.
        precision: in words, for messages.
        replay: nothing is sampled, and "auto" is REPLAY_LIMIT.
        identity: whether `require` also tests identity and sharpness. Not where the weights differ (mixed precision).
        temperature: of sampling, for messages.
    """

    def __init__(
        self,
        limit: float | str,
        rounding: Callable[[Sequence[Row]], float] = lambda rows: 0.0,
        precision: str = "float32",
        replay: bool = False,
        identity: bool = True,
        temperature: float = 1.0,
    ):
        self._temperature, self._rounding, self._precision = temperature, rounding, precision
        # A model in bfloat16 may be 0.04 nats from itself in float32, and two right implementations are sqrt(2) times
        # as far from each other. That is no fault, so "auto" measures it.
        self._auto, self._replay = limit == "auto", replay
        self._least = REPLAY_LIMIT if replay else LEAST_LIMIT  # of "auto"
        self._limit = limit if not self._auto else REPLAY_LIMIT if replay else 0.0
        self._measured: list[float] = []  # results of `rounding`
        # What `_differences` returns of the latest tokens of the present version of each step.
        self._recent = torch.empty(5, 0, dtype=torch.float64)
        # With different weights d goes with the reward, by which groups are chosen, and the identity says nothing.
        self._identity = identity
        # Whether the user knows that no token was of the present version. A replay never has one.
        self._warned = replay

    @property
    def limit(self) -> float:
        """The present limit of mean |d| in nats; 0 where "auto" has not been measured yet."""
        return self._limit

    def require(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[LabelLogprobs],
        when: str,
        version: int | None = None,
        applied: Sequence[Applied] = (),
    ) -> Mismatch:
        """Applies the four tests and returns the mismatch of all tokens, of any age. A collective.

        Args:
            rows: packed rows of this rank; they hold the sampler's log-probs.
            logprobs: the trainer's log-probs of the labels of each row.
            when: the beginning of the message: "before the first update", "after publishing version 7".
            version: the policy's, in trainer and engine; only its tokens are judged. None: the tokens are a canary's.
            applied: what was measured of changes that the sampler must have.

        Raises:
            Disagreement: a test fails, or the mismatch is NaN. The message gives the figures and the likely cause.
        """
        # The log-prob of a token that an earlier version sampled differs because the policy has moved since, which is
        # no fault. An engine that samples ahead often returns no other tokens.
        d, scores, where = _differences(rows, logprobs, version)
        everything = _measured(d, where)
        present = where[1] == AGE_0
        current = everything if present.all() else _measured(d[present], where[:, present])
        # Where few tokens are of the present version, one of them may be rounded far, so they are not judged. A canary
        # is short by nature, and a limit that the user set holds for any number of tokens.
        least = 1 if version is None or (present.all() and not self._auto) else TOO_FEW
        judged = [current] if current.tokens >= least or math.isnan(current.mean_abs) else []
        latest = torch.cat([d[None], scores, where.double()])[:, present]
        if version is not None and current.tokens:
            # Each step counts its clusters from 0. The shift keeps those of earlier steps apart.
            self._recent[2] -= latest[2].max() + 1
            self._recent = torch.cat([self._recent, latest], dim=1)[:, -max(RECENT, current.tokens) :]
            if self._auto and self._recent.shape[1] > max(current.tokens, TOO_FEW):
                judged.append(_measured(self._recent[0], self._recent[3:].long()))
        if not judged and not (self._auto and current.tokens) and not self._warned:
            self._warned = True
            log.warning(
                "%s: %s sampled tokens are of the present version %s, so only the canary proves that trainer and engine "
                "agree; this is not said again in later steps",
                when,
                current.tokens or "no",
                version,
            )
        limit = self._limit
        if judged and self._auto and (not self._limit or self._beyond(judged, limit)):
            limit = self._measure(rows)
        wrong = self._beyond(judged, limit)
        if wrong or any(change.missing for change in applied):
            worst = wrong[0] if wrong else current
            d, score = (latest if worst is current else self._recent)[:2]
            sharpness, rest = _sharpness(d, score)
            # The formula of the sharpness holds near 0 only, and the d of a broken model may go with anything.
            explained = abs(sharpness) < 1 and rest.square().sum() < UNEXPLAINED * d.square().sum()
            cause = diagnose(worst, applied, self._other_temperature(sharpness) if explained else "")
            cause = MOVED if self._replay else cause
            which = "" if worst is current else " of the latest steps"
            raise Disagreement(
                f"{when}: trainer and sampler disagree on {worst.tokens} sampled tokens{which}: mean |d log-prob| "
                f"{worst.mean_abs:.4g} +- {worst.error:.2g} (max_mismatch={limit:.3g}), 99th percentile {worst.p99_abs:.4g}, "
                f"max {worst.max_abs:.4g}, signed mean {worst.mean:+.4g}. Likely cause: {cause}"
            )
        if self._identity:
            # A canary samples the same tokens each time, which say nothing about the mean over all possible draws.
            for tokens in [latest] if version is None else [latest, self._recent]:
                if tokens.shape[1] >= TOO_FEW:
                    if version is not None:
                        self._require_identity(tokens[0], when)
                    self._require_sharpness(*tokens[:3], when)
        return everything

    def require_sharpness(self, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], when: str) -> None:
        """Tests only the sharpness, by log-probs of the weights that were sent. A collective. Raises Disagreement."""
        d, scores, _ = _differences(rows, logprobs, None)
        if len(d) >= TOO_FEW:
            self._require_sharpness(d, *scores, when)

    def _beyond(self, judged: Sequence[Mismatch], limit: float) -> list[Mismatch]:
        """Those above the limit by more than chance may add."""
        # A few tokens that are far off make a large standard error, too, so chance may add twice the limit at most.
        # (146 tokens of a healthy step of SmolLM2 were twice the limit away in bfloat16.) `not <=` also catches NaN.
        room = ERRORS if self._auto else 0.0
        return [each for each in judged if not each.mean_abs <= limit + min(room * each.error, 2 * limit)]

    def _measure(self, rows: Sequence[Row]) -> float:
        """Measures the rounding of these rows and returns their limit. A collective."""
        # The gradients of a step may take memory by now, so a few rows stand for all.
        noise = self._rounding(rows[:MEASURED_ROWS])
        self._measured.append(noise)
        # A few tokens may be rounded far more than others. The limit of later steps follows the mean, and only these
        # rows get a higher one.
        self._limit = max(self._least, 2 * sum(self._measured) / len(self._measured))
        own = max(self._limit, 2 * noise)
        if rank() == 0:
            how = f"{noise:.2g} nats" if noise else "none to speak of"
            here = "" if len(self._measured) == 1 else f" on tokens beyond the limit, so {own:.2g} for these"
            say(labelled([("rounding", f"{how} in {self._precision}{here}; max_mismatch {self._limit:.2g}")]))
        return own

    def _require_sharpness(self, d: Tensor, score: Tensor, cluster: Tensor, when: str) -> None:
        # A sampler whose logits are (1 + s) times the trainer's, as at the temperature T / (1 + s), has log-probs
        # larger by s (log p + H): likely tokens gain and unlikely ones lose, which rounding does not do.
        size = score.square().sum().item()
        sharpness, rest = _sharpness(d, score)
        # Tokens of one cluster are not independent: what is left of d is nearly the same for them. So the standard
        # error is that of the sums over clusters.
        _, cluster = cluster.unique(return_inverse=True)
        sums = torch.zeros(2, len(d), dtype=d.dtype).index_add_(1, cluster, torch.stack([score.square(), score * rest]))
        if not size or size**2 / sums[0].square().sum().item() < CARRIERS:
            return
        error = sums[1].norm().item() / size
        # Rounding is in both factors. It adds half the difference of the two sides' squares to their product, and makes
        # the side that has more of it sharper by half its square. The square of d covers both.
        bias = d.square().sum().item() / size
        if abs(sharpness) > SHARPEST + bias + ERRORS * error:
            # If the sampler draws from the likeliest tokens only, each of them gains, so most of d is negative.
            cut = d.mean() < -d.abs().mean() / 2
            raise Disagreement(
                f"{when}: on {len(d)} sampled tokens the sampler's log-probs are the trainer's and {sharpness:+.3f} +- "
                f"{error:.2g} times (log p + entropy), as a sharper or flatter distribution has them and rounding does not. "
                f"Likely cause: {TRUNCATED if cut else self._other_temperature(sharpness)}"
            )

    def _other_temperature(self, sharpness: float) -> str:
        return (
            f"temperature: the sampler's is about {self._temperature / (1 + sharpness):.2f}, the trainer computes at "
            f"{self._temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )

    def _require_identity(self, d: Tensor, when: str) -> None:
        # With p the trainer's and q the sampler's probability, the mean of exp(d) is sum_y q(y) p(y) / q(y) = 1,
        # whatever the rounding, unless q is 0 where p is not. `not <=` also catches NaN.
        excess = d.expm1()
        mean, error = excess.mean().item(), (excess.var(correction=0).item() / len(d)) ** 0.5
        if not abs(mean) <= FLOOR + ERRORS * error:
            raise Disagreement(
                f"{when}: over {len(d)} sampled tokens the mean of exp(trainer's - sampler's log-prob) is {1 + mean:.4f} "
                f"+- {error:.4f}, and 1 for a sampler that draws from the whole distribution that it reports, whatever the "
                f"rounding. Likely cause: it is truncated or renormalized ({SAMPLER_ADVICE})"
            )


def _sharpness(d: Tensor, score: Tensor) -> tuple[float, Tensor]:
    """By how much sharper the sampler is (a least-squares fit), and what that leaves of d. `score` is log p + H."""
    sharpness = -((d * score).sum() / score.square().sum().clamp_min(1e-30)).item()
    return sharpness, d + sharpness * score


def diagnose(current: Mismatch, applied: Sequence[Applied], other_temperature: str) -> str:
    """The likely cause of a mismatch. `other_temperature` is the message where that explains most of it, else ""."""
    for change in applied:
        # Versions and checksums were right, and the effect is that of the rounded values that were sent. So the engine
        # has the weights and does not use them.
        if change.missing:
            return (
                f"weights: {change.otherwise}; of the effect of the change on the log-probs of {change.tokens} sampled tokens "
                f"the engine shows {change.slope:.2f}"
            )
    # A sampler that renormalizes over a share c of the probability shifts every d by log c.
    if math.log(LEAST_KEPT) < current.mean < -0.9 * current.mean_abs:
        return TRUNCATED
    if other_temperature:
        return other_temperature
    if current.by_bucket.get("at_0", 0.0) > 5 * current.mean_abs:
        return (
            "prompt or chat template: the first tokens of the completions disagree far more than the rest, so the "
            "engine saw other prompt ids than the trainer (template, added BOS, re-tokenized text)"
        )
    if current.mean_abs < 0.2 and abs(current.mean) < 0.3 * current.mean_abs:
        return (
            "precision: small errors of both signs, more than the settings explain: look for a side that is coarser than they "
            "say (keys and values in FP8, a quantized model). If that is meant, set max_mismatch above the figure"
        )
    return (
        "model: no change of sampling parameters explains it, so the engine computes another function of its weights: another "
        "model definition (rope_base, norm_eps, tied embeddings), another checkpoint, a stale prefix cache"
    )
