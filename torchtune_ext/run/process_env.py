"""What a process has from its parent: its environment, its place among ranks, and its death; and how a child ended."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# In these torchrun tells a process its place. Job launchers may leave other values.
INTEGER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


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


def copy_environment() -> dict[str, str]:
    """Returns a copy of the environment, which every new process must be given."""
    # Without a copy, exec reads the table of the C library. If another thread changes the environment at that moment,
    # as vLLM's configuration does, exec fails with "Bad address". For the same reason a name may be gone when its value
    # is read here.
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def describe_exit(code: int | None, what: str) -> str:
    """Says how a process ended, from its exit code. None means that it lives, but vLLM has given the engine up."""
    if code is None:
        return "vLLM gave the engine up (the end of its log says why)"
    if code >= 0:
        return f"{what} ended with exit code {code}"
    hint = ", perhaps by the kernel's out-of-memory killer (see dmesg)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {signal.Signals(-code).name}{hint}"


def read_int_variable(name: str, default: int) -> int:
    """Returns the number in a variable. One that is unset, empty or not a number (`misread`) gives `default`."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default


def rank_and_world_size() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks. A single process is rank 0 of 1, whatever RANK says."""
    ranks = max(1, read_int_variable("WORLD_SIZE", 1))
    return read_int_variable("RANK", 0) if ranks > 1 else 0, ranks


def local_rank() -> int:
    """Returns the number of this rank among those of its machine; 0 for a single process, whatever LOCAL_RANK says."""
    return read_int_variable("LOCAL_RANK", 0) if rank_and_world_size()[1] > 1 else 0


def invalid_variables() -> list[str]:
    """Returns the names of the variables that should be numbers and are not."""
    return [name for name in INTEGER_VARIABLES if (text := os.environ.get(name, "").strip()) and not text.isdecimal()]
