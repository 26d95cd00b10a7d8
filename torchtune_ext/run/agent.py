"""A run that an agent of Weights & Biases starts (`wandb agent`) has a folder and an id of its own, without a setting.

A sweep starts the same config many times, so all its runs name the same `output_dir`. The agent tells each of them in the
environment who it is. A run that finds both variables works in `<output_dir>/<WANDB_RUN_ID>`, and that is its id, too. All
ranks that torchrun starts inherit them, so they agree.
"""

import os
import re

SWEEP_VARIABLE, RUN_VARIABLE = "WANDB_SWEEP_ID", "WANDB_RUN_ID"
_ID = re.compile(r"\w[\w.-]*")  # W&B draws eight letters and digits; what a user sets must be the name of a folder


def agents_run() -> str | None:
    """Returns the id that an agent has given to this run, or None if no agent has started it.

    Raises:
        ValueError: the id cannot be the name of a folder.
    """
    if not os.environ.get(SWEEP_VARIABLE) or not (run := os.environ.get(RUN_VARIABLE)):
        return None
    if not _ID.fullmatch(run):
        raise ValueError(
            f"{RUN_VARIABLE}={run} names the folder of this run of a sweep, so it may have letters, digits, '-', '_' and '.' "
            f"alone and begins with a letter or a digit; without {SWEEP_VARIABLE} it names no folder"
        )
    return run


def own_folder(output_dir: str) -> str:
    """Returns the folder of this run: `output_dir`, or the one below it that belongs to this run of an agent."""
    run = agents_run()
    return output_dir if run is None else f"{output_dir.rstrip('/')}/{run}"
