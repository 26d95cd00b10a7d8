"""Grading: every kind of outcome, with real worker processes."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.scripted_task import PROBLEM, Scripted, graded
from torchtune_ext.grading import Grader, GraderConfig, Ungraded, check_grading, find_answer_errors
from torchtune_ext.grading.grader import is_failure
from torchtune_ext.grading.outcomes import has_builtin_grader
from torchtune_ext.run import processes
from torchtune_ext.tasks.arithmetic import Arithmetic
from torchtune_ext.tasks.guess_number import GuessNumber
from torchtune_ext.tasks.jsonl import Jsonl
from torchtune_ext.tasks.problem_stream import TransientReason
from torchtune_ext.tasks.selection import NearLevel
from torchtune_ext.tasks.task import Problem, Score


def test_grader_scores_keep_submission_order():
    rewards = [i % 7 + 0.25 for i in range(500)]
    outcomes = graded([f"reward {reward}" for reward in rewards], workers=3)
    assert [outcome.reward for outcome in outcomes] == rewards
    assert all(o.kind == "scored" and o.parts == {"accuracy": o.reward} for o in outcomes)


def test_each_text_is_graded_with_its_own_problem():
    problems = [Problem(f"p{i}", PROBLEM.messages, answer=i) for i in range(40)]
    with Grader(Scripted(), workers=2) as grader:
        outcomes = grader.grade([(problem, "answer") for problem in problems])
        assert grader.grade([]) == []
    assert [outcome.reward for outcome in outcomes] == list(range(40))


def test_grader_policy_failed_follows_task_mark():
    failed, wrong = graded(["nothing_to_grade", "reward 0"])
    assert (failed.kind, failed.reward) == ("policy_failed", -1.0)
    assert (wrong.kind, wrong.reward) == ("scored", 0.0)


@pytest.mark.parametrize(
    "text, cause",
    [
        ("raises no digits", r"^ValueError: no digits \(scripted_task.py:\d+\)$"),
        ("no_such_method", "AttributeError: 'Scripted' object has no attribute"),
        ("sys_exit", "SystemExit: 5"),
        ("os_exit 3", "the grading process died: exit code 3"),
        ("os_exit 0", "the grading process died: exit code 0"),
        ("segfault", "the grading process died: signal SIGSEGV"),
        ("reward nan", "reward=nan, which is not finite"),
        ("reward -inf", "reward=-inf"),
        ("part nan", "speed=nan"),
        (
            "none",
            r"^helpers.scripted_task.Scripted.grade \(scripted_task.py:\d+\) returned None, neither a number nor a Score$",
        ),
        ("reward x" + "y" * 10_000, "could not convert"),
    ],
)
def test_infra_failed(text, cause):
    before, failed, after = graded(["reward 1", text, "reward 2"])
    assert isinstance(failed, Ungraded) and failed.kind == "infra_failed"
    assert re.search(cause, failed.cause) and len(failed.cause) < 1200
    assert (before.reward, after.reward) == (1.0, 2.0)


@pytest.mark.parametrize("text", ["sleeps 60", "backtracks"])
def test_timed_out(text):
    begin = time.monotonic()
    outcomes = graded(["reward 1", text, *["reward 2"] * 20], timeout_s=1.0)
    assert time.monotonic() - begin < 60
    assert isinstance(outcomes[1], Ungraded) and outcomes[1].kind == "timed_out"
    assert "1 s" in outcomes[1].cause
    assert [o.reward for i, o in enumerate(outcomes) if i != 1] == [1.0, *[2.0] * 20]


def test_deadline_is_each_items_own():
    """The items of a call take longer together than the deadline, and none is late."""
    outcomes = graded(["sleeps 0.6"] * 4, timeout_s=2.0)
    assert {outcome.kind for outcome in outcomes} == {"scored"}


def test_grader_hang_delays_no_other_text():
    outcomes = graded(["sleeps 60", "reward 1", "sleeps 60", *["reward 1"] * 50], workers=2, timeout_s=2.0)
    assert [outcome.kind for outcome in outcomes] == ["timed_out", "scored", "timed_out", *["scored"] * 50]


def test_grader_start_time_excluded_from_first_deadline():
    class SlowToLoad(Scripted):
        def __setstate__(self, state):
            time.sleep(2.5)

        def __getstate__(self):
            return {"x": 1}

    with Grader(SlowToLoad(), timeout_s=2.0) as grader:
        assert grader.grade([(PROBLEM, "reward 1")])[0].kind == "scored"


def test_a_forking_grader_answers_once():
    outcomes = graded(["forks", "reward 1", "forks", "reward 2"])
    assert [outcome.reward for outcome in outcomes] == [3.0, 1.0, 3.0, 2.0]


def test_grade_note_is_returned_and_truncated():
    short, long = graded(["noted 5", "noted 100000"])
    assert short.note == "xxxxx" and len(long.note) == 2000


def test_failures_are_logged_with_their_causes(caplog):
    with caplog.at_level(logging.WARNING):
        graded(["raises a"] * 3 + ["raises b", "reward 1"])
    assert "4 of 5 texts infra_failed: 3 x ValueError: a (scripted_task.py" in caplog.text
    caplog.clear()
    graded(["reward 1", "nothing_to_grade"])
    assert caplog.text == ""


def test_grader_unpicklable_problem_costs_only_its_texts():
    deep = []
    for _ in range(2000):
        deep = [deep]
    with Grader(Scripted(), workers=1) as grader:
        outcomes = grader.grade([(Problem("p", (), answer), "reward 1") for answer in (0, threading.Lock(), deep, 1)])
    assert [outcome.kind for outcome in outcomes] == ["scored", "infra_failed", "infra_failed", "scored"]
    assert outcomes[1].cause.startswith("cannot be sent to a grading process: TypeError: cannot pickle")
    assert "recursion" in outcomes[2].cause


class Shipped(Scripted):
    """A task whose grader is one of this package."""

    def deep(self, problem, rest):
        return self.deep(problem, rest)

    def dies_once(self, problem, rest):
        if not Path(rest).exists():
            Path(rest).touch()
            self.killed(problem, rest)
        return Score(2.0, {})

    def killed(self, problem, rest):
        os.kill(os.getpid(), signal.SIGKILL)

    def grade(self, problem, text):
        return super().grade(problem, text)

    grade.__module__ = "torchtune_ext.tasks.made_up"


def test_shipped_grader_hung_by_text_scores_zero(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(processes, "BUSY_FRACTION", 0.05)  # other processes may compute on this machine
    texts = ["backtracks", "os_exit 3", "segfault", "deep", "reward 1"]
    with Grader(Shipped(), timeout_s=1.0) as grader:
        *hung, right = grader.grade([(PROBLEM, text) for text in texts])
    notes = "no answer within 1 s", "died: exit code 3", "died: signal SIGSEGV", "RecursionError: max"
    for outcome, note in zip(hung, notes, strict=True):
        assert (outcome.kind, outcome.reward, outcome.parts) == ("timed_out", 0.0, {"timed_out": 1.0})
        assert note in outcome.note
    assert right.reward == 1.0 and "4 of 5 texts timed_out: 1 x no answer within 1 s" in caplog.text


def test_shipped_grader_failed_by_the_machine_is_ungraded(tmp_path):
    texts = ["sleeps 60", "killed", f"dies_once {tmp_path / 'died'}", "raises no"]
    with Grader(Shipped(), timeout_s=1.0) as grader:
        stalled, killed, alive, failed = grader.grade([(PROBLEM, text) for text in texts])
    assert stalled == Ungraded("timed_out", "no answer within 1 s; the process was killed")
    # The kernel kills a grading process first when memory runs out.
    assert killed == Ungraded("infra_failed", "the grading process died: signal SIGKILL")
    assert is_failure(killed) and (alive.reward, failed.kind) == (2.0, "infra_failed")


@pytest.mark.parametrize(
    "task, shipped",
    [
        (Arithmetic(count=9), True),
        (Arithmetic(count=9, grader=lambda problem, text: 1.0), False),
        (Arithmetic(count=9, group_grader=lambda problem, texts: [1.0] * len(texts)), False),
        (NearLevel("torchtune_ext.tasks.arithmetic.Arithmetic", {"count": 9}), True),
        (NearLevel("helpers.scripted_task.Sized"), False),
        (type("Mine", (Arithmetic,), {})(count=9), True),
        (type("Mine", (Arithmetic,), {"grade": lambda self, problem, text: 1.0})(count=9), False),
        (Scripted(), False),
        (GuessNumber(count=9), False),
    ],
)
def test_shipped_grader_excludes_functions_of_the_user(task, shipped):
    assert has_builtin_grader(task) is shipped


class Golds:
    """Each right answer is a word that says how its grading goes wrong."""

    checks_reference_answers = True

    def grade(self, problem, text):
        if problem.answer == "raises":
            raise ValueError("Exceeds the limit (4300 digits)")
        if problem.answer == "hangs":
            time.sleep(60)
        if isinstance(problem.answer, Path) and not problem.answer.exists():
            problem.answer.touch()
            time.sleep(60)
        return float({"pays all": True, "pays none": False}.get(problem.answer, text == str(problem.answer)))

    def solution(self, problem):
        if problem.answer == "has none":
            raise ValueError("only judged")
        return str(problem.answer) if isinstance(problem.answer, Path) else problem.answer

    grade.__module__ = "torchtune_ext.tasks.made_up"


def test_find_answer_errors_names_useless_answers(tmp_path):
    words = ["right", "raises", "hangs", "pays all", "pays none", "has none", threading.Lock(), tmp_path / "hung"]
    problems = [Problem(str(word), (), word) for word in words]
    with Grader(Golds(), timeout_s=1.0) as grader:
        errors = find_answer_errors(grader, problems)
    # The last one is graded at the second try.
    assert errors[0] == errors[5] == errors[7] == ""
    assert [isinstance(error, TransientReason) for error in errors] == [False, False, True] + [False] * 5
    assert errors[1].startswith(
        "its answer cannot be graded: ValueError: Exceeds the limit (4300 digits) (test_grading"
    )
    assert errors[2] == "its answer cannot be graded: no answer within 1 s; the process was killed"
    assert errors[3] == "its reference answer gets the reward 1, a wrong text 1"
    assert errors[4] == "its reference answer gets the reward 0, a wrong text 0"
    assert errors[6].startswith(
        "its answer cannot be graded: cannot be sent to a grading process: TypeError: cannot pickle"
    )
    # A grader of the user's may cost money, so its answers are not tried.
    with Grader(type("Mine", (Golds,), {"grade": lambda self, problem, text: 1.0})()) as grader:
        assert find_answer_errors(grader, problems[:6]) == [""] * 6


@pytest.mark.parametrize(
    "answers, words",
    [
        (
            [threading.Lock()] * 6,
            "task: none of its first problems can be graded: problem '5': it cannot",
        ),
        ([threading.Lock()] * 6 + ["right"], None),
    ],
)
def test_check_grading_skips_unpicklable_problems(answers, words):
    class Listed(Golds, list):
        def __reduce__(self):
            return Golds, ()

    task = Listed(Problem(str(i), (), answer) for i, answer in enumerate(answers))
    with pytest.raises(ValueError, match="^" + re.escape(words)) if words else contextlib.nullcontext():
        check_grading([task], GraderConfig())


class Ruined(Scripted):
    """Texts that leave something behind in their process."""

    def alarms(self, problem, rest):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        return Score(1.0, {})

    def cancels(self, problem, rest):
        raise asyncio.CancelledError("by a library")

    def hints(self, problem, rest):
        error = KeyError("digits")
        error.add_note("see the manual\nof digits")
        raise error

    def closes(self, problem, rest):
        sys.stdout.close()
        return Score(1.0, {})

    def prints(self, problem, rest):
        print(rest)
        return Score(1.0, {})

    def floods(self, problem, rest):
        # The number of the process's own connection depends on what the test run has open.
        for fd in range(3, 256):
            with contextlib.suppress(OSError):
                os.write(fd, rest.encode() * 4)
        return Score(1.0, {})

    def halves(self, problem, rest):
        return Score(1.0, {"a\ud83d": 1.0}, "n\ud83d", {"f\ud83d": "g\ud83d"})


def test_process_ruined_by_a_text_is_replaced(tmp_path):
    texts = ["alarms", "sleeps 0.4", "cancels", "hints", "reward 2", "halves"]
    texts += ["closes", *["prints x"] * 7]
    with Grader(Ruined(), output=tmp_path / "log") as grader:
        alarm, slept, cancelled, hinted, right, halved, closed, *printed = grader.grade([(PROBLEM, t) for t in texts])
        assert (alarm.kind, slept.kind, right.reward, closed.reward) == ("scored", "scored", 2.0, 1.0)
        assert cancelled.cause.startswith("asyncio.exceptions.CancelledError: by a library (test_grading.py:")
        assert hinted.cause.startswith("KeyError: 'digits' (test_grading.py:")
        assert halved == Score(1.0, {"a?": 1.0}, "n?", {"f?": "g?"})
        # After five failures in a row the process is replaced.
        assert [outcome.kind for outcome in printed] == ["infra_failed"] * 5 + ["scored"] * 2


@pytest.mark.parametrize("rest", ["hello", "\0\0\0\x09junk"])
def test_process_flooded_descriptors_cost_one_text(tmp_path, rest):
    begin = time.monotonic()
    with Grader(Ruined(), workers=1, timeout_s=5.0, output=tmp_path / "log") as grader:
        lost, right = grader.grade([(PROBLEM, f"floods {rest}"), (PROBLEM, "reward 2")])
    assert lost.kind == "infra_failed" and right.reward == 2.0 and time.monotonic() - begin < 20


def test_grader_invalid_config_and_tasks_raise():
    with pytest.raises(ValueError, match="workers=0"):
        Grader(Scripted(), workers=0)
    with pytest.raises(ValueError, match="timeout_s=0"):
        Grader(Scripted(), timeout_s=0)
    task = Scripted()
    task.lock = threading.Lock()
    with pytest.raises(ValueError, match="task Scripted cannot be pickled.*lock"):
        Grader(task)

    class RefusesToLoad(Scripted):
        def __reduce__(self):
            return (int, ("not a number",))

    with (
        Grader(RefusesToLoad()) as grader,
        pytest.raises(RuntimeError, match="could not start .*ValueError: invalid lit"),
    ):
        grader.grade([(PROBLEM, "reward 1")])

    class DiesOnLoading(Scripted):
        def __reduce__(self):
            return (os._exit, (9,))

    with Grader(DiesOnLoading()) as grader, pytest.raises(RuntimeError, match="could not start .*exit code 9"):
        grader.grade([(PROBLEM, "reward 1")])


def test_self_check_reports_grader_failing_on_empty_text(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "hasty.py").write_text(
        "def first(problem, text):\n    return float(text.split()[0] == problem.answer)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    check_grading([Jsonl(path=str(tmp_path / "rows.jsonl"), grader="hasty.first")], GraderConfig())
    assert re.match(
        r"grader: +Jsonl fails on an empty text, which would count as ungraded: IndexError: .*hasty.py:2",
        capsys.readouterr().out,
    )
