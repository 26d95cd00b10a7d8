"""A run that a W&B agent has started gets its own folder and id."""

import pytest
from omegaconf import OmegaConf

from torchtune_ext.recipes import grpo
from torchtune_ext.run.folder import RunFolder, read_record, run_output_dir, wandb_agent_run
from torchtune_ext.settings.config import load_config, read_config, settings_snapshot

NEEDED = {key: {"_component_": "x"} for key in ("model", "tokenizer", "task", "optimizer")} | {
    "model_dir": "x",
    "max_steps": 1,
    "sampling": {"max_tokens": 8},
}


@pytest.fixture
def agent(monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep123")
    monkeypatch.setenv("WANDB_RUN_ID", "ab12cd34")


def loaded(**settings):
    return load_config(grpo.Config, OmegaConf.create(NEEDED | settings))


def test_agent_run_folder_and_derived_paths_include_id(agent, monkeypatch):
    assert run_output_dir("runs/x") == run_output_dir("runs/x/") == "runs/x/ab12cd34"
    cfg = loaded(output_dir="runs/x", task={"_component_": "a.B", "path": "${output_dir}/data"})
    assert (
        cfg.output_dir == settings_snapshot(cfg)["output_dir"] == "runs/x/ab12cd34"
        and cfg.task["path"] == "runs/x/ab12cd34/data"
    )
    monkeypatch.setenv("PLACE", "somewhere")
    cfg = loaded(output_dir="${oc.env:PLACE}/x")
    assert (
        cfg.output_dir == "somewhere/x/ab12cd34"
        and settings_snapshot(cfg)["output_dir"] == "${oc.env:PLACE}/x/ab12cd34"
    )
    assert read_config("grpo/tiny", []).output_dir == "runs/tiny/grpo/ab12cd34"


@pytest.mark.parametrize("missing", ["WANDB_SWEEP_ID", "WANDB_RUN_ID"])
def test_agent_single_variable_is_ignored(agent, monkeypatch, missing):
    for value in (None, ""):
        monkeypatch.setenv(missing, value) if value is not None else monkeypatch.delenv(missing)
        assert wandb_agent_run() is None and loaded(output_dir="runs/x").output_dir == "runs/x"


def test_agent_run_uses_id_and_archives_earlier_run(agent, tmp_path):
    for _ in range(2):
        with RunFolder(run_output_dir(str(tmp_path))) as folder:
            assert folder.start_run({}, resuming=False).id == "ab12cd34"
            (folder.path / "metrics.jsonl").write_text("{}\n")
    assert (tmp_path / "ab12cd34" / "old-1").is_dir()
    assert read_record(tmp_path / "ab12cd34")["name"] == "ab12cd34"


@pytest.mark.parametrize("value", ["../x", "a/b", "a b", ".", "..", "-x", "${x}"])
def test_agent_invalid_folder_id_is_reported(agent, monkeypatch, value):
    monkeypatch.setenv("WANDB_RUN_ID", value)
    with pytest.raises(ValueError, match="WANDB_RUN_ID=.* is the folder name of this sweep run"):
        loaded(output_dir="runs/x")


def test_a_missing_folder_is_still_missing(agent):
    with pytest.raises(ValueError, match="output_dir has no value"):
        loaded()
