"""Policy objectives: pure functions of flat tensors, with one value per label.

The learner multiplies a loss by the labels' weights (packing makes them, and they sum to one over an update) and sums. So
an objective knows nothing of rows, padding, ranks or accumulation. A loss of your own is a class with `__call__`::

    class MyLoss:
        def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
            ratio_L = (t.logprobs_L - t.old_logprobs_L).exp()
            return -ratio_L * t.advantages_L, {"ratio_max": ratio_L.detach()}

Its attributes, which `needs_of` reads, say what else it needs: `needs_reference = True` for log-probs under a
reference policy, `needs_teacher = True` for those under a teacher, `top_k = 16` for those of the proximal policy's 16
likeliest tokens, and `needs_all_groups = True` for a term that acts where the advantage is 0 (a KL penalty, an entropy bonus).
Without the last one, groups without signal, whose advantages are 0, are not trained on. `needs_proximal = False` spares the
pass for `old_logprobs_L`, which is None then.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from torchtune_ext.objective.clipping import clip
from torchtune_ext.objective.constraints import CONSTRAINTS, OPTIONS, Constraint, Options, make_constraint
from torchtune_ext.objective.importance import METHODS, check_importance, importance_weights
from torchtune_ext.objective.kl import KLS, kl_k3, kl_penalty
from torchtune_ext.objective.ratios import LEVELS, MAX_LOG, OLDS, bounded_exp, old_logprobs, sample_means
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.run.errors import Mistake, nearest

Loss = Callable[[Tokens], tuple[Tensor, dict[str, Tensor]]]

# Each of these settings is one of a few words.
WORDS = {
    "level": LEVELS,
    "constraint": CONSTRAINTS,
    "old": OLDS,
    "importance": METHODS,
    "kl": KLS,
}


SURPRISE = 0.01  # a token that the teacher holds for less likely counts in `teacher_surprise`


@dataclass(frozen=True, slots=True)
class Needs:
    """What a loss needs beside the log-probs of the policy that is trained."""

    # The loss reads log-probs under the proximal policy, of the sampled tokens or of the likeliest ones.
    proximal: bool
    # The loss reads log-probs under a reference policy.
    reference: bool
    # The loss reads log-probs under a teacher.
    teacher: bool
    # The loss acts on groups without signal, too.
    all_groups: bool
    # The number of the proximal policy's likeliest tokens at every label whose log-probs the loss reads.
    top_k: int


def needs_of(loss: Loss) -> Needs:
    """What a loss needs, by its attributes. One of the user's own may have none: it needs the proximal policy's log-probs."""
    return Needs(
        proximal=bool(getattr(loss, "needs_proximal", True) or getattr(loss, "top_k", None)),
        reference=bool(getattr(loss, "needs_reference", False)),
        teacher=bool(getattr(loss, "needs_teacher", False)),
        all_groups=bool(getattr(loss, "needs_all_groups", False)),
        top_k=getattr(loss, "top_k", None) or 0,
    )


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Options):
    """The frame of all clipped policy objectives: a ratio, a constraint, an importance weight, KL terms, an entropy bonus.

    loss = -w (reward_coef J_C(r, A) + teacher_coef J_C(r, log p_teacher - log pi_old))
           + kl_coef KL(pi, ref) + old_kl_coef KL(pi, old) - entropy_coef H

    with r = pi / pi_old at a level (`ratios.py`), J_C the constrained objective (`constraints.py`), w = pi_old / pi_sampler
    (`importance.py`) and KL an estimator (`kl.py`). Published methods are settings of it: configs/presets/.

    Beside the fields below, each option of each constraint is a field: `clip_low`, `delta`, `top_k`, ... One that is not given
    has the default of the constraint; one that belongs to other constraints is an error.

    Raises:
        ValueError: an unknown word, an option that does not belong to the others, or a value outside its range.
    """

    # The ratio has a level: "token", "sequence" (GSPO) or "geometric" (GMPO).
    level: str = "token"
    # The constraint is a name in the table of constraints.py: "clip", "kl3", ...; each has options of its own.
    constraint: str = "clip"
    # The log-probs of pi_old are those of the proximal policy ("trainer"), those that the sampler reported ("sampler"), or
    # between the sampler's and those of the policy itself ("interpolated"), which spares a pass; see `ratios.py`.
    old: str = "trainer"
    # A method of importance.py weighs what differs between pi_old and the sampler: "full", "tis", "mis", ...; "none" does not.
    importance: str = "none"
    # This number takes the place of the method's own lower bound.
    importance_low: float | None = None
    # This number takes the place of the method's own upper bound.
    importance_high: float | None = None
    # This factor multiplies the objective of the rewards' advantages.
    reward_coef: float = 1.0
    # This factor multiplies that of log p_teacher - log pi_old at every token. Where it is 0, no teacher is asked.
    teacher_coef: float = 0.0
    # This factor multiplies the KL to the reference. Where it is 0, no reference is kept.
    kl_coef: float = 0.0
    # This factor multiplies the KL to the old policy.
    old_kl_coef: float = 0.0
    # Both KL terms use the same estimator: "k1", "k2", "k3" or "k3_unbiased".
    kl: str = "k3"
    # This factor multiplies the entropy, which is in nats.
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        for name, known in WORDS.items():
            _require_word(name, getattr(self, name), known)
        possible = [name for name, kind in CONSTRAINTS.items() if self.level in kind.levels]
        if self.constraint not in possible:
            raise Mistake(
                f"loss.level={self.level!r} has no constraint={self.constraint!r}; use one of {', '.join(possible)}"
            )
        constraint = self._constraint
        for name in (*OPTIONS, "importance_low", "importance_high"):
            if getattr(self, name) is not None:
                _require_number(name, getattr(self, name))
        for name in ("reward_coef", "teacher_coef", "kl_coef", "old_kl_coef", "entropy_coef"):
            _require_number(name, getattr(self, name))
        constraint.check(self.level, self.old)
        # The defaults of the constraint become the loss's own, so that losses are read and compared by their real values.
        for option in fields(constraint):
            object.__setattr__(self, option.name, getattr(constraint, option.name))
        check_importance(self.importance, self.importance_low, self.importance_high, self.level, self.old)
        for name in ("reward_coef", "teacher_coef", "kl_coef", "old_kl_coef"):
            if not getattr(self, name) >= 0.0:
                term = "KL term" if name.endswith("kl_coef") else "term"
                raise Mistake(f"loss.{name}={getattr(self, name)} must not be negative; 0 turns the {term} off")

    @cached_property
    def _constraint(self) -> Constraint:
        """The constraint with its options. It is no field, so that losses are compared, and built, only by their settings."""
        return make_constraint(self.constraint, vars(self))

    def __str__(self) -> str:
        """The objective as short as papers write it, for instance "clip 0.2/0.28 per token, TIS <= 2, entropy 0.03"."""
        parts = [self._constraint.words(LEVELS[self.level])]
        if self.old != "trainer":
            parts.append({"sampler": "ratio to the sampler", "interpolated": "old policy interpolated"}[self.old])
        if self.importance != "none":
            parts.append(str(METHODS[self.importance].within(self.importance_low, self.importance_high)))
        for coef, word in ((self.kl_coef, "reference"), (self.old_kl_coef, "old policy")):
            if coef:
                parts.append(f"{coef:g} KL to the {word} ({self.kl})")
        if self.teacher_coef:
            parts.append(f"{self.teacher_coef:g} teacher")
        if self.reward_coef != 1.0:
            parts.append(f"{self.reward_coef:g} rewards")
        if self.entropy_coef:
            parts.append(f"entropy {self.entropy_coef:g}")
        return ", ".join(parts)

    @property
    def needs_proximal(self) -> bool:
        """Where the old policy is not the proximal one, nothing reads the log-probs of the latter."""
        return self.old == "trainer"

    @property
    def needs_reference(self) -> bool:
        """The KL to the reference is the only term that reads its log-probs."""
        return bool(self.kl_coef)

    @property
    def needs_teacher(self) -> bool:
        """Whether a second model has to say what it thinks of every sampled token."""
        return bool(self.teacher_coef)

    @property
    def needs_all_groups(self) -> bool:
        """KL, entropy and a teacher act on every sample, also where all rewards of its group are equal."""
        return any((self.teacher_coef, self.kl_coef, self.old_kl_coef, self.entropy_coef))

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics per label, all [L]. Metrics named `*_max` are reduced by maximum, others by mean over labels.

        Raises:
            ValueError: a term needs log-probs that `t` does not hold.
        """
        old_L = old_logprobs(self.old, t)
        token_ratio_L = bounded_exp(t.logprobs_L - old_L)
        objective_L, cut_L = self._constrained(t, old_L, token_ratio_L)
        objective_L = self.reward_coef * objective_L
        gap_L = self._teacher_gap(t, old_L)
        if gap_L is not None:
            # A surrogate of its own: the constraint cuts each advantage by its own sign.
            taught_L, taught_cut_L = self._constrained(replace(t, advantages_L=gap_L), old_L, token_ratio_L)
            objective_L, cut_L = objective_L + self.teacher_coef * taught_L, cut_L | taught_cut_L
        method = METHODS[self.importance].within(self.importance_low, self.importance_high)
        weight_L, masked_L = importance_weights(old_L - t.behavior_logprobs_L, t.samples_L, method)
        loss_L = -weight_L * objective_L
        metrics = {
            "clip_fraction": cut_L.float(),
            "masked_fraction": masked_L.float(),
            "approx_kl": kl_k3(old_L, t.logprobs_L.detach()),
            "ratio_max": token_ratio_L.detach(),
            "entropy": t.entropy_L.detach(),
        }
        if gap_L is not None:
            metrics["kl_teacher"] = -gap_L
            metrics["teacher_surprise"] = (t.teacher_logprobs_L < math.log(SURPRISE)).float()
        if self.entropy_coef:
            loss_L = loss_L - self.entropy_coef * t.entropy_L
        if self.old_kl_coef:
            loss_L = loss_L + self.old_kl_coef * kl_penalty(self.kl, t.logprobs_L, old_L, token_ratio_L)
        if self.kl_coef:
            if t.ref_logprobs_L is None:
                raise Mistake(f"loss.kl_coef={self.kl_coef} needs reference log-probs, but none were computed")
            kl_L = kl_penalty(self.kl, t.logprobs_L, t.ref_logprobs_L, token_ratio_L)
            loss_L = loss_L + self.kl_coef * kl_L
            metrics["kl_ref"] = kl_L.detach()
        return loss_L, metrics

    def _teacher_gap(self, t: Tokens, old_L: Tensor) -> Tensor | None:
        """log p_teacher - log pi_old, without gradient; None without a teacher."""
        if not self.teacher_coef:
            return None
        if t.teacher_logprobs_L is None:
            raise Mistake(f"loss.teacher_coef={self.teacher_coef} needs a teacher's log-probs, but none were computed")
        return t.teacher_logprobs_L - old_L.detach()

    def _constrained(self, t: Tokens, old_L: Tensor, token_ratio_L: Tensor) -> tuple[Tensor, Tensor]:
        """(objective_L, cut_L) of the constraint at the level of the ratio."""
        log_ratio_L = t.logprobs_L - old_L
        if self.level == "geometric":
            return _geometric(log_ratio_L, t.advantages_L, *self._constraint.interval(), t.samples_L)
        if self.level == "sequence":
            return self._constraint(t, bounded_exp(sample_means(log_ratio_L, t.samples_L)), old_L)
        return self._constraint(t, token_ratio_L, old_L)


def _geometric(
    log_ratio_L: Tensor, advantages_L: Tensor, lower: float, upper: float, samples_L: Tensor
) -> tuple[Tensor, Tensor]:
    """exp(mean_t sgn(A) min(sgn(A) log r_t, sgn(A) clip(log r_t))) A (GMPO, arXiv 2507.20673, eq. 4)."""
    low, high = -float("inf") if lower <= 0 else math.log(lower), math.log(upper)
    sign_L = advantages_L.sign()
    log_ratio_L = log_ratio_L.clamp(-MAX_LOG, MAX_LOG)
    kept_L, cut_L = clip(log_ratio_L, sign_L, low, high)
    return sample_means(sign_L * kept_L, samples_L).exp() * advantages_L, cut_L


def _require_word(name: str, value: Any, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        near = nearest(str(value), known)
        hint = f"did you mean {near!r}?" if near else f"use one of {', '.join(known)}"
        raise Mistake(f"loss.{name}={value!r} is unknown; {hint}")


def _require_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Mistake(f"loss.{name}={value!r} must be a number")


@dataclass(frozen=True, slots=True)
class NLLLoss:
    """-A log pi: the negative log-likelihood of supervised samples, which carry advantage 1."""

    needs_proximal: ClassVar[bool] = False

    def __call__(self, t: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -t.advantages_L * t.logprobs_L, {"entropy": t.entropy_L.detach(), "nll": -t.logprobs_L.detach()}
