"""A sweep as its file says it, in W&B's format: which command, which parameters, how many runs, which of them stop early."""

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, package_folder, print_first_lines
from torchtune_ext.run.errors import UsageError, closest_match

METHODS = ("grid", "random", "bayes")
SWEEP_KEYS = (
    "name",
    "description",
    "program",
    "command",
    "method",
    "metric",
    "parameters",
    "run_cap",
    "early_terminate",
)
# Only W&B's server reads these: they say who owns the sweep.
SERVER_KEYS = ("project", "entity")
MAX_GRID_POINTS = 10_000  # points of a grid

COMMAND_EXAMPLE = "command: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
PARAMETER_HINT = (
    "write {value: 1}, {values: [1, 2]}, or {min: 0.001, max: 0.1} with numbers of which the first is the smaller one, with "
    "distribution: log_uniform_values where their magnitude is not known; what else W&B draws from only its own server knows"
)
_FLOAT_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a sweep: some values, or any number between two limits."""

    name: str  # the dotted name of the setting: "optimizer.lr"
    values: Sequence[Any] = ()  # each once; () of a number
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # whether the logarithm of the number is uniform


@dataclass(frozen=True, slots=True)
class Halving:
    """When runs are compared, and how many of them go on (`early_terminate: {type: hyperband}`)."""

    min_iter: (
        int  # how often a run has logged the metric when it is compared first; then `eta` times as often, and so on
    )
    eta: int  # of those that are compared, 1/eta go on


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a file says."""

    path: Path
    text: str  # the file as it is
    name: str
    command: Sequence[Any]
    method: str  # one of METHODS
    metric: str  # what runs are compared by
    maximize: bool  # W&B minimizes where a file says nothing
    parameters: Sequence[Parameter]
    num_runs: int  # how many there will be
    halving: Halving | None

    @property
    def varied_parameters(self) -> list[Parameter]:
        """Returns the parameters that are not the same for all runs."""
        return [each for each in self.parameters if len(each.values) != 1]


def sweep_files() -> dict[str, Path]:
    """Returns the files of our sweeps by their names ("sweeps/tiny_lr"), sorted by name."""
    return {name: path for name, path in config_files(package_folder("configs")).items() if name.startswith("sweeps/")}


def find_sweep_file(given: str) -> Path:
    """Returns the file of a sweep, which is given by its path, or by its name if it is ours.

    Raises:
        ValueError: there is no such file. The message gives the nearest name.
    """
    ours = {name: path for full, path in sweep_files().items() for name in (full, full.removeprefix("sweeps/"))}
    path = Path(given) if Path(given).is_file() else ours.get(given)
    if path is None:
        hint = _hint(given, ours, "`torchtune-ext sweeps` lists ours")
        raise UsageError(f"{given}: no such file, seen from {Path.cwd()}, and no sweep of ours; {hint}")
    return path


def read_sweep(path: Path) -> Sweep:
    """Reads a file.

    Raises:
        ValueError: it is no sweep, or none that runs here. The message names the file, the key and the fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _parse_sweep(path, text, yaml.safe_load(text))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: no YAML: {' '.join(str(error).split())[:300]}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _hint(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    near = closest_match(str(name), known)
    return f"did you mean {near}?" if near else otherwise or f"there are {', '.join(known)}"


def _parse_sweep(path: Path, text: str, given: Any) -> Sweep:
    if not isinstance(given, dict) or not given:
        raise UsageError("no sweep: it holds no keys; begin with a copy of one of ours (`torchtune-ext sweeps`)")
    known = [*SWEEP_KEYS, *SERVER_KEYS]
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {key!r}; {_hint(key, known)} (`wandb sweep` may know more)")
    # Where a file names no command, W&B's own ends with words that no recipe reads.
    method, command, metric = str(given.get("method")), given.get("command", ["${args}"]), given.get("metric")
    if method not in METHODS:
        raise UsageError(f"method: {method}: {_hint(method, METHODS)}")
    if (method != "grid" or "early_terminate" in given) and find_spec("optuna") is None:
        raise UsageError(
            "method: random, bayes and early_terminate need Optuna: pip install 'torchtune-ext[sweep]'; a grid needs nothing"
        )
    if not isinstance(command, list) or not command:
        raise UsageError(f"command: must be a list of words: {COMMAND_EXAMPLE}")
    target = metric if isinstance(metric, dict) else {}
    goal = target.get("goal", "minimize")
    if (
        goal not in ("minimize", "maximize")
        or not isinstance(target.get("name"), str)
        or not set(target) <= {"name", "goal"}
    ):
        raise UsageError(
            f"metric: {metric}: write metric: {{name: eval/accuracy_sampled, goal: maximize}}, or goal: minimize"
        )
    parameters = parse_parameters(given.get("parameters"))
    return Sweep(
        path=path,
        text=text,
        name=str(given.get("name", path.stem)),
        command=command,
        method=method,
        metric=target["name"],
        maximize=goal == "maximize",
        parameters=parameters,
        num_runs=_count_runs(method, parameters, given.get("run_cap")),
        halving=_parse_halving(given["early_terminate"]) if "early_terminate" in given else None,
    )


def _count_runs(method: str, parameters: Sequence[Parameter], cap: Any) -> int:
    if cap is not None and (type(cap) is not int or cap < 1):
        raise UsageError(f"run_cap: {cap} must be a whole number, 1 or more")
    if method == "grid":
        count = len(grid_points(parameters))
        return min(count, cap or count)
    if all(len(each.values) == 1 for each in parameters):
        raise UsageError(f"parameters: all of them are fixed, so method: {method} has nothing to choose")
    if cap is None:
        raise UsageError(f"run_cap is missing: method: {method} draws without end; say how many, as in run_cap: 20")
    return cap


def _parse_halving(given: Any) -> Halving:
    node: dict[str, Any] = given if isinstance(given, dict) else {}
    first: Any = node.get("min_iter")
    eta: Any = node.get("eta", 3)
    if (
        node.get("type") != "hyperband"
        or not set(node) <= {"type", "min_iter", "eta"}
        or type(first) is not int
        or type(eta) is not int
        or first < 1
        or eta < 2
    ):
        raise UsageError(
            f"early_terminate: {given}: write {{type: hyperband, min_iter: 3, eta: 3}}, with whole numbers from 1 and from 2 on"
        )
    return Halving(first, eta)


def parse_parameters(node: Any) -> list[Parameter]:
    """Reads the node `parameters` of a sweep's file. Returns them sorted by name, the order in which W&B passes them on.

    Raises:
        ValueError: a parameter is none of W&B's, or is one that is not drawn here. The message names it and the fix.
    """
    if not isinstance(node, dict) or not node:
        raise UsageError("parameters: needs at least one, for instance optimizer.lr: {values: [1.0e-3, 2.0e-3]}")
    return [_parse_parameter(str(name), given) for name, given in sorted(node.items(), key=lambda item: str(item[0]))]


def _parse_parameter(name: str, given: Any) -> Parameter:
    # Without a `distribution`, W&B chooses it by the keys.
    node = given if isinstance(given, dict) else {}
    node = {key: _parse_number(each) if key in ("min", "max") else each for key, each in node.items()}
    keys, kind = node.keys() - {"distribution"}, node.get("distribution")
    if keys == {"value"} and kind in (None, "constant"):
        return Parameter(name, _unique_values([node["value"]]))
    if keys == {"values"} and kind in (None, "categorical") and isinstance(node["values"], list) and node["values"]:
        return Parameter(name, _unique_values(node["values"]))
    if keys == {"min", "max"} and all(type(node[end]) in (int, float) for end in keys) and node["min"] < node["max"]:
        low, high = node["min"], node["max"]
        if type(low) is type(high) is int and kind in (None, "int_uniform"):
            return Parameter(name, range(low, high + 1))
        if kind in (None, "uniform"):
            return Parameter(name, low=low, high=high)
        if kind == "log_uniform_values" and low > 0:
            return Parameter(name, low=low, high=high, log=True)
    raise UsageError(f"parameters: {name}: {given}: {PARAMETER_HINT}")


def _unique_values(given: Sequence[Any]) -> list[Any]:
    values = [_parse_number(each) for each in given]
    return [each for i, each in enumerate(values) if each not in values[:i]]


def _parse_number(value: Any) -> Any:
    # YAML 1.1 reads 1e-5 as a text, because it has no dot. A run reads it as a number.
    return float(value) if isinstance(value, str) and _FLOAT_WITHOUT_DOT.fullmatch(value) else value


def grid_points(parameters: Sequence[Parameter]) -> list[Point]:
    """Returns every combination, in W&B's order: the last parameter changes first.

    Raises:
        ValueError: a parameter has endlessly many values, or there are more than MOST points.
    """
    for each in parameters:
        if not each.values:
            raise UsageError(
                f"parameters: {each.name}: method: grid takes value, values, and whole numbers from min to max, not every "
                "number between two; list its values, or write method: random"
            )
    if math.prod(len(each.values) for each in parameters) > MAX_GRID_POINTS:
        raise UsageError(
            f"parameters: the grid has more than {MAX_GRID_POINTS:,} points; list fewer values, or draw: method: random"
        )
    names = [each.name for each in parameters]
    return [dict(zip(names, point, strict=True)) for point in product(*(each.values for each in parameters))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `> my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists our sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(find_sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    print_first_lines(sweep_files())
    return 0
