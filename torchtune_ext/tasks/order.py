"""In which order a run walks over the problems of a task: a pure function of the seed and a cursor."""

import random
from functools import lru_cache

SHUFFLE_LIMIT = 1 << 20  # longer tasks are generated ones, whose problems are independent draws already


def problem_index(cursor: int, length: int, seed: int) -> int:
    """Index of the `cursor`-th problem of a run; every epoch is a new permutation, so that none repeats within one."""
    epoch, position = divmod(cursor, length)
    if length > SHUFFLE_LIMIT:
        return position
    return _permutation(length, seed, epoch)[position]


@lru_cache(maxsize=2)
def _permutation(length: int, seed: int, epoch: int) -> list[int]:
    indices = list(range(length))
    random.Random(f"{seed}/{epoch}").shuffle(indices)
    return indices
