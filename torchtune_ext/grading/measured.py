"""Grades programs by what the benchmark service measures of them.

The service has processes, deadlines and a queue of its own, so no process of `Grader` stands between. What the machine did
wrong (a measurement that others disturbed, a service that failed) is no grade: such a sample stays out of the baseline.
"""

import os
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from torchtune_ext.grading.calls import checked
from torchtune_ext.grading.grader import Grader, GraderConfig, Outcome
from torchtune_ext.tasks.measured import service
from torchtune_ext.tasks.measured.bench import Bench
from torchtune_ext.tasks.measured.machine import alone_on, kept_off
from torchtune_ext.tasks.measured.ray_bench import RayBench
from torchtune_ext.tasks.measured.results import NOISY, BenchConfig, BenchError, Result
from torchtune_ext.tasks.measured.service import MeasuredTask, is_measured, open_bench
from torchtune_ext.tasks.measured.timing import LOCK_S
from torchtune_ext.tasks.task import Problem, Task

OUTPUT = "grader.log"


def rehearse(tasks: Sequence[Task | None], bench: BenchConfig) -> None:
    """Finds out before anything expensive starts whether what these tasks ask for can be measured (`service.rehearse`)."""
    for task in tasks:
        if task is not None and is_measured(task):
            service.rehearse(bench, task)


def open_graders(
    tasks: Sequence[Task | None],
    config: GraderConfig,
    bench: BenchConfig,
    beside_training: bool = False,
    folder: str | Path | None = None,
) -> list["Grader | BenchGrader"]:
    """Starts what grades these tasks, in their order, without those that are None. Measured ones share one service.

    Args:
        beside_training: programs are measured while this process trains. With two more cores than are timed on, it keeps off
            those. With fewer, training and timing take turns (`BenchGrader.alone`).
        folder: of the run: what graders print goes into the file `OUTPUT` there. None: they print where this process does.

    Raises:
        What `Grader` and `open_bench` raise, and what a task raises that measures programs of an earlier run again.
    """
    measuring, found = None, []
    try:
        for task in filter(None, tasks):
            if not is_measured(task):
                output = None if folder is None else Path(folder) / OUTPUT
                found.append(Grader(task, config.workers, config.timeout_s, output))
                continue
            if measuring is None:
                measuring = open_bench(bench)
            found.append(BenchGrader(task, measuring, beside_training))
            # It is made with the first task only: one service, and one pair of hands on this process's cores.
            beside_training = False
        return found
    except BaseException:
        for grader in found:
            grader.close()
        if measuring is not None:
            measuring.close()
        raise


@dataclass(slots=True)
class _Counts:
    """What came since the last call of `metrics`."""

    programs: int = 0
    noisy: int = 0
    cached: int = 0
    seconds: float = 0.0  # of all stages of what was measured
    queue: float = 0.0  # programs that waited at most


class BenchGrader:
    """Has the interface of `Grader`, for a task whose texts are programs.

    Args:
        task: says what to measure and what it is worth.
        bench: the service, which is closed with this object. Several graders may share it.
        beside_training: as in `open_graders`.
    """

    compares = False

    def __init__(self, task: MeasuredTask, bench: Bench | RayBench, beside_training: bool = False) -> None:
        self._task, self._bench = task, bench
        self._lock, self._counts = Lock(), _Counts()
        self._turns: tuple[int, ...] = ()  # cores on which training and timing take turns
        self._off = ExitStack()
        # Before this process keeps off any cores: if it fails, nobody closes this object.
        if hasattr(task, "measure_again"):
            task.measure_again(bench)
        cores = getattr(bench, "timed_cores", ())  # those of a Ray cluster are not this process's
        if beside_training and cores:
            if len(os.sched_getaffinity(0) - set(cores)) >= 2:
                self._off.enter_context(kept_off(cores))
            else:
                self._turns = tuple(cores)

    def submit(self, problem: Problem, text: str) -> "Future[Outcome]":
        """Hands in a text and returns at once. Nobody waits for a slower neighbor."""
        outcome: Future[Outcome] = Future()
        measured = self._bench.submit(
            self._task.kernel(problem), text, group=problem.id, permitted=self._task.permitted(problem)
        )
        stats = self._bench.stats()
        waiting = sum(stats.get(name, 0.0) for name in ("queued_checks", "queued_timings", "unsent"))
        with self._lock:
            self._counts.queue = max(self._counts.queue, waiting)
        outcome.add_done_callback(lambda done: measured.cancel() if done.cancelled() else None)
        measured.add_done_callback(lambda done: self._finish(problem, done, outcome))
        return outcome

    def metrics(self) -> dict[str, float]:
        """Returns what has come since the last call: the seconds of work on programs, the most that waited at a time, and the
        shares that could not be timed, and that were known before."""
        with self._lock:
            counts, self._counts = self._counts, _Counts()
        programs = max(1, counts.programs)
        return {
            "time/bench": counts.seconds,
            "bench/queue": counts.queue,
            "bench/noisy": counts.noisy / programs,
            "bench/cache_hits": counts.cached / programs,
        }

    def alone(self) -> AbstractContextManager:
        """Returns a context in which nothing is timed on the cores of this process, if it has too few to keep off some.

        To enter it, a timing that is under way is waited for: some seconds.
        """
        return alone_on(self._turns, LOCK_S) if self._turns else nullcontext()

    def close(self) -> None:
        """Ends the service. A second call does nothing."""
        self._off.close()
        self._bench.close()

    def _finish(self, problem: Problem, measured: "Future[Result]", outcome: "Future[Outcome]") -> None:
        """Runs in a thread of the service."""
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            outcome.set_result(self._outcome(problem, measured.result()))
        except (BenchError, CancelledError) as error:
            outcome.set_result(Outcome("infra_failed", None, str(error) or "cancelled"))
        except Exception as error:  # noqa: BLE001 (the task's own code; who waits gets it)
            outcome.set_exception(error)

    def _outcome(self, problem: Problem, result: Result) -> Outcome:
        with self._lock:
            self._counts.programs += 1
            self._counts.noisy += result.outcome == NOISY
            self._counts.cached += result.is_cached
            if not result.is_cached:
                self._counts.seconds += sum(value for name, value in result.seconds.items() if name != "wait")
        if result.outcome == NOISY:
            return Outcome(NOISY, None, result.note)
        return Outcome(*checked(self._task.score(problem, result), self._task.score))
