"""The engine with a vLLM server that was started next to it."""

import json
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import tiny_model  # noqa: E402
from helpers.servers import Server, free_port  # noqa: E402
from helpers.waiting import wait_until  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer, checksum  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


LORA = {"lora_rank": 4, "lora_targets": ("q_proj", "down_proj")}
PROMPTS, SAMPLING = tiny_model.prompts(3, 100), SamplingConfig(max_tokens=32, seed=1)


@pytest.fixture(scope="module", autouse=True)
def key():
    """The servers' key, in the environment of both sides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "test-key-7f3b0c")
        yield os.environ[KEY_VARIABLE]


@pytest.fixture(scope="module")
def models():
    return tiny_model.build(0), tiny_model.build(1)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    address = f"http://127.0.0.1:{free_port()}"
    config = EngineConfig(dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20, address=address, **LORA)
    server = Server(tiny_model.save(models[0], folder / "model"), config, folder / "server.log")
    try:
        server.wait()
        # What it says before any test publishes to it.
        with Engine("", EngineConfig(address=address, max_model_len=1024), str(folder)) as engine:
            engine.start()
            engine.wait_ready(120)
            server.first = engine.sample(PROMPTS, 4, SAMPLING)
        yield server
    finally:
        server.kill()


@pytest.fixture
def engine(server, tmp_path):
    config = EngineConfig(address=server.address, max_model_len=1024, probe_interval_s=0.5, probe_deadline_s=3.0)
    with Engine("", config, str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        yield engine


def check(model, prompts, groups):
    for prompt, group in zip(prompts, groups, strict=True):
        for c in group:
            assert np.abs(tiny_model.logprobs(model, prompt, c.tokens) - c.logprobs).max() < 1e-4


def test_engine_server_samples_and_loads_like_local_engine(server, engine, models):
    first = server.first
    check(models[0], PROMPTS, first)
    assert {v for group in first for c in group for v in c.versions} == {0}
    assert sorted(c.cached_prompt_tokens for c in first[0]) == [0, 96, 96, 96]
    report = engine.publish(models[1].named_parameters(), 1)
    assert report.bytes > 0 and report.load_s < report.pause_s
    assert engine.checksums() == [{name: checksum(tensor) for name, tensor in models[1].named_parameters()}]
    second = engine.sample(PROMPTS, 4, SAMPLING)
    check(models[1], PROMPTS, second)
    assert {v for group in second for c in group for v in c.versions} == {1}
    engine.publish(models[0].named_parameters(), 2)
    again = engine.sample(PROMPTS, 4, SAMPLING)
    for a, b in zip(first, again, strict=True):
        assert [c.tokens.tolist() for c in a] == [c.tokens.tolist() for c in b]
    time.sleep(1.2)  # two looks at the counters
    assert engine.stats().max_kv_usage <= 1.0 and engine.stats().completed == 24


def test_engine_server_loads_adapters_from_shared_memory(server, models, tmp_path):
    """Over the model that it has, and over the next one; an engine that is made after the first does so, too."""
    tensors, peft = tiny_model.adapter(LORA["lora_rank"], LORA["lora_targets"])
    merged = [tiny_model.merged(seed, tensors, peft) for seed in (0, 1)]
    config = EngineConfig(address=server.address, max_model_len=1024, **LORA)
    prompts, sampling = tiny_model.prompts(2, 40), SamplingConfig(max_tokens=24, seed=2)
    for _ in range(2):
        with Engine("", config, str(tmp_path)) as engine:
            engine.start()
            engine.wait_ready(120)
            engine.publish(models[0].named_parameters(), 1)
            check(models[0], prompts, engine.sample(prompts, 2, sampling))
            engine.publish(tensors.items(), 2, peft)
            groups = engine.sample(prompts, 2, sampling)
            check(merged[0], prompts, groups)
            assert {v for group in groups for c in group for v in c.versions} == {2}
            engine.publish(models[1].named_parameters(), 3)
            check(merged[1], prompts, engine.sample(prompts, 2, sampling))
            assert engine.stats().restarts == 0


def test_engine_server_early_stop_and_in_flight_sync(engine, models):
    prompts = tiny_model.prompts(2, 20)
    engine.publish(models[0].named_parameters(), 1)
    free = engine.sample(prompts, 2, SamplingConfig(max_tokens=20, seed=3))
    early = SamplingConfig(max_tokens=200, seed=3, early_stop_logprob=-1.0, early_stop_min_tokens=20)
    stopped = engine.sample(prompts, 2, early)
    check(models[0], prompts, stopped)
    for a, b in zip(free, stopped, strict=True):
        for c, d in zip(a, b, strict=True):
            assert d.finish_reason == "early_stop" and d.tokens.tolist() == c.tokens.tolist()
    under_way = [engine.submit(prompt, 4, SamplingConfig(max_tokens=900, seed=8)) for prompt in prompts]
    # What was asked for later is answered: those before it have tokens of version 1.
    engine.sample(prompts, 1, SamplingConfig(max_tokens=20))
    engine.publish(models[1].named_parameters(), 2)
    for prompt, group in zip(prompts, under_way, strict=True):
        for c in group.result(60):
            split = int((c.versions == 1).sum())
            assert 0 < split < 900 and set(c.versions[split:]) == {2}
            by_old, by_new = (tiny_model.logprobs(model, prompt, c.tokens) for model in models)
            assert np.abs(by_old[:split] - c.logprobs[:split]).max() < 1e-4
            assert np.abs(by_new[split:] - c.logprobs[split:]).max() < 1e-4


def test_engine_server_every_route_requires_the_key(server, key):
    """Also those that vLLM's own --api-key leaves open: its weights, its methods, its counters."""
    status, text = server.ask("/openapi.json", key=key)
    assert status == 200
    routes = [(path, method.upper()) for path, methods in json.loads(text)["paths"].items() for method in methods]
    routes += [
        ("/openapi.json", "GET"),
        ("/docs", "GET"),
        ("/metrics", "GET"),
        ("/nowhere", "GET"),
        ("/pause", "OPTIONS"),
    ]
    assert {"/collective_rpc", "/update_weights", "/init_weight_transfer_engine"} <= {path for path, _ in routes}
    for path, method in routes:
        for wrong in (None, "", key[:-1], key + "0"):
            allowed = 200 if path == "/health" else 401
            assert server.ask(path, method, wrong)[0] == allowed, (path, method, wrong)
    assert server.ask("/is_paused", key=key)[0] == 200


def test_engine_server_key_absent_from_commands_and_logs(server, key):
    session = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and in_session(int(pid), server.process.pid)]
    assert len(session) >= 2  # the server and its engine
    for pid in session:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            assert key.encode() not in file.read()
    assert key not in server.log.read_text()


def in_session(pid, leader):
    try:
        return os.getsid(pid) == leader
    except ProcessLookupError:
        return False


def test_engine_server_invalid_key_fails_start_at_once(server, key, tmp_path, monkeypatch):
    config = EngineConfig(address=server.address, max_model_len=1024, start_deadline_s=600.0)
    monkeypatch.setenv(KEY_VARIABLE, "guessed")
    with Engine("", config, str(tmp_path)) as engine:
        engine.start()
        with pytest.raises(EngineFailed, match=f"refuses the key in {KEY_VARIABLE}") as caught:
            engine.wait_ready(30)
        assert "guessed" not in str(caught.value)
    monkeypatch.delenv(KEY_VARIABLE)
    missing = pytest.raises(EngineFailed, match=f"{KEY_VARIABLE} is not set.*--middleware")
    with Engine("", config, str(tmp_path)) as engine, missing:
        engine.start()


def test_a_server_of_the_wrong_kind_is_refused(server, tmp_path):
    config = EngineConfig(address=server.address, max_model_len=4096)
    with Engine("", config, str(tmp_path)) as engine:
        engine.start()
        with pytest.raises(EngineFailed, match="max_model_len=1024, .*max_model_len=4096"):
            engine.wait_ready(120)


def test_engine_server_unreadable_shared_memory_reports_error(engine, models, monkeypatch):
    """As on another machine: the path leads nowhere, or to somebody else's file."""
    address = engine._buffers.model.address()
    for wrong in ({**address, "path": "/proc/1/fd/12345"}, {**address, "token": "00" * 64}):
        monkeypatch.setattr(engine._buffers.model, "address", lambda wrong=wrong: wrong)
        with pytest.raises(ValueError, match="run the server on this machine.*--worker-extension-cls"):
            engine.publish(models[0].named_parameters(), engine.version + 1)
    groups = engine.sample([[1, 2, 3]], 1, SamplingConfig(max_tokens=4))
    assert len(groups[0][0].tokens) == 4


@pytest.mark.parametrize("broken_off", ["begun", "half loaded", "refused"])
def test_engine_server_recovers_from_interrupted_update(server, models, key, tmp_path, broken_off):
    """It began an update and died, before or after its weights were read; or its weights were refused in the midst."""
    config = EngineConfig(address=server.address, max_model_len=1024, max_failures=2)
    half = list(models[1].named_parameters())
    half = [(name, tensor) for name, tensor in half if "k_proj" not in name and "norm" not in name]
    if broken_off == "refused":
        with Engine("", config, str(tmp_path)) as engine:
            engine.start()
            engine.wait_ready(120)
            with pytest.raises(EngineFailed, match="published weights lack"):
                engine.publish(half, 1)
    else:
        memory = WeightBuffer()
        memory.write(models[1].named_parameters())
        bodies = {"/init_weight_transfer_engine": {"init_info": memory.address()}, "/start_weight_update": {}}
        if broken_off == "half loaded":
            bodies |= {"/update_weights": {"update_info": memory.manifest}}
        for path, body in bodies.items():
            assert server.ask(path, "POST", key, body)[0] == 200
        memory.close()
    with Engine("", config, str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        for version, model in ((1, models[0]), (2, models[1])):
            engine.publish(model.named_parameters(), version)
            prompts = tiny_model.prompts(2, 20)
            check(model, prompts, engine.sample(prompts, 2, SamplingConfig(max_tokens=32, seed=version)))


def test_no_server(tmp_path):
    config = EngineConfig(address=f"http://127.0.0.1:{free_port()}", start_deadline_s=2.0)
    with Engine("", config, str(tmp_path)) as engine:
        engine.start()
        with pytest.raises(EngineFailed, match="no answer from .* within start_deadline_s"):
            engine.wait_ready(120)


@pytest.mark.rest
def test_engine_server_restart_receives_current_weights(server, models, tmp_path):
    """The server dies in the midst of sampling; somebody starts it again; the trainer goes on, with its weights."""
    client = EngineConfig(address=server.address, max_model_len=1024, start_deadline_s=240.0)
    with Engine("", client, str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        engine.publish(models[1].named_parameters(), 5)
        prompts, result = tiny_model.prompts(2, 20), []
        thread = threading.Thread(
            target=lambda: result.append(engine.sample(prompts, 2, SamplingConfig(max_tokens=900, seed=8)))
        )
        thread.start()
        wait_until(lambda: engine.stats().running)
        server.kill()
        server.start()
        thread.join(240)
        assert not thread.is_alive() and engine.stats().restarts == 1
        check(models[1], prompts, result[0])
        assert {v for group in result[0] for c in group for v in c.versions} == {5}


@pytest.mark.rest
def test_engine_server_pool_refuses_mismatched_server(server, models, tmp_path):
    """Groups go to both, weights reach both, the requests of one that dies go to the other; one with another length is refused."""
    address = f"http://127.0.0.1:{free_port()}"
    config = EngineConfig(address=address, dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20)
    second = Server(tiny_model.save(models[0], tmp_path / "model"), config, tmp_path / "second.log")
    try:
        second.wait()
        several = EngineConfig(
            address=[server.address, second.address],
            max_model_len=1024,
            probe_interval_s=0.5,
            probe_deadline_s=3.0,
            start_deadline_s=60.0,
        )
        prompts, sampling = tiny_model.prompts(4, 100), SamplingConfig(max_tokens=300, seed=1)
        with Engine("", several, str(tmp_path)) as engine:
            engine.start()
            engine.wait_ready(240)
            engine.publish(models[1].named_parameters(), 1)
            sums = {name: checksum(tensor) for name, tensor in models[1].named_parameters()}
            assert engine.checksums() == [sums, sums]
            undisturbed = engine.sample(prompts, 4, sampling)
            check(models[1], prompts, undisturbed)
            assert all(lane.counts["completed"] == 8 for lane in engine._pool.replicas)
            futures = [engine.submit(prompt, 4, sampling, seed_index=g) for g, prompt in enumerate(prompts)]
            wait_until(lambda: engine.stats().running)
            second.kill()
            for future, group in zip(futures, undisturbed, strict=True):
                assert [c.tokens.tolist() for c in future.result(120)] == [c.tokens.tolist() for c in group]
            wait_until(lambda: engine.stats().serving == 1)
        shorter = replace(config, max_model_len=512)
        second = Server(str(tmp_path / "model"), shorter, tmp_path / "shorter.log")
        second.wait()
        both = EngineConfig(address=[server.address, second.address], max_model_len=512)
        with Engine("", both, str(tmp_path)) as engine:
            engine.start()
            # Either may be met first.
            one, other = f"{second.address}(,|) .*max_model_len=512", f"{server.address}(,|) .*max_model_len=1024"
            with pytest.raises(EngineFailed, match=f"{one}, but {other}|{other}, but {one}"):
                engine.wait_ready(240)
    finally:
        second.kill()
