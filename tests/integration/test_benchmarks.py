"""Benchmarks that take a GPU or half an hour, tried in small: that every part of them runs, not what it measures."""

import importlib.util
import subprocess
import sys

import pytest
import step
import torch
import turns_trl

from helpers import recipe_runs as runs

pytestmark = [pytest.mark.slow, pytest.mark.rest, pytest.mark.timeout(900)]


def script(repo_root, name, *args):
    command = [sys.executable, str(repo_root / "benchmarks" / name), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("| ", "### "))]


def test_fp8_gpu_in_small(repo_root):
    """It ends with status 1 if a case fails, and has a row for each."""
    lines = script(repo_root, "fp8_gpu.py", "--smoke")
    rows = [row for row in lines if row.startswith("| qwen")]
    assert {"| qwen3_8b |", "| qwen2_5_32b |"} <= {" ".join(row.split()[:3]) for row in rows}
    # 6 matrices of activations in 2 forms, 4 of weights; 3 GEMMs of 4 layers; 4 layers, two ways to save; 1 block, once compiled
    assert len(rows) == 2 * (2 * 3 * 2 + 4 + 2 * 3 * 4 + 2 * 2 * 4 + 2 + 1) and not [r for r in rows if "skipped" in r]
    tables = [line for line in lines if line.startswith("### ")]
    assert len(tables) == 7 and all("smoke run, not a measurement" in line for line in tables)


def test_precision_flow_in_small(repo_root, tmp_path):
    """Two real engines and a hardly trained model: every table has its rows, and same rows give the same log-probs."""
    few = ("num_problems=320", "schedule.warmup=2", f"output_dir={tmp_path}/warmup")
    runs.run(tmp_path, "warmup_sft", *few, config="warmup/tiny_fp8")
    (tmp_path / "warmup" / "done").touch()
    lines = script(repo_root, "precision_flow.py", "--out", str(tmp_path), "--parts", "mismatch", "--questions", "2")
    table = [line.split(" | ") for line in lines]
    kinds = [tuple(cells[:3]) for cells in table if cells[0] in ("| short", "| long", "| run-on")]
    assert len(kinds) == 3 * 2 * 2 + 3 * 2
    without_reward = [line for line in lines if "nan" in line]  # such a model is never right, and GRPO has no gradient
    assert all(line.startswith(("| bf16 |", "| fp8")) for line in without_reward), without_reward
    floor = next(cells for cells in table if cells[:3] == ["| run-on", "bf16", "bf16"])
    assert int(floor[3].replace(",", "")) == 2 * 8 * 200
    assert "| same rows, with gradient | 0.0 | 0.00 ± 0.00 |" in lines


def test_step_in_small(repo_root):
    """Each way has its row, with the tokens that go through its layers; a way that cannot be compared is named."""
    small = ("--shapes", "30/1", "12/4", "--row-tokens", "200", "--repeats", "1")
    lines = script(repo_root, "step.py", *small)
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]
    tokens = {(cells[0], cells[1]): int(cells[2].replace(",", "")) for cells in table}
    # Completions of one token are labels, but no inputs: 4 groups of 16.
    assert tokens["30/1, 4 groups", "packed"] == tokens["30/1, 4 groups", "dense"] == 4 * 30
    assert tokens["30/1, 4 groups", "repeated"] == 4 * 16 * 30
    ways = ["packed", "repeated", "dense"]
    if importlib.util.find_spec("trl"):
        ways += ["trl", "trl_labels"]
        assert tokens["30/1, 4 groups", "trl"] == 4 * 16 * 31  # the last token, too
    assert list(tokens) == [(shape, way) for shape in ("30/1, 4 groups", "12/4, 2 groups") for way in ways]


def test_step_refuses_to_time_another_computation(tmp_path, monkeypatch):
    """Completions that see each other are a mask's usual mistake."""
    model = step.make_model(tmp_path / "model", step.SMALL)
    case = step.Case(model, step.make_groups(12, 4, 200), 200, step.CPU, torch.float64)
    step.differences(step.make_variants(["dense"], case), case.dtype)
    monkeypatch.setattr(step, "whole_mask", lambda row: torch.ones(1, *2 * row.tokens_T.shape, dtype=torch.bool).tril())
    with pytest.raises(RuntimeError, match="gradient of 'dense' differs"):
        step.differences(step.make_variants(["dense"], case), case.dtype)


def test_turns_trl_check_catches_altered_environment_tokens():
    """Of two episodes one ends with its first turn; behind the other's turn stand two tokens of the game."""
    episodes = []
    turns_trl.follow(episodes, [[1, 2], [1, 2]], [[3, 4], [5, 4]])
    turns_trl.follow(episodes, [[1, 2, 5, 4, 6, 7]], [[8, 4]])
    batch = {
        "prompt_ids": torch.tensor([[0, 1, 2], [0, 1, 2]]),
        "prompt_mask": torch.tensor([[0, 1, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[3, 4, 0, 0, 0, 0], [5, 4, 6, 7, 8, 4]]),
        "completion_mask": torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]]),
    }
    assert turns_trl.differing(episodes, batch) == 0
    for name, place, value in (("completion_ids", (1, 4), 9), ("tool_mask", (1, 2), 1), ("completion_mask", (1, 5), 0)):
        wrong = batch[name].clone()
        wrong[place] = value
        assert turns_trl.differing(episodes, batch | {name: wrong}) == 1, name
