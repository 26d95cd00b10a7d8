"""Writes files and folders so that each one is whole or absent, however the process ends."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_ext.run.errors import FileMistake

log = logging.getLogger(__name__)

# A killed process leaves files and folders with these names. A folder is half written (PARTIAL), half deleted (PRUNED),
# or was moved out of the way while another one takes its place (REPLACED).
_STRAYS = re.compile(r"\.(.+\.\d+\.tmp|partial_.+|pruned_.+)")
PARTIAL, PRUNED, REPLACED = ".partial_", ".pruned_", ".replaced_"


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Writes `data` to `path` through a temporary file beside it. A reader sees the old file or the new one.

    With `sync=False` there is no fsync: the file is still whole after kill -9, but it may be empty after a power cut.

    Raises:
        OSError: the file cannot be written. The old one is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # After the rename the temporary file no longer exists. It is there only when something above raised.
        temporary.unlink(missing_ok=True)


def sweep(folder: Path) -> list[Path]:
    """Cleans up what killed processes left in `folder`, and returns the paths that it found there.

    Nobody else may write into the folder meanwhile. What was half written or half deleted is removed. A folder that was
    moved out of the way for another one comes back if its place is still empty.
    """
    paths = sorted(path for path in folder.glob(".*") if _STRAYS.fullmatch(path.name) or path.name.startswith(REPLACED))
    for path in paths:
        place = folder / path.name.removeprefix(REPLACED)
        if path.name.startswith(REPLACED) and not os.path.lexists(place):
            path.rename(place)
            log.warning("%s had not been replaced when the run was killed: it is back in its place", place)
        else:
            remove(path)
    return paths


def remove(path: Path) -> None:
    """Deletes a file or folder that nobody needs. A failure is logged as a warning and does not raise."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s is not needed any more but cannot be deleted: %s; the next start tries again", path, error)


def partial_of(folder: Path) -> Path:
    """Returns the path where a folder is written before it is renamed to its place."""
    return folder.with_name(PARTIAL + folder.name)


def make_empty(folder: Path) -> None:
    """Makes an empty folder, in place of an earlier one if there is one."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def put_in_place(folder: Path) -> None:
    """Renames the finished `partial_of(folder)` to `folder`. An earlier folder is removed after that."""
    partial, old = partial_of(folder), None
    for path in [*partial.rglob("*"), partial]:
        sync(path)
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


@contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    """Turns an OSError in the block into one that names the file and the fix.

    The message of a bare OSError, for example "[Errno 28]", tells the user neither.
    """
    try:
        yield
    except OSError as error:
        raise FileMistake(f"{what}: {error.strerror or error}. {fix}") from error
