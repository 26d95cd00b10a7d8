"""Grades texts in processes. If a grader fails, an `Ungraded` says so; no reward is invented for the text."""

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeGuard

import cloudpickle
from pydantic import Field

from torchtune_ext.grading.outcomes import GradingWorker, Outcome, Ungraded, has_shipped_grader, timeout_score
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.processes import CRASH_KINDS, Closing, ProcessPool
from torchtune_ext.settings.records import Seconds, config_record
from torchtune_ext.tasks.task import Problem, Score, Task

log = logging.getLogger(__name__)

# The kernel may deliver a Ctrl-C to any thread, but Python acts on it only in the main thread. So a wait of the main
# thread wakes up after this many seconds.
INTERRUPT_POLL_S = 1.0
DIED_PREFIX = "the grading process died"  # the first words of a cause
MAX_FAILED_STEPS = 2  # steps in a row in which every text failed, after which the run ends


@config_record("grader")
class GraderConfig:
    """The keys of `grader:`."""

    workers: int = Field(default=1, ge=1, description="grader processes")
    timeout_s: Seconds = Field(
        default=10.0, description="time limit of one text, or of a group that is graded together, seconds"
    )


class Grader(Closing):
    """Grades texts with `task.grade` in `workers` processes, each text within `timeout_s` seconds.

    A task that compares texts has `grade_group(problem, texts)` instead. One call grades a group, within the same time,
    and if it fails, no text of the group has a score.

    A text that hangs or crashes a grader of this package has the reward 0 and the part "timed_out". It is not blamed
    for a process that the kernel kills to free memory, nor for a machine too busy to compute.

    The processes start at once and end with this process or with `close`. They print where this process does, or into
    the file `output`, which `close` removes if it is empty.

    Raises:
        ValueError: a setting is out of range, or the task cannot be pickled.
        RuntimeError: the workers cannot start.
    """

    _worker_class = GradingWorker  # what lives in the processes

    def __init__(self, task: Task, workers: int = 1, timeout_s: float = 10.0, output: Path | None = None):
        config = GraderConfig(workers, timeout_s)
        self.grades_groups = hasattr(task, "grade_group")  # whether the texts of a problem are graded together
        self.task, self.is_shipped = task, has_shipped_grader(task)
        try:
            # Plain pickle sends a class only by its name. A user's copied recipe may define the task in `__main__`.
            target = cloudpickle.dumps(self._worker_class(task))
        except Exception as error:
            # Pickling runs code of the task, which may raise any error.
            raise UsageError(
                f"task {type(task).__name__} cannot be sent to a grading process: {type(error).__name__}: {error}. "
                "Keep open files, locks and models out of its attributes"
            ) from error
        self._timeout_s, self._output = config.timeout_s, output
        # A process can be killed at any moment, also inside C code that holds the interpreter lock (a regular expression
        # that backtracks for ever). It has one text, or one group, at a time, so one that dies loses no other.
        self.processes = ProcessPool(target, config.workers, "grading", "task", output=output)

    def submit(self, problem: Problem, *texts: str) -> "Future[list[Outcome]]":
        """Hands in a text, or all texts of a problem if the task compares. The result is an outcome for each."""

        def otherwise(kind: str, cause: str) -> list[Outcome]:
            cause = f"{DIED_PREFIX}: {cause}" if kind in CRASH_KINDS else cause
            if self.is_shipped and kind in ("late", "died"):
                return [timeout_score(cause)] * len(texts)
            return [Ungraded("timed_out" if kind in ("late", "stalled") else "infra_failed", cause)] * len(texts)

        # A process may end by chance. So before a shipped grader gives a text the reward 0 for it, it tries a second time.
        return self.processes.submit((problem, texts), self._timeout_s, otherwise, retries=int(self.is_shipped))

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """Returns one outcome for each (problem, text), in the same order."""
        futures = [self.submit(problem, text) for problem, text in items]
        outcomes = [outcome for each in gather_results(futures) for outcome in each]
        log_failures(outcomes)
        return outcomes

    def metrics(self, refill: bool = False) -> dict[str, float]:
        """Returns the metrics of the grading itself in a step. A task's own grader may have some."""
        return {}

    def close(self) -> None:
        """Kills the workers. A second call does nothing."""
        self.processes.close(RuntimeError("the Grader is closed"))
        # Graders that print nothing leave no file.
        if self._output is not None and self._output.exists() and not self._output.stat().st_size:
            self._output.unlink()


def gather_results(futures: Sequence[Future]) -> list:
    """Returns the results of the futures, in their order. An interrupt cancels those that are left."""
    left = set(futures)
    try:
        # This waits for all futures at once. Waking up for each of thousands would take the interpreter lock from the
        # thread that serves the workers.
        while left:
            left = concurrent.futures.wait(left, timeout=INTERRUPT_POLL_S).not_done
        return [future.result() for future in futures]
    finally:
        # A worker still finishes the text that it has, but nobody gets the outcome.
        for future in futures:
            future.cancel()


def log_failures(outcomes: Sequence[Outcome], during: str = "grading") -> None:
    """Logs a line for each kind of failure, with its most common causes."""
    for kind in ("infra_failed", "timed_out", "noisy"):
        causes = Counter(failure_cause(outcome) for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("%s: %d of %d texts %s: %s", during, sum(causes.values()), len(outcomes), kind, common)


def failure_cause(outcome: Outcome) -> str:
    """Returns why a text was not graded to the end."""
    return outcome.note or outcome.kind if isinstance(outcome, Score) else outcome.cause


class GradingFailed(RunFailure):
    """The grader has failed on every text of several steps."""


class GradingMonitor:
    """Looks at the outcomes of each step, logs failures, and notices a grader that never succeeds."""

    def __init__(self) -> None:
        self._graded_step: int | None = None  # the last step of which a text was graded
        self._failed_steps: list[int] = []  # the steps since then
        self._first = ""  # the first failure in these

    def check_step(self, step: int, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """Takes outcomes of a step, each with the id of its problem.

        Raises:
            GradingFailed: this is the second step in a row in which every text failed. The message has the first cause.
        """
        log_failures([outcome for _, outcome in outcomes])
        failed = [(problem, outcome) for problem, outcome in outcomes if is_failure(outcome)]
        if len(failed) < len(outcomes):
            self._graded_step, self._failed_steps = step, []
        # The outcomes of a step may come in several calls. One graded text clears the step, and it counts once.
        if not failed or self._graded_step == step or step in self._failed_steps:
            return
        if not self._failed_steps:
            problem, outcome = failed[0]
            self._first = f"problem {problem!r} {outcome.kind}: {outcome.cause}"
        self._failed_steps.append(step)
        if len(self._failed_steps) >= MAX_FAILED_STEPS:
            raise GradingFailed(
                f"the grader has failed on every text of steps {self._failed_steps[0]} to {step}, so nothing is learned. The "
                f"first failure: {self._first}. Repair it, try it on a text (docs/custom_reward.md), then resume"
            )


def is_failure(outcome: Outcome | None) -> TypeGuard[Ungraded]:
    """Tells whether a text has no score by the fault of its grader. A disturbed machine is not its fault."""
    return isinstance(outcome, Ungraded) and outcome.kind != "noisy"
