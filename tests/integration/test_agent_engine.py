"""A request of an agent to a real engine: a weight sync, and engines that are killed, while it is in flight."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import openai
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from transformers import AutoModelForCausalLM  # noqa: E402

from helpers import tiny_model  # noqa: E402
from helpers.tiny_runs import write_tiny_model  # noqa: E402
from helpers.waiting import engine_pid, wait_until  # noqa: E402
from torchtune_ext.chat import ChatTokenizer  # noqa: E402
from torchtune_ext.grading.agents import AgentConfig  # noqa: E402
from torchtune_ext.pipeline.endpoint import Endpoint  # noqa: E402
from torchtune_ext.sampling.backend import build_requests  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, Priority, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.engine_args import on_cpu  # noqa: E402

pytestmark = [
    pytest.mark.rest,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not on_cpu(), reason="engine.count is for a CPU"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores"),
]
ASK = [{"role": "user", "content": "Write about 3."}]
TOKENS = 900


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The model of the folder, and another one."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, max_position_embeddings=1024)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))  # no response ends early
    first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    return SimpleNamespace(folder=folder, first=first, second=second)


@pytest.fixture(scope="module")
def engine(models, tmp_path_factory):
    config = EngineConfig(count=2, dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20)
    with Engine(str(models.folder), config, str(tmp_path_factory.mktemp("run"))) as engine:
        engine.start()
        engine.wait_ready(240)
        yield engine


@pytest.fixture(scope="module")
def endpoint(models, engine):
    tokenizer = ChatTokenizer(models.folder)
    endpoint = Endpoint(engine, tokenizer, AgentConfig())
    yield endpoint
    endpoint.close()


@pytest.fixture
def ask(models, engine, endpoint):
    """Send the request of a new episode, run `action` while it is in flight, and return the recorded response."""
    prompt, sampling = ChatTokenizer(models.folder).prompt_ids(ASK), SamplingConfig(max_tokens=TOKENS, seed=5)

    def ask(action=lambda: None):
        (request,) = build_requests(prompt, 1, sampling, 0, Priority.SAMPLE, engine.config.max_model_len)

        async def open_episode():
            return endpoint.open(prompt, sampling, request, 0, Priority.SAMPLE, lambda completion: None)

        episode = engine.schedule(open_episode()).result(10)
        client = openai.OpenAI(base_url=endpoint.url, api_key=episode.key, max_retries=0)
        with ThreadPoolExecutor(1) as executor:
            call = partial(client.chat.completions.create, model="policy", messages=ASK)
            answer = executor.submit(call)
            wait_until(lambda: engine.stats().running)
            action()
            response = answer.result(200)
        (recorded,) = episode.session.responses
        completion = recorded.completion
        assert response.usage.completion_tokens == len(completion.tokens) == len(completion.versions)
        assert recorded.context.tolist() == prompt and completion.finish_reason in ("stop", "length")
        return prompt, completion

    return ask


def kill_replicas(engine, only_busy):
    for number, replica in enumerate(engine._pool.replicas):
        if replica.num_requests or not only_busy:
            os.kill(engine_pid(engine, number), signal.SIGKILL)


@pytest.mark.parametrize("only_busy", [pytest.param(True, marks=pytest.mark.rest), False], ids=["one of two", "both"])
def test_engine_death_is_invisible_to_the_agent(engine, ask, only_busy):
    """Another replica takes the request; with none, the request waits for the restart."""
    _, undisturbed = ask()
    restarts = engine.stats().restarts
    _, disturbed = ask(lambda: kill_replicas(engine, only_busy))
    np.testing.assert_array_equal(disturbed.tokens, undisturbed.tokens)
    np.testing.assert_allclose(disturbed.logprobs, undisturbed.logprobs, atol=1e-5)
    wait_until(lambda: engine.stats().serving == 2, 240)
    assert engine.stats().restarts == restarts + (1 if only_busy else 2)


def test_weight_sync_during_a_request_records_versions(engine, models, ask):
    """The request is complete, and each token has the version and the log-prob of its weights."""
    old = engine.version
    prompt, completion = ask(lambda: engine.publish(models.second.named_parameters(), old + 1))
    tokens = completion.tokens
    split = int((completion.versions == old).sum())
    assert completion.versions.tolist() == [old] * split + [old + 1] * (len(tokens) - split)
    assert 0 < split < len(tokens)
    before = tiny_model.logprobs(models.first, prompt, tokens)[:split]
    after = tiny_model.logprobs(models.second, prompt, tokens)[split:]
    assert np.abs(before - completion.logprobs[:split]).max() < 1e-4
    assert np.abs(after - completion.logprobs[split:]).max() < 1e-4
    engine.publish(models.first.named_parameters(), old + 2)
