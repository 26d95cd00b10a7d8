"""What became of an action on every rank: a failure on one is a failure on all, so that none waits for one that gave up."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
FAILURES = (Exception, CheckpointException)  # DCP's own type derives from BaseException


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def distributed() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def gathered(value: T) -> list[T]:
    """The values (pickled, small) of all ranks, in their order: a collective."""
    if not distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(action: Callable[[], T]) -> T:
    """Runs `action` on every rank and returns its result: a collective.

    Raises:
        Exception: what `action` raised here, or an OSError with what it raised on the first of the other ranks.
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
            raise OSError(f"rank {other}: {text}")
    return result


def from_main(make: Callable[[], T]) -> T:
    """What `make` returns on rank 0, where alone it runs, or the OSError or ValueError that it raises: a collective."""
    box: list[Any] = [None, None]
    if rank() == 0:
        try:
            box[0] = make()
        except (OSError, ValueError) as error:
            box[1] = error
    if distributed():
        dist.broadcast_object_list(box, src=0)
    value, error = box
    if error is not None:
        raise error
    return value


def true_cause(error: BaseException) -> BaseException:
    """What really went wrong: below `raise ... from`, below DCP's wrapper of the ranks' errors, below torch's zip writer."""
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            found = [failure for failure, _ in error.failures.values()]
            error = next((e for e in found if not isinstance(e, Exception)), found[0])  # a Ctrl-C before all else
        elif error.__cause__ is not None:
            error = error.__cause__
        # The zip writer complains of its position (a RuntimeError) while the error of the write goes by.
        elif type(error) is RuntimeError and error.__context__ is not None and "unexpected pos" in str(error):
            error = error.__context__
        else:
            return error


def describe(cause: BaseException) -> str:
    return str(cause) if isinstance(cause, (OSError, ValueError)) else f"{type(cause).__name__}: {cause}"
