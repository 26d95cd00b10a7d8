"""run.json records the command, folder, commit and versions of a run."""

import json
import os
import subprocess
import sys

import pytest

from torchtune_ext.run import folder
from torchtune_ext.run.folder import RunFolder, SettingChange, diff_settings


def git(folder, *words):
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, env=environment, check=True, capture_output=True)


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        (["/x/bin/python3", "/x/bin/tune", "run", "grpo_lora", "--config", "a b.yaml"],
         "tune run grpo_lora --config 'a b.yaml'"),
        (["/x/bin/python", "-m", "torchtune_ext", "run", "--nproc_per_node", "2", "grpo_full", "seed=1"],
         "python -m torchtune_ext run --nproc_per_node 2 grpo_full seed=1"),
    ],
)  # fmt: skip
def test_the_command_is_as_it_was_typed(monkeypatch, typed, command):
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert folder.process_provenance()["command"] == command


@pytest.mark.parametrize(
    ("environment", "end"), [({}, "(folder.command_words())']"), ({"TORCHELASTIC_RUN_ID": "1"}, "'seed=1']")]
)
def test_a_rank_names_the_command_of_torchrun(environment, end):
    rank = "from torchtune_ext.run import folder; print(folder.command_words())"
    torchrun = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    done = subprocess.run(
        [sys.executable, "-c", torchrun, rank, "seed=1"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(end)


def test_the_commit_of_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert folder.git_commit(tmp_path) is None
    git(tmp_path, "init")
    assert folder.git_commit(tmp_path) is None, "nothing is committed yet"
    (tmp_path / "my.yaml").write_text("lr: 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "beside.txt").write_text("untracked")
    commit = folder.git_commit(tmp_path)
    assert len(commit["id"]) == 40 and not commit["changed"]
    (tmp_path / "my.yaml").write_text("lr: 2\n")
    assert folder.git_commit(tmp_path) == {**commit, "changed": True}


def test_run_json_keeps_config_for_resumed_run(tmp_path):
    with RunFolder(tmp_path) as folder:
        folder.start_run({"seed": 0, "optimizer": {"lr": 0.1}}, resuming=False)
        assert folder.previous_settings == {}
    process = json.loads((tmp_path / "run.json").read_text())["process"]
    assert process["versions"]["torch"] and process["versions"]["python"] == sys.version.split()[0]
    assert process["folder"] == os.getcwd()
    assert set(process) == {"command", "folder", "commit", "versions"}
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    with RunFolder(tmp_path) as folder:
        folder.start_run({"seed": 1}, resuming=True)
        assert folder.previous_settings == {"seed": 0, "optimizer": {"lr": 0.1}}


def test_changes_are_leaves_by_their_dotted_keys():
    before = {"a": {"b": 1, "c": [1, 2]}, "d": None, "e": 5}
    assert diff_settings(before, before) == []
    assert diff_settings(before, {"a": {"b": 2, "c": [1, 2]}, "d": {"f": 3}, "e": 5}) == [
        SettingChange("a.b", 1, 2),
        SettingChange("d.f", "default", 3),
    ]
    assert str(SettingChange("a.b", 1, 2)) == "a.b 1 -> 2"
