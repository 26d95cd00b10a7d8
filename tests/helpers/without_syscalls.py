"""Simulate an older kernel for a process: selected system calls fail with ENOSYS."""

import ctypes
import errno
import platform
import struct

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_LANDLOCK = (444, 445, 446)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forget_landlock(and_seccomp: bool = False) -> None:
    """Disable Landlock permanently for this process and its children, as on Linux before 5.13.

    and_seccomp: also seccomp(2), whose absence tells sandbox.c that the kernel has no filters. (prctl, which sets the filters,
    stays.)
    """
    numbers = [*_LANDLOCK, *([_SECCOMP[platform.machine()]] if and_seccomp else [])]
    steps = [(_LOAD_NUMBER, 0, 0, 0)]
    for number in numbers:
        steps += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, program, 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
