"""Requests of an agent that get lost, are repeated or are limited by the agent: what is trained then."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from helpers.scripted_engine import ASK, completion
from helpers.waiting import wait_until
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline import endpoint as endpoint_module
from torchtune_ext.pipeline.agent_session import AgentSession, agent_sample
from torchtune_ext.tasks.task import Score

CALL = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def chat(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options).choices[0]


def test_retry_attaches_to_first_generation(engine, open_episode):
    _, client = open_episode(max_retries=1)
    engine.released.clear()
    threading.Timer(2.0, engine.released.set).start()
    choice = chat(client.with_options(timeout=1.0), [ASK])
    assert choice.message.content == "ok" and len(engine.requests) == 1
    # Equal requests that are not retries are two responses with two seeds.
    chat(client, [ASK]), chat(client, [ASK])
    assert len({request.seed for request in engine.requests}) == 3


def test_disconnected_client_drops_its_turn(engine, open_episode, monkeypatch):
    monkeypatch.setattr(endpoint_module, "RETRY_GRACE_S", 0.2)
    episode, client = open_episode()
    engine.released.clear()
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), [ASK])
    deadline = time.monotonic() + 20
    while not engine.cancelled and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine.cancelled == 1 and not episode.session.responses


def test_response_that_no_client_got_is_not_trained(engine, open_episode):
    """The agent's own retry does not attach to it, and it is complete before the endpoint gives it up."""
    episode, client = open_episode()
    engine.texts = ["lost", "got"]
    engine.released.clear()
    with pytest.raises(openai.APITimeoutError):
        chat(client.with_options(timeout=0.5), [ASK])
    engine.released.set()
    wait_until(lambda: episode.session.responses, 20)
    assert chat(client, [ASK]).message.content == "got" and len(episode.session.trained) == 2
    engine.call(episode.endpoint.finish, episode)
    (response,) = episode.session.trained
    assert response.new_messages[-1]["content"] == "got"


@pytest.mark.parametrize("limit", ["of the client", "of the endpoint"])
def test_retries_of_equal_requests_get_different_responses(engine, open_episode, limit):
    by_client = limit == "of the client"
    _, client = open_episode(max_retries=3, request_timeout_s=60.0 if by_client else 1.0)
    engine.texts, client = ["one", "two"], client.with_options(timeout=1.0 if by_client else 60.0)
    engine.released.clear()
    threading.Timer(2.5, engine.released.set).start()
    with ThreadPoolExecutor(2) as executor:
        texts = executor.map(lambda _: chat(client, [ASK]).message.content, range(2))
        assert sorted(texts) == ["one", "two"]
    assert len(engine.requests) == 2 or not by_client


def test_each_retry_has_the_whole_grace(engine, open_episode, monkeypatch):
    """The first client leaves after 0.6 s, its retry after 1.4 s, and the second retry gets the response."""
    monkeypatch.setattr(endpoint_module, "RETRY_GRACE_S", 1.0)
    _, client = open_episode(max_retries=0)
    engine.released.clear()
    for count in range(2):
        with pytest.raises(openai.APITimeoutError):
            headers = {"x-stainless-retry-count": str(count)}
            chat(client.with_options(timeout=0.6 + 0.2 * count), [ASK], extra_headers=headers)
    time.sleep(0.4)  # after the end of the first one's grace
    engine.released.set()
    chat(client, [ASK], extra_headers={"x-stainless-retry-count": "2"})
    assert len(engine.requests) == 1 and not engine.cancelled


def test_equal_answers_take_space_each(engine, tokenizer, open_episode):
    """A row stores the tokens of every response, also of equal ones to one context."""
    episode, client = open_episode()
    engine.texts = ["the same answer to all"] * 200
    with pytest.raises(openai.BadRequestError, match="all branches of the episode: [0-9]* tokens and 64"):
        for _ in range(200):
            chat(client, [ASK])
    prompt = np.array(tokenizer.prompt_ids([ASK]), np.int32)
    size = len(prompt) + len(episode.session.to_completion(prompt, "completed").tokens)
    assert episode.session.packed_size([]) == size <= 600 < size + 64 + 10


@pytest.mark.parametrize(("max_tokens", "reason"), [(64, "completed"), (1, "length")])
def test_own_limit_of_an_agent_truncates_nothing(tokenizer, max_tokens, reason):
    session = session_of(tokenizer, "A", "length")
    sample = agent_sample(session, tokenizer.prompt_ids([ASK]), "completed", Score(1.0), max_tokens)
    assert sample.completion.finish_reason == reason


def session_of(tokenizer, text, finish_reason="stop"):
    session, turn = AgentSession(tokenizer), completion(tokenizer.encode(text)[:1], finish_reason)
    message = {"role": "assistant", "content": text}
    session.add("chatcmpl-1", [ASK], [], session.find_context([ASK], []), turn, text, message, True)
    return session


def test_reward_of_an_unknown_response_is_refused(tokenizer):
    session, prompt = session_of(tokenizer, "A"), tokenizer.prompt_ids([ASK])
    score = Score(1.0, response_rewards={"chatcmpl-1": 0.5})
    assert agent_sample(session, prompt, "completed", score, 64).turn_rewards == (1.0,)
    score = Score(1.0, response_rewards={"run-7": 0.5})
    sample = agent_sample(session, prompt, "completed", score, 64)
    assert isinstance(sample.outcome, Ungraded) and "response_rewards has 'run-7'" in sample.outcome.cause
    assert sample.completion.finish_reason == "agent_failed" and not sample.turn_rewards


def test_nothing_follows_a_stop(engine, open_episode):
    _, client = open_episode()
    engine.texts = [f"{CALL % 1}Observation: 5{CALL % 2}", f"Hm. Observation: 5{CALL % 1}"]
    choice = chat(client, [ASK], tools=TOOLS, stop=["Observation:"])
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": 1}']
    choice = chat(client, [ASK], tools=TOOLS, stop=["Observation:"])
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Hm. ", None, "stop")


def test_streamed_logprobs_come_once(engine, open_episode):
    _, client = open_episode()
    engine.texts = ["I add." + CALL % 1]
    with client.chat.completions.stream(
        model="policy", messages=[ASK], tools=TOOLS, logprobs=True, stream_options={"include_usage": True}
    ) as stream:
        answer = stream.get_final_completion()
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens


def test_speakers_of_equal_texts_differ(tokenizer):
    """Names and white space of what the policy has read count."""
    session = AgentSession(tokenizer)
    turn, message = completion([*tokenizer.encode("A"), tokenizer.eos_id]), {"role": "assistant", "content": "A"}
    session.add("id", [ASK], [], session.find_context([ASK], []), turn, "A", message, True)
    assert session.find_context([ASK, message, ASK], []).extended is not None
    for other in (ASK | {"name": "bob"}, ASK | {"content": ASK["content"] + "\n"}):
        assert session.find_context([other, message, ASK], []).extended is None


def test_client_ending_in_its_body_logs_nothing(open_episode, caplog):
    episode, _ = open_episode()
    with socket.create_connection(("127.0.0.1", httpx.URL(episode.endpoint.url).port), timeout=20) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: bearer {episode.key}\r\n"
        client.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.2)
    headers = {"authorization": f"bearer {episode.key}"}
    assert httpx.get(f"{episode.endpoint.url}/models", headers=headers).status_code == 200
    assert "a request failed" not in caplog.text
