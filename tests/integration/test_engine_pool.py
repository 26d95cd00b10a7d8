"""Several engines with the real vLLM and a tiny model on a CPU: the completions of one, nothing lost when one is killed, the same
weights in all of them, and a run that stops when one was forgotten."""

import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import tiny_model  # noqa: E402
from helpers.learners import prompt_groups, single_process_learner  # noqa: E402
from helpers.waiting import engine_pid, wait_until  # noqa: E402
from torchtune_ext.objective.loss import PolicyLoss  # noqa: E402
from torchtune_ext.policy import from_config  # noqa: E402
from torchtune_ext.policy.builder import build_on_meta, build_policy  # noqa: E402
from torchtune_ext.policy.hf_model import HFModel  # noqa: E402
from torchtune_ext.policy.streaming import streamed_logprobs  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.engine_args import on_cpu  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402
from torchtune_ext.training.mismatch import MismatchError, MismatchGate  # noqa: E402
from torchtune_ext.training.precision import Precision, PrecisionConfig  # noqa: E402
from torchtune_ext.training.publish import Publisher  # noqa: E402
from torchtune_ext.training.trained_weights import FullWeights  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not on_cpu(), reason="engine.count is for a CPU; on GPUs engine.devices names two"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores"),
]

CONFIG = dict(dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20)
SAMPLING = SamplingConfig(max_tokens=24, seed=5)
LONG = SamplingConfig(max_tokens=600, seed=3)


@pytest.fixture(scope="module")
def models():
    return tiny_model.build(0), tiny_model.build(1)


@pytest.fixture(scope="module")
def model_dir(models, tmp_path_factory):
    return tiny_model.save(models[0], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool(model_dir, tmp_path_factory):
    with Engine(model_dir, EngineConfig(count=2, **CONFIG), str(tmp_path_factory.mktemp("two"))) as engine:
        engine.start()
        engine.wait_ready(240)
        yield engine


def lanes(engine):
    return engine._pool.replicas


def pids(engine):
    return [engine_pid(engine, number) for number in range(len(lanes(engine)))]


def require_same(groups, expected):
    for group, other in zip(groups, expected, strict=True):
        for c, d in zip(group, other, strict=True):
            assert np.array_equal(c.tokens, d.tokens) and c.finish_reason == d.finish_reason
            assert np.abs(c.logprobs - d.logprobs).max() < 1e-5


def completed(engine):
    return np.array([lane.counts["completed"] for lane in lanes(engine)])


def test_pool_two_engines_equal_one_without_duplicate_prefill(pool, monkeypatch):
    prompts, before = tiny_model.prompts(8, 300), completed(pool)
    groups = pool.sample(prompts, 8, SAMPLING)
    assert (completed(pool) - before).tolist() == [32, 32]  # four groups each, which stayed together
    for group in groups:
        # Nine blocks of 32 of a prompt of 300 can be shared: the first sample computes them, the others find them.
        assert sorted(c.cached_prompt_tokens for c in group) == [0] + [288] * 7
    monkeypatch.setattr(pool._pool, "_choose", lambda: lanes(pool)[1])
    require_same(pool.sample(prompts, 8, SAMPLING), groups)
    assert (completed(pool) - before).tolist() == [32, 96]


def test_pool_engines_have_separate_cpu_cores_and_logs(pool):
    cores = [set(psutil.Process(pid).cpu_affinity()) for pid in pids(pool)]
    assert cores[0] and cores[1] and not cores[0] & cores[1]
    assert sorted(path.name for path in pool.log_pattern.parent.glob("engine*.log")) == ["engine_0.log", "engine_1.log"]


def test_pool_crashed_engine_restarts_with_published_weights(pool, models):
    version, prompts = pool.version + 1, tiny_model.prompts(4, 20)
    pool.publish(models[1].named_parameters(), version)
    undisturbed = pool.sample(prompts, 4, LONG)
    futures = [pool.submit(prompt, 4, LONG, seed_index=g) for g, prompt in enumerate(prompts)]
    restarts = pool.stats().restarts
    wait_until(lambda: lanes(pool)[1].last_step.running > 0)
    killed = pids(pool)[1]
    os.kill(killed, signal.SIGKILL)
    require_same([future.result(timeout=120) for future in futures], undisturbed)
    wait_until(lambda: pool.stats().serving == 2, 240)
    assert pool.stats().restarts == restarts + 1 and killed not in pids(pool)
    assert not Path(f"/proc/{killed}").exists()

    answers = pool.sample_canary(prompts[:2], 2, SAMPLING)
    assert [answer.replica for answer in answers] == ["engine replica 0", "engine replica 1"]
    sums = {name: checksum(tensor) for name, tensor in models[1].named_parameters()}
    for answer in answers:
        assert answer.checksums == [sums]
        for prompt, group in zip(prompts, answer.completions, strict=False):
            for c in group:
                assert set(c.versions) == {version}
                assert np.abs(tiny_model.logprobs(models[1], prompt, c.tokens) - c.logprobs).max() < 1e-4


@pytest.mark.parametrize("fault", ["not told", "told the version alone"])
def test_pool_engine_missing_weight_sync_stops_run(pool, model_dir, monkeypatch, fault):
    """The engine's own end says that all is well. A mean over both engines would be within `max_mismatch` or not, by chance."""
    source = HFModel(model_dir)
    make = partial(from_config, str(source.path))
    policy = build_policy(make, source, torch.device("cpu"), torch.float32)
    precision = Precision(
        PrecisionConfig(), build_on_meta(make), source, "float32", pool.config, torch.device("cpu"), None
    )
    learner = single_process_learner(policy, PolicyLoss())
    agreement = MismatchGate(0.05)
    sampling, prompts = SamplingConfig(max_tokens=12), prompt_groups([[1, 2, 3, 4], [5, 6, 7]])
    scored = partial(streamed_logprobs, make_model=make, device=torch.device("cpu"), temperature=1.0)
    publisher = Publisher(pool, learner, FullWeights(), precision, source, agreement, scored, prompts, sampling)
    publisher.publish(pool.version + 1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.0 + 1e-5)  # far below what the gate could see
    core = lanes(pool)[1].backend
    load = core.load

    async def lose(buffers, version):
        return (0.1, 0.1) if fault == "not told" else await load([], version)

    with monkeypatch.context() as patch:
        patch.setattr(core, "load", lose)
        words = "engine replica 1 reports version" if fault == "not told" else "tensors in engine replica 1"
        with pytest.raises(MismatchError, match=f"weights: .*{words}"):
            publisher.publish(pool.version + 1)
    publisher.publish(pool.version + 1)
