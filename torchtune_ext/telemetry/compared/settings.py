"""Which settings of several runs differ, and which runs are seeds of one setting."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtune_ext.run.folder import DEFAULT, changes
from torchtune_ext.telemetry.compared.runs import OneRun

SEED = "seed"
# They say where a run lies, how it was started and who else is told of it: two runs that differ in these alone are one setting.
BESIDE = ("output_dir", "name", "id", "resume_from_checkpoint", "logging", "profile", "dry_run")
_HERE = "{output_dir}"  # stands for the folder of the run in paths below it
_NAMED = 3  # A label says so many settings; where more differ, runs are told apart by their names.
_LONGEST = 28  # characters of a value in a label


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs that differ in their seed alone."""

    letter: str  # "A", "B", ... on the page
    label: str  # what makes it another one: "lr 1e-06"
    values: Mapping[str, Any]  # the settings that differ between the runs of the page
    runs: Sequence[int]  # its runs, by their place on the page
    seeds: Sequence[str]  # the seed of each of them; two runs of one seed are no two seeds

    @property
    def num_seeds(self) -> int:
        return len(set(self.seeds))


def settings_of(runs: Sequence[OneRun]) -> tuple[list[str], list[Setting]]:
    """Groups runs into settings.

    Returns:
        The keys whose values differ between the runs, without the seed, and the settings in the order of their first run.
        A run whose settings nobody wrote down is a setting of its own.
    """
    configs = [None if run.config is None else _own(run.config) for run in runs]
    known = [config for config in configs if config is not None]
    keys = list(dict.fromkeys(change.key for config in known[1:] for change in changes(known[0], config)))
    flat = [
        None if config is None else {change.key: change.now for change in changes({}, config)} for config in configs
    ]
    members: dict[Any, list[int]] = {}
    for number, config in enumerate(flat):
        same = (number,) if config is None else json.dumps([config.get(key, DEFAULT) for key in keys], default=repr)
        members.setdefault(same, []).append(number)
    settings = []
    for place, inside in enumerate(members.values()):
        config = flat[inside[0]]
        values = {} if config is None else {key: config.get(key, DEFAULT) for key in keys}
        seeds = [json.dumps((runs[number].config or {}).get(SEED), default=repr) for number in inside]
        settings.append(Setting(_letter(place), "", values, inside, seeds))
    labels = _labels(keys, settings, runs)
    return keys, [replace(each, label=label) for each, label in zip(settings, labels, strict=True)]


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns the end of each dotted key that tells it from the others: "optimizer.lr" is "lr" where no other ends so."""
    found = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-number:]) for number in range(1, len(parts) + 1))
        found[key] = next(
            (end for end in ends if end != "_component_"
             and not any(other != key and f".{other}".endswith(f".{end}") for other in keys)), key)  # fmt: skip
    return found


def shown(value: Any, longest: int = _LONGEST) -> str:
    """Makes text of the value of a setting, whose middle is left out where it is long."""
    if isinstance(value, float):
        text = f"{value:g}"
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=repr)
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without what lies beside them; paths below the run's own folder no longer name it."""
    home = config.get("output_dir")
    kept = {key: value for key, value in config.items() if key not in (*BESIDE, SEED)}
    return _without(kept, home.rstrip("/")) if isinstance(home, str) and home.strip("/") else kept


def _without(value: Any, home: str) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(each, home) for key, each in value.items()}
    if isinstance(value, list):
        return [_without(each, home) for each in value]
    # Strictly below: a folder may have the name of a value, as "bf16".
    if isinstance(value, str) and value.startswith(f"{home}/"):
        return f"{_HERE}/{value.removeprefix(f'{home}/')}"
    return value


def _labels(keys: Sequence[str], settings: Sequence[Setting], runs: Sequence[OneRun]) -> list[str]:
    ends = short_keys(keys)
    if 0 < len(keys) <= _NAMED:
        told = [", ".join(f"{ends[key]} {shown(value)}" for key, value in each.values.items()) for each in settings]
    else:
        told = ["" for _ in settings]
    named = [", ".join(runs[number].name for number in each.runs) for each in settings]
    return [label or shown(name, 2 * _LONGEST) for label, name in zip(told, named, strict=True)]


def _letter(place: int) -> str:
    """Makes A, B, ..., Z, AA, AB, ... of 0, 1, ..."""
    letters = ""
    place += 1
    while place:
        place, rest = divmod(place - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
