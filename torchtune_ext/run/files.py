"""Files that are whole or absent, however the process ends."""

import os
from pathlib import Path


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


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run to `name.old-1` (or the next free number). Nothing is deleted."""
    if not path.exists():
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(target)
    return target
