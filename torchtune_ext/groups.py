"""The records between sampling and packing: one prompt and what became of each of its completions."""

from dataclasses import dataclass

import numpy as np

from torchtune_ext.grading import Outcome
from torchtune_ext.sampling.records import Completion
from torchtune_ext.tasks.task import Problem, Score


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt with what became of it."""

    completion: Completion  # as it was sampled, or, of a supervised sample, as it should have been
    text: str = ""  # its tokens decoded, behind a "<think>" that the prompt opened; for graders and people
    outcome: Outcome | None = None  # what the grader said, or why it could not; None: nobody was asked
    advantage: float = 0.0  # set by `with_advantages`
    trained: bool = False  # False: kept for the record, not packed

    @property
    def score(self) -> Score | None:
        """None where the sample has no reward: it was not graded, or could not be."""
        return None if self.outcome is None else self.outcome.score


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and all its completions."""

    problem: Problem
    prompt_tokens: np.ndarray  # [P] int32
    samples: tuple[Sample, ...]  # G of them

    @property
    def has_signal(self) -> bool:
        return any(sample.advantage for sample in self.samples)

    @property
    def completions(self) -> int:
        """Samples with a reward, or trained without one (supervised)."""
        return sum(sample.trained or sample.score is not None for sample in self.samples)
