"""What a worker of vLLM loads in runs of `gate.py`: a part of it is not what was sent, as the file GATE_FAULT says."""

import os
from pathlib import Path

import torch

from torchtune_ext.sampling import worker

honest, last = worker.iter_views, {}


def views(memory, manifest):
    fault = Path(os.environ["GATE_FAULT"]).read_text()
    for name, tensor in honest(memory, manifest):
        old, last[name] = last.get(name), tensor.clone()
        one = ".1.self_attn.v_proj" in name and name.endswith(("lora_B.weight", "v_proj.weight"))
        if one and fault == "one tensor random":
            # It has the size of the right one, so that only what it computes is wrong.
            values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * tensor.float().std()
            yield name, values.to(tensor.dtype)
        elif one and fault == "one tensor lost":
            yield name, torch.zeros_like(tensor)
        elif (one and fault == "one tensor old") or fault.startswith("all tensors old"):
            yield name, old
        else:
            yield name, tensor


worker.iter_views = views


class Loader(worker.WeightLoader):
    pass
