"""What a grading process does with a text: it calls the task's grader and checks what that returns."""

import math
from collections.abc import Sequence

from torchtune_ext.run.worker_process import last_line
from torchtune_ext.tasks.task import Problem, Score, Task

MAX_NOTE_CHARS = 2000
FAILED_PART = "failed"  # if this part of a Score is not 0, the outcome is "policy_failed"

Graded = tuple[str, Score | None, str]  # the fields of an Outcome


class Grading:
    """Grades texts with a task. It lives in a grading process."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, problem: Problem, texts: Sequence[str], together: bool) -> list[Graded]:
        """Returns one answer for each text. If `together` is true, the texts are graded by `grade_group`; otherwise there is
        one text, graded by `grade`."""
        try:
            if together:
                return checked_all(self.task.grade_group(problem, list(texts)), len(texts))
            return [checked(self.task.grade(problem, texts[0]))]
        except (Exception, SystemExit) as error:  # noqa: BLE001 (reported as infra_failed)
            return [failed(last_line(error))] * len(texts)


def failed(cause: str) -> Graded:
    """Returns the answer for a text that could not be graded."""
    return "infra_failed", None, cause


def checked_all(scores: object, count: int) -> list[Graded]:
    """Returns one answer for each of `count` texts that were graded together."""
    if not isinstance(scores, list | tuple) or len(scores) != count:
        what = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
        return [failed(f"grade_group() returned {what} for {count} texts")] * count
    return [checked(score) for score in scores]


def checked(score: object) -> Graded:
    """Checks what a grader returned, and returns (kind, score, cause)."""
    if not isinstance(score, Score):
        return failed(f"grade() returned {type(score).__name__}, not a Score")
    reward, parts = float(score.reward), {str(name): float(value) for name, value in score.parts.items()}
    for name, value in {"reward": reward, **parts}.items():
        if not math.isfinite(value):
            return failed(f"grade() returned {name}={value}, which is not finite")
    kind = "policy_failed" if parts.get(FAILED_PART) else "scored"
    facts = {str(name): str(value) for name, value in score.facts.items()}
    return kind, Score(reward, parts, str(score.note or "")[:MAX_NOTE_CHARS], facts), ""
