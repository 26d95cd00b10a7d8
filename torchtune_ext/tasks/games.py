"""The common base of tasks that play the environments of other projects."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.tasks.examples import read_examples
from torchtune_ext.tasks.task import Environment, Message, Problem, require_index, task_length


class GameTask(ABC):
    """A task of games. Subclasses write `begin`.

    Args:
        name: name of the game; the ids of the problems begin with it.
        rows: a JSONL, CSV or parquet file, or the rows themselves; None: the games need none.
        count: number of problems; None: all rows from `first` on, or endless without rows.
        first: index of the first problem.
        seed: seed of the games.
        max_turns: largest number of turns of the assistant.
        tools: what the policy may call (`Problem.tools`).

    Raises:
        ValueError: an argument is out of its range, or there are too few rows.
    """

    def __init__(
        self,
        name: str,
        rows: str | Sequence[Mapping[str, Any]] | None,
        count: int | None,
        first: int,
        seed: int,
        max_turns: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.name, self.first, self.seed, self.max_turns, self.tools = name, first, seed, max_turns, tuple(tools)
        self.rows: Sequence[Mapping[str, Any]] | None = None
        self.length = task_length(first, count)
        if rows is not None:
            every = [row for _, row in read_examples(rows, None)] if isinstance(rows, str) else list(rows)
            self.rows = every[first:][: self.length]
            if not self.rows or (count or 0) > len(self.rows):
                where = f"rows={rows}" if isinstance(rows, str) else "rows"
                raise UsageError(f"{where}: too few rows ({len(every)}) for first={first}, count={count}; lower them")
            self.length = len(self.rows)

    @abstractmethod
    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple[Environment, Sequence[Message]]:
        """Makes a game, and returns it with what the policy reads first.

        The last message is the user's. `row` is empty without rows. `random` has been set to `seed`.
        """

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length)
        # The game is made here for its first messages, and again in a process of its own for the conversation. The same
        # seed makes it the same game.
        row = {} if self.rows is None else self.rows[index]
        seed = random.Random(f"{self.seed}/{self.first + index}").getrandbits(31)
        _, messages = self._make_seeded_game(row, seed)
        answer = {"seed": seed, "row": {field: value for field, value in row.items() if field != "prompt"}}
        return Problem(f"{self.name}-{self.seed}-{self.first + index:06d}", messages, answer, row, self.tools)

    def environment(self, problem: Problem, seed: int) -> Environment:
        """Makes the game of a problem again. Raises RuntimeError if it is not the one in the prompt."""
        # `_begin` restores the state of `random`, which the process has set by `seed`, for later draws of the game.
        game, messages = self._make_seeded_game(problem.example, problem.answer["seed"])
        # A game that draws from elsewhere, such as numpy's generator, begins differently each time.
        if messages != problem.messages:
            raise RunFailure(
                f"it began otherwise than in the prompt, with {messages[-1]['content']!r:.200}; draw from `random`"
            )
        return game

    def solution(self, problem: Problem) -> list[Message]:
        """Raises ValueError: games have no known solutions."""
        raise UsageError(f"{problem.id} has no conversation to learn: {type(self).__name__} knows no solutions")

    def __getstate__(self) -> dict[str, Any]:
        # The process of an environment does not need the rows: a problem holds its own.
        return self.__dict__ | {"rows": None}

    def _make_seeded_game(self, row: Mapping[str, Any], seed: int) -> tuple[Environment, tuple[Message, ...]]:
        # Games of other projects draw from Python's global generator, whose state belongs to the caller.
        state = random.getstate()
        random.seed(seed)
        try:
            game, messages = self.make_game(row, seed)
        finally:
            random.setstate(state)
        return game, tuple(dict(message) for message in messages)


def imported(module: str, package: str) -> Any:
    """Imports a module of another project. Raises ValueError, which says how to install the package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"{package.partition('=')[0]} cannot be imported ({error}): pip install {package}") from None


def prompt_messages(row: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a row's `prompt`. A text is a message of the user's."""
    prompt = row.get("prompt", "")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
