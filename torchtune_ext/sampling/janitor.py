"""Cleans up after a trainer that can no longer do it itself, whatever ended it.

Runs as its own tiny process in its own session (`python -I -S janitor.py PARENT_PID DIRECTORY`), so that neither Ctrl-C
nor a kill of the trainer's process group reaches it. It reads the process groups of the engine cores from stdin, one
number a line (0: none), and waits until the trainer is gone. Then it kills the last group and removes the directory.
"""

import os
import select
import shutil
import signal
import sys
import time


def wait_for_end(parent: int) -> int:
    """Waits until `parent` has ended or stdin is closed; returns the last process group read from stdin, 0 without
    any."""
    group, text = 0, b""
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    watch = -1
    try:
        watch = os.pidfd_open(parent)
        poll.register(watch, select.POLLIN)
    except ProcessLookupError:
        pass  # gone already: stdin holds what it wrote, and is closed
    except OSError:
        pass  # a kernel without pidfd: the closed pipe has to do
    while True:
        ready = dict(poll.poll())
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return group
            *lines, text = (text + data).split(b"\n")
            group = int(lines[-1]) if lines else group
        elif watch in ready:
            return group


def clean(group: int, directory: str, patience_s: float = 3.0) -> None:
    """Kills the process group (0: none), waits for its end, removes the directory; both may be gone already."""
    give_up = time.monotonic() + patience_s
    while group > 1 and time.monotonic() < give_up:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    clean(wait_for_end(int(sys.argv[1])), sys.argv[2])
