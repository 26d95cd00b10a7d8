"""The command `tune` of this environment, as pip makes it for torchtune.

Ray has a command of the same name. pip knows no owner of a file: whichever is installed later overwrites it, and uninstalling
either removes it. So it can be written again, without a package index.
"""

import os
import sys
import sysconfig
from pathlib import Path

SCRIPT = """\
import sys
from torchtune._cli.tune import main
if __name__ == "__main__":
    sys.exit(main())
"""
MAX_FIRST_LINE = 127  # characters of the first line of a script that older Linux reads


def own_tune() -> Path:
    """Returns where this environment keeps its `tune`, whether or not there is one: beside our own command."""
    folders = [
        Path(sysconfig.get_path("scripts", scheme)) for scheme in (sysconfig.get_default_scheme(), f"{os.name}_user")
    ]
    return next((each for each in folders if (each / "torchtune-ext").exists()), folders[0]) / "tune"


def is_torchtunes(path: Path) -> bool:
    """Tells whether the script is that of torchtune."""
    return path.is_file() and "torchtune._cli.tune" in path.read_text(encoding="utf-8", errors="replace")


def mend(path: Path) -> bool:
    """Writes the script if it is missing or another program's. Returns whether it did."""
    if is_torchtunes(path):
        return False
    first = f"#!{sys.executable}"
    if len(first) > MAX_FIRST_LINE or " " in first:
        # The shell starts Python, which reads these lines as a string.
        first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    new = path.with_name(f".tune.{os.getpid()}.tmp")
    new.write_text(f"{first}\n{SCRIPT}")
    new.chmod(0o755)
    new.replace(path)
    return True
