"""A single-process learner, and the prompts of a canary."""

import numpy as np
import torch

from torchtune_ext.pipeline.groups import Group
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner


def single_process_learner(policy, loss, device="cpu", **options):
    return Learner(policy, loss, Ranks(0, 1, torch.device(device)), **options)


def prompt_groups(prompts):
    """Return groups of these prompts (token ids) without samples."""
    return [Group(Problem(str(p), (), None), np.asarray(p, np.int32), ()) for p in prompts]
