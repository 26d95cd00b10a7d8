"""Runs that are refused before anything starts: tried one after the other by one process, which imports PyTorch once for all.

Each is tried in a fork of that process, so that none sees what another has left. All that the fork shares with a run of its own
is what `import` does.

    python -m refusals     # reads {"folder": ..., "words": [...], "log": ...}, answers with the exit status; a line each
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_runs import command, environment

_process: subprocess.Popen | None = None


def refused(folder: Path, recipe: str, *args: str, config: str = "run.yaml") -> str:
    """Starts a recipe as `recipe_runs.run` does, which must end as a mistake does, with status 2. Returns what it printed."""
    global _process
    if _process is None or _process.poll() is not None:
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        _process = subprocess.Popen(
            [sys.executable, "-m", "refusals"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "PYTHONPATH": path},
            text=True,
        )
    with tempfile.NamedTemporaryFile("r") as log:
        words = command(recipe, *args, config=config)
        order = {"folder": str(folder), "words": words[words.index("run") :], "log": log.name}
        _process.stdin.write(json.dumps(order) + "\n")
        _process.stdin.flush()
        status, output = _process.stdout.readline().strip(), log.read()
    assert status == "2", (status, output[-6000:])
    return output


def main() -> None:
    """Lives until the tests close its stdin, at their end at the latest."""
    from torchtune_ext.host import cli, plugin

    plugin.install()
    # With all that they import.
    import torchtune._cli.tune  # noqa: F401

    import torchtune_ext.recipes.grpo  # noqa: F401

    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
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
