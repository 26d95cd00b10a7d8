"""The parameters of a sweep: what the file says of each, and which values it may have.

A parameter that is drawn has a value for every u in [0, 1], its quantile (`Parameter.at`). So a random search draws u, and a
search that learns looks for a good u, whatever the distribution is. The values are those of W&B's own search.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from statistics import NormalDist
from typing import Any

from torchtune_ext.run.errors import Mistake, nearest

Point = dict[str, Any]  # the value of every parameter of one run, by its dotted name

# The keys of each distribution: those that it needs, and those that it may have, with their defaults.
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "constant": (("value",), {}),
    "categorical": (("values",), {}),
    "categorical_w_probabilities": (("values", "probabilities"), {}),
    "int_uniform": (("min", "max"), {}),
    "uniform": (("min", "max"), {}),
    "q_uniform": (("min", "max"), {"q": 1}),
    "log_uniform_values": (("min", "max"), {}),
    "q_log_uniform_values": (("min", "max"), {"q": 1}),
    "inv_log_uniform_values": (("min", "max"), {}),
    "normal": ((), {"mu": 0.0, "sigma": 1.0}),
    "q_normal": ((), {"mu": 0.0, "sigma": 1.0, "q": 1}),
    "log_normal": ((), {"mu": 0.0, "sigma": 1.0}),
    "q_log_normal": ((), {"mu": 0.0, "sigma": 1.0, "q": 1}),
}
# What W&B knows and we do not take, each with what to write.
ELSEWHERE = {
    "beta": "only W&B's own server draws from it; write uniform, or normal",
    "q_beta": "only W&B's own server draws from it; write q_uniform, or q_normal",
    "log_uniform": "its limits are exponents, and W&B has retired it; write log_uniform_values, whose limits are the values",
    "q_log_uniform": "its limits are exponents, and W&B has retired it; write q_log_uniform_values",
    "inv_log_uniform": "its limits are exponents, and W&B has retired it; write inv_log_uniform_values",
}
_WITHOUT_DOT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
MOST = 10_000  # points of a grid
IN_A_GRID = ("constant", "categorical", "int_uniform", "q_uniform")


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
        given, kind = self.given, self.kind.removeprefix("q_")
        if kind == "constant":
            return given["value"]
        if kind == "categorical":
            return given["values"][_place(u, len(given["values"]))]
        if kind == "categorical_w_probabilities":
            below = 0.0
            for value, share in zip(given["values"], given["probabilities"], strict=True):
                below += share
                if u < below:
                    return value
            return next(
                v for v, share in zip(given["values"][::-1], given["probabilities"][::-1], strict=True) if share
            )
        if kind == "int_uniform":
            return given["min"] + _place(u, given["max"] - given["min"] + 1)
        return self._rounded(self._drawn(kind, u))

    def _drawn(self, kind: str, u: float) -> float:
        given = self.given
        if kind in ("normal", "log_normal"):
            # The ends of the bell are endless.
            inside = min(max(u, 1e-9), 1 - 1e-9)
            z = given["mu"] + given["sigma"] * NormalDist().inv_cdf(inside)
            return math.exp(z) if kind == "log_normal" else z
        low, high = given["min"], given["max"]
        if kind == "uniform":
            return low + u * (high - low)
        if kind == "log_uniform_values":
            return min(max(math.exp(math.log(low) + u * (math.log(high) - math.log(low))), low), high)
        # 1/x is log-uniform between 1/max and 1/min, and small x come first.
        return min(max(math.exp(-(-math.log(high) + (1 - u) * (math.log(high) - math.log(low)))), low), high)

    def _rounded(self, value: float) -> float:
        q = self.given.get("q")
        if q is None:
            return value
        # 0.30000000000000004 does not read as a multiple of 0.1.
        steps = round(value / q)
        return steps * q if isinstance(q, int) else float(f"{steps * q:.12g}")

    def count(self) -> int:
        """Returns how many values a grid has."""
        given = self.given
        if self.kind == "int_uniform":
            return given["max"] - given["min"] + 1
        if self.kind == "q_uniform":
            return max(0, math.ceil(round((given["max"] - given["min"]) / given["q"], 9)))
        return len(self.all())

    def all(self) -> list[Any]:
        """Returns every value that a grid has, as W&B does: for q_uniform from min to below max."""
        given = self.given
        if self.kind == "constant":
            return [given["value"]]
        if self.kind == "int_uniform":
            return list(range(given["min"], given["max"] + 1))
        if self.kind == "q_uniform":
            return [float(f"{given['min'] + i * given['q']:.12g}") for i in range(self.count())]
        # A value that is named twice is one point.
        return list({_key(value): value for value in given["values"]}.values())


def _place(u: float, count: int) -> int:
    """Returns which of `count` equally likely values the quantile u is, from 0."""
    return min(max(math.ceil(u * count) - 1, 0), count - 1)


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
            values = given if isinstance(given, list) else [given]
            example = f"{{values: {values}}}" if isinstance(given, list) else f"{{value: {given}}}"
            raise Mistake(f"parameters: {name}: {given} says not what it is; write {name}: {example}")
        if "parameters" in given:
            if others := [other for other in given if other != "parameters"]:
                raise Mistake(f"parameters: {name} has `parameters:` and {others[0]!r}; it is a node or a parameter")
            parameters += parameters_of(given["parameters"], path)
        else:
            parameters.append(_parameter(path, given))
    if not above and len({each.name for each in parameters}) < len(parameters):
        names = [each.name for each in parameters]
        twice = next(name for name in names if names.count(name) > 1)
        raise Mistake(f"parameters: {twice} is there twice, nested and with a dot; keep one of them")
    return parameters


def _parameter(path: tuple[str, ...], given: dict[str, Any]) -> Parameter:
    name = ".".join(path)
    kind = given.get("distribution") or _meant(given)
    if kind in ELSEWHERE:
        raise Mistake(f"parameters: {name}: distribution: {kind}: {ELSEWHERE[kind]}")
    if kind not in DISTRIBUTIONS:
        near = nearest(str(kind), DISTRIBUTIONS)
        problem = f"distribution: {kind} is unknown" if "distribution" in given else "has no values"
        hint = f"did you mean {near}?" if near else f"there are {', '.join(DISTRIBUTIONS)}"
        fix = hint if "distribution" in given else "write values: [...], value: ..., or min: and max:"
        raise Mistake(f"parameters: {name}: {problem}; {fix}")
    needed, optional = DISTRIBUTIONS[kind]
    for key in needed:
        if key not in given:
            raise Mistake(f"parameters: {name}: {kind} needs {' and '.join(needed)}; {key} is missing")
    for key in given:
        if key not in (*needed, *optional, "distribution"):
            near = nearest(str(key), [*needed, *optional])
            hint = f"did you mean {near}?" if near else f"it takes {', '.join((*needed, *optional))}"
            raise Mistake(f"parameters: {name}: {kind} takes no {key!r}; {hint}")
    whole = {key: value for key, value in {**optional, **given}.items() if key != "distribution"}
    if isinstance(whole.get("values"), list):
        whole["values"] = [_as_run_reads(value) for value in whole["values"]]
    elif "value" in whole:
        whole["value"] = _as_run_reads(whole["value"])
    _check(name, kind, whole)
    return Parameter(path, kind, whole)


def _meant(given: dict[str, Any]) -> str | None:
    """Returns the distribution that W&B takes where the file names none."""
    if "value" in given:
        return "constant"
    if "values" in given:
        return "categorical_w_probabilities" if "probabilities" in given else "categorical"
    if "min" in given or "max" in given:
        both = (given.get("min"), given.get("max"))
        return "int_uniform" if all(type(each) is int for each in both) else "uniform"
    return "normal" if "mu" in given or "sigma" in given else None


def _check(name: str, kind: str, given: dict[str, Any]) -> None:
    """Raises ValueError for numbers that are no numbers, or that do not go together."""
    for key in ("min", "max", "mu", "sigma", "q"):
        if key in given and (isinstance(given[key], bool) or not isinstance(given[key], int | float)):
            hint = _as_number(given[key])
            raise Mistake(f"parameters: {name}: {key}: {given[key]!r} is no number for YAML{hint}")
        if key in given and not math.isfinite(given[key]):
            raise Mistake(f"parameters: {name}: {key}: {given[key]} must be finite")
    if kind == "int_uniform" and not (type(given["min"]) is type(given["max"]) is int):
        raise Mistake(f"parameters: {name}: min and max of int_uniform are whole numbers; write uniform for others")
    if "min" in given and not given["min"] < given["max"]:
        raise Mistake(f"parameters: {name}: min: {given['min']} must be below max: {given['max']}")
    if "log" in kind and "min" in given and given["min"] <= 0:
        raise Mistake(f"parameters: {name}: min: {given['min']} of {kind} must be above 0: it has no logarithm")
    if "q" in given and given["q"] <= 0:
        raise Mistake(f"parameters: {name}: q: {given['q']} must be above 0")
    if given.get("sigma", 0) < 0:
        raise Mistake(f"parameters: {name}: sigma: {given['sigma']} must be 0 or more")
    if "values" in given:
        values, shares = given["values"], given.get("probabilities")
        if not isinstance(values, list) or not values:
            raise Mistake(f"parameters: {name}: values: {values} must be a list with at least one value")
        if shares is not None and (
            not isinstance(shares, list)
            or len(shares) != len(values)
            or not all(isinstance(share, int | float) and share >= 0 for share in shares)
            or not math.isclose(sum(shares), 1.0, abs_tol=1e-6)
        ):
            raise Mistake(f"parameters: {name}: probabilities: {shares} must be {len(values)} numbers that sum to 1")


def _as_run_reads(value: Any) -> Any:
    """Returns the number that a run reads where YAML 1.1 sees a text, because 1e-5 has no dot."""
    return float(value) if isinstance(value, str) and _WITHOUT_DOT.fullmatch(value) else value


def _as_number(value: Any) -> str:
    """Returns how to write a number that YAML takes for a text; "" if it is no number."""
    if not isinstance(value, str) or not _WITHOUT_DOT.fullmatch(value):
        return ""
    mantissa, _, exponent = value.lower().partition("e")
    return f"; write {mantissa}{'' if '.' in mantissa else '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def _key(value: Any) -> str:
    """Returns what is the same for values that W&B takes for the same, as 2 and 2.0."""
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True, default=str)


def grid(parameters: list[Parameter]) -> list[Point]:
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


def nested(parameters: list[Parameter], point: Point) -> dict[str, Any]:
    """Returns a point as W&B hands it to its agent: parameters that the file nests are one mapping."""
    root: dict[str, Any] = {}
    for each in parameters:
        node = root
        for key in each.path[:-1]:
            node = node.setdefault(key, {})
        node[each.path[-1]] = point[each.name]
    return root
