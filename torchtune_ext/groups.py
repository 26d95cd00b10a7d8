"""The records between sampling and packing: a prompt, and what became of each of its completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtune_ext.grading import Outcome
from torchtune_ext.sampling.records import Completion
from torchtune_ext.tasks.task import Graded, Problem, Score


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt with what became of it."""

    completion: Completion  # what the engine sampled, or, in a supervised sample, the target
    # The decoded tokens, for graders and people. If the prompt ends with an open "<think>", the text begins with it.
    text: str = ""
    outcome: Outcome | None = None  # what came out of grading; None: the sample was not given to a grader
    advantage: float = 0.0  # set by `with_advantages`
    trained: bool = False  # False: the sample is kept for the record, but not packed

    @property
    def score(self) -> Score | None:
        """Returns the score, or None where the sample was not graded or could not be graded."""
        return None if self.outcome is None else self.outcome.score


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and all its completions."""

    problem: Problem
    prompt_tokens: np.ndarray  # [P] int32
    samples: tuple[Sample, ...]  # G samples

    @property
    def has_signal(self) -> bool:
        """Tells whether any sample has an advantage other than 0."""
        return any(sample.advantage for sample in self.samples)

    @property
    def completions(self) -> int:
        """Returns the number of samples that have a reward, or that are trained on without one (supervised)."""
        return sum(sample.trained or sample.score is not None for sample in self.samples)


def graded(groups: Sequence[Group]) -> list[Graded]:
    """Returns what a task is told of groups (`AdaptiveTask.observe`)."""
    return [
        (group.problem, [(s.text, s.score, s.outcome.kind if s.outcome else "") for s in group.samples])
        for group in groups
    ]


# What kind of group ("group" of the run, "refill", "evaluation", "greedy"), and its number among them.
GroupKey = tuple[str, int]


class GroupTimes:
    """Is told where each group is, at the moment when it comes there: with the engine, with the graders, in the buffer. The
    stream's thread calls it, and its user's. This one forgets it all; `telemetry.timeline.Timeline` writes it down."""

    def begin(self, key: GroupKey, track: str = "engine", **facts: Any) -> None:
        """The group is submitted to the engine; or it is in the "buffer" already, since a checkpoint had it finished."""

    def move(self, key: GroupKey, track: str, **facts: Any) -> None:
        """The group is with the "graders", or in the "buffer". An unknown key is nobody's: the group was cancelled."""

    def end(self, key: GroupKey, **facts: Any) -> None:
        """The group is taken, or given up. As for an unknown key: see `move`."""
