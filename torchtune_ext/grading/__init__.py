"""Grades texts in worker processes that can be killed."""

from torchtune_ext.grading.grader import Grader, GraderConfig, gather_results, log_failures
from torchtune_ext.grading.outcomes import Outcome, Ungraded
from torchtune_ext.grading.self_check import answer_faults, check_grading, open_graders

__all__ = [
    "Grader", "GraderConfig", "Outcome", "Ungraded", "answer_faults", "check_grading", "gather_results", "log_failures",
    "open_graders",
]  # fmt: skip
