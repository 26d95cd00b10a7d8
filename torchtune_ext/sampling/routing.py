"""Which engine a group goes to: the pure part of the pool.

A group goes as a whole to the engine of which the fewest tokens are expected, so that its prompt is computed once, by that
engine, and the others keep their caches for their own groups. It stays there. What still waits moves once an engine has
nothing to do, if it gains by it: a group that has not begun moves wherever that makes the longer of two queues shorter; the
rest of one that has begun costs its prompt a second time, and moves only when the loads are far apart.

Hashing the prompt would look at no load: published runs with it had one engine whose cache fell from 98% to 5% hits while
three were idle.
"""

from collections.abc import Sequence

FAR = 2.0  # how many times the load, with the move, the other one has to be, for a group that has begun to move
MEMORY = 256  # completions over which the mean length is taken, about


class Lengths:
    """Follows how many tokens a completion has, on average."""

    def __init__(self):
        self._mean, self._count = 0.0, 0

    def add(self, tokens: int) -> None:
        """Takes the length of a finished completion."""
        self._count = min(self._count + 1, MEMORY)
        self._mean += (tokens - self._mean) / self._count

    def expected(self, max_tokens: int) -> float:
        """Returns the tokens that a completion of at most so many will have; the most, until one has finished."""
        return min(self._mean, max_tokens) if self._count else float(max_tokens)


def least(loads: Sequence[float]) -> int:
    """Returns the index of the smallest load; of equal ones the first."""
    return min(range(len(loads)), key=loads.__getitem__)


def pays(here: float, there: float, tokens: float, prompt: int, begun: bool) -> bool:
    """Whether a group's waiting requests should move.

    Args: here, there: tokens expected of this engine and of the other one; tokens: expected of what would move; prompt: tokens
    of the prompt; begun: whether this engine has computed it already.
    """
    if begun:
        return FAR * (there + tokens + prompt) < here
    return there + tokens < here
