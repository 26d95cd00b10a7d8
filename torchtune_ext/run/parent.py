"""A process that must not outlive the one that started it."""

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
