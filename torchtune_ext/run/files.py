"""Writes files and folders so that each one is whole or absent, however the process ends."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_ext.run.errors import UsageFileError

log = logging.getLogger(__name__)

# A killed process leaves files and folders with these names. A folder is half written (PARTIAL), half deleted (PRUNED),
# or was moved out of the way while another one takes its place (REPLACED).
_LEFTOVER_NAME = re.compile(r"\.(?:(.+)\.\d+\.tmp|(?:partial|pruned|replaced)_(.+))")
PARTIAL_PREFIX, PRUNED_PREFIX, REPLACED_PREFIX = ".partial_", ".pruned_", ".replaced_"
# The answers of file systems that flush files but not folders (SMB, some FUSE mounts).
_FSYNC_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_warned_devices: set[int] = set()  # the devices of file systems that a warning has named


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Writes a file. A reader sees the old one or the new one, and never a part.

    With `sync=False` there is no fsync: the file is whole after kill -9, but may be empty after a power cut.
    After an OSError the old file is untouched.
    """
    # A rename replaces a file atomically, but only within one file system, so the temporary file lies beside it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        # The temporary file is still there only if something above raised.
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, names: str = ".+") -> list[Path]:
    """Cleans up what killed processes left of files and folders with certain names, a regular expression.

    Returns the paths. Nobody may write to them meanwhile.
    """
    paths = sorted(
        path
        for path in folder.glob(".*")
        if (match := _LEFTOVER_NAME.fullmatch(path.name)) and re.fullmatch(names, match[1] or match[2])
    )
    for path in paths:
        place = folder / path.name.removeprefix(REPLACED_PREFIX)
        # The process was killed between the two renames of `put_in_place`. The old folder is the whole one.
        if path.name.startswith(REPLACED_PREFIX) and not os.path.lexists(place):
            path.rename(place)
            log.warning("%s had not been replaced when the run was killed: it is back in its place", place)
        else:
            remove_path(path)
    return paths


def remove_path(path: Path) -> None:
    """Deletes a file or folder that nobody needs. A failure is only a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s is not needed any more but cannot be deleted: %s; the next start tries again", path, error)


def partial_path(folder: Path) -> Path:
    """Returns the path at which a folder is written before `put_in_place` renames it."""
    return folder.with_name(PARTIAL_PREFIX + folder.name)


def make_empty_folder(folder: Path) -> None:
    """Makes an empty folder, or empties the one that is there."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def finalize_folder(folder: Path) -> None:
    """Renames the finished `partial_of(folder)` to `folder`, whose earlier content is removed."""
    partial, old = partial_path(folder), folder.with_name(REPLACED_PREFIX + folder.name)
    # A power cut must not keep the name and lose the content, so the content reaches the disk before the rename.
    for path in [*partial.rglob("*"), partial]:
        fsync_path(path)
    try:
        # A folder cannot take the place of one that is not empty. The old one moves away first, and is deleted last.
        if folder.exists():
            if old.exists():
                remove_path(old)
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        # A Ctrl-C may come as either rename has just been made.
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    fsync_path(folder.parent)
    if old.exists():
        remove_path(old)


def rename_and_remove(folder: Path) -> None:
    """Deletes a folder, whose name vanishes before its content does. A failure is only a warning."""
    aside = _unused_path(folder.with_name(PRUNED_PREFIX + folder.name))
    try:
        folder.rename(aside)
        # Otherwise a power cut could undo the rename and keep the deletions.
        fsync_path(folder.parent)
    except OSError as error:
        log.warning("%s is not needed any more but cannot be removed: %s", folder, error)
    else:
        remove_path(aside)


def fsync_path(path: Path) -> None:
    """Returns when the file or the entries of the folder are on the disk. Only a warning says that a folder cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FSYNC_UNSUPPORTED or not path.is_dir():
            raise
        if (device := path.stat().st_dev) not in _warned_devices:
            _warned_devices.add(device)
            log.warning(
                "%s: this file system cannot flush a folder (%s): a power cut may undo the newest checkpoint",
                path.parent,
                error.strerror,
            )
    finally:
        os.close(descriptor)


def _unused_path(path: Path) -> Path:
    name, number = path.name, 1
    while path.exists() or path.is_symlink():
        number += 1
        path = path.with_name(f"{name}-{number}")
    return path


@contextmanager
def explain_os_errors(what: str, fix: str) -> Iterator[None]:
    """Turns an OSError in the block into a `FileMistake`, whose message names the file and the fix."""
    try:
        yield
    except OSError as error:
        # The text of a bare OSError, for instance "[Errno 28]", tells the user neither.
        raise UsageFileError(f"{what}: {error.strerror or error}. {fix}") from error
