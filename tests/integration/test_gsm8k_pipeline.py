"""GSM8K through the whole recipe: all 1,319 test questions and some of the training set, real vLLM, the real Qwen vocabulary.

The model is a random Qwen3. It never answers right, so a user's subclass pays for length as well; that gives signal.
"""

import gzip
import json
from collections import Counter

import pytest
import torch

from helpers import recipe_runs as runs

pytest.importorskip("math_verify")

from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.cli.cli import main
from torchtune_ext.grading.self_check import NUM_TRIED_PROBLEMS
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.tasks.math import Math

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]
QUESTIONS, STEPS, PROMPTS, SAMPLES, TOKENS = 1319, 2, 4, 4, 2  # sampling from 151,936 logits is what costs time

REWARD = '''
import json

from torchtune_ext.tasks.math import Math
from torchtune_ext.tasks.task import Score


class Wordy(Math):
    """GSM8K that pays for characters, too, and notes what it has graded."""

    def grade(self, problem, text):
        score = super().grade(problem, text)
        with open("graded.jsonl", "a") as file:
            file.write(json.dumps([problem.id, problem.answer, text, score.reward]) + "\\n")
        return Score(score.reward + len(text) / 100, {**score.parts, "characters": float(len(text))})


@parse
def recipe_main'''

CONFIG = """
output_dir: run
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: Wordy, dataset: gsm8k, path: TRAIN}
evaluation: {task: {_component_: Wordy, dataset: gsm8k, split: test, path: TEST}}
grader: {workers: 2}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
row_tokens: 1024
max_mismatch: 1.0e-4
engine: {dtype: float32, max_model_len: 512, kv_cache_bytes: 33554432}
checkpoints: {every: 1}
"""


def write_qwen3(folder, data_dir) -> None:
    """A random Qwen3 of two layers with Qwen's 151,936 rows of embeddings, its vocabulary and its chat template."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        intermediate_size=128, max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=151645,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "rope_theta": 1e6}))
    packed = (data_dir / "tokenizer-qwen" / "tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text((data_dir / "chat-templates" / "qwen3.jinja").read_text())


@pytest.fixture(scope="module")
def workspace(data_dir, tmp_path_factory):
    """A folder in which a run has ended well."""
    train, test = data_dir / "gsm8k" / "train.jsonl", data_dir / "gsm8k" / "test.jsonl"
    if not (train.is_file() and test.is_file()):
        pytest.skip(f"no GSM8K in {data_dir}")
    folder = tmp_path_factory.mktemp("gsm8k")
    write_qwen3(folder / "model", data_dir)
    main(["cp", "grpo_full", str(folder / "my_grpo.py")])
    recipe = (folder / "my_grpo.py").read_text()
    assert recipe.count("@parse\ndef recipe_main") == 1
    (folder / "my_grpo.py").write_text(recipe.replace("@parse\ndef recipe_main", REWARD.strip()))
    (folder / "run.yaml").write_text(CONFIG.replace("TRAIN", str(train)).replace("TEST", str(test)))
    sizes = [
        f"max_steps={STEPS}",
        f"prompts_per_step={PROMPTS}",
        f"samples_per_prompt={SAMPLES}",
        f"sampling.max_tokens={TOKENS}",
    ]
    runs.run(folder, "my_grpo.py", *sizes, timeout=500)
    return folder


def graded(workspace):
    """What was graded, without the solutions that are graded before the run begins."""
    return [json.loads(line) for line in (workspace / "graded.jsonl").read_text().splitlines()][NUM_TRIED_PROBLEMS:]


def test_gsm8k_every_question_is_sampled_and_graded(workspace, data_dir):
    counts = Counter(problem for problem, *_ in graded(workspace))
    test = {name: count for name, count in counts.items() if "-test-" in name}
    # Four times each: sampled and greedy, before the first step and after the last.
    assert len(test) == QUESTIONS and set(test.values()) == {4}
    train = {name: count for name, count in counts.items() if "-train-" in name}
    assert len(train) == STEPS * PROMPTS and set(train.values()) == {SAMPLES}
    gold = Math("gsm8k", str(data_dir / "gsm8k" / "test.jsonl"), split="test")
    answers = {gold[i].id: gold[i].answer for i in range(len(gold))}
    assert {name: answer for name, answer, *_ in graded(workspace) if "-test-" in name} == answers


def test_gsm8k_logprobs_match_and_weights_change(workspace):
    lines = runs.metrics(workspace / "run")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    for line in lines[1:]:
        assert line["mismatch/mean_abs"] < 1e-4 and line["canary/mean_abs"] < 1e-4
        assert line["groups/used"] == PROMPTS and line["optim/grad_norm"] > 0 and line["reward/std"] > 0
    before = load_file(workspace / "model" / "model.safetensors")
    after = load_file(workspace / "run" / "checkpoints" / f"step_{STEPS:06d}" / "model-00001-of-00001.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys() and moved == before.keys()


def test_gsm8k_prompts_equal_transformers_chat_template(workspace, data_dir):
    theirs, ours = AutoTokenizer.from_pretrained(workspace / "model"), ChatTokenizer(workspace / "model")

    def expected(problem):
        return theirs.apply_chat_template(list(problem.messages), add_generation_prompt=True, return_dict=False)

    test = Math("gsm8k", str(data_dir / "gsm8k" / "test.jsonl"), split="test")
    for index in range(QUESTIONS):
        assert ours.prompt_ids(list(test[index].messages)) == expected(test[index])
    for groups in map(read_rollouts, rollout_paths(workspace / "run").values()):
        for group in groups:
            assert group.prompt_tokens.tolist() == expected(group.problem)
            for sample in group.samples:
                assert sample.text == theirs.decode(sample.completion.tokens, skip_special_tokens=True)
