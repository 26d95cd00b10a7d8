"""Joins the ranks, and runs actions on all of them. A failure on one rank is one on all, so that none waits in vain."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from torchtune_ext.run.errors import RunFailure, UsageFileError

T = TypeVar("T")
# DCP's exception derives from BaseException, so `except Exception` would miss it.
EXCEPTION_TYPES = (Exception, CheckpointException)
FAILURE_KEY = "failed"  # key of the store
POLL_S = 0.05  # most seconds between two looks of a rank that waits for rank 0
# The store of the rendezvous is global, as the process group is.
_store: dist.Store | None = None
# All ranks count how often they waited for rank 0, so each wait has a key of its own in the store.
_wait_count = 0


class MainRankFailure(RunFailure):
    """Rank 0, for which this rank waited, has failed."""


def join(backend: str, deadline_s: float) -> None:
    """Joins the process group that torchrun set up, whose collectives wait `deadline_s` seconds at most.

    Raises torch's ValueError if a variable of torchrun is missing, and its RuntimeError if ranks are.
    """
    global _store
    limit = timedelta(seconds=deadline_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    _store = dist.PrefixStore("torchtune_ext", store)


def rank() -> int:
    """The number of this rank, which is 0 in a run of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_distributed() -> bool:
    """Whether the run has more than one rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def wait_for_main() -> None:
    """Sleeps until rank 0 calls it, too; rank 0 waits for nobody. Raises RuntimeError if it fails (`main_failed`)."""
    # Rank 0 samples and evaluates for longer than the deadline of a collective, so it is waited for without a limit.
    global _wait_count
    _wait_count += 1
    assert _store is not None  # since `join`
    if rank() == 0:
        _store.set(str(_wait_count), "")
        return
    # A blocking wait of the store would hold back signals until its end.
    pause_s = 0.001
    while not _store.check([str(_wait_count)]):
        if _store.check([FAILURE_KEY]):
            raise MainRankFailure("rank 0 failed, for which this rank waited")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def announce_main_failure() -> None:
    """Ends the waiting of the other ranks, where rank 0 calls it."""
    # The others would not notice that rank 0 is gone: torchrun's store outlives it, and torchrun's SIGTERM takes effect
    # only at the end of a step.
    if _store is not None and rank() == 0:
        # If torchrun is gone, too, the others see that by themselves, and the run's own error is what counts.
        with suppress(RuntimeError):
            _store.set(FAILURE_KEY, "")


def all_gather(value: T) -> list[T]:
    """The values of all ranks, in their order. They are pickled and should be small. A collective."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result. A collective.

    Raises the error of this rank; if there is none, FileMistake or Failure with the text of the first rank that failed.
    """
    try:
        result = action()
    except EXCEPTION_TYPES as error:
        # The text travels, not the error: pickling would lose the cause behind it.
        cause = root_cause(error)
        kind = UsageFileError if isinstance(cause, OSError | ValueError | SafetensorError) else RunFailure
        all_gather((kind, describe(cause)))
        raise
    failed: list[tuple[type[Exception], str] | None] = all_gather(None)
    for other, each in enumerate(failed):
        if each is not None:
            kind, text = each
            raise kind(f"rank {other}: {text}")
    return result


def call_on_main(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0 only, and returns its result on every rank, pickled. A collective.

    Raises, on every rank, an OSError or ValueError of `make`.
    """
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = make()
        except (OSError, ValueError) as error:
            box[1] = error
    if is_distributed():
        # The others sleep until rank 0 is done, which may take longer than a collective waits.
        wait_for_main()
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    value, error = box
    if error is not None:
        raise error
    return value


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank. The others sleep until rank 0 is here, too. A collective."""
    if not is_distributed():
        return bool(flag)
    wait_for_main()
    highest = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return bool(highest.item())


def root_cause(error: BaseException) -> BaseException:
    """The error that began a chain of errors."""
    while True:
        # DCP collects the errors of all ranks in one of its own.
        if isinstance(error, CheckpointException) and error.failures:
            failures = [failure for failure, _ in error.failures.values()]
            # A Ctrl-C counts more than any other error.
            error = next((e for e in failures if not isinstance(e, Exception)), failures[0])
        elif error.__cause__ is not None:
            error = error.__cause__
        # When a write fails, torch's zip writer raises a RuntimeError about its position, which hides the first error.
        elif type(error) is RuntimeError and error.__context__ is not None and "unexpected pos" in str(error):
            error = error.__context__
        else:
            return error


def describe(cause: BaseException) -> str:
    """The text of an error, with its type where the text may not be clear without it."""
    return str(cause) if isinstance(cause, (OSError, ValueError)) else f"{type(cause).__name__}: {cause}"
