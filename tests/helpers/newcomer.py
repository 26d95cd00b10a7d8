"""The path of a new user: the files and commands of docs/how_to/reward_function.md, in an otherwise empty folder."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.forked_runs import forked
from helpers.own_files import shown_commands, shown_files, write_files
from helpers.tiny_runs import environment

# The scripts `tune` and `torchtune-ext` run these modules.
PROGRAMS = {"python": [], "tune": ["-m", "torchtune._cli.tune"], "torchtune-ext": ["-m", "torchtune_ext"]}


def walk(page: Path, folder: Path, shorter: Mapping[str, Sequence[str]] | None = None) -> dict[str, str]:
    """Write the files of the page and run its commands.

    Args:
        page: docs/how_to/reward_function.md.
        folder: working directory.
        shorter: recipe -> arguments added to its `tune run`.

    Returns:
        Output of each command, by its last argument that is not an option: "my_run.yaml", "runs/mine/grpo", ...
    """
    write_files(shown_files(page), folder)
    printed = {}
    for words in shown_commands(page, "python make_questions.py"):
        more = [word for recipe, given in (shorter or {}).items() if recipe in words for word in given]
        printed[words[-1]] = typed(folder, *words, *more)
    return printed


def typed(folder: Path, program: str, *words: str, timeout: float = 1500, threads: int = 1) -> str:
    """Run a command in a folder; it must succeed. Return its output."""
    if threads == 1 and (program == "torchtune-ext" or words[0] == "run"):
        status, output = forked(folder, list(words), {}, timeout)
    else:
        command = [sys.executable, *PROGRAMS[program], *words]
        env = environment() | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout)
        status, output = done.returncode, done.stdout + done.stderr
    assert status == 0, output[-6000:]
    return output
