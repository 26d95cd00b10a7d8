"""Grades programs by what the benchmark service measures of them.

The service has processes, deadlines and a queue of its own, so no process of `Grader` stands between. What the machine did
wrong (a measurement that others disturbed, a service that failed) is no grade: such a sample stays out of the baseline.

`open_graders` starts what grades the tasks of a run, of either kind, and `rehearse` tries it before.
"""

import os
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from torchtune_ext.grading.calls import checked
from torchtune_ext.grading.grader import Grader, GraderConfig, Outcome
from torchtune_ext.measured import service
from torchtune_ext.measured.bench import Bench
from torchtune_ext.measured.machine import alone_on, kept_off
from torchtune_ext.measured.ray_bench import RayBench
from torchtune_ext.measured.results import NOISY, BenchConfig, BenchError, Result
from torchtune_ext.measured.sandbox import SandboxError
from torchtune_ext.measured.service import MeasuredTask, is_measured, open_bench
from torchtune_ext.measured.timing import LOCK_S
from torchtune_ext.run.errors import Mistake
from torchtune_ext.tasks.task import Problem, Task

OUTPUT = "grader.log"
REHEARSED = 4  # problems whose solutions are graded before a run begins
NO_SOLUTION = "1"  # a text that is graded where there is no solution


def rehearse(
    tasks: Sequence[Task | None],
    bench: BenchConfig,
    config: GraderConfig | None = None,
    keys: Sequence[str] = ("task", "evaluation.task"),
    samples: int = 2,
) -> None:
    """Finds out before anything expensive starts whether these tasks can be graded (`service.rehearse`, `_rehearse_grading`).

    Args:
        config: how texts are graded that are not measured. With None they are not tried.
        keys: the nodes of the tasks, for messages.
        samples: texts of a problem of the first task, if it compares them; the others get one, like a greedy sample.

    Raises:
        ValueError: as these two say; also what cannot be locked in here.
    """
    graded: list[tuple] = []
    for i, (task, key) in enumerate(zip_longest(tasks, keys, fillvalue=None)):
        if task is not None and is_measured(task):
            try:
                service.rehearse(bench, task)
            except SandboxError as error:
                raise Mistake(f"bench: {error}") from error
        elif task is not None and config is not None:
            # The held-out problems mostly have the grader of the others: the same class, and the same function if one is named.
            own, texts = getattr(task, "__dict__", {}), samples if hasattr(task, "grade_group") and i == 0 else 1
            grader = (type(task), own.get("grade"), own.get("grade_group"), texts)
            if grader not in graded:
                graded.append(grader)
                _rehearse_grading(task, config, key, texts)


def _rehearse_grading(task: Task, config: GraderConfig, key: str, texts: int = 1) -> None:
    """Grades the solutions of the first problems in a process, as the run will do. If there are none, it grades another text.
    A task that compares gets that one, too, so that there are as many `texts`.

    Raises:
        ValueError: the grader fails on all of them, is too slow, or gives none of the solutions a reward.
    """
    problems = _first_problems(task)
    if not problems:
        return
    solutions = [_solution(task, problem) for problem in problems]
    name, worked = type(task).__name__, all(text is not None for text in solutions)
    what = "its own solution" if worked else f"the text {NO_SOLUTION!r}"
    try:
        # What it prints now it prints in the run as well, into a file there.
        with TemporaryDirectory() as folder, Grader(task, 1, config.timeout_s, Path(folder) / OUTPUT) as grader:
            outcomes = []
            for problem, text in zip(problems, solutions, strict=True):
                group = [text if worked else NO_SOLUTION] + [NO_SOLUTION] * (texts - 1)
                outcomes.append(grader.submit_group(problem, group).result()[0])
                if outcomes[-1].kind == "timed_out":
                    raise Mistake(
                        f"{key}: {name} took more than grader.timeout_s={config.timeout_s:g} to grade {what} of problem "
                        f"{problem.id!r}; raise grader.timeout_s, or look for what hangs in `grade`"
                    )
            rewards = [outcome.score.reward for outcome in outcomes if outcome.score is not None]
            if not rewards:
                raise Mistake(
                    f"{key}: {name} cannot grade {what} of problem {problems[0].id!r}: {outcomes[0].cause}; none of the first "
                    f"{len(problems)} problems can be graded"
                )
            # A task may pay less than 0 for everything, but where a solution gets just nothing, something is wrong. A grader
            # that compares says nothing of a single text, and a bare answer is no text that the user's function has to like.
            is_bare = "grade" in getattr(task, "__dict__", {}) and getattr(task, "worked", None) is None
            if worked and not any(rewards) and not grader.compares and not is_bare:
                others = [grader.submit(problem, NO_SOLUTION).result() for problem in problems]
                if max(rewards) <= max(
                    (other.score.reward for other in others if other.score is not None), default=0.0
                ):
                    raise Mistake(
                        f"{key}: {name} gives its own solution of problem {problems[0].id!r} the reward {rewards[0]:g}, and "
                        f"{NO_SOLUTION!r} no less: `grade` and `solution` do not fit each other (docs/custom_reward.md)"
                    )
    except RuntimeError as error:
        raise Mistake(f"{key}: {name} cannot be graded: {error}") from error


def _first_problems(task: Task) -> list[Problem]:
    """Returns the first problems. One that cannot be made is left out: the run deals with it when it comes to it."""
    problems = []
    for index in range(min(REHEARSED, len(task))):
        with suppress(Exception):
            problems.append(task[index])
    return problems


def _solution(task: Task, problem: Problem) -> str | None:
    """Returns the solution of a problem, or None. GRPO does not need one, so one that fails is as good as none."""
    try:
        text = task.solution(problem)
    except Exception:
        return None
    return text if isinstance(text, str) else None


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
