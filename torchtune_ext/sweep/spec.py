"""Parse a sweep file in W&B's format: command, parameters, number of runs, early termination."""

import argparse
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, list_or_print
from torchtune_ext.run.errors import UsageError, closest_match
from torchtune_ext.telemetry.metrics import current_metric

METHODS = ("grid", "random", "bayes")
# Only W&B's server reads the last two keys, which name the owner of the sweep.
SWEEP_KEYS = "name description program command method metric parameters run_cap early_terminate project entity".split()
MAX_GRID_POINTS = 10_000

COMMAND_EXAMPLE = "command: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
PARAMETER_HINT = (
    "write {value: 1}, {values: [1, 2]}, or {min: 0.001, max: 0.1} with numbers and min < max; add distribution: "
    "log_uniform_values if the magnitude is unknown; other distributions of W&B are unsupported here"
)
_FLOAT_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a sweep: a list of values, or a range of numbers."""

    name: str  # the dotted config key: "optimizer.lr"
    values: Sequence[Any] = ()  # distinct values; () if the parameter is a range
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # whether the logarithm is uniform


@dataclass(frozen=True, slots=True)
class Halving:
    """Successive halving of runs (`early_terminate: {type: hyperband}`)."""

    min_iter: int  # logged values before the first comparison; each later comparison needs `eta` times as many
    eta: int  # each comparison keeps 1/eta of the runs


@dataclass(frozen=True, slots=True)
class Sweep:
    """A parsed sweep file."""

    path: Path
    text: str  # content of the file
    name: str
    command: Sequence[Any]
    method: str  # one of METHODS
    metric: str  # the metric that ranks runs
    maximize: bool  # W&B's default is to minimize
    parameters: Sequence[Parameter]
    num_runs: int  # planned number of runs
    halving: Halving | None

    @property
    def varied_parameters(self) -> list[Parameter]:
        """The parameters with more than one value."""
        return [each for each in self.parameters if len(each.values) != 1]


def sweep_files() -> dict[str, Path]:
    """Returns the shipped sweep files by name ("sweeps/tiny_lr"), sorted by name."""
    return {name: path for name, path in config_files().items() if name.startswith("sweeps/")}


def find_sweep_file(given: str) -> Path:
    """Returns the path of a sweep file, given by its path or by the name of a shipped sweep.

    Raises:
        UsageError: the file is not found. The message suggests the nearest name.
    """
    ours = {name: path for full, path in sweep_files().items() for name in (full, full.removeprefix("sweeps/"))}
    path = Path(given) if Path(given).is_file() else ours.get(given)
    if path is None:
        hint = _hint(given, ours, "`torchtune-ext sweeps` lists the shipped sweeps")
        raise UsageError(f"{given}: file not found from {Path.cwd()}, and not a shipped sweep; {hint}")
    return path


def read_sweep(path: Path) -> Sweep:
    """Reads a sweep file.

    Raises:
        UsageError: the file is not a sweep, or uses an unsupported feature.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return _parse_sweep(path, text, yaml.safe_load(text))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path}: invalid YAML: {' '.join(str(error).split())[:300]}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _hint(name: Any, known: Iterable[str], otherwise: str = "") -> str:
    near = closest_match(str(name), known)
    return f"did you mean {near}?" if near else otherwise or f"expected one of {', '.join(known)}"


def _parse_sweep(path: Path, text: str, given: Any) -> Sweep:
    if not isinstance(given, dict) or not given:
        raise UsageError("not a sweep: expected a mapping of keys. Fix: copy a shipped sweep (`torchtune-ext sweeps`)")
    for key in given:
        if key not in SWEEP_KEYS:
            raise UsageError(f"unknown key {key!r}; {_hint(key, SWEEP_KEYS)} (`wandb sweep` may know more)")
    # W&B's default command ends with ${args}, which recipes do not read.
    method, command, metric = str(given.get("method")), given.get("command", ["${args}"]), given.get("metric")
    if method not in METHODS:
        raise UsageError(f"method: {method}: {_hint(method, METHODS)}")
    if (method != "grid" or "early_terminate" in given) and find_spec("optuna") is None:
        raise UsageError(
            "method: random, bayes and early_terminate need Optuna. Fix: pip install 'torchtune-ext[sweep]', or set "
            "method: grid"
        )
    if not isinstance(command, list) or not command:
        raise UsageError(f"command: must be a list of arguments: {COMMAND_EXAMPLE}")
    target = {"goal": "minimize", **metric} if isinstance(metric, dict) else {}
    goal = target.get("goal")
    is_valid = target.keys() == {"name", "goal"} and isinstance(target["name"], str)
    if not is_valid or goal not in ("minimize", "maximize"):
        raise UsageError(
            f"metric: {metric}: write metric: {{name: eval/reward_sampled, goal: maximize}}, or goal: minimize"
        )
    name = current_metric(target["name"])
    if name != target["name"]:
        warnings.warn(f"metric: {target['name']} is deprecated. Fix: rename it to {name}", FutureWarning, stacklevel=2)
    parameters = parse_parameters(given.get("parameters"))
    return Sweep(
        path=path,
        text=text,
        name=str(given.get("name", path.stem)),
        command=command,
        method=method,
        metric=name,
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
        raise UsageError(f"parameters: all of them are fixed, but method: {method} needs one with several values")
    if cap is None:
        raise UsageError(
            f"run_cap is missing: method: {method} has no last point. Fix: set the number of runs, e.g. run_cap: 20"
        )
    return cap


def _parse_halving(given: Any) -> Halving:
    node = {"eta": 3, **given} if isinstance(given, dict) else {}
    if node.keys() == {"type", "min_iter", "eta"} and node["type"] == "hyperband":
        first, eta = node["min_iter"], node["eta"]
        if type(first) is type(eta) is int and first >= 1 and eta >= 2:
            return Halving(first, eta)
    raise UsageError(
        f"early_terminate: {given}: write {{type: hyperband, min_iter: 3, eta: 3}}, with integers min_iter >= 1 and eta >= 2"
    )


def parse_parameters(node: Any) -> list[Parameter]:
    """Reads the section `parameters` of a sweep file.

    Returns:
        The parameters sorted by name, the order in which W&B passes them.

    Raises:
        UsageError: a parameter is invalid, or has an unsupported distribution.
    """
    if not isinstance(node, dict) or not node:
        raise UsageError("parameters: needs at least one, for instance optimizer.lr: {values: [1.0e-3, 2.0e-3]}")
    return [_parse_parameter(str(name), given) for name, given in sorted(node.items(), key=lambda item: str(item[0]))]


def _parse_parameter(name: str, given: Any) -> Parameter:
    # Without `distribution`, W&B infers it from the keys.
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
    # YAML 1.1 reads 1e-5 as a string, because it has no dot. A run reads it as a number.
    return float(value) if isinstance(value, str) and _FLOAT_WITHOUT_DOT.fullmatch(value) else value


def grid_points(parameters: Sequence[Parameter]) -> list[Point]:
    """Returns every combination, in W&B's order: the last parameter changes fastest.

    Raises:
        UsageError: a parameter is a range of floats, or the grid exceeds MAX_GRID_POINTS.
    """
    for each in parameters:
        if not each.values:
            raise UsageError(
                f"parameters: {each.name}: method: grid takes value, values, or integers min and max, not a range of "
                "floats. Fix: list its values, or set method: random"
            )
    if math.prod(len(each.values) for each in parameters) > MAX_GRID_POINTS:
        raise UsageError(
            f"parameters: the grid has more than {MAX_GRID_POINTS:,} points; list fewer values, or set method: random"
        )
    names = [each.name for each in parameters]
    return [dict(zip(names, point, strict=True)) for point in product(*(each.values for each in parameters))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="sweep to print; `> my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists the shipped sweeps, or prints one.

    Raises:
        UsageError: the name is unknown.
    """
    return list_or_print(sweep_files(), find_sweep_file(args.name) if args.name else None)
