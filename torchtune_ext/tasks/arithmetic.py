"""Endless arithmetic that is cheap to sample and to grade, so a reproducible run takes a minute.

A question is short: "7+5-9=". Its solution has the intermediate values in brackets, then the
answer: "(12) 3". With one token per character, a completion has 2 to about 12 tokens, about 20 at
level 9 and about 40 at level 10.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.grade_functions import GradeFunction, GroupGradeFunction, use_graders
from torchtune_ext.tasks.task import (
    Problem,
    Score,
    require_choice,
    require_index,
    require_question,
    require_share,
    task_length,
)

SPLITS = ("train", "heldout", "all")
HELD_OUT_ONE_IN = 8  # one question in 8 is held out
MAX_GUESS_ERROR = 3  # the largest distance of a guess from the answer


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the questions of a level."""

    numbers: tuple[int, int]  # smallest and largest count of numbers
    below: int  # every number is in [0, below)
    operators: str  # operators, drawn with equal probability
    brackets: bool = False  # True: one pair of brackets around two neighboring numbers


LEVELS = {
    1: Form((2, 2), 10, "+"),  # 7+5=
    2: Form((2, 2), 100, "+-"),  # 17-25=
    3: Form((3, 4), 10, "+"),  # 7+5+9+3=
    4: Form((3, 4), 10, "+-"),  # 7+5-9=
    5: Form((2, 4), 20, "+-"),  # 17-9+3+12=
    6: Form((2, 3), 10, "+-*"),  # 7-5*3=
    7: Form((3, 4), 10, "+-*", brackets=True),  # 7*(5-9)+2=
    8: Form((5, 7), 100, "+-*", brackets=True),  # 17-25*(3+61)+88-4=
    9: Form((6, 8), 10, "+"),  # 7+5+9+3+1+0+8=, long but easy
    10: Form((12, 16), 10, "+"),  # twice as long as level 9
}


class Arithmetic:
    """Arithmetic task. The reward is 1 if the last word is the answer, else 0.

    Args:
        seed: seed of the questions. Question i depends only on (seed, first + i, level, split).
        count: number of questions; None: endless. Low levels repeat questions (level 1 has 100).
        first: index of the first question.
        level: one level from 1 to 10 (see `LEVELS`), several levels ([3, 4]) with equal
            probability, or {level: weight}.
        split: "train", "heldout" (one question in eight) or "all". The hash of a question selects
            its split, so train and heldout never overlap.
        prompt: the user's message, in which {question} stands for "17+25=".
        guessed: fraction of the solutions that are guesses, at most `MAX_GUESS_ERROR` off.
        grader: dotted path of a function (problem, text) that replaces `grade`. The last number of
            `problem.answer` is the reference answer.
        group_grader: dotted path of a function (problem, texts), for all samples of a question.

    Raises:
        UsageError: an argument is out of range, or a function is not found.
    """

    def __init__(
        self,
        seed: int = 0,
        count: int | None = None,
        first: int = 0,
        level: int | Sequence[int] | Mapping[int, float] = 1,
        split: str = "train",
        prompt: str = "{question}",
        guessed: float = 0.0,
        grader: str | GradeFunction | None = None,
        group_grader: str | GroupGradeFunction | None = None,
    ) -> None:
        require_choice("split", split, SPLITS)
        require_question(prompt)
        require_share("guessed", guessed, "the solutions")
        self.seed, self.first, self.split, self.prompt, self.guessed = seed, first, split, prompt, guessed
        self.length = task_length(first, count)
        self.weights = _level_weights(level)
        use_graders(self, grader, group_grader)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length, "question")
        rng = random.Random(f"{self.seed}/{self.first + index}")
        (level,) = rng.choices(list(self.weights), list(self.weights.values()))
        question = draw_question(rng, LEVELS[level])
        # The level is not drawn again, so both splits have the same mixture of levels.
        while self.split != "all" and is_held_out(question) != (self.split == "heldout"):
            question = draw_question(rng, LEVELS[level])
        message = {"role": "user", "content": self.prompt.replace("{question}", question)}
        name = f"arithmetic-{self.split}-{self.seed}-{self.first + index:06d}"
        return Problem(name, (message,), intermediate_values(question))

    def grade(self, problem: Problem, text: str) -> Score:
        """Grades a text. Parts: "accuracy", and "failed" (1.0 without an integer at the end)."""
        guess = last_integer(strip_thinking(text))
        right = float(guess == problem.answer[-1])
        return Score(right, {"accuracy": right, "failed": float(guess is None)})

    def solution(self, problem: Problem) -> str:
        """Returns the intermediate values and the answer, or a guess with probability `guessed`."""
        rng, (*way, answer) = random.Random(problem.id), problem.answer
        # After a warm-up on both forms, the policy can discover that intermediate values help.
        if rng.random() < self.guessed:
            return str(answer + rng.randint(-MAX_GUESS_ERROR, MAX_GUESS_ERROR))
        return f"({' '.join(map(str, way))}) {answer}" if way else str(answer)


def draw_question(rng: random.Random, form: Form) -> str:
    """Draws a question such as "7*(5-9)="."""
    words = [str(rng.randrange(form.below)) for _ in range(rng.randint(*form.numbers))]
    operators = [rng.choice(form.operators) for _ in words[1:]]
    if form.brackets:
        at = rng.randrange(len(operators))
        words[at], words[at + 1] = f"({words[at]}", f"{words[at + 1]})"
    return "".join(word + sign for word, sign in zip(words, [*operators, "="], strict=True))


def is_held_out(question: str) -> bool:
    """Tells whether a question is held out."""
    # Python's `hash` of a string differs between processes, so the split would not be reproducible.
    return sha256(question.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def intermediate_values(question: str) -> list[int]:
    """Returns the operations' values in order of evaluation: brackets, then *, then + and -."""
    words, values = re.findall(r"[0-9]+|[-+*()]", question), []
    if "(" in words:
        left, right = words.index("("), words.index(")")
        words[left : right + 1] = [str(_reduce(words[left + 1 : right], values))]
    _reduce(words, values)
    return values


def _reduce(words: list[str], values: list[int]) -> int:
    """Evaluates an expression without brackets; appends the value of each operation to `values`."""
    words = list(words)
    # The first pass computes the products.
    for signs in ("*", "+-"):
        at = 1
        while at < len(words):
            sign, a, b = words[at], int(words[at - 1]), int(words[at + 1])
            if sign in signs:
                values.append(a * b if sign == "*" else a + b if sign == "+" else a - b)
                words[at - 1 : at + 2] = [str(values[-1])]
            else:
                at += 2
    return int(words[0])


def last_integer(text: str) -> int | None:
    """Returns the last word of a text as an integer, or None if it is not an integer."""
    words = re.split(r"[\s=]+", text.strip().removesuffix("."))
    # Answers have at most 18 digits, and int() raises an error beyond 4300 digits.
    return int(words[-1]) if re.fullmatch(r"-?[0-9]{1,18}", words[-1]) else None


def _level_weights(level: int | Sequence[int] | Mapping[int, float]) -> dict[int, float]:
    if not isinstance(level, Mapping):
        level = dict.fromkeys([level] if isinstance(level, int) else level, 1.0)
    if not level or not set(level) <= LEVELS.keys() or min(level.values()) < 0 or not sum(level.values()) > 0:
        raise UsageError(
            f"level={dict(level)}: invalid. Fix: give a level from 1 to {max(LEVELS)}, several ([3, 4]), or "
            "{level: weight} with non-negative weights, not all 0"
        )
    return {int(key): float(weight) for key, weight in level.items()}
