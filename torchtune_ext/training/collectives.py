"""Runs an action on every rank. A failure on one is a failure on all, so that no rank waits for one that gave up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtune_ext.run.errors import FileMistake

T = TypeVar("T")
FAILURES = (Exception, CheckpointException)  # the exception of DCP derives from BaseException, so it is named here


def rank() -> int:
    """Returns the number of this rank, which is 0 in a run of one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def distributed() -> bool:
    """Tells whether the run has more than one rank."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gathered(value: T) -> list[T]:
    """Returns the values of all ranks, in their order. They are pickled and should be small. A collective."""
    if not distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result. A collective.

    Raises:
        Exception: the error that `action` raised on this rank.
        OSError: `action` raised on another rank. The message has the error of the first such rank.
    """
    error: BaseException | None = None
    try:
        result = action()
    except FAILURES as raised:
        error = raised
    texts = gathered(None if error is None else describe(true_cause(error)))
    if error is not None:
        raise error
    for other, text in enumerate(texts):
        if text is not None:
            raise FileMistake(f"rank {other}: {text}")
    return result


def from_main(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0 only, and returns its result on every rank. A collective.

    Raises:
        OSError or ValueError: `make` raised it on rank 0.
    """
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = make()
        except (OSError, ValueError) as error:
            box[1] = error
    if distributed():
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    value, error = box
    if error is not None:
        raise error
    return value


def true_cause(error: BaseException) -> BaseException:
    """Returns the error that began a chain of errors.

    It looks behind `raise ... from`, behind the exception of DCP that collects the errors of the ranks, and behind
    errors of torch's zip writer.
    """
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            failures = [failure for failure, _ in error.failures.values()]
            # A Ctrl-C counts more than any other error.
            error = next((e for e in failures if not isinstance(e, Exception)), failures[0])
        elif error.__cause__ is not None:
            error = error.__cause__
        # When a write fails, the zip writer raises a RuntimeError about its position, which hides the error of the
        # write.
        elif type(error) is RuntimeError and error.__context__ is not None and "unexpected pos" in str(error):
            error = error.__context__
        else:
            return error


def describe(cause: BaseException) -> str:
    """Returns the text of an error. The type is left out where the text is clear without it."""
    return str(cause) if isinstance(cause, (OSError, ValueError)) else f"{type(cause).__name__}: {cause}"
