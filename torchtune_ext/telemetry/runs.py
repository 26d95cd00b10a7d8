"""The runs of a comparison: found in the folders that the user names, and labeled by the settings that differ."""

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
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.telemetry.report_header import RunStatus, flatten_config, run_status

log = logging.getLogger(__name__)

METRICS_FILE, SWEEP_FILE = "metrics.jsonl", "sweep.json"
SWEEP_FORMAT = 1
MAX_SUGGESTIONS = 5  # runs that a message about a wrong path names
# Settings that do not make two runs different: where a run is written, how it was started, where its metrics go.
IGNORED_KEYS = ("output_dir", "name", "id", "resume_from_checkpoint", "logging", "profile", "dry_run")
MAX_LABEL_KEYS = 3  # keys of a label; where more differ, runs are named by their folders
MAX_LABEL_CHARS = 60  # characters of a label


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run of the comparison."""

    path: Path
    name: str  # its path below the folder that all runs share
    config: Mapping[str, Any] | None  # None: no run.json, or a damaged one
    records: Sequence[Mapping[str, Any]]  # the metrics of each step
    state: RunStatus


def find_runs(paths: Sequence[str | Path]) -> tuple[list[ComparedRun], list[dict[str, Any]], list[str]]:
    """Reads the runs in `paths`: folders of runs, of sweeps, and folders that hold folders of runs.

    Returns:
        The runs, what `read_sweep_record` returns of each sweep, and a sentence for each run that cannot be shown.

    Raises:
        ValueError: a path is no run, a `sweep.json` is damaged, or no run has anything to show.
    """
    sweeps, left_out = [], []
    folders: dict[Path, None] = {}  # each once, in order
    for path in map(Path, paths):
        if (path / SWEEP_FILE).exists():
            sweeps.append(sweep := read_sweep_record(path))
            # The metrics that a run had before it failed do not tell how good its settings are.
            left_out += [f"{run['id']} failed: {run['cause']}." for run in sweep["runs"] if run["state"] == "failed"]
            run_folders = [run["path"] for run in sweep["runs"] if run["state"] != "failed" and run["path"].exists()]
        elif not (run_folders := [path] if _is_run(path) else _run_folders(path)):
            nearby_runs = ", ".join(folder.name for folder in _run_folders(path.parent)[:MAX_SUGGESTIONS]) or "none"
            raise UsageError(f"{path} is no folder of a run or of a sweep; runs in {path.parent}: {nearby_runs}")
        # Resolved, a run that two paths lead to is one.
        folders |= dict.fromkeys(folder.resolve() for folder in run_folders)
    runs: list[ComparedRun] = []
    common_parent = os.path.commonpath([folder.parent for folder in folders]) if folders else ""
    for folder in folders:
        name = os.path.relpath(folder, common_parent)
        try:
            runs.append(_read_run(folder, name))
        except (OSError, ValueError) as error:
            # One damaged run does not cost the page of the others.
            left_out.append(f"{name} is left out: {error}.")
    if not runs:
        raise UsageError(f"{', '.join(map(str, paths))}: nothing to show yet. {' '.join(left_out)}".strip())
    return runs, sweeps, left_out


def holds_several_runs(path: str | Path) -> bool:
    """Tells whether `path` is the folder of a sweep, or no run itself but the folder of two or more."""
    path = Path(path)
    return (path / SWEEP_FILE).exists() or (not _is_run(path) and len(_run_folders(path)) > 1)


def read_sweep_record(folder: Path) -> dict[str, Any]:
    """Returns what `folder/sweep.json` holds, with a name, and with the `path` of each of its `runs`.

    Raises:
        ValueError: it is damaged, or of another format.
    """
    path = folder / SWEEP_FILE
    try:
        sweep = json.loads(path.read_bytes())
        form = sweep["format"]
        if form != SWEEP_FORMAT:
            raise KeyError(f"format {form}, not {SWEEP_FORMAT}")
        sweep["name"] = sweep["name"] or folder.resolve().name
        # Values are only looked up here, so that a missing key is reported before the page is half made.
        _ = sweep["metric"]["name"]
        for run in sweep["runs"]:
            _ = run["state"], run["cause"], dict(run["parameters"])
            run["path"] = (folder / run["id"]).resolve()
            # An id such as "../x" would make the report read files that are none of the sweep's.
            if not run["path"].is_relative_to(folder.resolve()):
                raise KeyError(f"the run {run['id']} lies outside of the sweep's folder")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is damaged ({error!r}): for a report name the folders of its runs instead; a sweep begins again in "
            "another folder (--out)"
        ) from error
    return sweep


def label_runs(runs: Sequence[ComparedRun]) -> tuple[list[str], list[list[str]], list[str]]:
    """Returns the keys whose values differ, these values of each run, and a label of each: "lr 1e-06, seed 1"."""
    configs = [None if run.config is None else _comparable_settings(run.config) for run in runs]
    known = [config for config in configs if config is not None]
    every = dict.fromkeys(key for config in known for key in config)
    keys = [key for key in every if len({config.get(key, DEFAULT) for config in known}) > 1]
    # A run whose settings are not known has no values, and its label is its name.
    values = [[] if config is None else [config.get(key, DEFAULT) for key in keys] for config in configs]
    labels = [", ".join(map(" ".join, zip(shorten_keys(keys), row, strict=False))) for row in values]
    # Too many keys, or a text too long, make no label: the name of the folder says more.
    labeled = 0 < len(keys) <= MAX_LABEL_KEYS
    return (
        keys,
        values,
        [
            label if labeled and 0 < len(label) <= MAX_LABEL_CHARS else run.name
            for label, run in zip(labels, runs, strict=True)
        ],
    )


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key, "lr" of "optimizer.lr", or all of it where two have the same last part."""
    ends = [key.rpartition(".")[2] for key in keys]
    # Counted twice more, `_component_` is never short: without its node it would not say which class it names.
    counts = Counter([*ends, "_component_", "_component_"])
    return [end if counts[end] == 1 else key for key, end in zip(keys, ends, strict=True)]


def _comparable_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings as text by dotted key, without those of `BESIDE`."""
    rows = dict(flatten_config({key: value for key, value in config.items() if key not in IGNORED_KEYS}))
    # A path in the run's own folder would differ between all runs, so the folder gets one name.
    if home := str(config.get("output_dir", "")).rstrip("/"):
        for key, text in rows.items():
            if text.startswith(f"{home}/"):
                rows[key] = "{output_dir}" + text.removeprefix(home)
    return rows


def read_run_record(folder: Path) -> dict[str, Any]:
    """Returns what `run.json` in `folder` holds; {} where it is missing or damaged."""
    try:
        return read_record(folder) or {}
    except ValueError as error:
        log.warning("left out of the report: %s", error)
        return {}


def _read_run(path: Path, name: str) -> ComparedRun:
    record = read_run_record(path)
    config = record["config"] if isinstance(record.get("config"), Mapping) else None
    try:
        # Metrics that were not finite are null in the file.
        records = [
            {name: value for name, value in record.items() if value is not None}
            for record in read_metrics(path / METRICS_FILE)
        ]
    except FileNotFoundError:
        records = []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{METRICS_FILE} is damaged ({error})") from error
    if not records:
        raise UsageError("no metrics yet; a run writes its first line at the end of a step")
    return ComparedRun(path, name, config, records, run_status(path, config or {}, records[-1]["step"]))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in (RECORD_FILE, METRICS_FILE))


def _run_folders(path: Path) -> list[Path]:
    # `RunFolder` sets an earlier run aside as old-1, old-2, ...
    folders = sorted(path.iterdir()) if path.is_dir() else []
    return [folder for folder in folders if not folder.name.startswith("old-") and _is_run(folder)]
