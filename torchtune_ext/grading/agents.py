"""Runs agents that own their loop, each in a worker process that can be killed with its children.

An agent talks to the policy through an OpenAI-compatible endpoint (`pipeline/endpoint.py`) and returns
the reward of the episode. At most `grader.workers` agents run at a time; other episodes wait.
"""

import asyncio
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field

from torchtune_ext.grading.grader import TaskWorkers
from torchtune_ext.grading.outcomes import Outcome, Ungraded, check_outcome
from torchtune_ext.run.errors import RunFailure
from torchtune_ext.settings.sections import Seconds, config_section
from torchtune_ext.tasks.task import AgentClient, AgentTask, Problem, Score, Task


@config_section("agent")
class AgentConfig:
    """The keys of `agent:`, for tasks with an agent (docs/how_to/agents.md)."""

    timeout_s: Seconds = Field(default=600.0, description="time limit in seconds for one episode")
    request_timeout_s: Seconds = Field(default=300.0, description="time limit in seconds for one request to the policy")
    max_turns: int | None = Field(default=None, ge=1, description="largest number of responses of an episode")
    on_error: Literal["ungraded"] | float = Field(
        default="ungraded", description="reward of an episode whose agent fails; ungraded: it is not trained on"
    )
    ignore_client_sampling: bool = Field(
        default=False,
        description="ignore an agent's sampling parameters that differ from the run's; false: refuse them",
    )
    host: str = Field(
        default="127.0.0.1",
        description="address of this machine at which agents reach the policy, e.g. from containers",
    )


class AgentRunTask(Task, AgentTask, Protocol):
    """Both protocols of a task with an agent: `Task` (problems) and `AgentTask`."""


class AgentWorker:
    """Runs one agent after another, in a worker process."""

    def __init__(self, task: AgentTask) -> None:
        self.task = task

    def __call__(self, problem: Problem, client: AgentClient) -> tuple[str, Outcome]:
        # A proxy of the environment does not reach an address of this machine.
        excluded = {host for name in ("NO_PROXY", "no_proxy") for host in os.environ.get(name, "").split(",")}
        if "*" not in excluded:
            hosts = excluded | {urlsplit(client.base_url).hostname or ""}
            os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(sorted(filter(None, hosts)))
        value = self.task.run_agent(problem, client)
        outcome = check_outcome(asyncio.run(value) if inspect.iscoroutine(value) else value, "the agent")
        if isinstance(outcome, Ungraded):
            raise RunFailure(outcome.cause)  # an agent's failure, as any other
        return "", outcome


class AgentPool(TaskWorkers):
    """Starts the worker processes of a task's agents.

    Args:
        task: the task whose agent is run.
        config: the `agent:` section.
        workers, output: as in `TaskWorkers`.
    """

    _worker_class = AgentWorker

    def __init__(self, task: AgentRunTask, config: AgentConfig, workers: int = 1, output: Path | None = None):
        super().__init__(task, workers, config.timeout_s, output)
        self.config = config
        self._endpoint: Any = None

    def endpoint(self, open_endpoint: Callable[[AgentConfig], Any]) -> Any:
        """Returns the endpoint of these agents, which the first call opens and `close` closes."""
        if self._endpoint is None:
            self._endpoint = open_endpoint(self.config)
        return self._endpoint

    def submit(self, problem: Problem, client: AgentClient) -> "Future[tuple[str, Outcome]]":
        """Queues an episode.

        Returns:
            A future of the finish reason if the agent failed, else "", and of the outcome.
        """

        def on_failure(kind: str, cause: str) -> tuple[str, Outcome]:
            timed_out = kind in ("timed_out", "stalled")
            outcome = Ungraded("timed_out" if timed_out else "infra_failed", f"the agent failed: {cause}")
            if self.config.on_error != "ungraded":
                outcome = Score(self.config.on_error, {"agent_failed": 1.0}, cause)
            return "agent_timeout" if timed_out else "agent_failed", outcome

        return self.processes.submit((problem, client), self._timeout_s, on_failure)

    def close(self) -> None:
        """Kills the agents and stops the endpoint."""
        super().close()
        if self._endpoint is not None:
            self._endpoint.close()
