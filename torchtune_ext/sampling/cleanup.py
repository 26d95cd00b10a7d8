"""Removes what an engine would leave behind: its temporary folder and its processes, also when the trainer is killed."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from torchtune_ext.run.parent import environment
from torchtune_ext.sampling import janitor

log = logging.getLogger(__name__)

SOCKET_PATH_MAX = 107  # bytes of a unix socket's path; vLLM appends 37
JANITOR_END_S = 10.0  # more than its own patience


class Cleanup:
    """Owns the engines' temporary folder, and a janitor that knows it and their process groups. A janitor that died is
    replaced."""

    def __init__(self):
        """Makes the folder and starts the janitor. Raises OSError."""
        base = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="tte-", dir=base if len(base) < SOCKET_PATH_MAX - 60 else "/tmp")
        self._groups: list[int] = []  # the process groups last sent to the janitor
        self._closed = False
        self._logged_pid = 0  # process id of the last janitor whose end was logged
        try:
            self._start()
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """The process id of the janitor."""
        return self._janitor.pid

    def guard(self, groups: Sequence[int]) -> None:
        """Makes these, one for each engine (0: none), the process groups to kill when the trainer ends. Raises OSError."""
        if self._closed:
            raise OSError("the engine is closed")
        self._groups = list(groups)
        try:
            self._tell()
        except OSError:  # the janitor has died since the last look
            self._janitor.wait(JANITOR_END_S)
            self.look()

    def look(self) -> None:
        """Replaces a janitor that has ended; the new one gets the same process groups. After `close` nothing happens. Raises
        OSError."""
        status = self._janitor.poll()
        if status is not None and not self._closed:
            # Its end is logged once, however often a new one fails to start.
            if self._logged_pid != self.pid:
                log.warning("the engine's janitor ended (status %d): starting another one", status)
                self._logged_pid = self.pid
            self._janitor.stdin.close()  # type: ignore[union-attr]
            self._start()

    async def watch(self, interval_s: float) -> None:
        """Looks after the janitor for ever, so that one that died is replaced before it is needed."""
        cause = ""
        while True:
            await asyncio.sleep(interval_s)
            try:
                self.look()
                cause = ""
            except OSError as error:
                # Each cause is logged once, and not at every look.
                if str(error) != cause:
                    log.warning("the engine's janitor could not be started again (%s): trying it further", error)
                cause = str(error)

    def close(self) -> None:
        """Ends the janitor, which kills what is left of the groups, and removes the folder."""
        self._closed = True
        try:
            self._janitor.stdin.close()  # type: ignore[union-attr]
            self._janitor.wait(JANITOR_END_S)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", janitor.__file__, str(os.getpid()), self.folder]
        # The pipe has no buffer: else a write that failed would be tried again, and fail again, when the pipe is closed.
        self._janitor = subprocess.Popen(
            command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, env=environment()
        )
        self._tell()

    def _tell(self) -> None:
        self._janitor.stdin.write(f"{' '.join(map(str, self._groups))}\n".encode())  # type: ignore[union-attr]
