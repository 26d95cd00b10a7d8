"""The optimizer of the chaos runs: torch's AdamW, which records each update in the journal of `chaos_task`.

It is in its own file because it imports torch, which a grading process should not import.
"""

import torch
from chaos_task import note


class AdamW(torch.optim.AdamW):
    def step(self, closure=None):
        result = super().step(closure)
        # torch's checkpoint loading makes a step of size 0, and the checks of the settings steps on one or two tensors.
        tensors = sum(len(group["params"]) for group in self.param_groups)
        if any(group["lr"] for group in self.param_groups) and tensors > 10:
            note("update")
        return result
