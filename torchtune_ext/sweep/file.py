"""A sweep as its file says it, in W&B's format: which command, which parameters, which points, which of them stop early."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchtune_ext.run.catalog import config_files, folder
from torchtune_ext.run.errors import Mistake, nearest
from torchtune_ext.sweep.search import Hyperband, hyperband_of, require_optuna
from torchtune_ext.sweep.space import Parameter, grid, parameters_of

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
DEFAULT = ("${env}", "${interpreter}", "${program}", "${args}")  # the command of a file that names none
_ENVVAR = re.compile(r"\$\{envvar\:([A-Z0-9_]*)\}")
_MACRO = re.compile(r"\$\{(.*)\}")


@dataclass(frozen=True, slots=True)
class Metric:
    """What a sweep compares runs by."""

    name: str
    maximize: bool
    has_goal: bool  # whether the file says the goal; W&B minimizes otherwise
    target: float | None  # no further run starts once one has reached it
    impute: str  # one of IMPUTE


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


def sweep_files() -> dict[str, Path]:
    """Returns the files of our sweeps by their names ("sweeps/tiny_lr"), sorted by name."""
    return {name: path for name, path in config_files(folder("configs")).items() if name.startswith("sweeps/")}


def sweep_file(given: str) -> Path:
    """Returns the file of a sweep, which is given by its path, or by its name if it is ours.

    Raises:
        ValueError: there is no such file. The message gives the nearest name.
    """
    ours = sweep_files()
    for name in (given, f"sweeps/{given}"):
        if not Path(given).is_file() and name in ours:
            return ours[name]
    if not Path(given).is_file():
        near = nearest(given, [*ours, *(name.removeprefix("sweeps/") for name in ours)])
        hint = f"did you mean {near}?" if near else "`torchtune-ext sweeps` lists ours"
        raise Mistake(f"{given}: no such file, seen from {Path.cwd()}, and no sweep of ours; {hint}")
    return Path(given)


def read_sweep(path: Path) -> Sweep:
    """Reads a file.

    Raises:
        ValueError: it is no sweep, or none that runs here. The message names the file, the key and the fix.
        ImportError: its method needs Optuna, which is missing.
    """
    try:
        text = path.read_text(encoding="utf-8")
        loaded = yaml.safe_load(text)
        return _sweep(path, text, loaded)
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
            configs = (
                " (this looks like the config of a recipe: a sweep changes some of its keys)" if key == "model" else ""
            )
            hint = f"did you mean {near!r}?" if near else f"a sweep has {', '.join(KEYS)}{configs}"
            raise Mistake(f"unknown key {key!r}; {hint}")
    method = given.get("method")
    if method not in METHODS:
        near = nearest(str(method), METHODS)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(METHODS)}"
        raise Mistake(f"method: {method}: {hint}" if "method" in given else f"method is missing; {hint}")
    if method == "bayes":
        require_optuna()
    command = given.get("command", list(DEFAULT))
    if not isinstance(command, list) or not command:
        raise Mistake(
            "command: must be a list of words: [tune, run, grpo_full, --config, grpo/tiny, '${args_no_hyphens}']"
        )
    parameters = parameters_of(given.get("parameters"))
    early = hyperband_of(given["early_terminate"]) if "early_terminate" in given else None
    return Sweep(
        path=path,
        text=text,
        name=_name(given.get("name", path.stem)),
        command=command,
        program=str(given.get("program", "")),
        method=method,
        metric=_metric(given.get("metric")),
        parameters=parameters,
        runs=_runs(method, parameters, given.get("run_cap")),
        early=early,
    )


def _name(given: Any) -> str:
    if not isinstance(given, str) or not given.strip():
        raise Mistake(f"name: {given!r} must be a text")
    return given.strip()


def _metric(given: Any) -> Metric:
    example = "metric: {name: eval/accuracy_sampled, goal: maximize}"
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise Mistake(f"metric: {given} says not what runs are compared by; write {example}")
    for key in given:
        if key not in ("name", "goal", "target", "impute", "impute_while_running"):
            raise Mistake(f"metric: unknown key {key!r}; it has name, goal, target and impute: {example}")
    goal, target, impute = given.get("goal", "minimize"), given.get("target"), given.get("impute", "worst")
    if goal not in ("minimize", "maximize"):
        raise Mistake(f"metric: goal: {goal}: write maximize or minimize")
    if target is not None and (isinstance(target, bool) or not isinstance(target, int | float)):
        raise Mistake(f"metric: target: {target!r} must be a number")
    if impute not in IMPUTE:
        raise Mistake(f"metric: impute: {impute}: write {', '.join(IMPUTE)}")
    if given.get("impute_while_running", "false") not in ("false", False):
        raise Mistake("metric: impute_while_running: only W&B's server does that; leave it out")
    return Metric(given["name"], goal == "maximize", "goal" in given, target, impute)


def _runs(method: str, parameters: Sequence[Parameter], cap: Any) -> int:
    """Returns how many runs there will be. Raises ValueError."""
    if cap is not None and (type(cap) is not int or cap < 1):
        raise Mistake(f"run_cap: {cap} must be a whole number, 1 or more")
    if method == "grid":
        count = len(grid(list(parameters)))
        if not count:
            raise Mistake("parameters: the grid has no points: a q_uniform has its min, and what lies below its max")
        return min(count, cap or count)
    if all(each.fixed for each in parameters):
        raise Mistake(f"parameters: all of them are fixed, so method: {method} has nothing to choose")
    if cap is None:
        raise Mistake(f"run_cap is missing: method: {method} draws without end; say how many, as in run_cap: 20")
    return cap


# The command of a run, from the command of a sweep: W&B's macros, expanded as its agent does.
#
# macro                                  stands for
# ${args_no_hyphens}                     key=value for each parameter, as the recipes take them
# ${args}, ${args_no_boolean_flags}      --key=value; of true and false only --key, or nothing
# ${args_no_equals}                      --key value, as two words
# ${args_json}, ${args_json_file}        all parameters as JSON, or the path of a file with it
# ${args_append_hydra}, ${args_override_hydra}   +key=value, ++key=value
# ${env}, ${interpreter}, ${program}     /usr/bin/env, python, and `program` of the file
# ${envvar:NAME}                         a variable of the environment, also inside a word; without one its name
def expanded(command: Sequence[Any], values: dict[str, Any], program: str, json_file: str) -> list[str]:
    """Returns the words of the command for one run.

    Args:
        command: of the sweep's file.
        values: of the parameters, nested ones as one mapping (`space.nested`).
        json_file: path of the file that has them as JSON; the caller writes it where the command names it.

    Raises:
        ValueError: there is no such macro.
    """
    flags = {name: f"{name}={value}" for name, value in values.items()}
    macros = {
        "args": [f"--{flag}" for flag in flags.values()],
        "args_no_hyphens": list(flags.values()),
        "args_no_equals": [word for name, value in values.items() for word in (f"--{name}", str(value))],
        "args_no_boolean_flags": [
            f"--{name if values[name] is True else flag}" for name, flag in flags.items() if values[name] is not False
        ],
        "args_json": [json.dumps(values)],
        "args_json_file": [json_file],
        "args_append_hydra": [f"+{flag}" for flag in flags.values()],
        "args_override_hydra": [f"++{flag}" for flag in flags.values()],
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
        else:
            near = nearest(macro[1], macros)
            hint = f"did you mean ${{{near}}}?" if near else f"there are {', '.join(f'${{{name}}}' for name in macros)}"
            raise Mistake(f"command: {word} is no macro of W&B; {hint}")
    return words
