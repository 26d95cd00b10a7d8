"""The words of the puzzles: read back from the text, by a reader that shares nothing with the generator.

The reader turns a prompt into facts and clues in plain strings, and knows the rules only as the prompt states them. The public
puzzles, where they are present, show that both the wording and its meaning are theirs.
"""

from dataclasses import replace

import pytest

from helpers.clue_reader import Translator, needs_public, public_puzzles, read
from torchtune_ext.tasks.temporal_clue.prompt import fact_question, puzzle_prompt
from torchtune_ext.tasks.temporal_clue.puzzle import all_facts


@needs_public
def test_clue_reader_reproduces_public_prompts_exactly():
    for number, puzzle in enumerate(public_puzzles()):
        r = read(puzzle["prompt"])
        translate = Translator(r)
        clues = [translate.clue(clue) for clue in r.clues]
        assert len(clues) == puzzle["num_clues"]
        facts = [translate.question(words, puzzle["solution"][letter]) for letter, words in r.questions.items()]
        questions = [fact_question(translate.scenario, fact, ask_who) for fact, ask_who in facts]
        assert [gold for _, gold, _ in questions] == list(puzzle["solution"].values())
        assert puzzle_prompt(translate.scenario, clues, questions, r.main) == puzzle["prompt"], number


@needs_public
@pytest.mark.timeout(300)
def test_clue_public_puzzles_have_unique_published_answers():
    """Our reading of the clues (exclusive "or", moves, motives) leaves one world, with the published answers."""
    pytest.importorskip("ortools")
    from torchtune_ext.tasks.temporal_clue.solver import Solver

    for number, puzzle in enumerate(public_puzzles()):
        r = read(puzzle["prompt"])
        translate = Translator(r)
        solver = Solver(translate.scenario)
        clues = [translate.clue(clue) for clue in r.clues]
        world = solver.find_world(clues, solver.model.new_bool_var(""))
        assert world is not None, number
        facts = [translate.question(words, puzzle["solution"][letter])[0] for letter, words in r.questions.items()]
        assert all(fact.holds(world) for fact in facts), number
        assert all(clue.holds(world) for clue in clues), number
        everything = all_facts(replace(translate.scenario, truth=world))
        assert solver.find_world(clues, solver.difference_literal(everything)) is None, number
