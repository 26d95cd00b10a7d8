"""The Ray actor that runs one command on a machine of the cluster, and its guard process.

Ray kills an actor without a signal that it could handle, and then also the actor's children, but
not its grandchildren. Therefore the parent of the command is a guard, a process that is not a child
of the actor:

    python -P -m torchtune_ext.cluster.actor GRACE_S FD COMMAND ...

Each line of the guard's stdin is `SIGNAL SECONDS`: the guard sends the signal to the command, and
SIGKILL after that many seconds. It writes the exit status of the command (128 + N after signal N)
into the pipe FD. With `-` for FD it does not fork, and exits with that status.
"""

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil

from torchtune_ext.run.process_env import Prctl, die_with_parent, prctl
from torchtune_ext.run.reaper import RESOURCE_TRACKER

# Prefixes of variables that Ray sets for its workers. The command must not get them.
RAY_WORKER_VARIABLES = ("RAY_", "OMP_NUM_THREADS")
PIPE_BYTES = 1 << 20  # output buffered for the driver in bytes; a full pipe blocks the command
KILLED = 128 + signal.SIGKILL
POLL_S = 0.1  # seconds between two checks of the command
# Seconds for Python's resource tracker to remove the shared memory of killed processes.
TRACKER_S = 3.0
# Seconds to wait for killed children. A dead disk can keep a process alive forever after SIGKILL.
KILL_TIMEOUT_S = 13.0


# Ray pickles the class by value, so that a machine without torchtune_ext, or with another version,
# can report it. So the methods import our modules locally.
class Actor:
    """Runs one command under a guard."""

    def check_machine(self, path: str, here: str) -> tuple[str, str, int]:
        """Checks whether this machine can run the command.

        Args:
            path: File or folder that the command needs.
            here: The driver's version of torchtune_ext.

        Returns:
            The error ("" if the machine is suitable), the actor's log file, and a free port.
        """
        # Ray redirects the output of this process to a file of its session.
        log = os.readlink("/proc/self/fd/1")
        try:
            from torchtune_ext import __version__
        except ImportError as error:
            return f"torchtune_ext cannot be imported there ({error})", log, 0
        if __version__ != here:
            return f"torchtune_ext {__version__} is installed there, but {here} here", log, 0
        if not os.path.exists(path):
            return f"{path} not found there: the run needs a folder that all machines share", log, 0
        with socket.create_server(("", 0)) as probe:
            return "", log, probe.getsockname()[1]

    def start(self, words: list[str], variables: dict[str, str], folder: str, grace_s: float) -> None:
        """Starts `python WORDS` in a folder.

        Args:
            words: Arguments of Python.
            variables: Environment variables, which override this machine's.
            folder: Working folder of the command.
            grace_s: Seconds between SIGTERM and SIGKILL if this actor is killed.
        """
        from torchtune_ext.run.process_env import copy_environment, die_with_parent

        # After the death of its parent, the raylet, Ray would keep the actor running for a while.
        die_with_parent(os.getppid())
        here = {name: value for name, value in copy_environment().items() if not name.startswith(RAY_WORKER_VARIABLES)}
        self._output, output = os.pipe()
        self._status, status = os.pipe()
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._output, False)
        guard = [sys.executable, "-P", "-m", "torchtune_ext.cluster.actor", str(grace_s), str(status)]
        process = subprocess.Popen(
            [*guard, sys.executable, "-P", *words],
            pass_fds=[status],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=here | variables,
            bufsize=0,
            start_new_session=True,
        )
        # With open write ends in this process, it would never read the end of the pipes.
        os.close(output)
        os.close(status)
        # The guard forks and its parent exits, because Ray kills only the children of an actor.
        process.wait()
        assert process.stdin is not None  # a pipe
        self._lines = process.stdin

    def poll_output(self) -> tuple[bytes, int | None]:
        """Returns the command's output since the last poll, and at its end the exit status."""
        try:
            text = os.read(self._output, PIPE_BYTES)
        except BlockingIOError:
            return b"", None
        os.write(1, text)
        # Empty text means the end of the pipe. A killed guard has written no status, and Linux has
        # then killed the command.
        return text, None if text else int(os.read(self._status, 16) or KILLED)

    def send_signal(self, number: int, seconds: float) -> None:
        """Sends the command a signal, and SIGKILL after `seconds`."""
        # If the command has ended, this raises in the actor, and the driver reads no result.
        self._lines.write(f"{int(number)} {seconds}\n".encode())


def forward_signals(command: subprocess.Popen, grace_s: float) -> None:
    """Forwards the signals requested on stdin, until the command has ended."""
    sources, text, sent, kill_at = [0], b"", set(), float("inf")
    while command.poll() is None:
        if time.monotonic() > kill_at:
            command.kill()
        if not select.select(sources, [], [], POLL_S)[0]:
            continue
        data = os.read(0, 4096)
        *lines, text = (text + data).split(b"\n")
        if not data:
            # The actor is dead. SIGTERM and a grace period let a trainer save its current step.
            sources, lines = [], [f"{int(signal.SIGTERM)} {grace_s}".encode()]
        for number, seconds in map(bytes.split, lines):
            # After a second SIGTERM torchrun would not wait for its ranks.
            if number not in sent:
                command.send_signal(int(number))
            sent.add(number)
            kill_at = min(kill_at, time.monotonic() + float(seconds))


def kill_descendants() -> None:
    """Kills all descendants, which must not outlive the command."""
    began_at = time.monotonic()
    # Each round may orphan grandchildren, which become children of this process.
    while (left := psutil.Process().children()) and time.monotonic() < began_at + KILL_TIMEOUT_S:
        late = time.monotonic() > began_at + TRACKER_S
        for child in left:
            if late or RESOURCE_TRACKER not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
                child.kill()
        psutil.wait_procs(left, timeout=POLL_S / 5)


def main(grace_s: str, fd: str, *command: str) -> int:
    """Runs the command under guard and returns its exit status."""
    # The parent exits, so that the guard is not a child of the actor.
    if fd != "-" and os.fork():
        os._exit(0)
    # Orphaned descendants become children of this process, in any session.
    prctl(Prctl.PR_SET_CHILD_SUBREAPER, 1)
    # Ray blocks signals in its workers, and the command would inherit the mask.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If the guard is killed, Linux kills the command. `preexec_fn` is safe with only one thread.
    tie = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie)
    forward_signals(process, float(grace_s))
    kill_descendants()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if fd != "-":
        os.write(int(fd), str(status).encode())
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
