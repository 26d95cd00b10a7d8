"""Implements policy losses as pure functions of flat tensors, with one value per label.

The learner multiplies the loss by the labels' weights and sums. The weights come from packing and
sum to one over an update, so a loss does not depend on rows, padding, ranks or gradient
accumulation. A custom loss is a class with `__call__`::

    class MyLoss:
        def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
            ratio_L = (t.logprobs_L - t.proximal_logprobs_L).exp()
            return -ratio_L * t.advantages_L, {"ratio_max": ratio_L.detach()}

Class attributes declare further inputs (`loss_requirements`):

* `needs_reference = True`: log-probs under a reference policy.
* `needs_teacher = True`: log-probs under a teacher.
* `top_k = 16`: log-probs of the proximal policy's 16 likeliest tokens.
* `needs_all_groups = True`: also train on zero-variance groups, for a term that does not depend on
  the advantage (a KL penalty, an entropy bonus).
* `environment_coef = 0.05`: add the cross-entropy on the environment's content with this coefficient.
* `needs_proximal = False`: skip the forward pass for `proximal_logprobs_L`, which is then None.

A loss may adapt to its metrics: the learner calls `observe(metrics)` after each update, and
checkpoints hold the dict `adaptive_state`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from torchtune_ext.objective.clipping import clip
from torchtune_ext.objective.constraints import (
    CONSTRAINTS,
    OPTION_TYPES,
    Constraint,
    ConstraintOptions,
    IntervalConstraint,
    make_constraint,
)
from torchtune_ext.objective.importance import (
    IMPORTANCE_METHODS,
    check_importance,
    importance_weights,
    off_policy_labels,
)
from torchtune_ext.objective.kl import KL_ESTIMATORS, kl_k3, kl_penalty
from torchtune_ext.objective.ratios import (
    MAX_LOG_RATIO,
    OLD_POLICIES,
    RATIO_LEVELS,
    bounded_exp,
    old_logprobs,
    sample_means,
)
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.run.errors import UsageError, closest_match

Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]

# Options with a fixed set of values.
CHOICES = {
    "level": RATIO_LEVELS,
    "constraint": CONSTRAINTS,
    "old": OLD_POLICIES,
    "importance": IMPORTANCE_METHODS,
    "kl": KL_ESTIMATORS,
}

# Coefficients of `PolicyLoss` that must not be negative.
NONNEGATIVE_COEFFICIENTS = "reward_coef", "teacher_coef", "kl_coef", "old_kl_coef", "environment_coef"
SURPRISE_PROBABILITY = 0.01  # `teacher_surprise`: fraction of tokens with a lower teacher probability


@dataclass(frozen=True, slots=True)
class LossRequirements:
    """The inputs that a loss needs in addition to the log-probs of the current policy."""

    # Log-probs of the sampled or likeliest tokens under the proximal policy.
    proximal_logprobs: bool
    # Log-probs under a reference policy.
    reference_logprobs: bool
    # Log-probs under a teacher.
    teacher_logprobs: bool
    # Also train on zero-variance groups.
    train_zero_advantage: bool
    # The number of likeliest tokens of the proximal policy whose log-probs are needed at every
    # label; 0 for none.
    top_k: int
    # The coefficient of the cross-entropy on the environment's content; 0 for none.
    environment_coef: float = 0.0


def loss_requirements(loss: Loss) -> LossRequirements:
    """Reads the requirements of a loss from its attributes. Default: only proximal log-probs."""
    return LossRequirements(
        # The likeliest tokens come from the forward pass that computes the proximal log-probs.
        proximal_logprobs=bool(getattr(loss, "needs_proximal", True) or getattr(loss, "top_k", None)),
        reference_logprobs=bool(getattr(loss, "needs_reference", False)),
        teacher_logprobs=bool(getattr(loss, "needs_teacher", False)),
        train_zero_advantage=bool(getattr(loss, "needs_all_groups", False)),
        top_k=getattr(loss, "top_k", None) or 0,
        environment_coef=getattr(loss, "environment_coef", 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ConstraintOptions):
    """The policy loss: ratio, constraint, importance weight, KL terms and entropy bonus.

    loss = -w (reward_coef J_C(r, A) + teacher_coef J_C(r, log p_teacher - log pi_old))
           + kl_coef KL(pi, ref) + old_kl_coef KL(pi, old) - entropy_coef H

    with r = pi / pi_old at a level (`ratios.py`), J_C the constrained objective (`constraints.py`),
    w = pi_old / pi_behavior (`importance.py`) and KL an estimator (`kl.py`). The presets in
    configs/presets/ set its options to published methods.

    Each option of each constraint is a field, too: `clip_low`, `delta`, `top_k`, ... The constraint
    defines its default. An option of another constraint is an error.

    Args:
        level: level of the ratio: "token", "sequence" (GSPO) or "geometric" (GMPO).
        constraint: constraint on the ratio: "clip" (PPO), "kl3" (ATR-GRPO), "kl", "tv" (DPPO),
            "cispo", "sapo", "spo" or "none".
        old: source of pi_old: "trainer" (the proximal policy), "sampler" (the behavior policy, by
            the engine's log-probs), or "interpolated" between behavior and current policy, which
            saves a forward pass.
        importance: importance weight for the mismatch between pi_old and pi_behavior ("tis" in the
            default preset): "none", "full", "tis", "mis", "icepop", "sequence_tis", "sequence_mis" or "geometric_mask".
        importance_low: lower bound of the importance weight; null: the method's default.
        importance_high: upper bound of the importance weight; null: the method's default (2 for
            "tis"; the objectives page lists the others).
        off_policy_mask: drops completions with a negative advantage whose mean log pi_behavior - log pi
            is above this bound, in nats (DeepSeek-V3.2); often 0.5; null: none.
        reward_coef: coefficient of the objective with the advantages of the rewards.
        teacher_coef: coefficient of the objective with log p_teacher - log pi_old as the advantage
            of every token; 0: no teacher.
        kl_coef: coefficient of the KL to the reference policy; 0: no reference policy is kept.
        old_kl_coef: coefficient of the KL to the old policy.
        kl: estimator of both KL terms: "k1", "k2", "k3" or "k3_unbiased".
        entropy_coef: coefficient of the entropy bonus; the entropy is in nats.
        entropy_target: mean entropy per token, in nats, below which the bonus acts. entropy_coef is then
            the first coefficient, which follows the entropy (Skywork-OR1) and continues at a resume; null: a
            fixed coefficient.
        entropy_delta: change of the coefficient after each update, up below the target, else down.
        environment_coef: coefficient of the mean cross-entropy on the content of the environment's replies
            (ECHO, arXiv 2605.24517; 0.01 to 0.1), at `sampling.temperature`, outside of ratios, weights and
            aggregation; 0: off.

    Raises:
        UsageError: an unknown name, an option that contradicts another option, or a value out of
            range.
    """

    level: str = "token"
    constraint: str = "clip"
    old: str = "trainer"
    importance: str = "none"
    importance_low: float | None = None
    importance_high: float | None = None
    off_policy_mask: float | None = None
    reward_coef: float = 1.0
    teacher_coef: float = 0.0
    kl_coef: float = 0.0
    old_kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    entropy_target: float | None = None
    entropy_delta: float = 0.005
    environment_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            _require_choice(name, getattr(self, name), known)
        possible = [name for name, kind in CONSTRAINTS.items() if self.level in kind.levels]
        if self.constraint not in possible:
            raise UsageError(
                f"loss.level={self.level!r} does not support constraint={self.constraint!r}; expected {', '.join(possible)}"
            )
        constraint = self._constraint
        for name in (*OPTION_TYPES, "importance_low", "importance_high", "off_policy_mask", "entropy_target"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name))
        for name in (*NONNEGATIVE_COEFFICIENTS, "entropy_coef", "entropy_delta"):
            _require_number(name, getattr(self, name))
        constraint.check(self.level, self.old)
        # Fill in the constraint's defaults, so that losses are shown and compared by their
        # effective values.
        for option in fields(constraint):
            object.__setattr__(self, option.name, getattr(constraint, option.name))
        check_importance(self.importance, self.importance_low, self.importance_high, self.level, self.old)
        for name, usual in (("off_policy_mask", 0.5), ("entropy_target", 0.2), ("entropy_delta", 0.005)):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise UsageError(f"loss.{name}={value}: expected above 0, often {usual}")
        if self.off_policy_mask is not None and not self.reward_coef:
            raise UsageError(
                f"loss.off_policy_mask={self.off_policy_mask} with reward_coef=0: the mask selects completions by their "
                "rewards. Fix: set loss.off_policy_mask=null, or loss.reward_coef=1.0"
            )
        if self.entropy_target is not None and self.entropy_coef < 0.0:
            raise UsageError(f"loss.entropy_coef={self.entropy_coef} with an entropy_target: expected 0 or more")
        for name in NONNEGATIVE_COEFFICIENTS:
            term = "KL term" if name.endswith("kl_coef") else "term"
            if not getattr(self, name) >= 0.0:
                raise UsageError(f"loss.{name}={getattr(self, name)}: expected 0 or more; 0 turns the {term} off")

    @cached_property
    def _constraint(self) -> Constraint:
        """The constraint with its options."""
        # It is not a dataclass field, so that losses are built and compared by their options only.
        return make_constraint(self.constraint, vars(self))

    @cached_property
    def adaptive_state(self) -> dict[str, float]:
        """The entropy coefficient, and the coefficient of the next update; {} if it is fixed."""
        if self.entropy_target is None:
            return {}
        return {"entropy_coef": self.entropy_coef, "applied_entropy_coef": self.entropy_coef}

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Adapts the entropy coefficient to the mean entropy of an update over all ranks.

        Skywork-OR1 (arXiv 2505.22312) adds or subtracts entropy_delta, and applies the coefficient
        only while the entropy is at or below the target. As in TRL, an update measures the entropy,
        and the next update applies the coefficient.
        """
        if self.entropy_target is None or "loss/entropy" not in metrics:
            return
        below = metrics["loss/entropy"] <= self.entropy_target
        coef = self.adaptive_state["entropy_coef"] + (self.entropy_delta if below else -self.entropy_delta)
        coef = max(coef, 0.0)
        self.adaptive_state.update(entropy_coef=coef, applied_entropy_coef=coef if below else 0.0)

    def __str__(self) -> str:
        """The loss in one line, for example "clip 0.2/0.28 per token, TIS <= 2, entropy 0.03"."""
        weight = IMPORTANCE_METHODS[self.importance].with_bounds(self.importance_low, self.importance_high)
        parts = {
            self._constraint.describe(RATIO_LEVELS[self.level]): True,
            "ratio to the behavior policy": self.old == "sampler",
            "old policy interpolated": self.old == "interpolated",
            str(weight): self.importance != "none",
            f"off-policy mask {self.off_policy_mask} nats": self.off_policy_mask,
            f"{self.kl_coef:g} KL to the reference ({self.kl})": self.kl_coef,
            f"{self.old_kl_coef:g} KL to the old policy ({self.kl})": self.old_kl_coef,
            f"{self.teacher_coef:g} teacher": self.teacher_coef,
            f"{self.reward_coef:g} rewards": self.reward_coef != 1.0,
            f"entropy {self.entropy_coef:g}": self.entropy_coef and self.entropy_target is None,
            f"entropy {self.entropy_coef:g} +- {self.entropy_delta:g} towards {self.entropy_target} nats": self.entropy_target,
            f"environment {self.environment_coef:g}": self.environment_coef,
        }
        return ", ".join(part for part, shown in parts.items() if shown)

    @property
    def needs_proximal(self) -> bool:
        """Whether pi_old is the proximal policy."""
        return self.old == "trainer"

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term needs the reference policy."""
        return bool(self.kl_coef)

    @property
    def needs_teacher(self) -> bool:
        """Whether a term needs the teacher's log-probs."""
        return bool(self.teacher_coef)

    @property
    def needs_all_groups(self) -> bool:
        """Whether a term has a gradient on zero-variance groups, too."""
        # These terms do not depend on the rewards' advantages, which are 0 in a zero-variance
        # group.
        coefficients = self.teacher_coef, self.kl_coef, self.old_kl_coef, self.entropy_coef, self.environment_coef
        return any(coefficients) or self.entropy_target is not None

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns loss and metrics per label, all [L].

        `*_max` metrics are reduced over labels by maximum, all others by mean.

        Raises:
            UsageError: a term needs log-probs that `t` does not hold.
        """
        old_L = old_logprobs(self.old, t)
        token_ratio_L = bounded_exp(t.logprobs_L - old_L)
        objective_L, clipped_L = self._surrogate(t, old_L, token_ratio_L)
        objective_L = self.reward_coef * objective_L
        teacher_advantages_L = self._teacher_gap(t, old_L)
        if teacher_advantages_L is not None:
            # The constraint clips by the sign of the advantage, and the teacher's advantage may
            # have another sign than the reward's. So each has its own surrogate.
            teacher_objective_L, teacher_clipped_L = self._surrogate(
                replace(t, advantages_L=teacher_advantages_L), old_L, token_ratio_L
            )
            objective_L, clipped_L = (
                objective_L + self.teacher_coef * teacher_objective_L,
                clipped_L | teacher_clipped_L,
            )
        method = IMPORTANCE_METHODS[self.importance].with_bounds(self.importance_low, self.importance_high)
        weight_L, masked_L = importance_weights(old_L - t.behavior_logprobs_L, t.completion_index_L, method)
        if self.off_policy_mask is not None:
            drift_L = t.behavior_logprobs_L - t.logprobs_L
            dropped_L = off_policy_labels(drift_L, t.advantages_L, t.completion_index_L, self.off_policy_mask)
            weight_L, masked_L = weight_L.masked_fill(dropped_L, 0.0), masked_L | dropped_L
        # The weight multiplies only the objective. The terms below apply to every label, including
        # masked labels.
        loss_L = -weight_L * objective_L
        metrics = {
            "clip_fraction": clipped_L.float(),
            "masked_fraction": masked_L.float(),
            "approx_kl": kl_k3(old_L, t.logprobs_L.detach()),
            "ratio_max": token_ratio_L.detach(),
            "entropy": t.entropy_L.detach(),
        }
        if teacher_advantages_L is not None and t.teacher_logprobs_L is not None:
            metrics["kl_teacher"] = -teacher_advantages_L
            metrics["teacher_surprise"] = (t.teacher_logprobs_L < math.log(SURPRISE_PROBABILITY)).float()
        entropy_coef = self.entropy_coef
        if self.entropy_target is not None:
            entropy_coef = self.adaptive_state["applied_entropy_coef"]
            metrics["entropy_coef"] = t.entropy_L.new_full(t.entropy_L.shape, entropy_coef)
        if entropy_coef:
            loss_L = loss_L - entropy_coef * t.entropy_L
        if self.old_kl_coef:
            loss_L = loss_L + self.old_kl_coef * kl_penalty(self.kl, t.logprobs_L, old_L, token_ratio_L)
        if self.kl_coef:
            if t.ref_logprobs_L is None:
                raise UsageError(f"loss.kl_coef={self.kl_coef} needs Tokens.ref_logprobs_L, but they are None")
            kl_L = kl_penalty(self.kl, t.logprobs_L, t.ref_logprobs_L, token_ratio_L)
            loss_L = loss_L + self.kl_coef * kl_L
            metrics["kl_ref"] = kl_L.detach()
        return loss_L, metrics

    def _teacher_gap(self, t: Tokens, old_L: Tensor) -> Tensor | None:
        """Returns log p_teacher - log pi_old, [L], without gradient; None without a teacher."""
        if not self.teacher_coef:
            return None
        if t.teacher_logprobs_L is None:
            raise UsageError(
                f"loss.teacher_coef={self.teacher_coef} needs Tokens.teacher_logprobs_L, but they are None"
            )
        return t.teacher_logprobs_L - old_L.detach()

    def _surrogate(self, t: Tokens, old_L: Tensor, token_ratio_L: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (objective_L, clipped_L) of the constraint at the level of the ratio."""
        log_ratio_L = t.logprobs_L - old_L
        # GMPO clips per token and then takes the mean, so it needs the constraint's interval, not
        # its formula.
        if self.level == "geometric":
            constraint = self._constraint
            assert isinstance(constraint, IntervalConstraint)  # only these support this level
            return _geometric_objective(log_ratio_L, t.advantages_L, *constraint.ratio_bounds(), t.completion_index_L)
        if self.level == "sequence":
            return self._constraint(t, bounded_exp(sample_means(log_ratio_L, t.completion_index_L)), old_L)
        return self._constraint(t, token_ratio_L, old_L)


def _geometric_objective(
    log_ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, completion_index_L: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (objective_L, clipped_L) of GMPO (arXiv 2507.20673, eq. 4).

    The objective is exp(mean_t sgn(A) min(sgn(A) log r_t, sgn(A) clip(log r_t))) A.
    """
    low, high = -float("inf") if lower <= 0 else math.log(lower), math.log(upper)
    sign_L = advantages_L.sign()
    log_ratio_L = log_ratio_L.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Apply `clip` to logarithms, with log r for r and sgn(A) for A.
    kept_L, clipped_L = clip(log_ratio_L, sign_L, low, high)
    return sample_means(sign_L * kept_L, completion_index_L).exp() * advantages_L, clipped_L


def _require_choice(name: str, value: Any, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        near = closest_match(str(value), known)
        fix = f". Fix: set loss.{name}={near}" if near else ""
        raise UsageError(f"loss.{name}={value!r}: unknown value; expected one of {', '.join(known)}{fix}")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"loss.{name}={value!r}: expected a number")


@dataclass(frozen=True, slots=True)
class NLLLoss:
    """-A log pi: the negative log-likelihood of supervised samples, whose advantage is 1."""

    needs_proximal: ClassVar[bool] = False

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -t.advantages_L * t.logprobs_L, {"entropy": t.entropy_L.detach(), "nll": -t.logprobs_L.detach()}
