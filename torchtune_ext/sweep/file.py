"""A sweep as its file says it, in W&B's format: which command, which parameters, how many runs, which of them stop early.

A parameter that is drawn has a value for every u in [0, 1], its quantile (`Parameter.at`). So a random search draws u, and a
search that learns looks for a good u, whatever the distribution is. The values are those of W&B's own search.
"""

import argparse
import math
import os
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

from torchtune_ext.run.catalog import config_files, folder
from torchtune_ext.run.errors import Mistake, nearest

METHODS = ("grid", "random", "bayes")
IMPUTE = ("worst", "best", "latest")  # W&B's rules for the value of a run that has failed
KEYS = ("name", "description", "program", "command", "method", "metric", "parameters", "run_cap", "early_terminate")
# What only W&B's server reads: who owns the sweep, and which version of the format it is.
SERVER_KEYS = ("project", "entity", "apiVersion", "kind", "controller")
# What needs W&B's server.
NOT_HERE = {
    "job": "starts a job of W&B Launch",
    "image_uri": "starts an image with W&B Launch",
    "scheduler": "is a search of your own on W&B's server",
    "metrics": "compares runs by several metrics at once",
}

# The keys of each distribution: those that it needs, and those that it may have, with their defaults.
_RANGE, _BELL = ("min", "max"), {"mu": 0.0, "sigma": 1.0}
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "categorical": (("values",), {}),
    "categorical_w_probabilities": (("values", "probabilities"), {}),
    "int_uniform": (_RANGE, {}),
    "uniform": (_RANGE, {}),
    "q_uniform": (_RANGE, {"q": 1}),
    "log_uniform_values": (_RANGE, {}),
    "q_log_uniform_values": (_RANGE, {"q": 1}),
    "inv_log_uniform_values": (_RANGE, {}),
    "normal": ((), _BELL),
    "q_normal": ((), {**_BELL, "q": 1}),
    "log_normal": ((), _BELL),
    "q_log_normal": ((), {**_BELL, "q": 1}),
}
# What W&B knows and we do not take, each with what to write.
ELSEWHERE = {
    "beta": "only W&B's own server draws from it; write uniform, or normal",
    "q_beta": "only W&B's own server draws from it; write q_uniform, or q_normal",
    "log_uniform": "its limits are exponents, and W&B has retired it; write log_uniform_values, whose limits are the values",
    "q_log_uniform": "its limits are exponents, and W&B has retired it; write q_log_uniform_values",
    "inv_log_uniform": "its limits are exponents, and W&B has retired it; write inv_log_uniform_values",
}
IN_A_GRID = ("constant", "categorical", "int_uniform", "q_uniform")
MOST = 10_000  # points of a grid
BANDS = 100  # W&B compares runs so many times from min_iter on, most of them beyond every run

EXAMPLE = "[tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")  # the command of a file that names none
# Macros, ${args_...}, that write the parameters in ways that no recipe reads.
UNREAD = ("no_equals", "no_boolean_flags", "json", "json_file", "append_hydra", "override_hydra")
_ENVVAR = re.compile(r"\$\{envvar\:([A-Z0-9_]*)\}")
_MACRO = re.compile(r"\$\{(.*)\}")
_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a sweep."""

    path: tuple[str, ...]  # its keys, as the file nests them: ("optimizer.lr",), or ("engine", "dtype")
    kind: str  # a key of DISTRIBUTIONS
    given: Mapping[str, Any]  # what the file says, with the defaults of the distribution

    @property
    def name(self) -> str:
        """Returns the dotted name of the setting: "optimizer.lr"."""
        return ".".join(self.path)

    @property
    def fixed(self) -> bool:
        """Tells whether all runs have the same value."""
        return self.kind == "constant" or (self.kind == "categorical" and len(self.given["values"]) == 1)

    def at(self, u: float) -> Any:
        """Returns the value at the quantile u, from 0 to 1."""
        given = self.given
        match self.kind.removeprefix("q_"):
            case "constant":
                return given["value"]
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

    def count(self) -> int:
        """Returns how many values a grid has. Those of q_uniform end below max, as W&B's do."""
        given = self.given
        if self.kind == "q_uniform":
            return max(0, math.ceil(round((given["max"] - given["min"]) / given["q"], 9)))
        return given["max"] - given["min"] + 1 if "min" in given else len(given.get("values", [None]))

    def all(self) -> list[Any]:
        """Returns every value that a grid has."""
        count, given = self.count(), self.given
        if self.kind == "q_uniform":
            return [_exact(given["min"] + i * given["q"]) for i in range(count)]
        if values := given.get("values"):
            # A value that is named twice is one point, as are 2 and 2.0.
            return [value for i, value in enumerate(values) if value not in values[:i]]
        return [self.at((i + 0.5) / count) for i in range(count)]


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
    maximize: bool
    has_goal: bool  # whether the file says the goal; W&B minimizes otherwise
    target: float | None  # no further run starts once one has reached it
    impute: str  # one of IMPUTE


@dataclass(frozen=True, slots=True)
class Hyperband:
    """Which runs a sweep stops early, by the rule of W&B (`early_terminate: {type: hyperband}`).

    A run is looked at when it has logged the metric as often as a band says. There, the values of all runs that came that far
    are compared: a run stays only if it is among the best 1/eta of them.
    """

    bands: tuple[int, ...]  # how often a run has logged the metric when it is compared, ascending
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
    command: Sequence[str]
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
    ours = sweep_files()
    if Path(given).is_file():
        return Path(given)
    for name in (given, f"sweeps/{given}"):
        if name in ours:
            return ours[name]
    hint = _hint(given, [*ours, *(name.removeprefix("sweeps/") for name in ours)], "`torchtune-ext sweeps` lists ours")
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


def _sweep(path: Path, text: str, given: Any) -> Sweep:
    if not isinstance(given, dict) or not given:
        raise Mistake("no sweep: it holds no keys; begin with a copy of one of ours (`torchtune-ext sweeps`)")
    for key in given:
        if key in NOT_HERE:
            raise Mistake(f"{key}: it {NOT_HERE[key]}, which only W&B's server does; use `wandb sweep` for this file")
        if key not in (*KEYS, *SERVER_KEYS):
            near = nearest(str(key), [*KEYS, *SERVER_KEYS])
            hint = f"did you mean {near!r}?" if near else f"a sweep has {', '.join(KEYS)}"
            config = " (this looks like the config of a recipe: a sweep changes some of its keys)"
            raise Mistake(f"unknown key {key!r}; {hint}{config if key == 'model' else ''}")
    method = given.get("method")
    if method not in METHODS:
        hint = _hint(method, METHODS, f"there are {', '.join(METHODS)}")
        raise Mistake(f"method: {method}: {hint}" if "method" in given else f"method is missing; {hint}")
    if method == "bayes" and find_spec("optuna") is None:
        raise Mistake(
            "method: bayes needs Optuna: pip install 'torchtune-ext[sweep]'; grid and random need nothing further"
        )
    command = given.get("command", list(DEFAULT))
    if not isinstance(command, list) or not command:
        raise Mistake(f"command: must be a list of words: {EXAMPLE}")
    name = given.get("name", path.stem)
    if not isinstance(name, str) or not name.strip():
        raise Mistake(f"name: {name!r} must be a text")
    parameters = parameters_of(given.get("parameters"))
    return Sweep(
        path=path,
        text=text,
        name=name.strip(),
        command=command,
        program=str(given.get("program", "")),
        method=method,
        metric=_metric(given.get("metric")),
        parameters=parameters,
        runs=_runs(method, parameters, given.get("run_cap")),
        early=hyperband_of(given["early_terminate"]) if "early_terminate" in given else None,
    )


def _hint(name: Any, known: Iterable[str], otherwise: str) -> str:
    near = nearest(str(name), known)
    return f"did you mean {near}?" if near else otherwise


def _check_keys(what: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise Mistake(f"{what} takes no {key!r}; {_hint(key, known, 'it takes ' + ', '.join(known))}")


def _metric(given: Any) -> Metric:
    example = "metric: {name: eval/accuracy_sampled, goal: maximize}"
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise Mistake(f"metric: {given} says not what runs are compared by; write {example}")
    _check_keys("metric:", given, ("name", "goal", "target", "impute", "impute_while_running"))
    goal, target, impute = given.get("goal", "minimize"), given.get("target"), given.get("impute", "worst")
    if goal not in ("minimize", "maximize"):
        raise Mistake(f"metric: goal: {goal}: write maximize or minimize")
    if target is not None and not _is_number(target):
        raise Mistake(f"metric: target: {target!r} must be a number")
    if impute not in IMPUTE:
        raise Mistake(f"metric: impute: {impute}: write {', '.join(IMPUTE)}")
    if given.get("impute_while_running", "false") not in ("false", False):
        raise Mistake("metric: impute_while_running: only W&B's server does that; leave it out")
    return Metric(given["name"], goal == "maximize", "goal" in given, target, impute)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _runs(method: str, parameters: Sequence[Parameter], cap: Any) -> int:
    """Returns how many runs there will be. Raises ValueError."""
    if cap is not None and (type(cap) is not int or cap < 1):
        raise Mistake(f"run_cap: {cap} must be a whole number, 1 or more")
    if method == "grid":
        count = len(grid(parameters))
        if not count:
            raise Mistake("parameters: the grid has no points: a q_uniform has its min, and what lies below its max")
        return min(count, cap or count)
    if all(each.fixed for each in parameters):
        raise Mistake(f"parameters: all of them are fixed, so method: {method} has nothing to choose")
    if cap is None:
        raise Mistake(f"run_cap is missing: method: {method} draws without end; say how many, as in run_cap: 20")
    return cap


def hyperband_of(given: object) -> Hyperband:
    """Reads the node `early_terminate` of a sweep's file.

    Raises:
        ValueError: it is none that W&B takes.
    """
    if not isinstance(given, dict) or given.get("type") != "hyperband":
        raise Mistake(f"early_terminate: {given}: write {{type: hyperband, min_iter: 3}}; W&B has no other type")
    _check_keys("early_terminate: hyperband", given, ("type", "min_iter", "max_iter", "s", "eta", "strict"))
    for key in ("min_iter", "max_iter", "s", "eta"):
        value = given.get(key, 2)
        if not _is_number(value) or not math.isfinite(value) or value <= 0:
            raise Mistake(f"early_terminate: {key}: {value} must be a number above 0")
    eta = given.get("eta", 3)
    if eta <= 1:
        raise Mistake(f"early_terminate: eta: {eta} must be above 1: of the runs that are compared, 1/eta stay")
    if "max_iter" in given and "s" in given:
        places = list(accumulate(repeat(eta, min(int(given["s"]), BANDS)), truediv, initial=given["max_iter"]))[1:]
        if not places or places[0] < 1:
            raise Mistake(
                f"early_terminate: max_iter: {given['max_iter']}, s: {given['s']}, eta: {eta} leave no band; raise max_iter"
            )
    elif "min_iter" in given:
        if given["min_iter"] < 1:
            raise Mistake(f"early_terminate: min_iter: {given['min_iter']} must be 1 or more")
        places = accumulate(repeat(eta, BANDS - 1), mul, initial=given["min_iter"])
    else:
        raise Mistake("early_terminate: hyperband needs min_iter, or max_iter and s")
    bands = sorted(int(place) for place in places if 1 <= place < math.inf)
    return Hyperband(tuple(bands), eta, bool(given.get("strict", True)))


def parameters_of(node: Any, above: tuple[str, ...] = ()) -> list[Parameter]:
    """Reads the node `parameters` of a sweep's file. Returns them sorted by name, the order in which W&B passes them on.

    Raises:
        ValueError: a parameter is none of W&B's, or is one that is not drawn here. The message names it and the fix.
    """
    where = ".".join(("parameters", *above))
    if not isinstance(node, dict) or not node:
        raise Mistake(f"{where}: needs at least one parameter, for instance optimizer.lr: {{values: [1.0e-3, 2.0e-3]}}")
    parameters: list[Parameter] = []
    for key, given in sorted(node.items(), key=lambda item: str(item[0])):
        path = (*above, str(key))
        name = ".".join(path)
        if not isinstance(given, dict):
            example = f"{{values: {given}}}" if isinstance(given, list) else f"{{value: {given}}}"
            raise Mistake(f"parameters: {name}: {given} says not what it is; write {name}: {example}")
        if "parameters" not in given:
            parameters.append(_parameter(path, given))
            continue
        if others := [other for other in given if other != "parameters"]:
            raise Mistake(f"parameters: {name} has `parameters:` and {others[0]!r}; it is a node or a parameter")
        parameters += parameters_of(given["parameters"], path)
    names = [each.name for each in parameters]
    if twice := [name for name in names if names.count(name) > 1]:
        raise Mistake(f"parameters: {twice[0]} is there twice, nested and with a dot; keep one of them")
    return parameters


def _parameter(path: tuple[str, ...], given: dict[str, Any]) -> Parameter:
    where = f"parameters: {'.'.join(path)}"
    kind = given.get("distribution") or _meant(given)
    if kind in ELSEWHERE:
        raise Mistake(f"{where}: distribution: {kind}: {ELSEWHERE[kind]}")
    if kind is None:
        raise Mistake(f"{where}: has no values; write values: [...], value: ..., or min: and max:")
    if kind not in DISTRIBUTIONS:
        hint = _hint(kind, DISTRIBUTIONS, f"there are {', '.join(DISTRIBUTIONS)}")
        raise Mistake(f"{where}: distribution: {kind} is unknown; {hint}")
    needed, optional = DISTRIBUTIONS[kind]
    for key in needed:
        if key not in given:
            raise Mistake(f"{where}: {kind} needs {' and '.join(needed)}; {key} is missing")
    _check_keys(f"{where}: {kind}", given, (*needed, *optional, "distribution"))
    whole = {key: value for key, value in {**optional, **given}.items() if key != "distribution"}
    if isinstance(whole.get("values"), list):
        whole["values"] = [_as_run_reads(value) for value in whole["values"]]
    elif "value" in whole:
        whole["value"] = _as_run_reads(whole["value"])
    _check_numbers(where, kind, whole)
    _check_values(where, whole)
    return Parameter(path, kind, whole)


def _meant(given: dict[str, Any]) -> str | None:
    """Returns the distribution that W&B takes where the file names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical_w_probabilities" if "probabilities" in given else "categorical"
    if "min" in given or "max" in given:
        return "int_uniform" if type(given.get("min")) is type(given.get("max")) is int else "uniform"
    return "normal" if "mu" in given or "sigma" in given else None


def _check_numbers(where: str, kind: str, given: dict[str, Any]) -> None:
    """Raises ValueError for numbers that are no numbers, or that do not go together."""
    for key in ("min", "max", "mu", "sigma", "q"):
        if key in given and not _is_number(given[key]):
            raise Mistake(f"{where}: {key}: {given[key]!r} is no number for YAML{_with_dot(given[key])}")
        if key in given and not math.isfinite(given[key]):
            raise Mistake(f"{where}: {key}: {given[key]} must be finite")
    if kind == "int_uniform" and not (type(given["min"]) is type(given["max"]) is int):
        raise Mistake(f"{where}: min and max of int_uniform are whole numbers; write uniform for others")
    if "min" in given and not given["min"] < given["max"]:
        raise Mistake(f"{where}: min: {given['min']} must be below max: {given['max']}")
    if "log" in kind and "min" in given and given["min"] <= 0:
        raise Mistake(f"{where}: min: {given['min']} of {kind} must be above 0: it has no logarithm")
    if given.get("q", 1) <= 0:
        raise Mistake(f"{where}: q: {given['q']} must be above 0")
    if given.get("sigma", 0) < 0:
        raise Mistake(f"{where}: sigma: {given['sigma']} must be 0 or more")


def _check_values(where: str, given: dict[str, Any]) -> None:
    """Raises ValueError for values that are none, or chances that are not theirs."""
    if "values" not in given:
        return
    values, shares = given["values"], given.get("probabilities")
    if not isinstance(values, list) or not values:
        raise Mistake(f"{where}: values: {values} must be a list with at least one value")
    if "probabilities" in given and (
        not isinstance(shares, list)
        or len(shares) != len(values)
        or not all(isinstance(share, int | float) and share >= 0 for share in shares)
        or not math.isclose(sum(shares), 1.0, abs_tol=1e-6)
    ):
        raise Mistake(f"{where}: probabilities: {shares} must be {len(values)} numbers that sum to 1")


def _as_run_reads(value: Any) -> Any:
    """Returns the number that a run reads where YAML 1.1 sees a text, because 1e-5 has no dot."""
    return float(value) if isinstance(value, str) and _WITHOUT_DOT.fullmatch(value) else value


def _with_dot(value: Any) -> str:
    """Returns how to write a number that YAML takes for a text; "" if it is no number."""
    if not isinstance(value, str) or not _WITHOUT_DOT.fullmatch(value):
        return ""
    mantissa, _, exponent = value.lower().partition("e")
    return f"; write {mantissa}{'' if '.' in mantissa else '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def grid(parameters: Sequence[Parameter]) -> list[Point]:
    """Returns every combination, in W&B's order: the last parameter changes first.

    Raises:
        ValueError: a parameter has endlessly many values, or there are more than MOST points.
    """
    for each in parameters:
        if each.kind not in IN_A_GRID:
            raise Mistake(
                f"parameters: {each.name}: method: grid takes value, values, whole numbers from min to max, q_uniform, and no "
                f"{each.kind}; list its values, or write method: random"
            )
    if (points := math.prod(each.count() for each in parameters)) > MOST:
        raise Mistake(
            f"parameters: the grid has {points:,} points, more than {MOST:,}; list fewer values, or draw: method: random"
        )
    names = [each.name for each in parameters]
    return [dict(zip(names, values, strict=True)) for values in product(*(each.all() for each in parameters))]


def nested(parameters: Sequence[Parameter], point: Point) -> dict[str, Any]:
    """Returns a point as W&B hands it to its agent: parameters that the file nests are one mapping."""
    root: dict[str, Any] = {}
    for each in parameters:
        node = root
        for key in each.path[:-1]:
            node = node.setdefault(key, {})
        node[each.path[-1]] = point[each.name]
    return root


def expanded(command: Sequence[Any], values: Mapping[str, Any], program: str) -> list[str]:
    """Returns the words of the command for one run: W&B's macros, expanded as its agent does.

    macro                                  stands for
    ${args_no_hyphens}                     key=value for each parameter, as the recipes take them
    ${args}                                --key=value
    ${env}, ${interpreter}, ${program}     /usr/bin/env, python, and `program` of the file
    ${envvar:NAME}                         a variable of the environment, also inside a word; without one its name

    Args:
        command: of the sweep's file.
        values: of the parameters, nested ones as one mapping (`nested`).

    Raises:
        ValueError: there is no such macro, or no recipe can read it.
    """
    settings = [f"{name}={value}" for name, value in values.items()]
    macros = {
        "args": [f"--{setting}" for setting in settings],
        "args_no_hyphens": settings,
        "env": ["/usr/bin/env"],
        "interpreter": ["python"],
        "program": [program],
    }
    words = []
    for chunk in command:
        word = _ENVVAR.sub(lambda match: os.environ.get(match[1], match[1]), str(chunk))
        macro = _MACRO.fullmatch(word)
        if macro is None:
            words.append(word)
        elif macro[1] in macros:
            words += macros[macro[1]]
        elif macro[1].removeprefix("args_") in UNREAD:
            raise Mistake(f"command: recipes read no {word}; write ${{args_no_hyphens}}")
        else:
            near = nearest(macro[1], macros)
            hint = f"did you mean ${{{near}}}?" if near else f"there are {', '.join(f'${{{name}}}' for name in macros)}"
            raise Mistake(f"command: {word} is no macro of W&B; {hint}")
    return words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this one; `tune cp sweeps/NAME my_sweep.yaml` copies it")


def main(args: argparse.Namespace) -> int:
    """`torchtune-ext sweeps`: lists our sweeps, or prints one of them. Raises ValueError for an unknown name."""
    if args.name:
        print(sweep_file(args.name).read_text(encoding="utf-8"), end="")
        return 0
    files = sweep_files()
    width = max(map(len, files))
    for name, path in files.items():
        first = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        print(f"{name:<{width}}  {first}")
    return 0
