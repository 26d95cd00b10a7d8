"""Grades texts in worker processes.

A text whose grader fails gets an `Ungraded` with the cause, never a substitute reward.
"""

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeGuard

import cloudpickle
from pydantic import Field

from torchtune_ext.grading.outcomes import GradingWorker, Outcome, Ungraded, has_builtin_grader, timeout_score
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.processes import CRASH_KINDS, Closing, ProcessPool
from torchtune_ext.settings.sections import Seconds, config_section
from torchtune_ext.tasks.task import Problem, Score, Task

log = logging.getLogger(__name__)

# The kernel may deliver Ctrl-C to any thread, but Python handles it only in the main thread. So a
# wait of the main thread wakes up after this many seconds.
INTERRUPT_POLL_S = 1.0
DIED_PREFIX = "the grading process died"  # start of the cause of a crash
MAX_FAILED_STEPS = 2  # consecutive steps in which every text failed, after which the run ends


@config_section("grader")
class GraderConfig:
    """The keys of `grader:`."""

    workers: int = Field(default=1, ge=1, description="grader processes, or concurrent episodes")
    timeout_s: Seconds = Field(
        default=10.0,
        description="time limit in seconds for one text, a group graded together, or a call of an environment",
    )


class TaskWorkers(Closing):
    """Worker processes that run the code of a task.

    The processes start in the constructor and end with this process or with `close`.

    Args:
        task: the task whose code is called. It must be picklable.
        timeout_s: time limit in seconds for one call of the task's code.
        output: file for everything that the processes print; `close` removes it if it is empty.
            None: they print to the output of this process.

    Raises:
        UsageError: an argument is out of range, or the task cannot be pickled.
        RunFailure: the workers cannot start.
    """

    _worker_class: type  # the callable that runs in each process

    def __init__(self, task: Task, workers: int = 1, timeout_s: float = 10.0, output: Path | None = None):
        config = GraderConfig(workers, timeout_s)
        self.task, self.is_builtin = task, has_builtin_grader(task)
        try:
            # Plain pickle stores only the name of a class, and a user's copy of a recipe may define
            # the task in `__main__`, which the worker does not have.
            target = cloudpickle.dumps(self._worker_class(task))
        except Exception as error:
            # Pickling runs code of the task, which may raise any error.
            raise UsageError(
                f"task {type(task).__name__} cannot be pickled: {type(error).__name__}: {error}. "
                "Fix: keep open files, locks and models out of its attributes"
            ) from error
        self._timeout_s, self._output = config.timeout_s, output
        # A process can be killed at any moment, even inside C code that holds the interpreter lock
        # (such as a regular expression that backtracks exponentially). A process has one call at a
        # time, so a crash affects no other text.
        self.processes = ProcessPool(target, config.workers, "grading", "task", output=output)

    def metrics(self, refill: bool = False) -> dict[str, float]:
        """Returns metrics of grading in a step: none here; graders of tasks may override this."""
        return {}

    def close(self) -> None:
        """Kills the workers. A second call does nothing."""
        self.processes.close(RuntimeError("the Grader is closed"))
        # Processes that print nothing leave no file.
        if self._output is not None and self._output.exists() and not self._output.stat().st_size:
            self._output.unlink()


class Grader(TaskWorkers):
    """Grades texts with `task.grade` in worker processes.

    A task that compares texts defines `grade_group(problem, texts)` instead. One call grades a
    group within the same time limit. If the call fails, no text of the group has a score.

    A text that hangs or crashes a grader of this package gets the reward 0 and the part
    "timed_out", unless the kernel kills the process to free memory, or the machine stalls.
    """

    _worker_class = GradingWorker

    @property
    def grades_groups(self) -> bool:
        """Whether one call grades all texts of a problem."""
        return hasattr(self.task, "grade_group")

    def submit(self, problem: Problem, *texts: str) -> "Future[list[Outcome]]":
        """Queues a text, or all texts of a problem if the task compares them.

        Returns:
            A future of one outcome for each text.
        """

        def on_failure(kind: str, cause: str) -> list[Outcome]:
            cause = f"{DIED_PREFIX}: {cause}" if kind in CRASH_KINDS else cause
            if self.is_builtin and kind in ("timed_out", "died"):
                return [timeout_score(cause)] * len(texts)
            return [Ungraded("timed_out" if kind in ("timed_out", "stalled") else "infra_failed", cause)] * len(texts)

        # A process may exit for another reason than the text. So a grader of this package gives the
        # reward 0 only after a second attempt.
        return self.processes.submit((problem, texts), self._timeout_s, on_failure, retries=int(self.is_builtin))

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """Returns one outcome for each (problem, text), in the same order."""
        futures = [self.submit(problem, text) for problem, text in items]
        outcomes = [outcome for text_outcomes in gather_results(futures) for outcome in text_outcomes]
        log_failures(outcomes)
        return outcomes


def gather_results(futures: Sequence[Future]) -> list:
    """Returns the results of the futures, in order. An interrupt cancels the unfinished ones."""
    pending = set(futures)
    try:
        # This waits for all futures at once. Waking up for each of thousands of futures would
        # contend for the interpreter lock with the thread that serves the workers.
        while pending:
            pending = concurrent.futures.wait(pending, timeout=INTERRUPT_POLL_S).not_done
        return [future.result() for future in futures]
    finally:
        # A worker still finishes its current text; the outcome is discarded.
        for future in futures:
            future.cancel()


def log_failures(outcomes: Sequence[Outcome], during: str = "grading") -> None:
    """Logs one line for each kind of failure, with its three most common causes."""
    for kind in ("infra_failed", "timed_out", "noisy"):
        causes = Counter(failure_cause(outcome) for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("%s: %d of %d texts %s: %s", during, sum(causes.values()), len(outcomes), kind, common)


def failure_cause(outcome: Outcome) -> str:
    """Returns the cause of an outcome without a regular score."""
    return outcome.note or outcome.kind if isinstance(outcome, Score) else outcome.cause


class GradingFailed(RunFailure):
    """The grader failed on every text of several consecutive steps."""


class GradingMonitor:
    """Logs the grading failures of each step; ends the run if the grader fails on every text."""

    def __init__(self) -> None:
        self._graded_step: int | None = None  # the last step with a graded text
        self._failed_steps: list[int] = []  # the steps since `_graded_step`
        self._first_failure = ""  # the first failure in `_failed_steps`

    def check_step(self, step: int, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """Records outcomes of a step.

        Args:
            step: the step of the run.
            outcomes: (problem id, outcome) for each text. A step may be reported in several calls.

        Raises:
            GradingFailed: every text failed in `MAX_FAILED_STEPS` consecutive steps.
        """
        log_failures([outcome for _, outcome in outcomes])
        failed = [(problem, outcome) for problem, outcome in outcomes if is_failure(outcome)]
        if len(failed) < len(outcomes):
            self._graded_step, self._failed_steps = step, []
        # One graded text clears the step. A failed step counts once, even if it has several calls.
        if not failed or self._graded_step == step or step in self._failed_steps:
            return
        if not self._failed_steps:
            problem, outcome = failed[0]
            self._first_failure = f"problem {problem!r} {outcome.kind}: {outcome.cause}"
        self._failed_steps.append(step)
        if len(self._failed_steps) >= MAX_FAILED_STEPS:
            raise GradingFailed(
                f"the grader has failed on every text of steps {self._failed_steps[0]} to {step}, "
                f"so nothing is learned. The first failure: {self._first_failure}. "
                "Fix: repair the grader, try it on a text (docs/how_to/reward_function.md), then resume"
            )


def is_failure(outcome: Outcome | None) -> TypeGuard[Ungraded]:
    """Returns whether the grader failed on a text. A noisy measurement is not a failure."""
    return isinstance(outcome, Ungraded) and outcome.kind != "noisy"
