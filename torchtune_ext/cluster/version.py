"""Which code a machine has: a run is of one version alone."""

import hashlib
from pathlib import Path

import torchtune_ext


def version() -> str:
    """Returns the version of torchtune_ext on this machine, with a digest of its files."""
    digest, folder = hashlib.sha256(), Path(torchtune_ext.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
