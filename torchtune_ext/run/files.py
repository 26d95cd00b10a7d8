"""Write files and folders atomically: after a crash, each is complete or absent."""

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

# A killed process leaves files and folders with these names. A folder is partially written
# (PARTIAL), partially deleted (PRUNED), or moved away for its replacement (REPLACED).
_LEFTOVER_NAME = re.compile(r"\.(?:(.+)\.\d+\.tmp|(?:partial|pruned|replaced)_(.+))")
PARTIAL_PREFIX, PRUNED_PREFIX, REPLACED_PREFIX = ".partial_", ".pruned_", ".replaced_"
# The errors of file systems that flush files but not folders (SMB, some FUSE mounts).
_FSYNC_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
_warned_devices: set[int] = set()  # devices of file systems with a logged warning


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Write a file atomically: a reader sees the old content (also after an OSError) or the new.

    Args:
        path: the file.
        data: its new content.
        sync: whether to fsync. Without fsync the file is complete after kill -9, but may be empty
            after a power failure.
    """
    # A rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it still exists only after an error


def remove_leftovers(folder: Path, names: str = ".+") -> list[Path]:
    """Remove or restore the leftovers of killed processes, which no other process may write to.

    Args:
        folder: the folder to clean up.
        names: a regular expression of the original names.

    Returns:
        The paths that were removed or restored.
    """
    paths = sorted(
        path
        for path in folder.glob(".*")
        if (match := _LEFTOVER_NAME.fullmatch(path.name)) and re.fullmatch(names, match[1] or match[2])
    )
    for path in paths:
        place = folder / path.name.removeprefix(REPLACED_PREFIX)
        # A kill between the two renames of `finalize_folder` leaves the complete old folder.
        if path.name.startswith(REPLACED_PREFIX) and not os.path.lexists(place):
            path.rename(place)
            log.warning("%s: the run was killed before it replaced this folder; restored the old folder", place)
        else:
            remove_path(path)
    return paths


def remove_path(path: Path) -> None:
    """Delete an unused file or folder. A failure is only logged as a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("cannot delete the unused %s: %s; the next start retries", path, error)


def partial_path(folder: Path) -> Path:
    """Return the path at which a folder is written before `finalize_folder` renames it."""
    return folder.with_name(PARTIAL_PREFIX + folder.name)


def make_empty_folder(folder: Path) -> None:
    """Create an empty folder; the content of an existing folder is deleted."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def finalize_folder(folder: Path) -> None:
    """Rename the complete `partial_path(folder)` to `folder`; the old content is removed."""
    partial, old = partial_path(folder), folder.with_name(REPLACED_PREFIX + folder.name)
    # A power failure must not keep the name without the content, so the content is flushed first.
    for path in [*partial.rglob("*"), partial]:
        fsync_path(path)
    try:
        # A rename cannot replace a folder with content. The old folder is deleted last.
        if folder.exists():
            if old.exists():
                remove_path(old)
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        # A Ctrl-C may arrive right after either rename.
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    fsync_path(folder.parent)
    if old.exists():
        remove_path(old)


def rename_and_remove(folder: Path) -> None:
    """Rename a folder and then delete it. A failure is only logged as a warning."""
    aside, number = folder.with_name(PRUNED_PREFIX + folder.name), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{PRUNED_PREFIX}{folder.name}-{number}")
    try:
        folder.rename(aside)
        # Otherwise a power failure could undo the rename but keep the deletions.
        fsync_path(folder.parent)
    except OSError as error:
        log.warning("cannot remove the unused %s: %s", folder, error)
    else:
        remove_path(aside)


def fsync_path(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk; log if folders cannot be flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FSYNC_UNSUPPORTED or not path.is_dir():
            raise
        if (device := path.stat().st_dev) not in _warned_devices:
            _warned_devices.add(device)
            log.warning(
                "%s: this file system cannot flush a folder (%s); a power failure may undo the newest checkpoint",
                path.parent,
                error.strerror,
            )
    finally:
        os.close(descriptor)


@contextmanager
def explain_os_errors(what: str, fix: str) -> Iterator[None]:
    """Turn an OSError in the block into a UsageFileError that names the file and the fix.

    Raises:
        UsageFileError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        # The text of an OSError, such as "[Errno 28]", names neither the file nor the fix.
        raise UsageFileError(f"{what}: {error.strerror or error}. Fix: {fix[:1].lower()}{fix[1:]}") from error
