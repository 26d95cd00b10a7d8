"""The header of the report: run, model, task and progress."""

import fcntl
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.folder import LOCK_FILE, diff_settings

_GENERIC_FOLDERS = ("model", "start")  # folder names that do not identify the model
_MAX_NOTE_CHARS = 60

Fact = tuple[str, str, str]  # label, value, and a note or ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The progress of a run."""

    kind: str  # "finished", "running", "stopped", or "unknown" without a configured length
    text: str
    step: int  # the last step with metrics
    total: int | None  # the configured last step; None: unknown


def run_status(run_dir: Path, config: Mapping[str, Any], last: int) -> RunStatus:
    """Returns the progress of the run in `run_dir`; `last` is its newest step with metrics."""
    total = _total_steps(config)
    if total is None:
        return RunStatus("unknown", f"{last:,} steps", last, None)
    if last >= total:
        return RunStatus("finished", f"finished, {last:,} steps", last, total)
    if _is_running(run_dir):
        return RunStatus("running", f"running, step {last:,} of {total:,}", last, total)
    # The folder does not show whether a run crashed or was stopped.
    return RunStatus("stopped", f"stopped at step {last:,} of {total:,}", last, total)


def run_facts(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """Returns the facts about a run, most important first.

    Args:
        run: the content of `run.json`.
        records: the metrics of each step.
    """
    config, commit = config_section(run, "config"), config_section(config_section(run, "process"), "commit")
    preset = str(config["preset"] or "none") if "preset" in config else ""
    loss = _class_name(config_section(config, "loss"))
    rate, schedule = config_section(config, "optimizer").get("lr"), config_section(config, "schedule")
    prompts, samples, updates = map(config.get, ("prompts_per_step", "samples_per_prompt", "updates_per_step"))
    # `device` may be "auto". Only a run on a GPU logs GPU memory.
    on_gpu = config.get("device") != "cpu" and any("memory/gpu_gib" in record for record in records)
    # The sum excludes the start of the engine, and the time between a stop and a resume.
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    rows = [
        ("Model", _model_name(config), ""),
        ("Task", *_task_text(config_section(config, "task"))),
        ("Preset", preset, f"loss {loss}" if loss not in ("", "PolicyLoss") else ""),
        ("Learning rate", f"{rate:g}" if isinstance(rate, int | float) else "", str(schedule.get("decay", ""))),
        ("A step", f"{prompts} × {samples} samples" if prompts and samples else "",
         _updates_text(updates and updates * config.get("iterations_per_step", 1))),
        ("Device", "" if "device" not in config else "GPU" if on_gpu else "CPU", ""),
        ("Time in steps", format_duration(seconds) if seconds else "",
         f"started {_format_time(run['started'])}" if "started" in run else ""),
        ("Commit", str(commit.get("id", ""))[:10], "with changes" if commit.get("changed") else ""),
    ]  # fmt: skip
    # Unknown facts are left out.
    return [row for row in rows if row[1]]


def run_origin(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns versions, commit and command line of the run as rows of (name, text)."""
    # A resumed run had several processes; `process` is the last process.
    rest = {name: value for name, value in run.items() if name not in ("name", "config", "started", "process")}
    started = [("started", _format_time(run["started"]))] if "started" in run else []
    return flatten_config({**rest, **config_section(run, "process")}) + started


def flatten_config(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Flattens settings: {"optimizer": {"lr": 1e-6}} gives ("optimizer.lr", "1e-06"); omits None."""
    return [(each.key, _text(each.new)) for each in diff_settings({}, config)]


def _updates_text(updates: Any) -> str:
    return "" if not updates else "1 update" if updates == 1 else f"{updates} updates"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def config_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a section of nested settings, or an empty mapping."""
    # A user's own recipe may have any type under this name.
    node = config.get(name)
    return node if isinstance(node, Mapping) else {}


def _total_steps(config: Mapping[str, Any]) -> int | None:
    try:
        if "max_steps" in config:
            return int(config["max_steps"])
        # The SFT warm-up counts its updates the same way (recipes/warmup_sft.py).
        return max(1, round(config["num_problems"] * config["epochs"] / config["batch_problems"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _is_running(run_dir: Path) -> bool:
    # A running process holds an exclusive lock. Closing the file releases the lock of this check.
    try:
        with open(run_dir / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # The lock file is missing, or the file system does not support locks.
    return False


def _model_name(config: Mapping[str, Any]) -> str:
    # An SFT warm-up may create a model from a `shape`.
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
    """Formats a duration as "42 s", "21 min" or "3 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
