"""What happens inside the phases of a step: traces of torch's profiler."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

log = logging.getLogger(__name__)


class StepProfiler:
    """Traces the steps that the recipe's `profile` names, into files such as `profile/step_000003_rank_0.json.gz`.

    https://ui.perfetto.dev and chrome://tracing show them. A traced step computes the same, but takes longer.
    """

    def __init__(self, steps: Sequence[int], folder: str, rank: int):
        self._steps, self._folder, self._rank = set(steps), Path(folder) / "profile", rank
        self._active_trace: tuple[torch.profiler.profile, int] | None = None

    def start_trace(self, step: int) -> None:
        if step in self._steps:
            profiler = torch.profiler.profile()  # of all devices that torch was built for
            profiler.start()
            self._active_trace = profiler, step

    def close(self) -> None:
        """Writes the trace of the step that has begun, if there is one."""
        if self._active_trace is not None:
            # Forgotten first, so that no trace is written twice, whatever fails below.
            (profiler, step), self._active_trace = self._active_trace, None
            profiler.stop()
            try:
                self._folder.mkdir(exist_ok=True)
                profiler.export_chrome_trace(str(self._folder / f"step_{step:06d}_rank_{self._rank}.json.gz"))
            # A full disk costs the trace, not the run.
            except (OSError, RuntimeError) as error:
                log.warning("profile: the trace of step %d was not written, and the run goes on: %s", step, error)
