"""Orders the problems of a run. The order is a pure function of the seed and a cursor."""

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from torchtune_ext.tasks.task import Graded, Problem, Task

SHUFFLE_LIMIT = 1 << 20  # longer tasks are generated, so their problems are independent and need no shuffling


def problem_index(cursor: int, length: int, seed: int) -> int:
    """Returns the index of the `cursor`-th problem of a run.

    Every epoch is a new permutation, so that no problem repeats within an epoch.
    """
    epoch, position = divmod(cursor, length)
    if length > SHUFFLE_LIMIT:
        return position
    return _permutation(length, seed, epoch)[position]


class ProblemStream:
    """Hands out the problems of a run.

    A thread makes the next problems in advance, because a generated puzzle takes milliseconds. Those of a task that adapts
    (`AdaptiveTask`) are made when they are asked for, since they depend on what became of earlier ones.
    """

    def __init__(self, task: Task, seed: int):
        self.cursor = 0  # problems handed out since the run began; a resumed run sets it
        self._task, self._seed, self._adapts = task, seed, hasattr(task, "observe")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="problems")
        self._ahead: tuple[int, Future[list[Problem]]] | None = None  # a cursor, and the problems from there on

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems. Raises what the task raises."""
        first, made = self._ahead or (self.cursor, None)
        problems = made.result()[:count] if made is not None and first == self.cursor else []
        problems += self._make(self.cursor + len(problems), count - len(problems))
        self.cursor += count
        if not self._adapts:
            self._ahead = self.cursor, self._thread.submit(self._make, self.cursor, count)
        return problems

    def at(self, cursor: int) -> Problem:
        """Returns the problem that was, or will be, the `cursor`-th of the run, once more; of a task that adapts, what it asks
        there now. Raises what the task raises."""
        return self._make(cursor, 1)[0]

    def again(self, cursor: int, stored: Problem) -> Problem | None:
        """Returns the `cursor`-th problem of the run, of which one was stored, or None if the task has changed since. One of a
        task that adapts is believed: what it asked then may differ from what it asks now. Raises what the task raises."""
        if self._adapts:
            return stored
        problem = self.at(cursor)
        return problem if problem.id == stored.id else None

    def observe(self, step: int, groups: Sequence[Graded], folder: Path) -> dict[str, float]:
        """Tells a task that adapts what became of the groups of a step, and returns what is to be logged of it."""
        return self._task.observe(step, groups, folder) if self._adapts else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what the task has learned from observations, JSON-able: nothing of one that does not adapt."""
        # In a dictionary of its own, so that a task that has learned nothing yet can be told from one that never does.
        return {"learned": self._task.state_dict()} if self._adapts else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned. Raises ValueError if the task is another one, or has other settings."""
        if bool(state) != self._adapts:
            had, now = ("adapts", "does not") if state else ("does not adapt", "does")
            raise ValueError(
                f"task: the one of the checkpoint {had} to what became of its problems, and that of this run {now}; set task "
                "as it was, or begin a new run in another output_dir"
            )
        if state:
            self._task.load_state_dict(state["learned"])

    def _make(self, cursor: int, count: int) -> list[Problem]:
        places = [(i, problem_index(i, len(self._task), self._seed)) for i in range(cursor, cursor + count)]
        return [self._task.ask(index, i) if self._adapts else self._task[index] for i, index in places]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
