"""Which code measures: results of another one are not compared with its own."""

import hashlib
from pathlib import Path

import torchtune_ext


def version() -> str:
    """Returns the version of torchtune_ext on this machine, with a digest of all that measures."""
    digest = hashlib.sha256()
    folder = Path(torchtune_ext.__file__).parent / "measured"
    for path in sorted(path for ending in ("*.py", "*.c") for path in folder.rglob(ending)):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
