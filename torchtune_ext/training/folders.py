"""Folders that are whole or absent, when they appear and when they go, however the process ends."""

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
    """Where a folder is written before it is renamed to its place."""
    return folder.with_name(PARTIAL + folder.name)


@contextmanager
def written_aside(folder: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Inside, `partial_of(folder)` is written by all ranks. What fails there leaves nothing and raises one OSError.

    Args:
        advice: the end of the message: what the user can do.

    Raises:
        OSError: with the true cause. KeyboardInterrupt and SystemExit go on as themselves.
    """
    try:
        yield
    except BaseException as error:
        if rank() == 0:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        if not isinstance(error, FAILURES):
            raise
        cause = true_cause(error)
        if not isinstance(cause, Exception):  # DCP wraps a Ctrl-C, too
            raise cause from None
        raise OSError(f"{folder} was not saved: {describe(cause)}. {advice()}") from error


def make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def put_in_place(folder: Path) -> None:
    """Renames the finished `partial_of(folder)` to `folder`; an earlier one goes when its place is taken."""
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
    """Deletes a folder under another name: no half of it is ever seen under its own. A failure is only a warning."""
    aside = _free(folder.with_name(PRUNED + folder.name))
    try:
        folder.rename(aside)
        sync(folder.parent)  # a power cut must not undo the renaming and keep the deletions
    except OSError as error:
        log.warning("%s is not needed any more but cannot be removed: %s", folder, error)
    else:
        remove(aside)


def rename_to_free(folder: Path, name: str) -> Path:
    """Renames a folder to `name`, or to `name-2`, `name-3`, ... where that is taken."""
    return folder.rename(_free(folder.with_name(name)))


def sync_tree(folder: Path) -> None:
    """Returns when all below the folder is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def sync(path: Path) -> None:
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
