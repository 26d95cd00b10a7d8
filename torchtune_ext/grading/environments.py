"""Keeps the environments of conversations, each alive in a process of its own that can be killed.

A conversation has a *seat*, a process, from its first turn until it is over. Then its environment is closed, and the process
takes the next conversation. So as many environments are alive as there are processes (`grader.workers`), and further
conversations wait. The process is killed where a call takes longer than `grader.timeout_s`, which loses no other conversation.

ending                what happened
"completed"           the environment said that it is done
"max_turns"           it was not, after the last turn that the task allows
"length"              a turn was cut by sampling.max_tokens; the environment has not seen it
"context_overflow"    what the environment answered and another turn do not fit in engine.max_model_len
"step_timeout"        the environment did not answer in time: nobody's fault, so not trained on
"environment_failed"  it raised an error, died, or answered what is no `Turn`: the same
"""

import random
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from torchtune_ext.grading.calls import Outcome
from torchtune_ext.grading.grader import Grader
from torchtune_ext.run.errors import Failure, Mistake
from torchtune_ext.tasks.task import Environment, Message, Problem, Score, Task, Turn, score_of

ENDINGS = ("completed", "max_turns", "length", "context_overflow", "step_timeout", "environment_failed")
# Endings, and finish reasons of engines, by a limit of the run.
CUT = ("length", "deadline", "max_turns", "context_overflow")


class Stage:
    """Has the environment of one conversation after another. It lives in a process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.environment: Environment | None = None

    def __call__(self, begin: tuple[Problem, int] | None, message: Message | None) -> Turn | None:
        """Lets the environment answer a message, or, where there is none, closes it.

        Args:
            begin: problem and seed with a conversation's first message.
        """
        if message is None:
            environment, self.environment = self.environment, None
            getattr(environment, "close", lambda: None)()
            return None
        if begin is not None:
            random.seed(begin[1])  # games draw from Python's own generator
            self.environment = self.task.environment(*begin)
        if self.environment is None:
            raise Failure("its process ended between two turns")
        return checked_turn(self.environment.step(message))


def checked_turn(turn: Any) -> Turn:
    """Returns what an environment answered, in plain types. Raises ValueError if it is none."""
    if not isinstance(turn, Turn):
        raise Mistake(f"step returned {type(turn).__name__}; return a Turn of torchtune_ext.tasks.task")
    score = score_of(Score(turn.reward, turn.parts, turn.note))
    messages = list(turn.messages)
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise Mistake(f'step returned the message {message!r:.80}; write {{"role": "user", "content": "..."}}')
        if message["role"] == "assistant":
            raise Mistake("step returned a message of the assistant, whose turns only the policy writes")
    if not messages and not turn.done:
        raise Mistake("step returned no message, and done=False: the policy has nothing to answer")
    return Turn([dict(message) for message in messages], score.reward, bool(turn.done), score.parts, score.note)


@dataclass(eq=False, slots=True)
class Seat:
    """The place of one conversation."""

    process: Future[int] = field(default_factory=Future)  # the number of its process, once one is free
    left: bool = False


class Environments(Grader):
    """Starts the processes of a task's environments, in the place of a `Grader`. The task is sent as it is there."""

    _calls = Stage

    def __init__(self, task: Task, workers: int = 1, *args: Any, **options: Any):
        super().__init__(task, workers, *args, **options)
        self.max_turns = task.max_turns
        self._lock = Lock()  # guards what follows
        self._free = deque(range(workers))
        self._waiting: deque[Seat] = deque()

    def seat(self) -> Seat:
        """Returns the place of a conversation, which has a process at once if one is free. It has to be left."""
        seat = Seat()
        with self._lock:
            if not self._free:
                self._waiting.append(seat)
                return seat
            process = self._free.popleft()
        seat.process.set_result(process)
        return seat

    def step(self, seat: Seat, message: Message, begin: tuple[Problem, int] | None = None) -> "Future[Turn | Outcome]":
        """Lets the environment answer a turn. The result is an outcome without a score where it does not.

        Args:
            seat: with a process.
            begin: problem and seed with the first turn.
        """

        def otherwise(kind: str, cause: str) -> Outcome:
            cause = f"the environment's process died: {cause}" if kind == "died" else cause
            return Outcome("timed_out" if kind == "late" else "infra_failed", None, cause)

        return self.processes.submit((begin, message), self._timeout_s, otherwise, process=seat.process.result())

    def leave(self, seat: Seat) -> None:
        """Ends the environment of a conversation. What goes wrong in its `close` changes nothing any more. A second call does
        nothing."""
        with self._lock:
            if seat.left:
                return
            seat.left = True
        if not seat.process.cancel():
            process = seat.process.result()
            closed = self.processes.submit((None, None), self._timeout_s, lambda *_: None, process=process)
            closed.add_done_callback(lambda _: self._give(process))

    def _give(self, process: int) -> None:
        with self._lock:
            while self._waiting:
                seat = self._waiting.popleft()
                if seat.process.set_running_or_notify_cancel():
                    break
            else:
                self._free.append(process)
                return
        seat.process.set_result(process)
