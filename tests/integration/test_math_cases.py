"""Cases of other projects' graders, each at the level it is tagged for, and real questions through the grading processes.

A case that we judge otherwise stands in `DEVIATIONS` with the reason. An unlisted deviation fails, and so does a listed one
that is none any more.
"""

import json

import pytest

pytest.importorskip("math_verify")

from torchtune_ext.grading import Grader
from torchtune_ext.tasks.answers import (
    MathGrader,
    after_hashes,
    answers_equal,
    gold_answer,
    has_single_thought,
    last_box,
)
from torchtune_ext.tasks.math import Math
from torchtune_ext.tasks.prose_values import last_values

REFUSED = "refused"  # the right answer is none: a task with it does not load

# file and index -> (what we say, why)
DEVIATIONS = {
    "equivalence 1": (True, "10, 4, -2 is the set 4, 10, -2; the source compares strings"),
    "equivalence 8": (True, "0.1, 4, 2 is the set 4, .1, 2; the source compares strings"),
    "equivalence 55": (True, "2/4 = 1/2; the source wants lowest terms"),
    "equivalence 65": (True, "2/4 = 1/2; the source wants lowest terms"),
    "equivalence 123": (True, "sqrt(2) in plain text is read; the source's parser misses it"),
    "equivalence 131": (True, "43 is 'forty three'; the source skips such samples"),
    "equivalence 140": (True, "42 is 'forty two'; the source skips such samples"),
    "equivalence 130": (
        True,
        "the right answer is the words 'forty two', and they are given; the source skips such samples",
    ),
    "normalization 19": (REFUSED, "a right answer that is empty; end tokens never reach a grader"),
    "normalization 37": (False, "'a' is a variable, not an article"),
    "normalization 38": (False, "end tokens never reach a grader: texts are decoded without special tokens"),
    "normalization 39": (False, "end tokens never reach a grader: texts are decoded without special tokens"),
}

# level -> the options under which our grader is meant to do the same
COMPLETIONS = {
    "completion_gsm8k": {},
    "completion_math_verify": {},
    "completion_answer_line": {},
    "completion_trl_accuracy": {},
    "completion_boxed_required": {"require_box": True},
    "completion_strict_box": {"require_box": True},
    "completion_geometry3k": {"brackets": True},
    "completion_trl_reasoning_accuracy": {"require_thinking": True},
}
EQUALITIES = {"string", "sympy", "mathd", "prime_grade_answer"}


@pytest.fixture(scope="module")
def cases(data_dir):
    folder = data_dir / "math-cases"
    if not folder.is_dir():
        pytest.skip(f"no cases in {folder}")
    return lambda name: enumerate(json.loads((folder / f"{name}_cases.json").read_text()))


def check(name, cases, judge, expected):
    """Every case of a file: judged as expected, or as `DEVIATIONS` says."""
    differences, numbers = {}, []
    for number, case in cases:
        numbers.append(number)
        try:
            answer = judge(case)
        except ValueError:
            answer = REFUSED
        if answer not in expected(case):
            differences[f"{name} {number}"] = answer
    listed = {key: answer for key, (answer, _) in DEVIATIONS.items() if key.startswith(f"{name} ")}
    assert differences == listed
    return len(numbers)


def test_equivalence(cases):
    def judge(case):
        level, gold, answer = case["level"].split()[0], gold_answer(case["gold"]), case["pred"]
        if level in EQUALITIES:
            return answers_equal(gold, answer)
        options = {"require_box": case["options"]["strict_box"]} if level == "completion_dapo" else COMPLETIONS[level]
        return MathGrader(**options)(gold, answer).reward == 1.0

    def expected(case):
        """A right answer that is missing or no mathematics (null: the source skips the sample) may not be rewarded."""
        if case["equal"] is None:
            return (False, REFUSED)
        return (False, REFUSED) if case["gold"] in (None, "") else (case["equal"],)

    assert check("equivalence", cases("other_equivalence"), judge, expected) == 141


def test_extraction(cases):
    def judge(case):
        text = case["input"]
        if case["op"] == "gsm8k_final_answer":
            return after_hashes(text)
        if case["op"] == "final_int":  # our last resort; the value counts
            answer, gold = last_values(text), case["expected"]
            return gold if answer and answers_equal(str(gold), answer[-1]) else answer or None
        return last_box(text)

    def expected(case):
        gold = case["expected"]  # ours goes without the wrapper
        return (gold[gold.index("{") + 1 : -1] if gold and case["op"] == "last_boxed_with_wrapper" else gold,)

    assert check("extraction", cases("extraction"), judge, expected) == 54


def test_normalization(cases):
    """We have no normal form: an answer and its normal form must be equal for us."""

    def judge(case):
        return answers_equal(gold_answer(case["expected"]), case["input"])

    def expected(case):
        return (True,) if case["expected"] is not None else (REFUSED,)

    assert check("normalization", cases("normalization"), judge, expected) == 51


def test_think_format(cases):
    assert (
        check(
            "think",
            cases("think_format"),
            lambda c: float(has_single_thought(c["completion"])),
            lambda c: (c["expected"],),
        )
        == 14
    )


def files(data_dir):
    paths = (
        data_dir / "gsm8k" / "train.jsonl",
        data_dir / "gsm8k" / "test.jsonl",
        data_dir / "math" / "svamp_test.jsonl",
    )
    if not all(path.is_file() for path in paths):
        pytest.skip(f"no GSM8K or SVAMP in {data_dir}")
    return map(str, paths)


@pytest.mark.slow
@pytest.mark.rest
def test_math_reference_solutions_score_only_own_question(data_dir):
    train, test, svamp = files(data_dir)
    for task in (
        Math("gsm8k", path=train, count=1000, unmarked="last_number"),
        Math("svamp", svamp, unmarked="last_number"),
    ):
        problems = [task[i] for i in range(1000)]
        others = [
            (p, task.solution(q))
            for p, q in zip(problems, problems[1:] + problems[:1], strict=True)
            if p.answer != q.answer
        ]
        plain = [(p, f"It is {p.answer}.00 in the end") for p in problems]  # no box, and no shortcut
        with Grader(task, workers=2, timeout_s=60) as grader:
            right = grader.grade([(p, task.solution(p)) for p in problems])
            wrong = grader.grade(others)
            read = grader.grade(plain)
        assert [getattr(o, "reward", None) for o in right] == [1.0] * 1000
        assert [o.parts["format"] for o in right] == [1.0] * 1000
        assert len(others) > 900 and {getattr(o, "reward", None) for o in wrong} == {0.0}
        assert [getattr(o, "reward", None) for o in read] == [1.0] * 1000
        assert len({problem.id for problem in problems}) == 1000
    assert len(Math("gsm8k", path=train)) == 7473 and len(Math("gsm8k", test, split="test")) == 1319
