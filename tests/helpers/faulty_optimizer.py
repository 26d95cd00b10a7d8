"""An optimizer that freezes the engine. Tests copy this file into a folder where runs start.

A fault from inside the run occurs at the exact moment. The optimizer is in its own file because it imports torch, which a
grading process should not import.
"""

import signal
from pathlib import Path

import psutil
import torch


class Freezing(torch.optim.AdamW):
    """Freezes the engine after some updates, just before the weight sync.

    Args: after: numbers of these updates, counted from 1. The engine's process id is appended to the file `frozen`.
    """

    def __init__(self, params, after=(), **options):
        super().__init__(params, **options)
        self.after, self.count = tuple(after), 0

    def step(self, closure=None):
        result = super().step(closure)
        self.count += 1
        if self.count in self.after:
            (engine,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "vllm-engine"]
            engine.send_signal(signal.SIGSTOP)
            with Path("frozen").open("a") as file:
                file.write(f"{engine.pid}\n")
        return result
