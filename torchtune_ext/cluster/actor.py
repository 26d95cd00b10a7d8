"""The actor of Ray that runs one command on a machine of the cluster, and the guard that lets nothing of it outlive the actor.

The class `Actor` travels to the machine by value, and looks for torchtune_ext only there: a machine that has another version,
or none, can say so. That is why its imports of ours stand in the methods.

Ray kills an actor without a word, and at its end also the children of the actor, but nothing below them. So the command has a
guard as its parent, a process that is no child of the actor:

    python -P -m torchtune_ext.cluster.actor PATIENCE FD COMMAND ...

The guard forks, and writes the exit status of the command into the pipe FD (`-`: neither; the status is its own). Each line of
its stdin is `SIGNAL SECONDS`: the command gets the signal, and SIGKILL so many seconds later. Where stdin ends, the actor is
gone, and that is SIGTERM with PATIENCE seconds: a trainer then still saves the step that it is in. When the command has ended,
whatever it started and left behind is killed. Where signal N ended it, the status is 128 + N. If the guard itself is killed,
Linux kills the command.
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

from torchtune_ext.run.janitor import TRACKER
from torchtune_ext.run.parent import die_with_parent

RAYS_OWN = ("RAY_", "OMP_NUM_THREADS")  # variables that Ray sets for its workers, and not for commands of theirs
PIPE = 1 << 20  # bytes of output that wait for the driver; then the command waits, as in front of any full pipe
KILLED = 128 + signal.SIGKILL
PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
LOOK_S = 0.1  # seconds between two looks at the command
TRACKER_S = 3.0  # seconds that a resource tracker of Python's has to remove the shared memory of those that were killed
GIVE_UP_S = 13.0  # seconds after which a child is left alone that SIGKILL does not end, since a dead disk holds it


class Actor:
    """Runs one command under a guard."""

    def about(self, path: str, here: str) -> tuple[str, str, int]:
        """Returns why this machine cannot run the command ("": it can), the log of this actor, and a free port.

        Args:
            path: what it has to see: a file that the command reads, or the folder that it is started in.
            here: the version of torchtune_ext where the driver runs.
        """
        # Ray has led the output of this process to a file of its session.
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
        """Starts `python WORDS`.

        Args:
            variables: of the driver's shell and of the run. They replace this machine's of the same name.
            folder: where it is started.
            patience_s: seconds that it has after SIGTERM, if this actor is killed.
        """
        from torchtune_ext.run.parent import die_with_parent, environment

        # Ray lets an actor live on for a while when the raylet, which has started it, is gone.
        die_with_parent(os.getppid())
        here = {name: value for name, value in environment().items() if not name.startswith(RAYS_OWN)}
        self._output, output = os.pipe()
        self._status, status = os.pipe()
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE)
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
        os.close(output)
        os.close(status)
        # The guard goes on without a parent, so that Ray, which kills the children of an actor, leaves it alone.
        process.wait()
        self._lines = process.stdin

    def look(self) -> tuple[bytes, int | None]:
        """Returns what the command has printed since the last look, and its exit status once it has ended and all is read."""
        try:
            text = os.read(self._output, PIPE)
        except BlockingIOError:
            # It has printed nothing.
            return b"", None
        os.write(1, text)
        # A guard that was killed has written no status, and Linux has killed the command.
        return text, None if text else int(os.read(self._status, 16) or KILLED)

    def tell(self, number: int, seconds: float) -> None:
        """Sends the command a signal, and SIGKILL so many seconds later. Where it has ended, nobody hears of the error."""
        self._lines.write(f"{int(number)} {seconds}\n".encode())


def adopt_orphans() -> None:
    """Makes this process the parent of all orphans below it, also of those in a session of their own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def follow(command: subprocess.Popen, patience_s: float) -> None:
    """Passes on what stdin asks for, until the command has ended."""
    sources, text, sent, kill_at = [0], b"", set(), float("inf")
    while command.poll() is None:
        if time.monotonic() > kill_at:
            command.kill()
        if not select.select(sources, [], [], LOOK_S)[0]:
            continue
        data = os.read(0, 4096)
        *lines, text = (text + data).split(b"\n")
        if not data:
            # The actor is gone.
            sources, lines = [], [f"{int(signal.SIGTERM)} {patience_s}".encode()]
        for number, seconds in map(bytes.split, lines):
            # A second SIGTERM would keep torchrun from waiting for its ranks.
            if number not in sent:
                command.send_signal(int(number))
            sent.add(number)
            kill_at = min(kill_at, time.monotonic() + float(seconds))


def bury() -> None:
    """Kills all children, and theirs, which become ours as they are orphaned."""
    began_at = time.monotonic()
    while (left := psutil.Process().children()) and time.monotonic() < began_at + GIVE_UP_S:
        late = time.monotonic() > began_at + TRACKER_S
        for child in left:
            if late or TRACKER not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
                child.kill()
        psutil.wait_procs(left, timeout=LOOK_S / 5)


def main(patience: str, fd: str, *command: str) -> int:
    """Is the guard of the command, and returns its exit status."""
    if fd != "-" and os.fork():
        os._exit(0)
    adopt_orphans()
    # Ray blocks signals in its workers, and what is blocked or ignored here would be so in the command.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # This process has one thread, so that it may do something between fork and exec.
    tie = partial(die_with_parent, os.getpid())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie)
    follow(process, float(patience))
    bury()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if fd != "-":
        os.write(int(fd), str(status).encode())
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
