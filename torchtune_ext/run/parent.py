"""The start and the end of a child process: its environment, its death with the parent, and how it ended."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the parent ends, or exits at once if it has ended. Raises OSError.

    For the kernel, the parent is the *thread* that started this process: it must live as long as this process may run.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # A parent that ended before the call above sends no signal. This process already has another parent then.
    if os.getppid() != parent:
        os._exit(1)


def environment() -> dict[str, str]:
    """Returns a copy of the environment, which every new process must be given."""
    # Without a copy, exec reads the table of the C library. If another thread changes the environment at that moment,
    # as vLLM's configuration does, exec fails with "Bad address". For the same reason a name may be gone when its value
    # is read here.
    variables = {name: os.environ.get(name) for name in list(os.environ)}
    return {name: value for name, value in variables.items() if value is not None}


def how_it_ended(code: int | None, what: str) -> str:
    """Says how a process ended, from its exit code. None means that it lives, but vLLM has given the engine up."""
    if code is None:
        return "vLLM gave the engine up (the end of its log says why)"
    if code >= 0:
        return f"{what} ended with exit code {code}"
    hint = ", perhaps by the kernel's out-of-memory killer (see dmesg)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {signal.Signals(-code).name}{hint}"
