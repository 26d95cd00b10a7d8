"""SmolLM2-135M learns to use the tool of examples/agents/with_openai.py; 16 to 18 minutes a seed on two cores.

After a short warm-up a few calls are right. The held-out products have other factors.
"""

import os
import shutil
import subprocess
import sys

import pytest

from helpers.newcomer import typed
from helpers.tiny_runs import metrics

PRODUCTS = '''
import random

import with_openai
from torchtune_ext.tasks.task import Problem

TOOLS = ({"type": "function", "function": with_openai.MULTIPLY},)
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": %d, "b": %d}}</tool_call>'


class Products:
    """Products of two-digit numbers; the first factors of held-out products are the multiples of 7."""

    run_agent = staticmethod(with_openai.run)

    def __init__(self, held_out=False, count=10_000):
        self.held_out, self.count = held_out, count
        self.factors = [n for n in range(11, 100) if (n % 7 == 0) == held_out]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = random.Random(index)
        a, b = draw.choice(self.factors), draw.randint(11, 99)
        question = {"role": "user", "content": f"What is {a} * {b}?"}
        name = "held-out" if self.held_out else "product"
        return Problem(f"{name}-{index}", (question,), a * b, {"a": a, "b": b}, TOOLS)

    def solution(self, problem):
        call = {"role": "assistant", "content": CALL % (problem.example["a"], problem.example["b"])}
        result = {"role": "tool", "content": str(problem.answer)}
        return [call, result, {"role": "assistant", "content": f"It is {problem.answer}."}]
'''
COMMON = """
device: cpu
dtype: auto
row_tokens: 2048
"""
WARMUP = """
output_dir: runs/warmup
model_dir: models/SmolLM2-135M-Instruct
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, template: tools.jinja}
task: {_component_: products.Products}
num_problems: 24
batch_problems: 8
optimizer: {_component_: torch.optim.AdamW, lr: 5.0e-5, betas: [0.9, 0.98], weight_decay: 0.0}
schedule: {decay: cosine, warmup: 2}
"""
GRPO = """
output_dir: runs/grpo
model_dir: runs/warmup/model
model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}", template: tools.jinja}
task: {_component_: products.Products}
evaluation: {every: 8, task: {_component_: products.Products, held_out: true, count: 96}}
grader: {workers: 16}
preset: grpo
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 2.0e-5, betas: [0.9, 0.98], weight_decay: 0.0}
schedule: {decay: linear, warmup: 2}
max_steps: 8
prompts_per_step: 8
samples_per_prompt: 8
updates_per_step: 2
checkpoints: {every: 8, keep_last: 1}
sampling: {max_tokens: 40}
engine: {max_model_len: 512, kv_cache_bytes: 268435456}
"""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_agent_raises_held_out_reward(repo_root, tmp_path, seed):
    env = os.environ | {"VENV": sys.prefix}
    made = subprocess.run([repo_root / "scripts" / "pretrained.sh"], env=env, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr)
    (tmp_path / "models").symlink_to(repo_root / "models")
    for name in ("with_openai.py", "tools.jinja"):
        shutil.copy(repo_root / "examples" / "agents" / name, tmp_path)
    (tmp_path / "products.py").write_text(PRODUCTS)
    (tmp_path / "warmup.yaml").write_text(WARMUP + COMMON)
    (tmp_path / "grpo.yaml").write_text(GRPO + COMMON)
    threads = len(os.sched_getaffinity(0))
    for recipe, config in (("warmup_sft", "warmup.yaml"), ("grpo_full", "grpo.yaml")):
        typed(tmp_path, "tune", "run", recipe, "--config", config, f"seed={seed}", timeout=6900, threads=threads)

    evaluated = [line for line in metrics(tmp_path / "runs" / "grpo") if "eval/reward_sampled" in line]
    assert evaluated[-1]["eval/low"] > evaluated[0]["eval/high"], evaluated
