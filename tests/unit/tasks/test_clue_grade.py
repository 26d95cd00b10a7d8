"""The two graders of Temporal Clue: the published rule, case by case, and the one that lets times score."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.clue_reader import DATA, needs_public, public_puzzles
from torchtune_ext.tasks.task import Problem
from torchtune_ext.tasks.temporal_clue import TemporalClue
from torchtune_ext.tasks.temporal_clue.task import right_answers

SOLUTION = {"A": "Colonel Mustard", "B": "Rope", "C": "Dining Room", "D": "11:30 PM", "E": "Fear"}
GOLD = "A. Colonel Mustard\nB. Rope\nC. Dining Room\nD. 11:30 PM\nE. Fear"


def reward(text: str, grader: str, solution: dict[str, str] = SOLUTION) -> float:
    return TemporalClue(grader=grader).grade(Problem("p", ({"role": "user", "content": "?"},), solution), text).reward


def published(solution: dict[str, str], text: str) -> float:
    """The published rule, written out once more."""
    right = 0
    for key, value in solution.items():
        matches = re.findall(rf"{key}\. ([A-Za-z \.:-]+)", text)
        right += bool(matches) and matches[-1].strip().lower() == value.lower()
    return right / len(solution)


@needs_public
def test_all_published_cases():
    cases = json.loads((DATA / "grader_cases.json").read_text())
    assert len(cases) == 27
    # The published rule with digits denies these right answers.
    read = {"bold_key", "bold_value", "full_stop", "colon_style", "no_space", "late_initial", "unicode_space"}
    for case in cases:
        assert reward(case["content"], "published", case["solution"]) == case["reference_reward"], case["name"]
        expected = 1.0 if case["name"] in read else case["digits_allowed_reward"]
        assert reward(case["content"], "exact", case["solution"]) == expected, case["name"]


@pytest.mark.parametrize(
    "text, exact, old",
    [
        (GOLD, 1.0, 0.8),
        (GOLD.lower().replace("a. ", "A. ").replace("b. ", "B. "), 0.4, 0.4),  # the letters must be capitals
        ("I first thought A. Mr. Green\n" + GOLD, 1.0, 0.8),  # the last one counts
        (GOLD + "\nA. Mr. Green", 0.8, 0.6),
        (GOLD.replace("11:30 PM", "11:30 pm  "), 1.0, 0.8),
        (GOLD.replace("11:30 PM", "11:45 PM"), 0.8, 0.8),
        (f"<think>{GOLD}", 0.0, 0.0),
        (f"<think>{GOLD}</think> <think>{GOLD}", 0.0, 0.0),
        (f"<think>A. Mr. Green</think>{GOLD}\nSee B. above.", 1.0, 0.6),
        (GOLD.replace("\n", ".\n") + ".", 1.0, 0.0),
        (re.sub(r"([A-E])\. ", r"- **\1:** ", GOLD), 1.0, 0.0),
        (re.sub(r"([A-E])\. (.*)", r"(\1) _\2_", GOLD), 1.0, 0.0),
        (GOLD.replace(". ", ".\u00a0").replace(" ", "\u202f"), 1.0, 0.0),
        (GOLD.replace("Rope", "Rope or Knife").replace("Fear", "Fear Greed"), 0.6, 0.4),
        (GOLD + "\nB: Knife", 0.8, 0.8),
        (GOLD + "\n\nA. \nB:\nC.\nD. \nE. ...", 1.0, 0.6),
        ("### A. Who did it?\nHe.\n### B. Where?\n\nSo: " + GOLD.replace("\n", ", "), 1.0, 0.8),
        (GOLD + "\n\nWait. So A. Mr. Green", 0.8, 0.6),
        ("A. Mr. Green\n" + GOLD[19:] + "\n\nWait. So A. Colonel Mustard", 1.0, 0.8),
        (re.sub(r"([A-E].*)\n?", r"So **\1** it is. ", GOLD), 1.0, 0.8),
        ("A: the answer is A. Colonel Mustard", 0.2, 0.2),
        (GOLD + "\n\n- A: The third clue says so.\n- B: because of it\nC: Who knows\nD) see B. élan", 1.0, 0.8),
        ("", 0.0, 0.0),
    ],
)
def test_rules(text, exact, old):
    assert reward(text, "exact") == pytest.approx(exact)
    assert reward(text, "published") == pytest.approx(old)


def test_clue_grade_parts_reflect_missing_answers():
    problem = Problem("p", ({"role": "user", "content": "?"},), SOLUTION)
    score = TemporalClue().grade(problem, "A. Colonel Mustard\nB. Knife")
    assert score.reward == 0.2 and score.parts == {"accuracy": 0.2, "solved": 0.0, "format": 0.4}
    assert TemporalClue().grade(problem, GOLD).parts["solved"] == 1.0


def test_unknown_grader_is_refused():
    with pytest.raises(ValueError, match="grader='strict'.*'exact' or 'published'"):
        TemporalClue(grader="strict")


@needs_public
def test_gold_answers_of_the_public_validation_set():
    task = {grader: TemporalClue(path=str(DATA / "val.json"), grader=grader) for grader in ("exact", "published")}
    mean = {}
    for grader, t in task.items():
        assert len(t) == 64
        mean[grader] = sum(t.grade(t[n], t.solution(t[n])).reward for n in range(64)) / 64
    assert mean["exact"] == 1.0
    assert mean["published"] == pytest.approx(0.926, abs=0.0005)
    assert mean["published"] == sum(published(p["solution"], _gold(p["solution"])) for p in public_puzzles()[:64]) / 64


def _gold(solution: dict[str, str]) -> str:
    return "\n".join(f"{letter}. {answer}" for letter, answer in solution.items())


pieces = st.sampled_from(
    [*"ABCDE", ". ", "\n", ": ", "**", "Rope", "Fear", "11:30 PM", "Colonel Mustard", " ", "\r", "é"]
)
texts = st.text() | st.lists(pieces).map("".join)


@given(texts)
def test_clue_grade_never_raises_and_matches_published_rule(text):
    assert 0.0 <= reward(text, "exact") <= 1.0
    assert reward(text, "published") == published(SOLUTION, text)


@given(st.permutations(list(SOLUTION)), st.sets(st.sampled_from(sorted(SOLUTION))))
def test_reward_counts_the_right_answers_in_any_order(letters, wrong):
    text = "\n".join(f"{letter}. {'Nobody' if letter in wrong else SOLUTION[letter]}" for letter in letters)
    assert right_answers(SOLUTION, text) == {letter: letter not in wrong for letter in SOLUTION}
