"""What the page of several runs computes: seeds and settings, bands against numpy, intervals against published tables, words."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compared_runs import make_one, settings
from tables import every_row

from torchtune_ext.telemetry.compared.curves import Columns, overlays
from torchtune_ext.telemetry.compared.intervals import (
    Estimate,
    difference_of_problems,
    difference_of_seeds,
    mean_of_seeds,
    t_quantile,
)
from torchtune_ext.telemetry.compared.results import Target, differently_judged, result_of, target_of
from torchtune_ext.telemetry.compared.runs import find_runs
from torchtune_ext.telemetry.compared.settings import settings_of, short_keys
from torchtune_ext.telemetry.compared.sweep_file import Point, Sweep
from torchtune_ext.telemetry.compared.verdict import verdict_of

ACCURACY = Target("eval/accuracy_sampled", "last held-out accuracy", True)


@every_row(
    "p, freedom, table",
    [(0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 4, 2.776), (0.975, 10, 2.228), (0.975, 120, 1.980), (0.995, 3, 5.841),
     (0.9995, 5, 6.869), (0.975, 1e5, 1.960)],
)  # fmt: skip
def test_quantiles_of_student_are_those_of_the_tables(p, freedom, table):
    assert t_quantile(p, freedom) == pytest.approx(table, abs=6e-4)


def test_an_interval_of_seeds_is_that_of_the_textbook():
    # n = 4, mean 5, s = 2: half = 3.182 * 2 / 2.
    found = mean_of_seeds([3.0, 4.0, 5.0, 8.0])
    s = np.std([3.0, 4.0, 5.0, 8.0], ddof=1)
    assert found.value == 5 and found.high - found.value == pytest.approx(3.18245 * s / 2, rel=1e-5)
    assert mean_of_seeds([3.0]) == Estimate(3.0) and mean_of_seeds([3.0, 3.0]) == Estimate(3.0)


def test_the_difference_of_seeds_is_welchs():
    # By hand: a = 1/3, b = (32/3) / 4, v = (a + b)^2 / (a^2 / 2 + b^2 / 3) = 9 / (1/18 + 64/27) = 3.70992. The ends are those of
    # scipy.stats.ttest_ind(first, second, equal_var=False).confidence_interval().
    first, second = [10.0, 11.0, 12.0], [0.0, 4.0, 4.0, 8.0]
    found = difference_of_seeds(first, second)
    assert (found.value, found.low, found.high) == pytest.approx((7.0, 2.0390735532435365, 11.960926446756464))
    half = t_quantile(0.975, 9 / (1 / 18 + 64 / 27)) * math.sqrt(3)
    assert found.high - found.value == pytest.approx(half)
    assert difference_of_seeds(first, second, pairs=10).low < found.low, "more pairs, wider intervals"
    assert not difference_of_seeds([1.0], second).known and not difference_of_seeds([1.0, 1.0], [2.0, 2.0]).known


def test_the_interval_of_welch_holds_what_it_promises():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        found = difference_of_seeds(list(rng.normal(1, 1, 3)), list(rng.normal(0, 3, 4)))
        held += found.low <= 1 <= found.high
    # 95% of 400 with a standard deviation of 4.4; Welch's is a little conservative for so few.
    assert 380 - 3 * 4.4 <= held


def test_of_single_runs_the_errors_over_problems_add_up():
    first, second = Estimate(0.8, 0.8 - 0.03, 0.8 + 0.03), Estimate(0.7, 0.7 - 0.04, 0.7 + 0.04)
    found = difference_of_problems(first, second)
    assert (found.low, found.high) == pytest.approx((0.1 - 0.05, 0.1 + 0.05), abs=1e-5)
    assert not difference_of_problems(first, Estimate(0.7)).known


def test_seeds_and_folders_make_no_setting(tmp_path):
    for seed in (0, 1):
        for rate in (1e-6, 3e-6):
            own = settings(
                rate, seed, tokenizer={"path": str(tmp_path / f"r{rate}{seed}" / "start")}, logging={"to": [f"{seed}"]}
            )
            make_one(tmp_path / f"r{rate}{seed}", own, steps=2, rollouts=False)
    runs = find_runs([tmp_path]).runs
    keys, found = settings_of(runs)
    assert keys == ["optimizer.lr"] and [each.label for each in found] == ["lr 1e-06", "lr 3e-06"]
    assert [[runs[i].name for i in each.runs] for each in found] == [["r1e-060", "r1e-061"], ["r3e-060", "r3e-061"]]


def test_the_name_of_a_folder_is_no_value(tmp_path, monkeypatch):
    """An `output_dir` may have the name of a value, and no value becomes another one by that."""
    monkeypatch.chdir(tmp_path)
    for name in ("bf16", "fp32"):
        make_one(Path(name), settings(precision=name, start=f"{name}/model"), steps=2, rollouts=False)
    keys, found = settings_of(find_runs([tmp_path]).runs)
    assert keys == ["precision"] and [each.label for each in found] == ["precision bf16", "precision fp32"]


def test_runs_of_the_same_seed_are_no_two_seeds(tmp_path):
    said = judged(tmp_path, [(1e-6, 0, 0.50), (1e-6, 0, 0.52), (3e-6, 0, 0.70), (3e-6, 0, 0.72)])
    assert "Its run is better than that of A" in said.headline and any(
        "runs of the same seed count as one" in note for note in said.notes
    )
    assert said.pairs[0].difference.value == pytest.approx(0.2 * (1 - math.exp(-4)))


def test_an_accuracy_without_any_spread_has_no_interval_to_compare():
    assert not difference_of_problems(Estimate(1.0, 1.0, 1.0), Estimate(0.5, 0.4, 0.6)).known


def test_a_key_that_only_one_run_has_differs_and_long_values_stay_short(tmp_path):
    make_one(tmp_path / "a", settings(), steps=2, rollouts=False)
    make_one(tmp_path / "b", settings(loss={"terms": ["x" * 5000], "größe": "ü"}), steps=2, rollouts=False)
    keys, found = settings_of(find_runs([tmp_path]).runs)
    assert keys == ["loss.terms", "loss.größe"]
    assert found[0].label == "terms default, größe default" and len(found[1].label) < 80
    assert short_keys(["a.lr", "b.lr", "task._component_"]) == {
        "a.lr": "a.lr",
        "b.lr": "b.lr",
        "task._component_": "task._component_",
    }


def test_bands_are_those_of_numpy(tmp_path):
    for seed in range(3):
        make_one(tmp_path / f"s{seed}", settings(seed=seed), level=0.6 + 0.05 * seed, rollouts=False,
                 **{"own/holes": lambda step, seed=seed: float("nan") if step % 7 == seed else float(step + seed)})  # fmt: skip
    runs = find_runs([tmp_path]).runs
    columns, (_, found) = Columns(runs, 1000), settings_of(runs)
    charts = {chart.metric: chart for chart in overlays(columns, found)}
    for metric in ("reward/mean", "own/holes", "eval/accuracy_sampled"):
        values = np.array(
            [[np.nan if record.get(metric) is None else record[metric] for record in run.records] for run in runs]
        )
        (line,) = charts[metric].lines
        assert columns.steps == [record["step"] for record in runs[0].records]
        for got, want in ((line.mean, np.nanmean), (line.low, np.nanmin), (line.high, np.nanmax)):
            with np.testing.suppress_warnings() as quiet:
                quiet.filter(RuntimeWarning)
                np.testing.assert_allclose(np.array(got, float), want(values, 0), rtol=1e-4, equal_nan=True)
    assert list(charts)[:3] == ["eval/accuracy_sampled", "reward/mean", "length/mean"]


def test_many_steps_share_points_and_no_peak_of_a_seed_is_lost_in_the_mean(tmp_path):
    make_one(tmp_path / "a", settings(), steps=999, rollouts=False)
    make_one(tmp_path / "b", settings(seed=1), steps=499, rollouts=False)
    runs = find_runs([tmp_path]).runs
    columns = Columns(runs, 100)
    assert len(columns.steps) == 100 and columns.steps[-1] == 999 and columns.steps_each == 10
    rewards = np.array(
        [np.nan if record.get("reward/mean") is None else record["reward/mean"] for record in runs[0].records]
    )
    np.testing.assert_allclose(columns.of(0, "reward/mean"), np.nanmean(rewards.reshape(100, 10), 1))
    assert np.isnan(columns.of(1, "reward/mean")[50:]).all() and not np.isnan(columns.of(1, "reward/mean")[:50]).any()


def judged(tmp_path, runs, **more):
    """The verdict on runs (setting's rate, seed, level)."""
    for number, (rate, seed, level) in enumerate(runs):
        make_one(tmp_path / f"r{number}", settings(rate, seed, **more), level=level, rollouts=False)
    found = find_runs([tmp_path])
    _, groups = settings_of(found.runs)
    target = target_of(found.runs, found.sweeps)
    results = {number: result_of(run, target) for number, run in enumerate(found.runs)}
    return verdict_of(groups, results, target, differently_judged(found.runs, groups, target))


def test_seeds_that_lie_apart_are_told_apart(tmp_path):
    said = judged(
        tmp_path, [(1e-6, 0, 0.50), (1e-6, 1, 0.52), (1e-6, 2, 0.51), (3e-6, 0, 0.70), (3e-6, 1, 0.72), (3e-6, 2, 0.71)]
    )
    assert (
        said.headline.startswith("B (lr 3e-06) has the highest last held-out accuracy, 0.697 [")
        and "It is better than A (lr 1e-06), by 0.196 [" in said.headline
    )
    assert said.best == 1 and said.pairs[0].told == "apart" and "Welch" in said.notes[0]


def test_seeds_that_overlap_are_not(tmp_path):
    said = judged(tmp_path, [(1e-6, 0, 0.50), (1e-6, 1, 0.70), (3e-6, 0, 0.55), (3e-6, 1, 0.72)])
    assert "It cannot be told apart from A (lr 1e-06), by 0.034 [−" in said.headline and said.pairs[0].told == "alike"


def test_one_run_of_each_says_nothing_of_other_seeds(tmp_path):
    said = judged(tmp_path, [(1e-6, 0, 0.5), (3e-6, 0, 0.9)])
    assert "Its run is better than that of A" in said.headline
    assert any("another seed may end elsewhere" in note for note in said.notes) and any(
        "√(se₁² + se₂²)" in note for note in said.notes
    )


def test_one_run_beside_several_is_not_judged(tmp_path):
    said = judged(tmp_path, [(1e-6, 0, 0.5), (3e-6, 0, 0.7), (3e-6, 1, 0.72)])
    assert "It may be better than A" in said.headline and "nothing tells how far" in said.headline
    assert any("Of A there is one seed" in note for note in said.notes)


def test_other_held_out_problems_are_no_comparison(tmp_path):
    make_one(tmp_path / "a", settings(), rollouts=False)
    make_one(tmp_path / "b", settings(evaluation={"task": {"_component_": "tasks.GSM8K", "seed": 3}}), rollouts=False)
    found = find_runs([tmp_path])
    _, groups = settings_of(found.runs)
    results = {number: result_of(run, ACCURACY) for number, run in enumerate(found.runs)}
    said = verdict_of(groups, results, ACCURACY, differently_judged(found.runs, groups, ACCURACY))
    assert said.headline.startswith("They are not compared: evaluation.task._component_ differs") and said.best is None


def test_without_an_evaluation_rewards_are_compared_without_an_interval(tmp_path):
    for name, level in (("a", 0.5), ("b", 0.8)):
        make_one(tmp_path / name, settings(1e-6 if name == "a" else 2e-6), level=level, every=0, rollouts=False)
    found = find_runs([tmp_path])
    target = target_of(found.runs, [])
    assert target.metric == "reward/mean"
    results = {number: result_of(run, target) for number, run in enumerate(found.runs)}
    said = verdict_of(settings_of(found.runs)[1], results, target)
    assert "Its run may be better than that of A" in said.headline and said.pairs[0].told == "unknown"
    rewards = [record["reward/mean"] for record in found.runs[0].records if "reward/mean" in record]
    assert results[0].reward == pytest.approx(np.mean(rewards[-6:]))
    assert results[0].last is None and results[0].tokens == 60_000 and results[0].seconds == 120.0


def test_an_exact_tie_is_no_lead_and_a_replay_has_no_reward_of_its_own(tmp_path):
    for name in ("a", "b"):
        make_one(tmp_path / name, settings(1e-6 if name == "a" else 2e-6), level=0.5, every=0, rollouts=False)
    found = find_runs([tmp_path])
    target = target_of(found.runs, [])
    for run in found.runs:
        for record in run.records:
            record["reward/mean"] = 0.5
    results = {number: result_of(run, target) for number, run in enumerate(found.runs)}
    said = verdict_of(settings_of(found.runs)[1], results, target)
    assert (
        said.headline
        == "A (lr 1e-06) and B (lr 2e-06) have the highest mean reward of the last tenth of the steps, 0.500."
    )
    assert said.pairs[0].told == "alike"
    replays = [replace(run, config={**run.config, "replay": "runs/a"}) for run in found.runs]
    assert target_of(replays, []) is None


def test_less_is_better_where_a_sweep_says_so(tmp_path):
    points = [
        Point(name, tmp_path / name, {}, "finished", value, None, None, "", None)
        for name, value in (("a", 0.5), ("b", 0.3))
    ]
    for point in points:
        make_one(point.folder, settings(1e-6 if point.id == "a" else 2e-6), rollouts=False)
    (tmp_path / "sweep.json").write_text(json.dumps({
        "format": 1, "name": "s", "method": "bayes", "metric": {"name": "loss/total", "goal": "minimize"}, "parameters": {},
        "runs": [{"id": p.id, "folder": p.id, "parameters": {}, "state": p.state, "value": p.value} for p in points]}))  # fmt: skip
    found = find_runs([tmp_path])
    target = target_of(found.runs, found.sweeps)
    results = {number: result_of(run, target) for number, run in enumerate(found.runs)}
    said = verdict_of(settings_of(found.runs)[1], results, target)
    assert said.headline.startswith("B (lr 2e-06) has the lowest loss/total, 0.300.") and found.sweeps[0].best.id == "b"


@every_row(
    "given, values, axis",
    [
        ({"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-3}, [1e-5, 2e-5], "log"),
        ({"values": [1e-5, 3e-5, 1e-4]}, [1e-5, 3e-5, 1e-4], "log"),
        ({"values": [1, 2, 4, 8]}, [1, 2, 4, 8], "log"),
        ({"values": [1, 2, 3, 4]}, [1, 2, 3, 4], "linear"),
        ({"min": 0.0, "max": 1.0}, [0.1, 0.9], "linear"),
        ({"values": ["dapo", "gspo"]}, ["dapo", "gspo"], "category"),
        ({"values": [None, 1]}, [None, 1], "category"),
        ({"values": [True, False]}, [True, False], "category"),
        ({"value": 3}, [3, 3], None),
    ],
)
def test_the_axis_of_a_parameter_follows_its_distribution(tmp_path, given, values, axis):
    points = [
        Point(str(i), tmp_path / str(i), {"x": value}, "finished", 1.0, None, None, "", None)
        for i, value in enumerate(values)
    ]
    sweep = Sweep(tmp_path, "s", "grid", "m", "maximize", {"x": given}, points)
    assert sweep.swept().get("x") == axis
