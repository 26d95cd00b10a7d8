"""Folders that belong to a process while it lives, and that the next one removes when it was killed.

A folder is owned by the process that holds the lock on it (flock(2) on the folder itself). The kernel ends the lock with the
process, however it dies. The number of a process, which may be another's by then, is never used. A process that was forked
holds the lock, too, so a folder is not taken from those who may still use it.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtune_ext.run.errors import FileMistake


class Owned:
    """A new folder of this process.

    Args:
        parent: where it is made.
        prefix: how its name begins.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, prefix: str) -> None:
        while True:
            self.path = parent / (prefix + secrets.token_hex(8))
            self.path.mkdir(mode=0o700)
            self._file = _lock(self.path)
            # Before it was locked, another process that cleans up may have removed it.
            if self._file is not None:
                return

    def close(self) -> None:
        """Gives the lock back. What is in the folder is the caller's business."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def left_behind(parent: Path, prefix: str) -> Iterator[list[Path]]:
    """Yields the folders whose owners have ended, and keeps them from everybody else until the block ends.

    Folders of other users are never among them, nor is one that is only linked to.
    """
    locks: dict[Path, int] = {}
    try:
        for path in parent.glob(prefix + "*"):
            file = _lock(path)
            if file is not None:
                locks[path] = file
        yield list(locks)
    finally:
        for file in locks.values():
            os.close(file)


def _lock(path: Path) -> int | None:
    """Locks a folder of this user and returns its file, or None where somebody else holds it or it is gone."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise FileMistake(f"{path} is another user's")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()  # its owner may have removed it meanwhile
    except OSError:
        os.close(file)
        return None
    return file
