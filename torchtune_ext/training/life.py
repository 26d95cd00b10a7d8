"""Runs a recipe from its first line to its exit status: signals, cleanup, ranks."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from torchtune_ext.run.errors import FAILED, Mistake, status_of
from torchtune_ext.run.output import say
from torchtune_ext.run.parent import place
from torchtune_ext.run.stop import NAMES, Stopped, StopSignals
from torchtune_ext.training.checkpoints import NothingToDo
from torchtune_ext.training.collectives import MainFailed, main_failed
from torchtune_ext.training.distributed import close_ranks

log = logging.getLogger(__name__)
# Seconds that the interpreter has to end after all parts are closed.
EXIT_S = 5.0


class Recipe(Protocol):
    """The methods that `run_recipe` calls. Their names are those of torchtune."""

    stop: StopSignals  # its `standing` also says at the end what there is now

    def setup(self) -> None: ...

    def cleanup(self) -> None: ...  # must work however far `setup` came


def run_recipe(make: Callable[[], Recipe], work: Callable[[Any], None] = lambda recipe: recipe.train()) -> None:
    """Makes a recipe, sets it up, runs `work` and cleans up.

    However the run ends, its last words are those of `recipe.stop.standing`: where it stands, and how to go on.

    Raises:
        SystemExit: a signal stopped the run (status 130, 143 or 129, see `run/stop.py`).
        Exception: what set-up and work raise, after the cleanup.
    """
    if not callable(work):
        raise Mistake(
            "run_recipe(GRPORecipe, cfg) is run_recipe(partial(GRPORecipe, cfg)) now. Fix: change the last lines"
        )
    recipe, stopped_by, orderly, works, nothing = make(), None, True, False, ""
    several = place()[1] > 1
    with recipe.stop as stop:
        # Until something else is known, the run has failed. The cleanup reports the status to the sinks of the metrics.
        stop.status = FAILED
        try:
            try:
                recipe.setup()
                works = True
                work(recipe)
                stop.status = 0
            finally:
                # Up to here a signal raises `Stopped`, even between two statements; what follows is not interrupted.
                stop.begin_cleanup()
        except NothingToDo as notice:
            nothing, stop.status = str(notice), 0
        except Stopped as stopped:
            stopped_by, orderly = stopped.signal, stopped.orderly
            stop.status = 128 + stopped_by
        except Exception as error:
            # The other ranks may wait for rank 0 without a deadline, so they hear of its failure first.
            main_failed()
            # Some libraries turn an interruption into an error of their own. And if another rank was stopped a moment
            # earlier, this rank sees a broken connection. Any other error has nothing to do with the signal.
            neighbor = stop.requested and several and _comes_from_another_rank(error)
            if not (stop.raised or neighbor):
                stop.status = status_of(error) or FAILED
                # These are gloo's words for the wait that ran out, and for those after it. On GPUs NCCL's watchdog ends the
                # process and names the collective.
                if several and any(words in str(error) for words in ("Timed out waiting", "Application timeout")):
                    error.add_note(
                        "Another rank did not come here within ranks.deadline_s: it was stopped or swapped out, it hangs, or "
                        "its machine is gone (`py-spy dump --pid PID` shows where it stands). Mend that, or raise "
                        "ranks.deadline_s if it needs so long"
                    )
                if works and stop.speaks:
                    error.add_note(stop.standing())
                raise
            log.warning("while the run was being stopped: %s", (str(error).splitlines() or [repr(error)])[0])
            assert stop.signal is not None  # since it raised, or was requested
            stopped_by, orderly = stop.signal, False
            stop.status = 128 + stopped_by
        finally:
            recipe.cleanup()
    message = nothing or stop.standing()
    # The recipe holds the model, whose sharded weights keep the process group alive.
    del recipe
    # If the ranks did not stop together, this would wait for ranks that are stuck. torchrun ends those.
    if orderly:
        close_ranks()
    if stopped_by is None:
        if stop.speaks:
            say(message)
    else:
        if stop.speaks:
            saves = ". `kill` in place of Ctrl-C ends a run with its step, and saves it" * (stopped_by == signal.SIGINT)
            say(f"Stopped by {NAMES[stopped_by]}. {message}{saves}", sys.stderr)
        # The interpreter waits for all threads at its end. If the signal interrupted the start of a thread, no part
        # knows that thread and can end it.
        threading.Thread(target=_end_after_main, args=[128 + stopped_by], daemon=True).start()
        sys.exit(128 + stopped_by)


def _comes_from_another_rank(error: Exception) -> bool:
    """Tells whether an error says only that another rank has ended."""
    # gloo raises plain RuntimeErrors, which name its source files.
    if type(error) is RuntimeError:
        return any(word in str(error) for word in ("Connection", "gloo", "NCCL"))
    return isinstance(error, ConnectionError | dist.DistError | MainFailed)


def _end_after_main(status: int) -> None:
    """Ends the process if it is still alive `EXIT_S` seconds after the main thread has ended."""
    threading.main_thread().join()
    time.sleep(EXIT_S)
    os._exit(status)


def close_all(*parts: Any) -> None:
    """Closes every part that is not None, even if another one fails. A failure is logged."""
    for part in parts:
        if part is not None:
            try:
                part.close()
            except Exception:
                log.exception("%s was not closed properly", type(part).__name__)
