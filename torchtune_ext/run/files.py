"""Files that are whole or absent, however the process ends."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # what `write_atomic` calls its temporary files


def write_atomic(path: Path, data: bytes, sync: bool = True) -> None:
    """Write `data` to `path` through a temporary file beside it; a reader sees the old file or the new one.

    `sync=False` leaves out the fsync: still whole after kill -9, perhaps empty after a power cut.
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
        temporary.unlink(missing_ok=True)  # only there when something above raised


def sweep(folder: Path) -> None:
    """Removes the temporary files that a killed `write_atomic` left in `folder`. No folder: nothing to do."""
    for path in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    """Turns an OSError in the block, a bare "[Errno 28]" say, into one that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error.strerror or error}. {fix}") from error
