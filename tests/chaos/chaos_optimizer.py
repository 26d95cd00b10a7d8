"""The optimizer of the chaos runs: torch's AdamW, which notes each update in the journal of `chaos_task`.

In a file of its own because it imports torch, which a grading process should not.
"""

import torch
from chaos_task import note


class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        # torch's checkpoints make a step of size 0 when they load, and the check of the settings one on a few values.
        values = sum(param.numel() for group in self.param_groups for param in group["params"])
        if any(group["lr"] for group in self.param_groups) and values > 100:
            note("update")
        return result
