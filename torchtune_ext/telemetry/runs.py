"""Finds the runs of a comparison, and labels them by the settings that differ."""

import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.run.folder import DEFAULT, RECORD_FILE, read_record
from torchtune_ext.telemetry.metrics import current_metric, read_metrics
from torchtune_ext.telemetry.report_header import RunStatus, flatten_config, run_status

log = logging.getLogger(__name__)

METRICS_FILE, SWEEP_FILE = "metrics.jsonl", "sweep.json"
SWEEP_FORMAT = 1
MAX_SUGGESTIONS = 5  # of runs, in a message about a wrong path
# Keys that a comparison ignores, because they do not change the training.
IGNORED_KEYS = ("output_dir", "name", "id", "resume_from_checkpoint", "logging", "profile", "dry_run")
MAX_LABEL_KEYS = 3  # if more keys differ, the label of a run is its folder
MAX_LABEL_CHARS = 60


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run of the comparison."""

    path: Path
    name: str  # path relative to the common parent of all runs
    config: Mapping[str, Any] | None  # None: run.json is missing or damaged
    records: Sequence[Mapping[str, Any]]  # the metrics of each step
    state: RunStatus


def find_runs(paths: Sequence[str | Path]) -> tuple[list[ComparedRun], list[dict[str, Any]], list[str]]:
    """Reads the runs in `paths`: folders of runs, of sweeps, and folders that hold folders of runs.

    Returns:
        The runs, the record of each sweep (`read_sweep_record`), and one sentence per run that is
        left out.

    Raises:
        UsageError: a path is not a run, a `sweep.json` is damaged, or no run has metrics.
    """
    sweeps, skipped_runs = [], []
    folders: dict[Path, None] = {}  # each once, in order
    for path in map(Path, paths):
        if (path / SWEEP_FILE).exists():
            sweeps.append(sweep := read_sweep_record(path))
            # The metrics of a failed run say nothing about the quality of its settings.
            failed = [run for run in sweep["runs"] if run["state"] == "failed"]
            skipped_runs += [f"{run['id']} failed: {run['cause']}." for run in failed]
            run_folders = [run["path"] for run in sweep["runs"] if run["state"] != "failed" and run["path"].exists()]
        elif not (run_folders := [path] if _is_run(path) else _run_folders(path)):
            nearby_runs = ", ".join(folder.name for folder in _run_folders(path.parent)[:MAX_SUGGESTIONS]) or "none"
            raise UsageError(f"{path}: not the folder of a run or a sweep; runs in {path.parent}: {nearby_runs}")
        # Resolved paths count a run once, even if two arguments lead to it.
        folders |= dict.fromkeys(folder.resolve() for folder in run_folders)
    runs: list[ComparedRun] = []
    common_parent = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    for folder in folders:
        name = os.path.relpath(folder, common_parent)
        try:
            runs.append(_read_run(folder, name))
        except (OSError, ValueError) as error:
            # A damaged run must not prevent the page of the others.
            skipped_runs.append(f"{name} is skipped: {error}.")
    if not runs:
        raise UsageError(
            f"{', '.join(map(str, paths))}: no metrics found; expected run folders with metrics.jsonl. "
            f"{' '.join(skipped_runs) or 'Fix: train at least one step first'}"
        )
    return runs, sweeps, skipped_runs


def holds_several_runs(path: str | Path) -> bool:
    """Returns whether `path` is a sweep's folder, or a folder of two or more runs but not a run."""
    path = Path(path)
    return (path / SWEEP_FILE).exists() or (not _is_run(path) and len(_run_folders(path)) > 1)


def read_sweep_record(folder: Path) -> dict[str, Any]:
    """Reads `folder/sweep.json`, and adds a missing name, and the `path` of each of its `runs`.

    Raises:
        UsageError: the file is damaged, or has another format.
    """
    path = folder / SWEEP_FILE
    try:
        sweep = json.loads(path.read_bytes())
        form = sweep["format"]
        if form != SWEEP_FORMAT:
            raise KeyError(f"format {form}, expected {SWEEP_FORMAT}")
        sweep["name"] = sweep["name"] or folder.resolve().name
        # These lookups report a missing key before the page is built.
        sweep["metric"]["name"] = current_metric(sweep["metric"]["name"])
        for run in sweep["runs"]:
            _ = run["state"], run["cause"], dict(run["parameters"])
            run["path"] = (folder / run["id"]).resolve()
            # An id such as "../x" would make the report read files outside of the sweep.
            if not run["path"].is_relative_to(folder.resolve()):
                raise KeyError(f"run {run['id']} is outside of the sweep's folder")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: damaged ({error!r}). Fix: for a report, name the folders of the sweep's runs; to repeat the sweep, use "
            "another folder (--out)"
        ) from error
    return sweep


def label_runs(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the keys that differ, their values per run, and a label per run ("lr 1e-06")."""
    configs = [None if run.config is None else _comparable_settings(run.config) for run in runs]
    known = [config for config in configs if config is not None]
    every = dict.fromkeys(key for config in known for key in config)
    keys = [key for key in every if len({config.get(key, DEFAULT) for config in known}) > 1]
    # A run without settings has no values, and its label is its name.
    values = [[] if config is None else [config.get(key, DEFAULT) for key in keys] for config in configs]
    labels = [", ".join(map(" ".join, zip(shorten_keys(keys), row, strict=False))) for row in values]
    # With too many keys, or a label too long, the name of the folder is clearer.
    for place, (label, run) in enumerate(zip(labels, runs, strict=True)):
        if len(keys) > MAX_LABEL_KEYS or not 0 < len(label) <= MAX_LABEL_CHARS:
            labels[place] = run.name
    return keys, values, labels


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """Shortens dotted keys to their last part ("lr" of "optimizer.lr") if that is unique."""
    ends = [key.rpartition(".")[2] for key in keys]
    # The two extra counts keep `_component_` long: without its section it would be ambiguous.
    counts = Counter([*ends, "_component_", "_component_"])
    return [end if counts[end] == 1 else key for key, end in zip(keys, ends, strict=True)]


def _comparable_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings as text by dotted key, without IGNORED_KEYS."""
    rows = dict(flatten_config({key: value for key, value in config.items() if key not in IGNORED_KEYS}))
    # A path in the run's own folder would differ between all runs.
    if home := str(config.get("output_dir", "")).rstrip("/"):
        for key, text in rows.items():
            if text.startswith(f"{home}/"):
                rows[key] = "{output_dir}" + text.removeprefix(home)
    return rows


def read_run_record(folder: Path) -> dict[str, Any]:
    """Returns the content of `run.json` in `folder`, or {} if it is missing or damaged."""
    try:
        return read_record(folder) or {}
    except ValueError as error:
        log.warning("report: skipping an unreadable run.json: %s", error)
        return {}


def _read_run(path: Path, name: str) -> ComparedRun:
    record = read_run_record(path)
    config = record["config"] if isinstance(record.get("config"), Mapping) else None
    try:
        lines = read_metrics(path / METRICS_FILE)
        # Nonfinite metrics are null in the file.
        records = [{name: value for name, value in line.items() if value is not None} for line in lines]
    except FileNotFoundError:
        records = []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{METRICS_FILE} is damaged ({error})") from error
    if not records:
        raise UsageError("no metrics yet; a run writes its first metrics at the end of a step")
    return ComparedRun(path, name, config, records, run_status(path, config or {}, records[-1]["step"]))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RECORD_FILE, METRICS_FILE))


def _run_folders(path: Path) -> list[Path]:
    # `RunFolder` moves an earlier run to old-1, old-2, ...
    folders = sorted(path.iterdir()) if path.is_dir() else []
    return [folder for folder in folders if not folder.name.startswith("old-") and _is_run(folder)]
