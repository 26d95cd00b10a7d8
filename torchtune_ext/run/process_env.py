"""Environment variables, ranks, parent death signal and exit codes of processes."""

import ctypes
import os
import signal
from enum import IntEnum

# torchrun sets these variables. Job launchers may leave other values.
INTEGER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


class Prctl(IntEnum):
    """Options of prctl(2), from <sys/prctl.h>."""

    PR_SET_PDEATHSIG = 1
    PR_SET_CHILD_SUBREAPER = 36


def prctl(option: Prctl, value: int) -> None:
    """Set an attribute of this process (prctl(2)). Raises OSError if Linux refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option.name}) failed")


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent ends; exit at once if it has ended.

    For the kernel, the parent is the *thread* that started this process. That thread must run as
    long as this process may run.

    Raises:
        OSError: prctl failed.
    """
    prctl(Prctl.PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent ended before this call, no signal comes, but this process has another parent.
    if os.getppid() != parent:
        os._exit(1)


def copy_environment() -> dict[str, str]:
    """Return a copy of the environment, which every new process must receive."""
    # Without a copy, exec reads the table of the C library. If another thread changes the
    # environment at that moment, as vLLM's configuration does, exec fails with "Bad address". For
    # the same reason a variable may be missing when its value is read here.
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


def describe_exit(code: int | None, what: str) -> str:
    """Describe an exit code. None: the process runs, but vLLM has given up the engine."""
    if code is None:
        return "vLLM gave up the engine (see the end of its log)"
    if code >= 0:
        return f"{what} ended with exit code {code}"
    hint = ", perhaps by the kernel's out-of-memory killer (see dmesg)" if -code == signal.SIGKILL else ""
    return f"{what} was killed by {signal.Signals(-code).name}{hint}"


def read_int_variable(name: str, default: int) -> int:
    """Return the integer in a variable; `default` if it is unset, empty or not a number."""
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else default


def rank_and_world_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks; (0, 1) alone, whatever RANK is."""
    ranks = max(1, read_int_variable("WORLD_SIZE", 1))
    return read_int_variable("RANK", 0) if ranks > 1 else 0, ranks


def local_rank() -> int:
    """Return the rank of this process on its machine; 0 alone, whatever LOCAL_RANK is."""
    return read_int_variable("LOCAL_RANK", 0) if rank_and_world_size()[1] > 1 else 0


def invalid_variables() -> list[str]:
    """Return the names of integer variables that are not numbers."""
    return [name for name in INTEGER_VARIABLES if (text := os.environ.get(name, "").strip()) and not text.isdecimal()]
