"""What the page of several runs computes: which settings tell runs apart, and what each run came to."""

from pathlib import Path

import numpy as np
import pytest

from helpers.compared_runs import make_one, settings
from torchtune_ext.telemetry.comparison import choose_target, run_result
from torchtune_ext.telemetry.runs import find_runs, label_runs, shorten_keys


def test_comparison_folder_paths_do_not_distinguish_runs(tmp_path):
    for seed in (0, 1):
        for rate in (1e-6, 3e-6):
            start = {"path": str(tmp_path / f"r{rate}{seed}" / "start")}
            own = settings(rate, seed, tokenizer=start, logging={"to": [f"{seed}"]})
            make_one(tmp_path / f"r{rate}{seed}", own, steps=2, rollouts=False)
    keys, values, labels = label_runs(find_runs([tmp_path])[0])
    assert keys == ["seed", "optimizer.lr"] and values == [
        ["0", "1e-06"],
        ["1", "1e-06"],
        ["0", "3e-06"],
        ["1", "3e-06"],
    ]
    assert labels[0] == "seed 0, lr 1e-06"


def test_comparison_folder_name_does_not_replace_values(tmp_path, monkeypatch):
    """An `output_dir` may have the name of a value, and no value becomes another one by that."""
    monkeypatch.chdir(tmp_path)
    for name in ("bf16", "fp32"):
        make_one(Path(name), settings(precision=name, start=f"{name}/model"), steps=2, rollouts=False)
    keys, _, labels = label_runs(find_runs([tmp_path])[0])
    assert keys == ["precision"] and labels == ["precision bf16", "precision fp32"]


def test_comparison_key_missing_from_one_run_differs(tmp_path):
    make_one(tmp_path / "a", settings(), steps=2, rollouts=False)
    make_one(tmp_path / "b", settings(loss={"terms": ["x" * 5000], "größe": "ü"}), steps=2, rollouts=False)
    keys, _, labels = label_runs(find_runs([tmp_path])[0])
    assert keys == ["loss.terms", "loss.größe"]
    assert labels == ["terms default, größe default", "b"]
    assert shorten_keys(["a.lr", "b.lr", "a.seed", "task._component_"]) == ["a.lr", "b.lr", "seed", "task._component_"]


def test_comparison_result_metric_depends_on_evaluations(tmp_path):
    """Held-out reward at the newest step that has it, or else the mean reward of the last tenth of the steps."""
    for name, seed in (("a", 0), ("b", 1)):
        make_one(tmp_path / "evaluated" / name, settings(seed=seed), steps=65, rollouts=False)
        make_one(tmp_path / "trained" / name, settings(seed=seed), every=0, rollouts=False)
    runs, _, _ = find_runs([tmp_path / "evaluated"])
    assert choose_target(runs, []) == ("eval/reward_sampled", "held-out reward", True)
    (newest,) = [record for record in runs[0].records if record["step"] == 60]
    expected = newest["eval/reward_sampled"], newest["eval/low"], newest["eval/high"]
    assert run_result(runs[0], "eval/reward_sampled") == expected
    runs, _, _ = find_runs([tmp_path / "trained"])
    assert choose_target(runs, []) == ("reward/mean", "mean reward", True)
    rewards = [record["reward/mean"] for record in runs[0].records if "reward/mean" in record]
    assert run_result(runs[0], "reward/mean")[0] == pytest.approx(np.mean(rewards[-6:]))
    assert run_result(runs[0], "eval/reward_sampled") is None


def test_comparison_sweep_metric_keeps_its_name(tmp_path):
    make_one(tmp_path / "a", rollouts=False, **{"own/accuracy": 0.5, "eval/solved_sampled": 0.0})
    runs, _, _ = find_runs([tmp_path])
    named = {"metric": {"name": "own/accuracy", "goal": "maximize"}}
    assert choose_target(runs, [named]) == ("own/accuracy", "own/accuracy", True)
