"""Functions that grade in place of a task's own `grade`. The arguments `grader` and `group_grader` name them."""

import inspect
import os
from collections.abc import Callable
from typing import Any

from torchtune_ext.run import catalog
from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.task import Problem, Score

GradeFunction = Callable[[Problem, str], float | Score]  # grades one text
GroupGradeFunction = Callable[
    [Problem, list[str]], list[float | Score]
]  # grades all texts of a problem, in their order


def use_graders(task: Any, grader: str | GradeFunction | None, group_grader: str | GroupGradeFunction | None) -> None:
    """Sets a function (problem, text) or (problem, texts), or its dotted path, as `task.grade` or `task.grade_group`.

    Raises:
        ValueError: both are given, the task has a `grade_group` of its own, or `by_path` finds no function.
    """
    # The grader calls `grade_group` where a task has one, so a `grader` beside it would never be called.
    if grader is not None and (group_grader is not None or hasattr(task, "grade_group")):
        other = (
            "grade_group of its own" if group_grader is None else f"group_grader={describe_function(group_grader)!r}"
        )
        raise UsageError(
            f"grader={describe_function(grader)!r}, but {type(task).__name__} is given {other}, which grades all texts of a problem "
            "together: keep one of the two"
        )
    if grader is not None:
        task.grade = import_grader(grader, "grader", "text") if isinstance(grader, str) else grader
    if group_grader is not None:
        given = group_grader
        task.grade_group = import_grader(given, "group_grader", "texts") if isinstance(given, str) else given


def import_grader(path: str, key: str, what: str) -> Callable:
    """Returns the function that "MODULE.FUNCTION" names.

    For messages, `key` is the argument of the task, and `what` the function's second one. Raises ValueError as `named`,
    or if the function does not take two arguments.
    """
    setting = f"{key}={path!r}"
    function = import_named(path, key, "function", "my_reward.f")
    if not callable(function):
        raise UsageError(f"{setting} is a {type(function).__name__}; name a function f(problem, {what})")
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Functions of C libraries may have no signature.
        return function
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(f"{setting} takes {signature}; it must take two arguments, f(problem, {what})") from error
    if next(iter(signature.parameters)) == "answer":
        # A function (answer, text) would compare the text with a `Problem`, and find every answer wrong.
        raise UsageError(
            f"{setting} takes an answer first, but it is given the problem: f(problem, {what}), and problem.answer"
        )
    return function


def import_named(path: str, key: str, kind: str, example: str) -> Any:
    """Returns what "MODULE.NAME" names.

    The working directory is searched, too. For messages, `key` is the argument, `kind` is "function" or "class", and
    `example` a path. Raises ValueError if there is none, or its file fails.
    """
    # Some users write a call, f(), or the path of a file.
    setting, path = f"{key}={path!r}", path.removesuffix("()")
    if "." not in path or path.endswith(".py") or "/" in path or ":" in path:
        file, _, its_name = example.partition(".")
        raise UsageError(
            f"{setting}: write FILE.{kind.upper()}, {key}={example} for the {kind} {its_name} of {file}.py"
        )
    return catalog.import_object(path, setting)


def is_shipped(function: Callable | None) -> bool:
    """Tells whether a function or method belongs to this package, and not to the user."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] == __name__.partition(".")[0]


def describe_function(function: str | Callable) -> str:
    """Returns the name of a function, with its file and line if it has them: "my_reward.short (my_reward.py:3)"."""
    if isinstance(function, str):
        return function
    # A method and a decorator hide the function that has a file and a line.
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not inspect.isfunction(plain):
        return getattr(function, "__qualname__", type(function).__qualname__)
    module = "" if plain.__module__ == "__main__" else f"{plain.__module__}."
    code = plain.__code__
    return f"{module}{plain.__qualname__} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
