"""Multi-turn game without data: guess a number from the replies "higher" and "lower".

    user       40-70
    assistant  55
    user       higher
    assistant  62
    user       lower

A policy that bisects the remaining range finds the number in time. A policy that guesses uniformly
runs out of turns. So the policy must learn across turns: remember the replies, and bisect.
"""

import random
import re

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.arithmetic import SPLITS, is_held_out
from torchtune_ext.tasks.task import (
    EnvironmentReply,
    Message,
    Problem,
    require_choice,
    require_index,
    require_share,
    task_length,
)


class GuessNumber:
    """Task of guessing a number in a range.

    Args:
        seed: seed of the problems. Problem i depends only on (seed, first + i, below, size, split).
        count: number of problems; None: endless.
        first: index of the first problem.
        below: the lowest number of a range is in [1, below].
        size: number of integers in a range.
        max_turns: number of guesses.
        split: "train", "heldout" (one problem in eight, by the hash of range and number) or "all".
        halving: fraction of the solutions' guesses that bisect the remaining range; the other
            guesses are uniform in the whole range.
        prompt: the first message, in which {low} and {high} stand for the ends of the range.

    Raises:
        UsageError: an argument is out of range.
    """

    def __init__(
        self,
        seed: int = 0,
        count: int | None = None,
        first: int = 0,
        # All numbers are at most 99, so they have at most two digits. Bisection finds one of
        # 31 = 2^5 - 1 numbers in at most five guesses.
        below: int = 69,
        size: int = 31,
        max_turns: int = 5,
        split: str = "train",
        halving: float = 1.0,
        prompt: str = "{low}-{high}",
    ) -> None:
        if below < 1 or size < 2 or max_turns < 1:
            raise UsageError(f"below={below}, size={size}, max_turns={max_turns}: expected at least 1, 2 and 1")
        require_choice("split", split, SPLITS)
        require_share("halving", halving, "the guesses")
        if not {"{low}", "{high}"} <= set(re.findall(r"\{\w+\}", prompt)):
            raise UsageError(
                f"prompt={prompt!r} does not show the range. Fix: write {{low}} and {{high}} where they belong"
            )
        self.seed, self.first, self.below, self.size, self.split = seed, first, below, size, split
        self.max_turns, self.halving, self.prompt = max_turns, halving, prompt
        self.length = task_length(first, count)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length)
        rng = random.Random(f"{self.seed}/{self.first + index}")
        low, number = self._draw_range(rng)
        while self.split != "all" and is_held_out(f"{low}/{number}") != (self.split == "heldout"):
            low, number = self._draw_range(rng)
        high = low + self.size - 1
        message = {"role": "user", "content": self.prompt.replace("{low}", str(low)).replace("{high}", str(high))}
        name = f"guess-{self.split}-{self.seed}-{self.first + index:06d}"
        return Problem(name, (message,), {"low": low, "high": high, "number": number})

    def environment(self, problem: Problem, seed: int) -> "GuessNumberEnvironment":
        return GuessNumberEnvironment(problem.answer["number"])

    def solution(self, problem: Problem) -> list[Message]:
        """Returns the turns of a won game. It may take more than `max_turns` turns."""
        first, last, number = (problem.answer[name] for name in ("low", "high", "number"))
        rng, game, messages, low, high = random.Random(problem.id), GuessNumberEnvironment(number), [], first, last
        while True:
            guess = (low + high) // 2 if rng.random() < self.halving else rng.randint(first, last)
            messages.append({"role": "assistant", "content": str(guess)})
            turn = game.step(messages[-1])
            if turn.done:
                return messages
            low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
            messages += turn.messages

    def _draw_range(self, rng: random.Random) -> tuple[int, int]:
        low = rng.randint(1, self.below)
        return low, rng.randint(low, low + self.size - 1)


class GuessNumberEnvironment:
    """Environment of one game: reward 1 for the right number. Invalid input ends the game."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, message: Message) -> EnvironmentReply:
        text = strip_thinking(message["content"]).strip()
        if not re.fullmatch(r"[0-9]{1,9}", text):
            return EnvironmentReply(done=True, parts={"accuracy": 0.0, "failed": 1.0}, note="no number")
        if int(text) == self.number:
            return EnvironmentReply(reward=1.0, done=True, parts={"accuracy": 1.0, "failed": 0.0})
        answer = "higher" if int(text) < self.number else "lower"
        return EnvironmentReply([{"role": "user", "content": answer}], parts={"accuracy": 0.0, "failed": 0.0})
