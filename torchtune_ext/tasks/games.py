"""Base class of tasks that run the environments of other projects."""

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.tasks.examples import read_examples
from torchtune_ext.tasks.task import Environment, Message, Problem, require_index, task_length


class GameTask(ABC):
    """A task of games. Subclasses define `make_game`.

    Args:
        name: name of the game; the ids of the problems start with it.
        rows: a JSONL, CSV or parquet file, or the rows themselves; None: a game without rows.
        count: number of problems; None: all rows starting with `first`.
        first: index of the first problem.
        seed: seed of the games.
        max_turns: largest number of assistant turns.
        tools: JSON schemas of the functions that the policy may call (`Problem.tools`).

    Raises:
        UsageError: an argument is out of range, or there are too few rows.
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
                raise UsageError(
                    f"{where}: too few rows ({len(every)}) for first={first}, count={count}. Fix: lower them"
                )
            self.length = len(self.rows)

    @abstractmethod
    def make_game(self, row: Mapping[str, Any], seed: int) -> tuple[Environment, Sequence[Message]]:
        """Creates a game.

        Args:
            row: a row of the data; empty without rows.
            seed: seed of the game. The caller has seeded `random` with it.

        Returns:
            The game, and its first messages, which end with a user message.
        """

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length)
        # The game is created here for its first messages, and again in a worker process for the
        # episode. The same seed gives the same game.
        row = {} if self.rows is None else self.rows[index]
        seed = random.Random(f"{self.seed}/{self.first + index}").getrandbits(31)
        _, messages = self._make_seeded_game(row, seed)
        answer = {"seed": seed, "row": {field: value for field, value in row.items() if field != "prompt"}}
        return Problem(f"{self.name}-{self.seed}-{self.first + index:06d}", messages, answer, row, self.tools)

    def environment(self, problem: Problem, seed: int) -> Environment:
        """Recreates the game of a problem. Raises RunFailure if it differs from the prompt."""
        # `_make_seeded_game` restores the state of `random`, which the worker has seeded with
        # `seed`, for later draws of the game.
        game, messages = self._make_seeded_game(problem.example, problem.answer["seed"])
        # A game with another random source, such as numpy's generator, starts differently.
        if messages != problem.messages:
            raise RunFailure(
                f"the game differs from its prompt and starts with {messages[-1]['content']!r:.200}. Fix: draw from `random`"
            )
        return game

    def solution(self, problem: Problem) -> list[Message]:
        """Raises UsageError: games have no known solutions."""
        raise UsageError(
            f"{problem.id}: {type(self).__name__} has no solutions to train on. Fix: use another task for the SFT warm-up"
        )

    def __getstate__(self) -> dict[str, Any]:
        # A worker process does not need the rows: a problem holds its own row.
        return self.__dict__ | {"rows": None}

    def _make_seeded_game(self, row: Mapping[str, Any], seed: int) -> tuple[Environment, tuple[Message, ...]]:
        # Games of other projects use Python's global random generator, whose state the caller owns.
        state = random.getstate()
        random.seed(seed)
        try:
            game, messages = self.make_game(row, seed)
        finally:
            random.setstate(state)
        return game, tuple(dict(message) for message in messages)


def imported(module: str, package: str) -> Any:
    """Imports a module of another project.

    Raises:
        UsageError: the module is missing. The message holds the install command.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{package.partition('=')[0]} cannot be imported ({error}). Fix: pip install {package}"
        ) from None


def prompt_messages(row: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a row's `prompt`. A string is one user message."""
    prompt = row.get("prompt", "")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
