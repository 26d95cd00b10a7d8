"""Checks that trainer and sampler agree on the sampled tokens, before any clipping or masking.

test        asks for                                  sees                                   is blind to
scale       mean |d| <= twice the rounding + chance   other weights, rope                    what rounding hides
sharpness   d has no part that goes with log p + H    a temperature, under the rounding too  other weights, top-p
identity    mean exp(d) = 1 on many tokens            top-p, top-k, any renormalization      temperature, weights
likelihood  tokens as likely as the sampler reports   sampling otherwise than reported       weights, whatever is reported
arrival     versions, checksums, the effect of an     a lost publication, an old tensor or   what happens behind them
            update on tokens (`applied_share`)        adapter                                and hides in the noise

d is the trainer's log-prob minus the sampler's, in nats; H is the entropy. A context is the path before a token: tokens
with the same context are predicted from one hidden state and are rounded alike, so standard errors are over contexts.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from torchtune_ext.objective.kl import kl_k3
from torchtune_ext.pipeline.packing import Row, context_hashes
from torchtune_ext.policy.logprobs import LabelLogprobs
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.run.output import format_labels, print_text
from torchtune_ext.training.buckets import AGE_0_BUCKET, bucket_ids, bucket_means
from torchtune_ext.training.collectives import all_gather, rank

log = logging.getLogger(__name__)

SAMPLER_ADVICE = (
    "Sample with top_p=1 and top_k off, and see that the engine does not take them from generation_config.json "
    "(generation_config='vllm')"
)
TRUNCATION_CAUSE = (
    "top-p / top-k: the sampler's log-probs are higher than the trainer's on nearly every token, as after renormalizing over a "
    f"part of the vocabulary. {SAMPLER_ADVICE}"
)

# The cause in a replay: nothing is sampled there, so no setting of an engine can be at fault.
REPLAY_DRIFT_ADVICE = (
    "the policy of this replay has moved away from the one that sampled, as under other settings it may (the first lines "
    "name them), or it computes in another precision. If that is meant, set max_mismatch above the figure"
)

# Fewest tokens of the present version that are judged. Of fewer, a single one may decide the mean.
MIN_TOKENS = 32
# The latest tokens that are judged together, over several steps: a small step by itself leaves much to chance.
MAX_RECENT_TOKENS = 1 << 15
# Lowest automatic limit of mean |d|, in nats. Float32 on both sides differs by 1e-7 to 1e-5, and the smallest fault by
# far more.
MIN_AUTO_LIMIT_NATS = 0.001
# Under other settings a replay moves away from what was sampled, and nothing is wrong.
REPLAY_LIMIT_NATS = 0.05
ROUNDING_ROWS = 4  # rows of a rank on which the rounding is measured
# Standard errors that an estimate from many contexts may be off. They are many, since every step of a long run is tested.
NUM_STD_ERRORS = 5.0
MEAN_WEIGHT_TOLERANCE = 0.005  # distance from 1 that the mean of exp(d) may have besides
# Largest sharpness that is tolerated: a temperature of 0.98 or 1.02.
MAX_SHARPNESS = 0.02
# Another temperature is named as the cause only where it leaves at most this share of the squares of d.
UNEXPLAINED = 0.25
# A sampler that draws from less than this share of the probability is not truncated: it is another model.
MIN_KEPT_PROBABILITY = 0.1
# Limit of (noise of a token) / (effect of a change on it). Above it nothing is concluded.
MAX_NOISE_RATIO = 0.25
# Spacing of log-probs in nats: that of float32 logits between 8 and 16. Smaller effects of a change are steps of this
# grid, and two healthy sides may show equal values or values that differ by exactly one step.
LOGPROB_SPACING_NATS = 2.0**-20
# The likelihood test compares with a distribution whose logits are this many times the trainer's.
SHARPER_LOGIT_SCALE = 1.25
# Weights of that distribution in the mixtures that the test tries. A negative weight makes a mixture flatter.
MIXTURES = np.array([1.0, 0.4, -0.4, -1.0])
# Likelihood ratio that ends a run. A healthy sampler reaches it at most once in so many canaries with new seeds.
MAX_LIKELIHOOD_RATIO = 1e7


@dataclass(frozen=True, slots=True)
class MismatchStats:
    """The differences d = trainer's - sampler's log-prob (nats) over the sampled tokens of all ranks."""

    mean_abs: float  # mean |d|
    p99_abs: float  # 99th percentile of |d|
    max_abs: float  # largest |d|
    mean: float  # mean d; far from 0 one side renormalizes. -mean is k1, an estimate of KL(sampler || trainer)
    k3: float  # mean of exp(d) - 1 - d, an estimate of KL(sampler || trainer) that is never negative
    ess: float  # effective sample size of the weights w = exp(d) as a share of the tokens: (sum w)^2 / (n sum w^2)
    by_bucket: dict[str, float]  # mean |d| by place in the completion and by age, as in `bucket_means`
    tokens: int  # number of tokens compared

    def metrics(self, prefix: str) -> dict[str, float]:
        """The measures by their names in the log, which begin with `prefix`."""
        values = {"k1": -self.mean} | {
            name: getattr(self, name) for name in ("mean_abs", "p99_abs", "max_abs", "k3", "ess")
        }
        values |= {f"mean_abs_{bucket}": value for bucket, value in self.by_bucket.items()}
        return {f"{prefix}/{name}": value for name, value in values.items()}


class MismatchError(RunFailure):
    """Trainer and sampler do not compute the same policy."""


@dataclass(frozen=True, slots=True)
class TokenDiffs:
    """N sampled tokens as trainer and sampler see them."""

    ours_N: np.ndarray  # the trainer's log-probs, nats
    theirs_N: np.ndarray  # the sampler's
    entropy_N: np.ndarray  # of the trainer's distribution, nats
    contexts_N: np.ndarray  # int64, equal for tokens with the same path before them
    buckets_2N: np.ndarray  # place and age, as in `buckets`

    @classmethod
    def from_rows(cls, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], version: int | None) -> "TokenDiffs":
        """The labels of packed rows of all ranks. A collective."""
        none = np.empty(0)
        parts = [cls(none, none, none, np.empty(0, np.int64), np.empty((2, 0), np.int64))]
        parts += [
            cls(
                ours.logprobs_L.cpu().double().numpy(),
                row.logprobs_L.cpu().double().numpy(),
                ours.entropy_L.cpu().double().numpy(),
                context_hashes(row)[0].numpy(),
                bucket_ids(row, version).numpy(),
            )
            for row, ours in zip(rows, logprobs, strict=True)
        ]
        return cls.concat(all_gather(cls.concat(parts)))

    @classmethod
    def concat(cls, parts: Sequence["TokenDiffs"]) -> "TokenDiffs":
        """All tokens of `parts`."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.ours_N)

    def __getitem__(self, chosen: np.ndarray | slice) -> "TokenDiffs":
        return TokenDiffs(*(getattr(self, field.name)[..., chosen] for field in fields(self)))

    def numbered(self) -> "TokenDiffs":
        """The same tokens with their contexts numbered from 0."""
        return replace(self, contexts_N=np.unique(self.contexts_N, return_inverse=True)[1])

    @property
    def d_N(self) -> np.ndarray:  # noqa: N802
        """The trainer's minus the sampler's log-prob."""
        return self.ours_N - self.theirs_N

    @property
    def score_N(self) -> np.ndarray:  # noqa: N802
        """log p + H, with the mean of both sides as log p."""
        # The rounding of the trainer then moves d and log p alike, and that of the sampler moves them apart. Where both
        # round equally, the two cancel in their product.
        return (self.ours_N + self.theirs_N) / 2 + self.entropy_N


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """A least-squares slope, with contexts as independent observations."""

    slope: float
    error: float  # standard error of the slope
    contexts: float  # number of contexts that carry the slope: (sum w)^2 / sum w^2 of their weights w
    min_slope: float  # the slope without the context that raises it most

    @property
    def margin(self) -> float:
        """By how much chance may change the slope: `ERRORS` standard errors, more of them for few contexts."""
        return students_t_quantile(self.contexts - 1) * self.error if self.contexts >= 2 else math.inf


def fit_slope(y_N: np.ndarray, x_N: np.ndarray, contexts_N: np.ndarray) -> SlopeFit:
    """Fits y = slope * x. With x = 1 the slope is the mean of y. Contexts are numbered from 0."""
    # No products of vectors: the threads of NumPy's BLAS would compete with torch's.
    weights = np.bincount(contexts_N, np.square(x_N))
    size = float(weights.sum())
    slope = float((x_N * y_N).sum()) / size if size else 0.0
    number = size**2 / float(np.square(weights).sum()) if size else 0.0
    if number < 2:
        return SlopeFit(slope, math.inf, number, -math.inf)
    # The jackknife: by how much each context, if left out, would move the slope.
    moves = np.bincount(contexts_N, x_N * (y_N - slope * x_N)) / (size - weights)
    return SlopeFit(slope, math.sqrt(np.square(moves).sum()), number, slope - float(moves.max()))


def students_t_quantile(freedom: float) -> float:
    """The quantile of Student's t that a normal variable exceeds at `ERRORS` deviations, within 10% above it."""
    # Wallace, A normal approximation to the t distribution (1959), solved for t.
    deviations = NUM_STD_ERRORS * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(deviations**2 / freedom))


def _mismatch_stats(tokens: TokenDiffs) -> MismatchStats:
    if not len(tokens):
        return MismatchStats(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, 0)
    d = torch.from_numpy(tokens.d_N)
    size = d.abs()
    # Subtracting the maximum avoids an overflow. `ess` does not change when all weights are scaled.
    weights = (d - d.max()).exp()
    return MismatchStats(
        mean_abs=size.mean().item(),
        p99_abs=size.kthvalue(max(1, round(0.99 * d.numel()))).values.item(),
        max_abs=size.max().item(),
        mean=d.mean().item(),
        k3=kl_k3(torch.zeros_like(d), d).mean().item(),
        ess=(weights.sum().square() / (d.numel() * weights.square().sum())).item(),
        by_bucket=bucket_means(size, torch.from_numpy(tokens.buckets_2N)),
        tokens=d.numel(),
    )


@dataclass(frozen=True, slots=True)
class UpdateEffect:
    """How much of a change of the weights (an update, an adapter) the sampler shows on the tokens of all ranks."""

    slope: float  # 1: the sampler has the change; 0: it does not have it
    margin: float  # by how much chance may change the slope
    noise: float  # deviation of a token from the slope / effect of the change on it; infinite without any effect
    tokens: int  # number of tokens compared
    missing_cause: str  # what the sampler does if it does not have the change, for the message

    @classmethod
    def estimate(
        cls, effect_N: np.ndarray, response_N: np.ndarray, contexts_N: np.ndarray, missing_cause: str
    ) -> "UpdateEffect":
        """Compares the effect of a change on log-probs of the trainer with what the sampler shows of it."""
        # The slope does not depend on the size of the effect. Both differences contain the noise of the trainer without
        # the change. If the trainer's noise is the same with and without, a sampler with the change has a slope of at
        # least 1/2 on average, and one without it at most 1/2. The larger the effect is compared with the noise, the
        # more the two differ.
        share = fit_slope(response_N, effect_N, contexts_N)
        size = float(np.square(effect_N).sum())
        noise_N = np.square(response_N - share.slope * effect_N) + LOGPROB_SPACING_NATS**2
        noise = (float(noise_N.sum()) / size) ** 0.5 if size else math.inf
        return cls(share.slope, share.margin, noise, len(effect_N), missing_cause)

    @property
    def resolved(self) -> bool:
        """Whether the slope is reliable."""
        return self.noise <= MAX_NOISE_RATIO and self.margin < 0.5

    @property
    def is_missing(self) -> bool:
        """Whether the slope is reliable and shows that the sampler lacks the change."""
        return self.resolved and self.slope < 0.5


def measure_update_effect(
    rows: Sequence[Row], with_change: Sequence[Tensor], without_change: Sequence[Tensor], missing_cause: str
) -> UpdateEffect:
    """Measures how much of a change of the weights the sampler has taken over, by its log-probs. A collective.

    Args:
        rows: packed rows of this rank; they hold the sampler's log-probs.
        on, off: the trainer's log-probs of each row with the change and without, [L]. Labels with NaN are left out.
        otherwise: what a sampler without the change does, for messages.
    """
    parts = [
        (torch.stack([new.cpu().double() - old, row.logprobs_L.double() - old]).numpy(), context_hashes(row)[0].numpy())
        for row, new, old in zip(rows, with_change, (old.cpu().double() for old in without_change), strict=True)
    ]
    changes, paths = (np.concatenate(each, axis=-1) for each in zip(*sum(all_gather(parts), []), strict=True))
    known = ~np.isnan(changes).any(axis=0)
    effect_N, response_N = changes[:, known]
    return UpdateEffect.estimate(effect_N, response_N, np.unique(paths[known], return_inverse=True)[1], missing_cause)


class MismatchGate:
    """Stops the run when trainer and sampler disagree.

    Args:
        limit: largest mean |d| in nats. "auto": twice the rounding, at least 0.001, and what chance adds on few contexts.
        rounding: a collective: rows -> mean |d| between the coarser precision and float32.
        precision: in words, for messages.
        replay: nothing is sampled, and "auto" is REPLAY_LIMIT.
        identity: whether `require` also tests identity and sharpness. Not where the weights differ (mixed precision).
        temperature: of sampling, for messages.
    """

    def __init__(
        self,
        limit: float | str,
        measure_rounding: Callable[[Sequence[Row]], float] = lambda rows: 0.0,
        precision: str = "float32",
        replay: bool = False,
        test_mean_weight: bool = True,
        temperature: float = 1.0,
    ):
        self._temperature, self._measure_rounding, self._precision = temperature, measure_rounding, precision
        # A model in bfloat16 may be 0.04 nats from itself in float32, and two right implementations are sqrt(2) times
        # as far from each other. That is no fault, so "auto" measures it.
        self._auto, self._replay = limit == "auto", replay
        self._least = REPLAY_LIMIT_NATS if replay else MIN_AUTO_LIMIT_NATS  # of "auto"
        self._limit = float(limit) if limit != "auto" else REPLAY_LIMIT_NATS if replay else 0.0
        self._measured: list[float] = []  # results of `rounding`
        self._recent: TokenDiffs | None = None  # the latest tokens that were of the present version in their step
        # With different weights d goes with the reward, by which groups are chosen, and the identity says nothing.
        self._mean_weight_enabled = test_mean_weight
        # Whether the user knows that no token was of the present version. A replay never has one.
        self._suppress_warning = replay
        # Of each engine: the seed of its last canary, and the logarithms of the likelihood ratios before the first canary
        # with that seed and after it.
        self._ratios: dict[str, tuple[int | None, np.ndarray, np.ndarray]] = {}

    @property
    def limit(self) -> float:
        """The present limit of mean |d| in nats; 0 where "auto" has not been measured yet."""
        return self._limit

    def check(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[LabelLogprobs],
        when: str,
        version: int | None = None,
        effects: Sequence[UpdateEffect] = (),
        describe_nonfinite: Callable[[], str] = str,
    ) -> MismatchStats:
        """Tests scale, arrival, sharpness and identity, and returns the mismatch of all tokens, of any age. A collective.

        Args:
            rows: packed rows of this rank; they hold the sampler's log-probs.
            logprobs: the trainer's log-probs of the labels of each row.
            when: the beginning of the message: "before the first update", "after publishing version 7".
            version: the policy's, in trainer and engine; only its tokens are judged. None: the tokens are a canary's.
            applied: what was measured of changes that the sampler must have.
            not_finite: a collective, called where a log-prob is not finite: which weights are not, for the message.

        Raises:
            Disagreement: a test fails, or a log-prob is not finite. The message gives the figures and the likely cause.
        """
        tokens = TokenDiffs.from_rows(rows, logprobs, version)
        bad = [np.count_nonzero(~np.isfinite(each)) for each in (tokens.ours_N, tokens.theirs_N)]
        if any(bad):
            raise MismatchError(
                f"{when}: log-probs of {len(tokens)} sampled tokens are not finite: {bad[0]} of the trainer's, {bad[1]} of the "
                f"sampler's. Likely cause: weights or activations that are NaN or infinite{describe_nonfinite()}"
            )
        self.check_tokens(tokens, rows, when, version, effects)
        return _mismatch_stats(tokens)

    def check_tokens(
        self,
        tokens: TokenDiffs,
        rows: Sequence[Row],
        when: str,
        version: int | None,
        effects: Sequence[UpdateEffect] = (),
    ) -> None:
        """Does what `require` says. On `rows` the rounding is measured where the limit asks for it."""
        # The log-prob of a token that an earlier version sampled differs because the policy has moved since, which is
        # no fault. An engine that samples ahead often returns no other tokens.
        current = tokens[tokens.buckets_2N[1] == AGE_0_BUCKET]
        token_sets = {"": current.numbered()}
        if version is not None and len(current):
            recent = TokenDiffs.concat([self._recent, current]) if self._recent is not None else current
            self._recent = recent[-max(MAX_RECENT_TOKENS, len(current)) :]
            if len(self._recent) > len(current):
                token_sets[" of the latest steps"] = self._recent.numbered()
        # Where few tokens are of the present version, one of them may be rounded far, so they are not judged. A canary
        # is short by nature, and a limit that the user set holds for any number of tokens.
        exact = version is None or (len(current) == len(tokens) and not self._auto)
        scaled = {
            which: each for which, each in token_sets.items() if len(each) >= MIN_TOKENS and (self._auto or not which)
        }
        scaled |= {"": token_sets[""]} if exact and len(current) else {}
        if not scaled and not (self._auto and len(current)) and not self._suppress_warning:
            self._suppress_warning = True
            log.warning(
                "%s: %s sampled tokens are of the present version %s, so only the canary proves that trainer and engine "
                "agree; this is not said again in later steps",
                when,
                len(current) or "no",
                version,
            )
        self._test_scale(scaled, rows, when, effects)
        for each in token_sets.values():
            if self._mean_weight_enabled and len(each) >= MIN_TOKENS:
                # A canary samples the same tokens most times, which say nothing about the mean over all possible draws.
                if version is not None:
                    self._test_mean_weight(each, when)
                self._test_sharpness(each, when)

    def check_sharpness(self, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], when: str) -> None:
        """Tests only the sharpness, by log-probs of the weights that were sent. A collective. Raises Disagreement."""
        self._test_sharpness(TokenDiffs.from_rows(rows, logprobs, None).numbered(), when)

    def _test_scale(
        self, token_sets: dict[str, TokenDiffs], rows: Sequence[Row], when: str, effects: Sequence[UpdateEffect]
    ) -> None:
        fits = {
            which: fit_slope(np.abs(each.d_N), np.ones(len(each)), each.contexts_N)
            for which, each in token_sets.items()
        }
        limit = self._limit
        if fits and self._auto and (not limit or any(self._exceeds(each, limit) for each in fits.values())):
            limit = self._measure_limit(rows)
        failing = [which for which, each in fits.items() if self._exceeds(each, limit)]
        if not failing and not any(change.is_missing for change in effects):
            return
        which = max(failing or fits, key=lambda which: fits[which].slope)
        found = _mismatch_stats(token_sets[which])
        sharpness, rest = _fit_sharpness(token_sets[which])
        # The formula of the sharpness holds near 0 only, and the d of a broken model may go with anything.
        explained = (
            abs(sharpness.slope) < 1 and np.square(rest).sum() < UNEXPLAINED * np.square(token_sets[which].d_N).sum()
        )
        cause = diagnose(found, effects, self._temperature_cause(sharpness.slope) if explained else "")
        raise MismatchError(
            f"{when}: trainer and sampler disagree on {found.tokens} sampled tokens{which}: mean |d log-prob| "
            f"{found.mean_abs:.4g} +- {fits[which].error:.2g} (max_mismatch={limit:.3g}), 99th percentile {found.p99_abs:.4g}, "
            f"max {found.max_abs:.4g}, signed mean {found.mean:+.4g}. Likely cause: {REPLAY_DRIFT_ADVICE if self._replay else cause}"
        )

    def _exceeds(self, found: SlopeFit, limit: float) -> bool:
        """Whether the mean is above the limit by more than chance may add."""
        if not self._auto:
            return not found.slope <= limit
        # A few tokens that are far off make a large standard error, too. So three times the limit ends a run whatever
        # the error, but not where a single context, however many tokens share it, carries the mean beyond. Of few
        # contexts two may do so, and the others up to TOO_FEW count as if there were no difference.
        return found.slope > limit + found.margin or found.min_slope * min(1.0, found.contexts / MIN_TOKENS) > 3 * limit

    def _measure_limit(self, rows: Sequence[Row]) -> float:
        """Measures the rounding of these rows and returns their limit. A collective."""
        # The gradients of a step may take memory by now, so a few rows stand for all.
        noise = self._measure_rounding(rows[:ROUNDING_ROWS])
        self._measured.append(noise)
        # A few tokens may be rounded far more than others. The limit of later steps follows the mean, and only these
        # rows get a higher one.
        self._limit = max(self._least, 2 * sum(self._measured) / len(self._measured))
        own = max(self._limit, 2 * noise)
        if rank() == 0:
            how = f"{noise:.2g} nats" if noise else "none to speak of"
            here = "" if len(self._measured) == 1 else f" on tokens beyond the limit, so {own:.2g} for these"
            print_text(
                format_labels([("rounding", f"{how} in {self._precision}{here}; max_mismatch {self._limit:.2g}")])
            )
        return own

    def _test_sharpness(self, tokens: TokenDiffs, when: str) -> None:
        # A sampler whose logits are (1 + s) times the trainer's, as at the temperature T / (1 + s), has log-probs
        # larger by s (log p + H): likely tokens gain and unlikely ones lose, which rounding does not do.
        sharpness, _ = _fit_sharpness(tokens)
        d = tokens.d_N
        # Rounding is in both factors. It adds half the difference of the two sides' squares to their product, and makes
        # the side that has more of it sharper by half its square. The square of d covers both.
        bias = np.square(d).sum() / max(np.square(tokens.score_N).sum(), 1e-30)
        if abs(sharpness.slope) > MAX_SHARPNESS + bias + sharpness.margin:
            # If the sampler draws from the likeliest tokens only, each of them gains, so most of d is negative.
            cut = d.mean() < -np.abs(d).mean() / 2
            raise MismatchError(
                f"{when}: on {len(d)} sampled tokens the sampler's log-probs are the trainer's and {sharpness.slope:+.3f} +- "
                f"{sharpness.error:.2g} times (log p + entropy), as a sharper or flatter distribution has them and rounding "
                f"does not. Likely cause: {TRUNCATION_CAUSE if cut else self._temperature_cause(sharpness.slope)}"
            )

    def _temperature_cause(self, sharpness: float) -> str:
        return (
            f"temperature: the sampler's is about {self._temperature / (1 + sharpness):.2f}, the trainer computes at "
            f"{self._temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )

    def _test_mean_weight(self, tokens: TokenDiffs, when: str) -> None:
        # With p the trainer's and q the sampler's probability, the mean of exp(d) is sum_y q(y) p(y) / q(y) = 1,
        # whatever the rounding, unless q is 0 where p is not.
        excess = fit_slope(np.expm1(tokens.d_N), np.ones(len(tokens)), tokens.contexts_N)
        if abs(excess.slope) > MEAN_WEIGHT_TOLERANCE + excess.margin:
            raise MismatchError(
                f"{when}: over {len(tokens)} sampled tokens the mean of exp(trainer's - sampler's log-prob) is "
                f"{1 + excess.slope:.4f} +- {excess.error:.4f}, and 1 for a sampler that draws from the whole distribution "
                f"that it reports, whatever the rounding. Likely cause: it is truncated or renormalized ({SAMPLER_ADVICE})"
            )

    def check_likelihood(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[LabelLogprobs],
        sharper: Sequence[LabelLogprobs],
        when: str,
        engine: str,
        seed: int,
    ) -> None:
        """Tests whether the tokens of a canary are as likely as the sampler reports. A collective.

        Args:
            rows, logprobs, when: as in `require`.
            sharper: the trainer's log-probs with logits that are SHARPER times as large.
            engine: its name. Each is tested by itself.
            seed: of the canary. Canaries with other seeds are other samples, whose evidence adds up.

        Raises:
            Disagreement: the tokens are far more likely under a sharper or flatter distribution.
        """
        gains = [
            likelihood_gains(ours.logprobs_L, row.logprobs_L, ours.entropy_L, sharp.logprobs_L)
            for row, ours, sharp in zip(rows, logprobs, sharper, strict=True)
        ]
        self.judge_likelihood(
            np.sum([np.zeros(len(MIXTURES)), *sum(all_gather(gains), [])], axis=0), when, engine, seed
        )

    def judge_likelihood(self, gain: np.ndarray, when: str, engine: str, seed: int) -> None:
        """Does what `require_likelihood` says, with the `likelihood_gains` of a canary."""
        # The Shiryaev-Roberts statistic: evidence since the best of all possible beginnings, since an engine may break
        # at any time. Its mean under a healthy sampler is at most the number of canaries.
        last_seed, before, after = self._ratios.get(engine, (None, *[np.full(len(MIXTURES), -np.inf)] * 2))
        before = before if seed == last_seed else after
        ratios = np.logaddexp(before, 0.0) + gain
        self._ratios[engine] = seed, before, after if seed == last_seed else ratios
        if np.logaddexp.reduce(ratios) - math.log(len(MIXTURES)) > math.log(MAX_LIKELIHOOD_RATIO):
            better = "sharper" if MIXTURES[ratios.argmax()] > 0 else "flatter"
            raise MismatchError(
                f"{when}: a {better} distribution makes the canary's tokens {MAX_LIKELIHOOD_RATIO:.0e} times as likely as the sampler "
                "reports. Likely cause: it samples with a temperature, top-p or top-k and reports log-probs without them. Set "
                f"logprobs_mode=processed_logprobs in the engine. {SAMPLER_ADVICE}"
            )


def likelihood_gains(*logprobs: Tensor) -> np.ndarray:
    """The log of the likelihood ratio of each mixture to the sampler's log-probs, over all tokens.

    Args:
        logprobs: log-probs of the trainer and the sampler, entropy, log-probs of the trainer with sharper logits; [L] each.
    """
    p, q, entropy, sharp = (each.cpu().double().numpy() for each in logprobs)
    # p + w (p_sharp - p) sums to 1 over the vocabulary for any weight w, so if tokens are drawn from q, its ratio to q has
    # a mean of at most 1, whatever the rounding. It is positive for w = -1 as well, if no p_sharp / p is above 2. The
    # largest is at most exp((SHARPER - 1) H), since log sum_y p(y)^SHARPER is convex in the exponent.
    max_weight = np.minimum(1.0, 0.99 / np.expm1(np.maximum((SHARPER_LOGIT_SCALE - 1) * entropy, 1e-6)))
    weights = np.where(MIXTURES > 0, MIXTURES, MIXTURES * max_weight[:, None])
    return ((p - q)[:, None] + np.log1p(weights * np.expm1(sharp - p)[:, None])).sum(axis=0)


def _fit_sharpness(tokens: TokenDiffs) -> tuple[SlopeFit, np.ndarray]:
    """By how much sharper the sampler is, and what that leaves of d."""
    found = fit_slope(-tokens.d_N, tokens.score_N, tokens.contexts_N)
    return found, tokens.d_N + found.slope * tokens.score_N


def diagnose(stats: MismatchStats, effects: Sequence[UpdateEffect], other_temperature: str) -> str:
    """The likely cause of a mismatch. `other_temperature` is the message where that explains most of it, else ""."""
    for change in effects:
        # Versions and checksums were right, and the effect is that of the rounded values that were sent. So the engine
        # has the weights and does not use them.
        if change.is_missing:
            return (
                f"weights: {change.missing_cause}; of the effect of the change on the log-probs of {change.tokens} sampled tokens "
                f"the engine shows {change.slope:.2f}"
            )
    # A sampler that renormalizes over a share c of the probability shifts every d by log c.
    if math.log(MIN_KEPT_PROBABILITY) < stats.mean < -0.9 * stats.mean_abs:
        return TRUNCATION_CAUSE
    if other_temperature:
        return other_temperature
    if stats.by_bucket.get("at_0", 0.0) > 5 * stats.mean_abs:
        return (
            "prompt or chat template: the first tokens of the completions disagree far more than the rest, so the "
            "engine saw other prompt ids than the trainer (template, added BOS, re-tokenized text)"
        )
    if stats.mean_abs < 0.2 and abs(stats.mean) < 0.3 * stats.mean_abs:
        return (
            "precision: small errors of both signs, more than the settings explain: look for a side that is coarser than they "
            "say (keys and values in FP8, a quantized model). If that is meant, set max_mismatch above the figure"
        )
    return (
        "model: no change of sampling parameters explains it, so the engine computes another function of its weights: another "
        "model definition (rope_base, norm_eps, tied embeddings), another checkpoint, a stale prefix cache"
    )
