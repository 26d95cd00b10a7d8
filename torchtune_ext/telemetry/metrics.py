"""The scalars of a run: lines of JSON in `metrics.jsonl`, always, and copies for the sinks that the user asks for.

Names are `group/name`, and `time/phase/detail` for parts of a phase. A step may have several lines.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.files import explain_os_errors, write_atomic
from torchtune_ext.run.folder import Run
from torchtune_ext.telemetry.sinks import LoggingConfig as LoggingConfig
from torchtune_ext.telemetry.sinks import Sink, SinkContext
from torchtune_ext.telemetry.sinks.settings import sink_class

log = logging.getLogger(__name__)

# These differ between two runs of the same seed, which are compared without them. The engine's counters depend on when
# requests come and end, and they begin again when a run resumes. So do the counters and the memory of the benchmark
# service.
VOLATILE_PREFIXES = ("time/", "speed/", "memory/", "engine/", "engines/", "bench/")
_DISK_FIX = "Free disk space and resume the run; the lines before are intact"
_RESERVED_NAMES = ("step", "nonfinite")


class MetricLogger:
    """Writes scalars to `run_dir/metrics.jsonl`, and hands scalars, samples and the run's outcome to the sinks.

    Args:
        run_dir: folder of the run, which is made when it is missing.
        sinks: the node `logging:`, or the names of the sinks where all else has its default.
        run: what `RunFolder.begin` returned, for W&B; None: it shows only the name of the folder.
        resume_step: first step that will be logged again: lines at or after it are cut; None: a fresh run.
        status: asked at the end for the exit status that the process will have (`StopSignals.status`).
        rank: rank of this process. Only rank 0 writes; on other ranks every method does nothing.

    Raises:
        ValueError: a sink is unknown, W&B has no credentials, or an earlier run left its metrics where a fresh one begins.
        ImportError: the package of a sink is missing.
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
            truncate_metrics(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise UsageError(
                f"{self.path} belongs to an earlier run: RunFolder.begin sets it aside, resume_step goes on"
            )
        with explain_os_errors(f"cannot write {self.path}", _DISK_FIX):
            # With O_APPEND the next line follows the last whole one, also after `_append` has cut the file back.
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        context = SinkContext(run_dir, run, resume_step, self._settings)
        for name in self._settings.to:
            try:
                self._sinks[name] = sink_class(name)(context)
            except Exception as error:
                # A wrong setting or login ends the run now, while nothing is lost. Other failures only cost the sink.
                if isinstance(error, ValueError):
                    self.close()
                    raise
                self._drop_sink(name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line for `step`. Several lines of one step are allowed; readers merge them.

        Values are anything that `float()` takes. NaN and infinities become null, and `nonfinite` lists their names.

        Raises:
            ValueError: the step goes back, or a name is reserved.
            OSError: `metrics.jsonl` cannot be written.
        """
        # Ranks other than 0 have no file.
        if self._fd is None:
            return
        # A step comes in parts: its numbers before its checkpoint, so that a run that resumes there has them, its
        # seconds when it is over.
        late = f"step={step} after step {self._last_step}: steps only grow; resume with resume_step={step}"
        if step < self._last_step:
            raise UsageError(late)
        for name in _RESERVED_NAMES:
            if name in values:
                raise UsageError(f"values[{name!r}]: this name is reserved; use 'group/{name}'")
        # An int stays one in JSON. Tensors and NumPy scalars become floats.
        numbers = {name: v if type(v) is int else float(v) for name, v in values.items()}
        finite = {name: v if math.isfinite(v) else None for name, v in numbers.items()}
        record: dict[str, Any] = {"step": step, **finite}
        if nonfinite := [name for name, v in finite.items() if v is None]:
            record["nonfinite"] = nonfinite
        # The file is the record and comes first. The sinks get copies, NaN included.
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._last_step = step
        self._call_sinks(lambda sink: sink.log(step, numbers))

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Shows samples of a step where the settings ask for it and a sink can. Groups have rewards and advantages."""
        if self._settings.logs_samples_at(step):
            self._call_sinks(lambda sink: sink.show(step, groups))

    def close(self) -> None:
        """Finishes the sinks, which learn the exit status. The file needs no closing to be readable."""
        status = self._status()
        self._call_sinks(lambda sink: sink.close(status))
        self._sinks.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        # A sink may raise anything. The run is worth more than its copies. `_drop` takes the sink out, so the loop has
        # a copy of the list.
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 (the code of a sink)
                self._drop_sink(name, error)

    def __enter__(self) -> "MetricLogger":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _append(self, line: str) -> None:
        assert self._fd is not None  # until `close`
        # One write, not a buffered file: a killed run leaves at most one torn line.
        data, size = line.encode(), os.fstat(self._fd).st_size
        try:
            if (written := os.write(self._fd, data)) != len(data):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (only {written} of {len(data)} bytes fitted)")
            os.fdatasync(self._fd)
        except OSError as error:
            # Half a line is taken back, so that the file stays valid.
            os.ftruncate(self._fd, size)
            raise UsageFileError(f"cannot write {self.path}: {error}. {_DISK_FIX}") from error

    def _drop_sink(self, name: str, error: Exception) -> None:
        # Dropped, it is not called again, so it is reported only once.
        self._sinks.pop(name, None)
        log.warning("metrics sink %s failed and is dropped for the rest of the run: %r. "
                    "metrics.jsonl goes on", name, error)  # fmt: skip


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step, in order, with the lines of one step merged, and without a torn last line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line that is not the last is broken.
    """
    records: list[dict[str, Any]] = []
    for record in _read_records(Path(path)):
        if records and records[-1]["step"] == record["step"]:
            nonfinite = records[-1].get("nonfinite", []) + record.get("nonfinite", [])
            # `update` would replace the list of the earlier line.
            records[-1].update(record)
            if nonfinite:
                records[-1]["nonfinite"] = nonfinite
        else:
            records.append(record)
    return records


def truncate_metrics(path: Path, resume_step: int) -> None:
    """Drops the lines at or after `resume_step`, and a torn last line. Without a file it does nothing.

    Raises:
        OSError: the disk refuses; the file stays as it was.
        ValueError: a line is broken.
    """
    # The new file replaces the old one at once, so that a process killed here loses no line that is kept.
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in _read_records(path) if record["step"] < resume_step]
        with explain_os_errors(f"cannot cut {path} back to step {resume_step}", _DISK_FIX):
            write_atomic(path, "".join(kept).encode())


def _read_records(path: Path) -> list[dict[str, Any]]:
    # After the last line break there is nothing, or the line during which the run was killed.
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not a JSON object ({error}); remove the line") from error
    if tail:
        log.warning("%s: the last line is torn and was left out", path)
    return records
