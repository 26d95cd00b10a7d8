"""The table of docs/how_to/adapters.md: what fits on one GPU, by the planner."""

import re
from copy import copy
from dataclasses import replace

import pytest

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
