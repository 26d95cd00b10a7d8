"""Agents as functions of the user, or as programs in any language."""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.reaper import live_processes
from torchtune_ext.tasks.grade_functions import import_grader
from torchtune_ext.tasks.task import AgentClient, Problem, Score

Agent = Callable[[Problem, AgentClient], Any]  # returns a number, a Score, or a coroutine of these


def find_agent(agent: str | Agent | None, command: Sequence[str] | None) -> Agent:
    """Returns the agent of a task.

    Raises:
        UsageError: the function is not found, or the command is not a list of strings.
    """
    if command is not None:
        if isinstance(command, str) or not all(isinstance(part, str) for part in command) or not command:
            raise UsageError(f"command={command!r}: expected a list of strings, such as [python, my_agent.py]")
        return CommandAgent(tuple(command))
    return import_grader(agent, "agent", "client") if isinstance(agent, str) else agent  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """An agent that is a program."""

    command: tuple[str, ...]

    def __call__(self, problem: Problem, client: AgentClient) -> Score:
        variables = {
            "OPENAI_BASE_URL": client.base_url, "OPENAI_API_KEY": client.api_key, "OPENAI_MODEL": client.model,
        }  # fmt: skip
        given = {
            "id": problem.id, "messages": list(problem.messages), "answer": problem.answer, "example": dict(problem.example),
        }  # fmt: skip
        # Standard error goes to grader.log. The program is in the process group that is killed at a
        # timeout. Its output is a file, since a child that it leaves running would keep a pipe open.
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            done = subprocess.run(
                self.command, input=json.dumps(given, default=repr), stdout=file, text=True, check=False,
                env={**os.environ, **variables},
            )  # fmt: skip
            _kill_remaining_children()
            file.seek(0)
            *output, last = file.read().rstrip("\n").split("\n")
        print(*output, sep="\n", end="\n" if output else "")
        if done.returncode:
            raise RunFailure(f"{self.command[0]} exited with status {done.returncode}")
        try:
            value = json.loads(last)
            return Score(**value) if isinstance(value, dict) else Score(float(value))
        except (ValueError, TypeError):
            raise UsageError(
                f"the last line of {self.command[0]} is {last!r:.60}; expected a number, or a JSON object with `reward`"
            ) from None


def _kill_remaining_children() -> None:
    """Kills what a program has left running, if this process leads its group, as a worker does."""
    own = os.getpid()
    for pid, is_tracker in live_processes(own).items() if os.getpgrp() == own else ():
        # A Python resource tracker ends by itself, after it has removed shared memory.
        if pid != own and not is_tracker:
            with suppress(OSError):  # it has ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
