"""The staged curriculum: each problem has its own stage, which determines the permitted techniques.

Staged quality-diversity (arXiv 2602.12049) "progressively varies the permitted optimisation
techniques on a per-problem basis". The promotion rule is not published, so these rules are our own
design. They are deterministic and do not use a clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torchtune_ext.measured.techniques import TECHNIQUES
from torchtune_ext.run.errors import UsageError

# Each stage permits the techniques of the previous stage and more. Packing helps only in
# combination with the others, so it comes last.
STAGES = {
    "none": frozenset[str](),
    "loop_order": frozenset({"loop_order"}),
    "blocking": frozenset({"loop_order", "blocking"}),
    "vectorization": frozenset({"loop_order", "blocking", "vectorization"}),
    "threads": frozenset(set(TECHNIQUES) - {"packing"}),
    "all": frozenset(TECHNIQUES),
}
"""Stage -> permitted techniques, from the first stage to the last."""

# Number of visits in the decision window. The correct share of 8 samples has a standard error of up
# to 0.18. The mean over half a window, 8 visits, has a standard error of 0.063.
WINDOW_VISITS = 16
# Minimum share of correct programs for a promotion. With a lower share, most samples of a group are
# failures, and the advantage of correctness hides the advantage of speed.
MIN_CORRECT = 0.5
# Maximum rise of that share between the halves of the window. A rise below the standard error of
# the difference of two halves, sqrt(2) * 0.063, is insignificant.
MAX_SETTLED_RISE = 0.09
# Maximum gain of speed between the halves, in doublings: 0.1 is 7%. A smaller gain is not worth
# waiting for, since the next stage gains whole doublings.
MAX_SETTLED_GAIN = 0.1
# Visits of one stage after which a problem is promoted with MIN_CORRECT_LATE. Without this rule, a
# share slightly below MIN_CORRECT would hold a problem in its stage forever.
PATIENCE_VISITS = 4 * WINDOW_VISITS
MIN_CORRECT_LATE = 0.25


@dataclass(frozen=True, slots=True)
class Visit:
    """One group of samples of a problem."""

    correct: float  # share of correct, permitted programs among the checked samples
    speed: float | None = None  # mean log2 speedup of the correct programs; None if none was timed


@dataclass(slots=True)
class _ProblemState:
    """The curriculum state of one problem."""

    stage: int = 0
    visits: int = 0  # visits of the current stage
    window: list[Visit] = field(default_factory=list)  # last visits of the current stage, at most WINDOW_VISITS


class Curriculum:
    """The stage of every problem.

    Args:
        stages: names of STAGES in order. Omit "threads" if a program may use only one thread.
    """

    def __init__(self, stages: Sequence[str] = tuple(STAGES)) -> None:
        self.stages = tuple(stages)
        self._problems: dict[str, _ProblemState] = {}

    def stage_of(self, problem: str) -> str:
        """Returns the stage of a problem: the first one for a new problem."""
        return self.stages[self._problems[problem].stage if problem in self._problems else 0]

    def observe(self, problem: str, visit: Visit) -> str:
        """Records one group of a problem, sampled at its current stage.

        Returns:
            The reason of a promotion to the next stage, for the log; "" without a promotion.
        """
        state = self._problems.setdefault(problem, _ProblemState())
        state.visits += 1
        state.window = [*state.window, visit][-WINDOW_VISITS:]
        if state.stage + 1 == len(self.stages) or not (reason := _promotion_reason(state)):
            return ""
        # A problem is never demoted: a stage permits all techniques of the earlier stages.
        state.stage, state.visits, state.window = state.stage + 1, 0, []
        return reason

    def state_dict(self) -> dict:
        """Returns the state of all problems, JSON-serializable."""
        problems = {name: asdict(state) for name, state in self._problems.items()}
        return {"stages": list(self.stages), "problems": problems}

    def load_state_dict(self, state: Mapping) -> None:
        """Restores the return value of `state_dict`.

        Raises:
            UsageError: the state has another list of stages.
        """
        if tuple(state["stages"]) != self.stages:
            raise UsageError(
                f"stages={list(self.stages)}, but the checkpoint was written with {state['stages']}. Fix: use these, "
                "or begin anew"
            )
        self._problems = {
            name: _ProblemState(**{**its, "window": [Visit(**visit) for visit in its["window"]]})
            for name, its in state["problems"].items()
        }


def _promotion_reason(state: _ProblemState) -> str:
    """Returns the reason of a promotion, or "" if the problem stays in its stage."""
    if len(state.window) < WINDOW_VISITS:
        return ""
    half = WINDOW_VISITS // 2
    first, second = state.window[:half], state.window[half:]
    share = _mean([visit.correct for visit in state.window])
    rise = _mean([visit.correct for visit in second]) - _mean([visit.correct for visit in first])
    speeds = [[visit.speed for visit in part if visit.speed is not None] for part in (first, second)]
    gain = _mean(speeds[1]) - _mean(speeds[0]) if all(speeds) else 0.0
    if share >= MIN_CORRECT and rise < MAX_SETTLED_RISE and gain < MAX_SETTLED_GAIN:
        return f"{share:.0%} are correct and the share is stable; the last {half} groups gained {gain:+.2f} doublings"
    if share >= MIN_CORRECT_LATE and state.visits >= PATIENCE_VISITS:
        return f"{share:.0%} are correct after {state.visits} groups, the limit of a stage"
    return ""


def _mean(values: Sequence[float]) -> float:
    # Not `fmean`, which rounds otherwise: a resumed run must promote at the same results.
    return sum(values) / len(values)
