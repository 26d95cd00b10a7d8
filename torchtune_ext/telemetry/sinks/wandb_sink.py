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
from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.parent import place
from torchtune_ext.telemetry.excerpts import by_reward, chosen_groups, cut_text, sample_facts, spaced
from torchtune_ext.telemetry.sinks.settings import Opening

log = logging.getLogger(__name__)

CANNOT = (
    "logging.to names 'wandb', which cannot start: {}. Without an account or a network: WANDB_MODE=offline keeps the run in "
    "its folder, and `wandb sync` sends it later. Otherwise run `wandb login`, or take 'wandb' out of logging.to"
)
CLOSE_S = 1.0  # seconds that W&B's own process has to end
WRITE_S = 2  # seconds from one write of W&B's file to the next
FINISH_S = 600  # seconds that the last upload may take, where WANDB_FINISH_TIMEOUT says nothing else
TABLE = "samples/step_{:06d}"  # a key for each step: W&B shows only the newest table of a key
COLUMNS = ["step", "problem", "prompt", "completion", "reward", "advantage", "outcome", "finish", "note"]
MAX_PROMPT, MAX_COMPLETION = 2048, 4096  # characters
MAX_SAMPLES = 4  # of a group, evenly spaced over the reward, best and worst among them


class WeightsAndBiases:
    """Writes to Weights & Biases."""

    def __init__(self, opening: Opening):
        set_defaults()
        # Copies of tables wait in W&B's data directory for their upload. By default that is in the user's home.
        place = Path(os.environ.get("WANDB_DIR") or opening.run_dir) / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place.absolute()))
        import wandb

        self._wandb, self._opening = wandb, opening
        try:
            self._run = wandb.init(**arguments(opening, os.environ))
        # W&B's stub leaves out the module `errors`.
        except (
            wandb.errors.UsageError,  # pyright: ignore[reportAttributeAccessIssue]
            wandb.errors.AuthenticationError,  # pyright: ignore[reportAttributeAccessIssue]
            ValueError,
        ) as error:
            raise Mistake(CANNOT.format(cause_of(error))) from error
        if opening.run and self._run.id != opening.run.id:
            log.warning(
                "W&B calls this run %s, as WANDB_RUN_ID says, and %s calls it %s. A resumed run needs the same WANDB_RUN_ID "
                "to go on with its curves", self._run.id, opening.run_dir, opening.run.id,
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
        if offline or place()[0] or (sys.stdin is not None and sys.stdin.isatty()):
            return
        set_defaults()
        import wandb

        try:
            fault = "" if wandb.login(prompt=False) else "it has no API key"
        except Exception as error:  # noqa: BLE001 (the code of W&B)
            fault = cause_of(error)
        if fault:
            # Left to itself, W&B waits at exit for its own process, even while that waits for the server. So it is
            # asked to end, and then killed.
            closing = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # it has just ended, as it was asked to
                    if child.name() == "wandb-core":
                        child.kill()
            raise Mistake(CANNOT.format(fault))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def show(self, step: int, groups: Sequence[Group]) -> None:
        rows = sample_rows(step, groups, self._opening.settings.samples)
        self._run.log({"step": step, TABLE.format(step): self._wandb.Table(columns=COLUMNS, data=rows)})

    def close(self, status: int) -> None:
        self._run.finish(exit_code=status)


def sample_rows(step: int, groups: Sequence[Group], number: int) -> list[list[Any]]:
    """Returns the rows of a table with `COLUMNS`: samples of `number` groups, from the best to the worst of each."""
    rows = []
    for group in chosen_groups(groups, number):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in group.problem.messages)
        for sample in spaced(by_reward(group), MAX_SAMPLES):
            # W&B refuses a table that mixes types in a column, so an id that is a number becomes text.
            facts = sample_facts(sample, MAX_COMPLETION)
            texts = str(group.problem.id), cut_text(prompt, MAX_PROMPT), facts["text"]
            numbers = facts["reward"], facts["advantage"]
            notes = facts["outcome"], facts["finish"], clean(facts["note"] or facts["cause"])
            rows.append([step, *map(clean, texts), *numbers, *notes])
    return rows


def clean(text: str) -> str:
    """Replaces what is no valid text: halves of a surrogate pair, which UTF-8 cannot encode, and NUL."""
    # Some readers stop at NUL.
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def set_defaults() -> None:
    """Sets variables of W&B that the user has not set. W&B reads them at its first use, so this comes before."""
    # W&B would wait forever for the end of the upload, and hold the machine.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_S))
    # W&B would write its file every 15 s, and a run that is killed would lose as much.
    os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", str(WRITE_S))


def cause_of(error: Exception) -> str:
    """An error of W&B in one line."""
    # W&B checks its settings, environment variables among them, with pydantic, whose errors have lines and a link.
    text = " ".join(str(error).split()).partition(" For further information")[0].rstrip(".")
    refused = text.partition("validation error for Settings ")[2]
    return f"it does not take a setting, which may be a variable WANDB_...: {refused}" if refused else text


def arguments(opening: Opening, environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`."""
    # W&B's variables are set for this start of the run, so they win over the config. W&B reads a variable only where it
    # is given no argument.
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
    return keywords | {"config": run and {**run.config, "process": dict(run.process)}}
