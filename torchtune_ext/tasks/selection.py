"""Problems near the policy's level: what brought no signal lately is asked less often.

A group whose rewards are all equal teaches nothing. (With `advantage.credit: turn` rewards of turns may differ where their
sums do not; such a group counts as one without a signal here.) A problem may be drawn again within an epoch, even within a
step. For each problem, or each level of a task that makes its problems,
s is a moving average of the share of groups with a signal, and decides how often it is asked:

    s <- s + rate * (1 - s)   or   s - rate * s      after a group with a signal, or without; it begins at 1
    weight = max(floor, s)

    task:
      _component_: torchtune_ext.tasks.selection.NearLevel
      task: torchtune_ext.tasks.arithmetic.Arithmetic
      settings: {seed: 2}
      levels: [{level: 1}, {level: 4}, {level: 7}]      # null: each problem by itself
"""

import inspect
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.grade_functions import import_named
from torchtune_ext.tasks.problem_stream import SHUFFLE_LIMIT
from torchtune_ext.tasks.task import GradedGroup, Problem

# A level has several groups in a step, so about its last ten count. A problem comes about once in an epoch.
LEVEL_RATE = 0.1
PROBLEM_RATE = 0.5
MAX_DRAWS = 100  # problems drawn for a place, after which the last one is asked, whatever its weight
PROBLEM_METHODS = ("grade", "grade_group", "solution", "environment")  # methods whose first argument is a problem


class NearLevel:
    """An `AdaptiveTask` that asks another task's problems, those with a signal more often.

    Args:
        task: dotted path of the task.
        settings: its arguments.
        levels: further arguments for each level of a task that makes its problems. None: the task has a limited number
            of problems, and each is followed on its own.
        floor: the lowest weight; a problem that always has a signal has weight 1.
        seed: seed of the draws.

    Raises:
        ValueError: there is no such task, it adapts or grades by itself, has only one problem, is endless without
            levels, or a setting is out of range.
    """

    def __init__(
        self,
        task: str,
        settings: Mapping[str, Any] | None = None,
        levels: Sequence[Mapping[str, Any]] | None = None,
        floor: float = 0.1,
        seed: int = 0,
    ) -> None:
        if not 0 < floor <= 1:
            raise UsageError(f"floor={floor} is a share of the highest weight: give a number above 0 and up to 1")
        several = isinstance(levels, Sequence) and all(isinstance(level, Mapping) for level in levels)
        if levels is not None and (not several or len(levels) < 2):
            raise UsageError(f"levels={levels}: give two or more, each with settings of its own, or null")
        task_factory = import_named(task, "task", "class", "my_task.Sums")
        settings_by_level, signature = (
            [{**(settings or {}), **level} for level in levels or [{}]],
            inspect.signature(task_factory),
        )
        for given in settings_by_level:
            try:
                signature.bind(**given)
            except TypeError as error:
                # Otherwise the message would name the arguments of this class.
                known = ", ".join(signature.parameters)
                raise UsageError(f"settings and levels: {task} got {given}: {error}; it takes {known}") from error
        self._tasks = [task_factory(**given) for given in settings_by_level]
        first = self._tasks[0]
        for method, what in (("observe", "chooses its problems"), ("open_grader", "is graded")):
            if hasattr(first, method):
                raise UsageError(f"task={task} {what} by itself already: name it as the task, without NearLevel")
        if levels is None and not 1 < len(first) <= SHUFFLE_LIMIT:
            number = "one problem" if len(first) == 1 else f"{len(first):,} problems"
            raise UsageError(
                f"task={task} has {number}: give levels to choose from, as levels=[{{level: 1}},{{level: 2}}]"
            )
        # Ids of problems begin with these names, up to the first slash.
        self._levels = [(name or "default").replace("/", "-") for name in level_names(levels or ())]
        if len(set(self._levels)) < len(self._levels):
            raise UsageError(f"levels={list(levels or ())}: two of them are the same")
        self._floor, self._seed = floor, seed
        self._signal_rates: dict[str, float] = {}  # s by level, or by id of a problem

    def __len__(self) -> int:
        return min(map(len, self._tasks))

    def __getitem__(self, index: int) -> Problem:
        # Without a run, the levels take turns.
        return self._problem(index % len(self._tasks), index)

    def __getattr__(self, name: str) -> Any:
        # What a task may lack, such as `environment`, this one has only if the other has it. Private names are refused,
        # since unpickling asks for some before `_tasks` exists.
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._tasks[0], name)
        # A wrapped method keeps its module, which says whether its grader is the user's.
        return update_wrapper(partial(self._call_task_method, name), value) if name in PROBLEM_METHODS else value

    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index` of a level drawn by weight; without levels, problem `index` or another one."""
        rng = random.Random(f"selection/{self._seed}/{cursor}")
        if self._levels:
            (level,) = rng.choices(range(len(self._levels)), [self._weight(name) for name in self._levels])
            return self._problem(level, index)
        # Rejection sampling: a problem is taken with its weight as the probability.
        problem = self._problem(0, index)
        for _ in range(MAX_DRAWS - 1):
            if rng.random() < self._weight(problem.id):
                break
            problem = self._problem(0, rng.randrange(len(self)))
        return problem

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Updates the signals. Returns that of each level, or the share of problems so far that are at the floor."""
        rate = LEVEL_RATE if self._levels else PROBLEM_RATE
        for problem, samples in groups:
            rewards = [score.reward for _, score, _ in samples if score is not None]
            name = problem.id.partition("/")[0] if self._levels else problem.id
            # A single reward cannot differ from others, so it says nothing.
            if len(rewards) > 1 and (name in self._levels or not self._levels):
                before = self._signal_rates.get(name, 1.0)
                self._signal_rates[name] = before + rate * (float(min(rewards) < max(rewards)) - before)
        if self._levels:
            return {f"selection/{name}": self._signal_rates.get(name, 1.0) for name in self._levels}
        settled = [signal <= self._floor for signal in self._signal_rates.values()]
        return {"selection/settled": sum(settled) / max(1, len(settled))}

    def state_dict(self) -> dict[str, Any]:
        return {"levels": self._levels, "signal": dict(self._signal_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state_dict`. Raises ValueError if it has other levels."""
        if state["levels"] != self._levels:
            raise UsageError(
                f"task.levels: {self._levels or 'none'}, but the checkpoint was written with {state['levels'] or 'none'}; use "
                "these, or begin a new run in another output_dir"
            )
        self._signal_rates = dict(state["signal"])

    def _weight(self, name: str) -> float:
        # The floor keeps everything in play: what was solved is not forgotten, and what was too hard is tried again.
        return max(self._floor, self._signal_rates.get(name, 1.0))

    def _problem(self, level: int, index: int) -> Problem:
        problem = self._tasks[level][index]
        return replace(problem, id=f"{self._levels[level]}/{problem.id}") if self._levels else problem

    def _call_task_method(self, method: str, problem: Problem, *rest: Any) -> Any:
        """Calls a method of the task that made a problem, which gets its own id back."""
        if not self._levels:
            return getattr(self._tasks[0], method)(problem, *rest)
        name, _, own = problem.id.partition("/")
        return getattr(self._tasks[self._levels.index(name)], method)(replace(problem, id=own), *rest)


def level_names(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names levels by the settings in which they differ: "level=4", "suspects=2,rooms=3", "gcd" if only one has it."""
    words = [[] for _ in levels]
    for key in dict.fromkeys(key for level in levels for key in level):
        values = [level[key] for level in levels if key in level]
        if len(values) == len(levels) and all(isinstance(value, Mapping) for value in values):
            parts = level_names(values)
        elif values.count(values[0]) == len(levels):
            continue
        else:
            # The options of a generator would make a long name. If only one level has that key, the key is enough.
            short = len(values) == 1 and (values[0] is None or isinstance(values[0], Mapping))
            parts = [(key if short else f"{key}={level[key]}") if key in level else "" for level in levels]
        for mine, part in zip(words, parts, strict=True):
            mine += [part] * bool(part)
    return [",".join(mine) for mine in words]
