"""Finds out at the start whether Weights & Biases can be logged to, before any work is lost."""

import os
import sys
import threading
from contextlib import suppress

import psutil

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.output import say

CANNOT = (
    "logging.to names 'wandb', which cannot start: {}. Without an account or a network: WANDB_MODE=offline keeps the run in "
    "its folder, and `wandb sync` sends it later. Otherwise run `wandb login`, or take 'wandb' out of logging.to"
)
QUIET_S = 2.0  # seconds after which the user is told what is waited for
ANSWER_S = 10  # seconds that W&B's server has to answer, by W&B's own default
SLACK_S = 5  # seconds that W&B's own process has beyond that
CLOSE_S = 1.0  # seconds that W&B's own process has to end
WRITE_S = 2  # seconds from one write of W&B's file to the next
FINISH_S = 600  # seconds that the last upload may take, where WANDB_FINISH_TIMEOUT says nothing else


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


def require_login() -> None:
    """Asks W&B's server whether it accepts the key, where there is a server to ask. On a terminal W&B asks for a key itself.

    Raises:
        ValueError: W&B knows no key, or its server does not answer in time or refuses the key.
    """
    offline = os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled", "shared")
    if offline or int(os.environ.get("RANK", 0)) or (sys.stdin is not None and sys.stdin.isatty()):
        return
    set_defaults()
    import wandb

    # W&B bounds each of its requests, but sometimes its own process does not answer, for which it waits without a bound.
    seconds = SLACK_S + ANSWER_S
    with suppress(ValueError):  # of a value that is no number W&B itself complains
        seconds = SLACK_S + float(os.environ.get("WANDB_HTTP_TIMEOUT") or ANSWER_S)
    answers: list[str] = []

    def ask() -> None:
        try:
            answers.append("" if wandb.login(prompt=False) else "it has no API key")
        except Exception as error:
            answers.append(cause_of(error))

    asking = threading.Thread(target=ask, name="wandb-login", daemon=True)
    asking.start()
    asking.join(QUIET_S)
    if asking.is_alive():
        say(f"waiting for Weights & Biases to accept the API key, for {seconds:g} s at most (WANDB_HTTP_TIMEOUT)")
        asking.join(seconds - QUIET_S)
    fault = answers[0] if answers else f"its server did not answer within {seconds:g} s (WANDB_HTTP_TIMEOUT)"
    if fault:
        # Left to itself, W&B waits at exit for its own process, also for one that does not answer any more.
        closing = threading.Thread(target=wandb.teardown, name="wandb-teardown", daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it ends just now, as it was asked to
                if child.name() == "wandb-core":
                    child.kill()
        raise Mistake(CANNOT.format(fault))
