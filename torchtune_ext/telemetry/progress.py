"""The progress of a run on the terminal: bars for its phases, and a table line per step."""

import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from torchtune_ext.pipeline.evaluation import has_partial_rewards
from torchtune_ext.run.output import print_text, try_write
from torchtune_ext.run.processes import Closing
from torchtune_ext.run.terminal import terminal_width

log = logging.getLogger(__name__)

_HEADER_EVERY_LINES = 25  # lines after which the header is printed again
_ZERO_VARIANCE_STEPS = 5  # consecutive steps with only zero-variance groups before a warning
_MAX_TRUNCATED = 0.5  # a larger fraction of truncated samples causes a warning
_MIN_REWARD_STD = 1e-9  # rewards whose standard deviation is below this are equal


class ProgressBar(Closing):
    """Counts items, tokens and rewards of one phase; threads may update it concurrently.

    As a context manager without a bar, it also prints its lines while nothing is counted.

    Args:
        label: name of the phase.
        total: number of items; None: the lines show `label` and the elapsed time only.
        unit: noun for an item ("sample", "row").
        file: stream for a tqdm bar; None, or after a write error: lines instead of a bar.
        log_every_s: seconds between two lines.
        clock: returns the time in seconds.
    """

    # The counts have no lock: a concurrent update may show one sample late.

    def __init__(self, label: str, total: int | None = None, unit: str = "", file: TextIO | None = None,
                 log_every_s: float = 30.0, clock: Callable[[], float] = time.monotonic):  # fmt: skip
        self.label, self.total, self.unit = label, total, unit
        self.count = self.tokens = self.num_rewards = 0
        self.reward_sum = 0.0
        self._clock, self._log_every_s = clock, log_every_s
        self._start = self._last_log = clock()
        self._closed = threading.Event()
        self._file, self._tqdm = file, None
        if file is not None:
            self._try_draw(self._open_bar)

    def add(self, count: int = 1, tokens: int = 0) -> None:
        """Adds `count` finished items with `tokens` tokens in total."""
        self.count += count
        self.tokens += tokens
        self._update(count)

    def add_reward(self, reward: float) -> None:
        """Adds the reward of one more graded sample."""
        self.num_rewards += 1
        self.reward_sum += reward
        self._update(0)

    def close(self) -> None:
        self._closed.set()
        if self._tqdm is not None:
            self._try_draw(self._tqdm.close)

    def __enter__(self) -> "ProgressBar":
        if self._tqdm is None and self._log_every_s < math.inf and sys.stderr is not None:
            thread = threading.Thread(target=self._log_until_closed, name="progress", daemon=True)
            try:
                thread.start()
            except BaseException:  # a signal's RunStopped, after which `__exit__` is not called
                self.close()
                raise
        return self

    def status_text(self) -> str:
        """Returns the current means and throughput: "reward 0.412, length 83, 5,120 tok/s"."""
        parts = []
        if self.num_rewards:
            parts.append(f"reward {self.reward_sum / self.num_rewards:.3f}")
        if self.tokens:
            # A conversation counts at its end, but the tokens of its turns count earlier.
            name = "length" if self.unit == "sample" else f"tokens per {self.unit}"
            parts += [f"{name} {self.tokens / self.count:.0f}"] if self.count else []
            parts.append(f"{self.tokens / max(self._clock() - self._start, 1e-9):,.0f} tok/s")
        return ", ".join(parts)

    def _update(self, count: int) -> None:
        if (tqdm := self._tqdm) is not None:
            # A refresh would redraw for every sample; `update` redraws ten times a second at most.
            tqdm.set_postfix_str(self.status_text(), refresh=False)
            self._try_draw(lambda: tqdm.update(count))
        else:
            self._log_if_due()

    def _log_if_due(self) -> None:
        # In a log file, lines at this interval keep the log short and still show a stall.
        now = self._clock()
        if now - self._last_log >= self._log_every_s:
            self._last_log = now
            done = self.label if self.total is None else f"{self.label}: {self.count} of {self.total} {self.unit}s"
            print_text(
                ", ".join(filter(None, (f"{done} after {now - self._start:.0f} s", self.status_text()))), sys.stderr
            )

    def _log_until_closed(self) -> None:
        while not self._closed.wait(max(0.0, self._last_log + self._log_every_s - self._clock())):
            self._log_if_due()

    def _open_bar(self) -> None:
        # `leave=False` removes the finished bar, so that only the table stays on the screen.
        self._tqdm = tqdm(
            total=self.total, desc=self.label, unit=self.unit, file=self._file, leave=False, dynamic_ncols=True
        )

    def _try_draw(self, draw: Callable[[], Any]) -> None:
        if not try_write(self._file, draw) and self._tqdm is not None:
            # tqdm redraws its open bars around each line of text, so close this bar.
            try_write(self._file, self._tqdm.close)
            self._tqdm = None


class Progress:
    """Creates the progress bars, and prints the table of steps.

    Args:
        total_steps: the 200 of "12/200" in the table; None: unknown.
        rank: rank of this process. Only rank 0 draws bars and prints the table.
        bars: whether to draw bars; None: only if `sys.stderr` is a terminal, and not in a notebook.
        log_every_s: seconds between the lines that replace a bar.
        file: stream for the table; None: `sys.stdout`.
    """

    def __init__(self, total_steps: int | None = None, rank: int = 0, bars: bool | None = None,
                 log_every_s: float = 30.0, file: TextIO | None = None):  # fmt: skip
        self._total, self._rank, self._file = total_steps, rank, file
        # Other ranks count like rank 0, but print nothing.
        self._log_every_s = log_every_s if rank == 0 else math.inf
        if bars is None:
            # A notebook's `!` runs commands on a pseudo-terminal, but saves each redrawn bar.
            bars = terminal_width(sys.stderr) is not None and "JPY_PARENT_PID" not in os.environ
        self._bars = rank == 0 and sys.stderr is not None and bars
        self._lines = 0
        self._columns = _COLUMNS  # the columns that fit the terminal
        self._zero_variance_steps = 0  # consecutive steps with only zero-variance groups
        self._warned_zero_variance = False
        self._warned_truncated = False
        # Whether a held-out reward was neither 0 nor 1, so that the mean is not a percentage.
        self._has_partial_rewards = False
        self._pending_values: dict[str, float] = {}  # metrics of an unfinished step

    def sampling_bar(self, num_samples: int, label: str = "sample") -> ProgressBar:
        return self._make_bar(label, num_samples, "sample")

    def training_bar(self, total: int, label: str = "train", unit: str = "row") -> ProgressBar:
        return self._make_bar(label, total, unit)

    def phase(self, label: str) -> ProgressBar:
        """Returns a context manager that prints `label` and the elapsed time every `log_every_s`."""
        # tqdm does not redraw a bar that counts nothing, so a terminal gets lines, too.
        return ProgressBar(label, log_every_s=self._log_every_s)

    def log_step(self, step: int, values: Mapping[str, float]) -> None:
        """Collects metrics of a step, and prints its line when they include `time/step`.

        A missing metric is printed as a dash.
        """
        if self._rank != 0:
            return
        # Step 0 is the evaluation before the first step. It has no `time/step`.
        values = {**self._pending_values, **values}
        self._pending_values = {} if step == 0 or "time/step" in values else values
        if self._pending_values:
            return
        if self._lines % _HEADER_EVERY_LINES == 0:
            # The terminal may have been resized since the last header.
            self._columns = _fit_columns(terminal_width(self._file or sys.stdout))
            print_text("  ".join(f"{title:>{room}}" for title, room, *_ in self._columns), self._file)
        self._lines += 1
        name = f"{step}" if self._total is None else f"{step}/{self._total}"
        cells = [f"{name:>{self._columns[0][1]}}"]
        # After the first partial reward the column keeps the format "0.125" instead of "12.5%".
        self._has_partial_rewards = self._has_partial_rewards or has_partial_rewards(values)
        for _, room, text, names in self._columns[1:]:
            value = next((values[name] for name in names if name in values), None)
            text = "{:.3f}" if names == _HELD_OUT_METRICS and self._has_partial_rewards else text
            cells.append(f"{'-' if value is None else text.format(value):>{room}}")
        is_zero_variance = values.get("groups/used") == 0
        reason, advice = _explain_zero_variance(values)
        if is_zero_variance:
            cells.append(f"no signal: {reason}")
        print_text("  ".join(cells), self._file)
        self._zero_variance_steps = self._zero_variance_steps + 1 if is_zero_variance else 0
        # Warn at the first such step of the run, and once per series. A teacher needs no rewards.
        streak = self._zero_variance_steps
        if streak == _ZERO_VARIANCE_STEPS or (streak and not self._warned_zero_variance):
            self._warned_zero_variance = True
            if "loss/kl_teacher" not in values:
                log.warning("rewards: %d %s with only zero-variance groups (%.0f in step %d), so the rewards gave no gradient: "
                            "%s. %s", streak, "step" if streak == 1 else "steps", values.get("groups/no_signal", 0.0), step,
                            reason, advice)  # fmt: skip

        if values.get("length/truncated", 0.0) > _MAX_TRUNCATED and not self._warned_truncated:
            self._warned_truncated = True
            log.warning("sampling: %.0f%% of the samples were truncated at sampling.max_tokens, so the grader sees incomplete "
                        "texts. Raise it together with engine.max_model_len, or prompt for shorter answers. "
                        "This warning is not repeated",
                        100 * values["length/truncated"])  # fmt: skip

    def _make_bar(self, label: str, total: int, unit: str) -> ProgressBar:
        return ProgressBar(label, total, unit, sys.stderr if self._bars else None, self._log_every_s)


def _fit_columns(max_width: int | None) -> tuple[tuple, ...]:
    """Returns the columns that fit into a line of `max_width` characters; None: all columns."""
    # Two spaces separate the columns.
    columns = _COLUMNS
    for title in _DROP_ORDER:
        if max_width is None or sum(column[1] + 2 for column in columns) - 2 <= max_width:
            break
        columns = tuple(column for column in columns if column[0] != title)
    return columns


def _explain_zero_variance(values: Mapping[str, float]) -> tuple[str, str]:
    """Returns why a step has only zero-variance groups, and advice."""
    if "reward/mean" not in values:
        return "no text was graded", "Repair the grader or environment: the log names its errors"
    if values.get("reward/std", math.inf) < _MIN_REWARD_STD:
        return f"all rewards are {values['reward/mean']:.4g}", (
            "Check samples (torchtune-ext report): the task is too hard for the model (run an SFT warm-up on it first) or "
            "too easy, or the grader scores all texts alike"
        )
    return "no group has a nonzero advantage", (
        "All completions of a problem have the same reward: raise samples_per_prompt or sampling.temperature, or set "
        "refill_rounds to replace such groups"
    )


_HELD_OUT_METRICS = ("eval/reward_sampled", "eval/reward_greedy")
# The title, width, format and metrics of each column, which shows the first metric that is present.
_COLUMNS = (
    ("step", 9, "", ()),
    ("reward", 7, "{:.4f}", ("reward/mean",)),
    ("std", 6, "{:.3f}", ("reward/std",)),
    ("eval", 6, "{:.1%}", _HELD_OUT_METRICS),
    ("length", 6, "{:.0f}", ("length/mean",)),
    ("trunc", 6, "{:.1%}", ("length/truncated",)),
    ("grad", 7, "{:.3g}", ("optim/grad_norm",)),
    ("mismatch", 8, "{:.1e}", ("canary/mean_abs", "mismatch/mean_abs")),
    ("tok/s", 8, "{:,.0f}", ("speed/sampled_tokens_s",)),
    ("rho", 5, "{:.2f}", ("pack/rho",)),
    ("seconds", 7, "{:.1f}", ("time/step",)),
    ("sample", 6, "{:.1f}", ("time/sample",)),
    ("train", 5, "{:.1f}", ("time/train",)),
    ("publish", 7, "{:.1f}", ("time/publish",)),
)
# A narrow terminal drops these columns, one after another, until the rest fits.
_DROP_ORDER = ("rho", "publish", "train", "sample", "grad", "trunc", "std", "tok/s", "length", "mismatch")
