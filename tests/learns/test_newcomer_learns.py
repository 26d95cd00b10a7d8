"""A newcomer who types what docs/custom_reward.md says, and no more, sees the reward rise: some minutes on two cores."""

import statistics

import pytest
from newcomer import walk
from tiny_runs import metrics

STEPS = 10  # so many steps at the beginning are compared with as many at the end


@pytest.mark.timeout(3600)
def test_the_reward_rises_by_more_than_its_noise(repo_root, tmp_path):
    printed = walk(repo_root / "docs" / "custom_reward.md", tmp_path)
    lines = metrics(tmp_path / "runs" / "mine" / "grpo")
    assert [line["step"] for line in lines] == list(range(61)), printed["my_run.yaml"][-2000:]

    # On the 300 held-out sums, the 95% intervals before and after do not touch.
    evaluated = [line for line in lines if "eval/accuracy_sampled" in line]
    assert evaluated[-1]["eval/low"] > evaluated[0]["eval/high"], evaluated

    # Of what is trained on, a step has other sums than the one before. The difference of two means of so many steps, each with
    # the scatter of the steps around it, is more than three times its standard error.
    rewards = [line["reward/mean"] for line in lines[1:]]
    first, last = rewards[:STEPS], rewards[-STEPS:]
    error = ((statistics.variance(first) + statistics.variance(last)) / STEPS) ** 0.5
    assert statistics.fmean(last) - statistics.fmean(first) > 3 * error, (first, last)
