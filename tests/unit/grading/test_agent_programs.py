"""Agents that are programs: their reward, their failures, and what they leave running."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from helpers.waiting import has_exited, wait_until
from torchtune_ext.grading.agents import AgentConfig, AgentPool
from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.tasks.agent_functions import find_agent
from torchtune_ext.tasks.task import AgentClient, Problem

# It leaves a child that holds its output open, and one in the background.
LEAVES = """
import os, subprocess
held, other = subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
open("pids", "w").write(f"{held.pid} {other.pid}")
print("a line")
"""


@dataclass
class ProgramTask:
    run_agent: Any


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return the finish reason and the outcome of a program."""
    monkeypatch.chdir(tmp_path)

    def play(program):
        task = ProgramTask(find_agent(None, [sys.executable, "-c", program]))
        with AgentPool(task, AgentConfig(timeout_s=60), output=tmp_path / "grader.log") as pool:
            problem, client = Problem("p", (), 3), AgentClient("http://127.0.0.1:9/v1", "key")
            result = pool.submit(problem, client).result(90)
            pids = (tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else []
            # Before the worker is killed with its group.
            wait_until(lambda: all(map(has_exited, pids)), 20)
        return result

    return play


def test_children_of_program_end_with_it(play):
    reason, outcome = play(LEAVES + "print(0.5)")
    assert (reason, outcome.reward) == ("", 0.5)


def test_children_of_failed_program_end_with_it(play):
    reason, outcome = play(LEAVES + "raise SystemExit(3)")
    assert reason == "agent_failed" and isinstance(outcome, Ungraded) and "exited with status 3" in outcome.cause


@pytest.mark.parametrize("line", ["", "'good'", "[1]", '{"score": 1}'])
def test_last_line_without_a_reward_is_named(play, line):
    reason, outcome = play(f"print({line!r})")
    assert reason == "agent_failed" and "expected a number, or a JSON object with `reward`" in outcome.cause


def test_proxy_of_the_environment_is_not_used(play, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name, excluded in (
        ("NO_PROXY", "127.0.0.1,example.org"),
        ("no_proxy", "127.0.0.1,example.org"),
        ("no_proxy", "*"),
    ):
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.setenv(name, excluded.removeprefix("127.0.0.1,"))
        reason, outcome = play(f"import os; print(0.5 if os.environ['no_proxy'] == {excluded!r} else 0)")
        assert (reason, outcome.reward) == ("", 0.5)
        monkeypatch.delenv(name)
