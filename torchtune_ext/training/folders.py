"""Makes and removes folders so that each one is whole or absent, however the process ends."""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_ext.run.files import PARTIAL, PRUNED, REPLACED, remove
from torchtune_ext.training.outcome import FAILURES, describe, rank, true_cause

log = logging.getLogger(__name__)


def partial_of(folder: Path) -> Path:
    """Returns the path where a folder is written before it is renamed to its place."""
    return folder.with_name(PARTIAL + folder.name)


@contextmanager
def written_aside(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Surrounds the code by which all ranks write `partial_of(folder)`. If it fails, the folder is removed.

    Args:
        folder: the final place of the folder.
        advice: returns the end of the message, which says what the user can do.

    Raises:
        OSError: the block failed. The message has the true cause. KeyboardInterrupt and SystemExit are raised
            unchanged.
    """
    try:
        yield
    except BaseException as error:
        if rank() == 0:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        if not isinstance(error, FAILURES):
            raise
        cause = true_cause(error)
        # DCP wraps a Ctrl-C as well, which must stop the run and not become an OSError.
        if not isinstance(cause, Exception):
            raise cause from None
        raise OSError(f"{folder} was not saved: {describe(cause)}. {advice()}") from error


def make_empty(folder: Path) -> None:
    """Makes an empty folder, in place of an earlier one if there is one."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def put_in_place(folder: Path) -> None:
    """Renames the finished `partial_of(folder)` to `folder`. An earlier folder is removed after that."""
    partial, old = partial_of(folder), None
    sync_tree(partial)
    if folder.exists():
        old = folder.with_name(REPLACED + folder.name)
        if old.exists():
            remove(old)
        folder.rename(old)
    try:
        partial.rename(folder)
    except BaseException:
        if old is not None:
            old.rename(folder)
        raise
    sync(folder.parent)
    if old is not None:
        remove(old)


def discard(folder: Path) -> None:
    """Renames a folder and then deletes it, so that its name never shows half of it. A failure is only a warning."""
    aside = _free(folder.with_name(PRUNED + folder.name))
    try:
        folder.rename(aside)
        # Without this, a power cut could undo the renaming but keep the deletions.
        sync(folder.parent)
    except OSError as error:
        log.warning("%s is not needed any more but cannot be removed: %s", folder, error)
    else:
        remove(aside)


def rename_to_free(folder: Path, name: str) -> Path:
    """Renames a folder to `name`, or to `name-2`, `name-3`, ... if that exists already. Returns the new path."""
    return folder.rename(_free(folder.with_name(name)))


def sync_tree(folder: Path) -> None:
    """Returns when the folder and everything below it are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Returns when the file or the entries of the folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> Path:
    name, number = path.name, 1
    while path.exists() or path.is_symlink():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path
