"""How much of an answer is right. Two rules: the published one, and the exact one that lets times score.

Both look for "A. answer", take the last one for each letter, and compare without regard to case. The published rule
(OpenPipe, deductive-reasoning) has no digits among the letters of an answer, so "11:30 PM" never matches: with it the
gold answers of the 64 public validation puzzles score 0.926 on average. It is there to compare with published results.
"""

import re
from functools import lru_cache

ANSWER_LETTERS = {"published": r"A-Za-z \.:-", "exact": r"A-Za-z0-9 \.:-"}


@lru_cache(maxsize=256)
def _pattern(key: str, letters: str) -> re.Pattern:
    return re.compile(rf"{re.escape(key)}\. ([{letters}]+)")


def right_answers(solution: dict[str, str], text: str, grader: str = "exact") -> dict[str, bool]:
    """For each letter, whether the last answer to it in `text` is the one in `solution`."""
    letters = ANSWER_LETTERS[grader]
    right = {}
    for key, answer in solution.items():
        found = _pattern(key, letters).findall(text)
        right[key] = bool(found) and found[-1].strip().lower() == answer.lower()
    return right


def answered(solution: dict[str, str], text: str) -> float:
    """The fraction of the questions to which `text` holds any answer in the right format."""
    return sum(bool(_pattern(key, ANSWER_LETTERS["exact"]).search(text)) for key in solution) / len(solution)
