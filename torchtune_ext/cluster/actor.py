"""The Ray actor that runs one command on a machine of the cluster, and the guard that ends it with the actor.

Ray kills an actor without a word, and at its end also the children of the actor, but nothing below them. So the parent
of the command is a guard, a process that is no child of the actor:

    python -P -m torchtune_ext.cluster.actor PATIENCE FD COMMAND ...

Each line of its stdin is `SIGNAL SECONDS`: the command gets the signal, and SIGKILL so many seconds later. The guard
writes the exit status of the command, 128 + N after signal N, into the pipe FD. (`-`: it does not fork, and exits with
the status.)
"""

import ctypes
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

from torchtune_ext.run.process_env import die_with_parent
from torchtune_ext.run.reaper import RESOURCE_TRACKER

RAY_WORKER_VARIABLES = (
    "RAY_",
    "OMP_NUM_THREADS",
)  # variables that Ray sets for its workers, and not for commands of theirs
PIPE_BYTES = 1 << 20  # bytes of output that wait for the driver; then the command waits, as in front of any full pipe
KILLED = 128 + signal.SIGKILL
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
POLL_S = 0.1  # seconds between two looks at the command
# Seconds that Python's resource tracker has to remove the shared memory of processes that were killed.
TRACKER_S = 3.0
# Seconds after which a child that SIGKILL does not end is left alone. A dead disk can hold it for ever.
KILL_TIMEOUT_S = 13.0


# The class travels to the machine by value, so that a machine with another version of torchtune_ext, or none, can say
# so. That is why its methods import what they need of ours.
class Actor:
    """Runs one command under a guard."""

    def check_machine(self, path: str, here: str) -> tuple[str, str, int]:
        """Returns why this machine cannot run the command ("": it can), the log of this actor, and a free port.

        The command needs the file or folder `path`, and the driver's version of torchtune_ext, `here`.
        """
        # Ray leads the output of this process to a file of its session.
        log = os.readlink("/proc/self/fd/1")
        try:
            from torchtune_ext import __version__
        except ImportError as error:
            return f"torchtune_ext cannot be imported there ({error})", log, 0
        if __version__ != here:
            return f"torchtune_ext {__version__} is there and {here} here", log, 0
        if not os.path.exists(path):
            return f"{path} is not there: the run needs a folder that all machines see", log, 0
        with socket.create_server(("", 0)) as probe:
            return "", log, probe.getsockname()[1]

    def start(self, words: list[str], variables: dict[str, str], folder: str, patience_s: float) -> None:
        """Starts `python WORDS` in a folder.

        Args:
            variables: environment variables, which replace this machine's of the same name.
            patience_s: seconds that it has after SIGTERM, if this actor is killed.
        """
        from torchtune_ext.run.process_env import copy_environment, die_with_parent

        # When the raylet, which started this actor, is gone, Ray lets the actor live on for a while.
        die_with_parent(os.getppid())
        here = {name: value for name, value in copy_environment().items() if not name.startswith(RAY_WORKER_VARIABLES)}
        self._output, output = os.pipe()
        self._status, status = os.pipe()
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._output, False)
        guard = [sys.executable, "-P", "-m", "torchtune_ext.cluster.actor", str(patience_s), str(status)]
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
        # While this process held the writing ends, it would never read the end of the pipes.
        os.close(output)
        os.close(status)
        # The guard forks at once and goes on without a parent. Ray kills only the children of an actor.
        process.wait()
        assert process.stdin is not None  # a pipe
        self._lines = process.stdin

    def poll_output(self) -> tuple[bytes, int | None]:
        """Returns the command's output since the last look, and its exit status once it has ended and all is read."""
        try:
            text = os.read(self._output, PIPE_BYTES)
        except BlockingIOError:
            # It has printed nothing.
            return b"", None
        os.write(1, text)
        # No text means that the pipe has ended. A guard that was killed has written no status, and then Linux has
        # killed the command.
        return text, None if text else int(os.read(self._status, 16) or KILLED)

    def send_signal(self, number: int, seconds: float) -> None:
        """Sends the command a signal, and SIGKILL so many seconds later."""
        # If the command has ended, this raises in the actor, and the driver never asks for the result.
        self._lines.write(f"{int(number)} {seconds}\n".encode())


def adopt_orphans() -> None:
    """Makes this process the parent of all orphans below it, also of those in other sessions. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def forward_signals(command: subprocess.Popen, patience_s: float) -> None:
    """Passes on the signals that stdin asks for, until the command has ended."""
    sources, text, sent, kill_at = [0], b"", set(), float("inf")
    while command.poll() is None:
        if time.monotonic() > kill_at:
            command.kill()
        if not select.select(sources, [], [], POLL_S)[0]:
            continue
        data = os.read(0, 4096)
        *lines, text = (text + data).split(b"\n")
        if not data:
            # The actor is gone. SIGTERM and some patience let a trainer save the step that it is in.
            sources, lines = [], [f"{int(signal.SIGTERM)} {patience_s}".encode()]
        for number, seconds in map(bytes.split, lines):
            # A second SIGTERM would keep torchrun from waiting for its ranks.
            if number not in sent:
                command.send_signal(int(number))
            sent.add(number)
            kill_at = min(kill_at, time.monotonic() + float(seconds))


def kill_descendants() -> None:
    """Kills all children, and theirs, which become ours as they are orphaned."""
    began_at = time.monotonic()
    # Each round may orphan grandchildren, so it goes on until there are no children.
    while (left := psutil.Process().children()) and time.monotonic() < began_at + KILL_TIMEOUT_S:
        late = time.monotonic() > began_at + TRACKER_S
        for child in left:
            if late or RESOURCE_TRACKER not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
                child.kill()
        psutil.wait_procs(left, timeout=POLL_S / 5)


def main(patience: str, fd: str, *command: str) -> int:
    """Guards the command, and returns its exit status."""
    # The parent exits, so that the guard is no child of the actor.
    if fd != "-" and os.fork():
        os._exit(0)
    adopt_orphans()
    # Ray blocks signals in its workers, and the command would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # If the guard itself is killed, Linux kills the command. `preexec_fn` is safe, since this process has only one
    # thread.
    tie = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie)
    forward_signals(process, float(patience))
    # What the command started and left behind must not outlive it.
    kill_descendants()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if fd != "-":
        os.write(int(fd), str(status).encode())
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
