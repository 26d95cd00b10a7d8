"""What the page of several runs computes: seeds and settings, intervals against published tables, and which one is better."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compared_runs import make_one, settings
from tables import every_row

from torchtune_ext.telemetry.results import (
    Estimate,
    apart,
    mean_of_seeds,
    t_quantile,
    tail,
    target_of,
    verdict_of,
)
from torchtune_ext.telemetry.runs import find_runs, settings_of, short_keys


def estimates(*values):
    return [Estimate(value) for value in values]


def compared(folder):
    """The runs in a folder, and the verdict on them."""
    runs, sweeps, _ = find_runs([folder])
    return runs, verdict_of(runs, settings_of(runs)[1], target_of(runs, sweeps))


@every_row(
    "p, freedom, table",
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 10, 2.228), (0.975, 120, 1.980), (0.995, 3, 5.841),
     (0.9995, 5, 6.869), (0.975, 1e5, 1.960)],
)  # fmt: skip
def test_quantiles_of_student_are_those_of_the_tables(p, freedom, table):
    assert t_quantile(p, freedom) == pytest.approx(table, abs=6e-4)


def test_an_interval_of_seeds_is_that_of_the_textbook():
    # n = 4, mean 5, s = 2: half = 3.182 * 2 / 2.
    estimate = mean_of_seeds(estimates(3.0, 4.0, 5.0, 8.0))
    s = np.std([3.0, 4.0, 5.0, 8.0], ddof=1)
    assert estimate.value == 5 and estimate.high - estimate.value == pytest.approx(3.18245 * s / 2, rel=1e-5)
    assert mean_of_seeds(estimates(3.0)) == Estimate(3.0) and mean_of_seeds(estimates(3.0, 3.0)) == Estimate(3.0)


@every_row(
    "first, second, expected",
    [
        (Estimate(0.5, 0.4, 0.6), Estimate(0.8, 0.7, 0.9), True),
        (Estimate(0.5, 0.4, 0.7), Estimate(0.8, 0.7, 0.9), False),
        (Estimate(0.5), Estimate(0.8, 0.7, 0.9), False),
    ],
)
def test_what_does_not_overlap_is_apart(first, second, expected):
    assert apart(first, second) == apart(second, first) == expected


def test_seeds_and_folders_make_no_setting(tmp_path):
    for seed in (0, 1):
        for rate in (1e-6, 3e-6):
            start = {"path": str(tmp_path / f"r{rate}{seed}" / "start")}
            own = settings(rate, seed, tokenizer=start, logging={"to": [f"{seed}"]})
            make_one(tmp_path / f"r{rate}{seed}", own, steps=2, rollouts=False)
    runs, _, _ = find_runs([tmp_path])
    keys, variants = settings_of(runs)
    assert keys == ["optimizer.lr"] and [each.label for each in variants] == ["lr 1e-06", "lr 3e-06"]
    assert [[runs[i].name for i in each.runs] for each in variants] == [["r1e-060", "r1e-061"], ["r3e-060", "r3e-061"]]


def test_the_name_of_a_folder_is_no_value(tmp_path, monkeypatch):
    """An `output_dir` may have the name of a value, and no value becomes another one by that."""
    monkeypatch.chdir(tmp_path)
    for name in ("bf16", "fp32"):
        make_one(Path(name), settings(precision=name, start=f"{name}/model"), steps=2, rollouts=False)
    keys, variants = settings_of(find_runs([tmp_path])[0])
    assert keys == ["precision"] and [each.label for each in variants] == ["precision bf16", "precision fp32"]


def test_a_key_that_only_one_run_has_differs_and_labels_stay_short(tmp_path):
    make_one(tmp_path / "a", settings(), steps=2, rollouts=False)
    make_one(tmp_path / "b", settings(loss={"terms": ["x" * 5000], "größe": "ü"}), steps=2, rollouts=False)
    keys, variants = settings_of(find_runs([tmp_path])[0])
    assert keys == ["loss.terms", "loss.größe"]
    assert [each.label for each in variants] == ["terms default, größe default", "b"]
    assert short_keys(["a.lr", "b.lr", "a.seed", "task._component_"]) == ["a.lr", "b.lr", "seed", "task._component_"]


def judged(tmp_path, *runs):
    """The verdict on runs (setting's rate, seed, level)."""
    for number, (rate, seed, level) in enumerate(runs):
        make_one(tmp_path / f"r{number}", settings(rate, seed), level=level, rollouts=False)
    return compared(tmp_path)[1]


def test_seeds_that_lie_apart_are_told_apart(tmp_path):
    verdict = judged(tmp_path, *((rate, seed, level + 0.01 * seed) for rate, level in ((1e-6, 0.5), (3e-6, 0.7)) for seed in range(3)))  # fmt: skip
    assert verdict.headline.startswith("B (lr 3e-06) has the highest held-out accuracy, 0.697 [")
    assert verdict.best == 1 and verdict.close == [] and verdict.headline.endswith("].")


def test_seeds_that_overlap_may_be_as_good(tmp_path):
    verdict = judged(tmp_path, (1e-6, 0, 0.50), (1e-6, 1, 0.70), (3e-6, 0, 0.55), (3e-6, 1, 0.72))
    assert verdict.headline.endswith("]. A (lr 1e-06) may be as good: the intervals overlap, or are not known.")


def test_runs_of_the_same_seed_are_no_two_seeds(tmp_path):
    verdict = judged(tmp_path, (1e-6, 0, 0.50), (1e-6, 0, 0.52), (3e-6, 0, 0.70), (3e-6, 0, 0.72))
    assert [len(seeds) for seeds in verdict.seeds.values()] == [1, 1]
    assert verdict.headline.endswith("One seed does not tell where another would end.")
    assert verdict.means[1].value - verdict.means[0].value == pytest.approx(0.2 * (1 - math.exp(-4)))


def test_other_held_out_problems_are_no_comparison(tmp_path):
    make_one(tmp_path / "a", settings(), rollouts=False)
    make_one(tmp_path / "b", settings(evaluation={"task": {"_component_": "tasks.GSM8K", "seed": 3}}), rollouts=False)
    verdict = compared(tmp_path)[1]
    assert verdict.headline.startswith("They are not compared: task._component_ differ") and verdict.best is None


def test_without_an_evaluation_rewards_are_compared_without_an_interval(tmp_path):
    for name, level, rate in (("a", 0.5, 1e-6), ("b", 0.8, 2e-6)):
        make_one(tmp_path / name, settings(rate), level=level, every=0, rollouts=False)
    runs, verdict = compared(tmp_path)
    assert verdict.headline.startswith("B (lr 2e-06) has the highest mean reward of the last tenth of the steps, ")
    assert ". A (lr 1e-06) may be as good: " in verdict.headline
    rewards = [record["reward/mean"] for record in runs[0].records if "reward/mean" in record]
    assert tail(runs[0], "reward/mean") == pytest.approx(np.mean(rewards[-6:]))


def test_an_exact_tie_is_said_and_a_replay_has_no_reward_of_its_own(tmp_path):
    for name, rate in (("a", 1e-6), ("b", 2e-6)):
        make_one(tmp_path / name, settings(rate), every=0, rollouts=False, **{"reward/mean": 0.5})
    runs, verdict = compared(tmp_path)
    most = "A (lr 1e-06) has the highest mean reward of the last tenth of the steps, 0.5."
    assert verdict.headline.startswith(f"{most} B (lr 2e-06) may be as good: ")
    replays = [replace(run, config={**run.config, "replay": "runs/a"}) for run in runs]
    assert target_of(replays, []) is None
    verdict = verdict_of(replays, settings_of(replays)[1], None)
    assert verdict.headline.startswith("Nothing says which one is better")
