"""Orders the problems of a run. The order is a pure function of the seed and a cursor."""

import random
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

from torchtune_ext.tasks.task import Problem, Task

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

    A thread makes the next problems in advance, because a generated puzzle takes milliseconds.
    """

    def __init__(self, task: Task, seed: int):
        self.cursor = 0  # problems handed out since the run began; a resumed run sets it
        self._task, self._seed = task, seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="problems")
        self._ahead: tuple[int, Future[list[Problem]]] | None = None  # a cursor, and the problems from there on

    def take(self, count: int) -> list[Problem]:
        """Returns the next `count` problems. Raises what the task raises."""
        first, made = self._ahead or (self.cursor, None)
        problems = made.result()[:count] if made is not None and first == self.cursor else []
        problems += self._make(self.cursor + len(problems), count - len(problems))
        self.cursor += count
        self._ahead = self.cursor, self._thread.submit(self._make, self.cursor, count)
        return problems

    def at(self, cursor: int) -> Problem:
        """Returns the problem that was, or will be, the `cursor`-th of the run, once more. Raises what the task raises."""
        return self._make(cursor, 1)[0]

    def _make(self, cursor: int, count: int) -> list[Problem]:
        length = len(self._task)
        return [self._task[problem_index(i, length, self._seed)] for i in range(cursor, cursor + count)]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
