"""Defines what a task is: problems with hidden answers, and a grader for texts that try to answer them."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its hidden answer."""

    id: str  # stable and unique within the task, e.g. "clue-7-000123"
    messages: tuple[dict[str, str], ...]  # chat messages {"role", "content"}, the last one from the user
    answer: Any  # JSON-able; the grader gets it, the policy never does


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict of a grader on one text."""

    reward: float  # the number that training tries to increase
    parts: dict[str, float]  # named components of the reward, for the log
    note: str = ""  # a remark for people, such as the output of a compiler; cut to 2,000 characters


class Task(Protocol):
    """A sequence of problems with one grader.

    A problem is a pure function of its index, so a cursor is enough to resume a run.

    `grade` runs in a worker process. Therefore the task must be picklable, and no text of the policy may make `grade`
    raise. A task whose grader compares texts also has `grade_group(problem, texts) -> list[Score]`. It then grades all
    samples of a problem together, in place of `grade`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def grade(self, problem: Problem, text: str) -> Score:
        """Returns the score of a completion's text."""
        ...

    def solution(self, problem: Problem) -> str:
        """Returns a text with reward 1.0, the target of the supervised warm-up."""
        ...
