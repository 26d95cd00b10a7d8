"""Environments of other projects with a real engine: one step of GRPO for each door, all against one server.

The policy is a tiny model that was warmed up to call a tool, with tools in its prompt.
"""

import json

import pytest

from helpers import recipe_runs as runs
from helpers.servers import Server, free_port
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.sampling.server_command import KEY_VARIABLE
from torchtune_ext.sampling.types import EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOM = '''
from torchtune_ext.tasks.tool_class import ToolClass

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


class Room:
    def reset(self, found, **row):
        self.found, self.looked = found, False

    def look(self) -> str:
        """Looks around."""
        self.looked = True
        return self.found

    def get_reward(self) -> float:
        return float(self.looked)


class Learned(ToolClass):
    def solution(self, problem):
        found = {"role": "tool", "name": "look", "content": problem.example["found"]}
        return [{"role": "assistant", "content": CALL}, found, {"role": "assistant", "content": "an egg"}]
'''
TEMPLATE = """{%- if tools -%}<|im_start|>tools
{%- for tool in tools -%}{{- tool.function.name -}}{%- endfor -%}<|im_end|>{%- endif -%}
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
task: {_component_: my_room.Learned, environment: my_room.Room, rows: rows.jsonl}
num_problems: 256
epochs: 1.0
batch_problems: 4
row_tokens: 1024
shape: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 128,
  max_position_embeddings: 1024, vocab_size: 400}
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, template: tools.jinja}
optimizer: {_component_: torch.optim.AdamW, lr: 5.0e-3}
"""
ROWS = [{"prompt": "Look around.", "found": "an egg"}] * 256
SUMS = [{"prompt": "2+2?", "reward_spec": {"ground_truth": "4"}, "answer": 4}]
WORDS = ["model_dir=warmup/model", "tokenizer.template=tools.jinja", "evaluation.task=null", "max_steps=1"]
LENGTHS = ["sampling.max_tokens=96", "engine.max_model_len=1024", "row_tokens=2048", "grader.workers=4"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    (folder / "my_room.py").write_text(ROOM)
    (folder / "tools.jinja").write_text(TEMPLATE)
    (folder / "warmup.yaml").write_text(WARMUP)
    for name, rows in (("rows", ROWS), ("sums", SUMS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs.run(folder, "warmup_sft", config="warmup.yaml")
    return folder


@pytest.fixture(scope="module")
def address(workspace):
    url = f"http://127.0.0.1:{free_port()}"
    config = EngineConfig(address=url, dtype="float32", max_model_len=1024, kv_cache_bytes=1 << 26)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, runs.SERVER_KEY)
        server = Server(str(workspace / "warmup" / "model"), config, workspace / "server.log", forks=True)
    try:
        server.wait()
        yield f"engine.address={url}"
    finally:
        server.kill()


def play(workspace, address, name, node):
    """One step of GRPO on a task; returns its groups."""
    assert "task: {_component_: letters.Letters}" in runs.CONFIG
    config = runs.CONFIG.replace("task: {_component_: letters.Letters}", f"task: {node}", 1)
    (workspace / f"{name}.yaml").write_text(config)
    runs.run(workspace, "grpo_full", f"output_dir={name}", *WORDS, *LENGTHS, address, config=f"{name}.yaml")
    return list(read_rollouts(rollout_paths(workspace / name)[1]))


def test_tool_class_tools_shown_called_and_rewarded(workspace, address):
    node = "{_component_: torchtune_ext.tasks.tool_class.ToolClass, environment: my_room.Room, rows: rows.jsonl}"
    groups = play(workspace, address, "room", node)
    tokenizer = ChatTokenizer(workspace / "warmup" / "model", template=str(workspace / "tools.jinja"))
    shown = "<|im_start|>toolslook<|im_end|><|im_start|>user\nLook around.<|im_end|><|im_start|>assistant\n"
    assert {tokenizer.decode_all(group.prompt_tokens) for group in groups} == {shown}
    assert all(group.problem.tools[0]["function"]["name"] == "look" for group in groups)
    samples = [sample for group in groups for sample in group.samples]
    assert all(sample.outcome.kind == "scored" for sample in samples)
    called = [sample for sample in samples if len(sample.completion.turns) > 1 and sample.score.reward == 1.0]
    assert len(called) > len(samples) / 2
    answer = "<|im_start|>tool\nan egg<|im_end|><|im_start|>assistant\n"
    for sample in called:
        (_, end), (start, _) = sample.completion.turns[:2]
        assert tokenizer.decode_all(sample.completion.tokens[end:start]) == answer
        assert sample.messages[1] == {"role": "tool", "name": "look", "content": "an egg"}


def test_a_game_of_skyrl_gym_is_played(workspace, address):
    pytest.importorskip("skyrl_gym", reason="skyrl-gym is not installed")
    node = "{_component_: torchtune_ext.tasks.skyrl_gym.SkyRLGym, environment: gsm8k_multi_turn, rows: sums.jsonl, max_turns: 2}"
    groups = play(workspace, address, "sums", node)
    over = [s for group in groups for s in group.samples if s.completion.finish_reason == "completed"]
    assert over and all(sample.score.parts["steps"] == 2 for sample in over)
    assert all("#### ANSWER" in sample.messages[1]["content"] for sample in over)


def test_a_game_of_textarena_is_played(workspace, address):
    pytest.importorskip("textarena", reason="textarena is not installed")
    node = "{_component_: torchtune_ext.tasks.textarena.TextArena, game: TowerOfHanoi-v0, options: {num_disks: 2}, seed: 1}"
    groups = play(workspace, address, "hanoi", node)
    over = [s for group in groups for s in group.samples if s.completion.finish_reason == "completed"]
    assert over and all("A: [2, 1]" in group.problem.messages[0]["content"] for group in groups)
    assert any(sample.score.parts["invalid_move"] for sample in over) and all(len(s.messages) > 1 for s in over)
