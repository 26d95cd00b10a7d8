"""The process of vLLM's EngineCore: started early, in an environment of its own, bound to the life of the trainer.

vLLM would spawn this process itself, with `multiprocessing`, after the trainer has imported vLLM. That has four
faults for us: the core imports vLLM only when the trainer has done so (twice the wait), it inherits the trainer's
environment (while on CPU the core alone needs `TORCHDYNAMO_DISABLE=1` and one OpenMP thread), it imports the trainer's
`__main__` once more (a whole recipe under `tune run`), and it lives on for ever when the trainer is killed.

So the trainer starts `python -m torchtune_ext.sampling.core_process`, which asks the kernel to be killed with its
parent, imports vLLM at once, and waits on stdin for the pickled function that `multiprocessing` would have called.
`CoreProcess` is the trainer's end and looks to vLLM like a `multiprocessing.Process`.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtune_ext.run.parent import die_with_parent

LOG_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
LOG_FORMAT = "(core) %(asctime)s %(levelname)s %(name)s: %(message)s"
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
)  # the trainer's, not the core's


class CoreProcess:
    """One engine core, from its start to its end. Make it from a thread that lives as long as the run: the kernel
    counts the end of that thread as the end of the parent."""

    name = "EngineCore"

    def __init__(self, environ: dict[str, str], log: Path):
        """Starts the process, with `environ` on top of our own environment and its output appended to `log`."""
        path = [os.path.abspath(entry or ".") for entry in sys.path]
        env = {key: value for key, value in os.environ.items() if not key.startswith(TORCHRUN)}
        env |= {"PYTHONPATH": os.pathsep.join(path), **environ}
        command = [sys.executable, "-P", "-m", "torchtune_ext.sampling.core_process", str(os.getpid())]
        self.log_start = log.stat().st_size if log.exists() else 0
        self.log = log
        with open(log, "ab", buffering=0) as out:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True
            )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)  # readable once the process has ended
        weakref.finalize(self, os.close, self.sentinel)  # not in close(): vLLM's monitor may still look at it
        self.settings: dict[str, str] = {}  # environment variables that vLLM's configuration asks for
        self._work: tuple[Callable, dict[str, Any]] | None = None

    def assign(self, target: Callable, kwargs: dict[str, Any]) -> "CoreProcess":
        """Remembers what to call in the process; `start` sends it."""
        self._work = (target, kwargs)
        return self

    def start(self) -> None:
        """Sends the function to call. Raises BrokenPipeError when the process has ended."""
        assert self._work is not None and self._popen.stdin is not None
        payload = pickle.dumps(self._work)
        with self._popen.stdin as pipe:
            pipe.write(pickle.dumps(self.settings) + payload)

    @property
    def exitcode(self) -> int | None:
        return self._popen.poll()

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def join(self, timeout: float | None = None) -> None:
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            pass  # as multiprocessing does: the caller asks is_alive()

    def terminate(self) -> None:
        self._popen.terminate()

    def kill(self) -> None:
        """Kills the core and its workers (one process group); also when it is stopped."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self, timeout: float = 5.0) -> None:
        """Ends the process if it still runs, and frees what it holds in the trainer."""
        self.kill()
        self.join(timeout)
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            try:
                self._popen.stdin.close()
            except BrokenPipeError:
                pass

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that this process wrote."""
        with open(self.log, "rb") as file:
            file.seek(max(self.log_start, self.log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


class CoreContext:
    """Stands in for the `multiprocessing` context in which vLLM makes its core; everything else is passed on."""

    def __init__(self, process: CoreProcess, context: Any):
        self._process, self._context = process, context

    def Process(self, target: Callable, kwargs: dict[str, Any], name: str) -> CoreProcess:  # noqa: N802 (their name)
        return self._process.assign(target, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def main(parent: int) -> None:
    """The life of the core: imports, then whatever the trainer sends."""
    die_with_parent(parent)
    logging.basicConfig(level=LOG_LEVEL, format=LOG_FORMAT)
    started = time.monotonic()
    import vllm.v1.engine.core  # noqa: F401  (seconds; meanwhile the trainer imports its own half)

    print(
        f"engine core {os.getpid()}: vLLM imported in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True
    )
    os.environ.update(pickle.load(sys.stdin.buffer))
    target, kwargs = pickle.load(sys.stdin.buffer)
    target(**kwargs)


if __name__ == "__main__":
    main(int(sys.argv[1]))
