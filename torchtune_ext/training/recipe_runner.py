"""Runs a recipe from set-up to exit status: signals, cleanup, ranks."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from torchtune_ext.run.errors import FAILURE_STATUS, UsageError, exit_status_of
from torchtune_ext.run.output import print_text
from torchtune_ext.run.process_env import rank_and_world_size
from torchtune_ext.run.stop import SIGNAL_NAMES, RunStopped, StopSignals
from torchtune_ext.telemetry.progress import Progress
from torchtune_ext.training.checkpoints import RunAlreadyComplete
from torchtune_ext.training.collectives import MainRankFailure, announce_main_failure
from torchtune_ext.training.distributed import close_ranks

log = logging.getLogger(__name__)
# Seconds that the interpreter has to exit after all components are closed.
EXIT_S = 5.0
COLLECTIVE_TIMEOUT_NOTE = (
    "Another rank did not reach this collective within ranks.deadline_s: it was stopped or swapped out, it hangs, or its "
    "machine is down. Fix: find the cause (`py-spy dump --pid PID` shows the rank's stack), or raise ranks.deadline_s if "
    "the rank needs more time"
)


class Recipe(Protocol):
    """The methods that `run_recipe` calls. They have torchtune's names."""

    stop: StopSignals  # `stop.status_message` makes the last line of the run's output

    def setup(self) -> None: ...

    def cleanup(self) -> None: ...  # must also work if `setup` failed halfway


def run_recipe(make: Callable[[], Recipe], work: Callable[[Any], None] = lambda recipe: recipe.train()) -> None:
    """Makes a recipe, sets it up, runs `work` and cleans up.

    The output ends with `recipe.stop.status_message()`: the run's progress and how to resume it.

    Raises:
        SystemExit: a signal stopped the run (status 130, 143 or 129, see `run/stop.py`).
        Exception: an error of set-up or work, after the cleanup.
    """
    if not callable(work):
        raise UsageError(
            "run_recipe(GRPORecipe, cfg): the signature has changed. Fix: call run_recipe(partial(GRPORecipe, cfg))"
        )
    recipe = make()
    stop_signal = None  # the signal that stopped the run
    ranks_in_sync = True
    is_set_up = False
    already_complete_message = ""  # set if the run was complete before this start
    rank, world_size = rank_and_world_size()
    is_distributed = world_size > 1
    with recipe.stop as stop:
        # A run has failed until it succeeds. The cleanup reports the status to the metric sinks.
        stop.exit_status = FAILURE_STATUS
        try:
            try:
                with Progress(rank=rank).phase("start: not ready"):
                    recipe.setup()
                is_set_up = True
                work(recipe)
                stop.exit_status = 0
            finally:
                # Before this line a signal raises `RunStopped`, even between two statements. The
                # cleanup below is not interrupted.
                stop.begin_cleanup()
        except RunAlreadyComplete as notice:
            already_complete_message, stop.exit_status = str(notice), 0
        except RunStopped as stopped:
            stop_signal, ranks_in_sync = stopped.signal, stopped.at_step_end
            stop.exit_status = 128 + stop_signal
        except Exception as error:
            # Other ranks may wait for rank 0 without a deadline, so rank 0 announces its failure.
            announce_main_failure()
            # Two errors are consequences of a stop signal: an error that a library raised in place
            # of the interrupt, and a broken connection to a rank that stopped earlier. All other
            # errors are reported.
            is_peer_shutdown = stop.stop_requested and is_distributed and _is_peer_failure(error)
            if not (stop.raised_by_handler or is_peer_shutdown):
                stop.exit_status = exit_status_of(error) or FAILURE_STATUS
                if is_distributed:
                    _explain_collective_timeout(error)
                if is_set_up and stop.prints_messages:
                    error.add_note(stop.status_message())
                raise
            log.warning("stop: an error after the stop signal: %s", (str(error).splitlines() or [repr(error)])[0])
            assert stop.signal is not None  # set, because its handler raised or a stop was requested
            stop_signal, ranks_in_sync = stop.signal, False
            stop.exit_status = 128 + stop_signal
        finally:
            recipe.cleanup()
    message = already_complete_message or stop.status_message()
    # The recipe holds the model, and sharded weights keep the process group alive.
    del recipe
    # If the ranks did not stop together, `close_ranks` would wait for stuck ranks. torchrun ends
    # stuck ranks.
    if ranks_in_sync:
        _close_ranks(message if stop.prints_messages else "")
    if stop_signal is None:
        if stop.prints_messages:
            print_text(message)
    else:
        if stop.prints_messages:
            message = f"Stopped by {SIGNAL_NAMES[stop_signal]}. {message}"
            if stop_signal == signal.SIGINT and stop.waits_for_step:
                message += ". `kill` (SIGTERM) instead of Ctrl-C saves a checkpoint after the current step"
            print_text(message, sys.stderr)
        # The interpreter waits for all threads at exit. If the signal interrupted the start of a
        # thread, no component knows that thread, so no component can end it.
        threading.Thread(target=_exit_after_main_thread, args=[128 + stop_signal], daemon=True).start()
        sys.exit(128 + stop_signal)


def _close_ranks(progress: str) -> None:
    try:
        close_ranks()
    except RuntimeError as error:
        _explain_collective_timeout(error)
        if progress:
            error.add_note(progress)
        raise


def _explain_collective_timeout(error: Exception) -> None:
    # gloo reports the first timeout and the following ones with these phrases. On GPUs, NCCL's
    # watchdog ends the process and names the collective.
    if any(phrase in str(error) for phrase in ("Timed out waiting", "Application timeout")):
        error.add_note(COLLECTIVE_TIMEOUT_NOTE)


def _is_peer_failure(error: Exception) -> bool:
    """Whether an error means only that another rank has exited."""
    # gloo raises plain RuntimeErrors that name its source files.
    if type(error) is RuntimeError:
        return any(word in str(error) for word in ("Connection", "gloo", "NCCL"))
    return isinstance(error, ConnectionError | dist.DistError | MainRankFailure)


def _exit_after_main_thread(status: int) -> None:
    """Exits the process if it still runs `EXIT_S` seconds after the main thread has ended."""
    threading.main_thread().join()
    time.sleep(EXIT_S)
    os._exit(status)


def close_all(*components: Any) -> None:
    """Closes every component that is not None. A failure is logged and does not stop the rest."""
    for component in components:
        if component is not None:
            try:
                component.close()
            except Exception:
                log.exception("%s was not closed properly", type(component).__name__)
