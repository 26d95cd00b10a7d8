"""Layers and small policies in FP8, for comparisons with references."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from helpers import unpacked_reference
from helpers.learners import single_process_learner
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy import from_config, scratch
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8Config
from torchtune_ext.policy.hf_model import HFModel

CPU, F32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
IN, OUT = 256, 384  # features of the one layer
GROUPS = [(9, [50, 70, 3]), (30, [20, 41])]
FP8_BLOCKS = Fp8Config()


def make_layer(bias=False, dtype=F32, **options):
    torch.manual_seed(0)
    linear = Fp8BlockLinear(IN, OUT, bias=bias, dtype=dtype)
    linear.fp8 = Fp8Config(**options)
    return linear


def activations(*shape, seed=1):
    """Return random activations; every hundredth number is ten times larger."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 10, 1)
    return torch.from_numpy(x.astype(np.float32))


def run(linear, x, dy):
    x = x.clone().requires_grad_()
    linear.zero_grad()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


def write_model_dir(folder, **changes):
    """Write a model directory: heads of 64, keys and values of 128 features."""
    text = ["Write about something. Go on. The quick brown fox jumps over the lazy dog.\n"] * 8
    sizes = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384,
                 max_position_embeddings=256, vocab_size=400)  # fmt: skip
    scratch.write_model(
        folder, scratch.make_tokenizer(text, ["x"], [], 400), scratch.ModelShape(**sizes | changes), seed=3
    )
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(4)
    for weight in weights.values():
        if weight.dim() > 1:  # as transformers draws them (initializer_range)
            weight.normal_(std=0.02, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return HFModel(folder)


def build_policy_from(source, config=FP8_BLOCKS, dtype=F32, **options):
    return build_policy(partial(from_config, str(source.path)), source, CPU, dtype, fp8=config, **options)


def make_rows(length=256):
    return pack(unpacked_reference.make_groups(np.random.default_rng(0), GROUPS), length)[0]


def gradients(policy, rows, factor=1.0):
    def loss(tokens):
        values_L, _ = PolicyLoss(importance="tis")(tokens)
        return factor * values_L, {}

    policy.model.zero_grad()
    scored = single_process_learner(policy, loss).forward_backward(rows)[0]
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in policy.model.named_parameters()}
    return grads, scored


def cosine(one, other):
    a, b = (torch.cat([grads[n].flatten() for n in one]).double() for grads in (one, other))
    return (a @ b / a.norm() / b.norm()).item()


@contextmanager
def saved_tensors():
    """Inside the block, record {storage address: (bytes, dtype)} of all tensors that autograd saves."""
    storages = {}

    def pack_hook(tensor):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = (storage.nbytes(), tensor.dtype, storage)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
        yield storages
