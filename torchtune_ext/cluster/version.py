"""Which code a machine has: a run is of one version alone."""

import hashlib
from importlib import import_module
from pathlib import Path

import torchtune_ext

APART = ("recipes", "configs", "kernels")  # these lie beside the package in a checkout, and in it once it is installed


def version() -> str:
    """Returns the version of torchtune_ext on this machine, with a digest of its files."""
    digest = hashlib.sha256()
    for name in ("", *APART):
        (folder,) = import_module(".".join(filter(None, ["torchtune_ext", name]))).__path__
        for path in sorted(Path(folder).rglob("*")):
            inside = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in inside.parts and (name or inside.parts[0] not in APART):
                digest.update(f"{name}/{inside}\0".encode() + path.read_bytes() + b"\0")
    return f"{torchtune_ext.__version__} ({digest.hexdigest()[:12]})"
