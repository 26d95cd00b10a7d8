"""Keeps the environments of conversations, each alive in a process of its own that can be killed.

A conversation has a *seat*, a process, from its first turn to its end. Then the process takes the next conversation, so
as many environments are alive as there are processes (`grader.workers`), and further conversations wait.
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
# "completed"           the environment said that it is done
# "max_turns"           it was not done after the last turn that the task allows
# "length"              a turn was cut by sampling.max_tokens; the environment has not seen it
# "context_overflow"    the environment's answer and another turn do not fit in engine.max_model_len
# "early_stop"          a turn was stopped by sampling.early_stop_logprob; the environment has not seen it
# "step_timeout"        the environment did not answer in time: not the policy's fault, so not trained on
# "environment_failed"  it raised an error, died, or answered something other than a `Turn`: the same
ENDINGS = ("completed", "max_turns", "length", "context_overflow", "early_stop", "step_timeout", "environment_failed")
# Endings, and finish reasons of engines, that come from a limit of the run.
TRUNCATED_REASONS = ("length", "max_turns", "context_overflow")


class Conversations(Task, ConversationTask, Protocol):
    """A task of conversations, with its problems and their solutions."""


class EnvironmentWorker:
    """Holds the environment of one conversation after another, in a process."""

    def __init__(self, task: Conversations) -> None:
        self.task = task
        self.environment: Environment | None = None

    def __call__(self, begin: tuple[Problem, int] | None, message: Message | None) -> Turn | None:
        """Lets the environment answer a message, or closes it if there is none. `begin`: as in `Environments.step`."""
        if message is None:
            # Forgotten before `close`, which may raise.
            environment, self.environment = self.environment, None
            getattr(environment, "close", lambda: None)()
            return None
        if begin is not None:
            # Games draw from Python's own generator.
            random.seed(begin[1])
            self.environment = self.task.environment(*begin)
        # A process that died is replaced by one that knows nothing of the conversation.
        if self.environment is None:
            raise RunFailure("its process ended between two turns")
        return check_turn(self.environment.step(message))


def check_turn(turn: Any) -> Turn:
    """Returns the turn that an environment answered, in plain types. Raises ValueError if it is no valid `Turn`."""
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
            raise UsageError("step returned a message of the assistant, whose turns only the policy writes")
    if not messages and not turn.done:
        raise UsageError("step returned no message, and done=False: the policy has nothing to answer")
    return Turn([dict(message) for message in messages], score.reward, bool(turn.done), score.parts, score.note)


@dataclass(eq=False, slots=True)
class EnvironmentSlot:
    """The place of one conversation."""

    process: Future[int] = field(default_factory=Future)  # the number of its process, once one is free
    is_released: bool = False


class Environments(Grader):
    """Starts the processes of a task's environments, as a `Grader` starts its own."""

    _worker_class = EnvironmentWorker

    def __init__(self, task: Conversations, workers: int = 1, *args: Any, **options: Any):
        super().__init__(task, workers, *args, **options)
        self.max_turns = task.max_turns
        self._lock = Lock()  # guards what follows
        self._free = deque(range(workers))
        self._waiting: deque[EnvironmentSlot] = deque()

    def acquire_slot(self) -> EnvironmentSlot:
        """Returns a place for a conversation. It gets a process once one is free, and has to be left."""
        slot = EnvironmentSlot()
        with self._lock:
            if not self._free:
                self._waiting.append(slot)
                return slot
            process = self._free.popleft()
        slot.process.set_result(process)
        return slot

    def step(
        self, slot: EnvironmentSlot, message: Message, begin: tuple[Problem, int] | None = None
    ) -> "Future[Turn | Ungraded]":
        """Lets the environment answer a turn. The result says why, if it fails.

        Args:
            seat: one that has a process.
            begin: problem and seed, with the first turn.
        """

        def otherwise(kind: str, cause: str) -> Ungraded:
            cause = f"the environment's process died: {cause}" if kind in CRASH_KINDS else cause
            return Ungraded("timed_out" if kind in ("late", "stalled") else "infra_failed", cause)

        with self._lock:
            # The conversation may be left in this moment. Its process then has, or will have, another one.
            if slot.is_released:
                answer: Future[Turn | Ungraded] = Future()
                answer.cancel()
                return answer
            return self.processes.submit((begin, message), self._timeout_s, otherwise, process=slot.process.result())

    def release(self, slot: EnvironmentSlot) -> None:
        """Ends the environment of a conversation. A second call does nothing."""
        with self._lock:
            if slot.is_released:
                return
            slot.is_released = True
        # A seat that still waits for a process is only canceled: it has no environment.
        if not slot.process.cancel():
            process = slot.process.result()
            # An error of `close` changes nothing any more. The process goes on to the next conversation either way.
            try:
                closed = self.processes.submit((None, None), self._timeout_s, lambda *_: None, process=process)
            except Exception:  # noqa: BLE001 (the reason why all processes have ended)
                return
            closed.add_done_callback(lambda _: self._assign_next(process))

    def _assign_next(self, process: int) -> None:
        with self._lock:
            while self._waiting:
                slot = self._waiting.popleft()
                # False: it was left while it waited. From here on it can no longer be canceled.
                if slot.process.set_running_or_notify_cancel():
                    break
            else:
                self._free.append(process)
                return
        # This runs the callbacks of the one who waits, so it comes after the lock.
        slot.process.set_result(process)
