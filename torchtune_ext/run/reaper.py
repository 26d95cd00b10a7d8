"""Kill the child processes and remove the temporary folder of a trainer that was killed.

    python -I -S reaper.py PARENT_PID DIRECTORY

Engines, graders and environments run in process groups. Each line on stdin lists all current
process groups. When the parent ends, this small process kills the groups of the last line and
removes the directory.
"""

import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)

RESOURCE_TRACKER = b"multiprocessing.resource_tracker"
KILL_TIMEOUT_S = 3.0  # seconds until the end of a killed process group
EXIT_TIMEOUT_S = 10.0  # timeout for the exit of the reaper, above KILL_TIMEOUT_S
SOCKET_PATH_MAX = 107  # maximum bytes of a unix socket's path; vLLM appends 37


class ProcessReaper:
    """A temporary folder and a process that cleans up when the trainer ends.

    The process kills the registered process groups and removes the folder.
    """

    def __init__(self):
        """Create the folder and start the process. Raises OSError if either fails."""
        base = tempfile.gettempdir()
        # vLLM creates sockets in the folder, so its path must be short: no long TMPDIR.
        self.folder = tempfile.mkdtemp(prefix="tte-", dir=base if len(base) < SOCKET_PATH_MAX - 60 else "/tmp")
        self.groups: list[int] = []  # the groups that the process would kill
        self._closed = False
        try:
            self._start_process()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_process_groups(self, groups: Sequence[int]) -> None:
        """Set the process groups to kill when the trainer ends (0: no group).

        Raises:
            OSError: the reaper is closed or cannot be restarted.
        """
        if self._closed:
            raise OSError("the process reaper is closed")
        self.groups = list(groups)
        try:
            self._send_groups()
        except BrokenPipeError:
            # The process died. Each line lists all groups, so a new process needs only this line.
            log.warning("process reaper: exited with status %d; restarting it", self._process.wait(EXIT_TIMEOUT_S))
            self._pipe.close()
            self._start_process()
            self._send_groups()

    def close(self) -> None:
        """End the process, which kills the remaining groups, and remove the folder."""
        self._closed = True
        try:
            self._pipe.close()
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start_process(self) -> None:
        # As a script, this file runs without our package (-I) and site-packages (-S).
        from torchtune_ext.run.process_env import copy_environment

        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.folder]
        # Closing a buffered pipe would repeat a failed write. In its own session, the process
        # survives Ctrl-C and a kill of the trainer's process group.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, env=copy_environment()
        )
        assert self._process.stdin is not None  # because of stdin=PIPE
        self._pipe = self._process.stdin

    def _send_groups(self) -> None:
        self._pipe.write(f"{' '.join(map(str, self.groups))}\n".encode())


def wait_for_parent(parent: int) -> list[int]:
    """Wait for the end of `parent` or of stdin; return the process groups of the last line."""
    # A forked child of the trainer may keep the pipe open, so the parent's pidfd is watched, too.
    groups, text = [], b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    pidfd = -1
    try:
        pidfd = os.pidfd_open(parent)
        poll.register(pidfd, select.POLLIN)
    except ProcessLookupError:
        pass  # the parent has ended; stdin still contains its last lines
    except OSError:
        pass  # this kernel has no pidfd; only the end of stdin is available
    while True:
        ready = dict(poll.poll())
        # The last lines of the parent still count, so stdin is read first.
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return groups
            *lines, text = (text + data).split(b"\n")
            groups = [int(group) for group in lines[-1].split()] if lines else groups
        elif pidfd in ready:
            return groups


def live_processes(group: int) -> dict[int, bool]:
    """Return the live processes of a group: pid -> whether it is a Python resource tracker."""
    trackers = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # The name may have parentheses or invalid UTF-8. It ends at the last parenthesis.
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, _, its_group = file.read().rsplit(b")", 1)[1].split()[:3]
            if int(its_group) == group and state not in (b"Z", b"X"):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    trackers[int(pid)] = RESOURCE_TRACKER in file.read()
        except OSError:
            continue  # the process has ended
    return trackers


def kill_group(group: int) -> None:
    """Kill the processes of a group (0: no group), except Python's resource trackers."""
    # After the end of its processes, a tracker removes their shared memory from /dev/shm, which no
    # other process does, and ends. vLLM uses such memory with `tensor_parallel_size` above 1.
    for pid, tracker in live_processes(group).items() if group > 1 else ():
        if not tracker:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the process has ended


def end_group(group: int, grace_s: float) -> None:
    """Kill a process group (0: no group) and wait for its end.

    After `grace_s` seconds, its resource trackers are killed as well.
    """
    give_up = time.monotonic() + grace_s
    # A process may fork while `kill_group` iterates, so the list is rebuilt until it is empty.
    while group > 1 and live_processes(group):
        if time.monotonic() > give_up:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
            return
        kill_group(group)
        time.sleep(0.02)


def clean_up(groups: list[int], directory: str) -> None:
    """End the process groups (0: no group) and remove the directory, if they still exist."""
    # Kill all groups before waiting for the first group.
    for group in groups:
        kill_group(group)
    for group in groups:
        end_group(group, KILL_TIMEOUT_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    clean_up(wait_for_parent(int(sys.argv[1])), sys.argv[2])
