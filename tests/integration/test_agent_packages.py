"""Agents on four packages (examples/agents) with a real engine: tool calls, sampled ids, branches.

The policy is a tiny model that was warmed up to call the tool.
"""

import importlib.util
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from helpers import recipe_runs as runs
from helpers.servers import Server, free_port
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.sampling.server_command import KEY_VARIABLE
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.tasks.tool_calls import parse_tool_calls

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
pytestmark = [pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(1200)]

PRODUCTS = '''
import json

from torchtune_ext.tasks.task import Problem


def call(name, **arguments):
    text = '<tool_call>' + json.dumps({"name": name, "arguments": arguments}) + '</tool_call>'
    return {"role": "assistant", "content": text}


def tools(*names):
    return tuple({"type": "function", "function": {"name": name}} for name in names)


class Products:
    """Conversations of the agents; every fourth is of smolagents if it is installed."""

    def __init__(self, system=None):
        self.system = system

    def __len__(self):
        return 192

    def __getitem__(self, index):
        a, b = 2 + index % 8, 2 + index // 8 % 8
        question = {"role": "user", "content": f"What is {a} * {b}?"}
        if self.system is None or index % 4:
            return Problem(f"product-{index}", (question,), (a, b), tools=tools("multiply"))
        messages = ({"role": "system", "content": self.system}, question | {"content": f"New task:\\n{question['content']}"})
        return Problem(f"product-{index}", messages, (a, b), tools=tools("multiply", "final_answer"))

    def solution(self, problem):
        a, b = problem.answer
        first = call("multiply", a=a, b=b)
        if len(problem.messages) == 1:
            return [first, {"role": "tool", "content": str(a * b)}, {"role": "assistant", "content": f"It is {a * b}."}]
        return [first, {"role": "user", "content": f"Observation:\\n{a * b}"}, call("final_answer", answer=str(a * b))]
'''
TEMPLATE = """{%- if tools -%}<|im_start|>tools
{%- for tool in tools -%}{{- tool.function.name + ' ' -}}{%- endfor -%}<|im_end|>{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
    {%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
WARMUP = """
output_dir: warmup
device: cpu
dtype: float32
task: {_component_: products.Products, system: %s}
num_problems: 192
batch_problems: 4
row_tokens: 4096
shape: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 128,
  max_position_embeddings: 4096, vocab_size: 800}
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, template: tools.jinja}
optimizer: {_component_: torch.optim.AdamW, lr: 5.0e-3}
"""
ROWS = ["task._component_=torchtune_ext.tasks.jsonl.Jsonl", "evaluation.task=null"]
MODEL = ["model_dir=warmup/model", "tokenizer.template=tools.jinja", "grader.workers=2"]
LENGTHS = ["sampling.max_tokens=64", "engine.max_model_len=4096", "row_tokens=4096"]


def smolagents_system():
    """Return the system message of the agent on smolagents: 3,400 characters."""
    from smolagents import OpenAIModel, ToolCallingAgent

    spec = importlib.util.spec_from_file_location("with_smolagents", EXAMPLES / "with_smolagents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return ToolCallingAgent([module.multiply], OpenAIModel("policy", api_key="-")).system_prompt


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "products.py").write_text(PRODUCTS)
    (folder / "tools.jinja").write_text(TEMPLATE)
    system = smolagents_system() if importlib.util.find_spec("smolagents") else None
    (folder / "warmup.yaml").write_text(WARMUP % json.dumps(system))
    rows = [{"question": f"What is {a} * {b}?", "answer": a * b} for a in range(2, 10) for b in range(2, 5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(runs.CONFIG)
    runs.run(folder, "warmup_sft", config="warmup.yaml", timeout=800)
    return folder


@pytest.fixture(scope="module")
def address(workspace):
    url = f"http://127.0.0.1:{free_port()}"
    config = EngineConfig(address=url, dtype="float32", max_model_len=4096, kv_cache_bytes=1 << 26)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, runs.SERVER_KEY)
        server = Server(str(workspace / "warmup" / "model"), config, workspace / "server.log")
    try:
        server.wait()
        yield f"engine.address={url}"
    finally:
        server.kill()


def play(workspace, address, name, steps, agent, path="rows.jsonl"):
    """Train for some steps; return (prompt ids, sample) of all samples."""
    words = [f"output_dir={name}", f"max_steps={steps}", f"task.{agent}", f"task.path={path}"]
    runs.run(workspace, "grpo_full", *ROWS, *MODEL, *LENGTHS, address, *words, timeout=800)
    files = rollout_paths(workspace / name)
    assert len(files) == steps
    return [(g.prompt_tokens, s) for file in files.values() for g in read_rollouts(file) for s in g.samples]


def has_call(text):
    try:
        return bool(parse_tool_calls(text))
    except ValueError:
        return False


def sampled_turns(tokenizer, sample):
    """Return the texts of the turns, which are those of their stored ids."""
    turns = [m["content"] for m in sample.messages if m["role"] == "assistant" and m.get("sampled") != "no"]
    spans = sample.completion.turns
    assert [tokenizer.decode(sample.completion.tokens[start:stop].tolist()) for start, stop in spans] == turns
    return turns


def forks(prompt, completion):
    """Return for each turn whether its context does not extend the turn before."""
    if not completion.parents:
        return [False] * len(completion.turns)
    result, length, end = [], len(prompt), 0
    for index, (kept, parent, (_, stop)) in enumerate(
        zip(completion.kept_prefix_lens, completion.parents, completion.turns, strict=True)
    ):
        result.append(index > 0 and (kept, parent) != (length, index - 1))
        length, end = kept + stop - end, stop
    return result


@pytest.mark.parametrize(
    ("package", "steps"),
    [("openai", 1), ("openai_agents", 3), ("langgraph", 1)],
    ids=["openai", "openai-agents", "langgraph"],
)
def test_package_agent_extends_sampled_ids(workspace, address, package, steps):
    module = {"openai_agents": "agents"}.get(package, package)
    pytest.importorskip(module, reason=f"{package.replace('_', '-')} is not installed")
    tokenizer = ChatTokenizer(workspace / "warmup" / "model", template=str(workspace / "tools.jinja"))
    called = 0
    samples = play(workspace, address, package, steps, f"agent=with_{package}.run")
    for prompt, sample in samples:
        assert sample.score is not None, sample.outcome
        assert tokenizer.decode_all(prompt).startswith("<|im_start|>toolsmultiply <|im_end|><|im_start|>user\nWhat is")
        # This template renders the text of a message without its calls. So a history that is
        # tokenized again would be a branch.
        assert not sample.completion.parents
        turns, completion = sampled_turns(tokenizer, sample), sample.completion
        called += len(turns) > 1 and has_call(turns[0])
        # After the question and the first turn.
        results = "".join(
            f"<|im_start|>tool\n{m['content']}<|im_end|>" if m["role"] == "tool" else "<|im_start|>assistant\n"
            for m in sample.messages[2:]
        )
        between = [completion.tokens[end:start] for (_, end), (start, _) in pairwise(completion.turns)]
        assert "".join(map(tokenizer.decode_all, between)) == results
    assert called > len(samples) / 2
    print(f"{package}: {called} of {len(samples)} samples with calls, no branch")


def test_smolagents_branches_after_calls_only(workspace, address):
    """It returns calls as text, or drops a call that failed: an edited history."""
    pytest.importorskip("smolagents", reason="smolagents is not installed")
    tokenizer = ChatTokenizer(workspace / "warmup" / "model", template=str(workspace / "tools.jinja"))
    samples = play(workspace, address, "smolagents", 3, "agent=with_smolagents.run")
    called, branches = 0, 0
    for prompt, sample in samples:
        assert sample.score is not None, sample.outcome
        assert "toolsmultiply final_answer" in tokenizer.decode_all(prompt)
        turns = sampled_turns(tokenizer, sample)
        called += sum(map(has_call, turns))
        # After max_steps=3 the agent asks for an answer with another system message.
        expected = [index > 0 and (has_call(turns[index - 1]) or index == 3) for index in range(len(turns))]
        assert forks(prompt, sample.completion) == expected
        branches += sum(expected)
    assert called > len(samples) / 2
    print(f"smolagents: {called} calls, {branches} branches in {len(samples)} samples")


VERIFIERS = os.environ.get("TORCHTUNE_EXT_VERIFIERS", "")
TASKSET = """
import verifiers.v1 as vf


class ProductsData(vf.TaskData):
    answer: int


class ProductsTask(vf.Task[ProductsData]):
    @vf.reward(weight=1.0)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) + self.data.answer)


class Products(vf.Taskset[ProductsTask, vf.TasksetConfig]):
    def load(self):
        for a in range(2, 10):
            yield ProductsTask(ProductsData(prompt=f"What is {a} * 7?", answer=7 * a), self.config.task)


__all__ = ["Products"]
"""


@pytest.mark.skipif(not VERIFIERS, reason="TORCHTUNE_EXT_VERIFIERS names no Python with verifiers and uv")
def test_verifiers_environment_rewards_episodes(workspace, address):
    (workspace / "seven.py").write_text(TASKSET)
    rows = [{"question": "-", "answer": None, "index": index} for index in range(8)]
    (workspace / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = play(workspace, address, "verifiers", 1, f"command=[{VERIFIERS},with_verifiers.py,seven]", "tasks.jsonl")
    tokenizer = ChatTokenizer(workspace / "warmup" / "model", template=str(workspace / "tools.jinja"))
    for prompt, sample in samples:
        (turn,) = sampled_turns(tokenizer, sample)
        number = int(tokenizer.decode_all(prompt).split("What is ")[1][0])
        assert sample.score.reward == len(turn) + 7 * number
