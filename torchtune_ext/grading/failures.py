"""Ends a run whose grader fails on every text: such a run would sample and learn nothing until its last step."""

from collections.abc import Sequence

from torchtune_ext.grading.calls import Outcome
from torchtune_ext.grading.grader import log_failures
from torchtune_ext.run.errors import Failure

STEPS = 2  # steps in a row in which every text failed, after which the run ends


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
        if len(self._failed_steps) >= STEPS:
            raise GradingFailed(
                f"the grader has failed on every text of steps {self._failed_steps[0]} to {step}, so nothing is learned. The "
                f"first failure: {self._first}. Mend it and try it on a text (docs/custom_reward.md), then go on"
            )


def is_failure(outcome: Outcome) -> bool:
    """Tells whether a text could not be graded, by the fault of its grader. A machine that is disturbed is none of it."""
    return outcome.score is None and outcome.kind != "noisy"
