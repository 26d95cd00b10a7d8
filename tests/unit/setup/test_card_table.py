"""The tables of docs/how_to/adapters.md and benchmarks/results/one_gpu.md: what fits on one GPU, by the planner."""

import re
from copy import copy
from dataclasses import replace

import pytest

from helpers.stand_ins import nf4_in_one_piece
from torchtune_ext.policy.memory import GIB
from torchtune_ext.settings.config import read_config
from torchtune_ext.setup.dry_run import make_plan, parse_machine

LORA = "grpo/qwen2_5_7B_lora_24G"
# The config of each row, and what it changes.
ROWS = {
    "1.5B LoRA": (LORA, ["model_dir=models/Qwen2.5-1.5B-Instruct"]),
    "3B LoRA": (LORA, ["model_dir=models/Qwen2.5-3B-Instruct"]),
    "Qwen3-4B LoRA": ("grpo/qwen3_4B_lora_24G", []),
    "7B LoRA": (LORA, []),
    "7B QLoRA": (LORA, ["model.quantize_base=true"]),
    "14B LoRA": (LORA, ["model_dir=models/Qwen2.5-14B-Instruct"]),
    "1.5B, all weights": ("grpo/qwen2_5_3B_gsm8k", ["model_dir=models/Qwen2.5-1.5B-Instruct"]),
}
LENGTHS = [
    "row_tokens=4096",
    "engine.max_num_seqs=64",
    "engine.max_model_len=2048",
    "engine.max_num_batched_tokens=2048",
]
SHARED = ["sampling.max_tokens=1024", "activation_checkpointing=true", "engine.devices=null", "engine.sleep=true"]


def plan_with_margin(plan, size):
    """Return the plan with the highest utilization that leaves 10% of a GPU of `size` GB free, or None."""
    for percent in range(99, 4, -1):
        cfg = copy(plan.cfg)
        cfg.engine = replace(cfg.engine, gpu_memory_utilization=percent / 100)
        one = replace(plan, cfg=cfg, machine=parse_machine(f"1x{size}")).with_trainers()
        if one.fits and one.device_bytes <= 0.9 * one.machine.gpu_bytes:
            return one
    return None


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", ROWS)
def test_table_of_one_gpu_is_the_planners(repo_root, row):
    page = (repo_root / "docs" / "how_to" / "adapters.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", page, re.MULTILINE)
    config, words = ROWS[row]
    plan, _ = make_plan(read_config(config, [*words, *LENGTHS, *SHARED], None), parse_machine("1x24"))
    plans = [plan_with_margin(plan, size) for size in (16, 24, 48)]
    cells = [f"{round(one.cached_tokens / 1000):,}" if one else "no" for one in plans]
    cells.append(f"{next(one.host_bytes for one in plans if one) / GIB:.0f} GiB")
    assert found == " | ".join(cells)


# Rows of the results page: config, its changes, and tokens of a sequence.
SMALLEST = {
    "Qwen2.5 1.5B | QLoRA": (LORA, ["model_dir=models/Qwen2.5-1.5B-Instruct", "model.quantize_base=true"], 2048),
    "Qwen2.5 1.5B | LoRA": (LORA, ["model_dir=models/Qwen2.5-1.5B-Instruct"], 2048),
    "Qwen2.5 3B | LoRA": (LORA, ["model_dir=models/Qwen2.5-3B-Instruct"], 2048),
    "Qwen2.5 7B | QLoRA": (LORA, ["model.quantize_base=true"], 2048),
    "Qwen2.5 7B | LoRA": (LORA, [], 2048),
    "Qwen3 8B | LoRA": (LORA, ["model_dir=models/Qwen3-8B"], 2048),
    "Qwen2.5 14B | QLoRA": (LORA, ["model_dir=models/Qwen2.5-14B-Instruct", "model.quantize_base=true"], 2048),
    "Qwen2.5 14B | LoRA": (LORA, ["model_dir=models/Qwen2.5-14B-Instruct"], 2048),
    "Qwen2.5 32B | LoRA": (LORA, ["model_dir=models/Qwen2.5-32B-Instruct"], 6144),
    "Llama 3.1 8B | LoRA": (LORA, ["model_dir=models/Llama-3.1-8B-Instruct"], 20480),
    "Qwen3 1.7B | all weights": ("grpo/qwen2_5_3B_gsm8k", ["model_dir=models/Qwen3-1.7B"], 3072),
    "Qwen2.5 7B | all weights": ("grpo/qwen2_5_3B_gsm8k", ["model_dir=models/Qwen2.5-7B-Instruct"], 2048),
}


def smallest_gpu(config, changes, length):
    """Return the GB of the smallest GPU of which a tenth stays free, with a KV cache of 32,768 tokens."""
    lengths = [f"row_tokens={max(4096, length)}", f"engine.max_model_len={length}", *LENGTHS[1:2], *LENGTHS[3:]]
    plan, _ = make_plan(read_config(config, [*changes, *lengths, *SHARED], None), parse_machine("1x24"))
    for size in range(4, 200):
        one = plan_with_margin(plan, size)
        if one and one.cached_tokens >= 32_768:
            return size
    raise AssertionError("no GPU is large enough")


@pytest.mark.rest
@pytest.mark.timeout(900)
@pytest.mark.parametrize("row", SMALLEST)
def test_smallest_gpu_of_results_is_planners(repo_root, row):
    page = (repo_root / "benchmarks" / "results" / "one_gpu.md").read_text(encoding="utf-8")
    config, changes, length = SMALLEST[row]
    (found,) = re.findall(rf"^\| {re.escape(row)} \| {length:,} \| (\d+) GB \|", page, re.MULTILINE)
    with nf4_in_one_piece():
        assert int(found) == smallest_gpu(config, changes, length)
