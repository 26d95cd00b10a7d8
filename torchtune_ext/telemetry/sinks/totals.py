"""What there is to say of a run as a whole, while it goes on and when it has ended."""

from collections.abc import Mapping
from typing import Any

ACCURACY = "eval/accuracy_sampled"
STOPPED = {130: "Ctrl-C", 143: "SIGTERM", 129: "SIGHUP"}  # the exit statuses of `run/stop.py`


class RunTotals:
    """Adds up the lines of metrics of a run, those before a resume among them."""

    def __init__(self) -> None:
        self._best: tuple[float, int] | None = None
        self._last: tuple[float, int] | None = None
        self._step, self._tokens, self._seconds = 0, 0.0, 0.0

    def add(self, step: int, values: Mapping[str, Any]) -> bool:
        """Takes what one line says of a step. Returns whether it has an accuracy on held-out problems."""
        self._step = step
        self._tokens += values.get("length/tokens") or 0.0
        self._seconds += values.get("time/step") or 0.0
        accuracy = values.get(ACCURACY)
        # NaN is not larger than anything, and `metrics.jsonl` has null in its place.
        if accuracy is None or accuracy != accuracy:
            return False
        self._last = (accuracy, step)
        if self._best is None or accuracy > self._best[0]:
            self._best = self._last
        return True

    def facts(self) -> dict[str, Any]:
        """Returns the totals by name. What the run does not measure (accuracy, sampled tokens) is left out."""
        found: dict[str, Any] = {"total/steps": self._step}
        for name, pair in ("best", self._best), ("last", self._last):
            if pair is not None:
                found |= {f"eval/{name}": pair[0], f"eval/{name}_step": pair[1]}
        if self._tokens:
            found["total/sampled_tokens"] = int(self._tokens)
        if self._seconds:
            found["total/seconds"] = self._seconds
        return found


def state_of(status: int) -> str:
    """Returns what became of a run whose process ends with `status`: "finished", "stopped by Ctrl-C", ... or "failed"."""
    if status in STOPPED:
        return f"stopped by {STOPPED[status]}"
    return "failed" if status else "finished"
