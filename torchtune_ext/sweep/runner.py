"""The folder of a sweep, and its runs, each a process of its own.

sweep.yaml     the file as it was given
sweep.json     how far the sweep is
run_01, ...    the usual folder of a run, with its output in `output.log`
"""

import asyncio
import fcntl
import json
import math
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TextIO

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.files import explain_os_errors, write_atomic
from torchtune_ext.run.folder import RUN_VARIABLE, SWEEP_VARIABLE, checkpoint_folders
from torchtune_ext.run.output import print_text
from torchtune_ext.run.process_env import copy_environment, die_with_parent
from torchtune_ext.run.stop import SIGNAL_NAMES
from torchtune_ext.sweep.search import Pruner, next_point
from torchtune_ext.sweep.spec import Point, Sweep
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.runs import METRICS_FILE, SWEEP_FILE, SWEEP_FORMAT, read_sweep_record

SPEC_FILE, LOCK_FILE, OUTPUT_FILE = "sweep.yaml", "sweep.lock", "output.log"
UNFINISHED_STATES = ("running", "waiting")
POLL_S = 0.5  # seconds between two looks at a run
TERMINATE_TIMEOUT_S = (
    600.0  # seconds that a run has to end after SIGTERM: the end of its step, its checkpoint, its cleanup
)
MAX_CAUSE_CHARS = 300  # characters


@dataclass(slots=True)
class SweepRun:
    """One run of a sweep."""

    id: str  # also the name of its folder
    parameters: Point
    state: str = "waiting"  # or "running", "finished", "stopped_early", "failed"
    value: float | None = None  # the last that it logged of the metric
    cause: str = ""  # why it failed, or has no value: one line
    seconds: float = 0.0  # how long it ran, all its starts together that were not killed


class SweepFolder:
    """The folder of a sweep, which one process owns from `begin` on. A sweep that began in it goes on.

    Raises:
        ValueError: the folder holds another sweep, or something else.
    """

    def __init__(self, path: Path, sweep: Sweep, extra_settings: Sequence[str], seed: int):
        self.path, self.sweep = path, sweep
        self.extra_settings, self.seed = list(extra_settings), seed
        self.runs: list[SweepRun] = []
        self._lock: TextIO | None = None
        # A sweep that was killed at its very beginning has left these two.
        begun = [
            LOCK_FILE,
            *([SPEC_FILE] if (path / SPEC_FILE).is_file() and (path / SPEC_FILE).read_text() == sweep.text else []),
        ]
        if not (path / SWEEP_FILE).exists() and any(each.name not in begun for each in path.glob("*")):
            raise UsageError(f"{path} is not empty, and holds no sweep; choose another folder (--out)")
        self._read()

    def acquire(self) -> None:
        """Takes the folder, and writes the file of the sweep and the record.

        Raises:
            ValueError: another process runs the sweep.
            OSError: the folder cannot be made or written.
        """
        with explain_os_errors(
            f"{self.path} cannot be made or written", "Choose another folder (--out), or make room and set its rights"
        ):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK_FILE, "a")  # noqa: SIM115 (until `close`)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path}: another process runs this sweep; wait, or choose another folder (--out)"
            ) from None
        except OSError:
            # Some file systems have no locks. The sweep still runs there, without this guard.
            pass
        # Another process may have gone on with the sweep before this one held the lock.
        self._read()
        write_atomic(self.path / SPEC_FILE, self.sweep.text.encode())
        self.save()

    def add(self, point: Point) -> SweepRun:
        """Adds a run of a point; it waits."""
        name = f"run_{len(self.runs) + 1:0{max(2, len(str(self.sweep.num_runs)))}d}"
        self.runs.append(SweepRun(name, point))
        return self.runs[-1]

    def save(self) -> None:
        """Writes `sweep.json`, whole."""
        sweep = self.sweep
        record = {
            "format": SWEEP_FORMAT,
            "name": sweep.name,
            "method": sweep.method,
            "metric": {"name": sweep.metric, "goal": "maximize" if sweep.maximize else "minimize"},
            "words": self.extra_settings,
            "seed": self.seed,
            "runs": [asdict(run) for run in self.runs],
        }
        with explain_os_errors(f"{self.path / SWEEP_FILE} cannot be written", "Make room; the same command goes on"):
            write_atomic(self.path / SWEEP_FILE, (json.dumps(record, indent=1) + "\n").encode())

    def close(self) -> None:
        """Gives up the folder, as the end of the process does."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> None:
        """Reads the record, where there is one. Raises ValueError if the sweep began with another file, or other settings."""
        if not (self.path / SWEEP_FILE).exists():
            return
        record, file = read_sweep_record(self.path), self.path / SPEC_FILE
        names = [each.name for each in fields(SweepRun)]
        self.runs = [SweepRun(**{name: run[name] for name in names if name in run}) for run in record["runs"]]
        with explain_os_errors(f"{file} cannot be read", "Begin again in another folder (--out)"):
            same = file.read_text(encoding="utf-8") == self.sweep.text
        if not same or (self.extra_settings, self.seed) != (record["words"], record["seed"]):
            words = shlex.join(["torchtune-ext", "sweep", str(file), "--seed", str(record["seed"]), *record["words"]])
            raise UsageError(
                f"{self.path} holds a sweep that began as {words}; go on with that, or choose another folder (--out)"
            )


class SweepRunner:
    """Runs a sweep in its folder.

    Args:
        folder: of the sweep, which has begun.
        jobs: runs at a time.
        command: returns the words of a run from its point.
        variables: of the environment of the runs, where this process has not set them.
    """

    def __init__(
        self,
        folder: SweepFolder,
        jobs: int,
        command: Callable[[Point], Sequence[str]],
        variables: Mapping[str, str] | None = None,
    ):
        self.folder, self.jobs, self.sweep = folder, jobs, folder.sweep
        self.stop_signal: int | None = None  # the signal
        self._command, self._variables = command, variables or {}
        self._processes: dict[str, subprocess.Popen] = {}
        self._waiting = [run for run in folder.runs if run.state in UNFINISHED_STATES]
        self._pruner = Pruner(self.sweep) if self.sweep.halving else None
        # The pruner keeps nothing on disk, so it first hears what all runs have logged until now.
        for run in folder.runs:
            self._should_prune(run)

    @property
    def num_unfinished(self) -> int:
        """Returns how many runs are still to do."""
        return self.sweep.num_runs - sum(run.state not in UNFINISHED_STATES for run in self.folder.runs)

    def run(self) -> bool:
        """Runs until all runs have ended, or a signal came. Returns whether the sweep has ended."""
        asyncio.run(self._run_all())
        return self.stop_signal is None or not self.num_unfinished

    async def _run_all(self) -> None:
        for number in SIGNAL_NAMES:
            # Under nohup, or in the background of a shell, a signal that was ignored stays ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        await asyncio.gather(*(self._run_worker() for _ in range(self.jobs)))

    async def _run_worker(self) -> None:
        while self.stop_signal is None and (run := self._next_run()) is not None:
            process = self._processes[run.id] = self._start_run(run)
            began = time.monotonic()
            try:
                early = await self._wait_for_run(run, process)
            finally:
                # Where the sweep itself fails, the run ends with all that it has started.
                if process.poll() is None:
                    _kill_group(process)
                del self._processes[run.id]
            run.seconds = round(run.seconds + time.monotonic() - began, 1)
            # What it logged last counts for the others.
            self._should_prune(run)
            self._record_result(run, process.returncode, early)

    def _next_run(self) -> SweepRun | None:
        if self._waiting:
            return self._waiting.pop(0)
        number = len(self.folder.runs)
        if number >= self.sweep.num_runs:
            return None
        return self.folder.add(next_point(self.sweep, self.folder.seed, number, self._point_results()))

    def _point_results(self) -> list[tuple[Point, float | None]]:
        # A run that failed counts as the worst, as in W&B. None means that the value is not known yet.
        runs = self.folder.runs
        known = [run.value for run in runs if run.value is not None and run.state != "failed"]
        worst = (min if self.sweep.maximize else max)(known, default=None)
        values = {"failed": worst, "running": None, "waiting": None}
        return [(run.parameters, values.get(run.state, run.value)) for run in runs]

    def _start_run(self, run: SweepRun) -> subprocess.Popen:
        place = self.folder.path / run.id
        place.mkdir(exist_ok=True)
        words, begins = [*self._command(run.parameters), f"output_dir={place}"], "starts"
        # A run that was interrupted goes on from its checkpoint. Without one it begins again in its folder.
        if checkpoint_folders(place / "checkpoints"):
            words, begins = [*words, "resume_from_checkpoint=True"], "goes on"
        inherited = {
            name: value for name, value in copy_environment().items() if name not in (SWEEP_VARIABLE, RUN_VARIABLE)
        }
        # The record comes first: a disk that refuses it would leave a run that nobody watches.
        run.state = "running"
        self.folder.save()
        with open(place / OUTPUT_FILE, "ab") as output:
            process = subprocess.Popen(
                words,
                # Runs that log to W&B are one group there.
                env={"WANDB_RUN_GROUP": self.sweep.name, **self._variables, **inherited},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only the sweep, which tells its runs to end well.
                process_group=0,
                # A run ends with the sweep, also where the sweep is killed by SIGKILL.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        at = ", ".join(
            f"{each.name}={format_value(run.parameters[each.name])}" for each in self.sweep.varied_parameters
        )
        print_text(
            f"{run.id} ({self.folder.runs.index(run) + 1} of {self.sweep.num_runs}) {begins}: {at or 'no parameter varies'}; "
            f"its output: {place / OUTPUT_FILE}"
        )
        return process

    async def _wait_for_run(self, run: SweepRun, process: subprocess.Popen) -> bool:
        """Waits until a run has ended. Returns whether it was stopped because others are better."""
        early, told_at = False, None  # when it was told to end
        while process.poll() is None:
            if told_at is None and self.stop_signal is not None:
                told_at = time.monotonic()
            elif told_at is None and self._should_prune(run):
                print_text(
                    f"{run.id} is stopped early: others are better where it is ({self.sweep.metric}, early_terminate)"
                )
                process.terminate()
                told_at, early = time.monotonic(), True
            elif told_at is not None and time.monotonic() > told_at + TERMINATE_TIMEOUT_S:
                print_text(f"{run.id} has not ended within {TERMINATE_TIMEOUT_S:g} s of SIGTERM: it is killed")
                _kill_group(process)
            await asyncio.sleep(POLL_S)
        return early

    def _record_result(self, run: SweepRun, status: int, early: bool) -> None:
        place, metric = self.folder.path / run.id, self.sweep.metric
        records = metric_records(place, metric)
        run.value = records[-1][metric] if records else None
        if status == 0:
            run.state, run.cause = "finished", "" if records else f"it logged no {metric}"
        elif early:
            run.state = "stopped_early"
        elif self.stop_signal is not None:
            run.state = "waiting"
        else:
            run.state, run.cause = "failed", failure_cause(place / OUTPUT_FILE, status)
        self.folder.save()
        if run.state == "waiting":
            print_text(f"{run.id} ended where it was; the same command goes on with it")
        else:
            reads = "" if run.value is None else f", {metric} {run.value:.4g}"
            why = f": {run.cause}" if run.cause else ""
            print_text(f"{run.id} {run.state.replace('_', ' ')} after {run.seconds:.0f} s{reads}{why}")

    def _should_prune(self, run: SweepRun) -> bool:
        if self._pruner is None:
            return False
        metric = self.sweep.metric
        return self._pruner.should_stop(
            run.id, [record[metric] for record in metric_records(self.folder.path / run.id, metric)]
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Ends all runs: after the first signal each ends its step and saves, after a second one it ends at once."""
        again = self.stop_signal is not None
        self.stop_signal = self.stop_signal or number
        text = "the runs end at once" if again else "the runs end their steps and save; once more, and they end at once"
        print_text(f"{SIGNAL_NAMES[number]}: {text}")
        for process in self._processes.values():
            process.send_signal(signal.SIGINT if again else signal.SIGTERM)


def _kill_group(process: subprocess.Popen) -> None:
    # A run leads its own process group, which holds all that it has started.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def metric_records(folder: Path, metric: str) -> list[dict[str, Any]]:
    """Returns the records of a run that have a metric, in order."""
    # A run that has just begun has no file yet. A run that resumes may be cutting the file, which the next look finds
    # whole.
    with suppress(FileNotFoundError, ValueError):
        records = _read_records(folder / METRICS_FILE, (folder / METRICS_FILE).stat().st_size)
        return [each for each in records if isinstance(each.get(metric), int | float) and math.isfinite(each[metric])]
    return []


@lru_cache(1024)
def _read_records(path: Path, size: int) -> list[dict[str, Any]]:
    # The size is part of the key of the cache, so a file is read again only when its size has changed.
    return read_metrics(path)


def format_value(value: object) -> str:
    """Returns a value of a parameter in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def failure_cause(output: Path, status: int) -> str:
    """Returns why a run failed, in one line: the last error that it printed, or its last line."""
    with open(output, "rb") as file:
        # The output may be large, and the error stands at its end.
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    line = (errors or lines or ["it printed nothing"])[-1][:MAX_CAUSE_CHARS]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{line.removeprefix('error: ')} ({ended})"
