"""Starts the runs of a sweep, a few at a time, and waits for them.

Every run is a process of its own, with its output in `output.log` of its folder. It ends with this process, also by kill -9. A
run that was in the middle goes on from its checkpoint when the sweep goes on, or begins again in its folder if it has none.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtune_ext.run.folder import RUN_VARIABLE, SWEEP_VARIABLE, checkpoint_folders
from torchtune_ext.run.output import say
from torchtune_ext.run.parent import die_with_parent, environment
from torchtune_ext.run.stop import NAMES
from torchtune_ext.run.terminal import BOLD, styled
from torchtune_ext.sweep.file import Sweep
from torchtune_ext.sweep.record import SweepFolder, SweepRun, history
from torchtune_ext.sweep.search import Tried, draw, suggest
from torchtune_ext.sweep.space import Point, grid

OUTPUT = "output.log"
LOOK_S = 0.5  # seconds between two looks at the runs
SAVE_S = 10.0  # seconds from one record to the next: a sweep that is killed knows how long its runs ran until then
NEWS_S = 60.0  # seconds from one line about a run that works to the next
END_S = 600.0  # seconds that a run has to end after SIGTERM: the end of its step, its checkpoint, its cleanup
LONGEST_CAUSE = 300  # characters
WARM_UP = 5  # random points, at most, at the beginning of a search that learns


@dataclass(slots=True)
class _Process:
    """A run that goes on."""

    run: SweepRun
    process: subprocess.Popen
    before: float  # seconds that it ran in earlier starts
    since: float  # time.monotonic()
    signaled_at: float | None = None  # when it got the signal to end
    early: bool = False  # whether it got that because others are better


class Runner:
    """Runs a sweep in its folder.

    Args:
        folder: of the sweep.
        jobs: runs at a time.
        command: returns the words of a run from its point.
        variables: of the environment of the runs, where this process has not set them.
    """

    def __init__(
        self,
        folder: SweepFolder,
        jobs: int,
        command: Callable[[Point], Sequence[str]],
        variables: dict[str, str] | None = None,
    ):
        self.folder, self.sweep, self.jobs, self._command = folder, folder.sweep, jobs, command
        self._variables = variables or {}
        self._running: list[_Process] = []
        self._saved_at = self._news_at = time.monotonic()
        self.stopped_by: signal.Signals | None = None  # the first signal that came
        # What runs have logged, each with the time and the size of its file.
        self._histories: dict[str, tuple[tuple[int, int], list[float]]] = {}
        self._signals: list[signal.Signals] = []  # those that came and are not yet handed on
        self._waiting = [run for run in folder.runs if run.state in ("waiting", "running")]

    def plan(self) -> None:
        """Adds the runs whose points are known before the first result. A sweep that goes on has them."""
        sweep = self.sweep
        if self.folder.runs or sweep.method == "bayes":
            return
        known = (
            [(point, {}) for point in grid(list(sweep.parameters))[: sweep.runs]]
            if sweep.method == "grid"
            else [draw(sweep.parameters, self.folder.seed, number) for number in range(sweep.runs)]
        )
        self._waiting += [self.folder.add(point, quantiles) for point, quantiles in known]

    @property
    def left(self) -> int:
        """Returns how many runs are still to do."""
        runs = self.folder.runs
        return sum(run.state in ("waiting", "running") for run in runs) + self.sweep.runs - len(runs)

    def run(self) -> bool:
        """Runs until all runs have ended, or a signal came. Returns whether the sweep is at its end."""
        handlers = {number: signal.getsignal(number) for number in NAMES}
        for number, handler in handlers.items():
            # Under nohup, or in the background of a shell, a signal that was ignored stays ignored.
            if handler != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            self.folder.begin()
            while self._step():
                time.sleep(LOOK_S)
        finally:
            for each in self._running:
                _end(each.process, signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self.stopped_by is None or not self.left

    def _step(self) -> bool:
        """Looks at all runs once, and starts others. Returns whether any goes on."""
        while self._signals:
            self._hand_on(self._signals.pop(0))
        for each in list(self._running):
            if each.process.poll() is not None:
                self._running.remove(each)
                self._ended(each)
            elif each.signaled_at is not None and time.monotonic() > each.signaled_at + END_S:
                say(f"{each.run.id} has not ended within {END_S:g} s of SIGTERM: it is killed")
                _end(each.process, signal.SIGKILL)
        if self.stopped_by is None:
            self._stop_early()
            while len(self._running) < self.jobs and (run := self._next()) is not None:
                self._start(run)
        for each in self._running:
            _clock(each)
        if self._running and time.monotonic() > self._saved_at + SAVE_S:
            self._saved_at = time.monotonic()
            self.folder.save()
        if time.monotonic() > self._news_at + NEWS_S:
            self._news_at = time.monotonic()
            for each in self._running:
                logged = self._logged(each.run)
                reads = f"{self.sweep.metric.name} {logged[-1]:.4g}" if logged else f"no {self.sweep.metric.name} yet"
                say(f"{each.run.id} works since {each.run.seconds:.0f} s: {reads}")
        return bool(self._running)

    def _next(self) -> SweepRun | None:
        """Returns the next run to start, or None."""
        metric, runs = self.sweep.metric, self.folder.runs
        if metric.target is not None:
            reached = [
                run
                for run in runs
                if run.value is not None
                and run.state == "finished"
                and (run.value >= metric.target if metric.maximize else run.value <= metric.target)
            ]
            if reached:
                return None
        if self._waiting:
            return self._waiting.pop(0)
        if self.sweep.method != "bayes" or len(runs) >= self.sweep.runs:
            return None
        point, quantiles = suggest(
            self.sweep.parameters,
            self.folder.seed,
            len(runs),
            self._tried(),
            metric.maximize,
            warm_up=max(1, min(WARM_UP, self.sweep.runs // 2)),
        )
        return self.folder.add(point, quantiles)

    def _tried(self) -> list[Tried]:
        """Returns the points until now, for a search that learns. A run that has failed gets a value by W&B's rule."""
        runs, metric = self.folder.runs, self.sweep.metric
        values = [run.value for run in runs if run.value is not None and run.state != "failed"]
        worst, best = (min, max) if metric.maximize else (max, min)
        imputed = {"worst": worst, "best": best}.get(metric.impute, lambda _: None)
        points = []
        for run in runs:
            value = run.value
            if run.state == "failed" and (metric.impute != "latest" or value is None):
                if not values:
                    # Nothing is known yet to put in its place.
                    continue
                value = imputed(values)
            if run.state in ("waiting", "running"):
                value = None
            elif value is None:
                continue
            points.append(Tried(run.quantiles, value))
        return points

    def _start(self, run: SweepRun) -> None:
        place = self.folder.path / run.folder
        place.mkdir(exist_ok=True)
        words = [*self._command(run.parameters), f"output_dir={place}"]
        goes_on = bool(checkpoint_folders(place / "checkpoints"))
        if goes_on:
            words.append("resume_from_checkpoint=True")
        inherited = {name: value for name, value in environment().items() if name not in (SWEEP_VARIABLE, RUN_VARIABLE)}
        # Runs that log to W&B are one group there.
        variables = {"WANDB_RUN_GROUP": self.sweep.name, **self._variables, **inherited}
        at = ", ".join(
            f"{each.name}={shown(run.parameters[each.name])}" for each in self.sweep.parameters if not each.fixed
        )
        number, of = self.folder.runs.index(run) + 1, self.sweep.runs
        with open(place / OUTPUT, "ab") as output:
            try:
                process = subprocess.Popen(
                    words,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C is for the sweep, which tells its runs to end well.
                    process_group=0,
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                run.state, run.cause = "failed", f"{words[0]} cannot be started: {error.strerror}"
                say(f"{run.id} failed: {run.cause}")
                self.folder.save()
                return
        run.state = "running"
        self._running.append(_Process(run, process, run.seconds, time.monotonic()))
        self.folder.save()
        begins = "goes on" if goes_on else "starts"
        say(f"{run.id} ({number} of {of}) {begins}: {at or 'no parameter varies'}; its output: {place / OUTPUT}")

    def _ended(self, each: _Process) -> None:
        """Notes what became of a run."""
        run, status = each.run, each.process.returncode
        place = self.folder.path / run.folder
        _clock(each)
        logged = history(place, self.sweep.metric.name)
        last = logged[-1] if logged else {}
        run.value, run.low, run.high = last.get("value"), last.get("low"), last.get("high")
        if status == 0:
            run.state = "finished"
            run.cause = "" if logged else f"it logged no {self.sweep.metric.name}"
        elif self.stopped_by is not None and each.signaled_at is not None and not each.early:
            run.state = "waiting"
        elif each.early:
            run.state = "stopped_early"
        else:
            run.state, run.cause = "failed", cause(place / OUTPUT, status)
        self.folder.save()
        if run.state == "waiting":
            say(f"{run.id} ended where it was; --resume goes on with it")
        else:
            reads = "" if run.value is None else f", {self.sweep.metric.name} {with_interval(run)}"
            why = f": {run.cause}" if run.cause else ""
            say(f"{run.id} {run.state.replace('_', ' ')} after {run.seconds:.0f} s{reads}{why}")

    def _stop_early(self) -> None:
        """Tells runs to end that are worse than others, by the rule of the file."""
        if self.sweep.early is None or not self._running:
            return
        metric = self.sweep.metric
        logged = {run.id: self._logged(run) for run in self.folder.runs}
        can = {each.run.id: each for each in self._running if each.signaled_at is None}
        for name in self.sweep.early.stopped(logged, list(can), metric.maximize):
            say(f"{name} is stopped early: others are better where it is ({metric.name}, early_terminate)")
            can[name].early = True
            self._tell(can[name], signal.SIGTERM)

    def _logged(self, run: SweepRun) -> list[float]:
        """Returns the values of the metric that a run has logged. A file is read again only when it has changed."""
        place = self.folder.path / run.folder
        try:
            state = (place / "metrics.jsonl").stat()
        except FileNotFoundError:
            return []
        previous, values = self._histories.get(run.id, (None, []))
        if previous != (now := (state.st_mtime_ns, state.st_size)):
            values = [each["value"] for each in history(place, self.sweep.metric.name)]
            self._histories[run.id] = (now, values)
        return values

    def _on_signal(self, number: int, frame: object) -> None:
        """Notes a signal, which `_step` hands on to the runs."""
        self._signals.append(signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        """Ends all runs: after the first signal each ends its step and saves, after a second one it ends at once."""
        again = self.stopped_by is not None
        self.stopped_by = self.stopped_by or number
        text = "the runs end at once" if again else "the runs end their steps and save; once more, and they end at once"
        say(f"{NAMES[number]}: {text}")
        for each in self._running:
            self._tell(each, signal.SIGINT if again else signal.SIGTERM)

    def _tell(self, each: _Process, number: signal.Signals) -> None:
        each.signaled_at = each.signaled_at or time.monotonic()
        each.process.send_signal(number)


def _clock(each: _Process) -> None:
    each.run.seconds = round(each.before + time.monotonic() - each.since, 1)


def _end(process: subprocess.Popen, number: signal.Signals) -> None:
    """Sends a signal to a run and to all that it has started in its group."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
    process.wait()


def cause(output: Path, status: int) -> str:
    """Returns why a run failed, in one line: the last error that it printed, or its last line."""
    try:
        with open(output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    line = (errors or lines or ["it printed nothing"])[-1][:LONGEST_CAUSE]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{line.removeprefix('error: ')} ({ended})"


def shown(value: object) -> str:
    """Returns a value of a parameter in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_interval(run: SweepRun) -> str:
    """Returns the value of a run, with its interval where there is one: "0.7123 (0.69 to 0.73)"."""
    if run.value is None:
        return "-"
    ends = f" ({run.low:.4g} to {run.high:.4g})" if run.low is not None and run.high is not None else ""
    return f"{run.value:.4g}{ends}"


def ranked(sweep: Sweep, runs: Sequence[SweepRun]) -> list[SweepRun]:
    """Returns the runs, the best first. One that was stopped early or failed stands behind all that finished."""
    sign = -1 if sweep.metric.maximize else 1
    order = ("finished", "stopped_early", "failed", "running", "waiting")
    return sorted(runs, key=lambda run: (order.index(run.state), run.value is None, sign * (run.value or 0.0)))


def table(sweep: Sweep, runs: Sequence[SweepRun], usual: Mapping[str, Any]) -> str:
    """Returns the table.

    Args:
        usual: what the config gives the parameters without the sweep; the run with all of these values has a star.
    """
    names = [each.name for each in sweep.parameters if not each.fixed]
    rows = [["run", *names, sweep.metric.name, "95% interval", "state", "seconds"]]
    for run in ranked(sweep, runs):
        interval = f"{run.low:.4f} to {run.high:.4f}" if run.low is not None and run.high is not None else "-"
        rows.append(
            [
                run.id + ("*" if _usual(run, names, usual) else ""),
                *(shown(run.parameters[name]) for name in names),
                "-" if run.value is None else f"{run.value:.4f}",
                interval,
                run.state.replace("_", " "),
                f"{run.seconds:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if runs and ranked(sweep, runs)[0].value is not None:
        lines[1] = styled(lines[1], BOLD, sys.stdout)
    if any(_usual(run, names, usual) for run in runs):
        lines.append("* as the config has it")
    lines += [f"{run.id}: {run.cause}" for run in runs if run.cause]
    return "\n".join(lines)


def _usual(run: SweepRun, names: Sequence[str], usual: Mapping[str, Any]) -> bool:
    return bool(names) and all(name in usual and usual[name] == run.parameters[name] for name in names)
