"""Weight loader of a vLLM worker in runs of `gate.py`: it corrupts the weights that the file GATE_FAULT names."""

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
            # The wrong tensor has the right size, so that only its values are wrong.
            values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * tensor.float().std()
            yield name, values.to(tensor.dtype)
        elif one and fault == "one tensor zeroed":
            yield name, torch.zeros_like(tensor)
        elif (one and fault == "one tensor old") or fault.startswith("all tensors old"):
            yield name, old
        else:
            yield name, tensor


worker.iter_views = views


class Loader(worker.WeightLoader):
    pass
