"""What README and docs/how_to show, typed as it stands, raises the reward: some minutes on two cores."""

import os
import statistics
import subprocess
import sys

import pytest

from helpers.newcomer import typed, walk
from helpers.own_files import shown_commands, shown_files, write_files
from helpers.tiny_runs import metrics

STEPS = 10  # so many steps at the beginning are compared with as many at the end


@pytest.mark.timeout(3600)
def test_newcomer_reward_rises_beyond_its_noise(repo_root, tmp_path):
    printed = walk(repo_root / "docs" / "how_to" / "reward_function.md", tmp_path)
    lines = metrics(tmp_path / "runs" / "mine" / "grpo")
    assert [line["step"] for line in lines] == list(range(61)), printed["my_run.yaml"][-2000:]

    # On the 300 held-out sums, the 95% intervals before and after do not touch.
    evaluated = [line for line in lines if "eval/reward_sampled" in line]
    assert evaluated[-1]["eval/low"] > evaluated[0]["eval/high"], evaluated

    # Of what is trained on, a step has other sums than the one before. The difference of two means of so many steps, each with
    # the scatter of the steps around it, is more than three times its standard error.
    rewards = [line["reward/mean"] for line in lines[1:]]
    first, last = rewards[:STEPS], rewards[-STEPS:]
    error = ((statistics.variance(first) + statistics.variance(last)) / STEPS) ** 0.5
    assert statistics.fmean(last) - statistics.fmean(first) > 3 * error, (first, last)


# A processor without bfloat16 takes several times as long as the 7.5 minutes of README.md.
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_newcomer_readme_run_raises_accuracy_without_warnings(repo_root, tmp_path, seed):
    env = os.environ | {"VENV": sys.prefix}
    made = subprocess.run([repo_root / "scripts" / "pretrained.sh"], env=env, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(made.stderr)
    (tmp_path / "models").symlink_to(repo_root / "models")
    pages = repo_root / "docs" / "how_to" / "dataset.md", repo_root / "README.md"
    write_files({name: text for page in pages for name, text in shown_files(page).items()}, tmp_path)
    typed(tmp_path, "python", "make_rows.py")
    *first, run = shown_commands(pages[1], "tune cp -n grpo/smollm2_jsonl")
    printed = [typed(tmp_path, *words) for words in first]
    printed.append(typed(tmp_path, *run, f"seed={seed}", timeout=6900, threads=len(os.sched_getaffinity(0))))
    assert "warning" not in printed[-1].lower(), printed[-1]

    evaluated = [line for line in metrics(tmp_path / "runs" / "smollm2" / "jsonl") if "eval/reward_sampled" in line]
    assert evaluated[-1]["eval/low"] > evaluated[0]["eval/high"], evaluated
