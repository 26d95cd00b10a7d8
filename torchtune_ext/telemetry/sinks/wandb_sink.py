"""Weights & Biases: scalars and tables of samples. No file of the run is uploaded."""

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.process_env import rank_and_world_size
from torchtune_ext.telemetry.sinks.settings import SinkContext
from torchtune_ext.telemetry.sinks.tables import COLUMNS, TABLE_KEY, sample_rows

log = logging.getLogger(__name__)

INIT_ERROR = (
    "logging.to: 'wandb' cannot start: {}. Fix: run `wandb login`, or remove 'wandb' from logging.to; without an account "
    "or a network, set WANDB_MODE=offline, and upload the run later with `wandb sync`"
)
CLOSE_TIMEOUT_S = 1.0  # for W&B's own process to exit
FLUSH_INTERVAL_S = 2  # between two writes of W&B's file
FINISH_TIMEOUT_S = 600  # for the last upload, unless WANDB_FINISH_TIMEOUT is set


class WeightsAndBiases:
    """Logs to Weights & Biases."""

    def __init__(self, context: SinkContext):
        set_default_env()
        # W&B's data directory, by default in the user's home, holds tables until their upload.
        place = Path(os.environ.get("WANDB_DIR") or context.run_dir) / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place.absolute()))
        import wandb

        self._wandb, self._context = wandb, context
        try:
            self._run = wandb.init(**init_arguments(context, os.environ))
        # W&B's type stubs lack the module `errors`.
        except (
            wandb.errors.UsageError,  # pyright: ignore[reportAttributeAccessIssue]
            wandb.errors.AuthenticationError,  # pyright: ignore[reportAttributeAccessIssue]
            ValueError,
        ) as error:
            raise UsageError(INIT_ERROR.format(error_text(error))) from error
        if context.run and self._run.id != context.run.id:
            log.warning(
                "wandb: the run id is %s (from WANDB_RUN_ID), but %s has %s. Set the same WANDB_RUN_ID when you resume, so "
                "that the curves continue", self._run.id, context.run_dir, context.run.id,
            )  # fmt: skip
        # A resumed run repeats steps, but W&B's own step cannot decrease. So ours is a metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def require_login() -> None:
        """Checks the API key with W&B's server.

        Raises:
            UsageError: W&B has no key, or its server times out or rejects the key.
        """
        # Offline mode has no server. Only rank 0 writes to W&B, which prompts on a terminal.
        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled", "shared")
        if offline or rank_and_world_size()[0] or (sys.stdin is not None and sys.stdin.isatty()):
            return
        set_default_env()
        import wandb

        try:
            fault = "" if wandb.login(prompt=False) else "it has no API key"
        except Exception as error:  # noqa: BLE001 (the code of W&B)
            fault = error_text(error)
        if fault:
            # At exit W&B would wait for its own process, which may wait for the server.
            closing = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT_S)
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # the process has just exited
                    if child.name() == "wandb-core":
                        child.kill()
            raise UsageError(INIT_ERROR.format(fault))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def show(self, step: int, groups: Sequence[Group]) -> None:
        rows = sample_rows(step, groups, self._context.settings.samples)
        self._run.log({"step": step, TABLE_KEY.format(step): self._wandb.Table(columns=COLUMNS, data=rows)})

    def close(self, status: int) -> None:
        self._run.finish(exit_code=status)


def set_default_env() -> None:
    """Sets default environment variables for W&B, which reads them at its first use."""
    # By default W&B waits forever for the upload, and blocks the machine.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_TIMEOUT_S))
    # By default W&B writes its file every 15 s, and a killed run would lack up to 15 s of metrics.
    os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH_INTERVAL_S))
    # By default W&B uploads the terminal's output, in which a warning may quote a sample.
    os.environ.setdefault("WANDB_CONSOLE", "off")


def error_text(error: Exception) -> str:
    """Returns an error of W&B in one line."""
    # W&B's settings are validated by pydantic, whose errors have several lines and a link.
    text = " ".join(str(error).split()).partition(" For further information")[0].rstrip(".")
    refused = text.partition("validation error for Settings ")[2]
    return f"invalid setting, possibly an environment variable WANDB_...: {refused}" if refused else text


def init_arguments(context: SinkContext, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`."""
    # W&B's variables take precedence over the config. It reads them for missing arguments only.
    run, settings = context.run, context.settings
    defaults = {
        "dir": ("WANDB_DIR", str(context.run_dir)),
        "project": ("WANDB_PROJECT", settings.project),
        "name": ("WANDB_NAME", context.name),
        "id": ("WANDB_RUN_ID", run.id if run else None),
        "resume": ("WANDB_RESUME", None if context.resume_step is None else "allow"),
    }
    keywords = {key: value for key, (name, value) in defaults.items() if not environment.get(name)}
    if environment.get("WANDB_SWEEP_ID"):
        # A sweep's agent sets these, and W&B warns about other values.
        keywords = {key: value for key, value in keywords.items() if key not in ("project", "id")}
    return keywords | {"config": run and {**run.config, "process": dict(run.process)}}
