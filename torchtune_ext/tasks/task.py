"""What a task is: problems with hidden answers, and a grader for the texts that try to answer them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from torchtune_ext.run.errors import UsageError

# The largest absolute reward. Advantages are float32, which a sum of larger rewards may exceed.
MAX_REWARD = 1e30
ENDLESS_LENGTH = 2**31 - 1  # the length of a task whose problems never end


Message = dict[str, str]  # {"role", "content"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its hidden answer."""

    id: str  # stable and unique within the task, e.g. "clue-7-000123"
    messages: tuple[Message, ...]  # of the chat, the last one from the user
    answer: Any  # JSON-able; the grader gets it, the policy never does
    # The record of the data set behind the problem, for graders that need more than the answer. It is not stored with
    # the rollouts.
    example: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # JSON schemas of functions, which the chat template shows in the prompt. The environment executes the calls, which
    # `tasks.tool_calls` reads in a turn.
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        # Some templates write whatever they are given, such as a dict. A message with tool calls needs no text.
        for message in self.messages if isinstance(self.messages, tuple | list) else ():
            content = message.get("content", "") if isinstance(message, Mapping) else ""
            if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
                raise UsageError(
                    f"problem {self.id!r}: the content of its message of role {message.get('role')!r} is {content!r:.60}, not "
                    "text"
                )


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict of a grader on one text."""

    reward: float  # the number that training tries to increase
    parts: Mapping[str, float] = field(default_factory=dict)  # named components of the reward, for the log
    note: str = ""  # a remark for people, such as the output of a compiler; cut to 2,000 characters
    facts: Mapping[str, str] = field(default_factory=dict)  # words for the record, such as the machine that measured

    @property
    def kind(self) -> str:
        """Returns "timed_out", "policy_failed" or "scored".

        The first two are those of a text with `parts["timed_out"]`, which hangs the grader, and with `parts["failed"]`,
        which holds no answer to grade.
        """
        if self.parts.get("timed_out"):
            return "timed_out"
        return "policy_failed" if self.parts.get("failed") else "scored"


def task_length(first: int, count: int | None) -> int:
    """Returns the length of a task of `count` problems (None: endless).

    Raises ValueError if `first` or `count` is out of range.
    """
    if first < 0 or (count is not None and count < 1):
        raise UsageError(f"first={first}, count={count}: first counts from 0, count from 1")
    return ENDLESS_LENGTH if count is None else count


def require_index(index: int, length: int, what: str = "problem") -> None:
    """Raises IndexError unless a task of this length has the index."""
    if not 0 <= index < length:
        raise IndexError(f"{what} {index} of {length}")


def require_choice(key: str, value: object, known: Sequence[str]) -> None:
    """Raises ValueError unless a setting is one of those known."""
    if value not in known:
        raise UsageError(f"{key}={value!r}: choose one of {', '.join(known)}")


def require_share(key: str, value: object, of: str) -> None:
    """Raises ValueError unless a setting is a number from 0 to 1. `of` says what it is a share of."""
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise UsageError(f"{key}={value!r} is a share of {of}: give a number from 0 to 1")


def require_question(prompt: str) -> None:
    """Raises ValueError unless a prompt has a place for the question."""
    if "{question}" not in prompt:
        raise UsageError(f"prompt={prompt!r} shows no question: write {{question}} where it belongs")


def to_score(value: object) -> Score:
    """Makes a score of what a grader returned.

    A number is a reward without parts. Raises ValueError if it is neither, or has a number that is not finite. The
    message continues "returned ...".
    """
    # This includes the numbers of numpy, but no tensors. Its truth values, as of `np.isclose`, are no numbers to Python.
    if isinstance(value, Real | np.bool_):
        return Score(_require_finite("reward", value))
    if not isinstance(value, Score):
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError(f"{'None' if value is None else name}, neither a number nor a Score")
    for name, named in (("parts", value.parts), ("facts", value.facts)):
        if not isinstance(named, Mapping):
            raise UsageError(f"a Score with {name}={named!r:.60}, which is no dict")
    reward = _require_finite("reward", value.reward)
    parts = {_text(name): _require_finite(name, number) for name, number in value.parts.items()}
    if taken := parts.keys() & {"mean", "std"}:
        raise UsageError(
            f"a Score with the part {min(taken)!r}, which is the reward's own metric; give it another name"
        )
    facts = {_text(name): _text(fact) for name, fact in value.facts.items()}
    return Score(reward, parts, _text(value.note or ""), facts)


def _text(value: Any) -> str:
    # A half surrogate pair, which no log can write, becomes a question mark.
    return str(value).encode("utf-8", "replace").decode()


def _require_finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    # An integer beyond the range of floats raises OverflowError.
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name}={value!r:.60}, which is no number") from None
    if not math.isfinite(number):
        raise UsageError(f"{name}={number}, which is not finite")
    if abs(number) > MAX_REWARD:
        raise UsageError(f"{name}={number:g}, which is beyond {MAX_REWARD:g}: no advantage can be computed from it")
    return number


class Task(Protocol):
    """A sequence of problems with one grader. It must be picklable.

    In place of `grade`, a task that compares texts has `grade_group(problem, texts) -> list[float | Score]`. It grades
    all samples of a problem together, one value for each text in their order.

    A task of this package that has `tries_answers = True` has each problem tried before its texts are graded: its
    solution has to get a higher reward than a wrong text.
    """

    def __len__(self) -> int: ...

    # A problem is a pure function of its index, so a cursor is enough to resume a run.
    def __getitem__(self, index: int) -> Problem: ...

    # This runs in a worker process, which gets the task pickled. No text of the policy may make it raise.
    def grade(self, problem: Problem, text: str) -> float | Score:
        """Returns the reward of a text, or a score with its parts."""
        ...

    def solution(self, problem: Problem) -> str:
        """Returns a text with reward 1.0, the target of the supervised warm-up."""
        ...


@runtime_checkable
class SelfGradingTask(Protocol):
    """A task that brings its own grader, in place of `grade` in worker processes."""

    def check_grading(self, key: str, earlier_tasks: Sequence[Any]) -> None:
        """Finds, in about a second, what would otherwise go wrong at the first text.

        Args:
            key: the node of the task, for messages.
            before: the run's tasks that come before this one; None is no task.

        Raises:
            ValueError: texts cannot be graded. The message names the key, the value and the fix.
        """
        ...

    def open_grader(self, open_graders: Sequence[Any], during_training: bool) -> Any:
        """Starts the grader. It has `compares`, `submit`, `metrics` and `close` as `Grader` has them.

        Args:
            opened: the open graders of the run's other tasks, one of which may be shared.
            beside_training: True if texts are graded while this process trains.
        """
        ...


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment answers to a turn of the assistant."""

    messages: Sequence[Message] = ()  # what the policy reads before its next turn; no messages of the assistant
    reward: float = 0.0  # of this turn; the rewards of all turns are added up
    done: bool = False  # True: the conversation is over
    parts: Mapping[str, float] = field(default_factory=dict)  # as in `Score`; those of a later turn replace others
    note: str = ""  # as in `Score`; the last one counts


class Environment(Protocol):
    """The other side of one conversation. It may have `close()`, and is not used again."""

    # It runs in a process of its own, which is killed if a call takes too long.
    def step(self, message: Message) -> Turn:
        """Answers a turn. `message["content"]` is its text, without the tokens that end it."""
        ...


@runtime_checkable
class ConversationTask(Protocol):
    """A task whose problems begin conversations. An environment replaces `grade`.

    `Problem.messages` are what the policy reads first. `solution` returns the messages that follow them in a
    conversation that goes well, alternately of the assistant and of the environment.
    """

    max_turns: int  # turns of the assistant, after which a conversation is ended

    def environment(self, problem: Problem, seed: int) -> Environment:
        """Makes the environment of one conversation. All samples of a group get the same problem and seed."""
        ...


def solution_messages(solution: str | Sequence[Message]) -> list[Message]:
    """Returns the messages of a solution. A text is one turn of the assistant."""
    return [{"role": "assistant", "content": solution}] if isinstance(solution, str) else list(solution)


GradedGroup = tuple[Problem, Sequence[tuple[str, Score | None, str]]]
"""A graded group: its problem, and for each sample the text, the score (None: it could not be graded) and the kind of
its outcome (`Score.kind`, `Ungraded.kind`; "": no grader has seen it)."""


class AdaptiveTask(Task, Protocol):
    """A task that chooses its next problems by the results of earlier ones, as a curriculum does."""

    # A problem depends on its index, its place in the run, and the groups observed before.
    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index` as the `cursor`-th of the run. `task[index]` is for use without a run."""
        ...

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Learns from the groups of a step, and returns metrics. `folder` is the run's, for files of the task."""
        ...

    # Checkpoints hold this state, so that a resumed run asks the same problems.
    def state_dict(self) -> dict[str, Any]:
        """Returns all that was learned from observations, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a `state_dict`. Raises ValueError if the task had other settings."""
        ...


def strip_thinking(text: str) -> str:
    """Returns the answer part of a text: everything after the last closed thought, or "" if a thought is still open."""
    # Every grader reads texts by this rule. A text that never opens a thought is all answer.
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest
