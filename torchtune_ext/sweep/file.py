"""A sweep as its file says it, in W&B's format: which command, which parameters, how many runs, which of them stop early.

A parameter that is drawn has a value for every u in [0, 1], its quantile (`Parameter.at`). So a random search draws u, and a
search that learns looks for a good u, whatever the distribution is. The values are those of W&B's own search.
"""

import argparse
import math
import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, product, repeat
from operator import mul, truediv
from pathlib import Path
from statistics import NormalDist
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

# The keys of each distribution. A file may leave out those that have a default.
DISTRIBUTIONS = {
    "constant": ("value",),
    "categorical": ("values",),
    "categorical_w_probabilities": ("values", "probabilities"),
    "int_uniform": ("min", "max"),
    "uniform": ("min", "max"),
    "q_uniform": ("min", "max", "q"),
    "log_uniform_values": ("min", "max"),
    "q_log_uniform_values": ("min", "max", "q"),
    "inv_log_uniform_values": ("min", "max"),
    "normal": ("mu", "sigma"),
    "q_normal": ("mu", "sigma", "q"),
    "log_normal": ("mu", "sigma"),
    "q_log_normal": ("mu", "sigma", "q"),
}
DEFAULTS = {"mu": 0.0, "sigma": 1.0, "q": 1}
MOST = 10_000  # points of a grid
BANDS = 100  # W&B compares runs so many times from min_iter on, most of them beyond every run

DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")  # the command of a file that names none
EXAMPLE = "command: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a sweep."""

    name: str  # the dotted name of the setting: "optimizer.lr"
    kind: str  # a key of DISTRIBUTIONS; a constant is categorical, with one value
    given: Mapping[str, Any]  # what the file says, with the defaults of the distribution

    @property
    def fixed(self) -> bool:
        """Tells whether all runs have the same value."""
        return self.kind == "categorical" and len(self.given["values"]) == 1

    def at(self, u: float) -> Any:
        """Returns the value at the quantile u, from 0 to 1."""
        given = self.given
        match self.kind.removeprefix("q_"):
            case "categorical":
                return given["values"][_place(u, len(given["values"]))]
            case "categorical_w_probabilities":
                place = bisect(list(accumulate(given["probabilities"])), u)
                return given["values"][min(place, len(given["values"]) - 1)]
            case "int_uniform":
                return given["min"] + _place(u, given["max"] - given["min"] + 1)
            case "uniform":
                value = given["min"] + u * (given["max"] - given["min"])
            case "normal" | "log_normal" as kind:
                # The ends of the bell are endless.
                z = NormalDist().inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
                value = given["mu"] + given["sigma"] * z
                value = math.exp(value) if kind == "log_normal" else value
            case _:
                # Where log(1/x) is uniform, log(x) is, too: `inv_log_uniform_values` has the same values.
                value = math.exp((1 - u) * math.log(given["min"]) + u * math.log(given["max"]))
                value = min(max(value, given["min"]), given["max"])
        if "q" not in given:
            return value
        multiple = round(value / given["q"]) * given["q"]
        return multiple if isinstance(multiple, int) else _exact(multiple)

    def all(self) -> Sequence[Any]:
        """Returns the values that a grid has, the first MOST + 1 if there are more.

        Raises:
            ValueError: there are endlessly many.
        """
        given = self.given
        match self.kind:
            case "categorical":
                # A value that is named twice is one point, as are 2 and 2.0.
                return [value for i, value in enumerate(given["values"]) if value not in given["values"][:i]]
            case "int_uniform":
                return range(given["min"], given["max"] + 1)[: MOST + 1]
            case "q_uniform":
                # As W&B's, they end below max.
                count = math.ceil(round((given["max"] - given["min"]) / given["q"], 9))
                return [_exact(given["min"] + i * given["q"]) for i in range(min(count, MOST + 1))]
        raise Mistake(
            f"parameters: {self.name}: method: grid takes value, values, whole numbers from min to max, q_uniform, and no "
            f"{self.kind}; list its values, or write method: random"
        )


def _place(u: float, count: int) -> int:
    """Returns which of `count` equally likely values the quantile u is, from 0."""
    return min(max(math.ceil(u * count) - 1, 0), count - 1)


def _exact(value: float) -> float:
    """Returns 0.3 in place of 0.30000000000000004, which does not read as a multiple of 0.1."""
    return float(f"{value:.12g}")


@dataclass(frozen=True, slots=True)
class Metric:
    """What a sweep compares runs by."""

    name: str
    maximize: bool  # W&B minimizes where a file says nothing
    target: float | None  # no further run starts once one has reached it


@dataclass(frozen=True, slots=True)
class Hyperband:
    """Which runs a sweep stops early, by the rule of W&B (`early_terminate: {type: hyperband}`).

    A run is looked at when it has logged the metric as often as a band says. There, the values of all runs that came that far
    are compared: a run stays only if it is among the best 1/eta of them.
    """

    bands: Sequence[int]  # how often a run has logged the metric when it is compared
    eta: float  # of the runs that are compared, 1/eta stay
    strict: bool  # the value at the band counts, and not the best one until now

    def stops(self, run: str, histories: Mapping[str, Sequence[float]], maximize: bool) -> bool:
        """Tells whether a run is stopped.

        Args:
            histories: what each run has logged of the metric, in order, also of runs that have ended. Values are finite.
        """
        sign = -1.0 if maximize else 1.0
        losses = [sign * value for value in histories[run]]
        band = max((band for band in self.bands if band <= len(losses)), default=0)
        if not band:
            return False
        all_there = sorted(sign * values[band - 1] for values in histories.values() if len(values) >= band)
        loss = losses[band - 1] if self.strict else min(losses)
        return loss > all_there[int(1.0 / self.eta * len(all_there))]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a file says."""

    path: Path
    text: str  # the file as it is
    name: str
    command: Sequence[Any]
    program: str
    method: str  # one of METHODS
    metric: Metric
    parameters: Sequence[Parameter]
    runs: int  # how many there will be
    early: Hyperband | None

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
    method, command = given.get("method"), given.get("command", list(DEFAULT))
    _require(method in METHODS, f"method: {method}: {_hint(method, METHODS)}")
    _require(
        method != "bayes" or find_spec("optuna") is not None,
        "method: bayes needs Optuna: pip install 'torchtune-ext[sweep]'; grid and random need nothing further",
    )
    _require(isinstance(command, list) and len(command) > 0, f"command: must be a list of words: {EXAMPLE}")
    parameters = parameters_of(given.get("parameters"))
    return Sweep(
        path=path,
        text=text,
        name=str(given.get("name", path.stem)),
        command=command,
        program=str(given.get("program", "")),
        method=method,
        metric=_metric(given.get("metric")),
        parameters=parameters,
        runs=_runs(method, parameters, given.get("run_cap")),
        early=hyperband_of(given["early_terminate"]) if "early_terminate" in given else None,
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
        _require(count > 0, "parameters: the grid has no points: a q_uniform has its min, and what lies below its max")
        return min(count, cap or count)
    if all(each.fixed for each in parameters):
        raise Mistake(f"parameters: all of them are fixed, so method: {method} has nothing to choose")
    _require(
        cap is not None, f"run_cap is missing: method: {method} draws without end; say how many, as in run_cap: 20"
    )
    return cap


def hyperband_of(given: Any) -> Hyperband:
    """Reads the node `early_terminate` of a sweep's file.

    Raises:
        ValueError: it is none that W&B takes.
    """
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise Mistake(f"early_terminate: {given}: write {{type: hyperband, min_iter: 3}}; W&B has no other type")
    _check_keys("early_terminate: ", given, ("type", "min_iter", "max_iter", "s", "eta", "strict"))
    for key in ("min_iter", "max_iter", "s", "eta"):
        _require(_is_number(given.get(key, 2)), f"early_terminate: {key}: {given.get(key)!r} must be a number")
    eta = given.get("eta", 3)
    _require(eta > 1, f"early_terminate: eta: {eta} must be above 1: of the runs that are compared, 1/eta stay")
    if "max_iter" in given and "s" in given:
        places = list(accumulate(repeat(eta, min(int(given["s"]), BANDS)), truediv, initial=given["max_iter"]))[1:]
    elif "min_iter" in given:
        places = list(accumulate(repeat(eta, BANDS - 1), mul, initial=given["min_iter"]))
    else:
        raise Mistake("early_terminate: hyperband needs min_iter, or max_iter and s")
    if not places or places[0] < 1:
        raise Mistake(f"early_terminate: {given} leaves no band; s, and min_iter or max_iter / eta, must be 1 or more")
    return Hyperband(
        tuple(sorted(int(place) for place in places if 1 <= place < math.inf)), eta, given.get("strict", True)
    )


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
    if kind in ("beta", "q_beta"):
        raise Mistake(f"{where}: distribution: {kind}: only W&B's own server draws from it; write uniform, or normal")
    if kind in ("log_uniform", "q_log_uniform", "inv_log_uniform"):
        instead = f"write {kind}_values, whose limits are the values"
        raise Mistake(f"{where}: distribution: {kind}: its limits are exponents, and W&B has retired it; {instead}")
    _require(kind in DISTRIBUTIONS, f"{where}: distribution: {kind} is unknown; {_hint(kind, DISTRIBUTIONS)}")
    keys = DISTRIBUTIONS[kind]
    _check_keys(f"{where}: {kind}: ", given, (*keys, "distribution"))
    whole = {key: given.get(key, DEFAULTS.get(key)) for key in keys if key in given or key in DEFAULTS}
    for key in keys:
        _require(key in whole, f"{where}: {kind} needs {' and '.join(keys)}; {key} is missing")
    if kind == "constant":
        kind, whole = "categorical", {"values": [whole["value"]]}
    if "values" in whole:
        _check_values(where, whole)
        # A run reads 1e-5 as a number, and YAML 1.1 as a text, because it has no dot.
        whole["values"] = [
            float(value) if isinstance(value, str) and _WITHOUT_DOT.fullmatch(value) else value
            for value in whole["values"]
        ]
    else:
        _check_numbers(where, kind, whole)
    return Parameter(name, kind, whole)


def _meant(given: Mapping[str, Any]) -> str | None:
    """Returns the distribution that W&B takes where the file names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical_w_probabilities" if "probabilities" in given else "categorical"
    if "min" in given or "max" in given:
        return "int_uniform" if type(given.get("min")) is type(given.get("max")) is int else "uniform"
    return "normal" if "mu" in given or "sigma" in given else None


def _check_numbers(where: str, kind: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that are no numbers, or that do not go together."""
    for key, value in given.items():
        _require(_is_number(value), f"{where}: {key}: {value!r} is no number for YAML; write 1.0e-3, not 1e-3")
    if "min" in given:
        low, high = given["min"], given["max"]
        if kind == "int_uniform" and not (type(low) is type(high) is int):
            raise Mistake(f"{where}: min and max of int_uniform are whole numbers; write uniform for others")
        _require(low < high, f"{where}: min: {low} must be below max: {high}")
        _require("log" not in kind or low > 0, f"{where}: min: {low} of {kind} must be above 0: it has no logarithm")
    _require(given.get("q", 1) > 0, f"{where}: q: {given.get('q')} must be above 0")
    _require(given.get("sigma", 0) >= 0, f"{where}: sigma: {given.get('sigma')} must be 0 or more")


def _check_values(where: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for values that are none, or chances that are not theirs."""
    values, shares = given["values"], given.get("probabilities")
    _require(isinstance(values, list) and len(values) > 0, f"{where}: values: {values} must be a list, and not empty")
    if "probabilities" in given and not (
        isinstance(shares, list)
        and len(shares) == len(values)
        and all(_is_number(share) and share >= 0 for share in shares)
        and math.isclose(sum(shares), 1.0, abs_tol=1e-6)
    ):
        raise Mistake(f"{where}: probabilities: {shares} must be {len(values)} numbers that sum to 1")


def grid(parameters: Sequence[Parameter]) -> list[Point]:
    """Returns every combination, in W&B's order: the last parameter changes first.

    Raises:
        ValueError: a parameter has endlessly many values, or there are more than MOST points.
    """
    values = [each.all() for each in parameters]
    if math.prod(map(len, values)) > MOST:
        raise Mistake(f"parameters: the grid has more than {MOST:,} points; list fewer values, or draw: method: random")
    names = [each.name for each in parameters]
    return [dict(zip(names, point, strict=True)) for point in product(*values)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `tune cp sweeps/NAME my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists our sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    print_first_lines(sweep_files())
    return 0
