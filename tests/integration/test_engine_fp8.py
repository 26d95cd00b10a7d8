"""Block-FP8 weights in the real vLLM: the trainer's very bytes after every publication, and nothing else is taken."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from functools import partial  # noqa: E402

from torchtune_ext.policy import from_config, scratch  # noqa: E402
from torchtune_ext.policy.builder import build_policy  # noqa: E402
from torchtune_ext.policy.fp8.plan import Fp8Config, fp8_hf_tensors  # noqa: E402
from torchtune_ext.policy.hf_model import HFModel, named_hf_tensors  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PROMPTS = [[5, 17, 200, 31, 8], [1, 2, 3]]
SAMPLING = SamplingConfig(max_tokens=24, seed=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer in FP8 and an engine that waits for its weights."""
    folder = tmp_path_factory.mktemp("fp8")
    text = ["The quick brown fox jumps over the lazy dog.\n"] * 20
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384}
    shape = scratch.Shape(num_key_value_heads=2, max_position_embeddings=256, vocab_size=400, **sizes)
    scratch.write_model(folder / "model", scratch.make_tokenizer(text, ["x"], [], 400), shape, seed=3)
    source = HFModel(folder / "model")
    policy = build_policy(
        partial(from_config, str(folder / "model")),
        source,
        torch.device("cpu"),
        torch.bfloat16,
        fp8=Fp8Config(),
    )
    config = EngineConfig(
        dtype="bfloat16", max_model_len=256, kv_cache_bytes=16 << 20, quantization=policy.fp8.quantization_config()
    )
    with Engine(str(folder / "model"), config, str(folder)) as engine:
        engine.start()
        engine.wait_ready(120)
        yield policy, source, engine


def published(policy, source) -> dict:
    whole = named_hf_tensors(policy.model, source, torch.bfloat16)
    return {name: tensor.clone() for name, tensor in fp8_hf_tensors(whole, policy.fp8, torch.bfloat16)}


def joined(tensors: dict) -> set[str]:
    """The names of the engine's parameters: vLLM joins some layers."""
    found = set()
    for name in tensors:
        head, layer, kind = name.rsplit(".", 2)
        found.add(f"{head}.{next((whole for whole, parts in FUSED.items() if layer in parts), layer)}.{kind}")
    return found


def test_every_byte_and_scale_is_the_trainers_and_a_b_a_restores(trained):
    policy, source, engine = trained
    first = published(policy, source)
    assert sum(t.dtype == torch.float8_e4m3fn for t in first.values()) == 14  # seven linear layers in two blocks
    assert sum(name.endswith("weight_scale_inv") for name in first) == 14
    with torch.no_grad():
        for i, param in enumerate(policy.model.parameters()):
            param.mul_(1.0 + 0.03 * (i % 5)).add_(1e-3)
    second = published(policy, source)
    samples = []
    for version, tensors in enumerate((first, second, first)):
        engine.publish(tensors.items(), version)
        assert engine.checksums() == [{name: checksum(tensor) for name, tensor in tensors.items()}]
        samples.append([c.tokens.tolist() for group in engine.sample(PROMPTS, 2, SAMPLING) for c in group])
    assert samples[0] == samples[2] != samples[1]


CHANGES = {
    "is bfloat16, but the engine holds it in float8_e4m3fn": lambda name, t: (
        name,
        t.bfloat16() if "1.mlp.down" in name else t,
    ),
    "comes without .*k_proj.weight_scale_inv in float32": lambda name, t: (
        name.replace("0.self_attn.k_proj.weight_s", "x"),
        t,
    ),
    "is float8_e4m3fn, but the engine holds it in a high": lambda name, t: (
        name,
        t.to(torch.float8_e4m3fn) if "embed" in name else t,
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_the_guard_knows_what_vllm_would_take_in_silence(trained, message):
    from torchtune_ext.sampling.worker import Manifest, check_quantized

    policy, source, _ = trained
    tensors = published(policy, source)
    held = dict.fromkeys(joined(tensors))

    def check(tensors: dict) -> None:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
        manifest = Manifest(names=list(tensors), dtypes=dtypes, shapes=[], offsets=[])
        check_quantized(manifest, held, {whole: list(parts) for whole, parts in FUSED.items()})

    check(tensors)
    with pytest.raises(ValueError, match=message):
        check(dict(CHANGES[message](name, t) for name, t in tensors.items()))


def test_bfloat16_weights_end_the_run(trained):
    """The last test of this engine: it asks three new ones, which refuse, too."""
    policy, source, engine = trained
    whole = dict(named_hf_tensors(policy.model, source, torch.bfloat16))
    with pytest.raises(EngineFailed, match="but the engine holds it in float8_e4m3fn: the lists of layers differ"):
        engine.publish(whole.items(), engine.version + 1)
