"""Build the commands of a sweep's runs, and check the first one before any run starts.

The check loads neither an engine nor weights.
"""

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import recipe_files
from torchtune_ext.run.errors import UsageError, closest_match
from torchtune_ext.settings.components import import_recipe
from torchtune_ext.settings.config import load_config, merge_config
from torchtune_ext.setup.checks import check_optimizer
from torchtune_ext.setup.config_checks import check_settings
from torchtune_ext.sweep.spec import COMMAND_EXAMPLE, Point, Sweep
from torchtune_ext.telemetry.panels import PANELS

OTHER_PROGRAMS_HINT = "other programs run under `wandb agent`"
ARGUMENTS_MACRO = "${args_no_hyphens}"  # W&B's macro for "key=value" of each parameter, the form that recipes read
RESERVED_KEYS = ("output_dir", "resume_from_checkpoint")  # settings that the sweep sets for each run


def run_command(sweep: Sweep, point: Point, extra_settings: Sequence[str]) -> list[str]:
    """Returns the command of one run.

    Args:
        extra_settings: settings of all runs, key=value. They are appended to the command.

    Raises:
        UsageError: the command has an unsupported W&B macro, or its program is not found.
    """
    words = []
    for word in map(str, sweep.command):
        if word.startswith("${") and word != ARGUMENTS_MACRO:
            raise UsageError(
                f"command: unsupported macro {word}; expected {ARGUMENTS_MACRO}. Fix: use {COMMAND_EXAMPLE}; "
                f"{OTHER_PROGRAMS_HINT}"
            )
        words += [f"{name}={value}" for name, value in point.items()] if word == ARGUMENTS_MACRO else [word]
    # Run the `tune` of this environment, even if another `tune` comes first on PATH.
    ours = [sys.executable, "-m", "torchtune_ext"] if words[:1] in (["tune"], ["torchtune-ext"]) else words[:1]
    if ours and shutil.which(ours[0]) is None:
        raise UsageError(f"command: program {ours[0]} not found; expected {COMMAND_EXAMPLE}")
    return [*ours, *words[1:], *extra_settings]


def parse_command(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Splits the command of a run.

    Returns:
        The recipe (name, file or module), the config as written, and the settings, key=value.

    Raises:
        UsageError: the command does not start a recipe.
    """
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    programs = {Path(word).name for word in flat[: flat.index("run")]} if "run" in flat else set()
    at = flat.index("--config") if "--config" in flat[:-1] else 0
    ours = at and programs & {"tune", "torchtune-ext", "torchtune_ext"}
    if not ours:
        raise UsageError(f"command: {' '.join(words)}: a sweep runs recipes: {COMMAND_EXAMPLE}; {OTHER_PROGRAMS_HINT}")
    return flat[at - 1], flat[at + 1], flat[at + 2 :]


def check_sweep(sweep: Sweep, point: Point, extra_settings: Sequence[str], out: Path) -> Any:
    """Reads the settings of a point as `tune run` does, and checks that the run logs the metric.

    Args:
        extra_settings: settings of all runs, key=value.
        out: the folder of the sweep.

    Returns:
        The recipe's `Config`.

    Raises:
        UsageError: the recipe rejects the point, or does not log the metric.
    """
    recipe, config, settings = parse_command(run_command(sweep, point, extra_settings))
    for word in settings:
        key = word.partition("=")[0]
        if key in RESERVED_KEYS:
            raise UsageError(
                f"{key}: the sweep sets the folder of each run and resumes interrupted runs. Fix: remove the key"
            )
    if re.search(r"[=#:{\[]", str(out)):
        raise UsageError(f"--out {out}: invalid in output_dir=PATH of a run. Fix: choose a name without = # : {{ [")
    module = import_recipe(recipe, "command: ")
    schema = getattr(module, "Config", None)
    if schema is None or "output_dir" not in {field.name for field in fields(schema)}:
        raise UsageError(f"command: {recipe} is not a recipe of this project: it lacks a class Config with output_dir")
    cfg = load_config(schema, merge_config(config, [*settings, f"output_dir={out / 'run'}"], module.__file__))
    # The checks and metrics are known only for the shipped recipes. A copy may have others.
    if recipe in {each.name for each in recipe_files()}:
        if hasattr(cfg, "optimizer"):
            # "auto" may resolve to a GPU, so the check assumes one.
            check_optimizer(cfg.optimizer.instantiate, device="cpu" if cfg.device == "cpu" else "cuda")
        if hasattr(cfg, "loss"):
            check_settings(cfg, cfg.loss.instantiate())
        known = {name for panel in PANELS for name in (*(name for name, _ in panel.series), *(panel.band or ()))}
        if not hasattr(cfg, "logging") or not any(fnmatchcase(sweep.metric, name) for name in known):
            near = closest_match(sweep.metric, [name for name in known if "*" not in name])
            hint = f"did you mean {near}?" if near else "docs/reference/metrics.md lists the metrics"
            raise UsageError(f"metric: unknown metric {sweep.metric} of {recipe}; {hint}")
    return cfg
