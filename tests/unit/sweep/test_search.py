"""Which points a sweep tries, and which of its runs stop early: grids are W&B's, the rest is Optuna's."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from helpers import small_sweeps
from torchtune_ext.sweep.check import run_command
from torchtune_ext.sweep.search import Pruner, next_point
from torchtune_ext.sweep.spec import grid_points, parse_parameters, read_sweep

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())


@pytest.mark.parametrize("case", REFERENCE["grids"], ids=lambda case: json.dumps(case["parameters"])[:40])
def test_grid_search_equals_wandb_order(case):
    parameters = parse_parameters(case["parameters"])
    assert grid_points(parameters) == [{key: node["value"] for key, node in point.items()} for point in case["points"]]


def sweep_of(folder, method, runs, goal="maximize", **parameters):
    text = f"run_cap: {runs}\nparameters: {yaml.safe_dump(parameters, default_flow_style=True)}"
    file = small_sweeps.write(folder / "sweep.yaml", text, method)
    file.write_text(file.read_text().replace("maximize", goal))
    return read_sweep(file)


def test_random_points_follow_seed_and_stay_in_range(tmp_path):
    pytest.importorskip("optuna")
    rates = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
    # YAML 1.1 reads numbers without a dot as texts.
    rates |= {"min": "1e-5", "max": "1e-1"}
    sweep = sweep_of(tmp_path, "random", 50, lr=rates, b={"values": [1, 2, 3]}, c={"value": 9}, e={"min": 2, "max": 4})
    points = [next_point(sweep, 0, number) for number in range(50)]
    assert points[:3] == [next_point(sweep, 0, number) for number in range(3)] and points[0] != next_point(sweep, 1, 0)
    assert len({point["lr"] for point in points}) == 50 and all(1e-5 <= point["lr"] <= 1e-1 for point in points)
    assert 15 < sum(point["lr"] < 1e-3 for point in points) < 35, "half of the magnitudes"
    assert {point["b"] for point in points} == {1, 2, 3} and {point["c"] for point in points} == {9}
    assert {point["e"] for point in points} == {2, 3, 4}


@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_bayes_search_improves_and_is_deterministic(goal, tmp_path):
    pytest.importorskip("optuna")
    rates = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
    sweep = sweep_of(tmp_path, "bayes", 30, goal, lr=rates, kind={"values": ["a", "b"]}, samples={"values": [2, 4, 8]})
    results, points = [], []
    for number in range(30):
        point = next_point(sweep, 3, number, results)
        assert next_point(sweep, 3, number, results) == point
        value = -abs(math.log10(point["lr"]) + 3) + (point["kind"] == "b")
        results.append((point, value if goal == "maximize" else -value))
        points.append(point)
    late = points[15:]
    assert sum(1e-4 < point["lr"] < 1e-2 for point in late) >= 10
    assert sum(point["kind"] == "b" for point in late) >= 10


def test_bayes_search_concurrent_runs_get_different_points(tmp_path):
    pytest.importorskip("optuna")
    sweep = sweep_of(tmp_path, "bayes", 10, a={"min": 0.0, "max": 1.0})
    results = [({"a": u}, -abs(u - 0.5)) for u in (0.1, 0.3, 0.5, 0.7, 0.9)]
    point = next_point(sweep, 0, 5, results)
    assert next_point(sweep, 0, 6, [*results, (point, None)]) != point


@pytest.mark.parametrize("early, values, stopped", [
    # Compared after 2, 6 and 18 values; of fewer than 2 * eta runs only the best one goes on.
    ({"min_iter": 2}, {"a": [0.3, 0.6], "b": [0.9, 0.5], "c": [0.1, 0.7], "d": [0.8]}, ["b"]),
    ({"min_iter": 1, "eta": 2}, {"a": [0.1], "b": [0.2], "c": [0.3], "d": [0.25]}, []),
    ({"min_iter": 1}, {"a": [0.3], "b": [0.2]}, ["b"]),
])  # fmt: skip
def test_hyperband_stops_runs_outside_the_best(tmp_path, early, values, stopped):
    pytest.importorskip("optuna")
    text = yaml.safe_dump({"parameters": {"a": {"values": [1, 2]}}, "early_terminate": {"type": "hyperband", **early}})
    pruner = Pruner(read_sweep(small_sweeps.write(tmp_path / "sweep.yaml", text)))
    assert [run for run, logged in values.items() if pruner.should_stop(run, logged)] == stopped


def test_hyperband_repeated_logged_values_count_once(tmp_path):
    pytest.importorskip("optuna")
    text = "parameters: {a: {values: [1, 2]}}\nearly_terminate: {type: hyperband, min_iter: 3}\n"
    pruner = Pruner(read_sweep(small_sweeps.write(tmp_path / "sweep.yaml", text)))
    assert not pruner.should_stop("a", [0.1, 0.2, 0.9]) and not pruner.should_stop("b", [0.1, 0.2])
    assert pruner.should_stop("b", [0.1, 0.2, 0.3]) and not pruner.should_stop("b", [0.1, 0.2, 0.3])


def words(folder, command, values):
    sweep = read_sweep(small_sweeps.write(folder / "sweep.yaml", "parameters: {a: {value: 1}}\n"))
    return run_command(replace(sweep, command=command), values, [])


def test_sweep_command_arguments_equal_wandb_agent(tmp_path):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    values = {"optimizer.lr": 1e-5, "flag": True, "off": False, "none": None, "name": "a=b c", "node": {"x": [1, 2.5]}}
    theirs = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    assert words(tmp_path, ["nice", "${args_no_hyphens}", 7], values) == ["nice", *theirs["args_no_hyphens"], "7"]


def test_a_macro_that_no_recipe_reads_is_named(tmp_path):
    for word in ("${args_no_hyphen}", "${args_json_file}", "${env}"):
        with pytest.raises(
            ValueError, match=re.escape(f"command: unsupported macro {word}; expected ${{args_no_hyphens}}. Fix: use ")
        ):
            words(tmp_path, [word], {})
