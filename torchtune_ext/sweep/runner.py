"""The folder of a sweep, and its runs: a few at a time.

    sweep.yaml     the file as it was given
    sweep.json     how far the sweep is
    run_01, ...    a folder for each run, as every run has it; what it printed is in `output.log`

Every run is a process of its own. It ends with this process, also by kill -9. A run that was in the middle goes on from its
checkpoint when the sweep goes on, or begins again in its folder if it has none.
"""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.files import explained, write_atomic
from torchtune_ext.run.folder import RUN_VARIABLE, SWEEP_VARIABLE, checkpoint_folders
from torchtune_ext.run.output import say
from torchtune_ext.run.parent import die_with_parent, environment
from torchtune_ext.run.stop import NAMES
from torchtune_ext.sweep.file import Point, Sweep
from torchtune_ext.telemetry.runs import SWEEP, SWEEP_FORMAT, read_sweep_record

FILE, LOCK, OUTPUT = "sweep.yaml", "sweep.lock", "output.log"
TO_DO = ("running", "waiting")
LOOK_S = 0.5  # seconds between two looks at a run
END_S = 600.0  # seconds that a run has to end after SIGTERM: the end of its step, its checkpoint, its cleanup
LONGEST_CAUSE = 300  # characters


@dataclass(slots=True)
class SweepRun:
    """One run of a sweep."""

    id: str  # also the name of its folder
    parameters: Point
    state: str = "waiting"  # or "running", "finished", "failed"
    cause: str = ""  # why it failed: one line


class SweepFolder:
    """The folder of a sweep. One process has it from `begin` on.

    Raises:
        ValueError: the folder holds a sweep and `resume` is False, or holds another one, or something else.
    """

    def __init__(self, path: Path, sweep: Sweep, words: Sequence[str], resume: bool):
        self.path, self.sweep, self.resume = path, sweep, resume
        self.words = list(words)
        points = sweep.points
        digits = max(2, len(str(len(points))))
        self.runs = [SweepRun(f"run_{number:0{digits}d}", point) for number, point in enumerate(points, 1)]
        self._lock: TextIO | None = None
        held = (path / SWEEP).exists()
        if held and not resume:
            raise Mistake(f"{path} holds a sweep; go on with it (--resume), or choose another folder (--out)")
        if not held and resume:
            raise Mistake(f"--resume: {path} holds no sweep; leave --resume out, or name its folder (--out)")
        if not held and any(each.name not in (LOCK, FILE) for each in path.glob("*")):
            raise Mistake(f"{path} is not empty, and holds no sweep; choose another folder (--out)")
        if held:
            self._read()

    def begin(self) -> None:
        """Takes the folder, and writes the file of the sweep and the record.

        Raises:
            ValueError: another process runs the sweep.
            OSError: the folder cannot be made or written.
        """
        with explained(
            f"{self.path} cannot be made or written", "Choose another folder (--out), or make room and set its rights"
        ):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Mistake(
                f"{self.path}: another process runs this sweep; wait, or choose another folder (--out)"
            ) from None
        except OSError:
            # A file system without locks.
            pass
        if self.resume:
            # Until now another process may have gone on with it.
            self._read()
        write_atomic(self.path / FILE, self.sweep.text.encode())
        self.save()

    def save(self) -> None:
        """Writes `sweep.json`, whole."""
        sweep = self.sweep
        record = {
            "format": SWEEP_FORMAT,
            "name": sweep.name,
            "metric": {"name": sweep.metric, "goal": "maximize" if sweep.maximize else "minimize"},
            "words": self.words,
            "runs": [asdict(run) for run in self.runs],
        }
        with explained(f"{self.path / SWEEP} cannot be written", "Make room; --resume goes on"):
            write_atomic(self.path / SWEEP, (json.dumps(record, indent=1) + "\n").encode())

    def close(self) -> None:
        """Gives up the folder, as the end of the process does."""
        if self._lock is not None:
            self._lock.close()

    def _read(self) -> None:
        """Reads the record of a sweep that goes on. Raises ValueError if it began with another file, or other settings."""
        record = read_sweep_record(self.path)
        file = self.path / FILE
        with explained(f"{file} cannot be read", "Begin again in another folder (--out)"):
            same = file.read_text(encoding="utf-8") == self.sweep.text
        if not same or (self.words and self.words != record["words"]):
            words = " ".join(["torchtune-ext sweep", str(file), *record["words"]])
            raise Mistake(f"--resume: this sweep began as {words}; go on with that, or begin in another folder (--out)")
        self.words = record["words"]
        self.runs = [SweepRun(**{name: run[name] for name in SweepRun.__slots__}) for run in record["runs"]]


class Runner:
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
        self._command, self._variables = command, variables or {}
        self._running: dict[str, tuple[SweepRun, subprocess.Popen, float]] = {}  # by id, with the time of its start
        self._signals: list[int] = []  # that came
        self._signals_sent = 0  # how many of them have gone to the runs
        self._kill_at = math.inf  # when runs are killed that were told to end

    @property
    def stopped_by(self) -> int | None:
        """The signal that stopped the sweep."""
        return self._signals[0] if self._signals else None

    @property
    def left(self) -> int:
        """How many runs are still to do."""
        return sum(run.state in TO_DO for run in self.folder.runs)

    def run(self) -> bool:
        """Runs until all runs have ended, or a signal came. Returns whether the sweep is at its end."""
        waiting = [run for run in self.folder.runs if run.state in TO_DO]
        with self._signals_noted():
            try:
                while self._running or (waiting and not self._signals):
                    while waiting and len(self._running) < self.jobs and not self._signals:
                        self._start(waiting.pop(0))
                    time.sleep(LOOK_S)
                    self._pass_signals_on()
                    self._look()
            finally:
                # Where the sweep itself fails, its runs end with all that they have started.
                for _, process, _ in self._running.values():
                    if process.poll() is None:
                        _kill(process)
        return not self.left

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        # Under nohup, or in the background of a shell, a signal that was ignored stays ignored.
        before = {number: handler for number in NAMES if (handler := signal.getsignal(number)) != signal.SIG_IGN}
        for number in before:
            signal.signal(number, lambda number, frame: self._signals.append(number))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_signals_on(self) -> None:
        """After the first signal each run ends its step and saves, after a second one it ends at once."""
        for number in self._signals[self._signals_sent :]:
            again, saving = self._signals_sent > 0, "their steps and save; once more, and they end at once"
            say(f"{NAMES[number]}: the runs end {'at once' if again else saving}")
            for _, process, _ in self._running.values():
                process.send_signal(signal.SIGINT if again else signal.SIGTERM)
            self._signals_sent += 1
            self._kill_at = min(self._kill_at, time.monotonic() + END_S)

    def _look(self) -> None:
        """Notes what has ended, and kills what was told to end and does not."""
        for run, process, began_at in list(self._running.values()):
            if process.poll() is None and time.monotonic() > self._kill_at:
                say(f"{run.id} has not ended within {END_S:g} s of SIGTERM: it is killed")
                _kill(process)
            if process.poll() is not None:
                del self._running[run.id]
                self._note(run, process.returncode, time.monotonic() - began_at)

    def _start(self, run: SweepRun) -> None:
        place = self.folder.path / run.id
        place.mkdir(exist_ok=True)
        words, begins = [*self._command(run.parameters), f"output_dir={place}"], "starts"
        if checkpoint_folders(place / "checkpoints"):
            words, begins = [*words, "resume_from_checkpoint=True"], "goes on"
        inherited = {name: value for name, value in environment().items() if name not in (SWEEP_VARIABLE, RUN_VARIABLE)}
        with open(place / OUTPUT, "ab") as output:
            process = subprocess.Popen(
                words,
                # Runs that log to W&B are one group there.
                env={"WANDB_RUN_GROUP": self.sweep.name, **self._variables, **inherited},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the sweep, which tells its runs to end well.
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        self._running[run.id] = run, process, time.monotonic()
        run.state = "running"
        self.folder.save()
        number, runs = self.folder.runs.index(run) + 1, len(self.folder.runs)
        at = ", ".join(f"{name}={shown(run.parameters[name])}" for name in self.sweep.varied)
        say(f"{run.id} ({number} of {runs}) {begins}: {at or 'no parameter varies'}; its output: {place / OUTPUT}")

    def _note(self, run: SweepRun, status: int, seconds: float) -> None:
        """Notes what became of a run."""
        if status == 0:
            run.state = "finished"
        elif self._signals:
            run.state = "waiting"
        else:
            run.state, run.cause = "failed", cause(self.folder.path / run.id / OUTPUT, status)
        self.folder.save()
        if run.state == "waiting":
            say(f"{run.id} ended where it was; --resume goes on with it")
        else:
            say(f"{run.id} {run.state} after {seconds:.0f} s{f': {run.cause}' if run.cause else ''}")


def _kill(process: subprocess.Popen) -> None:
    """Ends a run and all that it has started in its group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def shown(value: object) -> str:
    """Returns a value of a parameter in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cause(output: Path, status: int) -> str:
    """Returns why a run failed, in one line: the last error that it printed, or its last line."""
    with open(output, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|[\w.]*(Error|Exception)\b)", line)]
    line = (errors or lines or ["it printed nothing"])[-1][:LONGEST_CAUSE]
    ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{line.removeprefix('error: ')} ({ended})"
