"""Temporal Clue task: deduction puzzles after the board game, generated or read from a file."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torchtune_ext.run.errors import UsageError, UsageFileError
from torchtune_ext.tasks.answers import strip_thinking
from torchtune_ext.tasks.grade_functions import GradeFunction, GroupGradeFunction, use_graders
from torchtune_ext.tasks.task import Problem, Score, require_index, task_length
from torchtune_ext.tasks.temporal_clue.files import read_puzzles
from torchtune_ext.tasks.temporal_clue.puzzle import make_puzzle
from torchtune_ext.tasks.temporal_clue.size import Size, parse_size

ANSWER_LETTERS = {"published": r"A-Za-z \.:-", "exact": r"A-Za-z0-9 \.:-"}
# Words after a letter that is only mentioned, not answered: "see B. above".
NOT_ANSWERS = "above|below|see|because|is|was|who|what|where|when|why"


class TemporalClue:
    """Temporal Clue task. The reward is the fraction of the questions with a right answer.

    Args:
        seed: seed of the generated puzzles. Puzzle i depends only on (seed, i, size).
        count: number of puzzles; None: endless, or the rest of the file.
        size: a `Size`, a name ("2", "3", "small", "public"), or a mapping such as
            {suspects: [2, 3], weapons: 2}.
        grader: "exact"; "published", which never accepts a time; or the dotted path of a function
            (problem, text) that replaces `grade`. `problem.answer` maps letters to answers.
        path: a JSON or JSONL file of puzzles to read instead of generating them.
        first: index of the first puzzle. It separates training and held-out puzzles.
        group_grader: dotted path of a function (problem, texts), for all samples of a puzzle.

    Raises:
        UsageError: an argument is invalid, or the file has too few puzzles.
        UsageFileError: the file is missing.
    """

    def __init__(
        self,
        seed: int = 0,
        count: int | None = None,
        size: Size | str | Mapping = "small",
        grader: str | GradeFunction = "exact",
        path: str | None = None,
        first: int = 0,
        group_grader: str | GroupGradeFunction | None = None,
    ) -> None:
        if isinstance(grader, str) and grader not in ANSWER_LETTERS and "." not in grader:
            raise UsageError(
                f"grader={grader!r}: unknown. Fix: choose 'exact' or 'published', or name a function: grader: "
                "my_reward.f for my_reward.py"
            )
        length = task_length(first, count)
        self.rule = grader if isinstance(grader, str) and grader in ANSWER_LETTERS else "exact"
        use_graders(self, None if grader == self.rule else grader, group_grader)
        self.seed, self.first = seed, first
        self.size = parse_size(size)
        if path is not None and not Path(path).is_file():
            # Held-out puzzles have another seed, so that they are never trained on.
            other = " --seed 1" if "val" in Path(path).stem or "test" in Path(path).stem else ""
            raise UsageFileError(
                f"path={path!r}: file not found in {Path.cwd()}. Fix: `torchtune-ext clue --size public{other} --count "
                f"{(first + (count or 0)) or 3000} --out {path}`"
            )
        self.puzzles = None if path is None else read_puzzles(path, first, count)
        self.prefix = f"clue-{seed}" if path is None else "clue-file"
        self.length = length if self.puzzles is None else len(self.puzzles)
        if self.puzzles is not None and (not self.puzzles or len(self.puzzles) < (count or 0)):
            raise UsageError(
                f"path={path!r}: too few puzzles ({len(self.puzzles)}) for first={first}, count={count}. Fix: lower them"
            )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Problem:
        require_index(index, self.length, "puzzle")
        read = self.puzzles
        puzzle = _puzzle(self.seed, self.first + index, self.size) if read is None else read[index]
        message = {"role": "user", "content": puzzle.prompt}
        return Problem(f"{self.prefix}-{self.first + index:06d}", (message,), puzzle.solution)

    def grade(self, problem: Problem, text: str) -> Score:
        """Grades a text.

        Parts: "accuracy", the fraction of right answers; "solved", 1.0 if all are right; "format",
        the fraction of questions with any answer in the right format.
        """
        right = right_answers(problem.answer, text, self.rule).values()
        reward, answered = sum(right) / len(right), extract_answers(text, problem.answer)
        parts = {"accuracy": reward, "solved": float(all(right)), "format": len(answered) / len(right)}
        return Score(reward, parts)

    def solution(self, problem: Problem) -> str:
        """Returns the answers as in the prompt: reward 1.0 (less for times with "published")."""
        return "\n".join(f"{letter}. {answer}" for letter, answer in problem.answer.items())


_puzzle = lru_cache(maxsize=4096)(make_puzzle)


# Both rules use the last answer for each letter, and ignore case. The published rule (OpenPipe,
# deductive-reasoning) searches for "A. answer" anywhere, and does not allow digits in an answer, so
# "11:30 PM" never matches. With this rule, the reference answers of the 64 public validation
# puzzles get a mean reward of 0.926. It exists to compare results with published results. The exact
# rule also reads "A: answer", "- A) answer" and "**A.** answer" at the start of a line.
@lru_cache(maxsize=256)
def _patterns(key: str, grader: str) -> list[re.Pattern]:
    if grader == "published":
        return [re.compile(rf"{re.escape(key)}\. ([{ANSWER_LETTERS[grader]}]+)")]
    key, answer = re.escape(key), rf"((?!(?i:{NOT_ANSWERS})\b)[A-Za-z0-9][{ANSWER_LETTERS[grader]}]*)"
    # Emphasis may enclose letter and answer. In "Signed, J. A. Watson", the letter is an initial.
    starts = rf"(?<!\b[A-Z]\. ){key}[*_`]*\.[*_`]* [ *_`]*", rf"^[ >#(*_`-]*{key}[*_`]*[.:)][ .:)*_`]*"
    return [re.compile(start + answer, re.MULTILINE) for start in starts]


def extract_answers(text: str, solution: Mapping[str, str], grader: str = "exact") -> dict[str, str]:
    """Returns the last answer in `text` for each letter of `solution` that has one."""
    text, margin, most_words = strip_thinking(text), " ", len(text)
    if grader != "published":
        text, margin = re.sub(r"[^\S\r\n]", " ", text), " .:-"
        # "A. Who murdered Mr. Boddy?" repeats a question.
        most_words = max(len(answer.split()) for answer in solution.values())
    found = {}
    for key in solution:
        matches = [match for pattern in _patterns(key, grader) for match in pattern.finditer(text)]
        answers = {match.start(1): match[1].strip(margin) for match in matches}
        if places := [place for place, answer in answers.items() if len(answer.split()) <= most_words]:
            found[key] = answers[max(places)]
    return found


def right_answers(solution: dict[str, str], text: str, grader: str = "exact") -> dict[str, bool]:
    """Tells for each letter whether the last answer in `text` equals the answer in `solution`."""
    found = extract_answers(text, solution, grader)
    return {key: found.get(key, "").lower() == answer.lower() for key, answer in solution.items()}
