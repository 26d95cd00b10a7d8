"""What a process and the one that started it owe each other."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent ends; ends at once if that has happened already.

    Args:
        parent: process id of the parent. The kernel counts the end of the *thread* that started this process as the end of
            the parent, so that thread has to live as long as this process may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def environment() -> dict[str, str]:
    """A copy of the environment, for a process to start. Give it to every one: without it exec reads C's own table, and where
    another thread changes the environment in that moment, as vLLM's configuration does, that fails with "Bad address"."""
    found = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in found.items() if value is not None}
