"""A task whose import records what each rank does on its device, between the sleeps and loads of `RestingBackend`.

Runs import a copy of this file from their workspace. Their output_dir is `colocated`.
"""

import os
import time
from pathlib import Path

import torch
from letters import Letters

from torchtune_ext.training.learner import Learner

__all__ = ["Letters"]

TRANSITIONS = Path("colocated", "transitions.txt")
RANK = os.environ.get("RANK", "0")
LATE_S = 0.5  # rank 1 is late, so that rank 0 must wait for it


def record_calls(owner, name, event):
    """Record an event before each call of a function."""
    function = getattr(owner, name)

    def call(*args, **kwargs):
        time.sleep(LATE_S * int(RANK))
        with TRANSITIONS.open("a") as file:
            file.write(f"rank {RANK} {event}\n")
        return function(*args, **kwargs)

    setattr(owner, name, call)


record_calls(torch.nn.Module, "to_empty", "allocates its weights")
record_calls(torch.cuda, "empty_cache", "frees memory")
record_calls(Learner, "forward_backward", "trains")
