"""A sweep as its file says it, in W&B's format: which command, which parameters, how many runs, which of them stop early."""

import argparse
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, folder, print_first_lines
from torchtune_ext.run.errors import Mistake, nearest

METHODS = ("grid", "random", "bayes")
KEYS = ("name", "description", "program", "command", "method", "metric", "parameters", "run_cap", "early_terminate")
# What only W&B's server reads: who owns the sweep, and which version of the format it is.
SERVER_KEYS = ("project", "entity", "apiVersion", "kind", "controller")
# What only W&B's server does: jobs of its Launch, searches of one's own, several metrics, other values for failed runs.
NOT_HERE = ("job", "image_uri", "scheduler", "metrics", "impute", "impute_while_running")

# The keys of each distribution.
DISTRIBUTIONS = {
    "constant": ("value",),
    "categorical": ("values",),
    "int_uniform": ("min", "max"),
    "uniform": ("min", "max"),
    "q_uniform": ("min", "max", "q"),
    "log_uniform_values": ("min", "max"),
    "inv_log_uniform_values": ("min", "max"),  # where log(1/x) is uniform, log(x) is, too
}
# What only W&B's server draws from, and what stands in its place here.
INSTEAD = {
    "categorical_w_probabilities": "values without probabilities",
    **dict.fromkeys(("beta", "q_beta", "normal", "q_normal"), "uniform, between the limits of what is worth a run"),
    **dict.fromkeys(("log_normal", "q_log_normal", "q_log_uniform_values"), "log_uniform_values"),
    **dict.fromkeys(
        ("log_uniform", "q_log_uniform", "inv_log_uniform"), "log_uniform_values, whose limits are the values"
    ),
}
MOST = 10_000  # points of a grid

EXAMPLE = "command: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a sweep: some values, or any number between two limits."""

    name: str  # the dotted name of the setting: "optimizer.lr"
    values: Sequence[Any] = ()  # each once; () of a number
    low: float = 0.0
    high: float = 0.0
    log: bool = False  # whether the logarithm of the number is uniform

    @property
    def fixed(self) -> bool:
        """Tells whether all runs have the same value."""
        return len(self.values) == 1


@dataclass(frozen=True, slots=True)
class Metric:
    """What a sweep compares runs by."""

    name: str
    maximize: bool  # W&B minimizes where a file says nothing
    target: float | None  # no further run starts once one has reached it


@dataclass(frozen=True, slots=True)
class Halving:
    """When runs are compared, and how many of them go on (`early_terminate: {type: hyperband}`)."""

    first: int  # how often a run has logged the metric when it is compared first; then `eta` times as often, and so on
    eta: int  # of those that are compared, 1/eta go on


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a file says."""

    path: Path
    text: str  # the file as it is
    name: str
    command: Sequence[Any]
    method: str  # one of METHODS
    metric: Metric
    parameters: Sequence[Parameter]
    runs: int  # how many there will be
    early: Halving | None

    @property
    def drawn(self) -> list[Parameter]:
        """Returns the parameters that are not the same for all runs."""
        return [each for each in self.parameters if not each.fixed]


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
    _check_keys("", given, [*KEYS, *SERVER_KEYS])
    # Where a file names no command, W&B's own ends with words that no recipe reads.
    method, command = given.get("method"), given.get("command", ["${args}"])
    _require(method in METHODS, f"method: {method}: {_hint(method, METHODS)}")
    _require(
        (method == "grid" and "early_terminate" not in given) or find_spec("optuna") is not None,
        "method: random, bayes and early_terminate need Optuna: pip install 'torchtune-ext[sweep]'; a grid needs nothing",
    )
    _require(isinstance(command, list) and len(command) > 0, f"command: must be a list of words: {EXAMPLE}")
    parameters = parameters_of(given.get("parameters"))
    return Sweep(
        path=path,
        text=text,
        name=str(given.get("name", path.stem)),
        command=command,
        method=method,
        metric=_metric(given.get("metric")),
        parameters=parameters,
        runs=_runs(method, parameters, given.get("run_cap")),
        early=halving_of(given["early_terminate"]) if "early_terminate" in given else None,
    )


def _check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        _require(key not in NOT_HERE, f"{where}{key}: only W&B's server does that; use `wandb sweep` for this file")
        _require(key in known, f"{where}unknown key {key!r}; {_hint(key, known)}")


def _metric(given: Any) -> Metric:
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        example = "metric: {name: eval/accuracy_sampled, goal: maximize}"
        raise Mistake(f"metric: {given} says not what runs are compared by; write {example}")
    _check_keys("metric: ", given, ("name", "goal", "target"))
    goal, target = given.get("goal", "minimize"), given.get("target")
    _require(goal in ("minimize", "maximize"), f"metric: goal: {goal}: write maximize or minimize")
    _require(target is None or _is_number(target), f"metric: target: {target!r} must be a number")
    return Metric(given["name"], goal == "maximize", target)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _runs(method: str, parameters: Sequence[Parameter], cap: Any) -> int:
    """Returns how many runs there will be. Raises ValueError."""
    _require(cap is None or (type(cap) is int and cap >= 1), f"run_cap: {cap} must be a whole number, 1 or more")
    if method == "grid":
        count = len(grid(parameters))
        return min(count, cap or count)
    if all(each.fixed for each in parameters):
        raise Mistake(f"parameters: all of them are fixed, so method: {method} has nothing to choose")
    _require(
        cap is not None, f"run_cap is missing: method: {method} draws without end; say how many, as in run_cap: 20"
    )
    return cap


def halving_of(given: Any) -> Halving:
    """Reads the node `early_terminate` of a sweep's file. Raises ValueError."""
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise Mistake(f"early_terminate: {given}: write {{type: hyperband, min_iter: 3}}; W&B has no other type")
    _check_keys("early_terminate: ", given, ("type", "min_iter", "max_iter", "s", "eta", "strict"))
    for key, least in {"min_iter": 1, "max_iter": 1, "s": 1, "eta": 2}.items():
        if key in given and (type(given[key]) is not int or given[key] < least):
            raise Mistake(f"early_terminate: {key}: {given[key]!r} must be a whole number, {least} or more")
    _require(given.get("strict", True) is True, "early_terminate: strict: false: only W&B's server does that")
    eta = given.get("eta", 3)
    if "max_iter" in given and "s" in given:
        first = given["max_iter"] // eta ** min(given["s"], 64)
    else:
        _require("min_iter" in given, "early_terminate: hyperband needs min_iter, or max_iter and s")
        first = given["min_iter"]
    _require(
        first >= 1, f"early_terminate: {given} compares runs before they begin: max_iter / eta**s must be 1 or more"
    )
    return Halving(first, eta)


def parameters_of(node: Any, above: str = "") -> list[Parameter]:
    """Reads the node `parameters` of a sweep's file. Returns them sorted by name, the order in which W&B passes them on.

    Args:
        above: the node that these are in, with a dot behind it.

    Raises:
        ValueError: a parameter is none of W&B's, or is one that is not drawn here. The message names it and the fix.
    """
    if not isinstance(node, dict) or not node:
        where = f"parameters.{above}".rstrip(".")
        raise Mistake(f"{where}: needs at least one parameter, for instance optimizer.lr: {{values: [1.0e-3, 2.0e-3]}}")
    parameters: list[Parameter] = []
    for key, given in sorted(node.items(), key=lambda item: str(item[0])):
        name = f"{above}{key}"
        if not isinstance(given, dict):
            example = f"{{values: {given}}}" if isinstance(given, list) else f"{{value: {given}}}"
            raise Mistake(f"parameters: {name}: {given} says not what it is; write {name}: {example}")
        if "parameters" not in given:
            parameters.append(_parameter(name, given))
            continue
        if others := [other for other in given if other != "parameters"]:
            raise Mistake(f"parameters: {name} has `parameters:` and {others[0]!r}; it is a node or a parameter")
        parameters += parameters_of(given["parameters"], f"{name}.")
    names = [each.name for each in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Mistake(f"parameters: {twice[0]} is there twice, nested and with a dot; keep one of them")
    return parameters


def _parameter(name: str, given: Mapping[str, Any]) -> Parameter:
    where, kind = f"parameters: {name}", given.get("distribution") or _meant(given)
    _require(kind is not None, f"{where}: has no values; write values: [...], value: ..., or min: and max:")
    if kind in INSTEAD:
        raise Mistake(f"{where}: distribution: {kind}: only W&B's own server draws from it; write {INSTEAD[kind]}")
    _require(kind in DISTRIBUTIONS, f"{where}: distribution: {kind} is unknown; {_hint(kind, DISTRIBUTIONS)}")
    keys = DISTRIBUTIONS[kind]
    _check_keys(f"{where}: {kind}: ", given, (*keys, "distribution"))
    for key in keys:
        _require(key in given or key == "q", f"{where}: {kind} needs {' and '.join(keys)}; {key} is missing")
    if kind in ("constant", "categorical"):
        values = [given["value"]] if kind == "constant" else given["values"]
        _require(isinstance(values, list) and values, f"{where}: values: {values} must be a list, and not empty")
        # A run reads 1e-5 as a number, and YAML 1.1 as a text, because it has no dot.
        values = [float(each) if isinstance(each, str) and _WITHOUT_DOT.fullmatch(each) else each for each in values]
        return Parameter(name, [each for i, each in enumerate(values) if each not in values[:i]])
    for key in keys:
        if not _is_number(given.get(key, 1)):
            raise Mistake(f"{where}: {key}: {given[key]!r} is no number for YAML; write 1.0e-3, not 1e-3")
    low, high, q = given["min"], given["max"], given.get("q", 1)
    _require(low < high, f"{where}: min: {low} must be below max: {high}")
    _require("log" not in kind or low > 0, f"{where}: min: {low} of {kind} must be above 0: it has no logarithm")
    if kind == "int_uniform":
        _require(type(low) is type(high) is int, f"{where}: int_uniform takes whole numbers; write uniform for others")
        return Parameter(name, range(low, high + 1))
    if kind == "q_uniform":
        _require(q > 0 and (high - low) / q <= MOST, f"{where}: q: {q} must be above 0, and not that small")
        # As W&B's, they end below max. Twelve digits make 0.3 of 0.30000000000000004.
        count = math.ceil(round((high - low) / q, 9))
        return Parameter(name, [float(f"{low + i * q:.12g}") for i in range(count)])
    return Parameter(name, low=low, high=high, log="log" in kind)


def _meant(given: Mapping[str, Any]) -> str | None:
    """Returns the distribution that W&B takes where the file names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical_w_probabilities" if "probabilities" in given else "categorical"
    if "min" in given or "max" in given:
        return "int_uniform" if type(given.get("min")) is type(given.get("max")) is int else "uniform"
    return "normal" if "mu" in given or "sigma" in given else None


def grid(parameters: Sequence[Parameter]) -> list[Point]:
    """Returns every combination, in W&B's order: the last parameter changes first.

    Raises:
        ValueError: a parameter has endlessly many values, or there are more than MOST points.
    """
    for each in parameters:
        if not each.values:
            raise Mistake(
                f"parameters: {each.name}: method: grid takes value, values, whole numbers from min to max and q_uniform, and "
                "not every number between two; list its values, or write method: random"
            )
    if math.prod(len(each.values) for each in parameters) > MOST:
        raise Mistake(f"parameters: the grid has more than {MOST:,} points; list fewer values, or draw: method: random")
    names = [each.name for each in parameters]
    return [dict(zip(names, point, strict=True)) for point in product(*(each.values for each in parameters))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `> my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists our sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    print_first_lines(sweep_files())
    return 0
