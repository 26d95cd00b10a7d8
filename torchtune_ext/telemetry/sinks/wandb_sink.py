"""Weights & Biases: scalars, tables of samples, a summary, and what of the run's files the user has chosen."""

import dataclasses
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.folder import checkpoint_folders, step_of
from torchtune_ext.telemetry.sinks.samples import SampleRow, clean
from torchtune_ext.telemetry.sinks.settings import STOPPED, Opening
from torchtune_ext.telemetry.sinks.wandb_login import CANNOT, cause_of, set_defaults

log = logging.getLogger(__name__)

FULL = 2**16  # bytes that are free on a disk that counts as full
TABLE = "samples/step_{:06d}"  # a key for each step: W&B shows only the newest table of a key
COLUMNS = [field.name for field in dataclasses.fields(SampleRow)]


class WeightsAndBiases:
    """Writes to Weights & Biases. The step is a value of its own there, since W&B's step refuses to go back on resume."""

    def __init__(self, opening: Opening):
        set_defaults()
        # Copies of tables and artifacts wait there for their upload. Without this they lie in the user's home.
        place = Path(os.environ.get("WANDB_DIR") or opening.run_dir) / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place.absolute()))
        import wandb

        self._wandb, self._opening, self._step = wandb, opening, 0
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
        self._step = step
        self._run.log({"step": step, **values})

    def show(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(dataclasses.astuple(row)) for row in rows])
        self._run.log({"step": step, TABLE.format(step): table})

    def summarize(self, facts: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(facts))

    def close(self, status: int) -> None:
        try:
            if self._opening.settings.artifacts:
                self._send_artifacts(status)
        finally:
            self._run.finish(exit_code=status)
        # W&B writes in a process of its own, which says nothing of a full disk.
        folder = Path(os.environ.get("WANDB_DIR") or self._opening.run_dir)
        if folder.is_dir() and shutil.disk_usage(folder).free < FULL:
            log.warning("the disk of %s is full: what W&B wrote there last is probably lost", folder)

    def _send_artifacts(self, status: int) -> None:
        """Sends what the user has chosen. A run that was told to stop has no time for an upload."""
        chosen = self._opening.settings.artifacts
        if status in STOPPED:
            log.warning("the run was stopped, so logging.artifacts=%s are not sent to W&B", list(chosen))
            return
        for name in chosen:
            run_dir, step, kind = self._opening.run_dir, self._step, name
            if name == "report":
                path = _make_report(run_dir)
            else:
                path = next(reversed(checkpoint_folders(run_dir / "checkpoints")), None)
                step, kind = step_of(path) if path else step, "model"
            if path is None:
                log.warning("logging.artifacts: the run has no %s yet, so none is sent to W&B", name)
                continue
            artifact = self._wandb.Artifact(f"{name}-{self._run.id}", type=kind, metadata={"step": step})
            # "immutable" makes no copy: a checkpoint may be larger than what is free.
            if path.is_dir():
                artifact.add_dir(str(path), policy="immutable")
            else:
                artifact.add_file(str(path), policy="immutable")
            self._run.log_artifact(artifact)


def arguments(opening: Opening, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`. W&B's variables win over the config, since they are set for this start of the run;
    W&B reads a variable only where it is given no argument."""
    run, settings = opening.run, opening.settings
    defaults = {
        "dir": ("WANDB_DIR", str(opening.run_dir)),
        "project": ("WANDB_PROJECT", settings.project),
        "name": ("WANDB_NAME", opening.name),
        "group": ("WANDB_RUN_GROUP", settings.group),
        "tags": ("WANDB_TAGS", list(settings.tags) or None),
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


def _make_report(run_dir: Path) -> Path | None:
    """Makes the report of the run as it stands now. None: there is none, which is logged with the cause."""
    from torchtune_ext.telemetry.report import build_report  # only a run that sends it needs what makes it

    try:
        return build_report(run_dir).path
    except (OSError, ValueError) as error:
        log.warning("no report of %s: %s", run_dir, error)
        return None
