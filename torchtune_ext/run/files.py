"""Files that are whole or absent, however the process ends."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

# Names of what a killed process leaves. Folders: half written, half deleted, or out of the way while another takes their place.
_STRAYS = re.compile(r"\.(.+\.\d+\.tmp|partial_.+|pruned_.+)")
PARTIAL, PRUNED, REPLACED = ".partial_", ".pruned_", ".replaced_"


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


def sweep(folder: Path) -> list[Path]:
    """Mends what killed processes left in `folder`; nobody else may be writing there. Returns what was found.

    What was half written or half deleted goes. What was out of the way, while another was about to take its place, comes back
    if that place is still empty.
    """
    found = sorted(path for path in folder.glob(".*") if _STRAYS.fullmatch(path.name) or path.name.startswith(REPLACED))
    for path in found:
        place = folder / path.name.removeprefix(REPLACED)
        if path.name.startswith(REPLACED) and not os.path.lexists(place):
            path.rename(place)
            log.warning("%s had not been replaced when the run was killed: it is back in its place", place)
        else:
            remove(path)
    return found


def remove(path: Path) -> None:
    """Deletes a file or folder that nobody needs; a failure is only a warning."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        log.warning("%s is not needed any more but cannot be deleted: %s; the next start tries again", path, error)


@contextmanager
def explained(what: str, fix: str) -> Iterator[None]:
    """Turns an OSError in the block, a bare "[Errno 28]" say, into one that names the file and the fix."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error.strerror or error}. {fix}") from error
