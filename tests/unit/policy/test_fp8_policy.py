"""A policy in FP8: gradients, log-probs, saved activations; compiled, with adapters, with torchao."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from helpers.fp8_models import (
    BF16,
    CPU,
    F32,
    IN,
    activations,
    build_policy_from,
    cosine,
    gradients,
    make_layer,
    make_rows,
    saved_tensors,
    write_model_dir,
)
from torchtune_ext.kernels.fp8_quantize import (
    BLOCK_SIZE,
    FP8_DTYPE,
)
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_policy
from torchtune_ext.policy.fp8 import linear as fp8_linear
from torchtune_ext.policy.fp8.linear import Fp8BlockLinear, Fp8Config
from torchtune_ext.policy.fp8.plan import fp8_hf_tensors
from torchtune_ext.policy.hf_model import named_hf_tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("fp8") / "model")


def test_fp8_policy_gradient_is_scale_independent(source):
    rows = make_rows()
    full, _ = gradients(build_policy_from(source, None), rows)
    policy = build_policy_from(source)
    grads, _ = gradients(policy, rows)
    grads = {name: grad.clone() for name, grad in grads.items()}
    assert cosine(full, grads) > 0.99
    converted = {n for n, m in policy.model.named_modules() if isinstance(m, Fp8BlockLinear)}
    assert len(converted) == 14 and all(
        cosine({n: full[n]}, {n: grads[n]}) > 0.97 for n in (f"{m}.weight" for m in converted)
    )
    # a power of two scales every product and every scale exactly, so an active floor of amax would show
    small, _ = gradients(policy, rows, 2.0**-5)
    assert all(torch.equal(small[name], 2.0**-5 * grad) for name, grad in grads.items())
    # a floor of 1e-4 (DeepGEMM's) would erase a gradient that is smaller by 1e-5
    tiny = {name: grad.clone() for name, grad in gradients(policy, rows, 1e-5)[0].items()}
    assert cosine(full, tiny) > 0.99 and cosine(grads, tiny) > 0.999


def test_checkpointing_changes_no_bit(source):
    rows = make_rows()
    plain, scored = gradients(build_policy_from(source), rows)
    checkpointed, again = gradients(build_policy_from(source, activation_checkpointing=True), rows)
    assert torch.equal(scored[0].logprobs_L, again[0].logprobs_L)
    assert plain.keys() == checkpointed.keys() and all(torch.equal(plain[n], checkpointed[n]) for n in plain)


def test_fp8_policy_saves_expected_activation_bytes(source):
    """Per token, the inputs of qkv, output projection, gate and up, and down: 3 D + F numbers, each once.

    Attention also saves its output, the second of them.
    """
    tokens, numbers = 200, 3 * 256 + 384
    x, kept = torch.randn(1, tokens, 256), {}
    for name, config in {
        "fp8": Fp8Config(),
        "full": Fp8Config(save_activations="full"),
        "none": None,
    }.items():
        block = build_policy_from(source, config).model.layers[0]
        block.attn._attention_call = lambda q, k, v, mask, dropout_p, is_causal: F.scaled_dot_product_attention(q, k, v)
        with saved_tensors() as storages:
            block(x)
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
        kept[name] = {key: value for key, value in storages.items() if key not in weights}
    total = {name: sum(nbytes for nbytes, _, _ in storages.values()) for name, storages in kept.items()}
    in_fp8 = sum(nbytes for nbytes, dtype, _ in kept["fp8"].values() if dtype == FP8_DTYPE)
    padded = 256  # 200 tokens in blocks of 128
    assert in_fp8 == padded * numbers and not any(dtype == FP8_DTYPE for _, dtype, _ in kept["full"].values())
    scales = padded // BLOCK_SIZE * numbers * 4
    assert total["full"] - (total["fp8"] - in_fp8 - scales) == tokens * (numbers - 256) * 4  # float32 here
    assert total["none"] == total["full"]


def test_fp8_policy_shared_activation_is_quantized_once(source, monkeypatch):
    calls, quantize = [], fp8_linear.quantize_columns
    monkeypatch.setattr(fp8_linear, "quantize_columns", lambda *a: (calls.append(a), quantize(*a))[1])
    policy = build_policy_from(source)
    scores = policy(make_rows()[0])
    assert len(calls) == 2 * 4
    scores.logprobs_L.sum().backward()
    assert len(calls) == 2 * (4 + 7)  # each layer has a separate output gradient
    assert fp8_linear._last_quantized[2] is None, "forms outlive their activation"
    for block in policy.model.layers:
        block.compile(backend="aot_eager")
    calls.clear()
    policy(make_rows()[0]).logprobs_L.sum().backward()
    assert len(calls) == 2 * (4 + 7), "equal calls in a graph are not one"
    linear, x = make_layer(), activations(5, IN)
    before = linear(x)
    x.mul_(2)  # a power of two
    assert torch.equal(linear(x), 2 * before)


def test_compiled_layers_share_their_code(tmp_path):
    torch._dynamo.reset()
    source = write_model_dir(tmp_path / "deep", num_hidden_layers=9)
    policy, rows = build_policy_from(source), make_rows()  # nine: dynamo compiles a piece of code eight times at most
    plain, scored = gradients(policy, rows)
    plain = {name: grad.clone() for name, grad in plain.items()}
    for block in policy.model.layers:
        # A backend that decomposes gradients of norms rounds them differently in the last bit; this moves a few FP8 codes by a
        # whole step, which moves more of them in the next layer: nine layers of that are the noise of FP8 itself, no bound.
        block.compile(backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        compiled, again = gradients(policy, rows)
    assert torch.equal(scored[0].logprobs_L, again[0].logprobs_L)
    assert all(torch.equal(plain[n], compiled[n.replace("_orig_mod.", "")]) for n in plain)


def test_adapters_over_a_base_in_fp8(source):
    adapter = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4}
    make = partial(from_config, str(source.path), **adapter)
    policy, rows = build_policy(make, source, CPU, F32, fp8=Fp8Config()), make_rows()
    plain = build_policy_from(source)
    assert policy.fp8_plan.fp8_layer_names == plain.fp8_plan.fp8_layer_names
    assert {gemm for gemm, _, _ in policy.fp8_plan.choices} == {"fprop", "dgrad"}
    with torch.no_grad():
        before = plain(rows[0]).logprobs_L
        assert torch.equal(policy(rows[0]).logprobs_L, before)  # B is zero
        for name in sorted(lora.adapter_names(policy.model)):
            policy.model.get_parameter(name).add_(0.05 * torch.randn(policy.model.get_parameter(name).shape))
        with lora.AdapterDisabledReference(policy.model).activate():
            assert torch.equal(policy(rows[0]).logprobs_L, before)
    with saved_tensors() as storages:
        scores = policy(rows[0])
    assert not any(dtype == FP8_DTYPE for _, dtype, _ in storages.values())  # no WGrad of an adapter's base weight
    scores.logprobs_L.sum().backward()
    exact = build_policy(make, source, CPU, F32)
    exact.model.load_state_dict(policy.model.state_dict())
    exact(rows[0]).logprobs_L.sum().backward()
    one, other = ({n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (exact.model, policy.model))
    assert one.keys() == lora.adapter_names(policy.model) and cosine(one, other) > 0.99
    base = dict(fp8_hf_tensors(lora.base_hf_tensors(policy.model, source, F32), policy.fp8_plan, BF16))
    full = dict(fp8_hf_tensors(named_hf_tensors(plain.model, source, F32), plain.fp8_plan, BF16))
    assert base.keys() == full.keys() and all(torch.equal(base[n].float(), full[n].float()) for n in full)
