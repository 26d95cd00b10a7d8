"""What the head of the report says: which run it shows, of which model and task, on what, and how far it came.

All of it is read from the folder of the run. What is not known is left out.
"""

import fcntl
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtune_ext.run.folder import LOCK, changes, checkpoint_folders

_IDENTITY = re.compile(r"(\w+) of (\d+) layers, width \d+(, adapter .*)?, \d+ tensors of ([\d,]+) values")
_ORDINARY = ("model", "start")  # Folders of these names do not say which model lies in them.
_LONGEST = 60  # characters of a note

Fact = tuple[str, str, str]  # one thing to know about a run: what it is, its value, and a note or ""


@dataclass(frozen=True, slots=True)
class State:
    """This says how far a run came."""

    kind: str  # "finished", "running", "stopped", or "unknown" where nothing says how long it should be
    text: str
    step: int  # the last one that has metrics
    total: int | None  # the one that it goes to


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
    config, commit = node_of(run, "config"), node_of(node_of(run, "process"), "commit")
    checkpoint = next(reversed(checkpoint_folders(run_dir / "checkpoints")), None)
    preset = str(config["preset"] or "none") if "preset" in config else ""
    loss = _class_name(node_of(config, "loss"))
    prompts, samples, updates = (
        config.get(key) for key in ("prompts_per_step", "samples_per_prompt", "updates_per_step")
    )
    # Only the steps count: not the start of the engine, nor the time between a stop and a resume.
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    rows = [
        ("Model", *_model(config, checkpoint)),
        ("Task", *_task(node_of(config, "task"))),
        ("Preset", preset, f"loss {loss}" if loss not in ("", "PolicyLoss") else ""),
        ("Learning rate", *_learning_rate(config)),
        ("A step", f"{prompts} × {samples} samples" if prompts and samples else "", f"{updates} updates" if updates else ""),
        ("Device", *_devices(config, records, checkpoint)),
        ("Time in steps", spell(seconds) if seconds else "", f"started {_day(run['started'])}" if "started" in run else ""),
        ("Commit", str(commit.get("id", ""))[:10], "with changes" if commit.get("changed") else ""),
    ]  # fmt: skip
    return [row for row in rows if row[1]]


def origin(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what `run.json` says about how the run was started (versions, commit, command line), as rows of name and text."""
    # `process` holds what the last process of the run was started with.
    rest = {name: value for name, value in run.items() if name not in ("name", "config", "started", "process")}
    started = [("started", _day(run["started"]))] if "started" in run else []
    return flat({**rest, **node_of(run, "process")}) + started


def flat(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Makes rows of name and text of nested settings: {"optimizer": {"lr": 1e-6}} gives ("optimizer.lr", "1e-06"). What is not
    set has no row, and numbers have six digits."""
    return [(each.key, _text(each.now)) for each in changes({}, config)]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=repr)


def node_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a node of nested settings, or an empty one: a recipe of the user's own may hold something else there."""
    node = config.get(name)
    return node if isinstance(node, Mapping) else {}


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
        with open(run_dir / LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # There is no lock, or this file system has none.
    return False


def _model(config: Mapping[str, Any], checkpoint: Path | None) -> tuple[str, str]:
    """Returns the name of the model, and its size, as the newest checkpoint says (training/manifest.py), or its folder."""
    path = Path(config["model_dir"]) if isinstance(config.get("model_dir"), str) else None
    if path is None:
        name = "a new model" if "shape" in config else ""
    else:
        name = "/".join(path.parts[-2:]) if path.name in _ORDINARY else path.name
    note = ""
    try:
        if checkpoint is not None:
            identity = json.loads((checkpoint / "manifest.json").read_bytes())["content"]["identity"]["model"]
            family, layers, adapter, values = _IDENTITY.match(identity).groups()
            kind = "values in adapters" if adapter else "parameters"
            note = f"{family}, {layers} layers, {_large(int(values.replace(',', '')))} {kind}"
        elif path is not None:
            settings = json.loads((path / "config.json").read_bytes())
            note = f"{settings['model_type']}, {settings['num_hidden_layers']} layers"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # The checkpoint is damaged or just being pruned, or the folder of the model has moved.
    return name or ("unknown" if note else ""), note


def _task(task: Mapping[str, Any]) -> tuple[str, str]:
    words = []
    for key, value in task.items():
        if key == "path":
            words.append(Path(str(value)).name)
        elif key not in ("_component_", "seed") and type(value) in (str, int, float):
            words.append(f"{key} {value}")
    text = ", ".join(words)
    return _class_name(task), text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _class_name(node: Mapping[str, Any]) -> str:
    return str(node.get("_component_", "")).rpartition(".")[2]


def _learning_rate(config: Mapping[str, Any]) -> tuple[str, str]:
    rate, schedule = node_of(config, "optimizer").get("lr"), node_of(config, "schedule")
    warmup = f"{schedule['warmup']} updates of warm-up" if schedule.get("warmup") else ""
    text = f"{rate:g}" if isinstance(rate, int | float) else ""
    return text, ", ".join(filter(None, [str(schedule.get("decay", "")), warmup]))


def _devices(
    config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], checkpoint: Path | None
) -> tuple[str, str]:
    """Says on what the run trained. Each rank writes files of its own into a checkpoint, which tells how many there are."""
    if "device" not in config:
        return "", ""
    files = checkpoint.glob("state/__*_*.distcp") if checkpoint is not None else ()
    ranks = len({path.name.split("_")[2] for path in files})
    if config["device"] == "cpu" or not any("memory/gpu_gib" in record for record in records):
        return "CPU", f"{ranks} processes train" if ranks > 1 else ""
    engine = node_of(config, "engine").get("devices")
    apart = f"engine on device {engine}" if engine is not None else ""
    return "GPU" if not ranks else f"{ranks} GPU{'s' * (ranks > 1)}", apart


def spell(seconds: float) -> str:
    """Makes "42 s", "21 min" or "3 h 5 min" of a duration."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def _large(number: int) -> str:
    for size, word in ((1e9, "billion"), (1e5, "million")):
        if number >= size:
            return f"{number / max(size, 1e6):.3g} {word}"
    return f"{number:,}"


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
