"""Grades texts in processes that can be killed."""

from torchtune_ext.grading.calls import Outcome, Ungraded
from torchtune_ext.grading.grader import Grader, GraderConfig, log_failures, results
from torchtune_ext.grading.rehearsal import open_graders, rehearse

__all__ = ["Grader", "GraderConfig", "Outcome", "Ungraded", "log_failures", "open_graders", "rehearse", "results"]
