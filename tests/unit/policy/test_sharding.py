"""Parameters of a sharded model, gathered for the engine."""

import torch
from torch.distributed.tensor import DTensor

from helpers.fp8_models import BF16, F32, build_policy_from, write_model_dir
from torchtune_ext.policy.hf_model import named_hf_tensors


def test_shards_are_rounded_before_the_gather(tmp_path, monkeypatch):
    """The result is the same, from half the bytes."""
    source = write_model_dir(tmp_path / "model")
    model = build_policy_from(source, None, BF16).model
    gathered, full_tensor = [], DTensor.full_tensor
    monkeypatch.setattr(DTensor, "full_tensor", lambda tensor: gathered.append(tensor.dtype) or full_tensor(tensor))
    rounded = dict(named_hf_tensors(model, source, BF16))
    assert gathered == [BF16] * len(rounded)
    exact = dict(named_hf_tensors(model, source, F32))
    assert {tensor.dtype for tensor in exact.values()} == {F32}
    assert all(torch.equal(tensor, exact[name].to(BF16)) for name, tensor in rounded.items())
