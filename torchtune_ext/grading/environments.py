"""Runs the environments of conversations, each in its own process that can be killed.

A conversation holds a slot, one process, from its first turn to its last. The process then takes
the next conversation. At most `grader.workers` environments run at a time; other conversations
wait.
"""

import random
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

from torchtune_ext.grading.grader import Grader
from torchtune_ext.grading.outcomes import Ungraded
from torchtune_ext.run.errors import RunFailure, UsageError
from torchtune_ext.run.processes import CRASH_KINDS
from torchtune_ext.tasks.task import ConversationTask, Environment, Message, Problem, Score, Task, Turn, to_score

# ending                what happened
# "completed"           the environment returned done=True
# "max_turns"           the environment was not done after the last turn that the task allows
# "length"              sampling.max_tokens truncated a turn; the environment did not receive it
# "context_overflow"    the environment's answer and another turn exceed engine.max_model_len
# "early_stop"          sampling.early_stop_logprob stopped a turn; not passed to the environment
# "step_timeout"        the environment exceeded its deadline; the conversation is not trained on
# "environment_failed"  the environment raised, crashed, or returned something other than a `Turn`;
#                       the conversation is not trained on
ENDINGS = ("completed", "max_turns", "length", "context_overflow", "early_stop", "step_timeout", "environment_failed")
# Endings, and engine finish reasons, that a limit of the run causes.
TRUNCATED_REASONS = ("length", "max_turns", "context_overflow")


class Conversations(Task, ConversationTask, Protocol):
    """A conversation task with its problems and their solutions."""


class EnvironmentWorker:
    """Runs the environment of one conversation after another, in a worker process."""

    def __init__(self, task: Conversations) -> None:
        self.task = task
        self.environment: Environment | None = None

    def __call__(self, reset_args: tuple[Problem, int] | None, message: Message | None) -> Turn | None:
        """Passes a message to the environment.

        Args:
            reset_args: problem and seed, with the first message of a conversation; else None.
            message: the policy's turn; None closes the environment.

        Raises:
            RunFailure: the process restarted between two turns.
            UsageError: `step` returned an invalid turn.
        """
        if message is None:
            # The reference is dropped before `close`, which may raise.
            environment, self.environment = self.environment, None
            getattr(environment, "close", lambda: None)()
            return None
        if reset_args is not None:
            # Games draw from Python's global random generator.
            random.seed(reset_args[1])
            self.environment = self.task.environment(*reset_args)
        # A restarted process does not have the conversation's environment.
        if self.environment is None:
            raise RunFailure("its process exited between two turns")
        return check_turn(self.environment.step(message))


def check_turn(turn: Any) -> Turn:
    """Returns an environment's turn in plain types.

    Raises:
        UsageError: the value is not a valid `Turn`.
    """
    if not isinstance(turn, Turn):
        raise UsageError(f"step returned {type(turn).__name__}; return a Turn of torchtune_ext.tasks.task")
    score = to_score(Score(turn.reward, turn.parts, turn.note))
    messages = list(turn.messages)
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not {"role", "content"} <= set(message)
            or not isinstance(message["content"], str)
        ):
            raise UsageError(f'step returned the message {message!r:.80}; write {{"role": "user", "content": "..."}}')
        if message["role"] == "assistant":
            raise UsageError(
                "step returned a message of the assistant, whose turns only the policy writes; "
                "expected the role user or tool"
            )
    if not messages and not turn.done:
        raise UsageError(
            "step returned no message, and done=False: the policy has nothing to answer; return a message or done=True"
        )
    return Turn([dict(message) for message in messages], score.reward, bool(turn.done), score.parts, score.note)


@dataclass(eq=False, slots=True)
class EnvironmentSlot:
    """A conversation's claim on a worker process."""

    # Index of the process, set when one is free.
    process: Future[int] = field(default_factory=Future)
    is_released: bool = False


class Environments(Grader):
    """Starts the worker processes of a task's environments and assigns them to conversations."""

    _worker_class = EnvironmentWorker

    def __init__(self, task: Conversations, workers: int = 1, *args: Any, **options: Any):
        super().__init__(task, workers, *args, **options)
        self.max_turns = task.max_turns
        self._lock = Lock()  # guards the two queues
        self._free = deque(range(workers))
        self._waiting: deque[EnvironmentSlot] = deque()

    def acquire_slot(self) -> EnvironmentSlot:
        """Returns a slot for a conversation.

        The slot's `process` resolves when a process is free. Call `release` when the conversation
        ends.
        """
        slot = EnvironmentSlot()
        with self._lock:
            if not self._free:
                self._waiting.append(slot)
                return slot
            process = self._free.popleft()
        slot.process.set_result(process)
        return slot

    def step(
        self, slot: EnvironmentSlot, message: Message, reset_args: tuple[Problem, int] | None = None
    ) -> "Future[Turn | Ungraded]":
        """Passes a turn to the environment.

        Args:
            slot: a slot whose `process` has resolved.
            message: the policy's turn.
            reset_args: problem and seed; required with the first turn.

        Returns:
            A future of the environment's turn, or of an `Ungraded` with the cause if it fails.
        """

        def on_failure(kind: str, cause: str) -> Ungraded:
            cause = f"the environment's process crashed: {cause}" if kind in CRASH_KINDS else cause
            return Ungraded("timed_out" if kind in ("late", "stalled") else "infra_failed", cause)

        with self._lock:
            # Another thread may have released the slot. Its process then belongs to another
            # conversation.
            if slot.is_released:
                answer: Future[Turn | Ungraded] = Future()
                answer.cancel()
                return answer
            return self.processes.submit(
                (reset_args, message), self._timeout_s, on_failure, process=slot.process.result()
            )

    def release(self, slot: EnvironmentSlot) -> None:
        """Closes a conversation's environment and frees its process. A second call does nothing."""
        with self._lock:
            if slot.is_released:
                return
            slot.is_released = True
        # A slot that still waits for a process has no environment, so it is only canceled.
        if not slot.process.cancel():
            process = slot.process.result()
            # An error in `close` is ignored: the process takes the next conversation in either
            # case.
            try:
                closed = self.processes.submit((None, None), self._timeout_s, lambda *_: None, process=process)
            except Exception:  # noqa: BLE001 (the pool has failed or is closed)
                return
            closed.add_done_callback(lambda _: self._assign_next(process))

    def _assign_next(self, process: int) -> None:
        with self._lock:
            while self._waiting:
                slot = self._waiting.popleft()
                # False means that the waiting slot was released. After True it cannot be canceled.
                if slot.process.set_running_or_notify_cancel():
                    break
            else:
                self._free.append(process)
                return
        # This call runs the callbacks of the waiting conversation, so it must not hold the lock.
        slot.process.set_result(process)
