"""A grader that never succeeds ends the run; what graders print has a file of its own."""

import pytest

from helpers.scripted_task import PROBLEM, Scripted
from torchtune_ext.grading import Grader, Ungraded
from torchtune_ext.grading.grader import GradingFailed, GradingMonitor
from torchtune_ext.tasks.task import Score

GOOD = ("p-1", Score(0.0, {}))
BAD = ("p-2", Ungraded("infra_failed", "KeyError: 'x' (my_task.py:12)"))
LATE = ("p-3", Ungraded("timed_out", "no answer within 10 s; the process was killed"))
DISTURBED = ("p-4", Ungraded("noisy", "others used the machine"))


def test_grading_watch_two_all_failed_steps_end_run(caplog):
    watch = GradingMonitor()
    watch.check_step(7, [BAD, LATE])
    assert "grading: 1 of 2 texts infra_failed: 1 x KeyError: 'x' (my_task.py:12)" in caplog.text
    with pytest.raises(GradingFailed) as caught:
        watch.check_step(8, [LATE, LATE])
    assert str(caught.value) == (
        "the grader has failed on every text of steps 7 to 8, so nothing is learned. The first failure: problem 'p-2' "
        "infra_failed: KeyError: 'x' (my_task.py:12). Fix: repair the grader, try it on a text (docs/how_to/reward_function.md), then resume"
    )


@pytest.mark.parametrize(
    "steps",
    [
        [(1, [BAD]), (2, [BAD, GOOD]), (3, [BAD])],
        # Further sampling for a step is part of it.
        [(1, [BAD]), (1, [BAD]), (1, [BAD])],
        [(1, [BAD]), (2, [GOOD]), (2, [BAD]), (3, [BAD])],
        [(1, [BAD]), (2, [BAD, BAD, DISTURBED]), (3, [BAD])],
        [(1, [DISTURBED]), (2, [DISTURBED]), (3, [DISTURBED])],
        [(1, []), (2, []), (3, [BAD])],
    ],
)
def test_grading_watch_partial_failures_let_run_continue(steps):
    watch = GradingMonitor()
    for step, outcomes in steps:
        watch.check_step(step, outcomes)


class Talking(Scripted):
    def prints(self, problem, rest):
        print("debug", rest)
        return Score(1.0, {})


def test_grader_output_goes_to_log_file(tmp_path, capfd):
    log = tmp_path / "grader.log"
    log.write_text("earlier\n")
    with Grader(Talking(), workers=1, output=log) as grader:
        outcomes = grader.grade([(PROBLEM, text) for text in ("prints one", "prints two", "segfault", "prints three")])
    assert [outcome.kind for outcome in outcomes] == ["scored", "scored", "infra_failed", "scored"]
    assert log.read_text() == "earlier\ndebug one\ndebug two\ndebug three\n"
    assert capfd.readouterr() == ("", "")


def test_grader_without_output_creates_no_log_file(tmp_path):
    log = tmp_path / "grader.log"
    with Grader(Scripted(), workers=1, output=log) as first, Grader(Scripted(), workers=1, output=log) as second:
        assert log.exists()
        assert first.grade([(PROBLEM, "reward 1")]) == second.grade([(PROBLEM, "reward 1")])
    assert not log.exists()
