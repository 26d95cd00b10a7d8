"""A vLLM engine on a CPU, for runs with `engine.sleep`. vLLM frees memory on GPUs only: here level 2 overwrites the weights.

Runs import a copy of this file from their workspace.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from torchtune_ext.sampling.vllm_backend import ProcessBackend
from torchtune_ext.sampling.weight_buffer import WeightBuffer


class RestingBackend(ProcessBackend):
    """Records each sleep and each load in `transitions.txt` of the run folder."""

    def __init__(self, model_dir, *args):
        super().__init__(model_dir, *args)
        self.zeros = WeightBuffer()
        tensors = load_file(Path(model_dir) / "model.safetensors")
        self.zeros.write((name, torch.zeros_like(tensor)) for name, tensor in tensors.items())

    async def load(self, buffers, version):
        kinds = ["model" if buffer.adapter is None else "adapter" for buffer in buffers]
        self.record(f"load {version} of {' and '.join(kinds) or 'nothing'}, sleep level {self.sleep_level}")
        return await super().load(buffers, version)

    async def sleep(self, level):
        assert not self.requests, "the engine sleeps while it samples"
        await super().sleep(level)
        self.record(f"sleep at level {level}")
        if level == 2:
            await self.init_transfer([self.zeros])
            await self.load_buffer(self.zeros, 0)

    def record(self, event):
        with self.log.with_name("transitions.txt").open("a") as file:
            file.write(f"{event}\n")
