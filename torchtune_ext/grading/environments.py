"""Runs the environments of episodes, each in its own process that can be killed.

An episode reserves one process (`EnvironmentPool.slot`) from its first turn to its last. The process then takes the
next episode. At most `grader.workers` environments run at a time; other episodes wait.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from torchtune_ext.grading.grader import TaskWorkers
from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.processes import CRASH_KINDS
from torchtune_ext.tasks.task import Environment, EnvironmentReply, EpisodeTask, Message, Problem, Score, Task, to_score

# finish reason         what ended the episode
# "completed"           the environment returned done=True
# "max_turns"           the environment was not done after the last turn that the task allows
# "length"              sampling.max_tokens truncated a turn; the environment did not receive it
# "context_overflow"    the environment's reply and another turn exceed engine.max_model_len
# "early_stop"          sampling.early_stop_logprob stopped a turn; not passed to the environment
# "step_timeout"        the environment exceeded its deadline; the episode is not trained on
# "environment_failed"  the environment raised, crashed, or returned an invalid reply; the episode is
#                       not trained on
# "agent_timeout"       an agent exceeded agent.timeout_s (agents.py)
# "agent_failed"        an agent raised, crashed, or returned neither a number nor a Score
FINISH_REASONS = (
    "completed", "max_turns", "length", "context_overflow", "early_stop", "step_timeout", "environment_failed",
    "agent_timeout", "agent_failed",
)  # fmt: skip
# Finish reasons that a limit of the run causes.
TRUNCATED_REASONS = ("length", "max_turns", "context_overflow")


class EnvironmentTask(Task, EpisodeTask, Protocol):
    """Both protocols of an episode task: `Task` (problems, solutions) and `EpisodeTask`."""


class EnvironmentWorker:
    """Runs the environment of one episode after another, in a worker process."""

    def __init__(self, task: EnvironmentTask) -> None:
        self.task = task
        self.environment: Environment | None = None

    def __call__(self, reset_args: tuple[Problem, int] | None, message: Message | None) -> EnvironmentReply | None:
        """Passes a message to the environment.

        Args:
            reset_args: problem and seed, with the first message of an episode; else None.
            message: the policy's turn; None closes the environment.

        Raises:
            RunFailure: the process restarted between two turns.
            UsageError: `step` returned an invalid reply.
        """
        if message is None:
            # The reference is dropped before `close`, which may raise.
            environment, self.environment = self.environment, None
            getattr(environment, "close", lambda: None)()
            return None
        if reset_args is not None:
            # Some environments (tasks/games.py) use Python's global random generator.
            random.seed(reset_args[1])
            self.environment = self.task.environment(*reset_args)
        # A restarted process does not have the episode's environment.
        if self.environment is None:
            raise RunFailure("its process exited between two turns")
        return check_reply(self.environment.step(message))


def check_reply(reply: Any) -> EnvironmentReply:
    """Returns an environment's reply in plain types.

    Raises:
        UsageError: the value is not a valid `EnvironmentReply`.
    """
    if not isinstance(reply, EnvironmentReply):
        raise UsageError(
            f"step returned {type(reply).__name__}; expected an EnvironmentReply of torchtune_ext.tasks.task"
        )
    score = to_score(Score(reply.reward, reply.parts, reply.note))
    messages = list(reply.messages)
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not isinstance(message.get("content"), str):
            raise UsageError(
                f'step returned the message {message!r:.80}; expected {{"role": "user", "content": "..."}}'
            )
        if message["role"] == "assistant":
            raise UsageError(
                "step returned a message of the assistant, whose turns only the policy writes; expected another role"
            )
    if not messages and not reply.done:
        raise UsageError(
            "step returned no message, and done=False, so the policy has no input; expected a message or done=True"
        )
    return EnvironmentReply(
        [dict(message) for message in messages], score.reward, bool(reply.done), score.parts, score.note
    )


class EnvironmentPool(TaskWorkers):
    """Starts the worker processes of a task's environments and assigns them to episodes.

    All episodes of a pool run in one asyncio loop.
    """

    _worker_class = EnvironmentWorker

    def __init__(self, task: EnvironmentTask, workers: int = 1, *args: Any, **options: Any):
        super().__init__(task, workers, *args, **options)
        self.max_turns = task.max_turns
        self._free: asyncio.Queue[int] = asyncio.Queue()  # indices of processes
        for worker_index in range(workers):
            self._free.put_nowait(worker_index)
        self._closing: set[asyncio.Task] = set()  # asyncio keeps only weak references to tasks

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Reserves a process for an episode: waits for a free one and yields its index.

        After the body, the environment is closed. The process then takes the next episode.
        """
        worker_index = await self._free.get()
        try:
            yield worker_index
        finally:
            # An environment may hang in `close`, so the episode does not wait for it.
            closing = asyncio.create_task(self._close_environment(worker_index))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def step(
        self, worker_index: int, message: Message, reset_args: tuple[Problem, int] | None = None
    ) -> "Future[EnvironmentReply | Ungraded]":
        """Passes a turn to the environment.

        Args:
            worker_index: the process, as yielded by `slot`.
            reset_args: problem and seed; required with the first turn.

        Returns:
            A future of the environment's reply, or of an `Ungraded` with the cause if it fails.
        """

        def on_failure(kind: str, cause: str) -> Ungraded:
            cause = f"the environment's process crashed: {cause}" if kind in CRASH_KINDS else cause
            return Ungraded("timed_out" if kind in ("timed_out", "stalled") else "infra_failed", cause)

        return self.processes.submit((reset_args, message), self._timeout_s, on_failure, process=worker_index)

    async def _close_environment(self, worker_index: int) -> None:
        # An error in `close` is ignored, also of a pool that has failed or is closed: the process
        # takes the next episode in either case, which then raises the pool's error.
        with suppress(Exception):
            closed = self.processes.submit((None, None), self._timeout_s, lambda *_: None, process=worker_index)
            await asyncio.wrap_future(closed)
        self._free.put_nowait(worker_index)
