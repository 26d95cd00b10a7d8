"""What the settings of a policy objective may be, and which of them exclude each other."""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from torchtune_ext.objective.clipping import kl3_bounds
from torchtune_ext.objective.importance import METHODS
from torchtune_ext.objective.kl import KLS
from torchtune_ext.objective.ratios import LEVELS

# constraint -> its options with their defaults
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "kl3": {"delta": 0.02, "dual_clip": None},
    "kl": {"delta": 0.02, "top_k": None},
    "tv": {"delta": 0.2},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "none": {},
}
OPTIONS = tuple(dict.fromkeys(option for options in CONSTRAINTS.values() for option in options))
LEVEL_CONSTRAINTS = {
    "token": tuple(CONSTRAINTS),
    "sequence": ("clip", "kl3", "cispo", "sapo", "none"),
    "geometric": ("clip", "kl3"),
}


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the constraint, with its defaults where a setting is None; all other settings are checked only.

    Raises:
        ValueError: see `PolicyLoss`.
    """
    for name, known in (
        ("level", LEVELS),
        ("constraint", CONSTRAINTS),
        ("old", ("trainer", "sampler")),
        ("importance", METHODS),
        ("kl", KLS),
    ):
        _require_word(name, settings[name], known)
    constraint, level = settings["constraint"], settings["level"]
    if constraint not in LEVEL_CONSTRAINTS[level]:
        raise ValueError(
            f"loss.level={level!r} has no constraint={constraint!r}; use one of {', '.join(LEVEL_CONSTRAINTS[level])}"
        )
    if constraint == "kl" and settings["old"] == "sampler":
        raise ValueError(
            "loss.old='sampler' has no constraint='kl': the sampler's whole distribution is not kept; use old=trainer"
        )
    own = CONSTRAINTS[constraint]
    for option in OPTIONS:
        if settings[option] is not None and option not in own:
            raise ValueError(
                f"loss.{option}={settings[option]} contradicts loss.constraint={constraint!r}, whose options are "
                f"{', '.join(own) or 'none'}; set it to null (it may come from `preset`), or use constraint="
                + " or ".join(repr(name) for name, options in CONSTRAINTS.items() if option in options)
            )
    for name in (*OPTIONS, "importance_low", "importance_high", "kl_coef", "old_kl_coef", "entropy_coef"):
        value = settings[name]
        if value is None and not name.endswith("_coef"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"loss.{name}={value!r} must be a number")
    found = {option: default if settings[option] is None else settings[option] for option, default in own.items()}
    _check_ranges(constraint, level, found)
    _check_importance(settings)
    for name in ("kl_coef", "old_kl_coef"):
        if not settings[name] >= 0.0:
            raise ValueError(f"loss.{name}={settings[name]} must not be negative; 0 turns the KL term off")
    return found


def _require_word(name: str, value: Any, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"loss.{name}={value!r} is unknown; {hint}")


def _check_ranges(constraint: str, level: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name == "clip_low" and not 0.0 < value <= 1.0:
            raise ValueError(f"loss.clip_low={value} must lie in (0, 1]; GRPO uses 0.2")
        if name == "clip_high" and not value > 0.0:
            raise ValueError(f"loss.clip_high={value} must be positive; GRPO uses 0.2, DAPO 0.28")
        if name == "delta" and not value > 0.0:
            raise ValueError(
                f"loss.delta={value} must be positive; {constraint} uses {CONSTRAINTS[constraint]['delta']}"
            )
        if name == "delta" and constraint == "tv" and not value < 1.0:
            raise ValueError(f"loss.delta={value} never cuts: probabilities differ by at most 1; DPPO uses 0.2")
        # `top_k` has no default, since it costs memory.
        if name == "top_k" and not (isinstance(value, int) and value >= 1):
            raise ValueError(
                f"loss.constraint='kl' needs loss.top_k, a whole number of tokens, often 16; it is {value}"
            )
        if name.startswith("tau") and not value > 0.0:
            raise ValueError(f"loss.{name}={value} must be positive; SAPO uses 1.0 and 1.05")
        if name == "dual_clip" and value is not None:
            if level == "geometric":
                raise ValueError(f"loss.dual_clip={value} needs a ratio of its own; loss.level='geometric' has none")
            upper = 1.0 + options["clip_high"] if constraint == "clip" else kl3_bounds(options["delta"])[1]
            if not value > upper:
                raise ValueError(
                    f"loss.dual_clip={value} must lie above the upper clip bound {upper:.4g}; often 3 or 4"
                )


def _check_importance(settings: Mapping[str, Any]) -> None:
    name, level = settings["importance"], settings["level"]
    method = METHODS[name]
    if name != "none" and settings["old"] == "sampler":
        raise ValueError(
            f"loss.importance={name!r} contradicts loss.old='sampler': the ratio to the sampler already corrects for it; use "
            "importance=none, or old=trainer"
        )
    if name != "none" and level != "token" and method.level == "token":
        raise ValueError(
            f"loss.importance={name!r} weighs tokens, but loss.level={level!r} has one ratio for a whole completion; use "
            "sequence_tis, sequence_mis, geometric_mask or none"
        )
    for bound in ("low", "high"):
        value = settings[f"importance_{bound}"]
        if value is None:
            continue
        if getattr(method, bound) is None:
            raise ValueError(f"loss.importance_{bound}={value}: importance={name!r} has no such bound; remove it")
        if bound == "high" and not value > 0.0:
            raise ValueError(f"loss.importance_high={value} must be positive, or no sample would count")
    within = method.within(settings["importance_low"], settings["importance_high"])
    if within.low is not None and not 0.0 <= within.low < within.high:
        raise ValueError(
            f"loss.importance_low={within.low} must lie in [0, importance_high={within.high}): weights between are kept"
        )
