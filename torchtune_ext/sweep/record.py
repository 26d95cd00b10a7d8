"""The folder of a sweep: `sweep.yaml`, the file as it was given; `sweep.json`, how far the sweep is; a folder for each run."""

import fcntl
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.files import explained, write_atomic
from torchtune_ext.sweep.file import Sweep
from torchtune_ext.sweep.space import Point
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.panels import PANELS

FORMAT = 1
FILE, RECORD, LOCK = "sweep.yaml", "sweep.json", "sweep.lock"
ENDED = ("finished", "failed", "stopped_early")
# A metric with an interval -> the metrics of its ends.
INTERVALS = {panel.band[0]: panel.band[1:] for panel in PANELS if panel.band}


@dataclass(slots=True)
class SweepRun:
    """One run of a sweep."""

    id: str
    folder: str  # below the sweep's folder
    parameters: Point
    state: str = "waiting"  # waiting, running, finished, failed or stopped_early
    value: float | None = None  # the last that it logged of the metric
    low: float | None = None  # the 95% interval of that value, where the recipe logs one
    high: float | None = None
    cause: str = ""  # why it failed, or has no value: one line
    seconds: float = 0.0  # how long it ran, all its starts together
    quantiles: dict[str, float] = field(default_factory=dict)  # of the drawn parameters, for a search that learns


class SweepFolder:
    """Owns the folder of a sweep until `close`, or the end of the process.

    Raises:
        ValueError: another process runs the sweep there; the folder holds one and `resume` is False, or another one, or
            something else.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, path: Path, sweep: Sweep, words: Sequence[str], seed: int, resume: bool):
        self.path, self.sweep = path, sweep
        self.words, self.seed = list(words), seed
        self.runs: list[SweepRun] = []
        held = (path / RECORD).exists()
        if path.exists() and not path.is_dir():
            raise Mistake(f"--out {path} is no folder; choose another one")
        if held and not resume:
            raise Mistake(f"{path} holds a sweep; go on with it (--resume), or choose another folder (--out)")
        if not held and resume:
            raise Mistake(f"--resume: {path} holds no sweep; leave --resume out, or name its folder (--out)")
        if not held and path.exists() and any(each.name not in (LOCK, FILE) for each in path.iterdir()):
            raise Mistake(f"{path} is not empty, and holds no sweep; choose another folder (--out)")
        with explained(
            f"{path} cannot be made or written", "Choose another folder (--out), or make room and set its rights"
        ):
            self._new_folders = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise Mistake(f"{path}: another process runs this sweep; wait, or choose another folder (--out)") from None
        except OSError:
            # A file system without locks.
            pass
        try:
            if held:
                self._read()
        except BaseException:
            os.close(self._lock)
            raise

    def begin(self) -> None:
        """Writes the file of the sweep and the first record."""
        write_atomic(self.path / FILE, self.sweep.text.encode())
        self.save()

    def add(self, point: Point, quantiles: dict[str, float]) -> SweepRun:
        """Adds a run of a point; it waits."""
        name = f"run_{len(self.runs) + 1:0{max(2, len(str(self.sweep.runs)))}d}"
        self.runs.append(SweepRun(name, name, point, quantiles=quantiles))
        return self.runs[-1]

    def save(self) -> None:
        """Writes `sweep.json`, whole."""
        sweep, metric = self.sweep, self.sweep.metric
        record = {
            "format": FORMAT,
            "name": sweep.name,
            "method": sweep.method,
            "metric": {"name": metric.name, "goal": "maximize" if metric.maximize else "minimize"},
            "command": [str(word) for word in sweep.command],
            "words": self.words,
            "seed": self.seed,
            "parameters": {each.name: _written(each.kind, each.given) for each in sweep.parameters},
            "runs": [asdict(run) for run in self.runs],
        }
        with explained(f"{self.path / RECORD} cannot be written", "Make room; --resume goes on"):
            write_atomic(self.path / RECORD, (json.dumps(record, indent=1) + "\n").encode())

    def close(self) -> None:
        """Gives up the folder. If the sweep did not begin, nothing of it stays."""
        if not (self.path / RECORD).exists():
            (self.path / LOCK).unlink(missing_ok=True)
            for folder in self._new_folders:
                if not any(folder.iterdir()):
                    folder.rmdir()
        os.close(self._lock)

    def _read(self) -> None:
        """Reads the record of a sweep that goes on, and compares the two files."""
        path = self.path / RECORD
        try:
            record = json.loads(path.read_bytes())
            if record["format"] != FORMAT:
                raise Mistake(
                    f"{path} has format {record['format']}, and this version goes on with {FORMAT}: use the version that "
                    "began the sweep"
                )
            runs = [SweepRun(**run) for run in record["runs"]]
            words, seed = record["words"], record["seed"]
            before = yaml.safe_load((self.path / FILE).read_text(encoding="utf-8"))
        except (KeyError, TypeError, OSError, json.JSONDecodeError, yaml.YAMLError) as error:
            raise Mistake(f"{path} is damaged ({error!r}); begin again in another folder (--out)") from error
        now = yaml.safe_load(self.sweep.text)
        if other := sorted(key for key in {**before, **now} if before.get(key) != now.get(key)):
            raise Mistake(
                f"--resume: {self.sweep.path} is not the file that this sweep began with: {', '.join(other)} differ"
                f"{'' if other[1:] else 's'}; go on with {self.path / FILE}, or begin in another folder (--out)"
            )
        if self.words and self.words != words:
            raise Mistake(
                f"--resume: the sweep began with {' '.join(words) or 'no settings'}, and not with {' '.join(self.words)}; "
                "leave them out, or begin in another folder (--out)"
            )
        self.runs, self.words, self.seed = runs, words, seed


def _written(kind: str, given: Any) -> dict[str, Any]:
    return dict(given) if kind in ("constant", "categorical") else {"distribution": kind, **given}


def history(folder: Path, metric: str) -> list[dict[str, float]]:
    """Returns what a run has logged of a metric, in order: its value, and `low` and `high` where it has an interval."""
    try:
        records = read_metrics(folder / "metrics.jsonl")
    except (FileNotFoundError, ValueError):
        # Not begun; or a line is being cut away, and the next look finds the file whole.
        return []
    low, high = INTERVALS.get(metric, ("", ""))
    values = []
    for record in records:
        value = record.get(metric)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            ends = {"low": record.get(low), "high": record.get(high)}
            values.append({"value": value, **{key: end for key, end in ends.items() if end is not None}})
    return values
