"""Checks that trainer and sampler agree on the sampled tokens, before any clipping or masking.

test         passes if                            detects                      misses
scale        mean |d| <= 2 x rounding + margin    other weights, RoPE          faults below rounding
sharpness    d does not grow with log p + H       temperature, also below      other weights, top-p
                                                  the rounding
mean weight  mean exp(d) = 1 over many tokens     top-p, top-k, any            temperature, weights
                                                  renormalization
likelihood   tokens are as likely as the sampler  log-probs of another         weights
             reports                              distribution than sampled
arrival      versions, checksums and the effect   dropped weight syncs,        faults below noise
             of an update (`applied_share`)       stale tensors or adapters

d is the trainer's log-prob minus the sampler's, in nats; H is the entropy. The context of a token
is the sequence before it. Tokens with the same context are predicted from one hidden state and are
rounded alike, so standard errors are over contexts.
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
from torchtune_ext.training.buckets import STALENESS_0_BUCKET, bucket_ids, bucket_means
from torchtune_ext.training.collectives import all_gather, rank

log = logging.getLogger(__name__)

SAMPLER_ADVICE = (
    "Sample with top_p=1 and top_k off, and check that the engine does not read them from generation_config.json "
    "(generation_config='vllm')"
)
TRUNCATION_CAUSE = (
    "top-p / top-k: the sampler's log-probs are higher than the trainer's on nearly every token, as after "
    f"renormalizing over a part of the vocabulary. {SAMPLER_ADVICE}"
)

# The cause in a replay. A replay does not sample, so engine settings cannot cause its mismatch.
REPLAY_DRIFT_ADVICE = (
    "the policy of this replay has diverged from the policy that sampled, as it may with other settings (the first "
    "lines name them), or it computes in another precision. If this is intended, set max_mismatch above the mean"
)

# Minimum number of current-version tokens for a test. A single token can dominate a smaller mean.
MIN_TOKENS = 32
# Recent tokens that are tested together, because a small step has a large standard error.
MAX_RECENT_TOKENS = 1 << 15
# Minimum automatic limit of mean |d|. In float32 |d| is 1e-7 to 1e-5, and far larger with a fault.
MIN_AUTO_LIMIT_NATS = 0.001
# With other settings the policy of a replay diverges from the sampled tokens, which is not a fault.
REPLAY_LIMIT_NATS = 0.05
ROUNDING_ROWS = 4  # rows per rank for measuring the rounding
# Allowed deviation in standard errors. It is high, because every step of a long run is tested.
NUM_STD_ERRORS = 5.0
MEAN_WEIGHT_TOLERANCE = 0.005  # allowed |mean exp(d) - 1|, in addition to the standard errors
# Maximum sharpness that is tolerated: a temperature of 0.98 or 1.02.
MAX_SHARPNESS = 0.02
# A temperature is named as the cause if at most this share of the squares of d is unexplained.
UNEXPLAINED_SHARE = 0.25
# A sampler that keeps less than this probability mass is not truncated: it is another model.
MIN_KEPT_PROBABILITY = 0.1
# Maximum of (noise of a token) / (effect of a change on the token) for a conclusion.
MAX_NOISE_RATIO = 0.25
# Spacing of log-probs in nats: the spacing of float32 logits between 8 and 16. Smaller effects of a
# change are rounded to this grid. Two healthy sides may differ by exactly zero or one step.
LOGPROB_SPACING_NATS = 2.0**-20
# The likelihood test compares with a distribution whose logits are this many times the trainer's.
SHARPER_LOGIT_SCALE = 1.25
# Weights of that distribution in the mixtures of the test. A negative weight flattens a mixture.
MIXTURES = np.array([1.0, 0.4, -0.4, -1.0])
# Likelihood ratio that ends a run. A healthy sampler reaches it once in this many canaries at most.
MAX_LIKELIHOOD_RATIO = 1e7


@dataclass(frozen=True, slots=True)
class MismatchStats:
    """Statistics of d = trainer's - sampler's log-prob (nats) over sampled tokens of all ranks."""

    mean_abs: float  # mean |d|
    p99_abs: float  # 99th percentile of |d|
    max_abs: float  # largest |d|
    mean: float  # mean d; far from 0 if one side renormalizes. -mean is k1, an estimate of KL(sampler || trainer)
    k3: float  # mean of exp(d) - 1 - d, a non-negative estimate of KL(sampler || trainer)
    ess: float  # effective sample size of the importance weights w = exp(d): (sum w)^2 / (n sum w^2)
    by_bucket: dict[str, float]  # mean |d| by position in the completion and by age (`bucket_means`)
    tokens: int  # number of tokens compared

    def metrics(self, prefix: str) -> dict[str, float]:
        """The statistics as metrics, whose names begin with `prefix`."""
        values = {"k1": -self.mean} | {
            name: getattr(self, name) for name in ("mean_abs", "p99_abs", "max_abs", "k3", "ess")
        }
        values |= {f"mean_abs_{bucket}": value for bucket, value in self.by_bucket.items()}
        return {f"{prefix}/{name}": value for name, value in values.items()}


class MismatchError(RunFailure):
    """Trainer and sampler do not compute the same policy."""


@dataclass(frozen=True, slots=True)
class PairedLogprobs:
    """Log-probs of N sampled tokens from trainer and sampler."""

    ours_N: np.ndarray  # the trainer's log-probs, nats
    theirs_N: np.ndarray  # the sampler's log-probs, nats
    entropy_N: np.ndarray  # entropy of the trainer's distribution, nats
    contexts_N: np.ndarray  # int64 id of the context, equal for tokens after the same path
    buckets_2N: np.ndarray  # position bucket and age bucket (`bucket_ids`)

    @classmethod
    def from_rows(cls, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], version: int | None) -> "PairedLogprobs":
        """Collects the labels of packed rows of all ranks, with ages from `version`. A collective."""
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
    def concat(cls, parts: Sequence["PairedLogprobs"]) -> "PairedLogprobs":
        """All tokens of `parts`."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.ours_N)

    def __getitem__(self, chosen: np.ndarray | slice) -> "PairedLogprobs":
        return PairedLogprobs(*(getattr(self, field.name)[..., chosen] for field in fields(self)))

    def renumber_contexts(self) -> "PairedLogprobs":
        """The same tokens with context ids from 0."""
        return replace(self, contexts_N=np.unique(self.contexts_N, return_inverse=True)[1])

    @property
    def d_N(self) -> np.ndarray:  # noqa: N802
        """The trainer's minus the sampler's log-prob."""
        return self.ours_N - self.theirs_N

    @property
    def score_N(self) -> np.ndarray:  # noqa: N802
        """log p + H, with the mean of both sides as log p."""
        # The trainer's rounding then moves d and log p in the same direction, the sampler's in
        # opposite directions. If both sides round equally, the effects cancel in the product.
        return (self.ours_N + self.theirs_N) / 2 + self.entropy_N


@dataclass(frozen=True, slots=True)
class SlopeFit:
    """A least-squares slope, with contexts as independent observations."""

    slope: float
    error: float  # standard error of the slope
    contexts: float  # effective number of contexts: (sum w)^2 / sum w^2 of their weights w
    min_slope: float  # the slope without the context that raises it most

    @property
    def margin(self) -> float:
        """Margin of error: `NUM_STD_ERRORS` standard errors, and more for few contexts."""
        return students_t_quantile(self.contexts - 1) * self.error if self.contexts >= 2 else math.inf


def fit_slope(y_N: np.ndarray, x_N: np.ndarray, contexts_N: np.ndarray) -> SlopeFit:
    """Fits y = slope * x. With x = 1 the slope is the mean of y. Context ids start at 0."""
    # The code avoids dot products, because NumPy's BLAS threads would compete with torch's threads.
    weights = np.bincount(contexts_N, np.square(x_N))
    size = float(weights.sum())
    slope = float((x_N * y_N).sum()) / size if size else 0.0
    number = size**2 / float(np.square(weights).sum()) if size else 0.0
    if number < 2:
        return SlopeFit(slope, math.inf, number, -math.inf)
    # The jackknife: how far the slope would move without each context.
    moves = np.bincount(contexts_N, x_N * (y_N - slope * x_N)) / (size - weights)
    return SlopeFit(slope, math.sqrt(np.square(moves).sum()), number, slope - float(moves.max()))


def students_t_quantile(freedom: float) -> float:
    """Student's t quantile at `NUM_STD_ERRORS` normal deviations; at most 10% too large."""
    # Wallace, A normal approximation to the t distribution (1959), solved for t.
    deviations = NUM_STD_ERRORS * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(deviations**2 / freedom))


def _mismatch_stats(tokens: PairedLogprobs) -> MismatchStats:
    if not len(tokens):
        return MismatchStats(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, 0)
    d = torch.from_numpy(tokens.d_N)
    size = d.abs()
    # Subtracting the maximum avoids an overflow. `ess` is invariant to scaling of all weights.
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
    """The fraction of a weight change (an update, an adapter) that the sampler reproduces."""

    slope: float  # 1: the sampler has the change; 0: the sampler does not have it
    margin: float  # margin of error of the slope
    noise: float  # ratio: (deviation of a token from the slope) to (effect on the token); inf without an effect
    tokens: int  # number of tokens compared
    missing_cause: str  # the cause that the message names if the change is missing

    @classmethod
    def estimate(
        cls, effect_N: np.ndarray, response_N: np.ndarray, contexts_N: np.ndarray, missing_cause: str
    ) -> "UpdateEffect":
        """Compares the trainer's effect of a change (with minus without) with the sampler's response.

        The response is the sampler's log-prob minus the trainer's without the change, in nats.
        """
        # The slope does not depend on the size of the effect. Both differences contain the noise of
        # the trainer without the change. If the trainer's noise is the same with and without the
        # change, a sampler with the change has a slope of at least 1/2 on average, and a sampler
        # without the change a slope of at most 1/2. The larger the effect is compared with the
        # noise, the more the two slopes differ.
        fit = fit_slope(response_N, effect_N, contexts_N)
        size = float(np.square(effect_N).sum())
        noise_N = np.square(response_N - fit.slope * effect_N) + LOGPROB_SPACING_NATS**2
        noise = (float(noise_N.sum()) / size) ** 0.5 if size else math.inf
        return cls(fit.slope, fit.margin, noise, len(effect_N), missing_cause)

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
    """Measures the fraction of a weight change that the sampler reproduces. A collective.

    Args:
        rows: packed rows of this rank; they hold the sampler's log-probs.
        with_change: the trainer's log-probs of each row with the change, [L]; labels with NaN are
            skipped.
        without_change: the same without the change.
        missing_cause: the cause that the message names if the change is missing.
    """
    parts = [
        (torch.stack([new.cpu().double() - old, row.logprobs_L.double() - old]).numpy(), context_hashes(row)[0].numpy())
        for row, new, old in zip(rows, with_change, (old.cpu().double() for old in without_change), strict=True)
    ]
    changes, paths = (np.concatenate(each, axis=-1) for each in zip(*sum(all_gather(parts), []), strict=True))
    valid = ~np.isnan(changes).any(axis=0)
    effect_N, response_N = changes[:, valid]
    return UpdateEffect.estimate(effect_N, response_N, np.unique(paths[valid], return_inverse=True)[1], missing_cause)


class MismatchGate:
    """Stops the run if trainer and sampler disagree.

    Args:
        limit: maximum mean |d| in nats. "auto": twice the rounding, at least 0.001, plus the margin
            of error on few contexts.
        measure_rounding: a collective: rows -> mean |d| between the coarser precision and float32.
        precision: name of the precision, for messages.
        replay: the run does not sample, and "auto" is REPLAY_LIMIT_NATS.
        test_mean_weight: whether `check` also tests mean weight and sharpness. Set it to False if
            the weights differ (mixed precision).
        temperature: sampling temperature, for messages.
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
        # bfloat16 may differ from float32 by 0.04 nats, and two correct implementations by sqrt(2)
        # times as much. This is not a fault, so "auto" measures the rounding.
        self._auto, self._replay = limit == "auto", replay
        self._min_limit = REPLAY_LIMIT_NATS if replay else MIN_AUTO_LIMIT_NATS  # minimum limit of "auto"
        self._limit = float(limit) if limit != "auto" else REPLAY_LIMIT_NATS if replay else 0.0
        self._measured: list[float] = []  # results of `measure_rounding`
        self._recent: PairedLogprobs | None = None  # the latest tokens that the then current version had sampled
        # With different weights d correlates with the reward, which selects groups.
        self._mean_weight_enabled = test_mean_weight
        # The warning about missing current-version tokens is logged once, and never in a replay.
        self._suppress_warning = replay
        # Engine -> seed of the last canary, log likelihood ratios before and after its first one.
        self._ratios: dict[str, tuple[int | None, np.ndarray, np.ndarray]] = {}

    @property
    def limit(self) -> float:
        """The current limit of mean |d| in nats; 0 until "auto" has been measured."""
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
        """Tests scale, arrival, sharpness and mean weight. A collective.

        Args:
            rows: packed rows of this rank; they hold the sampler's log-probs.
            logprobs: the trainer's log-probs of the labels of each row.
            when: the beginning of the message, such as "after publishing version 7".
            version: the policy version; only its tokens are tested. None: the tokens of a canary.
            effects: measured effects of changes that the sampler must have.
            describe_nonfinite: a collective that names the non-finite weights, for the message.

        Returns:
            The mismatch of all tokens, of any age.

        Raises:
            MismatchError: a test failed, or a log-prob is not finite. The message gives the numbers
                and the likely cause.
        """
        tokens = PairedLogprobs.from_rows(rows, logprobs, version)
        bad = [np.count_nonzero(~np.isfinite(each)) for each in (tokens.ours_N, tokens.theirs_N)]
        if any(bad):
            raise MismatchError(
                f"{when}: log-probs of {len(tokens)} sampled tokens are not finite: {bad[0]} of the trainer's, "
                f"{bad[1]} of the sampler's. Likely cause: weights or activations that are NaN or "
                f"infinite{describe_nonfinite()}"
            )
        self.check_tokens(tokens, rows, when, version, effects)
        return _mismatch_stats(tokens)

    def check_tokens(
        self,
        tokens: PairedLogprobs,
        rows: Sequence[Row],
        when: str,
        version: int | None,
        effects: Sequence[UpdateEffect] = (),
    ) -> None:
        """Tests tokens as `check` does; with limit "auto" it measures the rounding on `rows`."""
        # Log-probs of tokens from an earlier version differ because the policy has changed since.
        # This is not a fault. Asynchronous engines often return only such tokens.
        current = tokens[tokens.buckets_2N[1] == STALENESS_0_BUCKET]
        token_sets = {"": current.renumber_contexts()}
        if version is not None and len(current):
            recent = PairedLogprobs.concat([self._recent, current]) if self._recent is not None else current
            self._recent = recent[-max(MAX_RECENT_TOKENS, len(current)) :]
            if len(self._recent) > len(current):
                token_sets[" of the latest steps"] = self._recent.renumber_contexts()
        # Fewer than MIN_TOKENS tokens are not tested, because one outlier can dominate their mean.
        # Exceptions: canaries, which are always short, and a limit that the user has set.
        exact = version is None or (len(current) == len(tokens) and not self._auto)
        scaled = {
            which: each for which, each in token_sets.items() if len(each) >= MIN_TOKENS and (self._auto or not which)
        }
        scaled |= {"": token_sets[""]} if exact and len(current) else {}
        if not scaled and not (self._auto and len(current)) and not self._suppress_warning:
            self._suppress_warning = True
            log.warning(
                "%s: %s sampled tokens are from the current version %s, so only the canary proves that trainer and engine "
                "agree; later steps do not repeat this warning",
                when,
                len(current) or "no",
                version,
            )
        self._test_scale(scaled, rows, when, effects)
        for each in token_sets.values():
            if self._mean_weight_enabled and len(each) >= MIN_TOKENS:
                # Most canaries repeat the same tokens, so they do not estimate the mean weight.
                if version is not None:
                    self._test_mean_weight(each, when)
                self._test_sharpness(each, when)

    def check_sharpness(self, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], when: str) -> None:
        """Tests only the sharpness, by log-probs under the published weights. A collective."""
        self._test_sharpness(PairedLogprobs.from_rows(rows, logprobs, None).renumber_contexts(), when)

    def _test_scale(
        self, token_sets: dict[str, PairedLogprobs], rows: Sequence[Row], when: str, effects: Sequence[UpdateEffect]
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
        # The sharpness formula holds only near 0; d of a broken model may correlate with anything.
        max_unexplained = UNEXPLAINED_SHARE * np.square(token_sets[which].d_N).sum()
        explained = abs(sharpness.slope) < 1 and np.square(rest).sum() < max_unexplained
        cause = diagnose(found, effects, self._temperature_cause(sharpness.slope) if explained else "")
        raise MismatchError(
            f"{when}: trainer and sampler disagree on {found.tokens} sampled tokens{which}: mean |d log-prob| "
            f"{found.mean_abs:.4g} +- {fits[which].error:.2g} (max_mismatch={limit:.3g}), 99th percentile "
            f"{found.p99_abs:.4g}, max {found.max_abs:.4g}, signed mean {found.mean:+.4g}. Likely cause: "
            f"{REPLAY_DRIFT_ADVICE if self._replay else cause}"
        )

    def _exceeds(self, found: SlopeFit, limit: float) -> bool:
        """Whether the mean exceeds the limit by more than the margin of error."""
        if not self._auto:
            return not found.slope <= limit
        # A few outliers also enlarge the standard error. So three times the limit ends a run,
        # whatever the error, unless the mean is below that without its most extreme context. If
        # there are fewer than MIN_TOKENS contexts, the missing contexts count with d = 0, because
        # two outliers may then dominate.
        return found.slope > limit + found.margin or found.min_slope * min(1.0, found.contexts / MIN_TOKENS) > 3 * limit

    def _measure_limit(self, rows: Sequence[Row]) -> float:
        """Measures the rounding of these rows and returns their limit in nats. A collective."""
        # The gradients of the step may already occupy memory, so a few rows represent all rows.
        noise = self._measure_rounding(rows[:ROUNDING_ROWS])
        self._measured.append(noise)
        # A few tokens may have far larger rounding errors. The limit of later steps follows the
        # mean, and only the current rows get a higher limit.
        self._limit = max(self._min_limit, 2 * sum(self._measured) / len(self._measured))
        own = max(self._limit, 2 * noise)
        if rank() == 0:
            how = f"{noise:.2g} nats" if noise else "negligible"
            here = "" if len(self._measured) == 1 else f" on tokens above the limit, whose own limit is {own:.2g}"
            print_text(
                format_labels([("rounding", f"{how} in {self._precision}{here}; max_mismatch {self._limit:.2g}")])
            )
        return own

    def _test_sharpness(self, tokens: PairedLogprobs, when: str) -> None:
        # At temperature T / (1 + s) the sampler's log-probs are larger by s (log p + H): likely
        # tokens gain and unlikely tokens lose. Rounding does not have this effect.
        sharpness, _ = _fit_sharpness(tokens)
        d = tokens.d_N
        # Both factors contain rounding errors. Rounding adds half the difference of the two sides'
        # squares to the product, and sharpens the side with the larger error by half its square.
        # The square of d bounds both effects.
        bias = np.square(d).sum() / max(np.square(tokens.score_N).sum(), 1e-30)
        if abs(sharpness.slope) > MAX_SHARPNESS + bias + sharpness.margin:
            # If the sampler keeps only the likeliest tokens, each gains, so most of d is negative.
            is_truncated = d.mean() < -np.abs(d).mean() / 2
            raise MismatchError(
                f"{when}: on {len(d)} sampled tokens the sampler's log-probs differ from the trainer's by "
                f"{sharpness.slope:+.3f} +- {sharpness.error:.2g} times (log p + entropy). A sharper or flatter "
                "distribution has this effect, and rounding does not. Likely cause: "
                f"{TRUNCATION_CAUSE if is_truncated else self._temperature_cause(sharpness.slope)}"
            )

    def _temperature_cause(self, sharpness: float) -> str:
        return (
            f"temperature: the sampler's temperature is about {self._temperature / (1 + sharpness):.2f}, the trainer "
            f"computes at {self._temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )

    def _test_mean_weight(self, tokens: PairedLogprobs, when: str) -> None:
        # Let p be the trainer's and q the sampler's probability. The mean of exp(d) is
        # sum_y q(y) p(y) / q(y) = 1, whatever the rounding, unless q is 0 for a token with p > 0.
        excess = fit_slope(np.expm1(tokens.d_N), np.ones(len(tokens)), tokens.contexts_N)
        if abs(excess.slope) > MEAN_WEIGHT_TOLERANCE + excess.margin:
            raise MismatchError(
                f"{when}: over {len(tokens)} sampled tokens the mean of exp(trainer's - sampler's log-prob) is "
                f"{1 + excess.slope:.4f} +- {excess.error:.4f}; expected 1, whatever the rounding, if the sampler draws "
                "from the complete distribution that it reports. Likely cause: the distribution is truncated or "
                f"renormalized ({SAMPLER_ADVICE})"
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
            rows, logprobs, when: as in `check`.
            sharper: the trainer's log-probs with logits SHARPER_LOGIT_SCALE times as large.
            engine: name of the engine. Each engine is tested separately.
            seed: seed of the canary. Evidence from canaries with different seeds accumulates.

        Raises:
            MismatchError: the tokens are far more likely under a sharper or flatter distribution.
        """
        gains = [
            likelihood_gains(ours.logprobs_L, row.logprobs_L, ours.entropy_L, sharp.logprobs_L)
            for row, ours, sharp in zip(rows, logprobs, sharper, strict=True)
        ]
        self.check_likelihood_gains(
            np.sum([np.zeros(len(MIXTURES)), *sum(all_gather(gains), [])], axis=0), when, engine, seed
        )

    def check_likelihood_gains(self, gain: np.ndarray, when: str, engine: str, seed: int) -> None:
        """Tests the `likelihood_gains` of a canary, as `check_likelihood` does."""
        # The Shiryaev-Roberts statistic sums evidence over all change points, since an engine may
        # break at any time. A healthy sampler's mean is at most the number of canaries.
        last_seed, before, after = self._ratios.get(engine, (None, *[np.full(len(MIXTURES), -np.inf)] * 2))
        before = before if seed == last_seed else after
        ratios = np.logaddexp(before, 0.0) + gain
        self._ratios[engine] = seed, before, after if seed == last_seed else ratios
        if np.logaddexp.reduce(ratios) - math.log(len(MIXTURES)) > math.log(MAX_LIKELIHOOD_RATIO):
            better = "sharper" if MIXTURES[ratios.argmax()] > 0 else "flatter"
            raise MismatchError(
                f"{when}: a {better} distribution makes the canary's tokens {MAX_LIKELIHOOD_RATIO:.0e} times as likely as "
                "the sampler reports. Likely cause: the sampler applies a temperature, top-p or top-k, but reports "
                f"log-probs without them. Set logprobs_mode=processed_logprobs in the engine. {SAMPLER_ADVICE}"
            )


def likelihood_gains(*logprobs: Tensor) -> np.ndarray:
    """The log likelihood ratio of each mixture to the sampler's distribution, over all tokens.

    `logprobs`, [L] each: trainer, sampler, entropy, trainer with sharper logits.
    """
    p, q, entropy, sharp = (each.cpu().double().numpy() for each in logprobs)
    # The mixture p + w (p_sharp - p) sums to 1 over the vocabulary for any weight w. So if tokens
    # are drawn from q, the mixture's ratio to q has a mean of at most 1, whatever the rounding. The
    # mixture is also positive for w = -1 if every p_sharp / p is below 2. The maximum of p_sharp /
    # p is at most exp((SHARPER_LOGIT_SCALE - 1) H), because log sum_y p(y)^SHARPER_LOGIT_SCALE is
    # convex in the exponent.
    max_weight = np.minimum(1.0, 0.99 / np.expm1(np.maximum((SHARPER_LOGIT_SCALE - 1) * entropy, 1e-6)))
    weights = np.where(MIXTURES > 0, MIXTURES, MIXTURES * max_weight[:, None])
    return ((p - q)[:, None] + np.log1p(weights * np.expm1(sharp - p)[:, None])).sum(axis=0)


def _fit_sharpness(tokens: PairedLogprobs) -> tuple[SlopeFit, np.ndarray]:
    """Fits the sharpness of the sampler. Returns the fit and the residual of d, [N] in nats."""
    found = fit_slope(-tokens.d_N, tokens.score_N, tokens.contexts_N)
    return found, tokens.d_N + found.slope * tokens.score_N


def diagnose(stats: MismatchStats, effects: Sequence[UpdateEffect], temperature_cause: str) -> str:
    """Names the likely cause of a mismatch.

    `temperature_cause` is a message if a temperature explains most of the mismatch, else "".
    """
    for change in effects:
        # Versions and checksums matched, and the effect was measured with the rounded values that
        # were published. So the engine has the weights but does not use them.
        if change.is_missing:
            return (
                f"weights: {change.missing_cause}; the engine reproduces the fraction {change.slope:.2f} of the change's "
                f"effect on the log-probs of {change.tokens} sampled tokens"
            )
    # A sampler that renormalizes over a share c of the probability shifts every d by log c.
    if math.log(MIN_KEPT_PROBABILITY) < stats.mean < -0.9 * stats.mean_abs:
        return TRUNCATION_CAUSE
    if temperature_cause:
        return temperature_cause
    if stats.by_bucket.get("at_0", 0.0) > 5 * stats.mean_abs:
        return (
            "prompt or chat template: the first tokens of the completions disagree far more than the rest, so the "
            "engine received other prompt ids than the trainer (template, added BOS, re-tokenized text)"
        )
    if stats.mean_abs < 0.2 and abs(stats.mean) < 0.3 * stats.mean_abs:
        return (
            "precision: small errors of both signs, larger than the settings explain: look for a coarser precision in "
            "trainer or engine (keys and values in FP8, a quantized model). If this is intended, set "
            "max_mismatch above the mean"
        )
    return (
        "model: no sampling parameter explains the mismatch, so the engine uses a different forward pass: "
        "another model definition (rope_base, norm_eps, tied embeddings), another checkpoint, a stale prefix cache"
    )
