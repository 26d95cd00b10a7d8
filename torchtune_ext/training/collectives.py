"""Joins the ranks and runs actions on all of them. If one rank fails, every rank raises.

Otherwise the other ranks would wait in a collective for the failed rank.
"""

import time
from collections.abc import Callable, Sequence
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
POLL_S = 0.05  # longest polling interval of a rank that waits for rank 0, in seconds
# The rendezvous store is global, as the process group is.
_store: dist.Store | None = None
# All ranks count their waits for rank 0, so that each wait has its own key in the store.
_wait_count = 0


class MainRankFailure(RunFailure):
    """Rank 0 failed while this rank waited for it."""


def join(backend: str, deadline_s: float) -> None:
    """Joins the process group that torchrun set up.

    Args:
        backend: torch.distributed backend, such as "gloo".
        deadline_s: timeout of every collective, in seconds.

    Raises:
        ValueError: an environment variable of torchrun is missing (raised by torch).
        RuntimeError: a rank did not join in time (raised by torch).
    """
    global _store
    limit = timedelta(seconds=deadline_s)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=limit))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    _store = dist.PrefixStore("torchtune_ext", store)


def rank() -> int:
    """The rank of this process; 0 in a run of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_distributed() -> bool:
    """Whether the run has more than one rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def wait_for_main() -> None:
    """Blocks until rank 0 calls this function, too. Rank 0 itself does not wait.

    Raises:
        MainRankFailure: rank 0 failed (`announce_main_failure`).
    """
    # Rank 0 samples and evaluates for longer than the deadline of a collective, so this wait has
    # no time limit.
    global _wait_count
    _wait_count += 1
    assert _store is not None  # since `join`
    if rank() == 0:
        _store.set(str(_wait_count), "")
        return
    # A blocking wait of the store would delay signal handlers until it returns.
    pause_s = 0.001
    while not _store.check([str(_wait_count)]):
        if _store.check([FAILURE_KEY]):
            raise MainRankFailure("rank 0 failed while this rank waited for it")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def announce_main_failure() -> None:
    """Ends `wait_for_main` on the other ranks if rank 0 calls it. Other ranks do nothing."""
    # The other ranks would not notice the exit of rank 0: torchrun's store outlives rank 0, and
    # torchrun's SIGTERM takes effect only at the end of a step.
    if _store is not None and rank() == 0:
        # If torchrun exited, too, the other ranks notice. The run's own error matters more.
        with suppress(RuntimeError):
            _store.set(FAILURE_KEY, "")


def all_gather(value: T) -> list[T]:
    """The values of all ranks, in rank order, pickled; values should be small. A collective."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_on_all_ranks(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result. A collective.

    Raises:
        Exception: the error of `action` on this rank.
        UsageFileError, RunFailure: `action` failed on another rank only. The message is that of the
            first rank that failed.
    """
    try:
        result = action()
    except EXCEPTION_TYPES as error:
        # Ranks exchange the text, not the error, because pickling would drop the error's cause.
        cause = root_cause(error)
        kind = UsageFileError if isinstance(cause, OSError | ValueError | SafetensorError) else RunFailure
        all_gather((kind, describe(cause)))
        raise
    failed: list[tuple[type[Exception], str] | None] = all_gather(None)
    for failed_rank, failure in enumerate(failed):
        if failure is not None:
            kind, text = failure
            raise kind(f"rank {failed_rank}: {text}")
    return result


def call_on_main(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0 only, and returns its result on every rank, pickled. A collective.

    Raises:
        OSError, ValueError: raised by `make`, on every rank.
    """
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome[0] = make()
        except (OSError, ValueError) as error:
            outcome[1] = error
    if is_distributed():
        # Rank 0 may take longer than the deadline of a collective, so the other ranks wait first.
        wait_for_main()
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
    value, error = outcome
    if error is not None:
        raise error
    return value


def scatter_from_main(values: Sequence[T]) -> T:
    """Returns rank 0's value for this rank, pickled. A collective.

    Args:
        values: on rank 0, one value per rank. Other ranks pass any sequence.
    """
    if not is_distributed():
        return values[0]
    wait_for_main()
    received: list[Any] = [None]
    dist.scatter_object_list(received, list(values), src=0)
    return received[0]


def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank. Other ranks first wait for rank 0. A collective."""
    if not is_distributed():
        return bool(flag)
    wait_for_main()
    flag_tensor = torch.tensor([int(flag)], dtype=torch.int32)
    dist.all_reduce(flag_tensor, op=dist.ReduceOp.MAX)
    return bool(flag_tensor.item())


def root_cause(error: BaseException) -> BaseException:
    """The first error of a chain of errors."""
    while True:
        # DCP collects the errors of all ranks in one CheckpointException.
        if isinstance(error, CheckpointException) and error.failures:
            failures = [failure for failure, _ in error.failures.values()]
            # KeyboardInterrupt takes precedence over other errors.
            error = next((e for e in failures if not isinstance(e, Exception)), failures[0])
        elif error.__cause__ is not None:
            error = error.__cause__
        # When a write fails, torch's zip writer raises a RuntimeError about its position, which
        # hides the first error.
        elif type(error) is RuntimeError and error.__context__ is not None and "unexpected pos" in str(error):
            error = error.__context__
        else:
            return error


def describe(cause: BaseException) -> str:
    """The text of an error, with the name of its class unless it is an OSError or ValueError."""
    return str(cause) if isinstance(cause, (OSError, ValueError)) else f"{type(cause).__name__}: {cause}"
