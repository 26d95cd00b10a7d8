"""Imports the functions that replace a task's `grade` (arguments `grader` and `group_grader`)."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchtune_ext.run import catalog
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import Problem, Score, to_score

GradeFunction = Callable[[Problem, str], float | Score]  # grades one text
# Grades all texts of a problem, in order.
GroupGradeFunction = Callable[[Problem, list[str]], list[float | Score]]


@dataclass(init=False)
class CombinedGrader:
    """Grades a text with several functions. The reward is the sum of their rewards.

    Each reward is also a part named by its function. If one function fails, the text is ungraded.

    Args:
        graders: the functions, or their dotted paths, by name.

    Raises:
        UsageError: `graders` is not a mapping with at least one function, or a function is not found.
    """

    functions: dict[str, GradeFunction]

    def __init__(self, graders: Mapping[str, str | GradeFunction]) -> None:
        if not isinstance(graders, Mapping) or not graders:
            raise UsageError(
                f"graders={graders!r}: expected names and functions. Fix: write graders.correct=my_reward.f"
            )
        self.functions = {
            str(name): import_grader(given, f"graders.{name}", "text") if isinstance(given, str) else given
            for name, given in graders.items()
        }

    def __call__(self, problem: Problem, text: str) -> Score:
        """Returns the score of a text. Errors of the functions are raised unchanged.

        Raises:
            UsageError: a function returned neither a number nor a Score.
        """
        scores = {}
        for name, function in self.functions.items():
            value = function(problem, text)
            try:
                scores[name] = to_score(value)
            except UsageError as error:
                raise UsageError(f"{describe_function(function)} returned {error}") from None
        rewards = {name: score.reward for name, score in scores.items()}
        parts = {name: part for score in scores.values() for name, part in score.parts.items()}
        facts = {name: fact for score in scores.values() for name, fact in score.facts.items()}
        note = "\n".join(f"{name}: {score.note}" for name, score in scores.items() if score.note)
        return Score(sum(rewards.values()), parts | rewards, note, facts)


def use_graders(task: Any, grader: str | GradeFunction | None, group_grader: str | GroupGradeFunction | None) -> None:
    """Sets the user's functions as `task.grade` and `task.grade_group`.

    Args:
        grader: a function (problem, text), or its dotted path.
        group_grader: a function (problem, texts), or its dotted path.

    Raises:
        UsageError: both are given, the task defines `grade_group`, or a function is not found.
    """
    # A task with `grade_group` never calls `grade`, so a `grader` would have no effect.
    if grader is not None and (group_grader is not None or hasattr(task, "grade_group")):
        other = (
            "grade_group of its own" if group_grader is None else f"group_grader={describe_function(group_grader)!r}"
        )
        raise UsageError(
            f"grader={describe_function(grader)!r}, but {type(task).__name__} also has {other}, which grades all "
            "texts of a problem in one call. Fix: keep one of the two"
        )
    if grader is not None:
        task.grade = import_grader(grader, "grader", "text") if isinstance(grader, str) else grader
    if group_grader is not None:
        given = group_grader
        task.grade_group = import_grader(given, "group_grader", "texts") if isinstance(given, str) else given


def import_grader(path: str, key: str, what: str) -> Callable:
    """Imports the function "MODULE.FUNCTION".

    Args:
        key: argument of the task, for messages.
        what: name of the function's second argument, for messages.

    Raises:
        UsageError: the function is not found (`import_named`), or does not take two arguments.
    """
    setting = f"{key}={path!r}"
    function = import_named(path, key, "function", "my_reward.f")
    if not callable(function):
        raise UsageError(f"{setting} is a {type(function).__name__}; expected a function f(problem, {what})")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions of C libraries may have no signature.
        return function
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(f"{setting} takes {signature}; expected two arguments, f(problem, {what})") from error
    if next(iter(signature.parameters)) == "answer":
        # A function (answer, text) would compare the text with a `Problem`, and reward no answer.
        raise UsageError(
            f"{setting}: its first parameter is `answer`; expected `problem`. Fix: write f(problem, {what}), and use "
            "problem.answer"
        )
    return function


def import_named(path: str, key: str, kind: str, example: str) -> Any:
    """Imports the object "MODULE.NAME". The working directory is searched, too.

    Args:
        key: argument of the task, for messages.
        kind: "function" or "class", for messages.
        example: a dotted path, for messages.

    Raises:
        UsageError: the object is not found, or its module raises an error.
    """
    # Some users write a call, "f()", or the path of a file.
    setting, path = f"{key}={path!r}", path.removesuffix("()")
    if "." not in path or path.endswith(".py") or "/" in path or ":" in path:
        file, _, its_name = example.partition(".")
        raise UsageError(
            f"{setting}: not a dotted path. Fix: write FILE.{kind.upper()}, {key}={example} for the {kind} {its_name} of "
            f"{file}.py"
        )
    return catalog.import_object(path, setting)


def is_builtin(function: Callable | None) -> bool:
    """Tells whether a function or method is defined in this package."""
    if isinstance(function, CombinedGrader):
        return all(map(is_builtin, function.functions.values()))
    return (getattr(function, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]


def describe_function(function: str | Callable) -> str:
    """Returns the name of a function, with file and line: "my_reward.short (my_reward.py:3)"."""
    if isinstance(function, str):
        return function
    if isinstance(function, CombinedGrader):
        return " + ".join(map(describe_function, function.functions.values()))
    # Methods and decorators wrap the function that has a file and a line.
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        return getattr(function, "__qualname__", type(function).__qualname__)
    module = "" if plain.__module__ == "__main__" else f"{plain.__module__}."
    code = plain.__code__
    return f"{module}{plain.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
