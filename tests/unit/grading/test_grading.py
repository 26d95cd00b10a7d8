"""grading.py: every kind of outcome, with real worker processes."""

import concurrent.futures
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from torchtune_ext.grading import Grader, results
from torchtune_ext.run.parent import environment
from torchtune_ext.tasks.task import Problem, Score

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), answer=None)


class Scripted:
    """Does what the text says."""

    def grade(self, problem: Problem, text: str) -> Score:
        verb, _, rest = text.partition(" ")
        return getattr(self, verb)(problem, rest)

    def reward(self, problem, rest):
        return Score(float(rest), {"accuracy": float(rest)})

    def nothing_to_grade(self, problem, rest):
        return Score(-1.0, {"failed": 1.0})

    def answer(self, problem, rest):
        return Score(float(problem.answer), {})

    def noted(self, problem, rest):
        return Score(1.0, {}, "x" * int(rest))

    def none(self, problem, rest):
        return None

    def part(self, problem, rest):
        return Score(1.0, {"speed": float(rest)})

    def raises(self, problem, rest):
        raise ValueError(rest)

    def sys_exit(self, problem, rest):
        sys.exit(5)

    def os_exit(self, problem, rest):
        os._exit(int(rest))

    def segfault(self, problem, rest):
        os.kill(os.getpid(), signal.SIGSEGV)

    def sleeps(self, problem, rest):
        time.sleep(float(rest))
        return Score(1.0, {})

    def backtracks(self, problem, rest):
        return Score(float(bool(re.match(r"(a+)+$", "a" * 60 + "b"))), {})  # holds the interpreter lock for years

    def forks(self, problem, rest):
        os.fork()
        return Score(3.0, {})

    def pid(self, problem, rest):
        return Score(float(os.getpid()), {})

    def imported(self, problem, rest):
        return Score(float(rest in sys.modules), {})


def graded(texts: list[str], workers: int = 1, timeout_s: float = 10.0):
    with Grader(Scripted(), workers, timeout_s) as grader:
        return grader.grade([(PROBLEM, text) for text in texts])


def test_scores_come_back_in_order():
    rewards = [i % 7 + 0.25 for i in range(500)]
    outcomes = graded([f"reward {reward}" for reward in rewards], workers=3)
    assert [outcome.score.reward for outcome in outcomes] == rewards
    assert all(o.kind == "scored" and o.cause == "" and o.score.parts == {"accuracy": o.score.reward} for o in outcomes)


def test_each_text_is_graded_with_its_own_problem():
    problems = [Problem(f"p{i}", PROBLEM.messages, answer=i) for i in range(40)]
    with Grader(Scripted(), workers=2) as grader:
        outcomes = grader.grade([(problem, "answer") for problem in problems])
        assert grader.grade([]) == []
    assert [outcome.score.reward for outcome in outcomes] == list(range(40))


def test_policy_failed_is_what_the_task_marks():
    failed, wrong = graded(["nothing_to_grade", "reward 0"])
    assert (failed.kind, failed.score.reward, failed.cause) == ("policy_failed", -1.0, "")
    assert (wrong.kind, wrong.score.reward) == ("scored", 0.0)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raises no digits", r"^ValueError: no digits \(test_grading.py:\d+\)$"),
        ("no_such_method", "AttributeError: 'Scripted' object has no attribute"),
        ("sys_exit", "SystemExit: 5"),
        ("os_exit 3", "the grading process died: exit code 3"),
        ("os_exit 0", "the grading process died: exit code 0"),
        ("segfault", "the grading process died: signal SIGSEGV"),
        ("reward nan", "reward=nan, which is not finite"),
        ("reward -inf", "reward=-inf"),
        ("part nan", "speed=nan"),
        ("none", "returned NoneType, not a Score"),
        ("reward x" + "y" * 10_000, "could not convert"),
    ],
)
def test_infra_failed(text, cause):
    before, failed, after = graded(["reward 1", text, "reward 2"])
    assert failed.kind == "infra_failed" and failed.score is None
    assert re.search(cause, failed.cause) and len(failed.cause) < 1200
    assert (before.score.reward, after.score.reward) == (1.0, 2.0)


@pytest.mark.parametrize("text", ["sleeps 60", "backtracks"])
def test_timed_out(text):
    begin = time.monotonic()
    outcomes = graded(["reward 1", text, *["reward 2"] * 20], timeout_s=0.4)
    assert time.monotonic() - begin < 5
    assert (outcomes[1].kind, outcomes[1].score) == ("timed_out", None)
    assert "0.4 s" in outcomes[1].cause
    assert [o.score.reward for i, o in enumerate(outcomes) if i != 1] == [1.0, *[2.0] * 20]


def test_deadline_is_each_items_own():
    """The items of a call take longer together than the deadline, and none is late."""
    outcomes = graded(["sleeps 0.3"] * 4, timeout_s=0.8)
    assert {outcome.kind for outcome in outcomes} == {"scored"}


def test_a_hang_holds_up_nobody_else():
    begin = time.monotonic()
    outcomes = graded(["sleeps 60", "reward 1", "sleeps 60", *["reward 1"] * 50], workers=2, timeout_s=2.0)
    assert time.monotonic() - begin < 3.5
    assert [outcome.kind for outcome in outcomes] == ["timed_out", "scored", "timed_out", *["scored"] * 50]


def test_the_first_item_does_not_pay_for_the_start():
    class SlowToLoad(Scripted):
        def __setstate__(self, state):
            time.sleep(1.0)

        def __getstate__(self):
            return {"x": 1}

    with Grader(SlowToLoad(), timeout_s=0.3) as grader:
        assert grader.grade([(PROBLEM, "reward 1")])[0].kind == "scored"


def test_a_forking_grader_answers_once():
    outcomes = graded(["forks", "reward 1", "forks", "reward 2"])
    assert [outcome.score.reward for outcome in outcomes] == [3.0, 1.0, 3.0, 2.0]


def test_workers_stay_and_have_no_torch():
    with Grader(Scripted(), workers=1) as grader:
        first, second = (grader.grade([(PROBLEM, "pid")])[0].score.reward for _ in range(2))
        assert first == second != os.getpid()
        for module in ("torch", "transformers", "vllm"):
            assert grader.grade([(PROBLEM, f"imported {module}")])[0].score.reward == 0.0


def test_a_worker_killed_while_idle_costs_nothing():
    with Grader(Scripted(), workers=1) as grader:
        os.kill(int(grader.grade([(PROBLEM, "pid")])[0].score.reward), signal.SIGKILL)
        time.sleep(0.1)
        assert {o.kind for o in grader.grade([(PROBLEM, "reward 1")] * 20)} == {"scored"}


def test_a_stopped_worker_is_replaced():
    with Grader(Scripted(), workers=1, timeout_s=0.5) as grader:
        os.kill(int(grader.grade([(PROBLEM, "pid")])[0].score.reward), signal.SIGSTOP)
        first, second = grader.grade([(PROBLEM, "reward 1"), (PROBLEM, "reward 2")])
    assert first.kind == "timed_out" and second.score.reward == 2.0


def test_workers_outlive_the_thread_that_made_the_grader():
    """The kernel's death signal is tied to a thread, not to the process."""
    made: list[Grader] = []
    pids: list[float] = []

    def in_a_thread(work) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=30)
        time.sleep(0.2)  # a thread ends for Python a moment before it ends for the kernel

    def make() -> None:
        made.append(Grader(Scripted()))
        ask()

    def ask() -> None:
        pids.append(made[0].grade([(PROBLEM, "pid")])[0].score.reward)

    in_a_thread(make)
    with made[0]:
        in_a_thread(ask)
        in_a_thread(ask)
    assert len(pids) == 3 and len(set(pids)) == 1


def test_threads_share_a_grader():
    results: dict[int, list[float]] = {}
    with Grader(Scripted(), workers=2) as grader:

        def work(base: int) -> None:
            items = [(PROBLEM, f"reward {base + i}") for i in range(100)]
            results[base] = [outcome.score.reward for outcome in grader.grade(items)]

        threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    assert results == {base: [base + i for i in range(100)] for base in (0, 1000, 2000)}


def test_an_interrupted_call_leaves_no_stale_answers():
    """Ctrl-C in the middle of a call: the answer of that call must not become one of the next, and what it had not begun yet
    is left out."""
    # A shell that starts the tests in the background makes them ignore SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Grader(Scripted(), workers=1) as grader:
        grader.grade([(PROBLEM, "reward 1")])
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        try:
            with pytest.raises(KeyboardInterrupt):
                grader.grade([(PROBLEM, "sleeps 0.5"), *[(PROBLEM, "sleeps 60")] * 5])
        finally:
            signal.signal(signal.SIGINT, before)
        begin = time.monotonic()
        assert [o.score.reward for o in grader.grade([(PROBLEM, "reward 2")])] == [2.0]
        assert time.monotonic() - begin < 5


def test_a_slow_text_delays_nobody():
    with Grader(Scripted(), workers=2, timeout_s=30.0) as grader:
        grader.grade([(PROBLEM, "reward 1")] * 20)  # both have started
        begin = time.monotonic()
        slow = grader.submit(PROBLEM, "sleeps 5")
        fast = [grader.submit(PROBLEM, f"reward {i}") for i in range(50)]
        assert [future.result(timeout=10).score.reward for future in fast] == list(range(50))
        assert time.monotonic() - begin < 1.0 and not slow.done()
        assert slow.result(timeout=10).kind == "scored"


def test_futures_of_a_grader_that_is_closed_end():
    grader = Grader(Scripted(), workers=1, timeout_s=60.0)
    futures = [grader.submit(PROBLEM, "sleeps 60") for _ in range(3)]
    grader.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="closed"):
            future.result(timeout=5)
    with pytest.raises(RuntimeError, match="closed"):
        grader.submit(PROBLEM, "reward 1")


def test_a_problem_that_cannot_be_sent_raises_where_it_is_handed_in():
    with Grader(Scripted(), workers=1) as grader:
        with pytest.raises(TypeError, match="pickle"):
            grader.grade([(PROBLEM, "reward 1"), (Problem("p", (), threading.Lock()), "reward 1")])
        assert grader.grade([(PROBLEM, "reward 2")])[0].score.reward == 2.0


def test_a_slow_callback_costs_nobody_a_deadline():
    with Grader(Scripted(), workers=2, timeout_s=1.0) as grader:
        grader.grade([(PROBLEM, "reward 1")] * 20)  # both have started
        first, second = grader.submit(PROBLEM, "sleeps 0.1"), grader.submit(PROBLEM, "sleeps 0.3")
        first.add_done_callback(lambda future: time.sleep(1.5))
        assert second.result(timeout=10).kind == "scored"


def test_processes_that_cannot_start_are_an_error_at_once(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        Grader(Scripted())


def test_all_futures_end_when_a_grader_gives_up_while_they_are_cancelled():
    class RefusesToLoad(Scripted):
        def __reduce__(self):
            return (int, ("not a number",))

    for _ in range(5):
        with Grader(RefusesToLoad()) as grader:
            futures = []
            # A future raises it, or `submit` where it is over already.
            with pytest.raises(RuntimeError, match="could not start"):
                for _ in range(200):
                    futures.append(grader.submit(PROBLEM, "reward 1"))
                results(futures)
            done, waiting = concurrent.futures.wait(futures, timeout=10)
            assert len(done) == len(futures) and not waiting


def test_a_note_comes_back_and_is_cut():
    short, long = graded(["noted 5", "noted 100000"])
    assert short.score.note == "xxxxx" and len(long.score.note) == 2000


class Judge(Scripted):
    """Rewards a text by its rank among those of its problem."""

    def grade_group(self, problem, texts):
        if "hangs" in texts:
            time.sleep(60)
        if "raises" in texts:
            raise ValueError("no judge")
        if "few" in texts:
            return [Score(1.0, {})]
        return [Score(float(sorted(texts).index(text)), {}) for text in texts]


def test_a_judge_sees_the_whole_group():
    with Grader(Judge(), workers=2, timeout_s=1.0) as grader:
        assert grader.compares
        ranks = grader.submit_group(PROBLEM, ["b", "c", "a"])
        bad = {word: grader.submit_group(PROBLEM, [word, "a"]) for word in ("hangs", "raises", "few")}
        assert [outcome.score.reward for outcome in ranks.result(timeout=20)] == [1.0, 2.0, 0.0]
        kinds = {word: {outcome.kind for outcome in future.result(timeout=20)} for word, future in bad.items()}
        assert kinds == {"hangs": {"timed_out"}, "raises": {"infra_failed"}, "few": {"infra_failed"}}
        assert bad["few"].result()[0].cause == "grade_group() returned 1 scores for 2 texts"
    with Grader(Scripted()) as grader:
        assert not grader.compares


def test_failures_are_logged_with_their_causes(caplog):
    with caplog.at_level(logging.WARNING):
        graded(["raises a"] * 3 + ["raises b", "reward 1"])
    assert "4 of 5 texts infra_failed: 3 x ValueError: a (test_grading.py" in caplog.text
    caplog.clear()
    graded(["reward 1", "nothing_to_grade"])
    assert caplog.text == ""


def test_knobs_and_tasks_that_cannot_work_raise():
    with pytest.raises(ValueError, match="workers=0"):
        Grader(Scripted(), workers=0)
    with pytest.raises(ValueError, match="timeout_s=0"):
        Grader(Scripted(), timeout_s=0)
    task = Scripted()
    task.lock = threading.Lock()
    with pytest.raises(ValueError, match="task Scripted cannot be sent.*lock"):
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


def test_close_twice_and_use_after():
    grader = Grader(Scripted())
    grader.close()
    grader.close()
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([(PROBLEM, "reward 1")])


def test_ten_thousand_texts_come_back_in_order():
    """How fast: benchmarks/grading.py."""
    items = [(PROBLEM, f"reward {i % 2} " + " " * 800) for i in range(10_000)]
    with Grader(Scripted(), workers=2) as grader:
        outcomes = grader.grade(items)
    assert [outcome.score.reward for outcome in outcomes] == [0.0, 1.0] * 5_000


def test_workers_start_while_another_thread_changes_the_environment():
    """As vLLM's configuration does beside them: exec must not read the table that is being rewritten."""
    stop = threading.Event()

    def change():
        while not stop.is_set():
            for i in range(300):
                os.environ[f"TTE_TEST_{i}"] = "x" * 200
            for i in range(300):
                del os.environ[f"TTE_TEST_{i}"]

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(150):
            assert subprocess.run(["true"], env=environment(), check=False).returncode == 0
    finally:
        stop.set()
        thread.join()
