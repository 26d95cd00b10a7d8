"""Grades texts. When a grader fails, the outcome says so; no reward is invented for the text.

kind             what happened                                                     score   trained on
"scored"         the grader returned a number or a Score, also for a wrong answer   yes     yes
"policy_failed"  the grader returned a Score whose parts["failed"] is not 0: the    yes     yes
                 text holds no answer to grade
"infra_failed"   the grader raised, crashed, or returned anything else              None    no, kept out of the baseline
"timed_out"      the grader was still busy after the deadline, and was killed       None    no, kept out of the baseline
"noisy"          the text is a right program, but others disturbed the machine      None    no, kept out of the baseline
                 while its speed was measured (measured.py)

Graders run in processes that can be killed at any moment (run/processes.py), also inside C code that holds the interpreter
lock (a regular expression that backtracks for ever). A process has one text (or one group) at a time, so one that dies loses
no other text.
"""

import concurrent.futures
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import cloudpickle

from torchtune_ext.grading.calls import Grading, Outcome
from torchtune_ext.run.errors import Failure, Mistake
from torchtune_ext.run.processes import Processes
from torchtune_ext.tasks.task import Problem, Task

log = logging.getLogger(__name__)

# The kernel may deliver a Ctrl-C to any thread, but Python acts on it only in the main thread. So a wait of the main
# thread wakes up after this many seconds, and Python can act.
WAKE_S = 1.0
FAILED_STEPS = 2  # steps in a row in which every text failed, after which the run ends


@dataclass(frozen=True, slots=True)
class GraderConfig:
    """The node `grader:` of a recipe."""

    workers: int = 1  # number of processes that grade
    timeout_s: float = 10.0  # seconds for one text; for all texts of a group that are graded together

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise Mistake(f"grader.workers={self.workers} must be at least 1")
        if not self.timeout_s > 0:
            raise Mistake(f"grader.timeout_s={self.timeout_s} must be more than 0 seconds")


class Grader:
    """Grades texts with `task.grade` in `workers` processes, each text within `timeout_s` seconds.

    A task that compares texts has `grade_group(problem, texts)`, which then grades all. The time limit holds for each call
    of it, so for a whole group. If it raises, hangs or dies, all texts of the group are without a score.

    The task is sent by cloudpickle, so its class may be defined in the user's copied recipe (`__main__`). The processes
    start at once, import torch only if the task does, and end with this process or with `close`. What they print goes into the
    file `output`, or, without one, where this process prints. If nothing was printed, `close` removes the file.

    Raises:
        ValueError: a setting is out of range, or the task cannot be pickled.
        RuntimeError: the workers cannot start.
    """

    _calls = Grading  # what lives in the processes

    def __init__(self, task: Task, workers: int = 1, timeout_s: float = 10.0, output: Path | None = None):
        config = GraderConfig(workers, timeout_s)
        self.compares = hasattr(task, "grade_group")  # whether the texts of a problem are graded together
        try:
            target = cloudpickle.dumps(self._calls(task))
        except Exception as error:
            # Pickling runs code of the task, which may raise any error.
            raise Mistake(
                f"task {type(task).__name__} cannot be sent to a grading process: {type(error).__name__}: {error}. "
                "Keep open files, locks and models out of its attributes"
            ) from error
        self._timeout_s, self._output = config.timeout_s, output
        self.processes = Processes(target, config.workers, "grading", "task", output=output)

    def submit(self, problem: Problem, *texts: str) -> "Future[list[Outcome]]":
        """Hands in a text, or, for a task that compares, all texts of a problem, and returns at once. A slow call delays others
        only if no other worker is free. The result is one outcome for each text, in the same order."""

        def otherwise(kind: str, cause: str) -> list[Outcome]:
            cause = f"the grading process died: {cause}" if kind == "died" else cause
            return [Outcome("timed_out" if kind == "late" else "infra_failed", None, cause)] * len(texts)

        return self.processes.submit((problem, texts), self._timeout_s, otherwise)

    def grade(self, items: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        """Returns one outcome for each (problem, text), in the same order."""
        futures = [self.submit(problem, text) for problem, text in items]
        outcomes = [outcome for each in results(futures) for outcome in each]
        log_failures(outcomes)
        return outcomes

    def metrics(self, refill: bool = False) -> dict[str, float]:
        """Returns what is to be logged of the grading itself in a step: nothing."""
        return {}

    def alone(self) -> AbstractContextManager:
        """Returns a context in which graders do not measure time. These never do."""
        return nullcontext()

    def close(self) -> None:
        """Kills the workers. A second call does nothing."""
        self.processes.close(RuntimeError("the Grader is closed"))
        if self._output is not None and self._output.exists() and not self._output.stat().st_size:
            self._output.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def results(futures: Sequence[Future]) -> list:
    """Returns the results of the futures, in their order.

    If this is interrupted, the other futures are canceled. A worker still finishes the text that it has, but nobody
    gets the outcome.
    """
    left = set(futures)
    try:
        # This waits for all futures at once. If it woke up for each of thousands, it would take the interpreter lock
        # from the thread that serves the workers.
        while left:
            left = concurrent.futures.wait(left, timeout=WAKE_S).not_done
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def log_failures(outcomes: Sequence[Outcome], during: str = "grading") -> None:
    """Logs one line for each kind of failure with its most common causes."""
    for kind in ("infra_failed", "timed_out", "noisy"):
        causes = Counter(outcome.cause for outcome in outcomes if outcome.kind == kind)
        if causes:
            common = "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
            log.warning("%s: %d of %d texts %s: %s", during, sum(causes.values()), len(outcomes), kind, common)


class GradingFailed(Failure):
    """For several steps the grader has failed on every text."""


class GradingWatch:
    """Looks at the outcomes of each step, logs failures, and notices a grader that never succeeds."""

    def __init__(self) -> None:
        self._graded_step: int | None = None  # the last step of which a text was graded
        self._failed_steps: list[int] = []  # those since then
        self._first = ""  # the first failure of these

    def look(self, step: int, outcomes: Sequence[tuple[str, Outcome]]) -> None:
        """Takes outcomes of a step, each with the id of its problem. Those of one step may come in several calls.

        Raises:
            GradingFailed: this is the second step in a row in which every text failed. The message has the first cause.
        """
        log_failures([outcome for _, outcome in outcomes])
        failed = [(problem, outcome) for problem, outcome in outcomes if is_failure(outcome)]
        if len(failed) < len(outcomes):
            self._graded_step, self._failed_steps = step, []
        if not failed or self._graded_step == step or step in self._failed_steps:
            return
        if not self._failed_steps:
            problem, outcome = failed[0]
            self._first = f"problem {problem!r} {outcome.kind}: {outcome.cause}"
        self._failed_steps.append(step)
        if len(self._failed_steps) >= FAILED_STEPS:
            raise GradingFailed(
                f"the grader has failed on every text of steps {self._failed_steps[0]} to {step}, so nothing is learned. The "
                f"first failure: {self._first}. Mend it and try it on a text (docs/custom_reward.md), then go on"
            )


def is_failure(outcome: Outcome) -> bool:
    """Tells whether a text could not be graded, by the fault of its grader. A disturbed machine is not its fault."""
    return outcome.score is None and outcome.kind != "noisy"
