"""The folder of a sweep and the processes of its runs.

sweep.yaml     a copy of the sweep file
sweep.json     the state of every run
run_01, ...    a run folder, with the run's output in `output.log`
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
from torchtune_ext.telemetry.progress import ProgressBar
from torchtune_ext.telemetry.runs import METRICS_FILE, SWEEP_FILE, SWEEP_FORMAT, read_sweep_record

SPEC_FILE, LOCK_FILE, OUTPUT_FILE = "sweep.yaml", "sweep.lock", "output.log"
UNFINISHED_STATES = ("running", "waiting")
POLL_S = 0.5  # seconds between two polls of a run
# Seconds from SIGTERM to SIGKILL: the run finishes its step, saves a checkpoint and cleans up.
TERMINATE_TIMEOUT_S = 600.0
MAX_CAUSE_CHARS = 300


@dataclass(slots=True)
class SweepRun:
    """One run of a sweep."""

    id: str  # also the name of the run's folder
    parameters: Point
    state: str = "waiting"  # or "running", "finished", "stopped_early", "failed"
    value: float | None = None  # the last logged value of the metric
    cause: str = ""  # one line: why the run failed, or has no value
    seconds: float = 0.0  # run time, summed over all starts except killed ones


class SweepFolder:
    """The folder of a sweep. `acquire` locks it for one process; an interrupted sweep resumes.

    Raises:
        UsageError: the folder holds another sweep, or other files.
    """

    def __init__(self, path: Path, sweep: Sweep, extra_settings: Sequence[str], seed: int):
        self.path, self.sweep = path, sweep
        self.extra_settings, self.seed = list(extra_settings), seed
        self.runs: list[SweepRun] = []
        self._lock: TextIO | None = None
        # A sweep that was killed before its first save has left at most these two files.
        begun, spec = [LOCK_FILE], path / SPEC_FILE
        if spec.is_file() and spec.read_text() == sweep.text:
            begun.append(SPEC_FILE)
        if not (path / SWEEP_FILE).exists() and any(each.name not in begun for each in path.glob("*")):
            raise UsageError(f"{path} is not empty, and holds no sweep. Fix: choose another folder (--out)")
        self._read()

    def acquire(self) -> None:
        """Locks the folder, and writes the sweep file and the record.

        Raises:
            UsageError: another process runs the sweep.
            OSError: the folder cannot be created or written.
        """
        fix = "Choose another folder (--out), or free disk space and set its permissions"
        with explain_os_errors(f"{self.path} cannot be created or written", fix):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK_FILE, "a")  # noqa: SIM115 (until `close`)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{self.path}: another process runs this sweep. Fix: wait, or choose another folder (--out)"
            ) from None
        except OSError:
            pass  # some file systems lack locks; the sweep runs there without this guard
        # Another process may have continued the sweep before this process held the lock.
        self._read()
        write_atomic(self.path / SPEC_FILE, self.sweep.text.encode())
        self.save()

    def add(self, point: Point) -> SweepRun:
        """Adds a run of a point in state "waiting"."""
        name = f"run_{len(self.runs) + 1:0{max(2, len(str(self.sweep.num_runs)))}d}"
        self.runs.append(SweepRun(name, point))
        return self.runs[-1]

    def save(self) -> None:
        """Writes `sweep.json` atomically."""
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
        file = self.path / SWEEP_FILE
        with explain_os_errors(f"{file} cannot be written", "Free disk space, then resume with the same command"):
            write_atomic(file, (json.dumps(record, indent=1) + "\n").encode())

    def close(self) -> None:
        """Releases the lock on the folder, as the end of the process does."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> None:
        """Reads the record, if it exists.

        Raises:
            UsageError: the sweep was started with another file, other settings, or another seed.
        """
        if not (self.path / SWEEP_FILE).exists():
            return
        record, file = read_sweep_record(self.path), self.path / SPEC_FILE
        names = [each.name for each in fields(SweepRun)]
        self.runs = [SweepRun(**{name: run[name] for name in names if name in run}) for run in record["runs"]]
        with explain_os_errors(f"{file} cannot be read", "Start over in another folder (--out)"):
            same = file.read_text(encoding="utf-8") == self.sweep.text
        if not same or (self.extra_settings, self.seed) != (record["words"], record["seed"]):
            words = shlex.join(["torchtune-ext", "sweep", str(file), "--seed", str(record["seed"]), *record["words"]])
            raise UsageError(
                f"{self.path} holds a sweep that was started with `{words}`. Fix: resume it with that command, or choose "
                "another folder (--out)"
            )


class SweepRunner:
    """Runs a sweep in its folder.

    Args:
        folder: the acquired folder of the sweep.
        jobs: number of concurrent runs.
        command: returns the command of a run from its point.
        variables: environment variables of the runs. The environment of this process overrides
            them.
    """

    def __init__(
        self,
        folder: SweepFolder,
        jobs: int,
        command: Callable[[Point], Sequence[str]],
        variables: Mapping[str, str] | None = None,
    ):
        self.folder, self.jobs, self.sweep = folder, jobs, folder.sweep
        self.stop_signal: int | None = None  # the first SIGINT or SIGTERM
        self._command, self._variables = command, variables or {}
        self._processes: dict[str, subprocess.Popen] = {}
        self._waiting = [run for run in folder.runs if run.state in UNFINISHED_STATES]
        self._pruner = Pruner(self.sweep) if self.sweep.halving else None
        # The pruner keeps nothing on disk, so it first reads what all runs have logged.
        for run in folder.runs:
            self._should_prune(run)

    @property
    def num_unfinished(self) -> int:
        """The number of runs that have not ended."""
        return self.sweep.num_runs - sum(run.state not in UNFINISHED_STATES for run in self.folder.runs)

    def run(self) -> bool:
        """Runs until all runs end or a signal arrives. Returns whether the sweep has ended."""
        asyncio.run(self._run_all())
        return self.stop_signal is None or not self.num_unfinished

    async def _run_all(self) -> None:
        for number in SIGNAL_NAMES:
            # Under nohup, or in the background of a shell, an ignored signal stays ignored.
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
                # If the sweep itself fails, it kills the run and the run's child processes.
                if process.poll() is None:
                    _kill_group(process)
                del self._processes[run.id]
            run.seconds = round(run.seconds + time.monotonic() - began, 1)
            # The pruner compares other runs with the last values of this run.
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
        # A failed run gets the worst value, as in W&B. None means that the value is not known yet.
        runs = self.folder.runs
        known = [run.value for run in runs if run.value is not None and run.state != "failed"]
        worst = (min if self.sweep.maximize else max)(known, default=None)
        values = {"failed": worst, "running": None, "waiting": None}
        return [(run.parameters, values.get(run.state, run.value)) for run in runs]

    def _start_run(self, run: SweepRun) -> subprocess.Popen:
        place = self.folder.path / run.id
        place.mkdir(exist_ok=True)
        words, begins = [*self._command(run.parameters), f"output_dir={place}"], "starts"
        # An interrupted run resumes from its checkpoint. Without one it restarts in its folder.
        if checkpoint_folders(place / "checkpoints"):
            words, begins = [*words, "resume_from_checkpoint=True"], "resumes"
        # All runs of the sweep form one group in W&B.
        environ = {"WANDB_RUN_GROUP": self.sweep.name, **self._variables, **copy_environment()}
        for name in (SWEEP_VARIABLE, RUN_VARIABLE):
            environ.pop(name, None)
        # The record comes first: if saving fails, no run is left unsupervised.
        run.state = "running"
        self.folder.save()
        with open(place / OUTPUT_FILE, "ab") as output:
            process = subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only the sweep, which stops its runs gracefully.
                process_group=0,
                # A run ends with the sweep, even if SIGKILL ends the sweep.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        varied = [each.name for each in self.sweep.varied_parameters]
        at = ", ".join(f"{name}={format_value(run.parameters[name])}" for name in varied)
        print_text(
            f"{run.id} ({self.folder.runs.index(run) + 1} of {self.sweep.num_runs}) {begins}: "
            f"{at or 'no parameter varies'}; output: {place / OUTPUT_FILE}"
        )
        return process

    async def _wait_for_run(self, run: SweepRun, process: subprocess.Popen) -> bool:
        """Waits until a run has ended. Returns whether early termination stopped it."""
        early, told_at = False, None  # time of SIGTERM
        progress = ProgressBar(run.id)
        while process.poll() is None:
            progress.label = f"{run.id}: step {latest_step(self.folder.path / run.id / METRICS_FILE)}"
            progress.add(0)
            if told_at is None and self.stop_signal is not None:
                told_at = time.monotonic()
            elif told_at is None and self._should_prune(run):
                print_text(
                    f"{run.id} is stopped early: other runs are better at this point "
                    f"({self.sweep.metric}, early_terminate)"
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
            print_text(f"{run.id} was interrupted; the same command resumes it")
        else:
            reads = "" if run.value is None else f", {metric} {run.value:.4g}"
            why = f": {run.cause}" if run.cause else ""
            print_text(f"{run.id} {run.state.replace('_', ' ')} after {run.seconds:.0f} s{reads}{why}")

    def _should_prune(self, run: SweepRun) -> bool:
        if self._pruner is None:
            return False
        metric = self.sweep.metric
        records = metric_records(self.folder.path / run.id, metric)
        return self._pruner.should_stop(run.id, [record[metric] for record in records])

    def _on_signal(self, number: signal.Signals) -> None:
        """Ends all runs: after their step and a save on the first signal, at once on the second."""
        again = self.stop_signal is not None
        self.stop_signal = self.stop_signal or number
        graceful = "the runs end their steps and save; signal once more to end them at once"
        print_text(f"{SIGNAL_NAMES[number]}: {'the runs end at once' if again else graceful}")
        for process in self._processes.values():
            process.send_signal(signal.SIGINT if again else signal.SIGTERM)


def _kill_group(process: subprocess.Popen) -> None:
    # A run leads its own process group, which holds all of its child processes.
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def metric_records(folder: Path, metric: str) -> list[dict[str, Any]]:
    """Returns the records of a run that hold a finite value of a metric, in order."""
    # A new run has no file yet, and a resuming run truncates it. The next poll reads it again.
    with suppress(FileNotFoundError, ValueError):
        records = _read_records(folder / METRICS_FILE, (folder / METRICS_FILE).stat().st_size)
        return [each for each in records if isinstance(each.get(metric), int | float) and math.isfinite(each[metric])]
    return []


def latest_step(path: Path) -> int:
    """Returns the step of the last complete line of a metrics file; 0 without such a line."""
    # A sweep polls this, so only the end of the file is read, and no error may end a run.
    with suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        *_, line, _ = file.read().split(b"\n")
        return int(json.loads(line)["step"])
    return 0


@lru_cache(64)
def _read_records(path: Path, size: int) -> list[dict[str, Any]]:
    # The size is part of the cache key, so a file is read again only when its size has changed.
    return read_metrics(path)


def format_value(value: object) -> str:
    """Returns a parameter value as short text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def failure_cause(output: Path, status: int) -> str:
    """Returns why a run failed, in one line: the last printed error, or else the last line."""
    with open(output, "rb") as file:
        # The output may be large, and the error is at its end.
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    # Lines of elapsed time ("start: not ready after 30 s") say nothing about the cause.
    lines = [line for line in lines if not re.search(r" after \d+ s(,|$)", line)] or lines
    line = (errors or lines or ["it printed nothing"])[-1][:MAX_CAUSE_CHARS]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{line.removeprefix('error: ')} ({ended})"
