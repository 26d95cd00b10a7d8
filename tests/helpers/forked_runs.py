"""Runs and scripts in forks of one process, which imports PyTorch once for all of them.

Forks are isolated from each other. They share only the imports, which take most of the time of a run whose engine is a server,
and of a script with a few rows.

    python -m helpers.forked_runs    # reads {"folder": ..., "words": [...], "environs": [...], "log": ...}, answers with the statuses
"""

import gc
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.servers import free_port
from helpers.tiny_runs import command, environment
from torchtune_ext.run.process_env import die_with_parent

_process: subprocess.Popen | None = None


def refused(folder: Path, recipe: str, *args: str, config: str = "run.yaml") -> str:
    """Run a recipe that must exit with a usage error, status 2. Return its output."""
    status, output = forked(folder, command(recipe, *args, config=config)[3:], {})
    assert status == 2, (status, output[-6000:])
    return output


def forked_ranks(folder: Path, script: str, *args: str, ranks: int, timeout: float = 300, status: int = 0) -> str:
    """Run a script of `folder` on this many ranks, as under srun; each must exit with `status`. Return their output."""
    here = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [{**here, "RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    statuses, output = _forked(folder, [script, *args], environs, timeout)
    assert statuses == [status] * ranks, (statuses, output[-6000:])
    return output


def forked(folder: Path, words: list[str], environ: Mapping[str, str], timeout: float = 300) -> tuple[int, str]:
    """Run arguments of `torchtune-ext` to their end. Return status and output."""
    (status,), output = _forked(folder, words, [environ], timeout)
    return status, output


def _forked(
    folder: Path, words: list[str], environs: Sequence[Mapping[str, str]], timeout: float
) -> tuple[list[int], str]:
    """Run `words` in one process for each additional environment. Return the exit statuses and the output."""
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
        environs = [{**environment(), **environ} for environ in environs]
        order = {"folder": str(folder), "words": words, "environs": environs, "log": log.name}
        try:
            _process.stdin.write(json.dumps(order) + "\n")
            _process.stdin.flush()
            if not select.select([_process.stdout], [], [], timeout)[0]:
                raise AssertionError(f"the run did not exit within {timeout:g} s:\n{log.read()[-6000:]}")
            return json.loads(_process.stdout.readline()), log.read()
        except BaseException:  # also pytest's timeout: the next order must not get this one's answer
            _process.kill()  # and with it the forks
            _process.wait()
            raise


def main() -> None:
    """Serve runs until the tests close stdin."""
    from torchtune_ext.cli import cli, plugin
    from torchtune_ext.sampling.prestart import prestart_client

    plugin.install()
    # Including all of their imports.
    import torchtune._cli.tune  # noqa: F401

    import torchtune_ext.recipes.grpo
    import torchtune_ext.recipes.warmup_sft  # noqa: F401

    gc.freeze()  # Else the garbage collector of each fork would copy all pages of these imports.
    me = os.getpid()
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for line in orders:
        order, children = json.loads(line), []
        for environ in order["environs"]:
            children.append(os.fork())
            if children[-1] == 0:
                die_with_parent(me)
                os.environ.clear()
                os.environ.update(environ)
                os.chdir(order["folder"])
                log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                # As `python -m` does, so that a task in this folder is found.
                sys.path.insert(0, order["folder"])
                words = order["words"]
                if words[0].endswith(".py"):
                    sys.argv = words
                    runpy.run_path(words[0], run_name="__main__")
                    sys.exit()
                if words[0] == "run":
                    prestart_client(words[1:])  # as the hook of `tune run` does
                sys.exit(cli.main(words))
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(statuses, file=answers, flush=True)


if __name__ == "__main__":
    main()
