"""Grades texts in processes that can be killed."""

from torchtune_ext.grading.calls import Outcome, Ungraded
from torchtune_ext.grading.grader import Grader, GraderConfig, log_failures, results
from torchtune_ext.grading.rehearsal import answer_faults, open_graders, rehearse

__all__ = [
    "Grader", "GraderConfig", "Outcome", "Ungraded", "answer_faults", "log_failures", "open_graders", "rehearse", "results",
]  # fmt: skip
