"""Which points a sweep tries, and the words of their runs: those of W&B."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import small_sweeps

from torchtune_ext.sweep.check import words_of
from torchtune_ext.sweep.file import read_sweep

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text())


@pytest.mark.parametrize("case", REFERENCE["grids"], ids=lambda case: json.dumps(case["parameters"])[:40])
def test_a_grid_is_that_of_wandb_in_its_order(case, tmp_path):
    sweep = read_sweep(small_sweeps.write(tmp_path / "sweep.yaml", f"parameters: {json.dumps(case['parameters'])}"))
    assert sweep.points == [{key: node["value"] for key, node in point.items()} for point in case["points"]]


def words(folder, command, values):
    sweep = read_sweep(small_sweeps.write(folder / "sweep.yaml", "parameters: {a: {value: 1}}\n"))
    return words_of(replace(sweep, command=command), values, [])


def test_parameters_become_words_as_by_wandbs_agent(tmp_path):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    values = {"optimizer.lr": 1e-5, "flag": True, "off": False, "none": None, "name": "a=b c", "node": {"x": [1, 2.5]}}
    theirs = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    assert words(tmp_path, ["nice", "${args_no_hyphens}", 7], values) == ["nice", *theirs["args_no_hyphens"], "7"]


def test_a_macro_that_no_recipe_reads_is_named(tmp_path):
    for word in ("${args_no_hyphen}", "${args_json_file}", "${env}"):
        with pytest.raises(ValueError, match=re.escape(f"recipes read no {word}; there is ${{args_no_hyphens}}: ")):
            words(tmp_path, [word], {})
