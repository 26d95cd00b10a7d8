"""The scalars of a run go as lines of JSON to `metrics.jsonl`, always, and to the sinks that the user has asked for.

A step may have several lines, which readers merge: the recipes write its numbers before its checkpoint, so that a run that
goes on from there has them, and its seconds when it is over. The file is the record and the other sinks are copies. So a full
disk under `metrics.jsonl` is an error, while a sink that fails is reported once and dropped. Names are `group/name`, and
`time/phase/detail` for parts of a phase. What two runs of the same seed need not share lies under `time/`, `speed/`, `memory/`,
`engine/`, `engines/` and `bench/` (`CLOCK_PREFIXES`), so that they can be compared without it.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.groups import Group
from torchtune_ext.run.errors import FileMistake, Mistake
from torchtune_ext.run.files import explained, write_atomic
from torchtune_ext.run.folder import Run
from torchtune_ext.telemetry.sinks import LoggingConfig as LoggingConfig
from torchtune_ext.telemetry.sinks import Opening, Sink
from torchtune_ext.telemetry.sinks.settings import sink_class

log = logging.getLogger(__name__)

# These differ between two identical runs. The engine's counters follow the moments at which requests come and end, and they
# begin again where a run resumes. So do those of the benchmark service, whose memory of results begins again, too.
CLOCK_PREFIXES = ("time/", "speed/", "memory/", "engine/", "engines/", "bench/")
_FIX = "Free disk space and resume the run; the lines before are intact"
_RESERVED = ("step", "nonfinite")


class Metrics:
    """Writes the scalars of each step to `run_dir/metrics.jsonl`, and tells the sinks of them, of samples and of the outcome.

    Args:
        run_dir: folder of the run, which is made when it is missing.
        sinks: the node `logging:`, or the names of the sinks where all else has its default.
        run: what `RunFolder.begin` returned: the name, the id and the settings that W&B shows; None: it shows the name of the
            folder, no more.
        resume_step: first step that will be logged again: lines at or after it are cut; None: a fresh run.
        status: asked at the end for the exit status that the process will have (`StopSignals.status`).
        rank: rank of this process. Only rank 0 writes; on other ranks every method does nothing.

    Raises:
        ValueError: a sink is unknown, W&B has no credentials, or an earlier run left its metrics where a fresh one begins.
        ImportError: the package of a sink is missing, which is said here, before any work is lost.
        OSError: `metrics.jsonl` cannot be cut; it stays as it was.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: LoggingConfig | Sequence[str] = (),
        run: Run | None = None,
        resume_step: int | None = None,
        status: Callable[[], int] = lambda: 0,
        rank: int = 0,
    ):
        self._sinks: dict[str, Sink] = {}
        self._fd: int | None = None
        self._settings = sinks if isinstance(sinks, LoggingConfig) else LoggingConfig(to=tuple(sinks))
        self._status = status
        if rank != 0:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._last_step = -1
        if resume_step is not None:
            cut_metrics(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise Mistake(f"{self.path} belongs to an earlier run: RunFolder.begin sets it aside, resume_step goes on")
        with explained(f"cannot write {self.path}", _FIX):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        opening = Opening(run_dir, run, resume_step, self._settings)
        for name in self._settings.to:
            try:
                self._sinks[name] = sink_class(name)(opening)
            except Exception as error:
                # A setting or a login is wrong, which is said now, while nothing is lost.
                if isinstance(error, ValueError):
                    self.close()
                    raise
                self._drop(name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line for `step`. Several lines of one step are allowed; readers merge them.

        Values are anything `float()` takes. NaN and infinities become null, and their names go into a list `nonfinite`.

        Raises:
            ValueError: the step goes back, or a name is reserved.
            OSError: `metrics.jsonl` cannot be written.
        """
        if self._fd is None:
            return
        if step < self._last_step:
            raise Mistake(f"step={step} after step {self._last_step}: steps only grow; resume with resume_step={step}")
        for name in _RESERVED:
            if name in values:
                raise Mistake(f"values[{name!r}]: this name is reserved; use 'group/{name}'")
        numbers = {name: v if type(v) is int else float(v) for name, v in values.items()}
        record: dict[str, Any] = {"step": step}
        record.update({name: v if math.isfinite(v) else None for name, v in numbers.items()})
        nonfinite = [name for name, v in numbers.items() if not math.isfinite(v)]
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._last_step = step
        self._tell(lambda sink: sink.log(step, numbers))

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Shows a few samples of a step where a sink can and the settings ask for it. Groups have rewards and advantages."""
        if self._settings.shows(step):
            self._tell(lambda sink: sink.show(step, groups))

    def close(self) -> None:
        """Finishes the sinks, which learn the exit status. The file needs no closing to be readable."""
        status = self._status()
        self._tell(lambda sink: sink.close(status))
        self._sinks.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        """Calls each sink. One that raises is dropped, and the run goes on."""
        for name, sink in list(self._sinks.items()):
            try:
                tell(sink)
            except Exception as error:
                self._drop(name, error)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _append(self, line: str) -> None:
        """Makes one write at the end of the file. What did not fit is taken back, so that the file stays valid."""
        data, size = line.encode(), os.fstat(self._fd).st_size
        try:
            if (written := os.write(self._fd, data)) != len(data):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (only {written} of {len(data)} bytes fitted)")
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise FileMistake(f"cannot write {self.path}: {error}. {_FIX}") from error

    def _drop(self, name: str, error: Exception) -> None:
        """Reports a failed sink once and goes on without it."""
        self._sinks.pop(name, None)
        log.warning("metrics sink %s failed and is dropped for the rest of the run: %r. "
                    "metrics.jsonl goes on", name, error)  # fmt: skip


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns what `metrics.jsonl` says of each step, in order, with the lines of one step merged. A torn last line, which a
    killed run may leave, is left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is not the last is broken.
    """
    records: list[dict[str, Any]] = []
    for record in _lines(Path(path)):
        if records and records[-1]["step"] == record["step"]:
            nonfinite = records[-1].get("nonfinite", []) + record.get("nonfinite", [])
            records[-1].update(record)
            if nonfinite:
                records[-1]["nonfinite"] = nonfinite
        else:
            records.append(record)
    return records


def cut_metrics(path: Path, resume_step: int) -> None:
    """Drops the lines at or after `resume_step` and a torn last line, all at once. Where there is no file nothing is done.

    Raises:
        OSError: the disk refuses, and the file stays as it was.
        ValueError: a line is broken.
    """
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in _lines(path) if record["step"] < resume_step]
        with explained(f"cannot cut {path} back to step {resume_step}", _FIX):
            write_atomic(path, "".join(kept).encode())


def _lines(path: Path) -> list[dict[str, Any]]:
    # What follows the last line break is nothing, or a line in which the run was killed.
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise Mistake(f"{path}, line {number}: not a JSON object ({error}); remove the line") from error
    if tail:
        log.warning("%s: the last line is torn and was left out", path)
    return records
