"""The scalars of a run go as lines of JSON to `metrics.jsonl`, always, and to Weights & Biases and TensorBoard when asked for.

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
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torchtune_ext.run.files import explained, write_atomic
from torchtune_ext.run.folder import Run

log = logging.getLogger(__name__)

# These differ between two identical runs. The engine's counters follow the moments at which requests come and end, and they
# begin again where a run resumes. So do those of the benchmark service, whose memory of results begins again, too.
CLOCK_PREFIXES = ("time/", "speed/", "memory/", "engine/", "engines/", "bench/")
_FIX = "Free disk space and resume the run; the lines before are intact"
_RESERVED = ("step", "nonfinite")
_WANDB_CANNOT = (
    "logging.to names 'wandb', which cannot start: {}. Run `wandb login`, set WANDB_MODE=offline, or take 'wandb' out of "
    "logging.to"
)


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """This is the node `logging:` of a recipe."""

    to: tuple[str, ...] = ()  # Metrics also go to these, "wandb" and "tensorboard".

    def __post_init__(self) -> None:
        check_sinks(self.to)
        if "wandb" in self.to:
            _require_login()


class Metrics:
    """Writes the scalars of each step to `run_dir/metrics.jsonl` and to the named sinks.

    Args:
        run_dir: folder of the run, which is made when it is missing.
        sinks: any of "wandb" and "tensorboard".
        run: what `RunFolder.begin` returned: the name, the id and the settings that W&B shows; None: it shows the name of the
            folder, no more.
        resume_step: first step that will be logged again: lines at or after it are cut; None: a fresh run.
        project, group: those of W&B.
        rank: rank of this process. Only rank 0 writes; on other ranks every method does nothing.

    Raises:
        ValueError: a sink is unknown, W&B has no credentials, or an earlier run left its metrics where a fresh one begins.
        ImportError: the package of a sink is missing, which is said here, before any work is lost.
        OSError: `metrics.jsonl` cannot be cut; it stays as it was.
    """

    def __init__(
        self,
        run_dir: str | Path,
        sinks: Sequence[str] = ("wandb", "tensorboard"),
        run: Run | None = None,
        resume_step: int | None = None,
        project: str = "torchtune-ext",
        group: str | None = None,
        rank: int = 0,
    ):
        self._sinks: dict[str, _Sink] = {}
        self._fd: int | None = None
        check_sinks(sinks)
        if rank != 0:
            return
        run_dir = Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        self._last_step = -1
        if resume_step is not None:
            cut_metrics(self.path, resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            raise ValueError(
                f"{self.path} belongs to an earlier run: RunFolder.begin sets it aside, resume_step goes on"
            )
        with explained(f"cannot write {self.path}", _FIX):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for name in sinks:
            try:
                self._sinks[name] = _SINKS[name](run_dir, run, resume_step, project, group)
            except Exception as error:
                # A knob is wrong, which is said now, while nothing is lost.
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
            raise ValueError(
                f"step={step} after step {self._last_step}: steps only grow; resume with resume_step={step}"
            )
        for name in _RESERVED:
            if name in values:
                raise ValueError(f"values[{name!r}]: this name is reserved; use 'group/{name}'")
        numbers = {name: v if type(v) is int else float(v) for name, v in values.items()}
        record: dict[str, Any] = {"step": step}
        record.update({name: v if math.isfinite(v) else None for name, v in numbers.items()})
        nonfinite = [name for name, v in numbers.items() if not math.isfinite(v)]
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._append(json.dumps(record, allow_nan=False) + "\n")
        self._last_step = step
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(step, numbers)
            except Exception as error:
                self._drop(name, error)

    def close(self) -> None:
        """Finishes the sinks. The file needs no closing to be readable."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:
                self._drop(name, error)
        self._sinks.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _append(self, line: str) -> None:
        """Makes one write and one fdatasync. A line that did not fit is taken back, so that the file stays valid."""
        data = line.encode()
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (only {written} of {len(data)} bytes fitted)")
            os.fdatasync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, size)
            raise OSError(f"cannot write {self.path}: {error}. {_FIX}") from error

    def _drop(self, name: str, error: Exception) -> None:
        """Reports a failed sink once and goes on without it."""
        self._sinks.pop(name, None)
        log.warning("metrics sink %s failed and is dropped for the rest of the run: %r. "
                    "metrics.jsonl goes on", name, error)  # fmt: skip


def check_sinks(sinks: Sequence[str]) -> None:
    """Raises ValueError for an unknown sink, and ImportError for one whose package is missing."""
    unknown = sorted(set(sinks) - set(_SINKS))
    if unknown:
        raise ValueError(f"logging.to={list(sinks)}: nothing is called {unknown[0]!r}; choose from {sorted(_SINKS)}")
    for name in sinks:
        _require_package(name)


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
            raise ValueError(f"{path}, line {number}: not a JSON object ({error}); remove the line") from error
    if tail:
        log.warning("%s: the last line is torn and was left out", path)
    return records


def _require_package(sink: str) -> None:
    try:
        __import__(sink)
    except ImportError as error:
        raise ImportError(
            f"logging.to names {sink!r}, whose package is missing ({error}): "
            f"run `pip install {sink}` or take {sink!r} out of logging.to"
        ) from error


def _require_login() -> None:
    """Raises ValueError if W&B is to be asked over the network and knows no key. On a terminal it asks for one itself."""
    offline = os.environ.get("WANDB_MODE", "online") in ("offline", "dryrun", "disabled", "shared")
    if offline or int(os.environ.get("RANK", 0)) or (sys.stdin is not None and sys.stdin.isatty()):
        return
    import wandb

    try:
        fault = "" if wandb.login(prompt=False) else "it has no API key"
    except wandb.errors.Error as error:
        fault = str(error)
    if fault:
        raise ValueError(_WANDB_CANNOT.format(fault))


class _Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    """Writes to Weights & Biases. The step is a value of its own there, since W&B's step refuses to go back on resume."""

    def __init__(self, run_dir: Path, run: Run | None, resume_step: int | None, project: str, group: str | None):
        import wandb

        try:
            self._run = wandb.init(
                dir=str(run_dir), project=project, group=group,
                name=run.name if run else run_dir.resolve().name, id=run.id if run else None,
                config=dict(run.config) if run else None, resume=None if resume_step is None else "allow",
            )  # fmt: skip
        except wandb.errors.UsageError as error:
            raise ValueError(_WANDB_CANNOT.format(error)) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Writes TensorBoard's events in this thread, since torch's SummaryWriter loses errors in a thread of its own."""

    def __init__(self, run_dir: Path, run: Run | None, resume_step: int | None, project: str, group: str | None):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder = run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        host = socket.gethostname()
        path = folder / f"events.out.tfevents.{time.time_ns() // 1000:016d}.{host}.{os.getpid()}"
        self._writer = RecordWriter(open(path, "wb"))
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            # On this event readers drop what earlier files hold at or after the step.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resume_step, session_log=start)

    def _write(self, **fields) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=scalars))

    def close(self) -> None:
        self._writer.close()


_SINKS: dict[str, type] = {"wandb": _Wandb, "tensorboard": _TensorBoard}
