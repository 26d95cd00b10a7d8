"""The optimizer of the chaos runs: torch's AdamW, which notes each update in the journal of `chaos_task`.

In a file of its own because it imports torch, which a grading process should not.
"""

import torch
from chaos_task import note


class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        if any(group["lr"] for group in self.param_groups):  # torch's checkpoints make a step of size 0 when they load
            note("update")
        return result
