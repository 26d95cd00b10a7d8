"""Folders that belong to a process while it lives, and that the next one removes when it was killed.

A folder is owned by the process that holds the lock on it (flock(2) on the folder itself). The kernel ends the lock with the
process, however it dies. The number of a process, which may be another's by then, is never used. A process that was forked
holds the lock, too, so a folder is not taken from those who may still use it.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from torchtune_ext.run.errors import FileMistake


class Owned:
    """A new folder of this process. Those whose owners have ended are removed before.

    Folders of other users are never among them, nor is one that is only linked to.

    Args:
        parent: where it is made.
        prefix: how its name begins.
        remove: removes a folder. Until it returns, nobody else does.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, parent: Path, prefix: str, remove: Callable[[Path], object]) -> None:
        self._remove = remove
        for path in parent.glob(prefix + "*"):
            file = _lock(path)
            if file is not None:
                remove(path)
                os.close(file)
        while True:
            self.path = parent / (prefix + secrets.token_hex(8))
            self.path.mkdir(mode=0o700)
            self._file = _lock(self.path)
            # Before it was locked, another process that cleans up may have removed it.
            if self._file is not None:
                return

    def close(self) -> None:
        """Removes the folder. A second call does nothing."""
        if self._file is not None:
            self._remove(self.path)
            os.close(self._file)
            self._file = None


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
