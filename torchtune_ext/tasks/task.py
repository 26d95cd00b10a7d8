"""Defines the task interface: problems with hidden answers, and a grader for the policy's texts."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from torchtune_ext.run.errors import UsageError, closest_match

# The largest absolute reward. Advantages are float32; a sum of larger rewards may overflow.
MAX_REWARD = 1e30
ENDLESS_LENGTH = 2**31 - 1  # the length of a task whose problems never end

Message = dict[str, str]  # {"role", "content"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its hidden answer."""

    id: str  # stable and unique within the task, e.g. "clue-7-000123"
    messages: tuple[Message, ...]  # chat messages; the last is from the user
    answer: Any  # JSON-serializable; passed to the grader, never shown to the policy
    # The record of the data set from which the problem comes, for graders that need more than the
    # answer. It is not stored with the rollouts.
    example: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # JSON schemas of functions, which the chat template shows in the prompt. `tasks.tool_calls`
    # parses the calls in a turn, and the environment executes them.
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        # Some templates render any value, even a dict. A message with tool calls needs no text.
        for message in self.messages if isinstance(self.messages, tuple | list) else ():
            content = message.get("content", "") if isinstance(message, Mapping) else ""
            if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
                raise UsageError(
                    f"problem {self.id!r}: the content of its message of role {message.get('role')!r} is {content!r:.60}; "
                    "expected a string"
                )


@dataclass(frozen=True, slots=True)
class Score:
    """A grader's result for one text."""

    reward: float  # the number that training maximizes, unless `advantage.parts` is set
    # Named components, which are logged and may be weighted by `advantage.parts`.
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""  # for people, such as a compiler's output; truncated to 2,000 characters
    # Metadata for the stored rollouts, such as the machine.
    facts: Mapping[str, str] = field(default_factory=dict)
    # Of an agent's episode: rewards of single responses by their `id`, for `advantage.credit: turn`.
    response_rewards: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def kind(self) -> str:
        """Returns "timed_out", "policy_failed" or "scored".

        A text with `parts["timed_out"]` hangs the grader; with `parts["failed"]`, it has no answer.
        """
        if self.parts.get("timed_out"):
            return "timed_out"
        return "policy_failed" if self.parts.get("failed") else "scored"


def require_part(score: Score, name: str) -> float:
    """Returns a part of a score: 0 if the text hung the grader, which then returned no parts.

    Raises:
        UsageError: the score lacks the part.
    """
    if name in score.parts or score.kind == "timed_out":
        return score.parts.get(name, 0.0)
    near = closest_match(name, score.parts)
    hint = f"did you mean {near!r}?" if near else f"it has {', '.join(score.parts) or 'no parts'}."
    raise UsageError(
        f"advantage.parts.{name}: a Score of the grader lacks the part {name!r}; {hint} Fix: return it in every Score, or "
        "change advantage.parts"
    )


def task_length(first: int, count: int | None) -> int:
    """Returns the length of a task of `count` problems (None: endless).

    Raises:
        UsageError: `first` is negative, or `count` is below 1.
    """
    if first < 0 or (count is not None and count < 1):
        raise UsageError(f"first={first}, count={count}: out of range; expected first >= 0 and count >= 1")
    return ENDLESS_LENGTH if count is None else count


def require_index(index: int, length: int, what: str = "problem") -> None:
    """Raises IndexError unless a task of this length has the index."""
    if not 0 <= index < length:
        raise IndexError(f"{what} {index} of {length}")


def require_choice(key: str, value: object, known: Sequence[str]) -> None:
    """Raises UsageError unless a config value is one of the known values."""
    if value not in known:
        raise UsageError(f"{key}={value!r}: unknown. Fix: choose one of {', '.join(known)}")


def require_share(key: str, value: object, of: str) -> None:
    """Raises UsageError unless a config value is a number from 0 to 1: a fraction of `of`."""
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise UsageError(f"{key}={value!r}: expected a fraction of {of}, from 0 to 1")


def require_question(prompt: str) -> None:
    """Raises UsageError unless a prompt has the placeholder {question}."""
    if "{question}" not in prompt:
        raise UsageError(f"prompt={prompt!r}: no place for the question. Fix: write {{question}} where it belongs")


def to_score(value: object) -> Score:
    """Converts a grader's return value to a score.

    Args:
        value: a `Score`, or a number: a reward without parts.

    Raises:
        UsageError: the value is something else, or holds a number that is not finite. The message
            completes the sentence "GRADER returned ...".
    """
    # `Real` covers numpy's numbers, but not its booleans (as from `np.isclose`), and not tensors.
    if isinstance(value, Real | np.bool_):
        return Score(_require_finite("reward", value))
    if not isinstance(value, Score):
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise UsageError(f"{'None' if value is None else name}, neither a number nor a Score")
    for name, named in (("parts", value.parts), ("facts", value.facts), ("response_rewards", value.response_rewards)):
        if not isinstance(named, Mapping):
            raise UsageError(f"a Score with {name}={named!r:.60}, which is not a dict")
    reward = _require_finite("reward", value.reward)
    parts = {_text(name): _require_finite(name, number) for name, number in value.parts.items()}
    if taken := parts.keys() & {"mean", "std"}:
        raise UsageError(
            f"a Score with parts[{min(taken)!r}]; this name is reserved for a metric of the reward. Fix: rename the part"
        )
    facts = {_text(name): _text(fact) for name, fact in value.facts.items()}
    rewards = {
        str(name): _require_finite("response_rewards", number) for name, number in value.response_rewards.items()
    }
    return Score(reward, parts, _text(value.note or ""), facts, rewards)


def _text(value: Any) -> str:
    # Half of a surrogate pair becomes a question mark: logs cannot encode it.
    return str(value).encode("utf-8", "replace").decode()


def _require_finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    # An integer beyond the range of floats raises OverflowError.
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name}={value!r:.60}, which is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"{name}={number}, which is not finite")
    if abs(number) > MAX_REWARD:
        raise UsageError(f"{name}={number:g}, which is beyond {MAX_REWARD:g}: no advantage can be computed from it")
    return number


class Task(Protocol):
    """A sequence of problems with one grader. It must be picklable.

    Instead of `grade`, a task that compares texts defines
    `grade_group(problem, texts) -> list[float | Score]`. It grades all samples of a problem in one
    call and returns one value per text, in order.

    If a task of this package sets `checks_reference_answers = True`, problems are checked before
    their use: a solution must get a higher reward than a wrong text.
    """

    def __len__(self) -> int: ...

    # A problem is a pure function of its index, so a cursor is sufficient to resume a run.
    def __getitem__(self, index: int) -> Problem: ...

    # This runs in a worker process, on a pickled copy of the task. It must not raise on any text.
    def grade(self, problem: Problem, text: str) -> float | Score:
        """Returns the reward of a text, or a score with its parts."""
        ...

    def solution(self, problem: Problem) -> str:
        """Returns a text with reward 1.0, the target of the SFT warm-up."""
        ...


@runtime_checkable
class SelfGradingTask(Protocol):
    """A task with its own grader, which replaces `grade` in worker processes."""

    def check_grading(self, key: str, earlier_tasks: Sequence[Any]) -> None:
        """Checks in about a second that texts can be graded.

        Args:
            key: the config key of the task, for messages.
            earlier_tasks: the tasks of the run before this task; entries may be None.

        Raises:
            UsageError: texts cannot be graded. The message names the key, the value and the fix.
        """
        ...

    def open_grader(self, open_graders: Sequence[Any], during_training: bool) -> Any:
        """Starts the grader.

        Args:
            open_graders: the open graders of the run's other tasks. The task may share one.
            during_training: True if texts are graded while this process trains.

        Returns:
            An object with `grades_groups`, `submit`, `metrics` and `close`, as in `Grader`.
        """
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """An environment's reply to a turn of the policy."""

    # The policy's input before its next turn; no assistant messages.
    messages: Sequence[Message] = ()
    reward: float = 0.0  # reward of this turn; the episode's reward is the sum over its turns
    done: bool = False  # True: the episode ends
    # As in `Score`; later turns overwrite equal names.
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""  # as in `Score`; the last one that is not empty is kept


class Environment(Protocol):
    """The environment of one episode. It may define `close()`, and is not reused."""

    # It runs in its own process, which is killed if a call exceeds `grader.timeout_s`.
    def step(self, message: Message) -> EnvironmentReply:
        """Replies to a turn. `message["content"]` is its text, without the tokens that end it."""
        ...


@runtime_checkable
class EpisodeTask(Protocol):
    """A task whose problems start episodes. An environment replaces `grade`.

    `Problem.messages` are the first input of the policy. `solution` returns the messages that
    follow them in a successful episode, alternately of the assistant and of the environment.
    """

    max_turns: int  # largest number of assistant turns

    def environment(self, problem: Problem, seed: int) -> Environment:
        """Creates the environment of one episode. All samples of a group get the same arguments."""
        ...


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Where an agent reaches the policy: arguments of any OpenAI client."""

    base_url: str
    api_key: str
    model: str = "policy"
    # The same weights without training, for titles, summaries or judges.
    untrained_model: str = "policy-untrained"


@runtime_checkable
class AgentTask(Protocol):
    """A task whose agent owns its loop: it requests responses and returns the reward."""

    # It runs in a process of its own, which is killed with its children after `agent.timeout_s`.
    def run_agent(self, problem: Problem, client: AgentClient) -> float | Score:
        """Plays one episode and returns its reward. May be a coroutine function."""
        ...


def __getattr__(name: str) -> Any:
    # The old names work until the next version.
    current = {"Turn": EnvironmentReply, "ConversationTask": EpisodeTask}.get(name)
    if current is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{name}: deprecated. Fix: import {current.__name__}", FutureWarning, stacklevel=2)
    return current


def solution_messages(solution: str | Sequence[Message]) -> list[Message]:
    """Returns the messages of a solution. A string is one turn of the assistant."""
    return [{"role": "assistant", "content": solution}] if isinstance(solution, str) else list(solution)


GradedGroup = tuple[Problem, Sequence[tuple[str, Score | None, str]]]
"""A graded group: (problem, samples). A sample is (text, score, kind of outcome).

The score is None if the text could not be graded. The kind is `Score.kind` or `Ungraded.kind`, and "" if
the text was not passed to a grader."""


class AdaptiveTask(Task, Protocol):
    """A task that selects its next problems by earlier results, such as a curriculum."""

    # A problem depends on its index, its position in the run, and the groups observed before.
    def ask(self, index: int, cursor: int) -> Problem:
        """Returns problem `index` as the `cursor`-th of the run. Without a run: `task[index]`."""
        ...

    def observe(self, step: int, groups: Sequence[GradedGroup], folder: Path) -> dict[str, float]:
        """Updates the selection from the groups of a step, and returns metrics.

        Args:
            step: the step of the run.
            groups: the graded groups of the step.
            folder: the run directory, for files of the task.
        """
        ...

    # Checkpoints hold this state, so that a resumed run gets the same problems.
    def state_dict(self) -> dict[str, Any]:
        """Returns the state that `observe` has built up, JSON-serializable."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`. Raises UsageError if the task had different settings."""
        ...


def strip_thinking(text: str) -> str:
    """Returns the text after the last closed thought, or "" if a thought is still open."""
    # Every grader of this package reads texts by this rule. A text without a thought is the answer as a whole.
    rest = text.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest
