"""What a recipe remembers comes back, and what an old checkpoint lacks is said."""

import json
from pathlib import Path

import pytest

from torchtune_ext.training.resume import RunState

STATE = RunState(step=7, version=9, cursor=28, updates=14, throttle={"limit": 32}, source={"cursors": [[8, 9]]})


def test_it_comes_back():
    saved = json.loads(json.dumps({"score": 0.5, **STATE.to_json()}))
    assert RunState.from_json(saved, Path("step_000007")) == STATE


def test_the_first_format_had_no_number():
    saved = {name: value for name, value in STATE.to_json().items() if name != "format"}
    assert RunState.from_json(saved, Path("step_000007")) == STATE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"updates": None, "throttle": None}, "step_000007 cannot be resumed: its recipe.json lacks updates, throttle"),
        ({"format": 2}, "has format 2, this version reads 1"),
    ],
)
def test_what_an_old_one_lacks_is_said(change, message):
    saved = {name: value for name, value in (STATE.to_json() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        RunState.from_json(saved, Path("checkpoints/step_000007"))


def test_earlier_versions_wrote_nothing_of_tasks():
    saved = {name: value for name, value in STATE.to_json().items() if name != "task"}
    assert RunState.from_json(saved, Path("step_000007")).task == {}
