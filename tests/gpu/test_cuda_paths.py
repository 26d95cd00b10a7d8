"""The CUDA path of packed rows against the dense mask, and of the policy against the CPU."""

import numpy as np
import pytest
import torch

from helpers.records import make_sample
from torchtune_ext.kernels.packed_attention import TILE_SIZE, dense_mask, packed_attention, packed_mask
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import RowCostModel, pack
from torchtune_ext.policy import from_config
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.hf_model import HFModel
from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum, iter_views, map_memory, pin, unpin
from torchtune_ext.tasks.task import Problem
from torchtune_ext.training.distributed import Ranks
from torchtune_ext.training.learner import Learner

T = 1024


def row(seed=0, length=T):
    rng = np.random.default_rng(seed)
    groups = []
    for g in range(3):
        samples = tuple(
            make_sample(rng.integers(0, 200, n), rng.normal(-4, 1, n), advantage=float(rng.normal()), in_loss=True)
            for n in rng.integers(1, 60, 6)
        )
        groups.append(Group(Problem(f"p{g}", (), None), rng.integers(0, 200, 100).astype(np.int32), samples))
    return pack(groups, length, cost_model=RowCostModel(tile=length))[0][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [8 * TILE_SIZE, 9 * TILE_SIZE], ids=["whole", "padded to 12 tiles"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (70, None), (70, 2.0)])
def test_flex_attention_equals_the_dense_mask(dtype, T, head_dim, window, softcap):
    cuda = row(length=T).to(torch.device("cuda"))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, T, head_dim, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(1, 4, T, head_dim, device="cuda", dtype=dtype)
    dense = {window: dense_mask(cuda.ends_T, cuda.positions_T, window)[None]}
    options = {"window": window, "softcap": softcap}
    dense = packed_attention(q.double(), k.double(), v.double(), dense, 0.0, False, **options)
    fast = packed_attention(q, k, v, packed_mask(cuda.ends_T, cuda.positions_T, [window]), 0.0, True, **options)
    # one rounding of inputs to TF32 / of the result to bfloat16: 2^-10 and 2^-8 of values below 4
    bound = 4 * (2**-8 if dtype == torch.bfloat16 else 2**-9)
    assert (dense - fast).abs().max() < bound
    want = torch.autograd.grad(dense, (q, k, v), upstream.double())
    grads = torch.autograd.grad(fast, (q, k, v), upstream)
    for a, b in zip(want, grads, strict=True):
        assert (a.double() - b.double()).norm() / a.double().norm() < 4 * bound


def test_no_length_is_left_uncompiled():
    """25 lengths, padded to five, forward and backward. The 3 GiB of T x T scores that an uncompiled one holds would be seen."""
    T, H = 32 * TILE_SIZE, 48
    torch.cuda.reset_peak_memory_stats()
    for length in range(8 * TILE_SIZE, T + 1, TILE_SIZE):
        cuda = row(length=length).to(torch.device("cuda"))
        q, k, v = (
            torch.randn(1, H, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        packed_attention(q, k, v, packed_mask(cuda.ends_T, cuda.positions_T), 0.0, True).sum().backward()
    scores = H * T * T * 4
    assert torch.cuda.max_memory_allocated() < scores


def test_weights_pass_through_pinned_memory():
    """The first publication is written, the later ones are copied by the GPU; a larger one makes it pin again."""
    buffer = WeightBuffer()
    for size in (1000, 1000, 3000):
        named = [(name, torch.randn(size, size, device="cuda").bfloat16()) for name in "ab"]
        buffer.write(named)
        memory = pin(map_memory(buffer.address()["path"]))
        taken = dict(iter_views(memory, buffer.manifest))
        assert all(torch.equal(taken[name].cuda(), tensor) for name, tensor in named)
        for device in ("cpu", "cuda"):
            assert buffer.checksums == {name: checksum(tensor, torch.device(device)) for name, tensor in taken.items()}
        unpin(memory)
    buffer.close()


def learner_on(device, path, dtype, level="token"):
    source = HFModel(path)
    policy = build_policy(lambda: from_config(str(path)), source, torch.device(device), dtype)
    return Learner(policy, PolicyLoss(level=level), Ranks(0, 1, torch.device(device)))


@pytest.fixture(scope="module", params=[64, 128], ids=["heads of 64", "heads of 128"])
def model(request, tmp_path_factory):
    shape = ModelShape(
        hidden_size=2 * request.param,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=256,
        vocab_size=400,
    )
    path = tmp_path_factory.mktemp("model") / "m"
    write_model(path, make_tokenizer(["some text\n"] * 9, ["x"], [], 400), shape, seed=0)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradients_repeat_bit_for_bit(model, dtype, level):
    """The six completions of a prompt meet in its last token, where their gradients must be added in one order."""
    learner, gradients = learner_on("cuda", model, dtype, level), []
    for _ in range(4):
        for parameter in learner.policy.model.parameters():
            parameter.grad = None
        learner.forward_backward([row()])
        gradients.append([parameter.grad.clone() for parameter in learner.policy.model.parameters()])
    for again in gradients[1:]:
        assert all(map(torch.equal, gradients[0], again))


def test_policy_on_cuda_equals_cpu(model):
    values = {}
    for device in ("cpu", "cuda"):
        learner = learner_on(device, model, torch.float32)
        logprobs, metrics = learner.forward_backward([row()])
        grads = torch.cat([p.grad.flatten().cpu() for p in learner.policy.model.parameters()])
        values[device] = metrics["loss/total"], logprobs[0].logprobs_L.cpu(), grads
    assert values["cuda"][0] == pytest.approx(values["cpu"][0], rel=1e-3)
    assert (values["cuda"][1] - values["cpu"][1]).abs().max() < 1e-2
    assert (values["cuda"][2] - values["cpu"][2]).norm() / values["cpu"][2].norm() < 1e-2
