"""Sinks: which samples are shown and how, whose settings win, and what W&B's own reader finds in the file of a run."""

import json
import math
import os
import socket
import subprocess
import sys
import time
from dataclasses import astuple
from typing import get_args, get_type_hints

import numpy as np
import pytest
import wandb_reader
from records import guessed, sampled
from tables import every_row

from torchtune_ext.grading import Outcome
from torchtune_ext.groups import Group
from torchtune_ext.run.folder import Run
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.telemetry.rollouts import RolloutStore
from torchtune_ext.telemetry.sinks import LoggingConfig, Opening
from torchtune_ext.telemetry.sinks import samples as module
from torchtune_ext.telemetry.sinks.samples import SampleRow, chosen_groups, sample_rows
from torchtune_ext.telemetry.sinks.wandb_sink import COLUMNS, arguments

HOSTILE = "</script>\x00🙂\ud800\u2028\x1b[31m=cmd|' /C calc'!A0"


def group(name, *rewards, **sample):
    """A group of one sample for each reward; None: it was not graded."""
    samples = []
    for reward in rewards:
        score = None if reward is None else Score(reward, {"part": reward / 2}, "a note")
        outcome = Outcome("infra_failed", None, "no grader") if score is None else Outcome("scored", score, "")
        samples.append(sampled([1, 2], outcome=outcome, **{"text": f"{name} {reward}", **sample}))
    return Group(Problem(name, ({"role": "user", "content": name},), 0), np.arange(3, dtype=np.int32), tuple(samples))


GROUPS = [group("narrow", 0.4, 0.6), group("good", 0.9, 1.0), group("bad", 0.0, 0.1), group("wide", 0.2, 1.0)]


def names(choices):
    return [(kind, one.problem.id) for kind, one in choices]


def test_best_worst_and_widest_come_in_turn():
    assert names(chosen_groups(GROUPS, 3)) == [("best", "good"), ("worst", "bad"), ("widest", "wide")]
    # Then the second best. Nothing is shown twice, and there is no more than there is.
    assert names(chosen_groups(GROUPS, 9))[3:] == [("best", "narrow")]
    assert len({one.problem.id for _, one in chosen_groups(GROUPS, 9)}) == 4
    assert chosen_groups([], 3) == [] and chosen_groups(GROUPS, 0) == []


def test_groups_that_nobody_graded_are_shown_only_where_there_is_no_other():
    silent = [group("a", None, None), group("b", None)]
    assert names(chosen_groups([*silent, GROUPS[0]], 3)) == [("best", "narrow")]
    assert names(chosen_groups(silent, 1)) == [("not graded", "a")]
    row = sample_rows(5, silent, 1)[0]
    assert (row.reward, row.parts, row.note, row.outcome) == (None, "{}", "no grader", "infra_failed")


def test_a_group_is_shown_from_its_best_to_its_worst_sample():
    rows = sample_rows(7, [group("g", *np.linspace(0, 1, 16))], 1)
    rewards = [row.reward for row in rows]
    assert len(rows) == module.MAX_SAMPLES and rewards[0] == 1.0 and rewards[-1] == 0.0
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == 4
    assert {(row.step, row.chosen, row.problem, row.note) for row in rows} == {(7, "best", "g", "a note")}
    assert json.loads(rows[0].parts) == {"part": 0.5}
    assert len(sample_rows(7, [group("g", 1.0, None)], 1)) == 2


def test_texts_are_capped_and_keep_their_ends():
    text = "begin " + "x" * 9000 + " end"
    (row,) = sample_rows(1, [group(text, 1.0, text=text)], 1)
    assert len(row.completion) <= 4096 and len(row.prompt) <= 2048
    assert row.completion.startswith("begin xx") and row.completion.endswith(" end")
    assert "characters left out" in row.completion and row.prompt.startswith("user: begin")
    (row,) = sample_rows(1, [group("p", 1.0, text="y" * 4096)], 1)
    assert row.completion == "y" * 4096


def test_hostile_text_is_text_that_every_encoder_takes():
    (row,) = sample_rows(1, [group(HOSTILE, 1.0, text=HOSTILE)], 1)
    for text in (row.completion, row.prompt, row.problem):
        assert "\0" not in text and "</script>" in text and "🙂" in text
        text.encode()


def test_a_prompt_is_shown_as_the_model_read_it():
    (row,) = sample_rows(1, [group("p", 1.0)], 1, spell=lambda ids: f"<|system|>of its own {len(ids)}\0")
    assert row.prompt == "<|system|>of its own 3\ufffd"


def test_versions():
    old, new = sampled([1, 2], versions=[3, 4], text="a"), sampled([1], versions=[5], text="b")
    none = sampled([], text="")
    rows = sample_rows(1, [Group(Problem("p", (), 0), np.arange(1), (old, new, none))], 1)
    assert {(row.completion, row.version) for row in rows} == {("a", 3), ("b", 5), ("", None)}


def test_a_conversation_is_shown_with_the_reward_of_each_turn():
    """What its environment answered is no token that was sampled."""
    (row,) = sample_rows(3, [Group(Problem("game", (), 58), np.arange(1), (guessed("max_turns", turns=(55, 58)),))], 1)
    assert row.completion == "assistant (reward 0): 55\nuser: higher\nassistant (reward 1): 58"
    assert (row.finish, row.tokens, row.reward, row.version) == ("max_turns", 6, 1.0, 0)


def test_the_columns_have_types_that_never_mix():
    """W&B's own table takes every row of unlike tables, and refuses what has another type."""
    wandb = pytest.importorskip("wandb")
    odd = group("odd", math.inf, None, -1.0, advantage=math.nan)
    rows = sample_rows(1, [odd, Group(Problem(17, (), 0), np.arange(1), (sampled([]),))], 3)
    table = wandb.Table(columns=list(COLUMNS), data=[list(astuple(row)) for row in rows])
    for name, hint in get_type_hints(SampleRow).items():
        assert {type(getattr(row, name)) for row in rows} <= {*(get_args(hint) or (hint,))}, name
    with pytest.raises(TypeError):
        table.add_data("one", *[getattr(rows[0], name) for name in COLUMNS[1:]])


def test_the_store_hands_on_every_step_whatever_it_keeps(tmp_path):
    shown = []
    store = RolloutStore(tmp_path, keep_every=2, show=lambda step, groups: shown.append((step, len(groups))))
    for step in (1, 2, 3):
        store.write(step, GROUPS)
    assert shown == [(1, 4), (2, 4), (3, 4)]


# ---------------------------------------------------------------- settings

RUN = Run("id1", "name", 0.0, {"seed": 1}, {"command": "tune run", "config": None})
OURS = Opening(None, RUN, None, LoggingConfig(project="mine"))


def test_variables_of_wandb_win_over_the_config(tmp_path):
    opening = Opening(tmp_path, RUN, 5, OURS.settings)
    kwargs = arguments(opening, {})
    config = kwargs.pop("config")
    assert config == {"seed": 1, "process": {"command": "tune run", "config": None}}
    assert kwargs == {
        "dir": str(tmp_path), "project": "mine", "name": "name", "id": "id1", "resume": "allow",
    }  # fmt: skip
    variables = {
        "WANDB_DIR": "dir", "WANDB_PROJECT": "project", "WANDB_NAME": "name", "WANDB_RUN_ID": "id", "WANDB_RESUME": "resume",
    }  # fmt: skip
    for variable, key in variables.items():
        assert kwargs.keys() - arguments(opening, {variable: "x"}).keys() == {key}, variable
        assert arguments(opening, {variable: ""}).keys() >= kwargs.keys(), "an empty variable says nothing"
    agent = {"WANDB_SWEEP_ID": "s"}
    assert kwargs.keys() - arguments(opening, agent).keys() == {"project", "id"}


def test_a_fresh_run_does_not_resume_and_the_yaml_is_shown(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"seed: 1 # \xff\n")
    for name, shown in ((str(tmp_path / "c.yaml"), "seed: 1 # \ufffd\n"), (str(tmp_path / "gone.yaml"), None)):
        run = Run("id1", "name", 0.0, {"seed": 1}, {"config": name})
        kwargs = arguments(Opening(tmp_path, run), {})
        assert kwargs["resume"] is None and kwargs["config"]["process"].get("yaml") == shown


@every_row(
    "wrong, says",
    [
        ({"project": "a/b"}, r"logging.project='a/b': W&B takes"),
        ({"project": ""}, "logging.project=''"),
        ({"samples": -1}, "logging.samples=-1 must be a number of groups, or 0"),
        ({"samples_every": 0}, "logging.samples_every=0 must be at least 1"),
        ({"to": ("trackio",)}, r"nothing is called 'trackio'; choose from \['tensorboard', 'wandb'\]"),
    ],
)
def test_wrong_settings(wrong, says):
    with pytest.raises(ValueError, match=says):
        LoggingConfig(**wrong)


def test_which_steps_are_shown():
    assert [step for step in range(25) if LoggingConfig(samples_every=10).shows(step)] == [0, 1, 10, 20]
    assert not any(LoggingConfig(samples=0).shows(step) for step in range(25))


# ---------------------------------------------------------------- W&B itself, in processes of their own

LOGS = """
import os, signal, sys
from pathlib import Path
from torchtune_ext.run.folder import RunFolder
from torchtune_ext.telemetry.metrics import Metrics
from torchtune_ext.telemetry.sinks import LoggingConfig

folder = RunFolder(sys.argv[1])
run = folder.begin({"seed": 1}, resuming=False)
metrics = Metrics(folder.path, LoggingConfig(to=("wandb",)), run, status=lambda: 143)
for step in (1, 2, 3):
    metrics.log(step, {"reward/mean": step / 4, "loss/total": float("nan"), "eval/accuracy_sampled": 0.1 * step})
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


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"WANDB_RESUME": "perhaps"},
            "a variable WANDB_...: resume Input should be 'allow', 'must', 'never' or 'auto'",
        ),
        ({"WANDB_TAGS": "a,"}, "a variable WANDB_...: run_tags Value error, Tag at index 1 is empty"),
        ({"WANDB_PROJECT": "a/b"}, "which cannot start: Invalid project name 'a/b'"),
    ],
)
def test_a_variable_that_wandb_refuses_is_named(tmp_path, variables, says):
    pytest.importorskip("wandb")
    environment = {**os.environ, "WANDB_MODE": "offline", **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOGS, tmp_path, "end"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and says in done.stderr.splitlines()[-1], done.stderr


def test_without_a_key_offline_is_offered_before_a_run_begins(tmp_path):
    pytest.importorskip("wandb")
    code = "from torchtune_ext.telemetry.sinks import LoggingConfig; LoggingConfig(to=('wandb',)).require_login()"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path)}
    for mode, status in ({}, 1), ({"WANDB_MODE": "offline"}, 0), ({"RANK": "1"}, 0):
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environ | mode, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert ended.returncode == status, ended.stderr
        cannot = "logging.to names 'wandb', which cannot start: it has no API key. Without an account or a network: WANDB_MODE=offline"
        assert (cannot in ended.stderr) == bool(status)


def login_of(code, **variables):
    """Runs `code` with a key and the address of a server where nobody listens, which is one of this machine."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ |= {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def test_a_server_that_takes_connections_and_does_not_answer_is_given_up():
    pytest.importorskip("wandb")
    code = "from torchtune_ext.telemetry.sinks import LoggingConfig; LoggingConfig(to=('wandb',)).require_login()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = login_of(code, WANDB_BASE_URL=f"http://127.0.0.1:{server.getsockname()[1]}")
    assert ended.returncode == 1 and "WANDB_MODE=offline keeps the run in its folder" in ended.stderr
