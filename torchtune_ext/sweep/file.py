"""A sweep as its file says it, in W&B's format: which command, which parameters, which of their values."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, folder, print_first_lines
from torchtune_ext.run.errors import Mistake, nearest

KEYS = ("name", "description", "program", "command", "method", "metric", "parameters")
# What only W&B's server reads: who owns the sweep.
SERVER_KEYS = ("project", "entity")
MOST = 10_000  # points of a grid

EXAMPLE = "command: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a file says: a run for every combination of the values."""

    path: Path
    text: str  # the file as it is
    name: str
    command: Sequence[Any]
    metric: str  # what runs are compared by
    maximize: bool  # W&B minimizes where a file says nothing
    # The values of each parameter, which is a setting by its dotted name ("optimizer.lr").
    parameters: Mapping[str, Sequence[Any]]

    @property
    def points(self) -> list[Point]:
        """Every combination, in W&B's order: the last parameter changes first."""
        return [dict(zip(self.parameters, point, strict=True)) for point in product(*self.parameters.values())]

    @property
    def varied(self) -> list[str]:
        """The parameters that are not the same for all runs."""
        return [name for name, values in self.parameters.items() if len(values) > 1]


def sweep_files() -> dict[str, Path]:
    """Returns the files of our sweeps by their names ("sweeps/tiny_lr"), sorted by name."""
    return {name: path for name, path in config_files(folder("configs")).items() if name.startswith("sweeps/")}


def sweep_file(given: str) -> Path:
    """Returns the file of a sweep, which is given by its path, or by its name if it is ours.

    Raises:
        ValueError: there is no such file. The message gives the nearest name.
    """
    ours = {name: path for full, path in sweep_files().items() for name in (full, full.removeprefix("sweeps/"))}
    if Path(given).is_file():
        return Path(given)
    if given in ours:
        return ours[given]
    hint = _hint(given, ours, "`torchtune-ext sweeps` lists ours")
    raise Mistake(f"{given}: no such file, seen from {Path.cwd()}, and no sweep of ours; {hint}")


def read_sweep(path: Path) -> Sweep:
    """Reads a file.

    Raises:
        ValueError: it is no sweep, or none that runs here. The message names the file, the key and the fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _sweep(path, text, yaml.safe_load(text))
    except UnicodeDecodeError as error:
        raise Mistake(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise Mistake(f"{path}: no YAML: {' '.join(str(error).split())[:300]}") from None
    except ValueError as error:
        raise Mistake(f"{path}: {error}") from None


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Mistake(message)


def _hint(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    near = nearest(str(name), known)
    return f"did you mean {near}?" if near else otherwise or f"there are {', '.join(known)}"


def _sweep(path: Path, text: str, given: Any) -> Sweep:
    _require(
        isinstance(given, dict) and len(given) > 0,
        "no sweep: it holds no keys; begin with a copy of one of ours (`torchtune-ext sweeps`)",
    )
    for key in given:
        _require(key in (*KEYS, *SERVER_KEYS), f"unknown key {key!r}; {_hint(key, KEYS)} (`wandb sweep` may know more)")
    # Where a file names no command, W&B's own ends with words that no recipe reads.
    method, command, metric = given.get("method"), given.get("command", ["${args}"]), given.get("metric")
    _require(method == "grid", f"method: {method}: a grid runs here; random and bayes run under `wandb agent`")
    _require(isinstance(command, list) and len(command) > 0, f"command: must be a list of words: {EXAMPLE}")
    goal = metric.get("goal", "minimize") if isinstance(metric, dict) else None
    _require(
        goal in ("minimize", "maximize") and isinstance(metric.get("name"), str) and set(metric) <= {"name", "goal"},
        f"metric: {metric}: write metric: {{name: eval/accuracy_sampled, goal: maximize}}, or goal: minimize",
    )
    return Sweep(
        path=path,
        text=text,
        name=str(given.get("name", path.stem)),
        command=command,
        metric=metric["name"],
        maximize=goal == "maximize",
        parameters=parameters_of(given.get("parameters")),
    )


def parameters_of(node: Any) -> dict[str, list[Any]]:
    """Reads the node `parameters` of a sweep's file. Returns the values of each, sorted by name, the order in which W&B passes
    them on.

    Raises:
        ValueError: a parameter has no list of values, or there are more than MOST points. The message names it and the fix.
    """
    if not isinstance(node, dict) or not node:
        raise Mistake("parameters: needs at least one, for instance optimizer.lr: {values: [1.0e-3, 2.0e-3]}")
    parameters = {str(name): _values(str(name), node[name]) for name in sorted(node, key=str)}
    if math.prod(map(len, parameters.values())) > MOST:
        raise Mistake(f"parameters: the grid has more than {MOST:,} points; list fewer values")
    return parameters


def _values(name: str, given: Any) -> list[Any]:
    """Returns each value once. A run reads 1e-5 as a number, and YAML 1.1 as a text, because it has no dot."""
    node = given if isinstance(given, dict) else {}
    values = [node["value"]] if set(node) == {"value"} else node.get("values") if set(node) == {"values"} else None
    if not isinstance(values, list) or not values:
        raise Mistake(
            f"parameters: {name}: {given}: write {{value: 1}} or {{values: [1, 2]}}; what is drawn from a range runs under "
            "`wandb agent`"
        )
    numbers = [float(each) if isinstance(each, str) and _WITHOUT_DOT.fullmatch(each) else each for each in values]
    return [each for i, each in enumerate(numbers) if each not in numbers[:i]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `> my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists our sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    print_first_lines(sweep_files())
    return 0
