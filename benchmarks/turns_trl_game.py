"""The number-guessing game of turns_trl.py, as a class in TRL's convention, with its rows and solutions."""

import json
import random

from torchtune_ext.tasks.tool_class import ToolClass


class Number:
    def reset(self, number, **row):
        self.number, self.is_won = number, False

    def guess(self, number: int) -> str:
        """Says whether the hidden number is higher or lower.

        Args:
            number: what is guessed.
        """
        self.is_won |= number == self.number
        return "right" if number == self.number else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.is_won)


class GuessingTask(ToolClass):
    """The game with solutions: half of the guesses bisect the remaining range, the others are random in it."""

    def solution(self, problem):
        low, high, number = (problem.example[name] for name in ("low", "high", "number"))
        rng, messages, game, guess = random.Random(problem.id), [], Number(), None
        game.reset(number)
        while guess != number:
            guess = (low + high) // 2 if rng.random() < 0.5 else rng.randint(low, high)
            call, answer = json.dumps({"name": "guess", "arguments": {"number": guess}}), game.guess(guess)
            messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
            messages.append({"role": "tool", "name": "guess", "content": answer})
            low, high = (guess + 1, high) if answer == "higher" else (low, guess - 1)
        return [*messages, {"role": "assistant", "content": f"It is {number}."}]


def make_rows(count: int, seed: int) -> list[dict]:
    """Numbers from 1 to 13, in ranges of 5."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        low = rng.randint(1, 9)
        prompt = [{"role": "user", "content": f"Guess a number from {low} to {low + 4}."}]
        rows.append({"prompt": prompt, "low": low, "high": low + 4, "number": rng.randint(low, low + 4)})
    return rows
