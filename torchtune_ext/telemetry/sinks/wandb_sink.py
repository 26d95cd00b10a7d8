"""Weights & Biases: scalars, tables of samples, and a summary. No file of the run is uploaded."""

import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.telemetry.sinks.samples import SampleRow, clean
from torchtune_ext.telemetry.sinks.settings import Opening
from torchtune_ext.telemetry.sinks.wandb_login import CANNOT, cause_of, set_defaults

log = logging.getLogger(__name__)

FULL = 2**16  # bytes that are free on a disk that counts as full
TABLE = "samples/step_{:06d}"  # a key for each step: W&B shows only the newest table of a key
COLUMNS = [field.name for field in dataclasses.fields(SampleRow)]


class WeightsAndBiases:
    """Writes to Weights & Biases. The step is a value of its own there, since W&B's step refuses to go back on resume."""

    def __init__(self, opening: Opening):
        set_defaults()
        # Copies of tables wait there for their upload. Without this they lie in the user's home.
        place = Path(os.environ.get("WANDB_DIR") or opening.run_dir) / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place.absolute()))
        import wandb

        self._wandb, self._opening = wandb, opening
        try:
            self._run = wandb.init(**arguments(opening, os.environ))
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError, ValueError) as error:
            raise Mistake(CANNOT.format(cause_of(error))) from error
        if opening.run and self._run.id != opening.run.id:
            log.warning(
                "W&B calls this run %s, as WANDB_RUN_ID says, and %s calls it %s. A resumed run needs the same WANDB_RUN_ID "
                "to go on with its curves", self._run.id, opening.run_dir, opening.run.id,
            )  # fmt: skip
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def show(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(dataclasses.astuple(row)) for row in rows])
        self._run.log({"step": step, TABLE.format(step): table})

    def summarize(self, facts: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(facts))

    def close(self, status: int) -> None:
        self._run.finish(exit_code=status)
        # W&B writes in a process of its own, which says nothing of a full disk.
        folder = Path(os.environ.get("WANDB_DIR") or self._opening.run_dir)
        if folder.is_dir() and shutil.disk_usage(folder).free < FULL:
            log.warning("the disk of %s is full: what W&B wrote there last is probably lost", folder)


def arguments(opening: Opening, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`. W&B's variables win over the config, since they are set for this start of the run;
    W&B reads a variable only where it is given no argument."""
    run, settings = opening.run, opening.settings
    defaults = {
        "dir": ("WANDB_DIR", str(opening.run_dir)),
        "project": ("WANDB_PROJECT", settings.project),
        "name": ("WANDB_NAME", opening.name),
        "id": ("WANDB_RUN_ID", run.id if run else None),
        "resume": ("WANDB_RESUME", None if opening.resume_step is None else "allow"),
    }
    keywords = {key: value for key, (name, value) in defaults.items() if not environment.get(name)}
    if environment.get("WANDB_SWEEP_ID"):
        # A sweep has these from its agent, and W&B warns of others.
        keywords = {key: value for key, value in keywords.items() if key not in ("project", "id")}
    return keywords | {"config": shown_config(opening)}


def shown_config(opening: Opening) -> dict[str, Any] | None:
    """Returns the settings as they were resolved, and below `process` what the run was started with, `run.json` alike, with the
    text of the YAML file as `yaml`."""
    if opening.run is None:
        return None
    process = dict(opening.run.process)
    if process.get("config"):
        try:
            process["yaml"] = clean(Path(process["config"]).read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            log.warning("W&B will not show %s: %s", process["config"], error)
    return {**opening.run.config, "process": process}
