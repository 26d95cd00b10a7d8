"""Grades answers by two rules: the published one, and the exact one, which also accepts times.

Both rules look for "A. answer", take the last one for each letter, and ignore case. The published rule (OpenPipe,
deductive-reasoning) allows no digits in an answer, so "11:30 PM" never matches. With it, the right answers of the 64
public validation puzzles get a mean reward of 0.926. It exists so that results can be compared with published ones.
"""

import re
from functools import lru_cache

ANSWER_LETTERS = {"published": r"A-Za-z \.:-", "exact": r"A-Za-z0-9 \.:-"}


@lru_cache(maxsize=256)
def _pattern(key: str, letters: str) -> re.Pattern:
    return re.compile(rf"{re.escape(key)}\. ([{letters}]+)")


def right_answers(solution: dict[str, str], text: str, grader: str = "exact") -> dict[str, bool]:
    """Tells for each letter whether the last answer to it in `text` is the one in `solution`."""
    letters = ANSWER_LETTERS[grader]
    right = {}
    for key, answer in solution.items():
        found = _pattern(key, letters).findall(text)
        right[key] = bool(found) and found[-1].strip().lower() == answer.lower()
    return right


def answered(solution: dict[str, str], text: str) -> float:
    """Returns the fraction of the questions to which `text` has any answer in the right format."""
    return sum(bool(_pattern(key, ANSWER_LETTERS["exact"]).search(text)) for key in solution) / len(solution)
