"""What a grading process does with a text: it calls the task's grader and checks what that returns."""

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchtune_ext.run.worker_process import last_line
from torchtune_ext.tasks.functions import name_of
from torchtune_ext.tasks.task import Problem, Score, Task, score_of

MAX_NOTE_CHARS = 2000
FAILED_PART = "failed"  # if this part of a Score is not 0, the outcome is "policy_failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of grading one text."""

    kind: str  # "scored", "policy_failed", "infra_failed", "timed_out" or "noisy"
    score: Score | None  # None when the infrastructure failed, timed out, or was disturbed
    cause: str  # the error, for the log; "" when there is a score


class Grading:
    """Grades texts with a task. It lives in a grading process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.compares = hasattr(task, "grade_group")  # whether the texts of a problem are graded together

    def __call__(self, problem: Problem, texts: Sequence[str]) -> list[Outcome]:
        """Returns one outcome for each text. A task that compares grades them together, another one after the other."""
        try:
            if self.compares:
                return checked_all(self.task.grade_group(problem, list(texts)), len(texts), self.task.grade_group)
            return [checked(self.task.grade(problem, text), self.task.grade) for text in texts]
        except (Exception, SystemExit) as error:  # noqa: BLE001 (reported as infra_failed)
            return [Outcome("infra_failed", None, _cause(error))] * len(texts)


def checked_all(values: object, count: int, grade: Callable) -> list[Outcome]:
    """Returns one outcome for each of `count` texts that `grade` graded together."""
    if not isinstance(values, list | tuple) or len(values) != count:
        what = f"{len(values)} values" if isinstance(values, list | tuple) else type(values).__name__
        cause = f"{name_of(grade)} returned {what} for {count} texts; return a list with a number for each"
        return [Outcome("infra_failed", None, cause)] * count
    return [checked(value, grade) for value in values]


def checked(value: object, grade: Callable) -> Outcome:
    """Checks what a grader returned.

    Args:
        value: a Score or a number, if all is well.
        grade: what returned it, for the message.
    """
    try:
        score = score_of(value)
    except ValueError as error:
        return Outcome("infra_failed", None, f"{name_of(grade)} returned {error}")
    kind = "policy_failed" if score.parts.get(FAILED_PART) else "scored"
    return Outcome(kind, replace(score, note=score.note[:MAX_NOTE_CHARS]), "")


def _cause(error: BaseException) -> str:
    """Returns the error and where it was raised; if that was not in the file of the grader, also where the grader was then."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    if not own or own[-1] is frames[-1]:
        return last_line(error)
    return f"{last_line(error)}, called from {os.path.basename(own[-1].filename)}:{own[-1].lineno}"
