"""Grades texts in worker processes that can be killed."""

from torchtune_ext.grading.grader import Grader, GraderConfig, gather_results, log_failures
from torchtune_ext.grading.outcomes import Outcome, Ungraded
from torchtune_ext.grading.self_check import check_grading, find_answer_errors, open_graders

__all__ = [
    "Grader",
    "GraderConfig",
    "Outcome",
    "Ungraded",
    "check_grading",
    "find_answer_errors",
    "gather_results",
    "log_failures",
    "open_graders",
]  # fmt: skip
