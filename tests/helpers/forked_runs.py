"""Runs in forks of one process, which imports PyTorch once for all of them.

Runs are isolated from each other. The forks share only the imports, which take most of the time of a run whose engine is a
server.

    python -m helpers.forked_runs    # reads {"folder": ..., "words": [...], "environ": {...}, "log": ...}, answers with the exit status
"""

import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path

from helpers.tiny_runs import command, environment
from torchtune_ext.run.process_env import die_with_parent

_process: subprocess.Popen | None = None


def refused(folder: Path, recipe: str, *args: str, config: str = "run.yaml") -> str:
    """Run a recipe that must exit with a usage error, status 2. Return its output."""
    status, output = forked(folder, command(recipe, *args, config=config), environment())
    assert status == 2, (status, output[-6000:])
    return output


def forked(folder: Path, words: list[str], environ: dict[str, str], timeout: float = 300) -> tuple[int, str]:
    """Run `words`, a command of `tiny_runs.command`, to its end. Return its status and its output."""
    global _process
    if _process is None or _process.poll() is not None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        _process = subprocess.Popen(
            [sys.executable, "-m", "helpers.forked_runs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "PYTHONPATH": path},
            text=True,
        )
    with tempfile.NamedTemporaryFile("r") as log:
        words = words[words.index("run") :]
        order = {"folder": str(folder), "words": words, "environ": environ, "log": log.name}
        _process.stdin.write(json.dumps(order) + "\n")
        _process.stdin.flush()
        if not select.select([_process.stdout], [], [], timeout)[0]:
            _process.kill()  # and with it the fork
            raise AssertionError(f"the run did not exit within {timeout:g} s:\n{log.read()[-6000:]}")
        return int(_process.stdout.readline()), log.read()


def main() -> None:
    """Serve runs until the tests close stdin."""
    from torchtune_ext.cli import cli, plugin

    plugin.install()
    # Including all of their imports.
    import torchtune._cli.tune  # noqa: F401

    import torchtune_ext.recipes.grpo  # noqa: F401

    me = os.getpid()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            die_with_parent(me)
            os.environ.clear()
            os.environ.update(order["environ"])
            os.chdir(order["folder"])
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # As `python -m` does, so that a task in this folder is found.
            sys.path.insert(0, order["folder"])
            sys.exit(cli.main(order["words"]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
