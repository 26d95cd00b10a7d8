"""Temporal Clue: a task of deduction puzzles, with its generator, solver and graders."""

from torchtune_ext.tasks.temporal_clue.task import TemporalClue

__all__ = ["TemporalClue"]
