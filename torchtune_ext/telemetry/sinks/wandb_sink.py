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

from torchtune_ext.groups import Group
from torchtune_ext.run.errors import Mistake
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

    @staticmethod
    def require_login() -> None:
        """Asks W&B's server, where there is one to ask, whether it accepts the key. On a terminal W&B asks for a key itself.

        Raises:
            ValueError: W&B knows no key, or its server does not answer in time or refuses the key.
        """
        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled", "shared")
        if offline or int(os.environ.get("RANK", 0)) or (sys.stdin is not None and sys.stdin.isatty()):
            return
        set_defaults()
        import wandb

        try:
            fault = "" if wandb.login(prompt=False) else "it has no API key"
        except Exception as error:
            fault = cause_of(error)
        if fault:
            # Left to itself, W&B waits at exit for its own process, also for one that still waits for the server.
            closing = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
            closing.start()
            closing.join(CLOSE_S)
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):  # it ends just now, as it was asked to
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
    """Returns the rows of a table, whose columns are `COLUMNS`: the samples of `number` groups, from the best to the
    worst of each. A column has one type, since W&B refuses a table that mixes them."""
    rows = []
    for group in chosen_groups(groups, number):
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in group.problem.messages)
        for sample in spaced(by_reward(group), MAX_SAMPLES):
            facts = sample_facts(sample, MAX_COMPLETION)
            texts = str(group.problem.id), cut_text(prompt, MAX_PROMPT), facts["text"]
            numbers = facts["reward"], facts["advantage"]
            notes = facts["outcome"], facts["finish"], clean(facts["note"] or facts["cause"])
            rows.append([step, *map(clean, texts), *numbers, *notes])
    return rows


def clean(text: str) -> str:
    """Replaces what is no Unicode text: halves of a surrogate pair, which no encoder takes, and NUL, at which some stop."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def set_defaults() -> None:
    """Sets variables of W&B that the user has not set.

    W&B reads its variables when it is used for the first time, so this comes before.
    """
    # W&B would wait forever for the end of the upload, and hold the machine.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(FINISH_S))
    # W&B would write its file every 15 s, and a run that is killed would lose as much.
    os.environ.setdefault("WANDB__TRANSACTION_LOG_FLUSH_INTERVAL", str(WRITE_S))


def cause_of(error: Exception) -> str:
    """Returns an error of W&B in one line. Its settings, variables of the environment among them, are checked by pydantic."""
    text = " ".join(str(error).split()).partition(" For further information")[0].rstrip(".")
    refused = text.partition("validation error for Settings ")[2]
    return f"it does not take a setting, which may be a variable WANDB_...: {refused}" if refused else text


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
    return keywords | {"config": run and {**run.config, "process": dict(run.process)}}
