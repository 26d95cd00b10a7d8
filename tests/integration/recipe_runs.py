"""Runs recipes as a user does, on a random model and a task whose reward always varies."""

import os
import subprocess
import sys
import time
from pathlib import Path

from torchtune_ext.policy.scratch import Shape, make_tokenizer, write_model
from torchtune_ext.telemetry.metrics import CLOCK_PREFIXES, read_metrics

TASK = '''
import hashlib
from torchtune_ext.tasks.task import Problem, Score

class Letters:
    """Asks for nothing in particular and rewards what the text hashes to: signal in every group, whatever the model."""

    def __init__(self, count=64):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        return Problem(f"letters-{index}", ({"role": "user", "content": f"Write about {index}. " + "Go on. " * (index % 5)},), index)

    def grade(self, problem, text):
        value = hashlib.sha256(f"{problem.answer}/{text}".encode()).digest()[0] / 255
        return Score(value, {"hash": value})

    def solution(self, problem):
        return "x"


class Generous(Letters):
    def grade(self, problem, text):
        return Score(1.0, {})
'''

CONFIG = """
output_dir: ???
model_dir: model
device: cpu
dtype: float32
model: {_component_: torchtune_ext.policy.scratch.qwen2_from_config, model_dir: "${model_dir}"}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: letters.Letters}
eval_task: {_component_: letters.Letters, count: 4}
preset: grpo
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3}
max_steps: 3
prompts_per_step: 4
samples_per_prompt: 4
updates_per_step: 2
row_tokens: 256
max_mismatch: 1.0e-4
sampling: {max_tokens: 12}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
eval_every: 2
checkpoints: {every: 1}
"""


def make_workplace(folder: Path, **larger: int) -> Path:
    """A folder with a model, a task and a config, to run recipes in."""
    text = ["Write about something. Go on. " * 3 + "The quick brown fox jumps over the lazy dog.\n"] * 8
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, **larger}
    shape = Shape(num_key_value_heads=1, max_position_embeddings=256, vocab_size=400, **sizes)
    write_model(folder / "model", make_tokenizer(text, ["x"], [], 400), shape, seed=3)
    (folder / "letters.py").write_text(TASK)
    (folder / "run.yaml").write_text(CONFIG)
    return folder


def command(recipe: str, *args: str, ranks: int = 1, config: str = "run.yaml") -> list[str]:
    launch = ["--nproc_per_node", str(ranks)] if ranks > 1 else []
    return [sys.executable, "-m", "torchtune_ext", "run", *launch, recipe, "--config", config, *args]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(
    folder: Path,
    recipe: str,
    *args: str,
    ranks: int = 1,
    ok: bool = True,
    timeout: float = 240,
    config: str = "run.yaml",
) -> str:
    """Runs a recipe to its end and returns what it printed. `ok`: whether it must succeed."""
    done = subprocess.run(
        command(recipe, *args, ranks=ranks, config=config),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    output = done.stdout + done.stderr
    assert (done.returncode == 0) == ok, output[-6000:]
    return output


def wait_for_lines(run_dir: Path, lines: int, process: subprocess.Popen, seconds: float = 120) -> None:
    """Waits until the metrics of a run have so many lines."""
    deadline = time.monotonic() + seconds
    while not (run_dir / "metrics.jsonl").exists() or (run_dir / "metrics.jsonl").read_text().count("\n") < lines:
        assert process.poll() is None, f"the run has ended with status {process.returncode}"
        assert time.monotonic() < deadline, f"no {lines} lines of metrics within {seconds:g} s"
        time.sleep(0.02)


def metrics(run_dir: Path) -> list[dict[str, float]]:
    """The metrics of a run, one record a step, without what the clock decides."""
    return [
        {k: v for k, v in line.items() if not k.startswith(CLOCK_PREFIXES)}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]
