"""Writes what a run says before it begins: what it trains, its objective, and settings that do not work together."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from torchtune_ext.advantages import AdvantageConfig
from torchtune_ext.buffer import Ledger
from torchtune_ext.evaluation import EvaluationConfig
from torchtune_ext.host.config import build, has_component, instantiate, load_preset
from torchtune_ext.replay import Replay
from torchtune_ext.training.precision import Precision
from torchtune_ext.training.state import CheckpointConfig
from torchtune_ext.training.trained import Adapters, AllWeights

AGGREGATIONS = {"token": "token mean", "sequence": "sequence mean", "constant": "sum over a constant"}


def opening(
    cfg: DictConfig,
    loss: Any,
    advantage: AdvantageConfig,
    checkpoints: CheckpointConfig,
    evaluation: EvaluationConfig,
    trained: AllWeights | Adapters,
    precision: Precision,
    replay: Replay | None = None,
) -> str:
    """Returns the lines that a GRPO recipe prints first.

    Args:
        cfg: settings of the recipe, as `load_config` returned them.
        loss, advantage, checkpoints, evaluation, trained, precision, replay: what was built from these settings.
    """
    lines = [f"trains: {trained}; {precision}", objective_line(cfg, loss, advantage)]
    ledger = Ledger(cfg.prompts_per_step, cfg.max_steps, cfg.staleness, cfg.depth)
    if replay:
        lines.append(str(replay))
    elif ledger.staleness:
        lines.append(f"samples ahead: staleness {ledger.staleness}, depth {ledger.depth}")
    evaluated = has_component(cfg.evaluation.get("task")) and not replay
    if evaluated and checkpoints.every < cfg.max_steps and checkpoints.every % evaluation.every:
        lines.append(
            f"best checkpoint: only one that is written when the run evaluates has an accuracy; with checkpoints.every="
            f"{checkpoints.every} and evaluation.every={evaluation.every} that is each "
            f"{math.lcm(checkpoints.every, evaluation.every)} steps. Let checkpoints.every be a multiple of evaluation.every"
        )
    return "\n".join(lines)


def objective_line(cfg: DictConfig, loss: Any, advantage: AdvantageConfig) -> str:
    """Returns the line that describes the objective.

    For example: "objective: clip 0.2/0.28 per token, TIS <= 2, advantage mean/group_std, token mean; preset
        clip_higher,
    overridden here: aggregation".
    """
    parts = [_text(loss), str(advantage), AGGREGATIONS.get(cfg.aggregation, cfg.aggregation)]
    if cfg.refill_rounds:
        parts.append(f"up to {cfg.refill_rounds} refills")
    line = f"objective: {', '.join(parts)}; {'no preset' if cfg.preset is None else f'preset {cfg.preset}'}"
    changed = overridden(cfg, loss, advantage)
    return f"{line}, overridden here: {', '.join(changed)}" if changed else line


def overridden(cfg: DictConfig, loss: Any, advantage: AdvantageConfig) -> list[str]:
    """Returns the keys of the objective whose values differ from those of the preset."""
    if cfg.preset is None:
        return []
    preset = load_preset(cfg.preset, list(cfg))
    found = _changed("loss", lambda: instantiate(preset.loss), loss) if "loss" in preset else []
    found += _changed("advantage", lambda: build(AdvantageConfig, preset.get("advantage"), "advantage"), advantage)
    return found + [key for key in ("aggregation", "refill_rounds") if key in preset and preset[key] != cfg[key]]


def _changed(node: str, build_theirs: Callable[[], Any], ours: Any) -> list[str]:
    try:
        theirs = build_theirs()
    except (ValueError, OmegaConfBaseException):
        # The node of the preset cannot be built without the settings that the user added to it.
        return [node]
    if type(theirs) is not type(ours):
        return [node]
    names = [field.name for field in fields(theirs)] if is_dataclass(theirs) else []
    return [f"{node}.{name}" for name in names if getattr(theirs, name) != getattr(ours, name)]


def _text(loss: Any) -> str:
    """Returns the text of a loss. A loss of the user may have none; then it is the name of the class or function."""
    return getattr(loss, "__name__", type(loss).__name__) if type(loss).__str__ is object.__str__ else str(loss)
