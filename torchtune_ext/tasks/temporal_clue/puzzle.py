"""Makes a `Puzzle`: draws a scenario and its clues, keeps the clues that determine the answers, and writes the text.

A puzzle is a pure function of (seed, index, size). Nothing depends on the order of a set, or on the counterexamples
that the solver happens to find.
"""

import random
from dataclasses import dataclass

from torchtune_ext.tasks.temporal_clue.clues import (
    Place,
    Statement,
    draw_clues,
    has_motives,
    murder_facts,
    piece_places,
)
from torchtune_ext.tasks.temporal_clue.minimal import drop_in_turn, few_of_many
from torchtune_ext.tasks.temporal_clue.prompt import prompt, question
from torchtune_ext.tasks.temporal_clue.scenario import Scenario, draw_scenario, motivated_by
from torchtune_ext.tasks.temporal_clue.size import Dims, Size
from torchtune_ext.tasks.temporal_clue.solver import Solver

EDITION = 1  # raised when the same (seed, index, size) gives another puzzle than before
ALL_QUESTIONS = 8  # main and bonus questions together, in the public puzzles


@dataclass(frozen=True, slots=True)
class Puzzle:
    """One puzzle, with the fields of the public files."""

    num_clues: int
    prompt: str
    solution: dict[str, str]  # letter of the question -> answer


def make_puzzle(seed: int, index: int, size: Size) -> Puzzle:
    """Makes puzzle `index` of the endless sequence of `seed`.

    Raises:
        RuntimeError: OR-Tools is not installed.
        TimeoutError: the solver needs too long; smaller puzzles help.
    """
    rng = random.Random(f"temporal clue/{seed}/{index}")
    dims = size.draw(rng)
    # A scenario that leaves no question to ask is drawn again, which is rare.
    while True:
        scenario = draw_scenario(rng, dims)
        puzzle = puzzle_of(rng, scenario, dims, size)
        if puzzle is not None:
            return puzzle


def puzzle_of(rng: random.Random, scenario: Scenario, dims: Dims, size: Size) -> Puzzle | None:
    """Makes the puzzle of a scenario, or returns None if a clue states the answer to every main question."""
    solver = Solver(scenario)
    clues, worlds = few_of_many(solver, draw_clues(rng, scenario, size.clues), whole_world(scenario))
    main = [fact for fact in murder_facts(scenario) if fact not in clues]
    bonus = _bonus_facts(rng, scenario, clues, ALL_QUESTIONS - len(main) if dims.bonus is None else dims.bonus)
    if not main:
        return None
    asked = [question(scenario, fact) for fact in main]
    asked += [question(scenario, fact, ask_who) for fact, ask_who in bonus]
    if not size.whole_world:
        clues = drop_in_turn(solver, clues, main + [fact for fact, _ in bonus], worlds)
    rng.shuffle(clues)
    text = prompt(scenario, clues, asked, len(main))
    return Puzzle(len(clues), text, {chr(ord("A") + n): answer for n, (_, answer, _) in enumerate(asked)})


def whole_world(scenario: Scenario) -> list[Statement]:
    """Returns all facts of the scenario."""
    return [*murder_facts(scenario), *piece_places(scenario), *has_motives(scenario)]


def _bonus_facts(
    rng: random.Random, scenario: Scenario, clues: list[Statement], most: int
) -> list[tuple[Statement, bool]]:
    """Draws up to `most` facts that no clue states.

    Returns:
        Each fact, and whether its question is "Who is motivated by ...?".
    """
    facts: list[tuple[Statement, bool]] = []
    for place in piece_places(scenario):
        if place.who == scenario.boddy:
            continue
        facts.append((place, False))
        if scenario.motives and place.who < len(scenario.suspects):
            motive = scenario.truth.motives[place.who]
            if scenario.holders(motive) == 1:
                facts.append((Place(motivated_by(motive), place.time, place.room), False))
    for fact in has_motives(scenario):
        facts.append((fact, scenario.holders(fact.motive) == 1 and rng.random() < 0.5))
    chosen = rng.sample(facts, min(most, len(facts)))
    return [(fact, ask_who) for fact, ask_who in chosen if fact not in clues]
