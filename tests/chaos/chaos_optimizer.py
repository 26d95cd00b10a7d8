"""The optimizer of the chaos runs: torch's AdamW, which records each update in the journal of `chaos_task`.

It is in its own file because it imports torch, which a grading process should not import.
"""

import torch
from chaos_task import note


class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        # torch's checkpoint loading makes a step of size 0, and the check of the settings a step on a few values.
        values = sum(param.numel() for group in self.param_groups for param in group["params"])
        if any(group["lr"] for group in self.param_groups) and values > 100:
            note("update")
        return result
