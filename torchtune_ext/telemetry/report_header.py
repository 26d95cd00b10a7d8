"""The head of the report: which run it shows, of which model and task, and how far it came."""

import fcntl
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.folder import LOCK_FILE, diff_settings

_GENERIC_FOLDERS = ("model", "start")  # names of folders that do not say which model is in them
_MAX_NOTE_CHARS = 60  # characters of a note

Fact = tuple[str, str, str]  # one thing to know about a run: what it is, its value, and a note or ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How far a run came."""

    kind: str  # "finished", "running", "stopped", or "unknown" where nothing says how long it should be
    text: str
    step: int  # the last one that has metrics
    total: int | None  # the one that it goes to


def run_status(run_dir: Path, config: Mapping[str, Any], last: int) -> RunStatus:
    """Returns how far the run in `run_dir` came. `last` is the newest step that has metrics."""
    total = _total_steps(config)
    if total is None:
        return RunStatus("unknown", f"{last:,} steps", last, None)
    if last >= total:
        return RunStatus("finished", f"finished, {last:,} steps", last, total)
    if _is_running(run_dir):
        return RunStatus("running", f"running, step {last:,} of {total:,}", last, total)
    # The folder does not tell a run that crashed from one that was stopped.
    return RunStatus("stopped", f"stopped at step {last:,} of {total:,}", last, total)


def run_facts(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """Returns what a reader should know of a run (its `run.json`), the most telling facts first."""
    config, commit = config_section(run, "config"), config_section(config_section(run, "process"), "commit")
    preset = str(config["preset"] or "none") if "preset" in config else ""
    loss = _class_name(config_section(config, "loss"))
    rate, decay = (
        config_section(config, "optimizer").get("lr"),
        str(config_section(config, "schedule").get("decay", "")),
    )
    prompts, samples, updates = (
        config.get(key) for key in ("prompts_per_step", "samples_per_prompt", "updates_per_step")
    )
    # `device` may be "auto". Only a run on a GPU logs the memory of one.
    on_gpu = config.get("device") != "cpu" and any("memory/gpu_gib" in record for record in records)
    # Only the steps count: not the start of the engine, nor the time between a stop and a resume.
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    rows = [
        ("Model", _model_name(config), ""),
        ("Task", *_task_text(config_section(config, "task"))),
        ("Preset", preset, f"loss {loss}" if loss not in ("", "PolicyLoss") else ""),
        ("Learning rate", f"{rate:g}" if isinstance(rate, int | float) else "", decay),
        ("A step", f"{prompts} × {samples} samples" if prompts and samples else "", _updates_text(updates)),
        ("Device", "" if "device" not in config else "GPU" if on_gpu else "CPU", ""),
        ("Time in steps", format_duration(seconds) if seconds else "", f"started {_format_time(run['started'])}" if "started" in run else ""),
        ("Commit", str(commit.get("id", ""))[:10], "with changes" if commit.get("changed") else ""),
    ]  # fmt: skip
    # What is not known is left out.
    return [row for row in rows if row[1]]


def run_origin(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns how the run was started (versions, commit, command line) as rows of name and text."""
    # A run that was resumed had several processes; `process` is the last one.
    rest = {name: value for name, value in run.items() if name not in ("name", "config", "started", "process")}
    started = [("started", _format_time(run["started"]))] if "started" in run else []
    return flatten_config({**rest, **config_section(run, "process")}) + started


def flatten_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Makes rows of nested settings: {"optimizer": {"lr": 1e-6}} gives ("optimizer.lr", "1e-06"). None has no row."""
    return [(each.key, _text(each.new)) for each in diff_settings({}, config)]


def _updates_text(updates: Any) -> str:
    return "" if not updates else "1 update" if updates == 1 else f"{updates} updates"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def config_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a node of nested settings, or an empty one."""
    # A recipe of the user's own may have anything under this name.
    node = config.get(name)
    return node if isinstance(node, Mapping) else {}


def _total_steps(config: Mapping[str, Any]) -> int | None:
    try:
        if "max_steps" in config:
            return int(config["max_steps"])
        # A warm-up counts its updates the same way (recipes/warmup_sft.py).
        return max(1, round(config["num_problems"] * config["epochs"] / config["batch_problems"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _is_running(run_dir: Path) -> bool:
    # The owner holds an exclusive lock. The shared one that is asked for here ends with the file, at once.
    try:
        with open(run_dir / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # There is no lock, or this file system has none.
    return False


def _model_name(config: Mapping[str, Any]) -> str:
    # A warm-up makes a model of a `shape`.
    if not isinstance(config.get("model_dir"), str):
        return "a new model" if "shape" in config else ""
    path = Path(config["model_dir"])
    return "/".join(path.parts[-2:]) if path.name in _GENERIC_FOLDERS else path.name


def _task_text(task: Mapping[str, Any]) -> tuple[str, str]:
    words = []
    for key, value in task.items():
        if key == "path":
            words.append(Path(str(value)).name)
        elif key not in ("_component_", "seed") and type(value) in (str, int, float):
            words.append(f"{key} {value}")
    text = ", ".join(words)
    return _class_name(task), text if len(text) <= _MAX_NOTE_CHARS else f"{text[: _MAX_NOTE_CHARS - 1]}…"


def _class_name(node: Mapping[str, Any]) -> str:
    return str(node.get("_component_", "")).rpartition(".")[2]


def format_duration(seconds: float) -> str:
    """A duration as "42 s", "21 min" or "3 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
