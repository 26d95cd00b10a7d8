"""Traces of steps by torch's profiler."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

log = logging.getLogger(__name__)


class StepProfiler:
    """Traces the steps of the config key `profile`, as `profile/step_000003_rank_0.json.gz`.

    https://ui.perfetto.dev and chrome://tracing open the files. A traced step has the same results,
    but takes longer.
    """

    def __init__(self, steps: Sequence[int], folder: str, rank: int):
        self._steps, self._folder, self._rank = set(steps), Path(folder) / "profile", rank
        self._active_trace: tuple[torch.profiler.profile, int] | None = None

    def start_trace(self, step: int) -> None:
        if step in self._steps:
            profiler = torch.profiler.profile()  # traces all devices that torch was built for
            profiler.start()
            self._active_trace = profiler, step

    def close(self) -> None:
        """Writes the trace of the current step, if it is traced."""
        if self._active_trace is not None:
            # Clear the attribute first, so that no trace is written twice if a call below raises.
            (profiler, step), self._active_trace = self._active_trace, None
            profiler.stop()
            try:
                self._folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(self._folder / f"step_{step:06d}_rank_{self._rank}.json.gz"))
            # A full disk must not stop the run.
            except (OSError, RuntimeError) as error:
                log.warning("profile: the trace of step %d was not written; training continues: %s", step, error)
