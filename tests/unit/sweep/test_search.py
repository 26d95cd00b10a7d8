"""What a sweep's file means: values, grids, macros and early stops are those of W&B's own code."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import small_sweeps
import yaml
from tables import every_row

from torchtune_ext.sweep.check import words_of
from torchtune_ext.sweep.file import DEFAULT, grid, hyperband_of, parameters_of, read_sweep
from torchtune_ext.sweep.search import draw, point_at, suggest, tries

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())


@every_row("case", REFERENCE["quantiles"], ids=lambda case: json.dumps(case["given"]))
def test_every_quantile_is_that_of_wandb(case):
    (parameter,) = parameters_of({"a": case["given"]})
    for u, value in case["at"]:
        mine = parameter.at(u)
        assert mine == value if not isinstance(value, float) else mine == pytest.approx(value, rel=1e-6, abs=1e-9)


def test_the_ends_of_every_distribution_are_finite_and_inside():
    for case in REFERENCE["quantiles"]:
        (parameter,) = parameters_of({"a": case["given"]})
        for u in (0.0, 1.0):
            value = parameter.at(u)
            if "min" in case["given"] and "q" not in parameter.given:
                assert case["given"]["min"] <= value <= case["given"]["max"]
            assert not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("case", REFERENCE["grids"], ids=lambda case: json.dumps(case["parameters"])[:40])
def test_a_grid_is_that_of_wandb_in_its_order(case):
    parameters = parameters_of(case["parameters"])
    assert grid(parameters) == [by_dotted_name(point) for point in case["points"]]


def by_dotted_name(point):
    flat = {}
    for key, node in point.items():
        value = node["value"]
        flat |= {f"{key}.{below}": each for below, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


@every_row("case", REFERENCE["stops"], ids=str)
def test_early_stops_are_those_of_wandb(case):
    early, maximize = hyperband_of(case["early"]), case["goal"] == "maximize"
    assert [run for run in case["running"] if early.stops(run, case["runs"], maximize)] == case["stopped"]


def test_bands_beyond_every_number_are_left_out():
    assert hyperband_of({"type": "hyperband", "min_iter": 2, "eta": 1e9}).bands[:2] == (2, 2_000_000_000)
    assert hyperband_of({"type": "hyperband", "max_iter": 27, "s": 10**9}).bands == (1, 3, 9)


def test_the_reference_has_stopped_runs_and_others():
    stopped = [len(case["stopped"]) for case in REFERENCE["stops"]]
    assert sum(map(bool, stopped)) > 40 and stopped.count(0) > 20


def sweep_of(folder, method, runs, goal="maximize", **parameters):
    text = f"run_cap: {runs}\nparameters: {yaml.safe_dump(parameters, default_flow_style=True)}"
    file = small_sweeps.write(folder / "sweep.yaml", text, method)
    file.write_text(file.read_text().replace("maximize", goal))
    return read_sweep(file)


def test_random_points_follow_from_seed_and_number(tmp_path):
    sweep = sweep_of(tmp_path, "random", 50, a={"min": 0.0, "max": 1.0}, b={"values": [1, 2, 3]}, c={"value": 9})
    points = [draw(sweep, 0, number) for number in range(50)]
    assert points == [draw(sweep, 0, number) for number in range(50)]
    assert len({point["a"] for point in points}) == 50 and {point["b"] for point in points} == {1, 2, 3}
    assert points[0] != draw(sweep, 1, 0) and {point["c"] for point in points} == {9}


@pytest.mark.parametrize("goal", ["maximize", "minimize"])
def test_a_search_that_learns_goes_where_it_is_better_and_repeats_itself(goal, tmp_path):
    pytest.importorskip("optuna")
    rates = {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1}
    sweep = sweep_of(tmp_path, "bayes", 30, goal, lr=rates, kind={"values": ["a", "b"]}, samples={"values": [2, 4, 8]})
    results, points = [], []
    for number in range(30):
        quantiles = suggest(sweep, 3, number, results)
        assert suggest(sweep, 3, number, results) == quantiles
        point = point_at(sweep, quantiles)
        value = -abs(math.log10(point["lr"]) + 3) + (point["kind"] == "b")
        results.append((quantiles, value if goal == "maximize" else -value))
        points.append(point)
    late = points[15:]
    assert sum(1e-4 < point["lr"] < 1e-2 for point in late) >= 10
    assert sum(point["kind"] == "b" for point in late) >= 10


def test_a_search_that_learns_reaches_values_that_are_seldom(tmp_path):
    pytest.importorskip("optuna")
    sweep = sweep_of(tmp_path, "bayes", 10, kind={"values": ["a", "b", "c"], "probabilities": [0.9, 0.0, 0.1]})
    results = []
    for number in range(10):
        quantiles = suggest(sweep, 0, number, results)
        results.append((quantiles, float(point_at(sweep, quantiles)["kind"] == "c")))
    assert {point_at(sweep, quantiles)["kind"] for quantiles, _ in results} == {"a", "c"}
    assert sum(value for _, value in results) >= 4


def test_runs_that_go_on_do_not_get_the_same_point(tmp_path):
    pytest.importorskip("optuna")
    sweep = sweep_of(tmp_path, "bayes", 10, a={"min": 0.0, "max": 1.0})
    results = [({"a": u}, -abs(u - 0.5)) for u in (0.1, 0.3, 0.5, 0.7, 0.9)]
    quantiles = suggest(sweep, 0, 5, results)
    assert suggest(sweep, 0, 6, [*results, (quantiles, None)]) != quantiles


def words(folder, command, values, program):
    sweep = read_sweep(small_sweeps.write(folder / "sweep.yaml", "parameters: {a: {value: 1}}\n"))
    return words_of(replace(sweep, command=command, program=program), values, [])


def test_macros_are_expanded_as_by_wandbs_agent(monkeypatch, tmp_path):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    monkeypatch.setenv("LOCAL", "a b")
    monkeypatch.delenv("MISSING", raising=False)
    values = {"optimizer.lr": 1e-5, "flag": True, "off": False, "none": None, "name": "a=b c", "node": {"x": [1, 2.5]}}
    macros = [f"${{{name}}}" for name in ("env", "interpreter", "program", "args_no_hyphens")]
    command = [*macros, "--config", 7, "x_${envvar:LOCAL}_${envvar:MISSING}", "${envvar:LOCAL}", "a${args}"]
    # What Agent._command_run does; it starts the command at once.
    made = utils.create_sweep_command(list(command))
    variables = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    variables |= {"interpreter": ["python"], "program": ["tune"], "env": ["/usr/bin/env"]}
    theirs = []
    for chunk in map(str, made):
        theirs += variables[chunk[2:-1]] if chunk.startswith("${") and chunk.endswith("}") else [chunk]
    assert words(tmp_path, command, values, "tune") == theirs
    assert list(DEFAULT) == utils.DEFAULT_SWEEP_COMMAND
    assert os.environ["LOCAL"] == "a b"


@every_row("word, message", [
    ("${args_no_hyphen}", "command: recipes read no ${args_no_hyphen}; there are ${args_no_hyphens}, ${env}, "),
    ("${args_json_file}", "command: recipes read no ${args_json_file}; there are ${args_no_hyphens}, ${env}, "),
])  # fmt: skip
def test_a_macro_that_no_recipe_reads_is_named(tmp_path, word, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        words(tmp_path, [word], {}, "")


def test_of_very_many_points_each_value_is_tried_before_the_start(tmp_path):
    text = "parameters: {a: {min: 1, max: 60}, b: {values: [x, y, z]}, c: {min: 1, max: 9}}\n"
    sweep = read_sweep(small_sweeps.write(tmp_path / "many.yaml", text))
    points = tries(sweep, 0)
    assert sweep.runs == 60 * 3 * 9 and len(points) < 100
    assert {point["a"] for point in points} == set(range(1, 61)) and {point["b"] for point in points} == {"x", "y", "z"}
    text = "run_cap: 500\nparameters: {a: {min: 0.0, max: 1.0}}\n"
    assert len(tries(read_sweep(small_sweeps.write(tmp_path / "many.yaml", text, "random")), 0)) == 200
