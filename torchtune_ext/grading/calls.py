"""The work of a grading process: it calls the task's grader on a text and checks the answer."""

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

    # kind             what happened                                                           trained on
    # "scored"         the grader returned a number or a Score, also for a wrong answer        yes
    # "policy_failed"  the grader returned a Score whose parts["failed"] is not 0:             yes
    #                  the text holds no answer to grade
    # "infra_failed"   the grader raised, crashed, or returned anything else                   no
    # "timed_out"      the grader was still busy after the deadline, and was killed            no
    # "noisy"          the text is a right program, but others disturbed the machine           no
    #                  while its speed was measured (measured/)
    kind: str
    score: Score | None  # None if it is not trained on; then it is kept out of the baseline, too
    cause: str  # the error, for the log; "" when there is a score


class Grading:
    """Grades texts with a task, in a grading process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.compares = hasattr(task, "grade_group")  # whether the texts of a problem are graded together

    def __call__(self, problem: Problem, texts: Sequence[str]) -> list[Outcome]:
        """Returns one outcome for each text. A task that compares gets all at once, another one after the other."""
        # A grader is the user's code: whatever it raises, `sys.exit` included, costs only these texts.
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
    """Returns the outcome of a value that `grade` returned, which should be a Score or a number."""
    try:
        score = score_of(value)
    except ValueError as error:
        return Outcome("infra_failed", None, f"{name_of(grade)} returned {error}")
    kind = "policy_failed" if score.parts.get(FAILED_PART) else "scored"
    return Outcome(kind, replace(score, note=score.note[:MAX_NOTE_CHARS]), "")


def _cause(error: BaseException) -> str:
    """Returns the error and where it was raised."""
    # An error inside a library says little by itself, so the line of the grader's own file that led there comes along.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    if not own or own[-1] is frames[-1]:
        return last_line(error)
    return f"{last_line(error)}, called from {os.path.basename(own[-1].filename)}:{own[-1].lineno}"
