"""The tiny run learns: warm-up, then GRPO with three seeds; about half an hour on two cores."""

import subprocess
import sys

import pytest

from torchtune_ext.telemetry.metrics import read_metrics

SEEDS = (0, 1, 2)
RISE = 0.20  # absolute, on 256 held-out puzzles, sampled and greedy


def tune(folder, *args):
    subprocess.run([sys.executable, "-m", "torchtune_ext", "run", *args], cwd=folder, check=True, timeout=1800)


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tune(folder, "warmup_sft", "--config", "warmup/tiny")
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", SEEDS)
def test_accuracy_rises(warm, seed):
    tune(warm, "grpo_full", "--config", "grpo/tiny", f"seed={seed}", f"output_dir=grpo_{seed}")
    lines = read_metrics(warm / f"grpo_{seed}" / "metrics.jsonl")
    first, last = lines[0], lines[-1]
    for name in ("eval/accuracy_sampled", "eval/accuracy_greedy"):
        assert last[name] >= first[name] + RISE, (name, first[name], last[name])
    assert max(line.get("mismatch/mean_abs", 0.0) for line in lines) < 1e-4
