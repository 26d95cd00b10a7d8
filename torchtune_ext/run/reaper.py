"""Removes what engines, graders and environments would leave behind when the trainer is killed: folders and processes.

    python -I -S janitor.py PARENT_PID DIRECTORY

Each line on stdin holds all process groups that there are now. When the parent is gone, this small process kills those
of the last line and removes the directory.
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
KILL_TIMEOUT_S = 3.0  # seconds that a process group has to end
EXIT_TIMEOUT_S = 10.0  # seconds that the janitor has to end, more than its own patience
SOCKET_PATH_MAX = 107  # bytes of a unix socket's path; vLLM appends 37


class ProcessReaper:
    """A temporary folder, and the process that removes it and kills process groups when the trainer ends."""

    def __init__(self):
        """Makes the folder and starts the process. Raises OSError."""
        base = tempfile.gettempdir()
        # vLLM has sockets in the folder, so its path must be short: a long TMPDIR gives way to /tmp.
        self.folder = tempfile.mkdtemp(prefix="tte-", dir=base if len(base) < SOCKET_PATH_MAX - 60 else "/tmp")
        self.groups: list[int] = []  # what the process knows
        self._closed = False
        try:
            self._start_process()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def set_groups(self, groups: Sequence[int]) -> None:
        """Makes these the process groups to kill when the trainer ends (0 stands for none). Raises OSError."""
        if self._closed:
            raise OSError("the janitor is closed")
        self.groups = list(groups)
        try:
            self._send_groups()
        except BrokenPipeError:
            # The process died. Every line names all groups, so a new process needs only this one.
            log.warning("a janitor ended (status %d): starting another one", self._process.wait(EXIT_TIMEOUT_S))
            self._pipe.close()
            self._start_process()
            self._send_groups()

    def close(self) -> None:
        """Ends the process, which kills what is left of the groups, and removes the folder."""
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
        # This file also runs as a script without our package (-I) and without installed ones (-S), so nothing of either
        # is imported at its top.
        from torchtune_ext.run.process_env import copy_environment

        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self.folder]
        # The pipe has no buffer, because closing it would repeat a write that failed. In a session of its own, the
        # process survives Ctrl-C and a kill of the trainer's process group.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, env=copy_environment()
        )
        assert self._process.stdin is not None  # a pipe
        self._pipe = self._process.stdin

    def _send_groups(self) -> None:
        self._pipe.write(f"{' '.join(map(str, self.groups))}\n".encode())


def wait_for_parent(parent: int) -> list[int]:
    """Waits until `parent` has ended or stdin is closed; returns the process groups of the last line on stdin."""
    # A forked child of the trainer holds the pipe open after its end, so the pipe is not the only sign.
    groups, text = [], b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    pidfd = -1
    try:
        pidfd = os.pidfd_open(parent)
        poll.register(pidfd, select.POLLIN)
    except ProcessLookupError:
        pass  # the parent has ended; stdin holds what it wrote, and then its end
    except OSError:
        pass  # this kernel has no pidfd, so the end of stdin has to do
    while True:
        ready = dict(poll.poll())
        # What the parent wrote just before its end still counts, so stdin is emptied first.
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return groups
            *lines, text = (text + data).split(b"\n")
            groups = [int(each) for each in lines[-1].split()] if lines else groups
        elif pidfd in ready:
            return groups


def live_processes(group: int) -> dict[int, bool]:
    """Returns the living processes of a process group, each with whether it is a resource tracker of Python's."""
    trackers = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            # A process may give itself any name, also one with brackets or without meaning in UTF-8. The name ends at
            # the last bracket.
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, _, its_group = file.read().rsplit(b")", 1)[1].split()[:3]
            if int(its_group) == group and state not in (b"Z", b"X"):
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    trackers[int(pid)] = RESOURCE_TRACKER in file.read()
        except OSError:
            continue  # it has ended meanwhile
    return trackers


def kill_group(group: int) -> None:
    """Kills the processes of a group (0: none), except Python's resource trackers."""
    # A tracker waits for the end of the processes that share it. Then it removes their shared memory from /dev/shm,
    # which nobody else would do, and ends. vLLM has such memory if `tensor_parallel_size` is above 1.
    for pid, tracker in live_processes(group).items() if group > 1 else ():
        if not tracker:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended meanwhile


def end_group(group: int, patience_s: float) -> None:
    """Kills a process group (0: none) and waits for its end. After `patience_s`, its resource trackers die as well."""
    give_up = time.monotonic() + patience_s
    # A process may fork while `kill` goes through the list, so the list is made anew until it is empty.
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
    """Ends the process groups (0: none) and removes the directory. All of it may be gone already."""
    # All groups are killed before the first one is waited for.
    for group in groups:
        kill_group(group)
    for group in groups:
        end_group(group, KILL_TIMEOUT_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    clean_up(wait_for_parent(int(sys.argv[1])), sys.argv[2])
