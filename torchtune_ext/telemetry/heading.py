"""What the head of the report says: which run it shows, of which model and task, on what, and how far it came.

All of it is read from the folder of the run. What is not known is left out.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.folder import LOCK, checkpoint_folders

_IDENTITY = re.compile(r"(\w+) of (\d+) layers, width \d+(, adapter .*)?, \d+ tensors of ([\d,]+) values")
_ORDINARY = ("model", "start")  # Folders of these names do not say which model lies in them.
_LONGEST = 60  # characters of a note


@dataclass(frozen=True, slots=True)
class State:
    """This says how far a run came."""

    kind: str  # "finished", "running", "stopped", or "unknown" where nothing says how long it should be
    text: str
    step: int  # the last one that has metrics
    total: int | None  # the one that it goes to


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing to know about a run."""

    label: str
    value: str
    note: str = ""


def state_of(run_dir: Path, config: Mapping[str, Any], last: int) -> State:
    """Says whether the run is over. A run that crashed and one that was stopped look alike in their folder."""
    total = _total(config)
    if total is None:
        return State("unknown", f"{last:,} steps", last, None)
    if last >= total:
        return State("finished", f"finished, {last:,} steps", last, total)
    if _in_use(run_dir):
        return State("running", f"running, step {last:,} of {total:,}", last, total)
    return State("stopped", f"stopped at step {last:,} of {total:,}", last, total)


def facts(run_dir: Path, run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[Fact]:
    """Returns what a reader should know first, the most telling facts first.

    Args:
        run_dir: folder of the run; its newest checkpoint says which model is trained, and on how many ranks.
        run: what `run.json` holds.
        records: the metrics of each step.
    """
    config = _node(run, "config")
    candidates = [_model(run_dir, config), _task(config), _objective(config), _learning_rate(config), _batch(config)]
    candidates += [_devices(run_dir, config, records), _duration(run, records), _commit(run)]
    return [fact for fact in candidates if fact is not None]


def origin(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what `run.json` says about how the run was started (versions, commit, command line), as rows of name and text."""
    # `process` holds what the last process of the run was started with.
    rest = {name: value for name, value in run.items() if name not in ("name", "config", "started", "process")}
    rows = flat({**rest, **_node(run, "process")})
    if isinstance(started := run.get("started"), int | float):
        rows.append(("started", _day(started)))
    return rows


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Makes rows of name and text of nested settings: {"optimizer": {"lr": 1e-6}} gives ("optimizer.lr", "1e-06")."""
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return rows


def _newest_checkpoint(run_dir: Path) -> Path | None:
    return next(reversed(checkpoint_folders(run_dir / "checkpoints")), None)


def _total(config: Mapping[str, Any]) -> int | None:
    """Returns the step that the run goes to: of a warm-up, its updates (recipes/warmup_sft.py)."""
    try:
        if "max_steps" in config:
            return int(config["max_steps"])
        return max(1, round(config["num_problems"] * config["epochs"] / config["batch_problems"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _in_use(run_dir: Path) -> bool:
    """Tells whether a process owns the folder. It asks for a shared lock and gives it back at once, so it disturbs no run."""
    try:
        lock = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # This file system has no locks.
    finally:
        os.close(lock)
    return False


def _model(run_dir: Path, config: Mapping[str, Any]) -> Fact | None:
    folder = config.get("model_dir")
    path = Path(folder) if isinstance(folder, str) else None
    if path is None:
        name = "a new model" if "shape" in config else ""
    else:
        name = "/".join(path.parts[-2:]) if path.name in _ORDINARY else path.name
    note = _size(_newest_checkpoint(run_dir)) or _architecture(path)
    return Fact("Model", name or "unknown", note) if name or note else None


def _size(checkpoint: Path | None) -> str:
    """Says how large the model of a checkpoint is, from the identity in its manifest (training/manifest.py)."""
    if checkpoint is None:
        return ""
    try:
        identity = json.loads((checkpoint / "manifest.json").read_bytes())["content"]["identity"]["model"]
        family, layers, adapter, values = _IDENTITY.match(identity).groups()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    kind = "values in adapters" if adapter else "parameters"
    return f"{family}, {layers} layers, {_large(int(values.replace(',', '')))} {kind}"


def _architecture(folder: Path | None) -> str:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return f"{config['model_type']}, {config['num_hidden_layers']} layers"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _task(config: Mapping[str, Any]) -> Fact | None:
    task = dict(_node(config, "task"))
    name = str(task.pop("_component_", "")).rpartition(".")[2]
    if not name:
        return None
    words = []
    for key, value in task.items():
        if key == "path" and isinstance(value, str):
            words.append(Path(value).name)
        elif key != "seed" and isinstance(value, str | int | float) and not isinstance(value, bool):
            words.append(f"{key} {value}")
    return Fact("Task", name, _cut(", ".join(words)))


def _objective(config: Mapping[str, Any]) -> Fact | None:
    if "preset" not in config:
        return None
    loss = str(_node(config, "loss").get("_component_", "")).rpartition(".")[2]
    own = "" if loss in ("", "PolicyLoss") else f"loss {loss}"
    return Fact("Preset", str(config["preset"] or "none"), own)


def _learning_rate(config: Mapping[str, Any]) -> Fact | None:
    rate, schedule = _node(config, "optimizer").get("lr"), _node(config, "schedule")
    if not isinstance(rate, int | float):
        return None
    warmup = f"{schedule['warmup']} updates of warm-up" if schedule.get("warmup") else ""
    return Fact("Learning rate", f"{rate:g}", ", ".join(filter(None, [str(schedule.get("decay", "")), warmup])))


def _batch(config: Mapping[str, Any]) -> Fact | None:
    prompts, samples = config.get("prompts_per_step"), config.get("samples_per_prompt")
    if not (isinstance(prompts, int) and isinstance(samples, int)):
        return None
    updates = config.get("updates_per_step")
    return Fact("A step", f"{prompts} × {samples} samples", f"{updates} updates" if isinstance(updates, int) else "")


def _devices(run_dir: Path, config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Fact | None:
    """Says on what the run trained. Each rank writes files of its own into a checkpoint, which tells how many there are."""
    if "device" not in config:
        return None
    on_gpu = config["device"] != "cpu" and any("memory/gpu_gib" in record for record in records)
    checkpoint = _newest_checkpoint(run_dir)
    files = checkpoint.glob("state/__*_*.distcp") if checkpoint is not None else ()
    ranks = len({path.name.split("_")[2] for path in files})
    engine = _node(config, "engine").get("devices")
    apart = f"engine on device {engine}" if on_gpu and engine is not None else ""
    if not on_gpu:
        return Fact("Device", "CPU", f"{ranks} processes train" if ranks > 1 else "")
    return Fact("Device", "GPU" if not ranks else f"{ranks} GPU{'s' * (ranks > 1)}", apart)


def _duration(run: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Fact | None:
    """Only the steps count: not the start of the engine, nor the time between a stop and a resume."""
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    started = run.get("started")
    since = f"started {_day(started)}" if isinstance(started, int | float) else ""
    return Fact("Time in steps", spell(seconds), since) if seconds else None


def _commit(run: Mapping[str, Any]) -> Fact | None:
    commit = _node(_node(run, "process"), "commit")
    if not isinstance(commit.get("id"), str):
        return None
    return Fact("Commit", commit["id"][:10], "with changes" if commit.get("changed") else "")


def spell(seconds: float) -> str:
    """Makes "42 s", "21 min" or "3 h 5 min" of a duration."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _large(number: int) -> str:
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e5, "million")):
        if number >= size:
            return f"{number / max(size, 1e6):.3g} {word}"
    return f"{number:,}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _node(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    node = config.get(name)
    return node if isinstance(node, Mapping) else {}


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
