"""Grading by the benchmark service, which answers here when the test says so. The real one: tests/integration/test_matmul_resume.py."""

import asyncio
import os
import statistics
from concurrent.futures import CancelledError, Future
from dataclasses import fields

import pytest

pytest.importorskip("tree_sitter_c")

from helpers.waiting import wait_until
from torchtune_ext.grading import Grader, GraderConfig, Ungraded, check_grading, open_graders, self_check
from torchtune_ext.measured import grading, machine
from torchtune_ext.measured.grading import BenchGrader, MeasuredTask
from torchtune_ext.measured.results import BenchConfig, BenchError, Result
from torchtune_ext.measured.timing import Timing
from torchtune_ext.tasks.task import Problem, Score

PROBLEM = Problem("p", ({"role": "user", "content": "?"},), "the answer")
TIMING = Timing(**{each.name: {float: 0.25, int: 30, bool: False}[each.type] for each in fields(Timing)})


def result(outcome="ok", note="", is_cached=False, **seconds):
    timing = TIMING if outcome == "ok" else None
    return Result("dgemm", outcome, "time", note, timing, seconds, "here", is_cached, ("blocking",))


class StubBench:
    timed_cores = ()

    def __init__(self):
        self.requests, self.futures, self.closed = [], [], 0

    def submit(self, kernel, text, permitted=None):
        self.requests.append((kernel, text, permitted))
        self.futures.append(Future())
        return self.futures[-1]

    def close(self):
        self.closed += 1


class Asked(MeasuredTask):
    """As far as a grader sees it."""

    kernels = ("a kernel",)

    def kernel(self, problem):
        return f"the kernel of {problem.id}"

    def permitted(self, problem):
        return {"blocking"}

    def score(self, problem, bench_result):
        if bench_result.note == "a bug":
            raise ZeroDivisionError("a bug of the task")
        if bench_result.note == "exhausted":
            next(iter(()))
        return Score(float(bench_result.note or 1.0), {"gflops": 3.0}, "", {"machine": bench_result.fingerprint})


class Unmeasured:
    def grade(self, problem, text):
        return Score(1.0, {})


@pytest.fixture
def bench():
    return StubBench()


@pytest.fixture
def grader(bench):
    return BenchGrader(Asked(), bench)


def test_bench_grader_passes_text_and_result_to_task(grader, bench):
    outcome = grader.submit(PROBLEM, "a text")
    assert bench.requests == [("the kernel of p", "a text", {"blocking"})] and not outcome.done()
    bench.futures[0].set_result(result())
    (grade,) = outcome.result(5)
    assert (grade.kind, grade.reward, grade.parts) == ("scored", 1.0, {"gflops": 3.0})
    assert grade.facts == {"machine": "here"}


def test_bench_grader_slow_text_does_not_delay_others(grader, bench):
    first, second = grader.submit(PROBLEM, "slow"), grader.submit(PROBLEM, "fast")
    bench.futures[1].set_result(result())
    assert second.result(5)[0].kind == "scored" and not first.done()


@pytest.mark.parametrize(
    ("end", "kind", "cause"),
    [
        (result("noisy", "others disturb the machine"), "noisy", "others disturb the machine"),
        (BenchError("the timing of a program failed"), "infra_failed", "the timing of a program failed"),
        (CancelledError(), "infra_failed", "cancelled"),
        (
            result(note="nan"),
            "infra_failed",
            "test_measured.Asked.score (test_measured.py:{line}) returned reward=nan, which is not finite",
        ),
    ],
    ids=["noisy", "BenchError", "cancelled", "not finite"],
)
def test_bench_grader_machine_failure_is_ungraded(grader, bench, end, kind, cause):
    outcome = grader.submit(PROBLEM, "a text")
    (bench.futures[0].set_exception if isinstance(end, BaseException) else bench.futures[0].set_result)(end)
    (grade,) = outcome.result(5)
    line = Asked.score.__code__.co_firstlineno
    assert grade == Ungraded(kind, cause.format(line=line))


def test_bench_grader_task_bug_raises_to_caller(grader, bench):
    outcome = grader.submit(PROBLEM, "a text")
    bench.futures[0].set_result(result(note="a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug of the task"):
        outcome.result(5)


def test_bench_grader_stop_iteration_reaches_awaiting_caller(grader, bench):
    async def wait():
        await asyncio.wait_for(asyncio.wrap_future(grader.submit(PROBLEM, "a text")), 5)

    def submit(*_, **__):
        future = Future()
        future.set_result(result(note="exhausted"))
        return future

    bench.submit = submit
    with pytest.raises(RuntimeError, match=r"Asked.score .* raised StopIteration"):
        asyncio.run(wait())


def test_bench_grader_cancelled_text_result_is_dropped(grader, bench):
    assert grader.submit(PROBLEM, "a text").cancel()
    bench.futures[0].set_result(result())
    assert grader.metrics()["bench/noisy"] == 0.0


def test_metrics_are_those_since_the_last_call(grader, bench):
    ends = [result(compile=1.0, time=2.0, wait=50.0), result("noisy", compile=0.5), result(is_cached=True, time=7.0)]
    for end in ends:
        grader.submit(PROBLEM, "a text")
        bench.futures[-1].set_result(end)
    metrics = grader.metrics()
    assert metrics == {
        "time/bench": 3.5,
        "bench/noisy": pytest.approx(1 / 3),
        "bench/cache_hits": pytest.approx(1 / 3),
    }
    # A refill belongs to the same step.
    grader.submit(PROBLEM, "a text")
    bench.futures[-1].set_result(result(compile=0.5))
    assert grader.metrics(refill=True) == metrics | {"time/bench": 4.0, "bench/noisy": 0.25, "bench/cache_hits": 0.25}
    assert set(grader.metrics().values()) == {0.0}


# Whose cores are whose ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """Makes this process one that may run on some cores; returns the sets of cores that it is then pinned to."""
    pinned = []
    monkeypatch.setattr(machine, "pin_threads", pinned.append)
    monkeypatch.setattr(machine, "lock_name", lambda core: f"\0test-{tmp_path}-{core}")

    def make(usable):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
        return pinned

    return make


def test_bench_grader_training_avoids_timed_cores(cores, bench):
    pinned, bench.timed_cores = cores(range(8)), (6, 7)
    grader = BenchGrader(Asked(), bench, during_training=True)
    assert pinned == [set(range(6))]
    grader.close()
    grader.close()
    assert pinned == [set(range(6)), set(range(8))] and bench.closed == 2


@pytest.mark.parametrize(("usable", "timed", "beside"), [({2}, (2,), True), ({0, 1}, (1,), False), ({0, 1}, (), True)])
def test_bench_grader_unshared_cores_are_not_pinned(cores, bench, usable, timed, beside):
    """One core; a run that samples and trains in turns; and a cluster, which times on cores of other machines."""
    pinned, bench.timed_cores = cores(usable), timed
    BenchGrader(Asked(), bench, during_training=beside).close()
    assert pinned == []


# All graders of a run ----------------------------------------------------------------------------------------------------


def test_measured_tasks_share_one_service(monkeypatch, bench, cores):
    opened, pinned, bench.timed_cores = [], cores(range(8)), (7,)
    monkeypatch.setattr(grading, "open_bench", lambda config: (opened.append(config), bench)[1])
    tasks = [Asked({"threads": 2}), None, Unmeasured(), Asked()]
    graders = open_graders(tasks, GraderConfig(workers=1), during_training=True)
    try:
        assert [type(grader) for grader in graders] == [BenchGrader, Grader, BenchGrader]
        assert opened == [BenchConfig(threads=2)]
        assert pinned == [set(range(7))], "once"
    finally:
        for grader in graders:
            grader.close()
    assert pinned[1:] == [set(range(8))]
    with open_graders([Unmeasured()], GraderConfig(workers=1))[0]:
        assert len(opened) == 1, "nobody asked for a service"


def test_bench_grader_closed_when_other_start_fails(monkeypatch):
    closed = []
    monkeypatch.setattr(Grader, "close", lambda self: closed.append(self))
    monkeypatch.setattr(self_check, "Grader", lambda *words: object.__new__(Grader))

    def fail(config):
        raise BenchError("the service has failed")

    monkeypatch.setattr(grading, "open_bench", fail)
    with pytest.raises(BenchError, match="the service has failed"):
        open_graders([Unmeasured(), Asked()], GraderConfig(), during_training=True)
    wait_until(lambda: len(closed) == 1)


def test_self_check_measured_task_uses_its_own_config(monkeypatch):
    rehearsed = []
    monkeypatch.setattr(grading, "check_bench", lambda *arguments: rehearsed.append(arguments))
    tasks = [Asked({"threads": 2, "optimization": "-O0"}), Asked()]
    check_grading(tasks, GraderConfig())
    assert rehearsed == [(tasks[0].bench, Asked.kernels)] * 2, "the held-out task shares the service"
    assert [task.name for task in tasks] == ["compiled with -O0"] * 2
    with pytest.raises(ValueError, match="^evaluation.task.bench is not "):
        check_grading([Asked({"threads": 2}), Asked({"threads": 3})], GraderConfig())


def test_self_check_unmeasurable_task_error_names_its_key():
    with pytest.raises(ValueError, match="^evaluation.task.bench: .*nogcc"):
        check_grading([None, Asked({"compiler": "nogcc"})], GraderConfig())


class Spread:
    """A judge that needs two texts."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return PROBLEM

    def grade_group(self, problem, texts):
        return [statistics.stdev([float(len(text)) for text in texts])] * len(texts)


def test_self_check_judge_gets_its_actual_group_size():
    check_grading([Spread()], GraderConfig())
    # A held-out problem has a greedy sample, which comes alone.
    with pytest.raises(ValueError, match="^evaluation.task: Spread .*'1' .*two data points"):
        check_grading([Spread(), Spread()], GraderConfig())
