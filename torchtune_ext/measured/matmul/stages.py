"""The staged curriculum: each problem has its own stage, and the stage says which techniques are permitted.

Staged quality-diversity (arXiv 2602.12049) "progressively varies the permitted optimisation techniques on a per-problem
basis". How it decides is not published, so these rules are our own design. They use no clock and no randomness.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torchtune_ext.measured.techniques import TECHNIQUES
from torchtune_ext.run.errors import UsageError

# Each stage permits what the one before it does, and more. Packing pays only beside the others, so it comes last.
STAGES = {
    "none": frozenset[str](),
    "loop_order": frozenset({"loop_order"}),
    "blocking": frozenset({"loop_order", "blocking"}),
    "vectorization": frozenset({"loop_order", "blocking", "vectorization"}),
    "threads": frozenset(set(TECHNIQUES) - {"packing"}),
    "all": frozenset(TECHNIQUES),
}
"""What each stage permits, from the first stage to the last."""

# The last visits that decide. A share of 8 samples has a standard error of up to 0.18, and the mean over half a window,
# 8 visits, one of 0.063.
WINDOW_VISITS = 16
# The share of right programs with which a problem may go on: with fewer, most of a group says only that it failed, and the
# advantage of being fast is lost in that of being right.
MIN_CORRECT = 0.5
# Rise of that share from the first to the second half of the window that counts as settled: below the standard error of
# the difference of two halves, sqrt(2) * 0.063, a rise cannot be told from none.
MAX_SETTLED_RISE = 0.09
# Gain of speed between the halves that counts as settled, in doublings: a tenth is 7%. Less is not worth waiting for,
# when the next stage is worth doublings.
MAX_SETTLED_GAIN = 0.1
# Visits of one stage after which a problem goes on with what it has, if at least HALFWAY of its programs are right. Without
# it a share that stays a little below ENOUGH would hold a problem for ever.
PATIENCE_VISITS = 4 * WINDOW_VISITS
MIN_CORRECT_LATE = 0.25


@dataclass(frozen=True, slots=True)
class Visit:
    """One group of samples of a problem."""

    correct: float  # share of the samples that could be checked whose program is right and permitted
    speed: float | None = None  # mean log2 of how many times faster than naive the right ones are; None: none was timed


@dataclass(slots=True)
class _ProblemState:
    """Where one problem stands."""

    stage: int = 0
    visits: int = 0  # of this stage, since it was entered
    window: list[Visit] = field(default_factory=list)  # the last ones of this stage, at most WINDOW


class Curriculum:
    """The stage of every problem.

    Args:
        stages: names of STAGES in the order in which they are permitted. A machine that gives a program one
            thread has no use for "threads".
    """

    def __init__(self, stages: Sequence[str] = tuple(STAGES)) -> None:
        self.stages = tuple(stages)
        self._problems: dict[str, _ProblemState] = {}

    def stage_of(self, problem: str) -> str:
        """Returns the stage of a problem: the first one for a new problem."""
        return self.stages[self._problems[problem].stage if problem in self._problems else 0]

    def observe(self, problem: str, visit: Visit) -> str:
        """Takes in one group of a problem. Returns why it goes on to the next stage, for the log; "" if it does not.

        Leave out a group that was sampled for another stage than the problem's present one.
        """
        state = self._problems.setdefault(problem, _ProblemState())
        state.visits += 1
        state.window = [*state.window, visit][-WINDOW_VISITS:]
        if state.stage + 1 == len(self.stages) or not (reason := _promotion_reason(state)):
            return ""
        # A problem never goes back: a stage permits all that the earlier ones do, so what was right there still is.
        state.stage, state.visits, state.window = state.stage + 1, 0, []
        return reason

    def state_dict(self) -> dict:
        """Returns all that it knows, JSON-able."""
        problems = {name: asdict(state) for name, state in self._problems.items()}
        return {"stages": list(self.stages), "problems": problems}

    def load_state_dict(self, state: Mapping) -> None:
        """Takes over what `state_dict` returned.

        Raises:
            ValueError: it is that of another list of stages.
        """
        if tuple(state["stages"]) != self.stages:
            raise UsageError(
                f"stages={list(self.stages)}, but the checkpoint was written with {state['stages']}; use these, or begin anew"
            )
        self._problems = {
            name: _ProblemState(**{**its, "window": [Visit(**visit) for visit in its["window"]]})
            for name, its in state["problems"].items()
        }


def _promotion_reason(state: _ProblemState) -> str:
    """Returns why a problem leaves its stage, "" if it stays."""
    if len(state.window) < WINDOW_VISITS:
        return ""
    half = WINDOW_VISITS // 2
    first, second = state.window[:half], state.window[half:]
    share = _mean([visit.correct for visit in state.window])
    rise = _mean([visit.correct for visit in second]) - _mean([visit.correct for visit in first])
    speeds = [[visit.speed for visit in part if visit.speed is not None] for part in (first, second)]
    gain = _mean(speeds[1]) - _mean(speeds[0]) if all(speeds) else 0.0
    if share >= MIN_CORRECT and rise < MAX_SETTLED_RISE and gain < MAX_SETTLED_GAIN:
        return f"{share:.0%} are right and settled; the last {half} groups gained {gain:+.2f} doublings"
    if share >= MIN_CORRECT_LATE and state.visits >= PATIENCE_VISITS:
        return f"{share:.0%} are right after {state.visits} groups, and it has had its time"
    return ""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
