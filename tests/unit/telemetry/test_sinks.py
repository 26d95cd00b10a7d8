"""Sinks: which samples are shown and how, whose settings win, and what W&B's own reader finds in the file of a run."""

import math
import os
import socket
import subprocess
import sys
import time
from types import ModuleType

import numpy as np
import pytest

from helpers import wandb_reader
from helpers.records import make_sample
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import RolloutStore
from torchtune_ext.run.folder import Run
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.sinks import LoggingConfig, SinkContext
from torchtune_ext.telemetry.sinks.tables import COLUMNS, MAX_SAMPLES, sample_rows
from torchtune_ext.telemetry.sinks.wandb_sink import init_arguments

HOSTILE = "</script>\x00🙂\ud800\u2028\x1b[31m=cmd|' /C calc'!A0"


def group(name, *rewards, **sample):
    """A group of one sample for each reward; None: it was not graded."""
    samples = []
    for reward in rewards:
        score = None if reward is None else Score(reward, {"part": reward / 2}, "a note")
        outcome = Ungraded("infra_failed", "no grader") if score is None else score
        samples.append(make_sample([1, 2], outcome=outcome, **{"text": f"{name} {reward}", **sample}))
    return Group(Problem(name, ({"role": "user", "content": name},), 0), np.arange(3, dtype=np.int32), tuple(samples))


GROUPS = [group("narrow", 0.4, 0.6), group("good", 0.9, 1.0), group("bad", 0.0, 0.1), group("wide", 0.2, 1.0)]


def rows_of(groups, number=1):
    return [dict(zip(COLUMNS, row, strict=True)) for row in sample_rows(7, groups, number)]


def test_sample_rows_show_highest_variance_groups_best_first():
    assert [row["problem"] for row in rows_of(GROUPS)] == ["wide"] * 2
    rows = rows_of([group("g", *np.linspace(0, 1, 16))])
    rewards = [row["reward"] for row in rows]
    assert len(rows) == MAX_SAMPLES and rewards[0] == 1.0 and rewards[-1] == 0.0
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 4
    assert {(row["step"], row["problem"], row["note"]) for row in rows} == {(7, "g", "a note")}


def test_sample_row_ungraded_sample_has_reason():
    row = rows_of([group("a", None, None)])[0]
    assert (row["reward"], row["note"], row["outcome"]) == (None, "no grader", "infra_failed")


def test_texts_are_capped_and_keep_their_ends():
    text = "begin " + "x" * 9000 + " end"
    (row,) = rows_of([group(text, 1.0, text=text)])
    assert len(row["completion"]) < 4200 and len(row["prompt"]) < 2100
    assert row["completion"].startswith("begin xx") and row["completion"].endswith(" end")
    assert "characters left out" in row["completion"] and row["prompt"].startswith("user: begin")


def test_sample_rows_hostile_text_is_encodable():
    (row,) = rows_of([group(HOSTILE, 1.0, text=HOSTILE)])
    for text in (row["completion"], row["prompt"], row["problem"]):
        assert "\0" not in text and "</script>" in text and "🙂" in text
        text.encode()


def test_the_columns_have_types_that_never_mix():
    """W&B's own table takes every row of unlike groups, and refuses what has another type."""
    wandb = pytest.importorskip("wandb")
    odd = group("odd", math.inf, None, -1.0, advantage=math.nan)
    rows = sample_rows(1, [odd, Group(Problem(17, (), 0), np.arange(1), (make_sample([]),))], 3)
    table = wandb.Table(columns=COLUMNS, data=rows)
    assert len(table.data) == 4
    with pytest.raises(TypeError):
        table.add_data("one", *rows[0][1:])


def test_rollout_store_shows_every_step(tmp_path):
    shown = []
    store = RolloutStore(tmp_path, show=lambda step, groups: shown.append((step, len(groups))))
    for step in (1, 2, 3):
        store.write(step, GROUPS)
    assert shown == [(1, 4), (2, 4), (3, 4)]


# ---------------------------------------------------------------- settings

RUN = Run("id1", "name", 0.0, {"seed": 1}, {"command": "tune run"})
OURS = SinkContext(None, RUN, None, LoggingConfig(project="mine"))


def test_variables_of_wandb_win_over_the_config(tmp_path):
    opening = SinkContext(tmp_path, RUN, 5, OURS.settings)
    kwargs = init_arguments(opening, {})
    config = kwargs.pop("config")
    assert config == {"seed": 1, "process": {"command": "tune run"}}
    assert kwargs == {
        "dir": str(tmp_path), "project": "mine", "name": "name", "id": "id1", "resume": "allow",
    }  # fmt: skip
    variables = {
        "WANDB_DIR": "dir", "WANDB_PROJECT": "project", "WANDB_NAME": "name", "WANDB_RUN_ID": "id", "WANDB_RESUME": "resume",
    }  # fmt: skip
    for variable, key in variables.items():
        assert kwargs.keys() - init_arguments(opening, {variable: "x"}).keys() == {key}, variable
        assert init_arguments(opening, {variable: ""}).keys() >= kwargs.keys(), "an empty variable says nothing"
    agent = {"WANDB_SWEEP_ID": "s"}
    assert kwargs.keys() - init_arguments(opening, agent).keys() == {"project", "id"}


def test_a_fresh_run_does_not_resume(tmp_path):
    assert init_arguments(SinkContext(tmp_path, RUN), {})["resume"] is None


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"project": "a/b"}, r"logging.project='a/b': W&B takes"),
        ({"project": ""}, "logging.project=''"),
        ({"samples": -1}, "logging.samples=-1 must be"),
        ({"samples_every": 0}, "logging.samples_every=0 must be"),
        ({"to": ("comet",)}, r"unknown sink 'comet'; expected one of \['mlflow', 'tensorboard', 'trackio', 'wandb'\]"),
    ],
)
def test_wrong_settings(wrong, says):
    with pytest.raises(ValueError, match=says):
        LoggingConfig(**wrong)


def test_folder_of_missing_package_is_not_the_package(monkeypatch):
    """Of W&B, which makes a folder wandb/ in the working directory."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    with pytest.raises(
        ValueError, match=r"logging.to=\['wandb'\]: the package of 'wandb' is missing \(wandb is only a folder in "
    ):
        LoggingConfig(to=["wandb"])


def test_which_steps_are_shown():
    assert [step for step in range(25) if LoggingConfig(samples_every=10).logs_samples_at(step)] == [0, 1, 10, 20]
    assert not any(LoggingConfig(samples=0).logs_samples_at(step) for step in range(25))


# ---------------------------------------------------------------- W&B itself, in processes of their own

LOGS = """
import os, signal, sys
from pathlib import Path
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.telemetry.metrics import MetricLogger
from torchtune_ext.telemetry.sinks import LoggingConfig

folder = RunFolder(sys.argv[1])
run = folder.start_run({"seed": 1}, resuming=False)
metrics = MetricLogger(folder.path, LoggingConfig(to=("wandb",)), run, status=lambda: 143)
for step in (1, 2, 3):
    metrics.log(step, {"reward/mean": step / 4, "loss/total": float("nan"), "eval/reward_sampled": 0.1 * step})
print("logged", flush=True)
if sys.argv[2] == "die":
    signal.pause()
metrics.close()
"""


def started(folder, how, **environment):
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", LOGS, str(folder), how], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_run_stays_readable(tmp_path):
    pytest.importorskip("wandb")
    process = started(tmp_path, "die")
    assert process.stdout.readline() == "logged\n"
    deadline = time.monotonic() + 60
    while not wandb_reader.starts(tmp_path, 1, ended=False)[0].history:
        assert time.monotonic() < deadline, "W&B writes nothing while the run goes on"
    process.kill()
    process.wait()
    (start,) = wandb_reader.starts(tmp_path, 1, ended=False)
    assert {step: line["reward/mean"] for step, line in start.history.items()} == {1: 0.25, 2: 0.5, 3: 0.75}
    assert start.whole.get("exit_code") != 0, "a killed run did not succeed"


@pytest.mark.parametrize("agent", [{}, {"WANDB_SWEEP_ID": "sweep1"}], ids=["by hand", "by an agent"])
def test_the_environment_names_the_run(tmp_path, agent):
    pytest.importorskip("wandb")
    variables = {
        "WANDB_PROJECT": "theirs",
        "WANDB_RUN_ID": "agent1",
        "WANDB_TAGS": "x,y",
        "WANDB_DIR": str(tmp_path / "d"),
    }
    (tmp_path / "d").mkdir()
    process = started(
        tmp_path / "run", "end", **variables, WANDB_NOTES="why", WANDB_RUN_GROUP="g", WANDB_NAME="n", **agent
    )
    assert process.wait(60) == 0
    (start,) = wandb_reader.starts(tmp_path / "d", 1)
    assert {name: start.whole[name] for name in ("project", "run_id", "notes", "name")} == {
        "project": "theirs", "run_id": "agent1", "notes": "why", "name": "n",
    }  # fmt: skip
    assert start.run.get("sweep_id") == agent.get("WANDB_SWEEP_ID")
    assert sorted(start.run["tags"]) == ["x", "y"] and start.run["run_group"] == "g"
    assert start.whole["exit_code"] == 143


@pytest.mark.parametrize(("variables", "captured"), [({}, False), ({"WANDB_CONSOLE": "auto"}, True)])
def test_wandb_gets_terminal_output_only_on_request(tmp_path, variables, captured):
    pytest.importorskip("wandb")
    assert started(tmp_path, "end", **variables).wait(60) == 0
    (start,) = wandb_reader.starts(tmp_path, 1)
    assert ("logged" in [each["line"] for each in start.of("output_raw")]) == captured


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"WANDB_RESUME": "perhaps"},
            "an environment variable WANDB_...: resume Input should be 'allow', 'must', 'never' or 'auto'",
        ),
        ({"WANDB_TAGS": "a,"}, "an environment variable WANDB_...: run_tags Value error, Tag at index 1 is empty"),
        ({"WANDB_PROJECT": "a/b"}, "'wandb' cannot start: Invalid project name 'a/b'"),
    ],
)
def test_a_variable_that_wandb_refuses_is_named(tmp_path, variables, says):
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOGS, tmp_path, "end"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and says in done.stderr.splitlines()[-1], done.stderr


def test_wandb_without_key_offers_offline_before_run(tmp_path):
    pytest.importorskip("wandb")
    code = "from torchtune_ext.telemetry.sinks import LoggingConfig; LoggingConfig(to=('wandb',)).require_login()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)}
    for mode, status in ({}, 1), ({"WANDB_MODE": "offline"}, 0), ({"RANK": "1", "WORLD_SIZE": "2"}, 0):
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environ | mode, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert ended.returncode == status, ended.stderr
        cannot = "logging.to: 'wandb' cannot start: it has no API key. Fix: run `wandb login`"
        assert (cannot in ended.stderr) == bool(status)


def login_of(code, **variables):
    """Runs `code` with a key and the address of a server where nobody listens, which is one of this machine."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


@pytest.mark.rest  # in `make test`: the same without a key
def test_wandb_unresponsive_server_times_out():
    pytest.importorskip("wandb")
    code = "from torchtune_ext.telemetry.sinks import LoggingConfig; LoggingConfig(to=('wandb',)).require_login()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = login_of(code, WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}")
    assert ended.returncode == 1 and "set WANDB_MODE=offline" in ended.stderr
