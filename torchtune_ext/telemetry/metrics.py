"""The scalars of a run: JSON lines in `metrics.jsonl`, and copies for the configured sinks.

Names are `group/name`, or `time/phase/detail` for a breakdown of a phase. A step may have several
lines.
"""

import errno
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.run.files import explain_os_errors, write_atomic
from torchtune_ext.run.folder import Run
from torchtune_ext.run.processes import Closing
from torchtune_ext.telemetry.sinks import LoggingConfig as LoggingConfig
from torchtune_ext.telemetry.sinks import Sink, SinkContext
from torchtune_ext.telemetry.sinks.settings import sink_class

log = logging.getLogger(__name__)

_DISK_FIX = "free disk space and resume the run; earlier lines are intact"
_RESERVED_NAMES = ("step", "nonfinite")
_OLD_NAMES = {
    "pack/used": "pack/efficiency",
    "eval/accuracy_sampled": "eval/reward_sampled",
    "eval/accuracy_greedy": "eval/reward_greedy",
}
_OLD_AGE = re.compile(r"^(async/|(?:loss|mismatch)/\w+_)age_(?=\d|mean$|max$)")


class MetricLogger(Closing):
    """Writes scalars to `run_dir/metrics.jsonl`, and passes scalars and samples to the sinks.

    Args:
        run_dir: folder of the run, created if missing.
        sinks: the section `logging:`, or the names of the sinks with default settings.
        run: the return value of `RunFolder.start_run`, for W&B; None: W&B shows the folder's name.
        resume_step: first step that will be logged again; lines from it on are removed. None: a
            fresh run.
        status: returns the exit status of the process when the run ends (`StopSignals.status`).
        rank: rank of this process. Only rank 0 writes; on other ranks every method does nothing.

    Raises:
        UsageError: a sink's setting or login is invalid, or `metrics.jsonl` belongs to an earlier
            run.
        OSError: `metrics.jsonl` cannot be truncated; it is unchanged then.
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
                f"{self.path} belongs to an earlier run. Fix: set it aside with RunFolder.start_run, or resume with resume_step"
            )
        with explain_os_errors(f"cannot write {self.path}", _DISK_FIX):
            # O_APPEND: the next line follows the last one, even after `_append` truncated the file.
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        context = SinkContext(run_dir, run, resume_step, self._settings)
        for name in self._settings.to:
            try:
                self._sinks[name] = sink_class(name)(context)
            except ValueError:  # an invalid setting or login stops the run before it computes
                self.close()
                raise
            except Exception as error:  # noqa: BLE001 (the code of a sink)
                self._drop_sink(name, error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line for `step`. A step may have several lines; readers merge them.

        Values are anything that `float()` takes. NaN and infinity become null, and
        `nonfinite` lists their names.

        Raises:
            UsageError: `step` is lower than the last step, or a name is reserved.
            UsageFileError: `metrics.jsonl` cannot be written.
        """
        # Ranks other than 0 have no file.
        if self._fd is None:
            return
        # A step is logged in parts: its metrics before its checkpoint, so that a resumed run has
        # them, and its seconds at its end.
        if step < self._last_step:
            raise UsageError(
                f"step={step} after step {self._last_step}: steps must not decrease. Fix: resume with resume_step={step}"
            )
        for name in _RESERVED_NAMES:
            if name in values:
                raise UsageError(f"values[{name!r}]: this name is reserved. Fix: use 'group/{name}'")
        # Tensors and NumPy scalars become floats.
        numbers = {name: v if type(v) is int else float(v) for name, v in values.items()}
        finite = {name: v if math.isfinite(v) else None for name, v in numbers.items()}
        record: dict[str, Any] = {"step": step, **finite}
        if nonfinite := [name for name, v in finite.items() if v is None]:
            record["nonfinite"] = nonfinite
        # The file is the primary record. The sinks get copies, NaN included.
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._last_step = step
        self._call_sinks(lambda sink: sink.log(step, numbers))

    def show(self, step: int, groups: Sequence[Group]) -> None:
        """Passes the groups of a step to the sinks, if `logging.samples_every` selects the step."""
        if self._settings.logs_samples_at(step):
            self._call_sinks(lambda sink: sink.show(step, groups))

    def close(self) -> None:
        """Closes the sinks with the exit status, then the file, which is readable at any time."""
        status = self._status()
        self._call_sinks(lambda sink: sink.close(status))
        self._sinks.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _call_sinks(self, call: Callable[[Sink], None]) -> None:
        # An error of a sink must not stop the run. `_drop_sink` changes the dict, hence the copy.
        for name, sink in list(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:  # noqa: BLE001 (the code of a sink)
                self._drop_sink(name, error)

    def _append(self, line: str) -> None:
        assert self._fd is not None  # until `close`
        # A single unbuffered write: a killed run leaves at most one incomplete line.
        data, size = line.encode(), os.fstat(self._fd).st_size
        try:
            if (written := os.write(self._fd, data)) != len(data):
                full = os.strerror(errno.ENOSPC)
                raise OSError(errno.ENOSPC, f"{full} (only {written} of {len(data)} bytes written)")
            os.fdatasync(self._fd)
        except OSError as error:
            # Remove the incomplete line, so that the file stays valid.
            os.ftruncate(self._fd, size)
            raise UsageFileError(f"cannot write {self.path}: {error}. Fix: {_DISK_FIX}") from error

    def _drop_sink(self, name: str, error: Exception) -> None:
        # A dropped sink is not called again, so its failure is logged only once.
        self._sinks.pop(name, None)
        log.warning("metrics: sink %s failed and is dropped for the rest of the run: %r. "
                    "metrics.jsonl is still written", name, error)  # fmt: skip


@cache
def current_metric(name: str) -> str:
    """Returns the current name of a metric that may have its name of an earlier version."""
    return _OLD_AGE.sub(r"\1staleness_", _OLD_NAMES.get(name, name))


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step in order, without an incomplete last line.

    Raises:
        FileNotFoundError: the file does not exist.
        UsageError: a line other than the last is not a JSON object.
    """
    records: list[dict[str, Any]] = []
    for record in _read_records(Path(path)):
        if records and records[-1]["step"] == record["step"]:
            nonfinite = records[-1].get("nonfinite", []) + record.get("nonfinite", [])
            records[-1] |= record | ({"nonfinite": nonfinite} if nonfinite else {})
        else:
            records.append(record)
    return records


def truncate_metrics(path: Path, resume_step: int) -> None:
    """Removes the lines from `resume_step` on, and an incomplete last line, if the file exists.

    Raises:
        OSError: the file cannot be written; it is unchanged then.
        UsageError: a line is not a JSON object.
    """
    # The new file replaces the old one atomically, so a kill here keeps all earlier lines.
    if path.exists():
        kept = [json.dumps(record) + "\n" for record in _read_records(path) if record["step"] < resume_step]
        with explain_os_errors(f"cannot truncate {path} to step {resume_step}", _DISK_FIX):
            write_atomic(path, "".join(kept).encode())


def _read_records(path: Path) -> list[dict[str, Any]]:
    # After the last line break is nothing, or the line that a killed run did not complete.
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append({current_metric(name): value for name, value in json.loads(line).items()})
        except (ValueError, AttributeError) as error:
            raise UsageError(f"{path}, line {number}: not a JSON object ({error}). Fix: remove the line") from error
    if tail:
        log.warning("metrics: the last line of %s is incomplete and was skipped", path)
    return records
