"""Stands between an actor of Ray and the command that it runs, so that nothing of the command outlives the actor.

    python -P -m torchtune_ext.cluster.guard PATIENCE FD COMMAND ...

Ray kills an actor without a word, and at its end also the children of the actor, but nothing below them. So the command has
this process as its parent, which is no child of the actor: it forks, and writes the exit status into the pipe FD (`-`: neither;
the exit status is its own). It reads lines from stdin: the number of a signal for the command, or `end SECONDS`: the command
gets SIGTERM, and SIGKILL SECONDS later. Where stdin ends, the actor is gone, and that is `end PATIENCE`: a trainer then
still saves the step that it is in. When the command has ended, whatever it started and left behind is killed. The exit status
is that of the command; where signal N ended it, 128 + N. If this process itself is killed, Linux kills the command.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial

from torchtune_ext.run.parent import die_with_parent
from torchtune_ext.sampling import janitor

PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
LOOK_S = 0.1  # seconds between two looks at the command
GIVE_UP_S = 10.0  # seconds after which a child is left alone that SIGKILL does not end, since a dead disk holds it
REST_S = 3.0  # seconds that a resource tracker of Python's has to remove the shared memory of those that were killed
NEVER = float("inf")


def adopt_orphans() -> None:
    """Makes this process the parent of all orphans below it, also of those in a session of their own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def children() -> dict[int, bool]:
    """Lists the living children of this process, and says of each whether it is a resource tracker of Python's."""
    pids, me = {}, str(os.getpid()).encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The name in the brackets is whatever the process has called itself, so it is taken as bytes.
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
            if parent == me and state not in (b"Z", b"X"):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    pids[int(pid)] = janitor.TRACKER in file.read()
        except OSError:
            # It has ended meanwhile.
            continue
    return pids


def bury(patience_s: float) -> None:
    """Kills all children, and theirs, which become ours as they are orphaned; trackers only after `patience_s`."""
    begun_at = time.monotonic()
    while (left := children()) and time.monotonic() < begun_at + patience_s + GIVE_UP_S:
        late = time.monotonic() > begun_at + patience_s
        for pid, tracker in left.items():
            if late or not tracker:
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S / 5)
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


class Guard:
    """Runs a command to its end."""

    def __init__(self, patience_s: float, command: list[str]):
        self.patience_s, self.kill_at = patience_s, NEVER
        # Ray blocks signals in its workers, and what is blocked or ignored here would be so in the command.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # This process has one thread, so that it may do something between fork and exec.
        tie = partial(die_with_parent, os.getpid())
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=tie)

    def run(self) -> int:
        """Returns the exit status of the command."""
        text, open_ = b"", True
        while self.process.poll() is None:
            if time.monotonic() > self.kill_at:
                self.kill_at = NEVER
                janitor.end(self.process.pid, REST_S)
            # Where the actor is gone, nothing is left to be read.
            if not open_:
                time.sleep(LOOK_S)
                continue
            if select.select([0], [], [], LOOK_S)[0]:
                data = os.read(0, 4096)
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self._hear(line.decode())
                if not data:
                    open_ = False
                    self._end(self.patience_s)
        status = self.process.returncode
        janitor.end(self.process.pid, REST_S)
        bury(REST_S)
        return status if status >= 0 else 128 - status

    def _hear(self, line: str) -> None:
        if line.startswith("end "):
            self._end(float(line.removeprefix("end ")))
        else:
            self.process.send_signal(int(line))

    def _end(self, patience_s: float) -> None:
        if self.kill_at == NEVER:
            self.process.send_signal(signal.SIGTERM)
        self.kill_at = min(self.kill_at, time.monotonic() + patience_s)


def main(patience: str, fd: str, *command: str) -> int:
    """Runs the command and returns its exit status."""
    if fd != "-" and os.fork():
        os._exit(0)
    adopt_orphans()
    status = Guard(float(patience), list(command)).run()
    if fd != "-":
        os.write(int(fd), str(status).encode())
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
