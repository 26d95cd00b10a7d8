"""Defines the constraints on the ratio r = pi / pi_old. `CONSTRAINTS` lists them by name.

A constraint stops the gradient of the ratio outside a trust region. All constraints fit the objective J = E[min(r A,
clip_C(r) A)] (arXiv 2602.05494). A test C decides for every label whether the new policy is close
enough to the old policy. Outside, a constant replaces the ratio, which removes the gradient, unless
the minimum selects r A, whose gradient moves r back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchtune_ext.objective.clipping import clip, kl3_bounds, none_clipped, top_k_kl, trust_region
from torchtune_ext.objective.tokens import Tokens
from torchtune_ext.run.errors import UsageError


@dataclass(frozen=True)
class Constraint:
    """The interface between `PolicyLoss` and a constraint. A subclass must implement `__call__`.

    A subclass is a frozen dataclass. Its fields are its options, numbers with defaults, which its
    docstring describes. The run header shows its `str()`.
    """

    # The supported levels of the ratio (ratios.py).
    levels: ClassVar[tuple[str, ...]] = ("token",)

    def check(self, level: str, old: str) -> None:
        """Checks the options, and other settings of the loss.

        Args:
            level: level of the ratio, one of `levels`.
            old: source of pi_old, one of `OLD_POLICIES` in ratios.py.

        Raises:
            UsageError: an option is out of range, or the constraint does not support `level` or
                `old`.
        """

    def describe(self, level: str) -> str:
        """Returns the constraint and its level ("per token") for the run header."""
        return f"{self} {level}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the constrained objective.

        Args:
            t: the L labels.
            ratio_L: r at the level of the loss, with gradient.
            old_L: log pi_old in nats.

        Returns:
            objective_L, which is maximized, and clipped_L (bool), which marks the labels without a
            gradient.
        """
        raise NotImplementedError


class IntervalConstraint(Constraint):
    """Constrains the ratio to an interval: lower <= r <= upper.

    Subclasses have the option `dual_clip`.
    """

    # The geometric level clips log r, which requires an interval.
    levels = ("token", "sequence", "geometric")
    dual_clip: float | None

    def ratio_bounds(self) -> tuple[float, float]:
        """Returns the lowest and the highest ratio of the interval."""
        raise NotImplementedError

    def check(self, level: str, old: str) -> None:
        if self.dual_clip is None:
            return
        if level == "geometric":
            raise UsageError(
                f"loss.dual_clip={self.dual_clip} does not support loss.level='geometric'; set dual_clip=null or another level"
            )
        # A lower dual clip would also clip ratios inside the interval.
        _, upper = self.ratio_bounds()
        must = f"must lie above the upper clip bound {upper:.4g}; often 3 or 4"
        _require(self.dual_clip > upper, "dual_clip", self.dual_clip, must)

    def describe(self, level: str) -> str:
        dual = "" if self.dual_clip is None else f", dual clip {self.dual_clip:g}"
        return f"{self} {level}{dual}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        return clip(ratio_L, t.advantages_L, *self.ratio_bounds(), self.dual_clip)


@dataclass(frozen=True)
class Clip(IntervalConstraint):
    """1 - clip_low <= r <= 1 + clip_high.

    PPO (arXiv 1707.06347); with two different numbers: DAPO (arXiv 2503.14476).

    Args:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: upper bound of the ratio where the advantage is negative; null: no bound.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def check(self, level: str, old: str) -> None:
        _check_clips(self.clip_low, self.clip_high)
        super().check(level, old)

    def ratio_bounds(self) -> tuple[float, float]:
        return 1.0 - self.clip_low, 1.0 + self.clip_high

    def __str__(self) -> str:
        return f"clip {self.clip_low:.3g}/{self.clip_high:.3g}"


@dataclass(frozen=True)
class KL3(IntervalConstraint):
    """r - 1 - log r <= delta (ATR-GRPO, arXiv 2602.05494), an interval of r (`kl3_bounds`).

    Args:
        delta: maximum KL3 of a token, in nats.
        dual_clip: upper bound of the ratio where the advantage is negative; null: no bound.
    """

    delta: float = 0.02
    dual_clip: float | None = None

    def check(self, level: str, old: str) -> None:
        _require(self.delta > 0.0, "delta", self.delta, "must be positive; kl3 uses 0.02")
        super().check(level, old)

    def ratio_bounds(self) -> tuple[float, float]:
        return kl3_bounds(self.delta)

    def __str__(self) -> str:
        lower, upper = self.ratio_bounds()
        return f"KL3 <= {self.delta:g} (clip {1 - lower:.3f}/{upper - 1:.3f})"


@dataclass(frozen=True)
class TopKL(Constraint):
    """KL(pi_old || pi) <= delta at every label (PPO with a trust region, arXiv 1903.07940).

    The KL is over the old policy's `top_k` likeliest tokens and one bucket for all other tokens.

    Args:
        delta: maximum KL of a token, in nats.
        top_k: number of tokens whose log-probs are stored at every label; required, often 16.
    """

    delta: float = 0.02
    # Storing K log-probs of every label costs memory, so the user must choose K.
    top_k: int | None = None

    def check(self, level: str, old: str) -> None:
        if old != "trainer":
            raise UsageError(
                f"loss.old={old!r} does not support constraint='kl', which needs the proximal policy's likeliest tokens; "
                "use old=trainer"
            )
        _require(self.delta > 0.0, "delta", self.delta, "must be positive; kl uses 0.02")
        if not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise UsageError(
                f"loss.top_k={self.top_k}: constraint='kl' needs a whole number of tokens, 1 or more, often 16"
            )

    def __str__(self) -> str:
        return f"KL <= {self.delta:g} over the top {self.top_k}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio_L = t.logprobs_L - old_L
        if t.top_LK is not None:
            assert t.proximal_top_LK is not None  # the learner sets both or neither
            kl_L = top_k_kl(t.proximal_top_LK, t.top_LK)
        elif log_ratio_L.count_nonzero():
            raise UsageError("loss.constraint='kl' needs the proximal policy's top-k log-probs, but none were stored")
        else:
            # The current policy equals the old policy, so the KL is 0, and the learner skipped both
            # passes over the output layer.
            kl_L = torch.zeros_like(log_ratio_L)
        return trust_region(ratio_L, t.advantages_L, kl_L <= self.delta)


@dataclass(frozen=True)
class TotalVariation(Constraint):
    """|p - p_old| <= delta for the probability of the sampled token (DPPO, arXiv 2602.04879).

    Args:
        delta: maximum difference of the probabilities of a token.
    """

    delta: float = 0.2

    def check(self, level: str, old: str) -> None:
        _require(self.delta > 0.0, "delta", self.delta, "must be positive; tv uses 0.2")
        _require(self.delta < 1.0, "delta", self.delta, "never clips: probabilities differ by at most 1; DPPO uses 0.2")

    def __str__(self) -> str:
        return f"TV <= {self.delta:g}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        change_L = (t.logprobs_L.exp() - old_L.exp()).abs()
        return trust_region(ratio_L, t.advantages_L, change_L <= self.delta)


@dataclass(frozen=True)
class Cispo(Constraint):
    """sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi (CISPO, arXiv 2506.13585).

    sg stops the gradient.

    Args:
        clip_low: the weight is at least 1 - clip_low.
        clip_high: the weight is at most 1 + clip_high.
    """

    levels = ("token", "sequence")
    clip_low: float = 1.0
    clip_high: float = 4.0

    def check(self, level: str, old: str) -> None:
        _check_clips(self.clip_low, self.clip_high)

    def __str__(self) -> str:
        return f"CISPO weight in [{1 - self.clip_low:g}, {1 + self.clip_high:g}]"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = 1.0 - self.clip_low, 1.0 + self.clip_high
        weight_L = ratio_L.detach().clamp(lower, upper)
        # Every label keeps a gradient. `clipped_L` marks the labels with a clipped weight instead.
        return weight_L * t.advantages_L * t.logprobs_L, (ratio_L < lower) | (ratio_L > upper)


@dataclass(frozen=True)
class Sapo(Constraint):
    """(4 / tau) sigmoid(tau (r - 1)) A; the sign of A selects tau (SAPO, arXiv 2511.20347).

    Args:
        tau_positive: decay rate of the slope where the advantage is positive.
        tau_negative: decay rate of the slope where the advantage is negative.
    """

    levels = ("token", "sequence")
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def check(self, level: str, old: str) -> None:
        for field in fields(self):
            tau = getattr(self, field.name)
            _require(tau > 0.0, field.name, tau, "must be positive; SAPO uses 1.0 and 1.05")

    def __str__(self) -> str:
        return f"soft gate {self.tau_positive:g}/{self.tau_negative:g}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        positive, negative = ratio_L.new_tensor(self.tau_positive), ratio_L.new_tensor(self.tau_negative)
        tau_L = torch.where(t.advantages_L > 0, positive, negative)
        # The factor 4 / tau makes the slope 1 at r = 1. On both sides the slope falls smoothly to
        # 0, so no label is clipped.
        gate_L = 4.0 / tau_L * torch.sigmoid(tau_L * (ratio_L - 1.0))
        return gate_L * t.advantages_L, none_clipped(ratio_L)


@dataclass(frozen=True)
class Spo(Constraint):
    """r A - |A| / (2 epsilon) (r - 1)^2 (Simple Policy Optimization, arXiv 2401.16025).

    Args:
        epsilon: distance of the objective's maximum from r = 1.
    """

    epsilon: float = 0.2

    def check(self, level: str, old: str) -> None:
        _require(self.epsilon > 0.0, "epsilon", self.epsilon, "must be positive; SPO uses 0.2")

    def __str__(self) -> str:
        return f"SPO {self.epsilon:g}"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        # The maximum lies at r = 1 + sgn(A) epsilon, the bound of PPO's clip. Beyond it, the
        # gradient moves r back instead of vanishing, so no label is clipped.
        penalty_L = t.advantages_L.abs() / (2.0 * self.epsilon) * (ratio_L - 1.0).square()
        return ratio_L * t.advantages_L - penalty_L, none_clipped(ratio_L)


@dataclass(frozen=True)
class Unconstrained(Constraint):
    """r A: the importance-weighted policy gradient, for example for RLOO (arXiv 2402.14740)."""

    levels = ("token", "sequence")

    def __str__(self) -> str:
        return "no constraint"

    def __call__(self, t: Tokens, ratio_L: Tensor, old_L: Tensor) -> tuple[Tensor, Tensor]:
        return ratio_L * t.advantages_L, none_clipped(ratio_L)


# To add a constraint, write its class and add it here. The key is the value of `loss.constraint`,
# and the fields of the class become keys of `loss`.
CONSTRAINTS: dict[str, type[Constraint]] = {
    "clip": Clip,
    "kl3": KL3,
    "kl": TopKL,
    "tv": TotalVariation,
    "cispo": Cispo,
    "sapo": Sapo,
    "spo": Spo,
    "none": Unconstrained,
}

# `PolicyLoss` inherits a field for every option in the table, so that config keys are flat and a
# misspelled key is an error. None means that the option is not set.
_TYPES: dict[str, Any] = {field.name: field.type for kind in CONSTRAINTS.values() for field in fields(kind)}
OPTION_TYPES = {name: kind | None for name, kind in _TYPES.items()}
ConstraintOptions = make_dataclass(
    "Options", [(name, kind, None) for name, kind in OPTION_TYPES.items()], frozen=True, kw_only=True
)


def make_constraint(name: str, settings: Mapping[str, Any]) -> Constraint:
    """Returns the constraint `name` with its options.

    Args:
        name: a key of `CONSTRAINTS`.
        settings: options of all constraints by name; None keeps a default.

    Raises:
        UsageError: an option of another constraint is set.
    """
    options = {other: [field.name for field in fields(kind)] for other, kind in CONSTRAINTS.items()}
    own = options[name]
    # A dict keeps the order of the table for the message below.
    every = dict.fromkeys(option for names in options.values() for option in names)
    foreign_options = [option for option in every if option not in own and settings.get(option) is not None]
    if foreign_options:
        keys = ", ".join(f"loss.{option}={settings[option]}" for option in foreign_options)
        verb, pronoun = ("contradict", "them") if foreign_options[1:] else ("contradicts", "it")
        others = " or ".join(repr(other) for other, names in options.items() if foreign_options[0] in names)
        raise UsageError(
            f"{keys} {verb} loss.constraint={name!r}, whose options are {', '.join(own) or 'none'}; set {pronoun} to null "
            f"(preset may have set {pronoun}), or use constraint={others}"
        )
    return CONSTRAINTS[name](**{option: settings[option] for option in own if settings.get(option) is not None})


def _require(condition: bool, option: str, value: float, requirement: str) -> None:
    if not condition:
        raise UsageError(f"loss.{option}={value} {requirement}")


def _check_clips(low: float, high: float) -> None:
    _require(0.0 < low <= 1.0, "clip_low", low, "must lie in (0, 1]; GRPO uses 0.2")
    _require(high > 0.0, "clip_high", high, "must be positive; GRPO uses 0.2, DAPO 0.28")
