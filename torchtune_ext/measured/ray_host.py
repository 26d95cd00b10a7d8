"""What runs on each machine that measures: a Ray actor with a `Bench` of its own.

The class travels to the machine by value, and looks for torchtune_ext only there. So a machine that has another version, or
none, can say so. That is why all imports of ours stand in the methods.
"""

import asyncio
import logging
import os
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

LOGGED = 1000  # lines of the log that are kept until they are fetched


class Kept(logging.Handler):
    """Keeps lines of the log until the driver fetches them, since nobody reads the log of an actor."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[tuple[int, str, str]] = deque(maxlen=LOGGED)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelno, record.name, record.getMessage()))

    def take(self) -> list[tuple[int, str, str]]:
        """Returns (level, name of the logger, message) of each line since the last call."""
        return [self.lines.popleft() for _ in range(len(self.lines))]


class Host:
    """The actor. Its methods return what went wrong, since an exception of ours may be unknown where it arrives."""

    def __init__(self) -> None:
        self.bench = None
        self.log = Kept()

    async def version(self) -> tuple[str, str]:
        """Returns ("ready", the version here), or ("refused", why)."""
        try:
            from torchtune_ext.measured.version import version
        except ImportError as error:
            return "refused", f"torchtune_ext cannot be imported there ({error})"
        return "ready", version()

    async def start(self, settings: bytes, path: Sequence[str]) -> tuple[str, str, int]:
        """Makes the Bench, whose keywords are `settings` (pickled).

        Args:
            path: the driver's sys.path, for kernels of the user's own. What is installed here comes first.

        Returns:
            ("ready", the fingerprint, for how many texts there is room), or ("refused", why, 0).
        """
        sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]
        logging.getLogger("torchtune_ext").addHandler(self.log)
        from torchtune_ext.run.parent import die_with_parent

        # Ray lets an actor live on for a while when the raylet, which has started it, is gone.
        die_with_parent(os.getppid())
        _as_nice_as_ray()
        from torchtune_ext.measured.bench import Bench
        from torchtune_ext.measured.machine import fingerprint
        from torchtune_ext.run.errors import text_of

        keywords = pickle.loads(settings)
        try:
            self.bench = Bench(**keywords)
        except Exception as error:  # noqa: BLE001 (whatever it is, the driver says which machine it comes from)
            return "refused", text_of(error), 0
        workers = keywords.get("workers") or len(os.sched_getaffinity(0))
        # As many wait here as are at work, so that no worker is idle while a result travels.
        return "ready", fingerprint(), 2 * workers + 2

    async def measure(self, payload: bytes) -> tuple[str, Any]:
        """Measures one text.

        Args:
            payload: (kernel, text, permitted), pickled, as in `Bench.submit`.

        Returns:
            ("result", a pickled Result), or what went wrong: ("failed" | "broken" | "unreadable", why).
        """
        from torchtune_ext.measured.bench import BenchError

        try:
            kernel, text, permitted = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001 (unpickling runs the user's code)
            return "unreadable", f"the kernel cannot be unpickled: {type(error).__name__}: {error}"
        try:
            future = self.bench.submit(kernel, text, permitted=permitted)
        except BenchError as error:
            return "broken", str(error)
        try:
            return "result", pickle.dumps(await asyncio.wrap_future(future))
        except BenchError as error:
            return "failed", str(error)

    async def look(self) -> tuple[dict[str, float], list[tuple[int, str, str]]]:
        """Returns the counters of the Bench and new lines of the log. That it answers says that this process works."""
        return self.bench.stats(), self.log.take()

    async def close(self) -> None:
        """Ends all processes and removes all folders."""
        if self.bench is not None:
            self.bench.close()


def _as_nice_as_ray() -> None:
    """Takes back that Ray makes its workers nicer (by 15): a neighbor of ordinary priority would starve what is timed."""
    priority = os.getpriority(os.PRIO_PROCESS, os.getppid())
    if os.getpriority(os.PRIO_PROCESS, 0) > priority:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, priority)
        except PermissionError:
            logging.getLogger("torchtune_ext.measured.ray_host").warning(
                "programs are measured at the low priority that Ray gives its workers, so that neighbors disturb them: "
                "start Ray with RAY_worker_niceness=0 in its environment"
            )
