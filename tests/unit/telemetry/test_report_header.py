"""The head of the report says which run it shows and how far it came, and leaves out what it does not know."""

import json

import pytest

from torchtune_ext.run.folder import RunFolder
from torchtune_ext.telemetry.report_header import flatten_config, format_duration, run_facts, run_origin, run_status

CONFIG = {
    "model_dir": "models/Qwen2.5-7B-Instruct",
    "task": {
        "_component_": "torchtune_ext.tasks.temporal_clue.TemporalClue",
        "path": "data/clue/train.jsonl",
        "seed": 2,
    },
    "preset": "dapo",
    "loss": {"_component_": "torchtune_ext.objective.loss.PolicyLoss"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-6},
    "schedule": {"decay": "linear", "warmup": 4},
    "prompts_per_step": 32,
    "samples_per_prompt": 16,
    "updates_per_step": 2,
    "engine": {"devices": "4"},
    "device": "auto",
    "max_steps": 100,
}


def heading(config, records=(), **run):
    return {label: (value, note) for label, value, note in run_facts({"config": config, **run}, records)}


def test_how_far_a_run_came(tmp_path):
    assert run_status(tmp_path, CONFIG, 100).kind == "finished"
    assert run_status(tmp_path, CONFIG, 85).text == "stopped at step 85 of 100"
    with RunFolder(tmp_path):
        assert run_status(tmp_path, CONFIG, 85).text == "running, step 85 of 100"
        with pytest.raises(ValueError, match="in use"):
            RunFolder(tmp_path)  # asking took nothing from the run
    state = run_status(tmp_path, CONFIG, 85)
    assert (state.kind, state.step, state.total) == ("stopped", 85, 100)
    RunFolder(tmp_path).close()  # nor did it keep the next one out


def test_run_state_warmup_total_known_other_totals_unknown(tmp_path):
    warmup = {"num_problems": 4200, "epochs": 2.0, "batch_problems": 64}
    assert run_status(tmp_path, warmup, 131).kind == "finished"
    assert run_status(tmp_path, warmup, 130).text == "stopped at step 130 of 131"
    for config in (
        {},
        {"max_steps": None},
        {"max_steps": "many"},
        {"num_problems": 4, "epochs": 1.0, "batch_problems": 0},
    ):
        assert run_status(tmp_path, config, 7).text == "7 steps"


def test_the_facts_of_a_run():
    records = [{"step": 0, "time/step": 30.0}, {"step": 1, "time/step": 300.0, "memory/gpu_gib": 60.0}, {"step": 2}]
    assert heading(CONFIG, records, started=0.0) == {
        "Model": ("Qwen2.5-7B-Instruct", ""),
        "Task": ("TemporalClue", "train.jsonl"),
        "Preset": ("dapo", ""),
        "Learning rate": ("2e-06", "linear"),
        "A step": ("32 × 16 samples", "2 updates"),
        "Device": ("GPU", ""),
        "Time in steps": ("6 min", "started 1970-01-01 00:00 UTC"),
    }
    assert heading(CONFIG | {"device": "cpu"}, records)["Device"] == ("CPU", "")
    assert heading(CONFIG | {"updates_per_step": 1})["A step"] == ("32 × 16 samples", "1 update")
    assert heading(CONFIG | {"iterations_per_step": 3})["A step"] == ("32 × 16 samples", "6 updates")
    own = CONFIG | {"preset": None, "loss": {"_component_": "my_losses.Reinforce"}}
    assert heading(own)["Preset"] == ("none", "loss Reinforce")


def test_heading_common_folder_name_includes_parent():
    assert heading({"model_dir": "runs/tiny/warmup/model"})["Model"] == ("warmup/model", "")
    assert heading({"shape": {}})["Model"] == ("a new model", "")


def test_heading_unknown_facts_are_omitted():
    odd = {
        "task": 3,
        "optimizer": {"lr": "fast"},
        "schedule": None,
        "engine": [],
        "model_dir": "\0",
    }
    for run in ({}, {"config": None}, {"config": []}, {"config": {}}):
        assert run_facts(run, []) == []
    assert run_facts({"config": odd}, []) == [("Model", "\0", "")]


def test_heading_origin_shows_any_start_information():
    process = {
        "command": "tune run grpo_full",
        "commit": {"id": "0123456789abcdef", "changed": True},
        "versions": {"torch": "2.13.0"},
    }
    run = {"id": "ab", "name": "x", "config": {"a": 1}, "more": [1], "process": process}
    assert run_origin(run) == [
        ("id", "ab"), ("more", "[1]"), ("command", "tune run grpo_full"), ("commit.id", "0123456789abcdef"),
        ("commit.changed", "true"), ("versions.torch", "2.13.0")]  # fmt: skip
    assert run_facts(run, []) == [("Commit", "0123456789", "with changes")]
    for other in (None, {"commit": None}, "ab"):
        assert run_facts({"process": other}, []) == []
    assert run_origin({"id": "ab", "started": 0}) == [("id", "ab"), ("started", "1970-01-01 00:00 UTC")]


def test_flat_settings():
    assert flatten_config({"a": {"b": 1, "c": {}}, "d": None, "e": "f", "lr": 0.1 + 0.2}) == [
        ("a.b", "1"),
        ("e", "f"),
        ("lr", "0.3"),
    ]
    assert json.loads(dict(flatten_config({"list": [1, "2"]}))["list"]) == [1, "2"]


def test_durations():
    assert [format_duration(s) for s in (0.25, 42, 119.4, 120, 1260, 7199, 11100)] == [
        "0.25 s", "42 s", "119 s", "2 min", "21 min", "2 h 0 min", "3 h 5 min"]  # fmt: skip
