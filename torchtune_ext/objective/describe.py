"""A policy objective in words, as short as papers write them."""

from collections.abc import Mapping
from typing import Any

from torchtune_ext.objective.clipping import kl3_bounds
from torchtune_ext.objective.importance import METHODS

LEVELS = {"token": "per token", "sequence": "per sequence", "geometric": "in the geometric mean"}
NAMES = {"tis": "TIS", "mis": "MIS", "icepop": "IcePop", "sequence_tis": "sequence TIS", "sequence_mis": "sequence MIS",
         "geometric_mask": "geometric mask", "full": "importance weight"}  # fmt: skip


def describe(settings: Mapping[str, Any]) -> str:
    """For instance "clip 0.2/0.28 per token, TIS <= 2, entropy 0.03".

    Args:
        settings: the fields of a `PolicyLoss`.
    """
    parts = [f"{_constraint(settings)} {LEVELS[settings['level']]}"]
    if settings.get("dual_clip") is not None:
        parts.append(f"dual clip {settings['dual_clip']:g}")
    if settings["old"] == "sampler":
        parts.append("ratio to the sampler")
    if settings["importance"] != "none":
        parts.append(_importance(settings))
    for name, word in (("kl_coef", "reference"), ("old_kl_coef", "old policy")):
        if settings[name]:
            parts.append(f"{settings[name]:g} KL to the {word} ({settings['kl']})")
    if settings["entropy_coef"]:
        parts.append(f"entropy {settings['entropy_coef']:g}")
    return ", ".join(parts)


def _constraint(s: Mapping[str, Any]) -> str:
    match s["constraint"]:
        case "clip":
            return f"clip {s['clip_low']:.3g}/{s['clip_high']:.3g}"
        case "kl3":
            low, high = kl3_bounds(s["delta"])
            return f"KL3 <= {s['delta']:g} (clip {1 - low:.3f}/{high - 1:.3f})"
        case "kl":
            return f"KL <= {s['delta']:g} over the top {s['top_k']}"
        case "tv":
            return f"TV <= {s['delta']:g}"
        case "cispo":
            return f"CISPO weight in [{1 - s['clip_low']:g}, {1 + s['clip_high']:g}]"
        case "sapo":
            return f"soft gate {s['tau_positive']:g}/{s['tau_negative']:g}"
    return "no constraint"


def _importance(s: Mapping[str, Any]) -> str:
    method, name = METHODS[s["importance"]].within(s["importance_low"], s["importance_high"]), NAMES[s["importance"]]
    if method.low is not None:
        return f"{name} in [{method.low:g}, {method.high:g}]"
    return name if method.high is None else f"{name} <= {method.high:g}"
