"""Tries the points of a sweep on the recipe that they are for, before anything starts: no engine, no weights, no files.

The words of each run go the way that `tune run` sends them: torchtune's parser, the recipe's `Config`, and the parts that
the sweep's parameters change. So a key, a value or a metric that does not exist is named now, and not by the eighth run.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.run.catalog import folder, recipe_files
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.settings.components import Component, find_component, instantiate, recipe_module
from torchtune_ext.settings.config import as_tune_reads, load_config, values_of
from torchtune_ext.sweep.file import EXAMPLE, Point, Sweep
from torchtune_ext.telemetry.panels import PANELS
from torchtune_ext.training.checks import check_optimizer
from torchtune_ext.training.settings import check_settings

ELSE = "other programs run under `wandb agent`"
ARGUMENTS = "${args_no_hyphens}"  # W&B's word for key=value of each parameter, as the recipes take them
# Settings that the sweep itself gives each of its runs.
OURS = {
    "output_dir": "each run of a sweep has a folder of its own, OUT/RUN here (--out) and <output_dir>/<WANDB_RUN_ID> under "
    "`wandb agent`; with one that is fixed, a run would set the one before it aside",
    "resume_from_checkpoint": "a sweep says itself which of its runs go on (--resume)",
    "dry_run": "nothing would run; try one run by hand with dry_run=True",
}
# The groups of metrics that a warm-up writes.
OF_A_WARM_UP = ("loss", "optim", "pack", "time", "speed", "memory")


def words_of(sweep: Sweep, point: Point, further: Sequence[str]) -> list[str]:
    """Returns the command of one run.

    Args:
        further: settings that the user gave for all runs; they stand behind the command.

    Raises:
        ValueError: there is a macro of W&B's which no recipe can read.
    """
    words = []
    for word in map(str, sweep.command):
        if word.startswith("${") and word != ARGUMENTS:
            raise Mistake(f"command: recipes read no {word}; there is {ARGUMENTS}: {EXAMPLE}; {ELSE}")
        words += [f"{name}={value}" for name, value in point.items()] if word == ARGUMENTS else [word]
    # The `tune` of this environment, whichever comes first on PATH.
    ours = [sys.executable, "-m", "torchtune_ext"] if words[:1] in (["tune"], ["torchtune-ext"]) else words[:1]
    return [*ours, *words[1:], *further]


def target_of(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Reads the command of a run.

    Returns:
        The recipe (its name, its file or its module), the config as the command names it, and the settings, key=value.

    Raises:
        ValueError: the command is none that starts a recipe.
    """
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    programs = {Path(word).name for word in flat[: flat.index("run")]} if "run" in flat else set()
    at = flat.index("--config") if "--config" in flat[:-1] else 0
    if not at or not programs & {"tune", "torchtune-ext", "torchtune_ext"}:
        raise Mistake(f"command: {' '.join(words)}: a sweep runs recipes: {EXAMPLE}; {ELSE}")
    return flat[at - 1], flat[at + 1], flat[at + 2 :]


def check(sweep: Sweep, points: Sequence[Point], further: Sequence[str], out: Path) -> tuple[list[str], Point, bool]:
    """Tries points of a sweep.

    Args:
        points: those that are known before the start.
        further: settings for all runs.
        out: the folder of the sweep.

    Returns:
        Notes for the user; what the config gives the parameters without the sweep, as far as it names them; and whether the
        runs are on a GPU.

    Raises:
        ValueError: the recipe would refuse a point, or never log the metric. The message names the key, the value and the fix.
    """
    words = words_of(sweep, points[0], further)
    recipe, config, settings = target_of(words)
    for word in settings:
        if (key := word.partition("=")[0]) in OURS:
            raise Mistake(f"{key}: take it out of the sweep: {OURS[key]}")
    if re.search(r"[=#:{\[]", str(out)):
        raise Mistake(f"--out {out}: runs cannot be given such a folder in a word; choose a name without = # : {{ [")
    module = recipe_module(recipe, "command: ")
    schema = getattr(module, "Config", None)
    if schema is None or "output_dir" not in {field.name for field in fields(schema)}:
        raise Mistake(f"command: {recipe} is no recipe of this project: it has no class Config with an output_dir")
    usual = values_of(as_tune_reads(config, [], module.__file__), [each.name for each in sweep.parameters])
    ours = recipe in {each.name for each in recipe_files(folder("recipes"), folder("configs"))}
    for point in points:
        _, _, settings = target_of(words_of(sweep, point, further))
        try:
            cfg = load_config(schema, as_tune_reads(config, [*settings, f"output_dir={out / 'run'}"]))
            _build(cfg, {re.split("[.=]", word)[0].lstrip("~") for word in settings}, ours)
        except ValueError as error:
            text = str(error)
            # Most messages name the parameter with its value, or a key that no run has.
            named = text.startswith("unknown key") or any(f"{each.name}=" in text for each in sweep.drawn)
            at = ", ".join(f"{each.name}={point[each.name]}" for each in sweep.drawn)
            raise Mistake(text if named or not at else f"{text} (in the run with {at})") from None
    notes = require_logged(sweep, recipe, ours, cfg)
    on_gpu = getattr(cfg, "device", "auto") != "cpu" and torch.cuda.is_available()
    return notes, {name: value for name, value in usual.items() if value is not None}, on_gpu


def _build(cfg: Any, changed: set[str], ours: bool) -> None:
    """Looks for the components that a sweep changes, and whether its settings go together. Raises ValueError."""
    for key in sorted(changed):
        value = getattr(cfg, key)
        for node in (value, getattr(value, "task", None)):
            if isinstance(node, Component) and node.get("_component_") is not None and not _bare(node):
                find_component(node, **({"params": None} if key == "optimizer" else {}))
    if "optimizer" in changed and not _bare(cfg.optimizer):
        check_optimizer(partial(instantiate, cfg.optimizer))
    if getattr(cfg, "model_dir", None):
        HFModel(cfg.model_dir)
    # A copy of the recipe may ask for something else.
    if ours and hasattr(cfg, "samples_per_prompt") and not _bare(cfg.loss):
        check_settings(cfg, instantiate(cfg.loss))
    if ours and "logging" in changed:
        cfg.logging.require_login()


def _bare(node: Component) -> bool:
    """Tells whether a component has a bare name, which the recipe itself defines. That recipe is not running here."""
    return isinstance(name := node.get("_component_"), str) and "." not in name


def require_logged(sweep: Sweep, recipe: str, ours: bool, cfg: Any) -> list[str]:
    """Looks whether the runs will log the metric. Returns notes about what cannot be known.

    Args:
        recipe: its name; `ours`: whether it is one of this project.
        cfg: the settings of one of the runs.

    Raises:
        ValueError: they will not. The message gives the nearest name.
    """
    metric, notes = sweep.metric.name, []
    group = metric.partition("/")[0]
    if not hasattr(cfg, "logging"):
        raise Mistake(f"metric: {recipe} writes no metrics; a sweep compares runs of a recipe that trains")
    if ours and recipe == "warmup_sft" and group not in OF_A_WARM_UP:
        raise Mistake(f"metric: {metric} is never logged by {recipe}; did you mean loss/nll?")
    known = {name for panel in PANELS for name in (*(name for name, _ in panel.series), *(panel.band or ()))}
    near = nearest(metric, [name for name in known if "*" not in name])
    hint = f"did you mean {near}?" if near else "docs/telemetry.md lists the metrics"
    if ours and not any(fnmatchcase(metric, name) for name in known):
        raise Mistake(f"metric: {metric} is no metric of {recipe}; {hint}")
    if metric not in known:
        # "reward/*" holds names of the user's, and slips.
        notes.append(f"metric: {metric} is logged only if the recipe, or a part of its task or loss, does so; {hint}")
    if group == "eval" and getattr(getattr(cfg, "evaluation", None), "task", None) is None:
        raise Mistake(
            f"metric: {metric} is never logged: {sweep.path.name} runs a config without held-out problems (evaluation.task)"
        )
    if group == "async" and not getattr(cfg, "staleness", 0) and all(each.name != "staleness" for each in sweep.drawn):
        raise Mistake(f"metric: {metric} is never logged with staleness=0")
    return notes
