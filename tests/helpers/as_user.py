"""Run a function in its own process, as an unprivileged user if the tests run as root."""

import os
import pickle
import select
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from torchtune_ext.measured import sandbox

USER = 12345  # an unused user id


def as_user(function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> Any:
    """Return the result of `function(*arguments)` run as an unprivileged user, or raise AssertionError with its traceback.

    The process is a fork, since another user could not start an interpreter in root's home. So all imports of the function must
    happen before the call. If the tests run as an unprivileged user, the function is called directly.
    """
    if os.geteuid() != 0:
        return function(*arguments)
    return in_a_fork(_as_nobody, function, *arguments, deadline_s=deadline_s)


class FolderOnly:
    """Replacement of the process reaper, an interpreter that another user may be unable to start."""

    def __init__(self):
        self.folder = tempfile.mkdtemp()

    def set_process_groups(self, groups):
        pass

    def close(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def _as_nobody(function: Callable[..., Any], *arguments: Any) -> Any:
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    os.environ["HOME"] = "/"
    sandbox.ProcessReaper = FolderOnly
    return function(*arguments)


def in_a_fork(function: Callable[..., Any], *arguments: Any, deadline_s: float = 60.0) -> Any:
    """Return the result of `function(*arguments)` in a fork, or raise AssertionError with its traceback."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with open(writer, "wb") as file:
                try:
                    pickle.dump((True, function(*arguments)), file)
                except BaseException:
                    pickle.dump((False, traceback.format_exc()), file)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    try:
        with open(reader, "rb") as file:
            if not select.select([file], [], [], deadline_s)[0]:
                os.kill(child, signal.SIGKILL)
                raise AssertionError(f"no result within {deadline_s:g} s")
            data = file.read()
    finally:
        os.waitpid(child, 0)
    assert data, "the process exited without a result"
    worked, result = pickle.loads(data)
    assert worked, result
    return result
