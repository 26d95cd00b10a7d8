"""Arithmetic: generated without end, cheap to sample and to grade, so that a run takes a minute and can be repeated.

A question is terse, "7+5-9=", and its solution has the values on the way in brackets, then the answer: "(12) 3". A
character is a token for a tokenizer without merges, so a completion has from 2 to about 12 of them, at level 9 about
20. Only the last number is graded: whether to work before answering is the policy's affair.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from torchtune_ext.tasks.task import Problem, Score

ENDLESS = 2**31 - 1  # the length of the task without a count
SPLITS = ("train", "heldout", "all")
HELD_OUT = 8  # one question in so many is held out
NEAR = 3  # of a guess


@dataclass(frozen=True, slots=True)
class Form:
    """What the questions of a level look like."""

    numbers: tuple[int, int]  # how many, least and most
    below: int  # every number is in [0, below)
    operators: str  # drawn from these with equal chances
    brackets: bool = False  # one pair, around two neighbors


LEVELS = {
    1: Form((2, 2), 10, "+"),  # 7+5=
    2: Form((2, 2), 100, "+-"),  # 17-25=
    3: Form((3, 4), 10, "+"),  # 7+5+9+3=
    4: Form((3, 4), 10, "+-"),  # 7+5-9=
    5: Form((2, 4), 20, "+-"),  # 17-9+3+12=
    6: Form((2, 3), 10, "+-*"),  # 7-5*3=
    7: Form((3, 4), 10, "+-*", brackets=True),  # 7*(5-9)+2=
    8: Form((5, 7), 100, "+-*", brackets=True),  # 17-25*(3+61)+88-4=
    9: Form((6, 8), 10, "+"),  # 7+5+9+3+1+0+8=: long, not hard
}


class Arithmetic:
    """The task. The reward is 1 for the right integer, else 0.

    Args:
        seed: of the questions; question i depends on (seed, first + i, level, split) alone.
        count: how many; None: without end. Low levels have few different questions (level 1 has 100), which repeat.
        first: index of the first one.
        level: one of 1 to 9 (see `LEVELS`), several that are equally likely ([3, 4]), or {level: weight}.
        split: "train", "heldout" or "all". The hash of a question decides on which side it stands, one in eight is held
            out: no seed, level or index makes a training question appear among the held-out ones.
        prompt: the user's message; {question} stands for "17+25=".
        guessed: share of the solutions that are a guess: a number at most `NEAR` from the answer, without steps. A
            policy that was warmed up on both is left to find out that working pays.
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
    ) -> None:
        if first < 0 or (count is not None and count < 1):
            raise ValueError(f"first={first}, count={count}: first counts from 0, count from 1")
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: choose one of {', '.join(SPLITS)}")
        if "{question}" not in prompt:
            raise ValueError(f"prompt={prompt!r} shows no question: write {{question}} where it belongs")
        if not 0.0 <= guessed <= 1.0:
            raise ValueError(f"guessed={guessed} is a share of the solutions: give a number from 0 to 1")
        self.seed, self.first, self.split, self.prompt, self.guessed = seed, first, split, prompt, guessed
        self.length = ENDLESS if count is None else count
        self.weights = _weights(level)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < self.length:
            raise IndexError(f"question {index} of {self.length}")
        rng = random.Random(f"{self.seed}/{self.first + index}")
        (level,) = rng.choices(list(self.weights), list(self.weights.values()))
        question = draw(rng, LEVELS[level])
        while self.split != "all" and held_out(question) != (self.split == "heldout"):
            question = draw(rng, LEVELS[level])
        message = {"role": "user", "content": self.prompt.replace("{question}", question)}
        name = f"arithmetic-{self.split}-{self.seed}-{self.first + index:06d}"
        return Problem(name, (message,), steps(question))

    def grade(self, problem: Problem, text: str) -> Score:
        """Parts: `accuracy`, and `failed` for a text that does not end with an integer."""
        said = last_integer(text)
        right = float(said == problem.answer[-1])
        return Score(right, {"accuracy": right, "failed": float(said is None)})

    def solution(self, problem: Problem) -> str:
        """The steps, then the answer, which scores 1.0; for the share `guessed` of the problems a guess."""
        rng, (*way, answer) = random.Random(problem.id), problem.answer
        if rng.random() < self.guessed:
            return str(answer + rng.randint(-NEAR, NEAR))
        return f"({' '.join(map(str, way))}) {answer}" if way else str(answer)


def draw(rng: random.Random, form: Form) -> str:
    """A question: "7*(5-9)="."""
    words = [str(rng.randrange(form.below)) for _ in range(rng.randint(*form.numbers))]
    operators = [rng.choice(form.operators) for _ in words[1:]]
    if form.brackets:
        at = rng.randrange(len(operators))
        words[at], words[at + 1] = f"({words[at]}", f"{words[at + 1]})"
    return "".join(word + sign for word, sign in zip(words, [*operators, "="], strict=True))


def held_out(question: str) -> bool:
    """Whether a question belongs to the held-out ones: by its hash, so everywhere and for ever."""
    return sha256(question.encode()).digest()[0] % HELD_OUT == 0


def steps(question: str) -> list[int]:
    """The values of a question's operations in the order of precedence: the bracket first, then * before + and -."""
    words, values = re.findall(r"[0-9]+|[-+*()]", question), []
    if "(" in words:
        left, right = words.index("("), words.index(")")
        words[left : right + 1] = [str(_reduce(words[left + 1 : right], values))]
    _reduce(words, values)
    return values


def _reduce(words: list[str], values: list[int]) -> int:
    """Works out numbers and operators without brackets; appends the value of every operation to `values`."""
    words = list(words)
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
    """The last word of a text as an integer, a full stop behind it aside; None where it is no integer."""
    words = re.split(r"[\s=]+", text.strip().removesuffix("."))
    return int(words[-1]) if re.fullmatch(r"-?[0-9]{1,18}", words[-1]) else None


def _weights(level: int | Sequence[int] | Mapping[int, float]) -> dict[int, float]:
    if not isinstance(level, Mapping):
        level = dict.fromkeys([level] if isinstance(level, int) else level, 1.0)
    if not level or not set(level) <= LEVELS.keys() or min(level.values()) < 0 or not sum(level.values()) > 0:
        raise ValueError(
            f"level={dict(level)}: give a level from 1 to {max(LEVELS)}, several ([3, 4]), or {{level: weight}} with weights "
            "that are not negative and not all 0"
        )
    return {int(key): float(weight) for key, weight in level.items()}
