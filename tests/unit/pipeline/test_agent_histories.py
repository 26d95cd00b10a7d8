"""Random agents at the endpoint: packed rows against each response alone, after the ids that the engine was sent."""

import asyncio
import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from torchtune.models.qwen2 import qwen2

from helpers.scripted_engine import ScriptedEngine
from helpers.tiny_runs import write_tiny_model
from helpers.unpacked_reference import assert_equal_to_plain, paths_of, reference
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.objective.loss import PolicyLoss
from torchtune_ext.pipeline.agent_session import agent_sample, share_prefix
from torchtune_ext.pipeline.endpoint import Endpoint
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.packing import pack
from torchtune_ext.policy.logprobs import PackedPolicy
from torchtune_ext.sampling.backend import build_requests
from torchtune_ext.sampling.engine import Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem, Score

MAX_LEN = 900
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
TEXTS = ("one two", "Write about 3.", "go on", "a\n\nb  c", "über", " x")
REPLIES = (*TEXTS, "<think>hm\nno</think>yes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "")
MODES = ["sampled", "template"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


class RandomEngine(ScriptedEngine):
    """An engine that answers with random ids, and keeps what it was sent and what it answered."""

    config = SimpleNamespace(max_model_len=MAX_LEN)

    def __init__(self, tokenizer, seed):
        super().__init__(tokenizer)
        self.rng, self.sent = np.random.default_rng(seed), []  # prompt and sampled ids, by episode

    async def generate(self, request, affinity_key=None):
        await asyncio.sleep(float(self.rng.random()) * 0.002)  # responses come in another order than requests
        rng, vocab = self.rng, self.tokenizer.vocab_size
        ids = self.tokenizer.encode(str(rng.choice(REPLIES))) + rng.integers(3, vocab, int(rng.integers(0, 4))).tolist()
        truncated = rng.random() < 0.15 and ids
        ids = np.array(ids if truncated else [*ids, self.tokenizer.eos_id], np.int32)
        self.sent.append((affinity_key, list(request.prompt), ids.tolist()))
        logprobs = rng.normal(-3, 1, len(ids)).astype(np.float32)
        return Completion(ids, logprobs, np.zeros(len(ids), np.int32), "length" if truncated else "stop")


def play(client, model, rng, kinds):
    """One episode: up to three levels of agents, whose histories grow, are edited, cut and taken over by others."""
    start = [{"role": "user", "content": "Write about 3."}]
    if rng.random() < 0.5:
        start.insert(0, {"role": "system", "content": str(rng.choice(TEXTS))})
    agents = [{"messages": start, "tools": TOOLS if rng.random() < 0.5 else [], "level": 1}]

    def ask(agent):
        body = {"model": str(rng.choice([model, model, model, "policy-untrained"])), "messages": agent["messages"]}
        body |= {"tools": agent["tools"]} if agent["tools"] else {}
        return client.post("/chat/completions", json=body)

    for _ in range(int(rng.integers(1, 7))):
        kind = str(rng.choice(["append", "append", "append", "edit", "cut", "drop", "system", "delegate", "parallel"]))
        agent = agents[int(rng.integers(len(agents)))]
        messages = [dict(message) for message in agent["messages"]]
        place = int(rng.integers(len(messages)))
        if kind == "edit":
            messages[place]["content"] = f"{messages[place].get('content') or ''} edited"
        elif kind == "cut":
            messages = messages[: place + 1]
        elif kind == "drop" and len(messages) > 2:  # a sliding window
            messages = messages[:1] + messages[2:]
        elif kind == "system":
            messages = [{"role": "system", "content": "Other rules."}, *(m for m in messages if m["role"] != "system")]
        elif kind == "delegate" and agent["level"] < 3:
            history = messages if rng.random() < 0.5 else []
            agents.append(agent := agent | {"level": agent["level"] + 1})
            messages = [*history, {"role": "user", "content": f"Level {agent['level']}: {rng.choice(TEXTS)}"}]
        if messages[-1]["role"] == "assistant":
            reply = {"role": "tool", "tool_call_id": "x"} if messages[-1].get("tool_calls") else {"role": "user"}
            messages.append(reply | {"content": str(rng.choice(TEXTS))})
        agent["messages"] = messages
        chosen = [agent, agents[int(rng.integers(len(agents)))]] if kind == "parallel" else [agent]
        kinds.update([kind, f"level {agent['level']}"])
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(ask, chosen))
        for each, answer in zip(chosen, answers, strict=True):
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text
                return
            message = answer.json()["choices"][0]["message"]
            if rng.random() < 0.3:
                message.pop("reasoning_content", None)
            each["messages"] = [*each["messages"], message]


def play_group(endpoint, engine, tokenizer, rng, kinds):
    """A group of two episodes of one problem, as a rollout makes it. Returns it and the requests of each episode."""
    prompt, sampling = (
        tokenizer.prompt_ids([{"role": "user", "content": "Write about 3."}]),
        SamplingConfig(max_tokens=32),
    )
    requests = build_requests(prompt, 2, sampling, 0, Priority.SAMPLE, MAX_LEN)
    samples, episodes, untrained = [], [], []
    for index, request in enumerate(requests):
        # What the endpoint returns under the other model is not stored.
        episode = engine.call(endpoint.open, prompt, sampling, request, index, Priority.SAMPLE, lambda completion: None)
        with httpx.Client(
            base_url=endpoint.url, headers={"authorization": f"Bearer {episode.key}"}, timeout=30
        ) as client:
            play(client, "policy", rng, kinds)
        samples.append(agent_sample(episode.session, prompt, "completed", Score(1.0), 32))
        if trained := episode.session.trained:
            stored = len(trained[0].context) + len(samples[-1].completion.tokens)
            assert episode.session.packed_size([]) == stored
        untrained += [response for response in episode.session.responses if not response.is_trained]
        engine.call(endpoint.finish, episode)
        episodes.append(episode)
    group = Group(Problem("p", (), None), np.array(prompt, np.int32), tuple(samples))
    return share_prefix(group, [episode.session for episode in episodes]), episodes, untrained


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(100, 400), marks=pytest.mark.rest)], ids=["few", "many"]
)
def test_random_agents_train_as_each_response_alone(model_dir, seeds):
    """Loss, log-probs and gradients in float64, to 1e-10 of the summed magnitudes."""
    kinds, branched = Counter(), 0
    torch.manual_seed(0)
    model = qwen2(400, 2, 4, 2, 32, intermediate_dim=48, max_seq_len=MAX_LEN, tie_word_embeddings=True)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model, loss = model.double(), PolicyLoss(importance="tis", entropy_coef=0.01, environment_coef=0.05)
    for seed in seeds:
        rng, tokenizer = np.random.default_rng(seed), ChatTokenizer(model_dir, history=MODES[seed % 2])
        engine = RandomEngine(tokenizer, seed)
        endpoint = Endpoint(engine, tokenizer, AgentConfig())
        try:
            group, episodes, untrained = play_group(endpoint, engine, tokenizer, rng, kinds)
        finally:
            endpoint.close()
            engine.thread.stop()
        samples = []
        for episode, sample in zip(episodes, group.samples, strict=True):
            sent = Counter((tuple(prompt), tuple(ids)) for key, prompt, ids in engine.sent if key is episode)
            sent -= Counter((tuple(r.context.tolist()), tuple(r.completion.tokens.tolist())) for r in untrained)
            paths = [(ids, len(places)) for ids, places in paths_of(group, sample)] if sample.completion.turns else []
            if sample.completion.turns and not sample.completion.kept_prefix_lens:  # one path: each turn ends in it
                ids, start = paths[0][0], len(group.prompt_tokens)
                paths = [(ids[: start + stop], stop - begin) for begin, stop in sample.completion.turns]
            # Nothing was tokenized again: the tree holds what the engine was sent and what it answered.
            assert Counter((tuple(ids[:-count]), tuple(ids[-count:])) for ids, count in paths) == sent
            branched += bool(sample.completion.parents)
            if paths:
                turns = tuple(map(float, rng.normal(size=len(paths)).astype(np.float32)))
                advantage = float(np.float32(rng.normal()))
                own = dict(advantage=advantage, turn_advantages=turns if seed % 3 == 0 else (), in_loss=True)
                samples.append(type(sample)(sample.completion, sample.text, sample.outcome, **own))
        if not samples:
            continue
        groups = [Group(group.problem, group.prompt_tokens, tuple(samples))]
        aggregation = ["token", "sequence"][seed % 2]
        want = reference(model, groups, loss, aggregation, 0.9)
        rows, _ = pack(groups, 2 * MAX_LEN, aggregation, pad_id=2)
        assert_equal_to_plain(PackedPolicy(copy.deepcopy(model)), rows, groups, loss, want, 0.9)
    assert branched > len(seeds) / 2
    assert {"append", "edit", "cut", "drop", "system", "delegate", "parallel", "level 1", "level 2", "level 3"} <= {
        *kinds
    }
