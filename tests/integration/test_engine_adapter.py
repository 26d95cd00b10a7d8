"""Adapters in the real vLLM: applied, replaced in flight, found again by a new engine, and nothing grows."""

import gc
import os
from functools import partial

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import flights, tiny_model  # noqa: E402
from helpers.waiting import engine_pid  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANK = 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = EngineConfig(
    dtype="float32",
    max_model_len=1024,
    kv_cache_bytes=64 << 20,
    lora_rank=RANK,
    lora_targets=TARGETS,
    max_failures=2,
)
PEFT = {"r": RANK, "lora_alpha": 2.0 * RANK, "target_modules": list(TARGETS)}
PROMPTS, SAMPLING = tiny_model.prompts(3, 50), SamplingConfig(max_tokens=24, seed=2)


def adapter(seed: int) -> dict[str, torch.Tensor]:
    return tiny_model.adapter(RANK, TARGETS, seed)[0]


def merged(tensors: dict[str, torch.Tensor], seed: int = 0):
    """The reference: the model with the adapter added to its weights."""
    return tiny_model.merged(seed, tensors, PEFT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    with Engine(tiny_model.save(tiny_model.build(0), folder / "model"), CONFIG, str(folder)) as engine:
        engine.start()
        engine.wait_ready(240)
        yield engine


@pytest.fixture(scope="module", autouse=True)
def before_any_adapter(engine):
    """Completions of the engine as it started, whichever test comes first."""
    return engine.sample(PROMPTS, 2, SAMPLING)


def worst(model, prompts, groups):
    return max(
        np.abs(tiny_model.logprobs(model, prompt, c.tokens) - c.logprobs).max()
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def test_the_published_adapter_is_applied(engine, before_any_adapter):
    assert worst(tiny_model.build(0), PROMPTS, before_any_adapter) < 1e-4
    engine.publish(tiny_model.build(0).named_parameters(), engine.version + 1)
    for seed in (1, 2):  # the second replaces the first under the same name: no stale prefix cache may show
        tensors = adapter(seed)
        report = engine.publish(tensors.items(), engine.version + 1, PEFT)
        assert report.bytes == sum(t.nbytes for t in tensors.values())
        groups = engine.sample(PROMPTS, 2, SAMPLING)
        assert worst(merged(tensors), PROMPTS, groups) < 1e-4 < 1e-2 < worst(tiny_model.build(0), PROMPTS, groups)
        assert {int(v) for g in groups for c in g for v in c.versions} == {engine.version}


def test_an_adapter_comes_over_a_published_base(engine):
    prompts, tensors, restarts = tiny_model.prompts(2, 40), adapter(3), engine.stats().restarts
    engine.publish(tensors.items(), engine.version + 1, PEFT)
    engine.publish(tiny_model.build(1).named_parameters(), engine.version + 1)
    assert worst(merged(tensors, 1), prompts, engine.sample(prompts, 2, SAMPLING)) < 1e-4
    engine.publish(tiny_model.build(0).named_parameters(), engine.version + 1)
    assert worst(merged(tensors, 0), prompts, engine.sample(prompts, 2, SAMPLING)) < 1e-4
    assert engine.stats().restarts == restarts


@pytest.mark.rest
def test_adapters_published_in_flight_mark_every_token(engine):
    """Over three publications each token is of the adapter that labels it, exactly, and of no other."""
    engine.publish(tiny_model.build(0).named_parameters(), engine.version + 1)
    prompts, first = tiny_model.prompts(2, 20), engine.version + 1
    adapters = {version: adapter(version) for version in range(first, first + 4)}
    engine.publish(adapters[first].items(), first, PEFT)
    publish = [partial(engine.publish, adapters[v].items(), v, PEFT) for v in range(first + 1, first + 4)]
    groups = flights.flown(engine, prompts, 4, SamplingConfig(max_tokens=980, seed=8), publish)
    policies = {version: merged(tensors) for version, tensors in adapters.items()}
    for prompt, c in ((prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group):
        logprobs = {v: tiny_model.logprobs(model, prompt, c.tokens) for v, model in policies.items()}
        apart = flights.distances(c, logprobs.get, other=lambda v: v - 1 if v > first else v + 1)
        assert list(apart) == list(policies)
        assert all(own.max() < 1e-4 and other.mean() > 1e-2 for own, other in apart.values())


@pytest.mark.rest  # with stand-ins for engines: tests/unit/sampling/test_replica.py
def test_a_new_engine_finds_base_and_adapter(engine):
    prompts, tensors = tiny_model.prompts(2, 30), adapter(6)
    engine.publish(tiny_model.build(1).named_parameters(), engine.version + 1)
    engine.publish(tensors.items(), engine.version + 1, PEFT)
    restarts = engine.stats().restarts
    os.kill(engine_pid(engine), 9)
    groups = engine.sample(prompts, 2, SAMPLING)
    assert engine.stats().restarts == restarts + 1
    sent = {**dict(tiny_model.build(1).named_parameters()), **tensors}
    assert engine.checksums() == [{name: checksum(tensor) for name, tensor in sent.items()}]
    assert worst(merged(tensors, 1), prompts, groups) < 1e-4


def footprint(engine) -> tuple[int, int, int, int]:
    """Resident bytes and open files of the engine's process, open files of ours, files in the engine's folder."""
    gc.collect()
    core = psutil.Process(engine_pid(engine))
    files = sum(len(names) for _, _, names in os.walk(engine._reaper.folder))
    return core.memory_info().rss, core.num_fds(), psutil.Process().num_fds(), files


@pytest.mark.rest
def test_adapter_weight_syncs_leave_no_leftovers(engine):
    prompts = tiny_model.prompts(2, 20)
    engine.publish(tiny_model.build(1).named_parameters(), engine.version + 1)
    for i in range(200):
        engine.publish(adapter(100 + i).items(), engine.version + 1, PEFT)
        engine.sample(prompts, 1, SamplingConfig(max_tokens=2, seed=1))
        if i == 4:
            early = footprint(engine)
    late = footprint(engine)
    assert late[1:] == early[1:]
    # one adapter has 0.1 MB here: were each kept, 195 of them would be 20 MB on top of what the allocator fluctuates
    assert late[0] - early[0] < 10 << 20, f"the engine's process grew by {(late[0] - early[0]) / 2**20:.1f} MB"
    assert worst(merged(adapter(299), 1), prompts, engine.sample(prompts, 1, SAMPLING)) < 1e-4


@pytest.mark.rest
def test_adapters_that_do_not_fit_are_refused(engine, tmp_path):
    wrong = {name.replace("q_proj", "z_proj"): tensor for name, tensor in adapter(1).items()}
    with pytest.raises(EngineFailed, match="applies no adapter to .*z_proj"):
        engine.publish(wrong.items(), engine.version + 1, PEFT)
    other = Engine("nowhere", EngineConfig(), str(tmp_path))
    with pytest.raises(ValueError, match="started without engine.lora_rank"):
        other.publish(adapter(1).items(), 1, PEFT)
