"""Temporal Clue: deduction puzzles with their generator, solver and graders."""

from torchtune_ext.tasks.temporal_clue.task import TemporalClue

__all__ = ["TemporalClue"]
