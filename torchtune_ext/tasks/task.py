"""What a task is: problems with hidden answers, and a grader for texts that try to answer them."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its hidden answer."""

    id: str  # stable and unique within the task, e.g. "clue-7-000123"
    messages: tuple[dict[str, str], ...]  # chat messages {"role", "content"}, the last one the user's
    answer: Any  # JSON-able; goes to the grader, never to the policy


@dataclass(frozen=True, slots=True)
class Score:
    """What a grader says of one text."""

    reward: float  # what the policy is trained on
    parts: dict[str, float]  # named components of the reward, for the log
    note: str = ""  # for people: what was wrong with the text, what a compiler said; cut to 2,000 characters


class Task(Protocol):
    """A sequence of problems with one grader. Problems are a pure function of the index, so a cursor resumes a run.

    `grade` runs in a worker process: it must be picklable, and a text of the policy's must never make it raise. A task
    whose grader compares has `grade_group(problem, texts) -> list[Score]` besides; where it is there, the samples of a
    problem are graded by it, all together, in the place of `grade`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def grade(self, problem: Problem, text: str) -> Score: ...

    def solution(self, problem: Problem) -> str:
        """A text that scores 1.0: the target of the supervised warm-up."""
        ...
