"""As few clues as will do: sufficient to settle some facts, and none of them can be removed.

Two ways to the same result. What is dropped depends on the order of the clues only (the first are tried first), never
on which counterexamples the solver happens to find.
"""

from bisect import insort

from torchtune_ext.tasks.temporal_clue.clues import Statement
from torchtune_ext.tasks.temporal_clue.scenario import World
from torchtune_ext.tasks.temporal_clue.solver import Solver


def drop_in_turn(
    solver: Solver, clues: list[Statement], facts: list[Statement], worlds: list[World]
) -> list[Statement]:
    """Drops each clue in turn where the others still settle the facts: one question to the solver for a clue.

    `clues` settle the facts; `worlds` are possible worlds that are known already and may save a question.
    """
    goal = solver.differs(facts)
    broken = [_breaks(clues, world) for world in worlds if not all(fact.holds(world) for fact in facts)]
    left = (1 << len(clues)) - 1  # bit mask over the clues
    for bit in range(len(clues)):
        if any(mask & left == 1 << bit for mask in broken):
            continue  # there is a world that this clue alone excludes
        others = left & ~(1 << bit)
        world = solver.find(_chosen(clues, others), goal)
        if world is None:
            left = others
        else:
            broken.append(_breaks(clues, world))
    return _chosen(clues, left)


def few_of_many(solver: Solver, clues: list[Statement], facts: list[Statement]) -> tuple[list[Statement], list[World]]:
    """What `drop_in_turn` would leave, from few questions where few of the clues remain; and the worlds met on the way.

    Each world in which a fact is otherwise must break a clue that is kept, and dropping in turn leaves it the last one
    of those that it breaks, if none kept so far does. The solver looks for a world that the kept clues still allow
    until there is none: every drop that these worlds allow is then allowed by all worlds.
    """
    goal = solver.differs(facts)
    worlds: list[World] = []
    broken: list[int] = []  # bit masks over the clues, in the order of the last clue that a world breaks
    while True:
        kept = 0
        for mask in broken:
            if not mask & kept:
                kept |= 1 << mask.bit_length() - 1
        world = solver.find(_chosen(clues, kept), goal)
        if world is None:
            return _chosen(clues, kept), worlds
        worlds.append(world)
        insort(broken, _breaks(clues, world))


def _chosen(clues: list[Statement], mask: int) -> list[Statement]:
    return [clue for bit, clue in enumerate(clues) if mask >> bit & 1]


def _breaks(clues: list[Statement], world: World) -> int:
    """The clues that do not hold in the world, as a bit mask."""
    mask = sum(1 << bit for bit, clue in enumerate(clues) if not clue.holds(world))
    if not mask:
        raise AssertionError("all the clues together leave a fact open, or the solver reads a clue differently")
    return mask
