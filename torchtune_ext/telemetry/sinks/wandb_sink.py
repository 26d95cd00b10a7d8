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
from torchtune_ext.telemetry.excerpts import choose_groups, elide_text, evenly_spaced, sample_record, sort_by_reward
from torchtune_ext.telemetry.sinks.settings import SinkContext

log = logging.getLogger(__name__)

INIT_ERROR = (
    "logging.to names 'wandb', which cannot start: {}. Without an account or a network: WANDB_MODE=offline keeps the run in "
    "its folder, and `wandb sync` sends it later. Otherwise run `wandb login`, or take 'wandb' out of logging.to"
)
CLOSE_TIMEOUT_S = 1.0  # seconds that W&B's own process has to end
FLUSH_INTERVAL_S = 2  # seconds from one write of W&B's file to the next
FINISH_TIMEOUT_S = 600  # seconds that the last upload may take, where WANDB_FINISH_TIMEOUT says nothing else
TABLE_KEY = "samples/step_{:06d}"  # a key for each step: W&B shows only the newest table of a key
COLUMNS = ["step", "problem", "prompt", "completion", "reward", "advantage", "outcome", "finish", "note"]
MAX_PROMPT_CHARS, MAX_COMPLETION_CHARS = 2048, 4096  # characters
MAX_SAMPLES = 4  # of a group, evenly spaced over the reward, best and worst among them


class WeightsAndBiases:
    """Writes to Weights & Biases."""

    def __init__(self, context: SinkContext):
        set_default_env()
        # Copies of tables wait in W&B's data directory for their upload. By default that is in the user's home.
        place = Path(os.environ.get("WANDB_DIR") or context.run_dir) / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place.absolute()))
        import wandb

        self._wandb, self._context = wandb, context
        try:
            self._run = wandb.init(**init_arguments(context, os.environ))
        # W&B's stub leaves out the module `errors`.
        except (
            wandb.errors.UsageError,  # pyright: ignore[reportAttributeAccessIssue]
            wandb.errors.AuthenticationError,  # pyright: ignore[reportAttributeAccessIssue]
            ValueError,
        ) as error:
            raise UsageError(INIT_ERROR.format(error_text(error))) from error
        if context.run and self._run.id != context.run.id:
            log.warning(
                "W&B calls this run %s, as WANDB_RUN_ID says, and %s calls it %s. A resumed run needs the same WANDB_RUN_ID "
                "to go on with its curves", self._run.id, context.run_dir, context.run.id,
            )  # fmt: skip
        # W&B's own step refuses to go back, as a resumed run does. So ours is a metric, and the axis of the others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @staticmethod
    def require_login() -> None:
        """Asks W&B's server whether it accepts the key.

        Raises:
            ValueError: W&B knows no key, or its server does not answer in time or refuses the key.
        """
        # Offline there is no server to ask. Only rank 0 writes to W&B, and on a terminal W&B itself asks for a key.
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
            # Left to itself, W&B waits at exit for its own process, even while that waits for the server. So it is
            # asked to end, and then killed.
            closing = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
            closing.start()
            closing.join(CLOSE_TIMEOUT_S)
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # it has just ended, as it was asked to
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


def sample_rows(step: int, groups: Sequence[Group], number: int) -> list[list[Any]]:
    """Returns the rows of a table with `COLUMNS`: samples of `number` groups, from the best to the worst of each."""
    rows = []
    for group in choose_groups(groups, number):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in group.problem.messages)
        for sample in evenly_spaced(sort_by_reward(group), MAX_SAMPLES):
            # W&B refuses a table that mixes types in a column, so an id that is a number becomes text.
            facts = sample_record(sample, MAX_COMPLETION_CHARS)
            texts = str(group.problem.id), elide_text(prompt, MAX_PROMPT_CHARS), facts["text"]
            numbers = facts["reward"], facts["advantage"]
            notes = facts["outcome"], facts["finish"], clean_text(facts["note"] or facts["cause"])
            rows.append([step, *map(clean_text, texts), *numbers, *notes])
    return rows


def clean_text(text: str) -> str:
    """Replaces what is no valid text: halves of a surrogate pair, which UTF-8 cannot encode, and NUL."""
    # Some readers stop at NUL.
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def set_default_env() -> None:
    """Sets variables of W&B that the user has not set. W&B reads them at its first use, so this comes before."""
    # W&B would wait forever for the end of the upload, and hold the machine.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_TIMEOUT_S))
    # W&B would write its file every 15 s, and a run that is killed would lose as much.
    os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", str(FLUSH_INTERVAL_S))


def error_text(error: Exception) -> str:
    """An error of W&B in one line."""
    # W&B checks its settings, environment variables among them, with pydantic, whose errors have lines and a link.
    text = " ".join(str(error).split()).partition(" For further information")[0].rstrip(".")
    refused = text.partition("validation error for Settings ")[2]
    return f"it does not take a setting, which may be a variable WANDB_...: {refused}" if refused else text


def init_arguments(context: SinkContext, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`."""
    # W&B's variables are set for this start of the run, so they win over the config. W&B reads a variable only where it
    # is given no argument.
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
        # A sweep has these from its agent, and W&B warns of others.
        keywords = {key: value for key, value in keywords.items() if key not in ("project", "id")}
    return keywords | {"config": run and {**run.config, "process": dict(run.process)}}
