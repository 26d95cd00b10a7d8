"""Grades texts in processes that can be killed."""

from torchtune_ext.grading.grader import Grader, GraderConfig, Outcome, log_failures, results

__all__ = ["Grader", "GraderConfig", "Outcome", "log_failures", "results"]
