"""TensorBoard: scalars in `RUN/tensorboard`."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchtune_ext.telemetry.sinks.samples import SampleRow
from torchtune_ext.telemetry.sinks.settings import Opening


class TensorBoard:
    """Writes TensorBoard's events in this thread, since torch's SummaryWriter loses errors in a thread of its own."""

    def __init__(self, opening: Opening):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2, summary_pb2
        folder = opening.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        host = socket.gethostname()
        path = folder / f"events.out.tfevents.{time.time_ns() // 1000:016d}.{host}.{os.getpid()}"
        self._writer = RecordWriter(open(path, "wb"))
        self._write(file_version="brain.Event:2")
        if opening.resume_step is not None:
            # On this event readers drop what earlier files hold at or after the step.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=opening.resume_step, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary.Summary(value=scalars))

    def show(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Shows no samples: TensorBoard has no tables, and the report has all of them."""

    def summarize(self, facts: Mapping[str, Any]) -> None:
        """Has no summary."""

    def close(self, status: int) -> None:
        self._writer.close()

    def _write(self, **fields) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()
