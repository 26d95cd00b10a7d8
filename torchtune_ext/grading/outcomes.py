"""Runs in a grading process: calls the task's grader on a text and checks the returned value."""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchtune_ext.run.worker_process import error_line
from torchtune_ext.tasks import grade_functions
from torchtune_ext.tasks.grade_functions import describe_function, is_builtin
from torchtune_ext.tasks.task import Problem, Score, Task, to_score

MAX_NOTE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Ungraded:
    """The reason why a text has no `Score`. The text is not trained on and not in the baseline."""

    # "infra_failed": the grader raised, crashed, or returned neither a finite number nor a valid Score;
    # "timed_out": a user's grader (on a stalled machine, any grader) was killed at its deadline;
    # "noisy": other load on the machine disturbed the measurement of a correct program's speed.
    kind: str
    cause: str  # the error, for the log


Outcome = Score | Ungraded  # the outcome of grading one text


def timeout_score(cause: str) -> Score:
    """Returns the score of a text on which a grader of this package hung or crashed."""
    # If such texts were ungraded, and not trained on, the policy would keep writing them.
    return Score(0.0, {"timed_out": 1.0}, cause)


class GradingWorker:
    """Grades texts with a task, in a grading process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        # True: one call grades all texts of a problem.
        self.grades_groups = hasattr(task, "grade_group")
        self.failed = False  # True: the last call graded no text

    def __call__(self, problem: Problem, texts: Sequence[str]) -> list[Outcome]:
        """Returns one outcome for each text. A task that compares texts gets them in one call."""
        outcomes = self._outcomes(problem, texts)
        self.failed = all(isinstance(outcome, Ungraded) for outcome in outcomes)
        return outcomes

    def _outcomes(self, problem: Problem, texts: Sequence[str]) -> list[Outcome]:
        # A grader is the user's code. Anything that it raises, `SystemExit` and `CancelledError`
        # included, affects only these texts.
        try:
            grade_group: Callable | None = getattr(self.task, "grade_group", None)
            if grade_group is not None:
                return check_outcomes(grade_group(problem, list(texts)), len(texts), grade_group)
            return [check_outcome(self.task.grade(problem, text), self.task.grade) for text in texts]
        except BaseException as error:  # noqa: BLE001 (reported with its cause)
            # Only a text of the policy can exhaust the stack or the memory of a built-in grader.
            if isinstance(error, MemoryError | RecursionError) and has_builtin_grader(self.task):
                return [timeout_score(_cause(error))] * len(texts)
            return [Ungraded("infra_failed", _cause(error))] * len(texts)


def has_builtin_grader(task: Task) -> bool:
    """Returns whether the texts of a task are graded by a function of this package."""
    return not hasattr(task, "grade_group") and is_builtin(getattr(task, "grade", None))


def check_outcomes(values: object, count: int, grade: Callable) -> list[Outcome]:
    """Returns one outcome for each of `count` texts that `grade` graded together."""
    if not isinstance(values, list | tuple) or len(values) != count:
        returned = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
        cause = f"returned {returned} for {count} texts; return a list with a number for each"
        return [Ungraded("infra_failed", f"{describe_function(grade)} {cause}")] * count
    return [check_outcome(value, grade) for value in values]


def check_outcome(value: object, source: Callable | str) -> Outcome:
    """Converts the value that `source` returned: a Score, a number, or else `Ungraded`."""
    try:
        score = to_score(value)
    except ValueError as error:
        return Ungraded("infra_failed", f"{describe_function(source)} returned {error}")
    return score if len(score.note) <= MAX_NOTE_CHARS else replace(score, note=score.note[:MAX_NOTE_CHARS])


def _cause(error: BaseException) -> str:
    """Returns the error, and the line of the grader's file that called the failing library."""
    own_files = (__file__, grade_functions.__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in own_files]
    grader_frames = [frame for frame in frames if frame.filename == frames[0].filename]
    if not grader_frames or grader_frames[-1] is frames[-1]:
        return error_line(error)
    caller = grader_frames[-1]
    return f"{error_line(error)}, called from {os.path.basename(caller.filename)}:{caller.lineno}"
