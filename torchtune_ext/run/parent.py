"""Ties a child process to its parent: it starts with a copy of its environment and ends with it; and says how a child ended."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when the parent ends. If the parent has ended already, exits at once.

    Args:
        parent: process id of the parent. The kernel treats the end of the *thread* that started this process as the end
            of the parent. That thread must therefore live as long as this process may run.

    Raises:
        OSError: the kernel refuses the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def environment() -> dict[str, str]:
    """Returns a copy of the environment for a process that is about to be started.

    Every new process must be given such a copy. Without it, exec reads the table that the C library keeps. If another
    thread changes the environment at that moment, as vLLM's configuration does, exec fails with "Bad address".
    """
    variables = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in variables.items() if value is not None}


def how_it_ended(code: int | None, what: str) -> str:
    """Says how a process ended, from its exit code; None: it lives, and vLLM gave up over something else."""
    if code is None:
        return "vLLM gave the engine up (the end of its log says why)"
    if code >= 0:
        return f"{what} ended with exit code {code}"
    hint = ", perhaps by the kernel's out-of-memory killer (see dmesg)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {signal.Signals(-code).name}{hint}"
