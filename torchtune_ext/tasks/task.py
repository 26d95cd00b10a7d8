"""Defines what a task is: problems with hidden answers, and a grader for texts that try to answer them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torchtune_ext.run.errors import Mistake

LARGEST = 1e30  # the largest reward, up or down: advantages are float32, and a sum of larger ones may not be one
ENDLESS = 2**31 - 1  # the length of a task whose problems never end


Message = dict[str, str]  # {"role", "content"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its hidden answer."""

    id: str  # stable and unique within the task, e.g. "clue-7-000123"
    messages: tuple[Message, ...]  # of the chat, the last one from the user
    answer: Any  # JSON-able; the grader gets it, the policy never does
    # The record of the data set that the problem was made of, for graders that need more of it than the answer. It is not
    # stored with the rollouts.
    example: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # JSON schemas of functions, which the chat template shows in the prompt. Who calls them is the environment
    # (`tasks.tool_calls` reads the calls in a turn).
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict of a grader on one text."""

    reward: float  # the number that training tries to increase
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward, for the log
    note: str = ""  # a remark for people, such as the output of a compiler; cut to 2,000 characters
    facts: Mapping[str, str] = field(default_factory=dict)  # words for the record, such as the machine that measured


def length_of(first: int, count: int | None) -> int:
    """Returns the length of a task of `count` problems, from number `first` on; None: they never end.

    Raises:
        ValueError: an argument is out of its range.
    """
    if first < 0 or (count is not None and count < 1):
        raise Mistake(f"first={first}, count={count}: first counts from 0, count from 1")
    return ENDLESS if count is None else count


def score_of(value: float | Score) -> Score:
    """Makes a score of what a grader returned: a number is a reward without parts.

    Raises:
        ValueError: it is neither, or what it holds are no finite numbers. The message goes on after "returned ".
    """
    if isinstance(value, Real):
        return Score(_finite("reward", value))
    if not isinstance(value, Score):
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise Mistake(f"{'None' if value is None else name}, neither a number nor a Score")
    for name, named in (("parts", value.parts), ("facts", value.facts)):
        if not isinstance(named, Mapping):
            raise Mistake(f"a Score with {name}={named!r:.60}, which is no dict")
    reward = _finite("reward", value.reward)
    parts = {str(name): _finite(name, number) for name, number in value.parts.items()}
    facts = {str(name): str(fact) for name, fact in value.facts.items()}
    return Score(reward, parts, str(value.note or ""), facts)


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise Mistake(f"{name}={value!r:.60}, which is no number") from None
    if not math.isfinite(number):
        raise Mistake(f"{name}={number}, which is not finite")
    if abs(number) > LARGEST:
        raise Mistake(f"{name}={number:g}, which is beyond {LARGEST:g}: no advantage can be computed from it")
    return number


class Task(Protocol):
    """A sequence of problems with one grader.

    A problem is a pure function of its index, so a cursor is enough to resume a run.

    `grade` runs in a worker process. Therefore the task must be picklable, and no text of the policy may make `grade`
    raise. A task that compares texts has `grade_group(problem, texts) -> list[float | Score]`, one for each text in their
    order. It then grades all samples of a problem together, in place of `grade`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem: ...

    def grade(self, problem: Problem, text: str) -> float | Score:
        """Returns what a completion's text is worth: a reward, or a score with its parts (`score_of` makes one of both)."""
        ...

    def solution(self, problem: Problem) -> str:
        """Returns a text with reward 1.0, the target of the supervised warm-up."""
        ...


@runtime_checkable
class GradesItself(Protocol):
    """A task that brings its own grader, in place of `grade` in worker processes."""

    def rehearse(self, key: str, before: Sequence[Any]) -> None:
        """Finds out in a second or so what would else go wrong at the first text.

        Args:
            key: the node of the task, for messages.
            before: the other tasks of the run that come before this one; None among them is no task.

        Raises:
            ValueError: its texts cannot be graded. The message names the key, the value and the fix.
        """
        ...

    def open_grader(self, opened: Sequence[Any], beside_training: bool) -> Any:
        """Starts what grades its texts: `compares` and the methods `submit`, whose future gives a list, `metrics` and `close`
        of `Grader`.

        Args:
            opened: the graders of the run's other tasks that are open already, one of which may be shared.
            beside_training: texts are graded while this process trains.
        """
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to a turn of the assistant."""

    messages: Sequence[Message] = ()  # what the policy reads before its next turn; none of the assistant
    reward: float = 0.0  # of this turn; those of all turns are added up
    done: bool = False  # True: the conversation is over
    parts: Mapping[str, float] = field(default_factory=dict)  # as in `Score`; those of a later turn replace others
    note: str = ""  # as in `Score`; the last one counts


class Environment(Protocol):
    """What one conversation is with: it is made for it, answers each turn of the assistant, and is not used again.

    It lives in a process of its own, which is killed where a call takes too long. It may have `close()`.
    """

    def step(self, message: Message) -> Turn:
        """Answers a turn. Its text is `message["content"]`, without the tokens that end it."""
        ...


@runtime_checkable
class ConversationTask(Protocol):
    """A task whose problems begin conversations: `Problem.messages` are what the policy reads first, and an environment in the
    place of `grade` says what follows and what it is worth.

    `solution` then returns the messages that follow those of the problem in a conversation that goes well: of the assistant and
    of the environment, by turns.
    """

    max_turns: int  # of the assistant; a conversation that goes on after them is ended

    def environment(self, problem: Problem, seed: int) -> Environment:
        """Makes the environment of one conversation. Those of a group get the same problem and seed."""
        ...


def solution_messages(solution: str | Sequence[Message]) -> list[Message]:
    """Returns the messages of a task's solution: a text is a turn of the assistant."""
    return [{"role": "assistant", "content": solution}] if isinstance(solution, str) else list(solution)


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
