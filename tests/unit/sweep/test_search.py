"""What a sweep's file means: values, grids, macros and early stops are those of W&B's own code."""

import json
import math
import os
from pathlib import Path

import pytest
import small_sweeps

from torchtune_ext.sweep.cli import _tries
from torchtune_ext.sweep.file import DEFAULT, expanded, read_sweep
from torchtune_ext.sweep.search import Tried, draw, hyperband_of, suggest
from torchtune_ext.sweep.space import grid, nested, parameters_of

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())


@pytest.mark.parametrize("case", REFERENCE["quantiles"], ids=lambda case: json.dumps(case["given"]))
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
    points = [nested(parameters, point) for point in grid(parameters)]
    assert points == [{key: node["value"] for key, node in point.items()} for point in case["points"]]


@pytest.mark.parametrize("case", REFERENCE["stops"], ids=str)
def test_early_stops_are_those_of_wandb(case):
    if isinstance(case["stopped"], str):
        with pytest.raises(ValueError, match="no band"):
            hyperband_of(case["early"])
    else:
        found = hyperband_of(case["early"]).stopped(case["runs"], case["running"], case["goal"] == "maximize")
        assert found == case["stopped"]


def test_the_reference_has_stopped_runs_and_others():
    stopped = [len(case["stopped"]) for case in REFERENCE["stops"] if isinstance(case["stopped"], list)]
    assert sum(map(bool, stopped)) > 40 and stopped.count(0) > 20


def test_random_points_follow_from_seed_and_number():
    parameters = parameters_of({"a": {"min": 0.0, "max": 1.0}, "b": {"values": [1, 2, 3]}, "c": {"value": 9}})
    points = [draw(parameters, 0, number)[0] for number in range(50)]
    assert points == [draw(parameters, 0, number)[0] for number in range(50)]
    assert len({point["a"] for point in points}) == 50 and {point["b"] for point in points} == {1, 2, 3}
    assert points[0] != draw(parameters, 1, 0)[0] and {point["c"] for point in points} == {9}


def test_a_search_that_learns_goes_where_it_is_better_and_repeats_itself():
    pytest.importorskip("optuna")
    parameters = parameters_of({
        "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-1},
        "kind": {"values": ["a", "b"]},
        "samples": {"values": [2, 4, 8]},
    })  # fmt: skip

    def good(point):
        return -abs(math.log10(point["lr"]) + 3) + (point["kind"] == "b")

    for maximize in (True, False):
        tried, points = [], []
        for number in range(30):
            point, quantiles = suggest(parameters, 3, number, tried, maximize, warm_up=5)
            again = suggest(parameters, 3, number, tried, maximize, warm_up=5)
            assert again == (point, quantiles)
            tried.append(Tried(quantiles, good(point) if maximize else -good(point)))
            points.append(point)
        late = points[15:]
        assert sum(1e-4 < point["lr"] < 1e-2 for point in late) >= 10
        assert sum(point["kind"] == "b" for point in late) >= 10


def test_runs_that_go_on_do_not_get_the_same_point():
    pytest.importorskip("optuna")
    parameters = parameters_of({"a": {"min": 0.0, "max": 1.0}})
    tried = [Tried({"a": u}, -abs(u - 0.5)) for u in (0.1, 0.3, 0.5, 0.7, 0.9)]
    first, quantiles = suggest(parameters, 0, 5, tried, True, warm_up=5)
    second, _ = suggest(parameters, 0, 6, [*tried, Tried(quantiles, None)], True, warm_up=5)
    assert first != second


MACROS = [
    "${env}", "${interpreter}", "${program}", "${args}", "${args_no_hyphens}", "${args_no_boolean_flags}", "${args_json}",
    "${args_json_file}", "${args_no_equals}", "${args_append_hydra}", "${args_override_hydra}",
]  # fmt: skip


def test_macros_are_expanded_as_by_wandbs_agent(monkeypatch):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    monkeypatch.setenv("LOCAL", "a b")
    monkeypatch.delenv("MISSING", raising=False)
    values = {"optimizer.lr": 1e-5, "flag": True, "off": False, "none": None, "name": "a=b c", "node": {"x": [1, 2.5]}}
    command = [*MACROS, "--config", 7, "x_${envvar:LOCAL}_${envvar:MISSING}", "${envvar:LOCAL}", "a${args}"]
    # What Agent._command_run does; it starts the command at once.
    made = utils.create_sweep_command(list(command))
    variables = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    variables |= {"interpreter": ["python"], "program": ["tune"], "args_json_file": ["f.json"], "env": ["/usr/bin/env"]}
    theirs = []
    for chunk in map(str, made):
        theirs += variables[chunk[2:-1]] if chunk.startswith("${") and chunk.endswith("}") else [chunk]
    assert expanded(command, values, "tune", "f.json") == theirs
    assert list(DEFAULT) == utils.DEFAULT_SWEEP_COMMAND
    assert os.environ["LOCAL"] == "a b"


def test_an_unknown_macro_is_named():
    with pytest.raises(
        ValueError, match=r"command: \$\{args_no_hyphen\} is no macro of W&B; did you mean \$\{args_no_hyphens\}"
    ):
        expanded(["${args_no_hyphen}"], {}, "", "")


def test_of_very_many_points_each_value_is_tried_before_the_start(tmp_path):
    text = "parameters: {a: {min: 1, max: 60}, b: {values: [x, y, z]}, c: {min: 1, max: 9}}\n"
    sweep = read_sweep(small_sweeps.write(tmp_path / "many.yaml", text))
    tries = _tries(sweep, 0)
    assert sweep.runs == 60 * 3 * 9 and len(tries) < 100
    assert {point["a"] for point in tries} == set(range(1, 61)) and {point["b"] for point in tries} == {"x", "y", "z"}
    text = "run_cap: 500\nparameters: {a: {min: 0.0, max: 1.0}}\n"
    assert len(_tries(read_sweep(small_sweeps.write(tmp_path / "many.yaml", text, "random")), 0)) == 200
