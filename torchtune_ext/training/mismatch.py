"""Checks that trainer and engine agree on the sampled tokens, before any clipping or masking.

test         passes if                            detects                      misses
magnitude    mean |d| <= 2 x rounding + margin    wrong weights, RoPE          faults below rounding
sharpness    d is uncorrelated with log p + H     temperature, also below      wrong weights, top-p
                                                  the rounding
mean ratio   mean exp(d) = 1 over many tokens     top-p, top-k, any            temperature, wrong
                                                  renormalization              weights
likelihood   tokens are as likely as the engine   log-probs of another         wrong weights
             reports                              distribution than sampled
arrival      versions, checksums and the effect   dropped weight syncs,        faults below noise
             of an update (`UpdateEffect`)        stale tensors or adapters

d is the trainer's log-prob minus the engine's, in nats; H is the entropy. exp(d) is the importance
sampling ratio of a token. A temperature changes log-probs in proportion to log p + H. The context
of a token is the sequence before it. Tokens with the same context are predicted from one hidden
state and are rounded alike, so standard errors are clustered by context.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

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
from torchtune_ext.training.estimates import Estimate, fit_slope, mean_with_error

log = logging.getLogger(__name__)

ENGINE_ADVICE = (
    "Fix: sample with top_p=1 and top_k off, and check that the engine does not read them from generation_config.json "
    "(generation_config='vllm')"
)
TRUNCATION_CAUSE = (
    "top-p / top-k: the engine's log-probs are higher than the trainer's on nearly every token, as after "
    f"renormalizing over a part of the vocabulary. {ENGINE_ADVICE}. If both are off: another model or checkpoint"
)

# The cause in a replay. A replay does not sample, so engine settings cannot cause its mismatch.
REPLAY_DRIFT_ADVICE = (
    "the policy of this replay has diverged from the policy that sampled, as it may with other settings (the first "
    "lines name them), or it computes in another precision. If this is intended, set max_mismatch to 1.5 times the mean"
)

# Minimum number of current-version tokens for a test. A single token can dominate a smaller mean.
MIN_TOKENS = 32
# Recent tokens that are tested together, because a small step has a large standard error.
MAX_RECENT_TOKENS = 1 << 15
# Minimum automatic limit of mean |d|. In float32 |d| is 1e-7 to 1e-5, and far larger with a fault.
MIN_AUTO_LIMIT_NATS = 0.001
# With changed settings the policy of a replay diverges from the sampled tokens, as expected.
REPLAY_LIMIT_NATS = 0.05
ROUNDING_ROWS = 4  # rows per rank for measuring the rounding
MEAN_RATIO_TOLERANCE = 0.005  # allowed |mean exp(d) - 1|, in addition to the standard errors
# Maximum sharpness that is tolerated: a temperature of 0.98 or 1.02.
MAX_SHARPNESS = 0.02
# A temperature is named as the cause if the residual sum of squares is below this fraction of the
# sum of squares of d (1 - R^2).
MAX_RESIDUAL_FRACTION = 0.25
# If top-p or top-k would have to keep less than this probability mass to explain d, the cause named
# is another model.
MIN_KEPT_PROBABILITY = 0.1
# Largest noise-to-effect ratio of a token at which an `UpdateEffect` is reliable.
MAX_NOISE_RATIO = 0.25
# Spacing of log-probs in nats: the spacing of float32 logits between 8 and 16. Smaller effects of a
# change are rounded to this grid. Two healthy sides may differ by exactly zero or one step.
LOGPROB_SPACING_NATS = 2.0**-20
# The likelihood test compares with a distribution whose logits are this many times the trainer's.
SHARPER_LOGIT_SCALE = 1.25
# The test's alternatives are mixtures p + w (p_sharp - p) of the trainer's distribution p and that
# sharper distribution, with these weights w. A negative weight flattens p.
MIXTURE_WEIGHTS = np.array([1.0, 0.4, -0.4, -1.0])
# Likelihood ratio that ends a run. A healthy engine reaches it once in this many canaries at most.
MAX_LIKELIHOOD_RATIO = 1e7


@dataclass(frozen=True, slots=True)
class MismatchStats:
    """Statistics of d = trainer's - engine's log-prob (nats) over sampled tokens of all ranks."""

    mean_abs: float  # mean |d|
    p99_abs: float  # 99th percentile of |d|
    max_abs: float  # largest |d|
    mean: float  # mean d; far from 0 if one side renormalizes. -mean is k1, an estimate of KL(engine || trainer)
    k3: float  # mean of exp(d) - 1 - d, a non-negative estimate of KL(engine || trainer)
    ess: float  # effective sample size of the ratios w = exp(d): (sum w)^2 / (n sum w^2)
    by_bucket: dict[str, float]  # mean |d| by position in the completion and by staleness (`bucket_means`)
    tokens: int  # number of tokens compared

    def metrics(self, prefix: str) -> dict[str, float]:
        """The statistics as metrics, whose names begin with `prefix`."""
        metrics = {"k1": -self.mean} | {
            name: getattr(self, name) for name in ("mean_abs", "p99_abs", "max_abs", "k3", "ess")
        }
        metrics |= {f"mean_abs_{bucket}": value for bucket, value in self.by_bucket.items()}
        return {f"{prefix}/{name}": value for name, value in metrics.items()}


class MismatchError(RunFailure):
    """Trainer and engine do not compute the same policy."""


@dataclass(frozen=True, slots=True)
class PairedLogprobs:
    """Log-probs of N sampled tokens from trainer and engine."""

    trainer_logprobs_N: np.ndarray  # the trainer's log-probs, nats
    engine_logprobs_N: np.ndarray  # the engine's log-probs, nats
    entropy_N: np.ndarray  # entropy of the trainer's distribution, nats
    contexts_N: np.ndarray  # int64 id of the context, equal for tokens after the same path
    buckets_2N: np.ndarray  # position bucket and staleness bucket (`bucket_ids`)

    @classmethod
    def from_rows(cls, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], version: int | None) -> "PairedLogprobs":
        """Collects the labels of packed rows of all ranks, with staleness from `version`. A collective."""
        parts = [
            cls(
                trainer.logprobs_L.cpu().double().numpy(),
                row.logprobs_L.cpu().double().numpy(),
                trainer.entropy_L.cpu().double().numpy(),
                context_hashes(row)[0].numpy(),
                bucket_ids(row, version).numpy(),
            )
            for row, trainer in zip(rows, logprobs, strict=True)
        ]
        return cls.concat(all_gather(cls.concat([cls.empty(), *parts])))

    @classmethod
    def empty(cls) -> "PairedLogprobs":
        """No tokens, in arrays of the right dtype."""
        nothing = np.empty(0)
        return cls(nothing, nothing, nothing, np.empty(0, np.int64), np.empty((2, 0), np.int64))

    @classmethod
    def concat(cls, parts: Sequence["PairedLogprobs"]) -> "PairedLogprobs":
        """All tokens of `parts`."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts], axis=-1) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.trainer_logprobs_N)

    def __getitem__(self, index: np.ndarray | slice) -> "PairedLogprobs":
        return PairedLogprobs(*(getattr(self, field.name)[..., index] for field in fields(self)))

    def renumber_contexts(self) -> "PairedLogprobs":
        """The same tokens with context ids from 0."""
        return replace(self, contexts_N=np.unique(self.contexts_N, return_inverse=True)[1])

    @property
    def d_N(self) -> np.ndarray:  # noqa: N802
        """The trainer's minus the engine's log-prob."""
        return self.trainer_logprobs_N - self.engine_logprobs_N

    @property
    def centered_logprobs_N(self) -> np.ndarray:  # noqa: N802
        """log p + H, with the mean of both sides as log p."""
        # The trainer's rounding then moves d and log p in the same direction, the engine's in
        # opposite directions. If both sides round equally, the effects cancel in the product.
        return (self.trainer_logprobs_N + self.engine_logprobs_N) / 2 + self.entropy_N


def _mismatch_stats(tokens: PairedLogprobs) -> MismatchStats:
    if not len(tokens):
        return MismatchStats(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, {}, 0)
    d = torch.from_numpy(tokens.d_N)
    abs_d = d.abs()
    # Subtracting the maximum avoids an overflow. `ess` is invariant to scaling of all ratios.
    ratios = (d - d.max()).exp()
    return MismatchStats(
        mean_abs=abs_d.mean().item(),
        p99_abs=abs_d.kthvalue(max(1, round(0.99 * d.numel()))).values.item(),
        max_abs=abs_d.max().item(),
        mean=d.mean().item(),
        k3=kl_k3(torch.zeros_like(d), d).mean().item(),
        ess=(ratios.sum().square() / (d.numel() * ratios.square().sum())).item(),
        by_bucket=bucket_means(abs_d, torch.from_numpy(tokens.buckets_2N)),
        tokens=d.numel(),
    )


@dataclass(frozen=True, slots=True)
class UpdateEffect:
    """The fraction of a weight change (an update, an adapter) that the engine reproduces."""

    slope: float  # 1: the engine has the change; 0: the engine does not have it
    margin: float  # margin of error of the slope
    noise: float  # ratio: (deviation of a token from the slope) to (effect on the token); inf without an effect
    tokens: int  # number of tokens compared
    missing_cause: str  # the cause that the message names if the change is missing

    @classmethod
    def estimate(
        cls, effect_N: np.ndarray, response_N: np.ndarray, contexts_N: np.ndarray, missing_cause: str
    ) -> "UpdateEffect":
        """Compares the trainer's effect of a change (with minus without) with the engine's response.

        The response is the engine's log-prob minus the trainer's without the change, in nats.
        """
        # The slope does not depend on the magnitude of the effect. Let S be the variance of the
        # effect without noise, and N the variance of the trainer's noise, equal with and without
        # the change. Effect and response contain the same noise of the trainer without the change.
        # So the mean slope is (S + N) / (S + 2N) >= 1/2 for an engine with the change, and
        # N / (S + 2N) <= 1/2 for an engine without it. A larger S / N separates the two further.
        fit = fit_slope(response_N, effect_N, contexts_N)
        effect_sum2 = float(np.square(effect_N).sum())
        noise_N = np.square(response_N - fit.value * effect_N) + LOGPROB_SPACING_NATS**2
        noise = (float(noise_N.sum()) / effect_sum2) ** 0.5 if effect_sum2 else math.inf
        return cls(fit.value, fit.margin, noise, len(effect_N), missing_cause)

    @property
    def is_reliable(self) -> bool:
        """Whether noise and margin of error are small enough for a conclusion."""
        return self.noise <= MAX_NOISE_RATIO and self.margin < 0.5

    @property
    def is_missing(self) -> bool:
        """Whether the slope is reliable and shows that the engine lacks the change."""
        return self.is_reliable and self.slope < 0.5


def measure_update_effect(
    rows: Sequence[Row], with_change: Sequence[Tensor], without_change: Sequence[Tensor], missing_cause: str
) -> UpdateEffect:
    """Measures the fraction of a weight change that the engine reproduces. A collective.

    Args:
        rows: packed rows of this rank; they hold the engine's log-probs.
        with_change: the trainer's log-probs of each row with the change, [L]; labels with NaN are
            skipped.
        without_change: the same without the change.
        missing_cause: the cause that the message names if the change is missing.
    """
    parts = [
        (
            torch.stack([changed.cpu().double() - base, row.logprobs_L.double() - base]).numpy(),
            context_hashes(row)[0].numpy(),
        )
        for row, changed, base in zip(rows, with_change, (base.cpu().double() for base in without_change), strict=True)
    ]
    differences_2N, contexts_N = (
        np.concatenate(arrays, axis=-1) for arrays in zip(*sum(all_gather(parts), []), strict=True)
    )
    is_valid = ~np.isnan(differences_2N).any(axis=0)
    effect_N, response_N = differences_2N[:, is_valid]
    context_ids_N = np.unique(contexts_N[is_valid], return_inverse=True)[1]
    return UpdateEffect.estimate(effect_N, response_N, context_ids_N, missing_cause)


class LikelihoodEvidence(NamedTuple):
    """The likelihood test of one engine replica: log statistics, one per mixture."""

    seed: int | None  # seed of the last canary
    # Canaries with one seed repeat tokens, so only the first canary of a seed is evidence.
    before_seed: np.ndarray  # from the canaries of earlier seeds
    with_seed: np.ndarray  # in addition, from the first canary of `seed`


class MismatchGate:
    """Stops the run if trainer and engine disagree.

    Args:
        limit: maximum mean |d| in nats. "auto": twice the rounding, at least 0.001, plus the margin
            of error on few contexts.
        measure_rounding: a collective: rows -> mean |d| between the coarser precision and float32.
        precision: name of the precision, for messages.
        replay: the run does not sample, and "auto" is REPLAY_LIMIT_NATS.
        test_distribution: whether `check` also tests mean ratio and sharpness. Set it to False if
            trainer and engine hold different values.
        temperature: sampling temperature, for messages.
    """

    def __init__(
        self,
        limit: float | str,
        measure_rounding: Callable[[Sequence[Row]], float] = lambda rows: 0.0,
        precision: str = "float32",
        replay: bool = False,
        test_distribution: bool = True,
        temperature: float = 1.0,
    ):
        self._temperature, self._measure_rounding, self._precision = temperature, measure_rounding, precision
        # bfloat16 may differ from float32 by 0.04 nats, and two correct implementations by sqrt(2)
        # times as much. This is not a fault, so "auto" measures the rounding.
        self._auto, self._replay = limit == "auto", replay
        self._min_limit = REPLAY_LIMIT_NATS if replay else MIN_AUTO_LIMIT_NATS  # minimum limit of "auto"
        self._limit = float(limit) if limit != "auto" else REPLAY_LIMIT_NATS if replay else 0.0
        self._measured: list[float] = []  # results of `measure_rounding`
        self._recent = PairedLogprobs.empty()  # recent tokens, each on-policy when it was checked
        # If the weights of trainer and engine differ, d correlates with the reward. Dropping
        # zero-variance groups then biases the mean of exp(d).
        self._distribution_tests_enabled = test_distribution
        # The warning about missing current-version tokens is logged once, and never in a replay.
        self._suppress_warning = replay
        self._evidence: dict[str, LikelihoodEvidence] = {}  # by name of the engine replica

    @property
    def limit(self) -> float:
        """The current limit of mean |d| in nats; 0 until "auto" has been measured."""
        return self._limit

    def check(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[LabelLogprobs],
        prefix: str,
        version: int | None = None,
        effects: Sequence[UpdateEffect] = (),
        describe_nonfinite: Callable[[], str] = str,
    ) -> MismatchStats:
        """Tests magnitude, arrival, sharpness and mean ratio. A collective.

        Args:
            rows: packed rows of this rank; they hold the engine's log-probs.
            logprobs: the trainer's log-probs of the labels of each row.
            prefix: the beginning of the message, such as "after publishing version 7".
            version: the policy version; only its tokens are tested. None: the tokens of a canary.
            effects: measured effects of changes that the engine must have.
            describe_nonfinite: a collective that names the non-finite weights, for the message.

        Returns:
            The mismatch of all tokens, of any staleness.

        Raises:
            MismatchError: a test failed, or a log-prob is not finite. The message gives the numbers
                and the likely cause.
        """
        tokens = PairedLogprobs.from_rows(rows, logprobs, version)
        trainer_nonfinite = np.count_nonzero(~np.isfinite(tokens.trainer_logprobs_N))
        engine_nonfinite = np.count_nonzero(~np.isfinite(tokens.engine_logprobs_N))
        if trainer_nonfinite or engine_nonfinite:
            raise MismatchError(
                f"{prefix}: log-probs of {len(tokens)} sampled tokens are not finite: {trainer_nonfinite} of the trainer's, "
                f"{engine_nonfinite} of the engine's. Likely cause: weights or activations that are NaN or "
                f"infinite{describe_nonfinite()}"
            )
        self.check_tokens(tokens, rows, prefix, version, effects)
        return _mismatch_stats(tokens)

    def check_tokens(
        self,
        tokens: PairedLogprobs,
        rows: Sequence[Row],
        prefix: str,
        version: int | None,
        effects: Sequence[UpdateEffect] = (),
    ) -> None:
        """Tests tokens as `check` does; with limit "auto" it measures the rounding on `rows`."""
        # Log-probs of tokens from an earlier version differ because the policy has changed since.
        # This is not a fault. Asynchronous engines often return only such tokens.
        current = tokens[tokens.buckets_2N[1] == STALENESS_0_BUCKET]
        # Suffix of the message -> tokens.
        token_sets = {"": current.renumber_contexts()}
        if version is not None and len(current):
            recent = PairedLogprobs.concat([self._recent, current])
            self._recent = recent[-max(MAX_RECENT_TOKENS, len(current)) :]
            if len(self._recent) > len(current):
                token_sets[" of the latest steps"] = self._recent.renumber_contexts()
        # Fewer than MIN_TOKENS tokens are not tested, because one outlier can dominate their mean.
        # Exceptions: canaries, which are always short, and a limit that the user has set.
        test_few_tokens = version is None or (len(current) == len(tokens) and not self._auto)
        sets_to_test = {
            suffix: token_set
            for suffix, token_set in token_sets.items()
            if len(token_set) >= (1 if test_few_tokens else MIN_TOKENS) and (self._auto or not suffix)
        }
        if not sets_to_test and not (self._auto and len(current)) and not self._suppress_warning:
            self._suppress_warning = True
            log.warning(
                "%s: %s sampled tokens are from the current version %s, so only the canary proves that trainer and engine "
                "agree. Later steps do not repeat this warning",
                prefix,
                len(current) or "no",
                version,
            )
        self._test_magnitude(sets_to_test, rows, prefix, effects)
        for token_set in token_sets.values():
            if self._distribution_tests_enabled and len(token_set) >= MIN_TOKENS:
                # Most canaries repeat the same tokens, so they do not estimate the mean ratio.
                if version is not None:
                    self._test_mean_ratio(token_set, prefix)
                self._test_sharpness(token_set, prefix)

    def check_sharpness(self, rows: Sequence[Row], logprobs: Sequence[LabelLogprobs], prefix: str) -> None:
        """Tests only the sharpness, by log-probs under the published weights. A collective."""
        self._test_sharpness(PairedLogprobs.from_rows(rows, logprobs, None).renumber_contexts(), prefix)

    def _test_magnitude(
        self, token_sets: dict[str, PairedLogprobs], rows: Sequence[Row], prefix: str, effects: Sequence[UpdateEffect]
    ) -> None:
        means = {suffix: mean_with_error(np.abs(s.d_N), s.contexts_N) for suffix, s in token_sets.items()}
        limit = self._limit
        if means and self._auto and (not limit or any(self._exceeds(mean, limit) for mean in means.values())):
            limit = self._measure_limit(rows)
        failed = [suffix for suffix, mean in means.items() if self._exceeds(mean, limit)]
        if not failed and not any(effect.is_missing for effect in effects):
            return
        suffix = max(failed or means, key=lambda suffix: means[suffix].value)
        stats = _mismatch_stats(token_sets[suffix])
        sharpness, residual_N = _fit_sharpness(token_sets[suffix])
        # The sharpness formula holds only near 0; d of a broken model may correlate with anything.
        max_residual = MAX_RESIDUAL_FRACTION * np.square(token_sets[suffix].d_N).sum()
        is_temperature = abs(sharpness.value) < 1 and np.square(residual_N).sum() < max_residual
        cause = diagnose(stats, effects, self._temperature_cause(sharpness.value) if is_temperature else "")
        raise MismatchError(
            f"{prefix}: trainer and engine disagree on {stats.tokens} sampled tokens{suffix}: mean |d log-prob| "
            f"{stats.mean_abs:.4g} +- {means[suffix].error:.2g} ({self._limit_text(means[suffix], limit)}), 99th percentile "
            f"{stats.p99_abs:.4g}, max {stats.max_abs:.4g}, signed mean {stats.mean:+.4g}. Likely cause: "
            f"{REPLAY_DRIFT_ADVICE if self._replay else cause}"
        )

    def _limit_text(self, mean: Estimate, limit: float) -> str:
        text, over = f"max_mismatch={limit:.3g}", mean.value > limit + mean.margin
        if not self._auto or not self._exceeds(mean, limit):
            return text
        return f"{text} + margin {mean.margin:.2g}" if over else f"3 x {text} without the most extreme context"

    def _exceeds(self, mean: Estimate, limit: float) -> bool:
        """Whether a mean |d| exceeds the limit by more than the margin of error."""
        if not self._auto:
            return not mean.value <= limit  # a NaN also exceeds the limit
        # A few outliers also enlarge the standard error. So a mean that stays above 3 x limit without
        # its most extreme context fails with any standard error. With fewer than MIN_TOKENS contexts
        # two outliers may dominate, so contexts with d = 0 are added up to that number.
        return mean.value > limit + mean.margin or mean.min_value * min(1.0, mean.contexts / MIN_TOKENS) > 3 * limit

    def _measure_limit(self, rows: Sequence[Row]) -> float:
        """Measures the rounding of these rows and returns their limit in nats. A collective."""
        # The gradients of the step may already occupy memory, so a few rows represent all rows.
        noise = self._measure_rounding(rows[:ROUNDING_ROWS])
        self._measured.append(noise)
        # A few tokens may have far larger rounding errors. The limit of later steps follows the
        # mean, and only the current rows get a higher limit.
        self._limit = max(self._min_limit, 2 * sum(self._measured) / len(self._measured))
        limit_of_rows = max(self._limit, 2 * noise)
        if rank() == 0:
            text = f"{noise:.2g} nats in {self._precision}" if noise else f"negligible in {self._precision}"
            if len(self._measured) > 1:
                text += f", measured on this step's rows (limit for these rows {limit_of_rows:.2g}; then as follows)"
            print_text(format_labels([("rounding", f"{text}; max_mismatch {self._limit:.2g}")]))
        return limit_of_rows

    def _test_sharpness(self, tokens: PairedLogprobs, prefix: str) -> None:
        # At temperature T / (1 + s) the engine's log-probs are larger by s (log p + H): those of
        # likely tokens rise and those of unlikely tokens fall. Rounding does not have this effect.
        sharpness, _ = _fit_sharpness(tokens)
        d = tokens.d_N
        # With rounding errors e_t of the trainer and e_e of the engine, d = e_t - e_e. They bias
        # the slope's numerator by (e_e^2 - e_t^2) / 2, because log p is the mean of both sides, and
        # by at most max(e_t^2, e_e^2) / 2, because errors sharpen a distribution. For independent
        # errors d^2 bounds the sum, so |bias| <= sum d^2 / sum (log p + H)^2.
        bias = np.square(d).sum() / max(np.square(tokens.centered_logprobs_N).sum(), 1e-30)
        if abs(sharpness.value) > MAX_SHARPNESS + bias + sharpness.margin:
            # If the engine keeps only the likeliest tokens, their log-probs rise, so most of d is
            # negative.
            is_truncated = d.mean() < -np.abs(d).mean() / 2
            raise MismatchError(
                f"{prefix}: on {len(d)} sampled tokens the engine's log-probs differ from the trainer's by "
                f"{sharpness.value:+.3f} +- {sharpness.error:.2g} times (log p + entropy). A sharper or flatter "
                "distribution has this effect, and rounding does not. Likely cause: "
                f"{TRUNCATION_CAUSE if is_truncated else self._temperature_cause(sharpness.value)}"
            )

    def _temperature_cause(self, sharpness: float) -> str:
        return (
            f"temperature: the engine's temperature is about {self._temperature / (1 + sharpness):.2f}, the trainer "
            f"computes at {self._temperature:g}. Check `temperature`, that the engine reports processed log-probs "
            "(logprobs_mode=processed_logprobs), and that no generation_config.json overrides it"
        )

    def _test_mean_ratio(self, tokens: PairedLogprobs, prefix: str) -> None:
        # Let p be the trainer's and q the engine's probability. The mean of exp(d) is
        # sum_y q(y) p(y) / q(y) = 1, whatever the rounding, unless q is 0 for a token with p > 0.
        excess = mean_with_error(np.expm1(tokens.d_N), tokens.contexts_N)
        if abs(excess.value) > MEAN_RATIO_TOLERANCE + excess.margin:
            raise MismatchError(
                f"{prefix}: over {len(tokens)} sampled tokens the mean of exp(trainer's - engine's log-prob) is "
                f"{1 + excess.value:.4f} +- {excess.error:.4f}; expected 1, whatever the rounding, if the engine samples "
                "from the complete distribution that it reports. Likely cause: the distribution is truncated or "
                f"renormalized ({ENGINE_ADVICE})"
            )

    def check_likelihood(
        self,
        rows: Sequence[Row],
        logprobs: Sequence[LabelLogprobs],
        sharper: Sequence[LabelLogprobs],
        prefix: str,
        engine: str,
        seed: int,
    ) -> None:
        """Tests whether the tokens of a canary are as likely as the engine reports. A collective.

        Args:
            rows, logprobs, prefix: as in `check`.
            sharper: the trainer's log-probs with logits SHARPER_LOGIT_SCALE times as large.
            engine: name of the engine replica. Each replica is tested separately.
            seed: seed of the canary. Evidence from canaries with different seeds accumulates.

        Raises:
            MismatchError: the tokens are far more likely under a sharper or flatter distribution.
        """
        log_ratios = [
            log_likelihood_ratios(trainer.logprobs_L, row.logprobs_L, trainer.entropy_L, sharp.logprobs_L)
            for row, trainer, sharp in zip(rows, logprobs, sharper, strict=True)
        ]
        self.update_likelihood_ratio(
            np.sum([np.zeros(len(MIXTURE_WEIGHTS)), *sum(all_gather(log_ratios), [])], axis=0), prefix, engine, seed
        )

    def update_likelihood_ratio(self, log_ratios: np.ndarray, prefix: str, engine: str, seed: int) -> None:
        """Adds a canary's `log_likelihood_ratios` to its replica's statistic, and tests the sum."""
        # The Shiryaev-Roberts statistic sums evidence over all change points, since an engine may
        # break at any time. Its mean for a correct engine is at most the number of canaries.
        no_evidence = np.full(len(MIXTURE_WEIGHTS), -np.inf)
        last = self._evidence.get(engine, LikelihoodEvidence(None, no_evidence, no_evidence))
        before_seed = last.before_seed if seed == last.seed else last.with_seed
        statistics = np.logaddexp(before_seed, 0.0) + log_ratios
        with_seed = last.with_seed if seed == last.seed else statistics
        self._evidence[engine] = LikelihoodEvidence(seed, before_seed, with_seed)
        if np.logaddexp.reduce(statistics) - math.log(len(MIXTURE_WEIGHTS)) > math.log(MAX_LIKELIHOOD_RATIO):
            better = "sharper" if MIXTURE_WEIGHTS[statistics.argmax()] > 0 else "flatter"
            raise MismatchError(
                f"{prefix}: a {better} distribution makes the canary's tokens {MAX_LIKELIHOOD_RATIO:.0e} times as likely as "
                "the engine reports. Likely cause: the engine applies a temperature, top-p or top-k, but reports "
                f"log-probs without them; expected logprobs_mode=processed_logprobs. {ENGINE_ADVICE}"
            )


def log_likelihood_ratios(trainer_L: Tensor, engine_L: Tensor, entropy_L: Tensor, sharper_L: Tensor) -> np.ndarray:
    """The log likelihood ratio of each mixture to the engine's distribution, over all tokens.

    Args:
        trainer_L: the trainer's log-probs.
        engine_L: the engine's log-probs.
        entropy_L: entropy of the trainer's distribution, nats.
        sharper_L: the trainer's log-probs with logits SHARPER_LOGIT_SCALE times as large.
    """
    tensors = trainer_L, engine_L, entropy_L, sharper_L
    p, q, entropy, sharp = (tensor.cpu().double().numpy() for tensor in tensors)
    # The mixture p + w (p_sharp - p) sums to 1 over the vocabulary for any weight w. So if tokens
    # are drawn from q, the mixture's ratio to q has a mean of at most 1, whatever the rounding. The
    # mixture is also positive for w = -1 if every p_sharp / p is below 2. The maximum of p_sharp /
    # p is at most exp((SHARPER_LOGIT_SCALE - 1) H), because log sum_y p(y)^SHARPER_LOGIT_SCALE is
    # convex in the exponent.
    max_weight = np.minimum(1.0, 0.99 / np.expm1(np.maximum((SHARPER_LOGIT_SCALE - 1) * entropy, 1e-6)))
    weights = np.where(MIXTURE_WEIGHTS > 0, MIXTURE_WEIGHTS, MIXTURE_WEIGHTS * max_weight[:, None])
    return ((p - q)[:, None] + np.log1p(weights * np.expm1(sharp - p)[:, None])).sum(axis=0)


def _fit_sharpness(tokens: PairedLogprobs) -> tuple[Estimate, np.ndarray]:
    """Fits the sharpness of the engine. Returns the fit and the residual of d, [N] in nats."""
    fit = fit_slope(-tokens.d_N, tokens.centered_logprobs_N, tokens.contexts_N)
    return fit, tokens.d_N + fit.value * tokens.centered_logprobs_N


def diagnose(stats: MismatchStats, effects: Sequence[UpdateEffect], temperature_cause: str) -> str:
    """Names the likely cause of a mismatch.

    `temperature_cause` is a message if a temperature explains most of the mismatch, else "".
    """
    for effect in effects:
        # Versions and checksums matched, and the effect was measured with the rounded values that
        # were published. So the engine has the weights but does not use them.
        if effect.is_missing:
            return (
                f"weights: {effect.missing_cause}; the engine reproduces the fraction {effect.slope:.2f} of the change's "
                f"effect on the log-probs of {effect.tokens} sampled tokens"
            )
    # An engine that renormalizes over a probability mass c shifts every d by log c.
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
            "trainer or engine (keys and values in FP8, a quantized model). If this is intended, or max_mismatch is below "
            "the rounding, set max_mismatch to 1.5 times the mean"
        )
    return (
        "model: no sampling parameter explains the mismatch, so the engine uses a different forward pass: "
        "another precision (engine.dtype), another model definition (rope_base, norm_eps, tied embeddings), another "
        "checkpoint, a stale prefix cache"
    )
