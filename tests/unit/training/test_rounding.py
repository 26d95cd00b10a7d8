"""The rounding mismatch of a correct engine.

Rounding of an update on both sides does not count; rounding on one side does.
"""

from functools import partial

import pytest
import torch

from helpers.fp8_models import BF16, CPU, F32, build_policy_from, make_rows, write_model_dir
from torchtune_ext.policy import from_config, lora
from torchtune_ext.policy.builder import build_on_meta, build_policy
from torchtune_ext.policy.streaming import streamed_logprobs
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.training.precision import Precision, PrecisionConfig
from torchtune_ext.training.trained_weights import AdapterConfig, FullWeights, measure_rounding, select_trained_weights

LORA = {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("rounding") / "model")


@pytest.fixture
def measured(source):
    """A function: dtypes of trainer and engine, settings -> (policy's model, rounding measurement)."""

    def make(trainer, engine, flow="bf16", publish="auto", **adapters):
        build = partial(from_config, str(source.path), **adapters)
        policy, meta = build_policy(build, source, CPU, F32), build_on_meta(build)
        trained = (
            select_trained_weights(meta, source, {}, AdapterConfig(publish=publish)) if adapters else FullWeights()
        )
        config = trained.configure_engine(EngineConfig(dtype=engine))
        precision = Precision(
            PrecisionConfig(flow=flow), meta, source, trainer, config, CPU, trained.spec, trained.publish_mode
        )
        scored = partial(streamed_logprobs, make_model=build, device=CPU, temperature=1.0)
        return policy.model, lambda: measure_rounding(trained, precision, policy.model, scored, make_rows())

    return make


@torch.no_grad()
def round_weights(model):
    for param in model.parameters():
        param.copy_(param.bfloat16().float())


@torch.no_grad()
def update_below_half_a_step(model):
    """Moves every weight by a fifth of a bfloat16 step, all weights of a row in one direction."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        step = torch.finfo(BF16).eps * 2.0 ** param.abs().clamp_min(1e-30).log2().floor()
        signs = torch.randint(0, 2, param.shape[:1] + (1,) * (param.dim() - 1), generator=generator) * 2 - 1
        param.add_(0.2 * step * signs)


def test_rounding_float32_on_both_sides_is_zero(measured):
    assert measured("float32", "float32")[1]() == 0.0


def test_rounding_update_missing_on_both_sides_not_counted(measured, source):
    model, measure = measured("bfloat16", "bfloat16")
    round_weights(model)
    before = measure()
    update_below_half_a_step(model)
    assert measure() == before > 0
    # An independent measurement: the policy in bfloat16, and the same values in float32.
    exact, coarse = build_policy_from(source, None, F32), build_policy_from(source, None, BF16)
    round_weights(exact.model)
    with torch.no_grad():
        logprobs = [torch.cat([policy(row).logprobs_L for row in make_rows()]) for policy in (exact, coarse)]
    assert before == pytest.approx((logprobs[0] - logprobs[1]).abs().mean().item(), rel=1e-4)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_rounding_update_missing_on_one_side_is_counted(measured, dtypes):
    model, measure = measured(*dtypes)
    round_weights(model)
    before = measure()
    assert before == pytest.approx(measured("bfloat16", "bfloat16")[1](), rel=0.2)
    update_below_half_a_step(model)
    assert measure() > 1.2 * before


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_rounding_separately_published_adapter_is_not_counted(measured, dtypes):
    """Merged bfloat16 weights would round the adapter, and the limit would be too loose for any test."""
    model, measure = measured(*dtypes, publish="adapter", **LORA)
    round_weights(model)
    without = measure()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith("lora_b.weight"):
                param.fill_(1e-3)
    assert measure() == pytest.approx(without, rel=0.1)


def test_rounding_excludes_dora_magnitude(measured, source):
    """New adapters change nothing, so the rounding mismatch is the same as without adapters."""
    _, without = measured("bfloat16", "bfloat16")
    model, measure = measured("bfloat16", "bfloat16", publish="merged", use_dora=True, **LORA)
    lora.init_adapters(model, seed=0)
    assert measure() == pytest.approx(without(), rel=0.1)


def test_fp8_rounds_more_in_whichever_flow(measured):
    sizes = [measured("bfloat16", "bfloat16", flow)[1]() for flow in ("bf16", "fp8_unified", "fp8_rollout")]
    assert 0 < 2 * sizes[0] < sizes[1] == sizes[2]
