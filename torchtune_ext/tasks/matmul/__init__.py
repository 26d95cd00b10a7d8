"""Learning from measured speed: what a program does, programs to begin with, stages, rewards, the fastest ones, the prompts."""

from torchtune_ext.tasks.matmul.task import Matmul

__all__ = ["Matmul"]
