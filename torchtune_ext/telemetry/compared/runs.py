"""The runs of a page of several runs: found in the folders that the user names, read once, and refused where they are none."""

import gzip
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import Mistake
from torchtune_ext.run.folder import RECORD, read_record
from torchtune_ext.telemetry.compared.sweep_file import FILE as SWEEP
from torchtune_ext.telemetry.compared.sweep_file import Point, Sweep, read_sweep
from torchtune_ext.telemetry.heading import State, state_of
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.rollouts import FORMAT, rollout_paths

log = logging.getLogger(__name__)

METRICS, EVALUATION = "metrics.jsonl", "evaluation.json"
_WHAT = f"the folder of a run holds {RECORD} and {METRICS}, that of a sweep {SWEEP}"
_FEW = 5  # So many of the runs that are near are named.


@dataclass(frozen=True, slots=True)
class OneRun:
    """What a page of several runs knows of one of them."""

    path: Path
    id: str
    name: str  # no other run of the page has it
    config: Mapping[str, Any] | None  # None: nobody wrote it down
    process: Mapping[str, Any]  # what it was last started with
    records: Sequence[Mapping[str, Any]]  # the metrics of each step; empty: an evaluation of a model
    evaluation: Mapping[str, Any]  # what `evaluation.json` holds
    state: State
    point: Point | None = None  # of a sweep


@dataclass(slots=True)
class Found:
    """The runs that were found, and what was left out."""

    runs: list[OneRun] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # a sentence each


def is_several(path: str | Path) -> bool:
    """Tells whether `path` is the folder of a sweep, or holds two runs or more and is none."""
    path = Path(path)
    return (path / SWEEP).exists() or (path.is_dir() and not _is_run(path) and len(_runs_in(path)) > 1)


def find_runs(paths: Sequence[str | Path]) -> Found:
    """Reads the runs in `paths`: folders of runs, of sweeps, and folders that hold folders of runs.

    A run without metrics, or with damaged ones, is left out with a sentence.

    Raises:
        FileNotFoundError: a path does not exist, or no run has anything to show.
        ValueError: a path is no run, a run is named twice, or the formats of files are not those of this version.
    """
    found, places = Found(), []
    for path in map(Path, paths):
        if (path / SWEEP).exists():
            sweep = read_sweep(path)
            found.sweeps.append(sweep)
            places += [(point.folder, point) for point in sweep.points]
        elif _is_run(path):
            places.append((path, None))
        elif inside := _runs_in(path):
            places += [(run, None) for run in inside]
        else:
            raise _no_run(path)
    _refuse_twice([path for path, _ in places])
    names = _names([path for path, _ in places])
    for (path, point), name in zip(places, names, strict=True):
        try:
            run = _read(path, name, point)
        except _Nothing as nothing:
            # A run of a sweep that has not begun, or failed before its first step, is in the table of the sweep.
            if point is None:
                found.left_out.append(f"{name} is left out: {nothing}.")
                log.warning("%s is left out of the report: %s", path, nothing)
            continue
        found.runs.append(run)
    _refuse_copies(found.runs)
    if not found.runs and not any(sweep.points for sweep in found.sweeps):
        told = " ".join(found.left_out) or "the sweep has started no run"
        raise Mistake(f"{', '.join(map(str, paths))}: nothing to show yet. {told}")
    return found


class _Nothing(Exception):
    """A run has nothing to show, for the reason in the message."""


def _read(path: Path, name: str, point: Point | None) -> OneRun:
    try:
        record = read_record(path) or {}
        wrong = ""
    except ValueError as error:
        record, wrong = {}, str(error)
    if (version := record.get("format", 1)) != 1:
        raise Mistake(
            f"{path / RECORD} has format {version!r}, and this version of torchtune-ext reads format 1: make the report with "
            "the version that wrote it, or leave the run out"
        )
    _require_rollout_format(path)
    try:
        records = _metrics(path / METRICS) if (path / METRICS).exists() else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Nothing(f"{METRICS} is damaged ({error})") from error
    evaluation = _evaluation(path)
    if not records and not evaluation:
        raise _Nothing("no metrics yet; a run writes its first line at the end of a step")
    if wrong:
        log.warning("the settings of %s are not known: %s", path, wrong)
    config = record.get("config") if isinstance(record.get("config"), Mapping) else None
    process = record.get("process") if isinstance(record.get("process"), Mapping) else {}
    if records:
        state = state_of(path, config or {}, records[-1]["step"])
    else:
        state = State("finished", "evaluated", 0, None)
    return OneRun(path, str(record.get("id", name)), name, config, process, records, evaluation, state, point)


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step. What is no finite number is as if it were not there: a file may have been edited."""
    records = read_metrics(path)
    for record in records:
        if not isinstance(record["step"], int):
            raise Mistake(f"a step is {record['step']!r}")
        for name, value in record.items():
            if isinstance(value, bool | str) or (isinstance(value, float) and not math.isfinite(value)):
                record[name] = None
    return records


def _evaluation(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / EVALUATION).read_bytes())
        return found if isinstance(found, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is left out of the report: %s", path / EVALUATION, error)
        return {}


def _require_rollout_format(path: Path) -> None:
    """All files of a run come from one format, so its newest tells. A damaged one is passed over here: it has no format."""
    paths = rollout_paths(path)
    if not paths:
        return
    newest = paths[max(paths)]
    try:
        with gzip.open(newest, "rt", encoding="utf-8") as file:
            header = json.loads(file.readline())
        version = header.get("format")
    except (OSError, EOFError, ValueError, AttributeError):
        return
    if version != FORMAT:
        raise Mistake(
            f"{newest} has format {version!r}, and this version of torchtune-ext reads format {FORMAT}: make the report with "
            "the version that wrote it, or leave the run out"
        )


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RECORD, METRICS, EVALUATION))


def _runs_in(path: Path) -> list[Path]:
    """Returns the runs in a folder, without the earlier ones that were set aside in it."""
    if not path.is_dir():
        return []
    return sorted(
        each for each in path.iterdir() if each.is_dir() and not each.name.startswith("old-") and _is_run(each)
    )


def _no_run(path: Path) -> Exception:
    if not path.exists():
        beside = [each.name for each in _runs_in(path.parent)]
        near = get_close_matches(path.name, beside, _FEW, 0.5) or beside[:_FEW]
        hint = f"; runs in {path.parent}: {', '.join(near)}" if near else ""
        return FileNotFoundError(f"{path}: no such folder{hint}")
    if not path.is_dir():
        return ValueError(f"{path} is a file: name a folder ({_WHAT}), for instance {path.parent}")
    below = sorted({each.parent for name in (RECORD, METRICS) for each in path.glob(f"*/*/{name}")})
    near = below[:_FEW] or (([path.parent] if _is_run(path.parent) else _runs_in(path.parent))[:_FEW])
    hint = f". Runs near it: {', '.join(map(str, near))}" if near else ", and none is near it"
    return ValueError(f"{path} is no run: {_WHAT}{hint}")


def _refuse_twice(paths: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in paths:
        known = seen.setdefault(path.resolve(), path)
        if known is not path:
            raise Mistake(
                f"{path} is named twice{f', also as {known}' if str(known) != str(path) else ''}: name it once"
            )


def _refuse_copies(runs: Sequence[OneRun]) -> None:
    """The copy of a run would count as a second seed. A copy that went on with other settings is another run."""
    seen: dict[str, OneRun] = {}
    for run in runs:
        known = seen.setdefault(run.id, run)
        if known is not run and known.config == run.config and known.config is not None:
            raise Mistake(
                f"{known.path} and {run.path} are the same run ({RECORD} has the id {run.id}): name one of them"
            )


def _names(paths: Sequence[Path]) -> list[str]:
    """Returns the paths below the folder that all of them share."""
    whole = [path.resolve() for path in paths]
    if not whole:
        return []
    above = Path(os.path.commonpath([path.parent for path in whole]))
    return [str(path.relative_to(above)) for path in whole]
