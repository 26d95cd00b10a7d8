"""The recipe's state is restored, and the messages of resumed and ended runs."""

import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtune_ext.run.folder import Run
from torchtune_ext.training.checkpoints import (
    RunAlreadyComplete,
    RunState,
    find_resume_checkpoint,
    resume_text,
    status_message,
)

STATE = RunState(step=7, cursor=28, throttle={"limit": 32}, source={"cursors": [[8, 9]]})


def test_run_state_round_trips_through_recipe_json():
    recipe = json.loads(json.dumps({"score": 0.5, **asdict(STATE)}))
    assert RunState.from_recipe_state(recipe) == STATE
    del recipe["task"]  # a field with a default may be missing
    assert RunState.from_recipe_state(recipe) == STATE


def test_run_state_works_in_copies_of_earlier_recipes():
    state = RunState(step=7, version=7, cursor=28, throttle={}, source={}, updates=14)
    assert "version" not in asdict(state)
    restored = RunState.from_recipe_state(asdict(state))
    assert (restored.version, restored.updates) == (7, 14)


def test_resume_reports_checkpoint_and_changed_config(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    earlier = {
        "optimizer": {"lr": 1e-3},
        "seed": 0,
        "preset": "grpo",
        "task": {"_component_": "a.Task"},
        "output_dir": "x",
    }
    run = Run("1a2b3c4d", "x", 1_700_000_000.0, copy.deepcopy(earlier) | {"resume_from_checkpoint": True})
    path = Path("x/checkpoints/step_000040")
    where = "resume:    from step 40 of run 1a2b3c4d, started 2023-11-14 22:13: x/checkpoints/step_000040"
    assert resume_text(path, 40, run, earlier) == where
    run.config["optimizer"]["lr"] = 1e-4
    run.config.update(seed=7, preset="dapo", task={"_component_": "a.Task", "level": 2}, output_dir="old-1")
    assert resume_text(path, 40, run, earlier).splitlines() == [
        where,
        "changed:   optimizer.lr 0.001 -> 0.0001",
        "changed:   seed 0 -> 7",
        "changed:   preset grpo -> dapo",
        "changed:   task.level default -> 2",
    ]
    run.config["task"] = {"_component_": "a.Other"}
    assert "warning:   the task is another one than before" in resume_text(path, 40, run, earlier)
    run.config.update(max_steps=99, schedule={"decay": "linear"})
    assert resume_text(path, 40, run, earlier).splitlines()[-1] == (
        "rate:      schedule.decay=linear now ends with the new max_steps, so the learning rate changes abruptly here"
    )
    assert resume_text(path, 40, run, {}).endswith("changed:   unknown: run.json does not hold the earlier settings")


class Kept:
    """Checkpoints of steps 20, the best, and 40."""

    prompt_format_note = ""

    def __init__(self, folder, eval_reward=0.742):
        self.folder, self.eval_reward = folder, eval_reward
        for step in (20, 40):
            self.of(step).mkdir(parents=True)
            (self.of(step) / "config.json").write_text("{}")
        (self.of(40) / "recipe.json").write_text(json.dumps({"step": 40}))

    def of(self, step):
        return self.folder / f"step_{step:06d}"

    def latest(self):
        return self.of(40)

    verify_latest = latest

    def best(self):
        return None if self.eval_reward is None else (self.of(20), self.eval_reward)


def test_find_resume_checkpoint_returns_newest_unless_run_finished(tmp_path, capsys):
    kept = Kept(tmp_path / "checkpoints")
    folder = SimpleNamespace(run=Run("1a2b3c4d", "x", 0.0, {}), previous_settings={})
    assert find_resume_checkpoint(kept, folder, resume=False, total=50) is None
    assert find_resume_checkpoint(kept, None, resume=True, total=50) == kept.of(40)
    assert capsys.readouterr().out == "", "other ranks are silent"
    assert find_resume_checkpoint(kept, folder, resume=True, total=50) == kept.of(40)
    output = capsys.readouterr().out
    assert output.startswith("resume:    from step 40 of run 1a2b3c4d, started ")
    with pytest.raises(RunAlreadyComplete) as caught:
        find_resume_checkpoint(kept, folder, resume=True, total=3)
    output = str(caught.value).splitlines()
    assert output[0] == "step 40 >= max_steps=3: nothing to do" and capsys.readouterr().out == ""
    assert output[-1] == "extend:    the same command with max_steps above 40 and resume_from_checkpoint=True"


def test_where_a_run_stands(tmp_path):
    kept = Kept(tmp_path / "checkpoints")
    assert status_message(0, 60, None) == (
        "The run had not started its first step, and has no checkpoint yet, so the next start begins at step 1"
    )
    assert status_message(47, 60, kept) == (
        f"The run was at step 47 of 60. The newest checkpoint is {kept.of(40)}; resume from there with "
        f"resume_from_checkpoint=True. Best checkpoint: {kept.of(20)} (held-out reward 0.742). Curves and samples: "
        f"torchtune-ext report {tmp_path}"
    )
    kept.eval_reward = None
    assert "accurate" not in status_message(47, 60, kept)


def test_status_message_of_finished_run_lists_outputs(tmp_path):
    kept = Kept(tmp_path / "a b" / "checkpoints")
    assert status_message(40, 40, kept).splitlines() == [
        "done:      40 of 40 steps",
        f"model:     {kept.of(40)}, a model in Hugging Face format",
        f"best:      {kept.of(20)} (held-out reward 0.742)",
        f"report:    torchtune-ext report '{tmp_path}/a b'",
        "extend:    the same command with max_steps above 40 and resume_from_checkpoint=True",
    ]
    kept.prompt_format_note = "the chat template mine.jinja"
    assert status_message(40, 40, kept).splitlines()[2] == (
        "prompts:   built with the chat template mine.jinja, not with the tokenizer files in model_dir; saved with the model"
    )
    (kept.of(40) / "config.json").unlink()
    assert "step_000040, an adapter in PEFT format (adapters.save_merged=True" in status_message(40, 40, kept)
    (kept.of(40) / "merged").mkdir()
    assert "step_000040, an adapter in PEFT format; its folder merged/ holds" in status_message(40, 40, kept)
