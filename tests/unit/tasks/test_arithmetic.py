"""The arithmetic task against Python's own evaluation of its questions."""

import ast
import operator
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtune_ext.settings.components import Component
from torchtune_ext.tasks.arithmetic import (
    LEVELS,
    MAX_GUESS_ERROR,
    Arithmetic,
    intermediate_values,
    is_held_out,
    last_integer,
)
from torchtune_ext.tasks.task import ENDLESS_LENGTH, Problem

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TASK = Arithmetic()
PROBLEM = TASK[0]
HERE = "torchtune_ext.tasks.arithmetic.Arithmetic"


def value(node):
    """What Python's grammar makes of an expression."""
    if isinstance(node, ast.Constant):
        return node.value
    return OPERATORS[type(node.op)](value(node.left), value(node.right))


def evaluated(question):
    assert question.endswith("=")
    return value(ast.parse(question[:-1], mode="eval").body)


def question_of(problem):
    (message,) = problem.messages
    return message["content"]


@pytest.mark.parametrize("level", LEVELS)
def test_arithmetic_level_has_declared_numbers_and_operators(level):
    form, task = LEVELS[level], Arithmetic(seed=3, level=level)
    counts, signs = set(), set()
    for index in range(300):
        question = question_of(task[index])
        numbers = re.findall(r"[0-9]+", question)
        counts.add(len(numbers))
        signs |= set(re.findall(r"[-+*]", question))
        assert all(str(int(number)) == number and int(number) < form.below for number in numbers)
        assert question.count("(") == question.count(")") == form.brackets
        assert task[index].answer[-1] == evaluated(question)
        assert len(task[index].answer) == len(numbers) - 1
    assert counts == set(range(form.numbers[0], form.numbers[1] + 1))
    assert signs == set(form.operators)


@given(index=st.integers(0, ENDLESS_LENGTH - 1), seed=st.integers(0, 2**40), level=st.sampled_from(sorted(LEVELS)))
def test_arithmetic_solution_scores_and_wrong_number_does_not(index, seed, level):
    task = Arithmetic(seed=seed, level=level)
    problem = task[index]
    right = evaluated(question_of(problem))
    for text, reward in ((task.solution(problem), 1.0), (str(right), 1.0), (f"{right} {right + 1}", 0.0)):
        score = task.grade(problem, text)
        assert (score.reward, score.parts) == (reward, {"accuracy": reward, "failed": 0.0})


@pytest.mark.parametrize(
    ("question", "values"),
    [
        ("7+5=", [12]),
        ("7-5*3=", [15, -8]),
        ("7*(5-9)=", [-4, -28]),
        ("2-(3-9)-4*5=", [-6, 20, 8, -12]),
        ("10-2-3=", [8, 5]),
    ],
)
def test_worked_steps(question, values):
    assert intermediate_values(question) == values


@pytest.mark.parametrize(("question", "text"), [("7+5=", "12"), ("7+5-9=", "(12) 3"), ("7*(5-9)+2=", "(-4 -28) -26")])
def test_a_solution_shows_the_steps(question, text):
    assert (
        TASK.solution(Problem("one", ({"role": "user", "content": question},), intermediate_values(question))) == text
    )


def test_a_share_of_the_solutions_is_guessed():
    """1,000 fair draws of 0.25 have a standard deviation of 0.0137; a guess is right in 1 of 7, as 250 draws show to 0.022."""
    task = Arithmetic(level=4, guessed=0.25)
    problems = [task[i] for i in range(1000)]
    guesses = [(p, text) for p in problems if "(" not in (text := task.solution(p))]
    assert len(guesses) / 1000 == pytest.approx(0.25, abs=4 * 0.0137)
    assert {int(text) - p.answer[-1] for p, text in guesses} == set(range(-MAX_GUESS_ERROR, MAX_GUESS_ERROR + 1))
    right = sum(task.grade(p, text).reward for p, text in guesses)
    assert right / len(guesses) == pytest.approx(1 / 7, abs=4 * 0.022)
    assert all(task.grade(p, task.solution(p)).reward == 1.0 for p in problems if "(" in task.solution(p))


@pytest.mark.parametrize("level", [1, 3, 6, {2: 1.0, 8: 3.0}])
def test_held_out_questions_are_never_trained_on(level):
    """Whatever the seeds: here both have the same one, and the small levels are drawn many times over."""
    trained, heldout = (
        {question_of(task[i]) for i in range(3000)}
        for task in (Arithmetic(seed=0, level=level, split=split) for split in ("train", "heldout"))
    )
    assert trained and heldout and not trained & heldout


def test_arithmetic_splits_are_disjoint_and_cover_all_questions():
    """Level 1 has 100 questions; 1,500 draws miss one of its 90 training ones with a chance of 90 exp(-1500 / 90) < 1e-5."""
    every = {f"{a}+{b}=" for a in range(10) for b in range(10)}
    trained, heldout, both = (
        {question_of(task[i]) for i in range(1500)}
        for task in (Arithmetic(split=s) for s in ("train", "heldout", "all"))
    )
    assert trained | heldout == both == every
    assert not trained & heldout


def test_one_question_in_eight_is_held_out():
    """4,000 questions of level 4: the share of a fair hash has a standard deviation of sqrt(1/8 * 7/8 / 4000)."""
    every = [f"{a}{s}{b}{t}{c}=" for a in range(10) for b in range(10) for c in range(10) for s in "+-" for t in "+-"]
    assert sum(map(is_held_out, every)) / len(every) == pytest.approx(1 / 8, abs=4 * 0.0052)


def test_arithmetic_problem_depends_only_on_index():
    task = Arithmetic(seed=5, level=[3, 7])
    later = Arithmetic(seed=5, level=[3, 7], first=10, count=4)
    assert [later[i] for i in range(4)] == [task[i] for i in range(10, 14)]
    assert pickle.loads(pickle.dumps(task))[7] == task[7]
    assert task[0] != Arithmetic(seed=6, level=[3, 7])[0]
    assert len({task[i].id for i in range(100)}) == 100
    assert len(task) == ENDLESS_LENGTH and len(later) == 4
    with pytest.raises(IndexError, match="question 4 of 4"):
        later[4]


def test_levels_are_mixed_by_weight():
    """Brackets tell level 7 from 3: 1 in 4 of 4,000, with a standard deviation of sqrt(0.25 * 0.75 / 4000) = 0.0068."""
    task = Arithmetic(level={3: 3, 7: 1})
    share = sum("(" in question_of(task[i]) for i in range(4000)) / 4000
    assert share == pytest.approx(0.25, abs=4 * 0.0068)


@pytest.mark.parametrize(
    "text, number",
    [
        ("42", 42),
        ("12 -3", -3),
        ("(12) -3", -3),
        ("(12)", None),
        ("17+25=42", 42),
        ("17 + 25 = 42.\n", 42),
        ("It is 42", 42),
        ("", None),
        (" \n", None),
        ("42 apples", None),
        ("3.5", None),
        ("19-14", None),
        ("--5", None),
        ("٤٢", None),
        ("1" * 5000, None),
    ],
)
def test_last_integer(text, number):
    assert last_integer(text) == number
    score = TASK.grade(PROBLEM, text)
    assert score.parts["failed"] == float(number is None)


@given(st.text())
def test_no_text_makes_the_grader_raise(text):
    assert TASK.grade(PROBLEM, text).reward in (0.0, 1.0)


def test_settings_come_from_yaml():
    node = {
        "_component_": HERE,
        "seed": 4,
        "level": {3: 1, 4: 2.5},
        "prompt": "{question} Think, then end with the number.",
    }
    task = Component(node, "task").instantiate()
    assert task.weights == {3: 1.0, 4: 2.5}
    assert question_of(task[0]).endswith("= Think, then end with the number.")
    assert Component({"_component_": HERE, "level": [3, 4]}, "task").instantiate().weights == {
        3: 1.0,
        4: 1.0,
    }


@pytest.mark.parametrize(
    "knobs, message",
    [
        ({"level": 11}, "level={11: 1.0}: invalid. Fix: give a level from 1 to 10"),
        ({"level": []}, "level={}: invalid. Fix: give a level"),
        ({"level": {3: -1, 4: 2}}, "level={3: -1, 4: 2}: invalid. Fix: give"),
        ({"level": {3: 0}}, "not all 0"),
        ({"split": "test"}, "split='test': unknown. Fix: choose one of train, heldout, all"),
        ({"first": -1}, "first=-1, count=None"),
        ({"count": 0}, "count=0: out of range"),
        ({"guessed": 1.5}, "guessed=1.5: expected a fraction"),
        ({"prompt": "Compute"}, "prompt='Compute': no place for the question"),
    ],
)
def test_arithmetic_invalid_arguments_are_named(knobs, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Arithmetic(**knobs)
