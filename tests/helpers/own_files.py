"""User files: a folder for imports, and the files that a page of docs/ shows."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHOWN = re.compile(
    r"^```\w*\n(?:# (?P<name>[\w/]+\.(?:py|yaml))\b[^\n]*\n)?(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@contextmanager
def working_in(folder: Path) -> Iterator[Path]:
    """Make `folder` the working directory and import path inside the block. Its modules are unloaded afterwards, since the
    next test may have other modules of the same names."""
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield folder
    finally:
        os.chdir(before)
        sys.path[:] = path
        # A copy, since another thread's import or the garbage collector may change sys.modules.
        for name, module in sys.modules.copy().items():
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def shown_files(page: Path) -> dict[str, str]:
    """Return the files of a page: code blocks that begin with "# NAME.py". A later block of the same name is appended."""
    files: dict[str, str] = {}
    for block in SHOWN.finditer(page.read_text()):
        if block["name"]:
            files[block["name"]] = files.get(block["name"], "") + block[0].split("\n", 1)[1].removesuffix("```")
    return files


def write_files(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def shown_commands(page: Path, first: str) -> list[list[str]]:
    """Return the arguments of the commands of the block that begins with the command `first`."""
    blocks = [block["text"] for block in SHOWN.finditer(page.read_text()) if block["text"].startswith(first)]
    assert len(blocks) == 1, f"{len(blocks)} blocks of {page.name} begin with {first!r}"
    return [line.split("#")[0].split() for line in blocks[0].splitlines()]
