"""Functions of a user's that grade: named by their path, called in real processes, and every mistake with its fix."""

import json
import re

import pytest

from helpers.own_files import working_in
from torchtune_ext.grading import Grader, GraderConfig, Ungraded, check_grading
from torchtune_ext.settings.components import Component
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.tasks.grade_functions import describe_function
from torchtune_ext.tasks.jsonl import Jsonl
from torchtune_ext.tasks.task import Score
from torchtune_ext.tasks.temporal_clue import TemporalClue

FUNCTIONS = '''
import json
import os
import time
from fractions import Fraction

import numpy as np

from torchtune_ext.tasks.task import Score


def says(problem, text):
    """Returns what the text says in Python."""
    return eval(text)


def unit(problem, text):
    return Score(float(problem.example["unit"] in text), {"fields": len(problem.example)}, note=problem.example["hint"])


def words(problem, text):
    return len(text.split())


def parses(problem, text):
    return json.loads(text)["reward"]


def ranks(problem, texts):
    """The place among the others, and a note of what was seen; some texts make it fail."""
    if "raises" in texts:
        json.loads("no json")
    if "hangs" in texts:
        time.sleep(60)
    if "dies" in texts:
        os._exit(3)
    if "array" in texts:
        return np.arange(len(texts))
    if "few" in texts:
        return [1.0]
    found = [Score(float(sorted(texts).index(text)), note="|".join(texts)) for text in texts]
    return [None if text == "odd" else score for text, score in zip(texts, found)]


def alone(text):
    return 1.0


def noted(problem, text):
    return Score(float("km" in text), {"units": 1.0}, note="a unit", facts={"by": "hand"})


limit = 3
'''
ROWS = [{"question": f"{n}?", "answer": n, "unit": "km", "hint": f"hint {n}", "more": [n]} for n in range(3)]


@pytest.fixture
def folder(tmp_path):
    """A user's folder with functions and questions, in which the test runs."""
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with working_in(tmp_path):
        yield tmp_path


def graded(task, texts, **settings):
    with Grader(task, **settings) as grader:
        return grader.grade([(task[0], text) for text in texts])


def test_a_number_is_a_reward(folder):
    numbers = ["0.25", "2", "True", "np.float64(0.5)", "np.float32(0.5)", "np.int64(3)", "Fraction(1, 4)", "Score(1.5)"]
    numbers.append("np.isclose(1, 1)")
    outcomes = graded(Jsonl("mine.says", path="questions.jsonl"), numbers)
    assert outcomes == [Score(x) for x in (0.25, 2.0, 1.0, 0.5, 0.5, 3.0, 0.25, 1.5, 1.0)]
    assert all(type(outcome.reward) is float and outcome.parts == {} for outcome in outcomes)


@pytest.mark.parametrize(
    "text, cause",
    [
        ("float('nan')", "reward=nan, which is not finite"),
        ("-1e999", "reward=-inf, which is not finite"),
        ("10**400", "which is not a number"),
        ("None", "None, neither a number nor a Score"),
        ("'0.5'", "str, neither a number nor a Score"),
        ("{'reward': 1}", "dict, neither a number nor a Score"),
        ("[1.0]", "list, neither a number nor a Score"),
        ("1j", "complex, neither a number nor a Score"),
        ("np.ones(2)", "numpy.ndarray, neither a number nor a Score"),
        ("Score('much')", "reward='much', which is not a number"),
        ("Score(1.0, {'speed': None})", "speed=None, which is not a number"),
        ("Score(1.0, {'speed': float('inf')})", "speed=inf, which is not finite"),
        (
            "Score(1.0, {'mean': 2.0})",
            "a Score with parts['mean']; this name is reserved for a metric of the reward. Fix: rename the part",
        ),
        ("Score(1.0, 0.5)", "a Score with parts=0.5, which is not a dict"),
        ("Score(1.0, {}, '', ['a'])", "a Score with facts=['a'], which is not a dict"),
    ],
)
def test_reward_function_invalid_return_refused_by_name(folder, text, cause):
    before, outcome, after = graded(Jsonl("mine.says", path="questions.jsonl"), ["1", text, "2"])
    assert isinstance(outcome, Ungraded) and outcome.kind == "infra_failed"
    line = FUNCTIONS.split("\n").index("def says(problem, text):") + 1
    assert outcome.cause.startswith(f"mine.says (mine.py:{line}) returned ") and outcome.cause.endswith(cause)
    assert (before.reward, after.reward) == (1.0, 2.0)


def test_reward_function_library_error_includes_calling_line(folder):
    (outcome,) = graded(Jsonl("mine.parses", path="questions.jsonl"), ["no json"])
    line = FUNCTIONS.split("\n").index('    return json.loads(text)["reward"]') + 1
    assert outcome.kind == "infra_failed" and outcome.cause.startswith("json.decoder.JSONDecodeError: ")
    assert re.search(rf" \(decoder.py:\d+\), called from mine.py:{line}$", outcome.cause)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_field_of_the_line_reaches_the_function(folder, kind):
    path = f"questions.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(ROWS), path)
    task = Jsonl("mine.unit", path=path)
    assert [task[n].example for n in range(3)] == ROWS
    right, wrong = graded(task, ["3 km", "3 m"])
    assert (right.reward, wrong.reward, right.parts, right.note) == (
        1,
        0,
        {"fields": 5},
        "hint 0",
    )

    some = Jsonl("mine.unit", path=path, fields=["unit", "hint"])
    assert some[1].example == {"unit": "km", "hint": "hint 1"} and some[1].answer == 1
    assert graded(some, ["3 km"])[0].parts == {"fields": 2}
    with pytest.raises(ValueError, match="missing field 'units'; fields: unit, "):
        Jsonl("mine.unit", path=path, fields=["units"])


def test_questions_without_answers(folder):
    task = Jsonl("mine.words", path="questions.jsonl", answer=None, fields=[])
    assert (task[0].answer, task[0].example) == (None, {})
    assert graded(task, ["a b c"])[0].reward == 3.0
    with pytest.raises(ValueError, match="questions-000000: .*solution: "):
        task.solution(task[0])
    assert Jsonl("mine.words", path="questions.jsonl", answer=None, solution="hint").solution(task[1]) == "hint 1"


def own_math():
    pytest.importorskip("math_verify")
    from torchtune_ext.tasks.math import Math

    return Math(path="questions.jsonl", grader="mine.words")


def own_gsm8k():
    pytest.importorskip("math_verify")
    from torchtune_ext.tasks.math import Math

    return Math("gsm8k", path="questions.jsonl", grader="mine.words")


@pytest.mark.parametrize(
    "make",
    [
        own_math,
        own_gsm8k,
        lambda: Arithmetic(grader="mine.words"),
        lambda: TemporalClue(path="puzzles.jsonl", grader="mine.words"),
    ],
)
def test_shipped_tasks_accept_reward_functions(folder, make):
    from torchtune_ext.tasks.temporal_clue.files import write_jsonl
    from torchtune_ext.tasks.temporal_clue.puzzle import Puzzle

    write_jsonl(folder / "puzzles.jsonl", [Puzzle(2, "Who?", {"A": "Mrs. White", "B": "Hall"})])
    task = make()
    assert task.grade(task[0], "one two three") == 3
    assert graded(task, ["one two three", ""]) == [Score(3.0), Score(0.0)]
    assert isinstance(task.solution(task[0]), str), "what the warm-up learns is still the task's"


# ---- several functions

GRADERS = {"long": "mine.words", "unit": "mine.noted"}


def test_gdpo_several_graders_return_named_parts(folder):
    settings = {"_component_": "torchtune_ext.tasks.jsonl.Jsonl", "path": "questions.jsonl", "graders": GRADERS}
    task = Component(settings, "task").instantiate()
    right, wrong = graded(task, ["two km", "two"], workers=2)
    assert right == Score(3.0, {"units": 1.0, "long": 2.0, "unit": 1.0}, "unit: a unit", {"by": "hand"})
    assert (wrong.reward, wrong.parts) == (1.0, {"units": 1.0, "long": 1.0, "unit": 0.0})
    assert re.fullmatch(r"mine.words \(mine.py:\d+\) \+ mine.noted \(mine.py:\d+\)", describe_function(task.grade))


def test_gdpo_failing_grader_leaves_sample_ungraded(folder):
    """Other samples keep their scores; a hung function of the user's is not the policy's failure."""
    task = Jsonl(path="questions.jsonl", graders={"long": "mine.words", "says": "mine.says"})
    outcomes = graded(task, ["1", "1 +", "None", "time.sleep(60)", "2"], timeout_s=1.0)
    assert [outcome.kind for outcome in outcomes] == ["scored", "infra_failed", "infra_failed", "timed_out", "scored"]
    assert isinstance(outcomes[3], Ungraded) and outcomes[4] == Score(3.0, {"long": 1.0, "says": 2.0})
    assert re.search(r"SyntaxError: .*mine.py:\d+", outcomes[1].cause)
    assert re.search(r"mine.says \(mine.py:\d+\) returned None, neither a number nor a Score", outcomes[2].cause)


def test_gdpo_unknown_part_refused_before_start(folder):
    task = Jsonl(path="questions.jsonl", graders=GRADERS)
    check_grading([task, None], GraderConfig(), parts=["long", "units"])
    with pytest.raises(ValueError, match="advantage.parts.lang: .* lacks the part 'lang'; did you mean 'long'[?]"):
        check_grading([task, None], GraderConfig(), parts=["lang"])
    # Held-out problems need no parts.
    check_grading([task, Jsonl("mine.words", path="questions.jsonl")], GraderConfig(), parts=["long"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"graders": {}}, "graders={}: expected names and functions. Fix: write graders.correct=my_reward.f"),
        ({"graders": ["mine.words"]}, r"graders=\['mine.words'\]: expected names and functions"),
        ({"graders": {"a": "mine.word"}}, "graders.a='mine.word': mine has no 'word'; did you mean 'words'[?]"),
        ({"graders": GRADERS, "grader": "mine.words"}, "grader, graders: mutually exclusive. Fix: keep one"),
        ({"graders": GRADERS, "group_grader": "mine.ranks"}, "group_grader, graders: mutually exclusive"),
        ({"graders": GRADERS, "agent": "mine.words"}, "agent, graders: mutually exclusive"),
    ],
)
def test_bad_graders_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        Jsonl(path="questions.jsonl", **options)


# ---- judges


def test_group_grader_gets_all_texts_of_problem(folder):
    task = Jsonl(group_grader="mine.ranks", path="questions.jsonl")
    with Grader(task, workers=2) as grader:
        futures = [grader.submit(task[n], *texts) for n, texts in enumerate((["b", "a"], ["x", "y", "x"]))]
        (one, two) = (future.result(timeout=60) for future in futures)
    assert [score.reward for score in one] == [1.0, 0.0] and {score.note for score in one} == {"b|a"}
    assert [score.reward for score in two] == [0.0, 2.0, 0.0] and {score.note for score in two} == {"x|y|x"}
    assert task.grade(task[0], "alone") == Score(0.0, note="alone")


def test_group_grader_failure_affects_only_its_group(folder):
    task = Jsonl(group_grader="mine.ranks", path="questions.jsonl")
    words = ["raises", "hangs", "dies", "array", "few"]
    with Grader(task, workers=2, timeout_s=1.0) as grader:
        bad = {word: grader.submit(task[0], "a", word, "b") for word in words}
        good = grader.submit(task[1], "b", "a")
        partly = grader.submit(task[2], "b", "odd", "a")
        outcomes = {word: future.result(timeout=60) for word, future in bad.items()}
        assert [outcome.reward for outcome in good.result(timeout=60)] == [1.0, 0.0]
        kinds = [outcome.kind for outcome in partly.result(timeout=60)]
    assert kinds == ["scored", "infra_failed", "scored"], "one entry that is no number is the loss of its text alone"
    for word, kind, cause in (
        ("raises", "infra_failed", r"JSONDecodeError: .* \(decoder.py:\d+\), called from mine.py:\d+$"),
        ("hangs", "timed_out", "1 s"),
        ("dies", "infra_failed", "the grading process died: exit code 3"),
        (
            "array",
            "infra_failed",
            r"mine.ranks \(mine.py:\d+\) returned ndarray for 3 texts; return a list with a number",
        ),
        ("few", "infra_failed", r"\) returned 1 values for 3 texts; return a list with a number for each$"),
    ):
        assert [outcome.kind for outcome in outcomes[word]] == [kind] * 3
        assert all(re.search(cause, outcome.cause) for outcome in outcomes[word])


# ---- mistakes


@pytest.mark.parametrize(
    "path, message",
    [
        ("word", "grader='word': not a dotted path. Fix: write FILE.FUNCTION, grader=my_reward.f for the function f of my_reward.py"),
        ("mine.py", "grader='mine.py': not a dotted path. Fix: write FILE.FUNCTION"),
        ("mine.py:words", "grader='mine.py:words': not a dotted path. Fix: write FILE.FUNCTION"),
        ("./mine.words", r"grader='./mine.words': not a dotted path. Fix: write FILE.FUNCTION"),
        ("mine.word", "grader='mine.word': mine has no 'word'; did you mean 'words'[?]"),
        ("mine.qqq", "grader='mine.qqq': mine has no 'qqq'"),
        ("mein.words", "grader='mein.words': module 'mein' not found, neither installed nor as mein.py in /"),
        ("mein.sub.words", "grader='mein.sub.words': module 'mein' not found"),
        ("mine.limit", r"grader='mine.limit' is a int; expected a function f\(problem, text\)"),
        ("mine.alone", r"grader='mine.alone' takes \(text\); expected two arguments, f\(problem, text\)"),
        ("broken.f", r"grader='broken.f': importing broken raised NameError: name 'undefined' is not defined \(broken.py:2\)"),
        ("wrong.f", r"grader='wrong.f': importing wrong raised SyntaxError: .* \(wrong.py:1\)"),
        ("needs.f", r"grader='needs.f': importing needs raised ModuleNotFoundError: No module named 'no_such_one' \(needs.py:1\)"),
    ],
)  # fmt: skip
def test_a_name_that_means_no_function_is_explained(folder, path, message):
    (folder / "broken.py").write_text("x = 1\nf = undefined\n")
    (folder / "wrong.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import no_such_one\n")
    with pytest.raises(ValueError, match=message):
        Jsonl(path, path="questions.jsonl")
    if "." in path:
        with pytest.raises(ValueError, match=message):
            TemporalClue(grader=path)


def test_graders_that_contradict_each_other(folder):
    with pytest.raises(ValueError, match=r"grader='mine.words', .*Jsonl .*group_grader='mine.ranks'"):
        Jsonl("mine.words", path="questions.jsonl", group_grader="mine.ranks")
    with pytest.raises(ValueError, match="grader is missing. Fix: name a function"):
        Jsonl(path="questions.jsonl")
    with pytest.raises(ValueError, match="group_grader='mine.rank': .* did you mean 'ranks'"):
        Arithmetic(group_grader="mine.rank")
    with pytest.raises(ValueError, match="grader='exactly': .*'published'"):
        TemporalClue(grader="exactly")

    class Compares(Arithmetic):
        def grade_group(self, problem, texts):
            return [0.0] * len(texts)

    with pytest.raises(ValueError, match="grader='mine.words', .*Compares .*grade_group"):
        Compares(grader="mine.words")

    class Graded(Jsonl):
        def grade(self, problem, text):
            return 1.0

    assert graded(Graded(path="questions.jsonl"), ["x"])[0].reward == 1.0
