"""Generates puzzles: draws a scenario and clues, keeps the necessary clues, and writes the text."""

import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_ext.tasks.temporal_clue.clues import (
    Place,
    Statement,
    draw_clues,
    has_motives,
    murder_facts,
    piece_places,
)
from torchtune_ext.tasks.temporal_clue.prompt import fact_question, puzzle_prompt
from torchtune_ext.tasks.temporal_clue.scenario import Scenario, World, draw_scenario, motive_role
from torchtune_ext.tasks.temporal_clue.size import Dims, Size
from torchtune_ext.tasks.temporal_clue.solver import Solver

ALL_QUESTIONS = 8  # total of main and bonus questions in the public puzzles


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One puzzle, with the fields of the public files."""

    num_clues: int
    prompt: str
    solution: dict[str, str]  # letter of the question -> answer


def make_puzzle(seed: int, index: int, size: Size) -> Puzzle:
    """Generates puzzle `index` of the endless sequence of `seed`, a pure function of the arguments.

    Raises:
        RunFailure: OR-Tools is not installed.
        DeadlineExceeded: the solver exceeded its time limit; smaller puzzles help.
    """
    rng = random.Random(f"temporal clue/{seed}/{index}")
    dims = size.draw(rng)
    # In rare cases, a scenario leaves no question and is drawn again.
    while True:
        if puzzle := puzzle_of(rng, draw_scenario(rng, dims), dims, size):
            return puzzle


def puzzle_of(rng: random.Random, scenario: Scenario, dims: Dims, size: Size) -> Puzzle | None:
    """Generates the puzzle of a scenario, or None if clues state all answers to main questions."""
    # The clues for the whole world come first, so few are left to try for the answers alone.
    solver = Solver(scenario)
    clues, worlds = select_minimal(solver, draw_clues(rng, scenario, size.clues), all_facts(scenario))
    main = [fact for fact in murder_facts(scenario) if fact not in clues]
    bonus = _bonus_facts(rng, scenario, clues, ALL_QUESTIONS - len(main) if dims.bonus is None else dims.bonus)
    if not main:
        return None
    questions = [fact_question(scenario, fact) for fact in main]
    questions += [fact_question(scenario, fact, ask_who) for fact, ask_who in bonus]
    if not size.whole_world:
        clues, _ = select_minimal(solver, clues, main + [fact for fact, _ in bonus], worlds)
    rng.shuffle(clues)
    text = puzzle_prompt(scenario, clues, questions, len(main))
    return Puzzle(len(clues), text, {chr(ord("A") + n): answer for n, (_, answer, _) in enumerate(questions)})


def all_facts(scenario: Scenario) -> list[Statement]:
    """Returns all facts of a scenario."""
    return [*murder_facts(scenario), *piece_places(scenario), *has_motives(scenario)]


def _bonus_facts(
    rng: random.Random, scenario: Scenario, clues: list[Statement], most: int
) -> list[tuple[Statement, bool]]:
    """Draws up to `most` facts that no clue states, as (fact, ask "Who is motivated by ...?")."""
    facts: list[tuple[Statement, bool]] = []
    for place in piece_places(scenario):
        if place.who == scenario.boddy:
            continue
        facts.append((place, False))
        if scenario.motives and place.who < len(scenario.suspects):
            motive = scenario.truth.motives[place.who]
            # A question about a shared motive would have several answers.
            if scenario.count_holders(motive) == 1:
                facts.append((Place(motive_role(motive), place.time, place.room), False))
    for fact in has_motives(scenario):
        facts.append((fact, scenario.count_holders(fact.motive) == 1 and rng.random() < 0.5))
    return [(fact, ask_who) for fact, ask_who in rng.sample(facts, min(most, len(facts))) if fact not in clues]


def select_minimal(
    solver: Solver, clues: list[Statement], facts: list[Statement], known_worlds: Sequence[World] = ()
) -> tuple[list[Statement], list[World]]:
    """Drops each clue in turn, the first ones first, if the others still determine the facts.

    Known worlds save solver calls.

    Returns:
        The kept clues, and the worlds that the solver found. The clues do not depend on the worlds.
    """
    # Every world in which a fact differs must violate a kept clue. If a world violates none of the
    # clues kept so far, the last clue that it violates is kept. So the solver searches for a world
    # that the kept clues still allow, and the kept clues are chosen again, until it finds no world.
    goal = solver.difference_literal(facts)
    worlds: list[World] = []
    # Bit masks over the clues, sorted by the last clue that a world violates.
    different = [world for world in known_worlds if not all(fact.holds(world) for fact in facts)]
    broken = sorted(_violation_mask(clues, world) for world in different)
    while True:
        kept = 0
        for mask in broken:
            if not mask & kept:
                kept |= 1 << mask.bit_length() - 1
        world = solver.find_world(_chosen(clues, kept), goal)
        if world is None:
            return _chosen(clues, kept), worlds
        worlds.append(world)
        insort(broken, _violation_mask(clues, world))


def _chosen(clues: list[Statement], mask: int) -> list[Statement]:
    return [clue for bit, clue in enumerate(clues) if mask >> bit & 1]


def _violation_mask(clues: list[Statement], world: World) -> int:
    """Returns the clues that do not hold in the world, as a bit mask."""
    mask = sum(1 << bit for bit, clue in enumerate(clues) if not clue.holds(world))
    if not mask:
        raise AssertionError("all clues together leave a fact open, or the solver encodes a clue differently")
    return mask
