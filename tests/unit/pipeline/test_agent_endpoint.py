"""The endpoint for agents: histories as token ids, trees, requests of the openai package, errors, retries. With a real engine:
tests/integration/test_agents.py."""

import asyncio
import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from unittest.mock import AsyncMock

import cloudpickle
import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scripted_engine import ASK, completion
from helpers.tiny_runs import write_tiny_model
from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.pipeline import endpoint as endpoint_module
from torchtune_ext.pipeline.agent_session import AgentSession, agent_sample, build_tree, share_prefix, shared_prompt
from torchtune_ext.pipeline.endpoint import Endpoint, run_agent
from torchtune_ext.pipeline.groups import Group, group_from_record, group_to_json
from torchtune_ext.run.errors import UsageError
from torchtune_ext.sampling.backend import build_requests, derive_seed
from torchtune_ext.sampling.types import EngineFailed, Priority, SamplingConfig
from torchtune_ext.tasks.task import Problem, Score

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # The agents need not import PyTorch with this module.
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def chat(client, messages, **options):
    (choice,) = client.chat.completions.create(model="policy", messages=messages, **options).choices
    return choice


# -- trees -------------------------------------------------------------------------------------------

turn_ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=8), turn_ids), min_size=1, max_size=6))
def test_tree_stores_each_response_behind_its_context(responses):
    responses = [(np.array(context, np.int32), completion(ids)) for context, ids in responses]
    prompt = responses[0][0][:2]
    tree = build_tree(prompt, responses, "completed")
    ids = np.concatenate([prompt, tree.tokens])
    for path, (start, stop), (context, turn) in zip(tree.turn_paths(len(prompt)), tree.turns, responses, strict=True):
        np.testing.assert_array_equal(ids[path], [*context, *turn.tokens])
        np.testing.assert_array_equal(tree.logprobs[start:stop], turn.logprobs)
    # No prefix is stored twice: as many ids as a trie has nodes.
    paths = [[*prompt], *([*context, *turn.tokens] for context, turn in responses)]
    nodes = {tuple(path[: n + 1]) for path in paths for n in range(len(path))}
    assert len(ids) <= len(nodes) + sum(len(turn.tokens) for _, turn in responses)


def test_linear_history_is_a_path(tokenizer):
    session = AgentSession(tokenizer)
    messages = [ASK]
    for text in ("one", "two", "three"):
        context = session.find_context(messages, [])
        turn = completion([*tokenizer.encode(text), tokenizer.eos_id])
        message = {"role": "assistant", "content": text}
        session.add("id", messages, [], context, turn, text, message, True)
        messages = [*messages, message, {"role": "user", "content": "Go on."}]
    prompt = np.array(tokenizer.prompt_ids([ASK]), np.int32)
    tree = session.to_completion(prompt, "completed")
    assert len(tree.turns) == 3 and not tree.parents and not tree.kept_prefix_lens
    ids = [*prompt, *tree.tokens]
    assert ids[-len(tokenizer.encode("three")) - 1 : -1] == tokenizer.encode("three")
    reply = tokenizer.turn_boundary_ids([{"role": "user", "content": "Go on."}], tokenizer.eos_id, (), [ASK])
    start = tree.turns[0][1]
    assert tree.tokens[start : start + len(reply)].tolist() == reply
    assert [tokenizer.decode(tree.tokens[span[0] : span[1]]) for span in tree.content_spans] == ["Go on.", "Go on."]


def test_reply_that_several_branches_keep_counts_once(tokenizer):
    session, message = AgentSession(tokenizer), {"role": "assistant", "content": "one"}
    turn = completion([*tokenizer.encode("one"), tokenizer.eos_id])
    session.add("first", [ASK], [], session.find_context([ASK], []), turn, "one", message, True)
    # The first two requests are equal, the third begins like them, and an edited history is rendered as a whole.
    for reply, asked in (
        ("Go on.", ASK),
        ("Go on.", ASK),
        ("Go up.", ASK),
        ("Go on.", {"role": "user", "content": "?"}),
    ):
        history = [asked, message, {"role": "user", "content": reply}]
        session.add(reply, history, [], session.find_context(history, []), turn, "one", message, True)
    tree = session.to_completion(np.array(tokenizer.prompt_ids([ASK]), np.int32), "completed")
    texts = [tokenizer.decode(tree.tokens[start:stop]) for start, stop in tree.content_spans]
    assert len(tree.turns) == 5 and texts[0] == "Go on." and len(texts) == 2 and "Go up.".endswith(texts[1])


def test_interleaved_histories_have_two_paths(tokenizer):
    session, histories = AgentSession(tokenizer), {name: [{"role": "user", "content": name}] for name in "AB"}
    for name in "ABAB":
        context = session.find_context(histories[name], [])
        message = {"role": "assistant", "content": f"{name} says"}
        turn = completion([*tokenizer.encode(message["content"]), tokenizer.eos_id])
        session.add("id", histories[name], [], context, turn, message["content"], message, True)
        histories[name] = [*histories[name], message, {"role": "user", "content": "and?"}]
    prompt = shared_prompt(np.empty(0, np.int32), [session])
    tree = session.to_completion(prompt, "completed")
    assert tree.parents[2:] == (0, 1)
    assert tokenizer.decode_all(prompt).endswith("A<|im_end|><|im_start|>assistant\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"content": m["content"] + "\n", "name": "solver"},
        lambda m: {"content": m["content"], "role": "assistant", "tool_calls": m["tool_calls"]},
        lambda m: m | {"tool_calls": [call(arguments='{"b":2,\n "a":1}', id="other")]},
        lambda m: m | {"content": [{"type": "text", "text": m["content"]}]},
    ],
    ids=["white space and name", "key order", "arguments and id", "text parts"],
)
def test_history_matches_despite_client_rewriting(tokenizer, change):
    session, message = AgentSession(tokenizer), {"role": "assistant", "content": "I add.", "tool_calls": [call()]}
    context = session.find_context([ASK], TOOLS)
    turn = completion([*tokenizer.encode("I add." + CALL), tokenizer.eos_id])
    response = session.add("id", [ASK], TOOLS, context, turn, "I add." + CALL, message, True)
    result = {"role": "tool", "content": "3", "tool_call_id": "x"}
    follow = session.find_context([ASK, change(message), result], TOOLS)
    assert follow.extended is response and follow.ids[: len(response.path)] == response.path.tolist()
    assert session.find_context([ASK, message | {"content": "I do not."}, result], TOOLS).extended is None
    assert session.find_context([ASK, message, result], []).extended is None


def call(arguments='{"a": 1, "b": 2}', id="call_1"):
    return {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}


# -- requests ----------------------------------------------------------------------------------------


def test_chat_response_has_openai_fields(engine, tokenizer, open_episode):
    _, client = open_episode()
    engine.texts = ["12 or more"]
    response = client.chat.completions.create(model="policy", messages=[ASK], logprobs=True, max_completion_tokens=9)
    (choice,) = response.choices
    assert (choice.message.content, choice.finish_reason) == ("12 or more", "stop")
    sampled = [*tokenizer.encode("12 or more"), tokenizer.eos_id]
    assert [entry.logprob for entry in choice.logprobs.content] == [-float(i) for i in range(len(sampled))]
    assert response.usage.completion_tokens == len(sampled)
    assert response.usage.prompt_tokens == len(tokenizer.prompt_ids([ASK]))
    assert engine.requests[0].prompt == tokenizer.prompt_ids([ASK])
    assert engine.requests[0].sampling.max_tokens == 9
    assert [model.id for model in client.models.list()] == ["policy", "policy-untrained"]


def test_tool_calls_are_parsed_and_kept_as_ids(engine, tokenizer, open_episode, caplog):
    _, client = open_episode()
    engine.texts = ["I add." + CALL, "3"]
    choice = chat(client, [ASK], tools=TOOLS)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
    message = choice.message.model_dump(exclude_none=True)
    chat(
        client,
        [ASK, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}],
        tools=TOOLS,
    )
    first, second = engine.requests
    path = [*first.prompt, *tokenizer.encode("I add." + CALL), tokenizer.eos_id]
    assert second.prompt[: len(path)] == path
    # The template of this model shows no tools; one warning per run.
    assert caplog.text.count("the chat template does not render tools") == 1


def test_thought_is_reasoning_content_and_may_be_dropped(engine, tokenizer, open_episode):
    _, client = open_episode()
    engine.texts = ["<think>hm</think>Yes", "No"]
    choice = chat(client, [ASK])
    assert (choice.message.content, choice.message.reasoning_content) == ("Yes", "hm")
    chat(client, [ASK, {"role": "assistant", "content": "Yes"}, ASK])
    sampled = [*tokenizer.encode("<think>hm</think>Yes"), tokenizer.eos_id]
    assert engine.requests[1].prompt[: len(engine.requests[0].prompt) + len(sampled)] == [
        *engine.requests[0].prompt,
        *sampled,
    ]


def test_stop_cuts_text_but_not_ids(engine, tokenizer, open_episode):
    _, client = open_episode()
    engine.texts = ["one two three", "four"]
    choice = chat(client, [ASK], stop=[" two"])
    assert choice.message.content == "one"
    chat(client, [ASK, {"role": "assistant", "content": "one"}, ASK])
    assert tokenizer.encode(" two three")[0] in engine.requests[1].prompt


def test_stream_has_message_and_usage(engine, open_episode):
    _, client = open_episode()
    engine.texts = ["I add." + CALL]
    chunks = list(
        client.chat.completions.create(
            model="policy", messages=[ASK], tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I add."
    assert [delta.tool_calls[0].function.name for delta in deltas if delta.tool_calls] == ["add"]
    assert chunks[-1].usage.completion_tokens and chunks[-2].choices[0].finish_reason == "tool_calls"


REFUSED = [
    ({"temperature": 0.3}, 400, "temperature=0.3"),
    ({"top_p": 0.9}, 400, "top_p=0.9"),
    ({"n": 2}, 400, "n=2"),
    ({"extra_body": {"best_of": 3}}, 400, "best_of=3"),
    ({"model": "gpt-4o"}, 404, "gpt-4o"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "image_url"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": True}, 400, "max_tokens=True"),
    ({"messages": [{"role": "user", "content": "long " * 900}]}, 400, "exceed engine.max_model_len=600"),
]


@pytest.mark.parametrize(("options", "status", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_request_that_cannot_be_trained_is_refused(open_episode, options, status, words):
    episode, client = open_episode()
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        client.chat.completions.create(**{"model": "policy", "messages": [ASK]} | options)
    assert caught.value.status_code == status and not episode.session.responses


def test_client_sampling_can_be_ignored(engine, open_episode, caplog):
    _, client = open_episode(ignore_client_sampling=True)
    for _ in range(2):
        chat(client, [ASK], temperature=0.3, top_p=0.5)
    assert caplog.text.count("temperature=0.3 of a client is ignored") == 1
    assert {request.sampling.temperature for request in engine.requests} == {1.0}


def test_evaluation_accepts_sampling_of_training(engine, open_episode):
    """A greedy evaluation gets the temperature of training, and one with top_p its own."""
    first, client = open_episode()
    for sampling, options in (({"temperature": 0.0}, {"temperature": 0.7}), ({"top_p": 0.95}, {"top_p": 0.95})):
        episode = engine.open(first.endpoint, **sampling)
        chat(client.with_options(api_key=episode.key), [ASK], **options)
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 1.0]


USER = '{"messages": [{"role": "user", "content": "x"}, %s]}'
BROKEN = {
    "cut": "{",
    "list": "[]",
    "deep": "[" * 100_000,
    "deep value": f'{{"messages": {"[" * 900}{"]" * 900}}}',
    "50 MB": "x" * (50 << 20),
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "half a character": USER % r'{"role": "user", "content": "\ud83d"}',
    "calls": USER % '{"role": "assistant", "content": "", "tool_calls": 5}',
    "call": USER % '{"role": "assistant", "content": "", "tool_calls": {"function": {"name": "x"}}}',
    "name": USER % '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": [1]}}]}',
    "long role": USER % '{"role": "%s", "content": "x"}' % ("robot" * 1_000_000),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_broken_body_is_an_openai_error(open_episode, body):
    """A connection serves the next request after it, too."""
    episode, _ = open_episode()
    headers = {"authorization": f"Bearer {episode.key}", "x-stainless-retry-count": b"\xb2"}
    with httpx.Client(base_url=episode.endpoint.url, headers=headers, timeout=30) as client:
        answer = client.post("/chat/completions", content=body)
        assert answer.status_code in (400, 413) and answer.json()["error"]["type"] == "invalid_request_error"
        assert len(answer.content) < 1000
        assert client.get("/models").status_code == 200


@pytest.mark.parametrize("arguments", ["{", "[" * 9000], ids=["cut", "deep"])
def test_arguments_without_json_stay_text(engine, open_episode, arguments):
    _, client = open_episode()
    called = {"role": "assistant", "content": "", "tool_calls": [call(arguments=arguments)]}
    assert chat(client, [ASK, called, ASK]).message.content == "ok"


def test_unknown_route_names_the_known_ones(open_episode):
    _, client = open_episode()
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses: expected POST /v1/chat/completions"):
        client.responses.create(model="policy", input="x")


def test_key_is_valid_during_its_episode_only(engine, open_episode):
    episode, client = open_episode()
    with pytest.raises(openai.AuthenticationError, match="unknown key"):
        chat(client.with_options(api_key="sk-other"), [ASK])
    chat(client, [ASK])
    engine.call(episode.endpoint.finish, episode)
    with pytest.raises(openai.AuthenticationError, match="has finished"):
        chat(client, [ASK])


def test_request_in_flight_ends_with_episode(engine, open_episode):
    episode, client = open_episode()
    engine.released.clear()
    with pytest.raises(openai.AuthenticationError, match="has finished"):
        threading.Timer(0.5, lambda: engine.call(episode.endpoint.finish, episode)).start()
        chat(client, [ASK])
    assert engine.cancelled == 1 and not episode.session.responses


def test_turn_limit_is_429(open_episode):
    episode, client = open_episode(max_turns=2)
    chat(client, [ASK]), chat(client, [ASK])
    client.chat.completions.create(model="policy-untrained", messages=[ASK])  # not limited
    with pytest.raises(openai.RateLimitError, match="max_turns=2") as caught:
        chat(client, [ASK])
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert episode.finish_reason == "max_turns" and len(episode.session.trained) == 2


def test_untrained_model_is_not_stored(engine, tokenizer, open_episode):
    episode, client = open_episode()
    client.chat.completions.create(model="policy-untrained", messages=[ASK])
    assert not episode.session.trained and episode.session.num_tokens == 0
    tree = episode.session.to_completion(np.array(tokenizer.prompt_ids([ASK]), np.int32), "completed")
    assert len(tree.tokens) == 0 and tree.turns == ()


def test_episode_by_hand_is_never_stored(open_episode):
    """As `torchtune-ext serve --endpoint` opens it: no limit of an episode applies."""
    episode, client = open_episode(max_turns=2)
    episode.is_trained = False
    for _ in range(4):
        chat(client, [ASK])
    assert not episode.session.trained


def test_failed_server_ends_waiting_episodes(open_episode, monkeypatch):
    episode, _ = open_episode()
    failed = Future()
    failed.set_exception(TypeError("uvicorn has changed"))
    episode.endpoint._fail_episodes(failed)
    assert "uvicorn has changed" in str(episode.failure.result(10))
    # The constructor registers it.
    serving = Future()
    monkeypatch.setattr(episode.endpoint._engine, "schedule", lambda work: (work.close(), serving)[1])
    waiting = Endpoint(episode.endpoint._engine, episode.endpoint._tokenizer, AgentConfig())
    waiting._episodes["key"] = other = AsyncMock(failure=Future())
    serving.set_exception(TypeError("it ends"))
    assert "it ends" in str(other.failure.result(10))
    waiting._socket.close()


def test_stalled_body_closes_the_connection(open_episode, monkeypatch):
    monkeypatch.setattr(endpoint_module, "FIRST_REQUEST_TIMEOUT_S", 0.5)
    episode, _ = open_episode()
    with socket.create_connection(("127.0.0.1", httpx.URL(episode.endpoint.url).port), timeout=20) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {episode.key}\r\n"
        client.sendall(head.encode() + b"Content-Length: 100\r\n\r\n{")
        assert client.recv(1000) == b""


def test_failed_engine_is_503_and_ends_the_run(engine, open_episode, monkeypatch):
    episode, client = open_episode(max_retries=1)
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)  # of the client before its retry
    engine.error = EngineFailed("the engine failed 3 times in a row")
    with pytest.raises(openai.InternalServerError, match="3 times") as caught:
        chat(client, [ASK])
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    assert len(engine.requests) == 2 and episode.failure.result() is engine.error  # the retry was a new request
    assert pauses == [float(caught.value.response.headers["retry-after"])]


class StubbornAgent:
    """An agent that ignores errors. It is pickled for its process."""

    def run_agent(self, problem, client):
        with contextlib.suppress(openai.APIError):
            chat(openai.OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0), [ASK])
        time.sleep(100)
        return 1.0


def test_failed_engine_ends_the_run_without_the_agent(engine, tokenizer, tmp_path):
    engine.error, prompt = EngineFailed("the engine failed 3 times in a row"), tokenizer.prompt_ids([ASK])
    sampling = SamplingConfig(max_tokens=64, seed=5)
    (request,) = build_requests(prompt, 1, sampling, 0, Priority.SAMPLE, 600)
    with AgentPool(StubbornAgent(), AgentConfig(timeout_s=90), output=tmp_path / "log") as pool:
        problem = Problem("p", (ASK,), 3)
        work = run_agent(
            pool, engine, tokenizer, problem, prompt, sampling, request, 0, Priority.SAMPLE, lambda _: None, {}
        )
        with pytest.raises(EngineFailed, match="3 times"):
            engine.thread.call(work, timeout=60)


def test_stored_episodes_of_agents_are_restored(tokenizer):
    """A resumed run keeps finished groups: two paths in one episode, and an episode without a response."""
    session, empty = AgentSession(tokenizer), AgentSession(tokenizer)
    for name in "AB":
        messages = [{"role": "user", "content": name}]
        turn = completion([*tokenizer.encode(name), tokenizer.eos_id])
        message = {"role": "assistant", "content": name}
        session.add(name, messages, [], session.find_context(messages, []), turn, name, message, True)
    prompt = tokenizer.prompt_ids([ASK])
    samples = tuple(agent_sample(each, prompt, "completed", Score(0.5, {"x": 1.0}), 64) for each in (session, empty))
    group = share_prefix(Group(Problem("p", (ASK,), 3), np.array(prompt, np.int32), samples), [session, empty])
    text = group_to_json(group)
    assert group.samples[0].completion.num_forks == 1 and not len(group.samples[1].completion.tokens)
    assert group_to_json(group_from_record(json.loads(text))) == text


def test_parallel_requests_share_the_space_of_a_row(engine, open_episode):
    """Each of three contexts fits into 600 tokens, all of them do not."""
    episode, client = open_episode()
    engine.released.clear()
    threading.Timer(1.5, engine.released.set).start()
    ask = partial(chat, client, max_tokens=64)
    with ThreadPoolExecutor(3) as executor:
        asks = [[{"role": "user", "content": f"{i}" + " word" * 40}] for i in range(3)]
        futures = [executor.submit(ask, messages) for messages in asks]
        errors = [future.exception() for future in futures]
    (error,) = [error for error in errors if error is not None]
    assert "all branches of the episode" in str(error) and len(episode.session.trained) == 2
    # The agent has recovered if it gets another response.
    assert episode.finish_reason == "completed"


def test_equal_requests_in_flight_all_end_with_episode(engine, open_episode):
    episode, client = open_episode()
    engine.released.clear()
    with ThreadPoolExecutor(2) as executor:
        futures = [executor.submit(chat, client, [ASK]) for _ in range(2)]
        while len(engine.requests) < 2:
            time.sleep(0.05)
        engine.call(episode.endpoint.finish, episode)
        assert all("has finished" in str(future.exception()) for future in futures)
    assert engine.cancelled == 2 and not episode.session.responses


def test_streamed_request_error_has_a_status(open_episode):
    _, client = open_episode()
    with pytest.raises(openai.BadRequestError, match="max_model_len=600"):
        client.chat.completions.create(model="policy", messages=[ASK | {"content": "x " * 900}], stream=True)


def test_only_sampled_turns_get_rewards(tokenizer):
    """An edited history has an assistant message that the policy did not sample."""
    session = AgentSession(tokenizer)
    edited = [ASK, {"role": "assistant", "content": "shot"}, ASK]
    turn = completion([*tokenizer.encode("yes"), tokenizer.eos_id])
    message = {"role": "assistant", "content": "yes"}
    session.add("a", edited, [], session.find_context(edited, []), turn, "yes", message, True)
    sample = agent_sample(session, tokenizer.prompt_ids([ASK]), "completed", Score(0.5), 64)
    assert [reward for _, reward in sample.rated_messages] == [None, None, None, 0.5]


def test_seed_depends_on_path_not_on_arrival(engine, open_episode):
    other = [{"role": "user", "content": "Another agent"}]
    seeds = []
    for order in ([ASK], other), (other, [ASK]):
        _, client = open_episode()
        start = len(engine.requests)
        for messages in order:
            chat(client, messages)
        seeds.append({tuple(request.prompt): request.seed for request in engine.requests[start:]})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2
    assert derive_seed(5, 2, 1) in seeds[0].values()  # the seed of the group's sample


async def ask_once(url, key):
    """Send a request over a connection that then stays open; return its status."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "policy-untrained", "messages": [ASK]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    return (await reader.readline()).decode().split()[1], writer


def test_many_connections_leave_files_to_the_run(tokenizer, tmp_path, repo_root):
    """With 256 files, of which connections without a request hold some for 2 s."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1000:
        pytest.skip("needs ulimit -n 1000")
    write_tiny_model(tmp_path)
    command = [sys.executable, "-m", "helpers.scripted_engine", str(tmp_path), "256"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    server = subprocess.Popen(command, cwd=repo_root / "tests", text=True, **pipes)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1000), hard))
    try:
        url, key = server.stdout.readline().split()

        async def ask_all():
            port = int(url.rpartition(":")[2].removesuffix("/v1"))
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            answers = await asyncio.wait_for(asyncio.gather(*(ask_once(url, key) for _ in range(500))), 120)
            return [status for status, _ in answers], silent

        statuses, _ = asyncio.run(ask_all())
        assert statuses == ["200"] * 500
        assert chat(openai.OpenAI(base_url=url, api_key=key), [ASK]).message.content == "ok"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        output, errors = server.communicate(timeout=30)
    assert (output.strip(), server.returncode) == ("0", 0), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "no.such.host.invalid", "::1", "x" * 100])
def test_foreign_host_is_refused(engine, tokenizer, host):
    with pytest.raises(UsageError, match=f"agent.host='{host}': .*expected an IPv4 address or a name of this machine"):
        Endpoint(engine, tokenizer, AgentConfig(host=host))


def test_named_host_serves_agents(open_episode):
    episode, client = open_episode(host="localhost")
    assert "//localhost:" in episode.endpoint.url and chat(client, [ASK]).message.content == "ok"


def test_linear_history_keeps_one_path(tokenizer):
    """Memory and time of a turn do not grow with the turns before."""
    session, messages = AgentSession(tokenizer), [ASK]
    for turn in range(40):
        context = session.find_context(messages, [])
        assert session.packed_size([context.ids]) == len(context.ids)
        ids = completion([*tokenizer.encode(f"turn {turn}"), tokenizer.eos_id])
        message = {"role": "assistant", "content": f"turn {turn}"}
        session.add("id", messages, [], context, ids, message["content"], message, True)
        messages = [*messages, message, ASK]
        assert len(session._paths) == 1
    tree = session.to_completion(np.array(tokenizer.prompt_ids([ASK]), np.int32), "completed")
    assert len(tree.turns) == 40 and tree.num_forks == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), turn_ids), min_size=1, max_size=6))
def test_forks_are_the_leaves_but_one(responses):
    responses = [(np.array(context, np.int32), completion(ids)) for context, ids in responses]
    tree = build_tree(responses[0][0][:1], responses, "completed")
    paths = tree.turn_paths(1)
    # Positions, not ids: equal turns are two branches.
    continued = [any(other is not path and set(path) <= set(other) for other in paths) for path in paths]
    assert tree.num_forks == continued.count(False) - 1
