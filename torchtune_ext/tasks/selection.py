"""Selects problems near the policy's level: zero-variance groups lower a problem's probability.

A zero-variance group, whose rewards are all equal, has no training signal. (With
`advantage.credit: turn`, the rewards of turns may differ although their sums are equal. Such a
group counts as a zero-variance group here.) A problem may be drawn again within an epoch, even
within a step. For each problem, or each level of a task that generates problems, s is a moving
average of the fraction of groups with a signal. It is the sampling weight:

    s <- s + rate * (1 - s)      after a group with a signal
    s <- s - rate * s            after a zero-variance group; s starts at 1
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

# A level has several groups per step, so its average covers about the last ten groups. A single
# problem has about one group per epoch.
LEVEL_RATE = 0.1
PROBLEM_RATE = 0.5
MAX_DRAWS = 100  # draws per position, after which the last problem is used regardless of its weight
# Methods whose first argument is a problem.
PROBLEM_METHODS = ("grade", "grade_group", "solution", "environment")


class NearLevel:
    """An `AdaptiveTask` that samples another task's problems, weighted by their training signal.

    Args:
        task: dotted path of the task.
        settings: arguments of the task.
        levels: further arguments for each level of a task that generates problems. None: the task
            has a limited number of problems, and each problem has its own weight.
        floor: the lowest weight; a problem that always has a signal has weight 1.
        seed: seed of the draws.

    Raises:
        UsageError: the task is not found, is adaptive or self-grading, has only one problem, is
            endless without levels, or an argument is out of range.
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
            raise UsageError(f"floor={floor}: expected a fraction of the highest weight, above 0 and at most 1")
        several = isinstance(levels, Sequence) and all(isinstance(level, Mapping) for level in levels)
        if levels is not None and (not several or len(levels) < 2):
            raise UsageError(f"levels={levels}: expected null, or two or more mappings of settings")
        task_factory = import_named(task, "task", "class", "my_task.Sums")
        settings_by_level = [{**(settings or {}), **level} for level in levels or [{}]]
        signature = inspect.signature(task_factory)
        for given in settings_by_level:
            try:
                signature.bind(**given)
            except TypeError as error:
                # Without this check, the message would name the arguments of this class.
                known = ", ".join(signature.parameters)
                raise UsageError(f"settings and levels: {task} got {given}: {error}; expected {known}") from error
        self._tasks = [task_factory(**given) for given in settings_by_level]
        first = self._tasks[0]
        for method, what in (("observe", "chooses its problems"), ("open_grader", "is graded")):
            if hasattr(first, method):
                raise UsageError(f"task={task} {what} by itself already. Fix: use it as the task, without NearLevel")
        if levels is None and not 1 < len(first) <= SHUFFLE_LIMIT:
            number = "one problem" if len(first) == 1 else f"{len(first):,} problems"
            raise UsageError(f"task={task} has {number}. Fix: set levels, such as levels=[{{level: 1}},{{level: 2}}]")
        # The ids of problems start with these names, up to the first slash.
        self._levels = [(name or "default").replace("/", "-") for name in level_names(levels or ())]
        if len(set(self._levels)) < len(self._levels):
            raise UsageError(f"levels={list(levels or ())}: two levels are equal. Fix: remove one")
        self._floor, self._seed = floor, seed
        self._signal_rates: dict[str, float] = {}  # s of each level, or of each problem id

    def __len__(self) -> int:
        return min(map(len, self._tasks))

    def __getitem__(self, index: int) -> Problem:
        # Outside of a run, the levels alternate.
        return self._problem(index % len(self._tasks), index)

    def __getattr__(self, name: str) -> Any:
        # Optional attributes of a task, such as `environment`, exist only if the wrapped task has
        # them. Private names are rejected, since unpickling looks some up before `_tasks` exists.
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._tasks[0], name)
        # A wrapped method keeps its module, which tells whether the grader is the user's.
        return update_wrapper(partial(self._call_task_method, name), value) if name in PROBLEM_METHODS else value

    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index` of a level drawn by weight.

        Without levels, returns problem `index`, or another problem if it is rejected by weight.
        """
        rng = random.Random(f"selection/{self._seed}/{cursor}")
        if self._levels:
            (level,) = rng.choices(range(len(self._levels)), [self._weight(name) for name in self._levels])
            return self._problem(level, index)
        # Rejection sampling: a problem is accepted with its weight as the probability.
        problem = self._problem(0, index)
        for _ in range(MAX_DRAWS - 1):
            if rng.random() < self._weight(problem.id):
                break
            problem = self._problem(0, rng.randrange(len(self)))
        return problem

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Updates the moving averages.

        Returns:
            The average of each level; without levels, the fraction of seen problems at the floor.
        """
        rate = LEVEL_RATE if self._levels else PROBLEM_RATE
        for problem, samples in groups:
            rewards = [score.reward for _, score, _ in samples if score is not None]
            name = problem.id.partition("/")[0] if self._levels else problem.id
            # A single reward cannot differ from others, so it has no information.
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
        """Restores a `state_dict`. Raises UsageError if it has different levels."""
        if state["levels"] != self._levels:
            raise UsageError(
                f"task.levels: {self._levels or 'none'}, but the checkpoint was written with {state['levels'] or 'none'}. "
                "Fix: use the checkpoint's levels, or start a new run in another output_dir"
            )
        self._signal_rates = dict(state["signal"])

    def _weight(self, name: str) -> float:
        # The floor keeps every problem in the mixture: solved problems are not forgotten, and
        # problems that were too hard are tried again.
        return max(self._floor, self._signal_rates.get(name, 1.0))

    def _problem(self, level: int, index: int) -> Problem:
        problem = self._tasks[level][index]
        return replace(problem, id=f"{self._levels[level]}/{problem.id}") if self._levels else problem

    def _call_task_method(self, method: str, problem: Problem, *rest: Any) -> Any:
        """Calls a method of the task that created the problem, with the problem's original id."""
        if not self._levels:
            return getattr(self._tasks[0], method)(problem, *rest)
        name, _, own = problem.id.partition("/")
        return getattr(self._tasks[self._levels.index(name)], method)(replace(problem, id=own), *rest)


def level_names(levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names levels by the settings in which they differ.

    Examples: "level=4", "suspects=2,rooms=3", or "gcd" if only one level has the key.
    """
    words = [[] for _ in levels]
    for key in dict.fromkeys(key for level in levels for key in level):
        values = [level[key] for level in levels if key in level]
        if len(values) == len(levels) and all(isinstance(value, Mapping) for value in values):
            parts = level_names(values)
        elif values.count(values[0]) == len(levels):
            continue
        else:
            # A generator's options are too long for a name; a key of only one level is enough.
            short = len(values) == 1 and (values[0] is None or isinstance(values[0], Mapping))
            parts = [(key if short else f"{key}={level[key]}") if key in level else "" for level in levels]
        for mine, part in zip(words, parts, strict=True):
            mine += [part] * bool(part)
    return [",".join(mine) for mine in words]
