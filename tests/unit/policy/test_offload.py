"""Frozen weights in main memory: same bits, freed on the device, readable, and no forward."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torchao.dtypes.nf4tensor import NF4Tensor

from helpers.adapters import ATTENTION, perturb_adapters
from helpers.fp8_models import CPU, make_rows, write_model_dir
from helpers.learners import single_process_learner
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import _mesh, build_policy
from torchtune_ext.policy.offload import FrozenOffload

KINDS = {"lora": {}, "dora": {"use_dora": True}, "qlora": {"quantize_base": True}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("model"))


def make_policy(source, **options):
    arguments = {"lora_attn_modules": ATTENTION, "apply_lora_to_mlp": True, "lora_rank": 4, **options}
    policy = build_policy(partial(from_config, str(source.path), **arguments), source, CPU, torch.bfloat16)
    perturb_adapters(policy.model)
    return policy


def storages(model, trained):
    """Return the storages of trained or frozen parameters; an NF4 weight has several."""
    params = [param for param in model.parameters() if param.requires_grad == trained]
    inner = [
        [getattr(p, name) for name in p.__tensor_flatten__()[0]] if isinstance(p, NF4Tensor) else [p] for p in params
    ]
    return [tensor.untyped_storage() for tensors in inner for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_offload_frees_device_and_restores_bits(source, kind):
    policy, row = make_policy(source, **KINDS[kind]), make_rows()[0]
    with torch.no_grad():
        before = policy(row).logprobs_L
    merged = dict(lora.merged_hf_tensors(policy.model, source, torch.float32))
    on_device = [StorageWeakRef(storage) for storage in storages(policy.model, trained=False)]
    kept = [storage.data_ptr() for storage in storages(policy.model, trained=True)]
    offload = FrozenOffload(policy.model)
    host = []
    for _ in range(2):
        offload.to_host()
        offload.to_host()  # no effect
        assert offload.is_on_host and all(storage.expired() for storage in on_device)
        assert kept == [storage.data_ptr() for storage in storages(policy.model, trained=True)]
        host.append([storage.data_ptr() for storage in storages(policy.model, trained=False)])
        # The weights can be saved and merged meanwhile.
        now = dict(lora.merged_hf_tensors(policy.model, source, torch.float32))
        assert all(torch.equal(now[name], tensor) for name, tensor in merged.items())
        with pytest.raises(RuntimeError, match=r"main memory .*publisher.onload\(\) before the update"):
            policy(row)
        offload.to_device()
        offload.to_device()
        on_device = [StorageWeakRef(storage) for storage in storages(policy.model, trained=False)]
        with torch.no_grad():
            assert not offload.is_on_host and torch.equal(policy(row).logprobs_L, before)
    assert host[0] == host[1], "the frozen weights were copied to main memory again"
    assert not any(storage.data_ptr() in host[0] for storage in storages(policy.model, trained=False))
    policy(row).logprobs_L.sum().backward()
    assert all(param.grad is not None for param in policy.trainable_parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_offload_between_updates_trains_identically(source, kind):
    def train(offloads):
        policy, rows = make_policy(source, **KINDS[kind]), make_rows()
        offload = FrozenOffload(policy.model) if offloads else None
        learner = single_process_learner(
            policy, PolicyLoss(kl_coef=0.1), optimizer=torch.optim.AdamW(policy.trainable_parameters(), lr=1e-3)
        )
        metrics = []
        for _ in range(3):
            if offload:
                offload.to_host()
                offload.to_device()
            (reference,) = learner.reference_logprobs([rows])
            _, line = learner.forward_backward(rows, reference=reference, version=0)
            metrics.append(learner.step(line, advice=str))
        return metrics, [param.detach() for param in policy.trainable_parameters()]

    (metrics, weights), (expected_metrics, expected) = train(True), train(False)
    assert metrics == expected_metrics and metrics[2]["loss/kl_ref"] != metrics[0]["loss/kl_ref"]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_offload_of_sharded_weights_is_refused(source):
    model = make_policy(source).model
    mesh = _mesh(CPU, 1, 1)
    norm = model.norm
    norm.scale = torch.nn.Parameter(distribute_tensor(norm.scale.detach(), mesh), requires_grad=False)
    with pytest.raises(ValueError, match="the frozen weights are sharded. Fix: offload on one rank only"):
        FrozenOffload(model)
