"""Results that need not be measured again: in memory, and in a file that later runs read."""

import json
import logging
import os
from dataclasses import asdict, replace
from pathlib import Path

from torchtune_ext.measured.check import KILLED
from torchtune_ext.measured.results import NOISY, Result, Timing
from torchtune_ext.run.errors import Mistake

log = logging.getLogger(__name__)

MAX_RESULTS = 16_384  # kept in memory; the oldest ones are dropped
# What another attempt may end with in another way: it says something about the machine at that moment.
PASSING = ("timeout", NOISY)


class Cache:
    """Results by key. Only one thread may use it at a time; the file may be shared by several processes.

    Args:
        file: JSON lines, one for each result, appended at once and never changed; None: nothing is kept for later.

    Raises:
        ValueError: the file cannot be read and written.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self._results: dict[str, Result] = {}
        self._out = -1
        if file is not None:
            try:
                self._out = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                if Path(file).is_file():  # anything else may have no end, as /dev/full
                    self._read(Path(file))
            except OSError as error:
                raise Mistake(
                    f"bench.cache={str(file)!r}: {error.strerror}; name a file in a folder that exists and can be written to"
                ) from error

    def get(self, key: str) -> Result | None:
        """Returns the result, marked as cached."""
        return self._results.get(key)

    def put(self, key: str, result: Result) -> None:
        """Keeps a result, if another attempt would end in the same way."""
        if result.outcome in PASSING or result.note.startswith(KILLED):
            return
        if result.timing is not None and result.timing.disturbed:
            return
        self._keep(key, replace(result, is_cached=True))
        if self._out >= 0:
            line = (json.dumps({"key": key, "result": asdict(result)}) + "\n").encode()
            try:
                # One write to a file that is only appended to: two processes never write into each other's lines.
                if os.write(self._out, line) < len(line):
                    raise OSError("a line was cut off")
            except OSError as error:
                log.warning("the cache of results is not written any more: %s", error)
                self.close()

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def _keep(self, key: str, result: Result) -> None:
        self._results[key] = result
        if len(self._results) > MAX_RESULTS:
            del self._results[next(iter(self._results))]

    def _read(self, file: Path) -> None:
        damaged, is_whole = 0, True
        with open(file, "rb") as lines:
            for line in lines:
                is_whole = line.endswith(b"\n")
                try:
                    record = json.loads(line)
                    fields = record["result"]
                    timing = None if fields["timing"] is None else Timing(**fields["timing"])
                    fields |= {"timing": timing, "is_cached": True, "techniques": tuple(fields["techniques"])}
                    self._keep(record["key"], Result(**fields))
                except (ValueError, TypeError, KeyError):
                    # The process that wrote it was killed in the middle, or had other fields.
                    damaged += 1
        if not is_whole:
            os.write(self._out, b"\n")
        if damaged:
            log.warning("%s: %d lines cannot be read and are left out; they are measured again", file, damaged)
