"""Defines what a task is: problems with hidden answers, and a grader for texts that try to answer them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
    facts: Mapping[str, str] = field(default_factory=dict)  # words for the record, such as the machine that measured


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


Graded = tuple[Problem, Sequence[tuple[str, Score | None, str]]]
"""What became of a group: its problem, and the text of each sample, its score, None where it could not be graded, and the kind
of its outcome (`Outcome.kind`), "" where no grader has seen it."""


class AdaptiveTask(Task, Protocol):
    """A task that asks its next problems by what became of earlier ones, as a curriculum does.

    A problem depends on its index, on where it stands in the run, and on what was observed before. What was observed is part of
    each checkpoint, so that a resumed run asks the same.
    """

    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index`, which is the `cursor`-th of the run. `task[index]` is the same without a run."""
        ...

    def observe(self, step: int, groups: Sequence[Graded], folder: Path) -> dict[str, float]:
        """Takes in the groups of a step, and returns what is to be logged. `folder` is the run's, for files of the task."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns all that was learned from observations, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned. Raises ValueError if that was of a task with other settings."""
        ...
