"""A learner of one process."""

import torch

from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner


def alone(policy, loss, device="cpu", **options):
    return Learner(policy, loss, Ranks(0, 1, torch.device(device)), **options)
