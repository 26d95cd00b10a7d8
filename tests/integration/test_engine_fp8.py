"""Block-FP8 weights in the real vLLM: the trainer's very bytes after every publication, and nothing else is taken."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from contextlib import contextmanager  # noqa: E402
from functools import partial  # noqa: E402

import numpy as np  # noqa: E402

from helpers import flights  # noqa: E402
from torchtune_ext.pipeline.groups import Group, Sample  # noqa: E402
from torchtune_ext.pipeline.packing import pack  # noqa: E402
from torchtune_ext.policy import from_config, scratch  # noqa: E402
from torchtune_ext.policy.builder import build_policy  # noqa: E402
from torchtune_ext.policy.fp8.plan import Fp8Config, fp8_hf_tensors  # noqa: E402
from torchtune_ext.policy.hf_model import HFModel, named_hf_tensors  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402
from torchtune_ext.tasks.task import Problem  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PROMPTS = [[5, 17, 200, 31, 8], [1, 2, 3]]
SAMPLING = SamplingConfig(max_tokens=24, seed=2)


@contextmanager
def trainer_and_engine(folder, **changes):
    """A trainer in FP8 and an engine that waits for its weights."""
    text = ["The quick brown fox jumps over the lazy dog.\n"] * 20
    sizes = dict(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
    )
    shape = scratch.ModelShape(max_position_embeddings=256, vocab_size=400, **sizes | changes)
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
        dtype="bfloat16",
        max_model_len=256,
        kv_cache_bytes=16 << 20,
        quantization=policy.fp8_plan.quantization_config(),
        max_failures=1,
    )
    with Engine(str(folder / "model"), config, str(folder)) as engine:
        engine.start()
        engine.wait_ready(240)
        yield policy, source, engine


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with trainer_and_engine(tmp_path_factory.mktemp("fp8")) as both:
        yield both


@pytest.mark.rest
def test_a_width_without_whole_tiles(tmp_path):
    """Of a width of 320 only down_proj fits, whose last tiles have 64 rows; trainer and engine say the same of its tokens."""
    with trainer_and_engine(tmp_path, hidden_size=320, num_attention_heads=5, num_key_value_heads=5) as (
        policy,
        source,
        engine,
    ):
        tensors = published(policy, source)
        assert {name.rsplit(".", 2)[1] for name in tensors if name.endswith("_scale_inv")} == {"down_proj"}
        assert tensors["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (3, 3)
        engine.publish(tensors.items(), 0)
        assert engine.checksums() == [{name: checksum(tensor) for name, tensor in tensors.items()}]
        exact = build_policy(partial(from_config, str(source.path)), source, torch.device("cpu"), torch.float32)
        pairs = [(p, c) for p, group in zip(PROMPTS, engine.sample(PROMPTS, 4, SAMPLING), strict=True) for c in group]
        logprobs = [(said_by(policy, *pair), said_by(exact, *pair), pair[1].logprobs) for pair in pairs]
        ours, truth, theirs = (np.concatenate(part) for part in zip(*logprobs, strict=True))
        assert 0 < np.abs(ours - theirs).mean() < 2 * np.abs(ours - truth).mean()  # see below


def published(policy, source) -> dict:
    whole = named_hf_tensors(policy.model, source, torch.bfloat16)
    return {name: tensor.clone() for name, tensor in fp8_hf_tensors(whole, policy.fp8_plan, torch.bfloat16)}


def joined(tensors: dict) -> set[str]:
    """The names of the engine's parameters: vLLM joins some layers."""
    names = set()
    for name in tensors:
        head, layer, kind = name.rsplit(".", 2)
        names.add(f"{head}.{next((whole for whole, parts in FUSED.items() if layer in parts), layer)}.{kind}")
    return names


def test_fp8_published_bytes_equal_trainer_and_restore_exactly(trained):
    policy, source, engine = trained
    first = published(policy, source)
    assert sum(t.dtype == torch.float8_e4m3fn for t in first.values()) == 14  # seven linear layers in two blocks
    assert sum(name.endswith("weight_scale_inv") for name in first) == 14
    with torch.no_grad():
        for i, param in enumerate(policy.model.parameters()):
            param.mul_(1.0 + 0.03 * (i % 5)).add_(1e-3)
    second = published(policy, source)
    samples = []
    for tensors in (first, second, first):
        engine.publish(tensors.items(), engine.version + 1)
        assert engine.checksums() == [{name: checksum(tensor) for name, tensor in tensors.items()}]
        samples.append([c.tokens.tolist() for group in engine.sample(PROMPTS, 2, SAMPLING) for c in group])
    assert samples[0] == samples[2] != samples[1]


def said_by(policy, prompt, completion) -> np.ndarray:
    """Log-probs [R] of a completion, float32."""
    group = Group(Problem("p", (), None), np.asarray(prompt, np.int32), (Sample(completion, in_loss=True),))
    (row,) = pack([group], 256)[0]
    with torch.no_grad():
        return policy(row).logprobs_L.numpy()


def test_fp8_in_flight_tokens_label_their_version(trained):
    """Over three publications each token is of the policy that labels it, as far as FP8 can tell.

    How far that is follows from the trainer's own rounding: let e be the mean distance of its log-probs in FP8 from those of the
    same masters in float32. The engine rounds the same numbers to the same blocks, only in another order of sums, and is as far
    from float32. So the two are 2 e apart at most.
    """
    policy, source, engine = trained
    exact = build_policy(partial(from_config, str(source.path)), source, torch.device("cpu"), torch.float32)
    first, generator = engine.version + 1, torch.Generator().manual_seed(5)
    begin = [param.detach().clone() for param in exact.trainable_parameters()]
    masters = {
        version: [p + 0.5 * p.std() * torch.randn(p.shape, generator=generator) for p in begin]
        for version in range(first, first + 4)
    }

    def put(version: int) -> None:
        policy.model.reshard()  # a forward without a backward leaves gathered copies in the place of some masters
        with torch.no_grad():
            for ours, theirs, value in zip(
                policy.trainable_parameters(), exact.trainable_parameters(), masters[version], strict=True
            ):
                ours.to_local().copy_(value)
                theirs.copy_(value)

    sent = {version: put(version) or published(policy, source) for version in masters}
    engine.publish(sent[first].items(), first)
    publish = [partial(engine.publish, sent[version].items(), version) for version in list(masters)[1:]]
    groups = flights.flown(engine, PROMPTS, 4, SamplingConfig(max_tokens=240, seed=8), publish)

    pairs = [(prompt, c) for prompt, group in zip(PROMPTS, groups, strict=True) for c in group]
    logprobs, rounding = {}, {}
    for version in masters:
        put(version)
        logprobs[version] = [said_by(policy, prompt, c) for prompt, c in pairs]
        e = [np.abs(said_by(exact, *pair) - ours) for pair, ours in zip(pairs, logprobs[version], strict=True)]
        rounding[version] = np.concatenate(e).mean()
    spans = {version: [] for version in masters}
    for i, (_, c) in enumerate(pairs):
        apart = flights.distances(c, lambda v, i=i: logprobs[v][i], other=lambda v: v - 1 if v > first else v + 1)
        assert list(apart) == list(masters)
        for version, both in apart.items():
            spans[version].append(both)
    for version, both in spans.items():
        own, other = (np.concatenate(part).mean() for part in zip(*both, strict=True))
        assert own < 2 * rounding[version] < other


CHANGES = {
    "is bfloat16, but the engine holds it in float8_e4m3fn": lambda name, t: (
        name,
        t.bfloat16() if "1.mlp.down" in name else t,
    ),
    "comes without .*k_proj.weight_scale_inv in float32": lambda name, t: (
        name.replace("0.self_attn.k_proj.weight_s", "x"),
        t,
    ),
    "is float8_e4m3fn, but the engine holds it in high": lambda name, t: (
        name,
        t.to(torch.float8_e4m3fn) if "embed" in name else t,
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_check_quantized_tensor_changes_raise_error(trained, message):
    from torchtune_ext.sampling.worker import check_quantized

    policy, source, _ = trained
    tensors = published(policy, source)
    held = dict.fromkeys(joined(tensors))

    def check(tensors: dict) -> None:
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors.values()]
        check_quantized(list(tensors), dtypes, held, {whole: list(parts) for whole, parts in FUSED.items()})

    check(tensors)
    with pytest.raises(ValueError, match=message):
        check(dict(CHANGES[message](name, t) for name, t in tensors.items()))


def test_bfloat16_weights_end_the_run(trained):
    """The last test of this engine, which does not come back."""
    policy, source, engine = trained
    whole = dict(named_hf_tensors(policy.model, source, torch.bfloat16))
    with pytest.raises(
        EngineFailed, match="but the engine holds it in float8_e4m3fn: trainer and engine quantize different layers"
    ):
        engine.publish(whole.items(), engine.version + 1)
