"""Reduces clues until they just determine some facts, so that none of them can be removed.

There are two ways, which give the same result. The result depends only on the order of the clues (the first ones are
tried first), and not on the counterexamples that the solver happens to find.
"""

from bisect import insort

from torchtune_ext.tasks.temporal_clue.clues import Statement
from torchtune_ext.tasks.temporal_clue.scenario import World
from torchtune_ext.tasks.temporal_clue.solver import Solver


def drop_in_turn(
    solver: Solver, clues: list[Statement], facts: list[Statement], worlds: list[World]
) -> list[Statement]:
    """Drops each clue in turn if the others still determine the facts. The solver is asked at most once for each clue.

    Args:
        solver: the solver of the scenario.
        clues: true statements that determine the facts.
        facts: the facts to determine.
        worlds: possible worlds that are known already. They may make a question to the solver unnecessary.
    """
    goal = solver.differs(facts)
    broken = [_breaks(clues, world) for world in worlds if not all(fact.holds(world) for fact in facts)]
    left = (1 << len(clues)) - 1  # bit mask over the clues
    for bit in range(len(clues)):
        # Only this clue excludes one of the worlds, so it must stay.
        if any(mask & left == 1 << bit for mask in broken):
            continue
        others = left & ~(1 << bit)
        world = solver.find(_chosen(clues, others), goal)
        if world is None:
            left = others
        else:
            broken.append(_breaks(clues, world))
    return _chosen(clues, left)


def few_of_many(solver: Solver, clues: list[Statement], facts: list[Statement]) -> tuple[list[Statement], list[World]]:
    """Returns what `drop_in_turn` would leave, with fewer questions to the solver if few clues remain.

    Every world in which a fact is different must break a clue that is kept. If it breaks no clue kept so far,
    `drop_in_turn` keeps the last of the clues that it breaks. So the solver looks for a world that the kept clues still
    allow, and the clues to keep are chosen again, until there is no such world.

    Returns:
        The clues that remain, and the worlds that the solver found.
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
    """Returns the clues that do not hold in the world, as a bit mask."""
    mask = sum(1 << bit for bit, clue in enumerate(clues) if not clue.holds(world))
    if not mask:
        raise AssertionError("all the clues together leave a fact open, or the solver reads a clue differently")
    return mask
