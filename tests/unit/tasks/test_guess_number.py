"""The game of guessing a number: its problems, its answers, and players of known strength."""

import math
import random

import pytest

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.guess_number import GuessNumber, GuessNumberEnvironment
from torchtune_ext.tasks.task import EpisodeTask

TASK = GuessNumber(seed=3)


def test_guess_number_is_deterministic_conversation_task():
    assert isinstance(TASK, EpisodeTask)
    assert TASK[7] == GuessNumber(seed=3)[7] == GuessNumber(seed=3, first=5)[2] != GuessNumber(seed=4)[7]
    problem = TASK[7]
    low, high, number = (problem.answer[name] for name in ("low", "high", "number"))
    assert problem.messages == ({"role": "user", "content": f"{low}-{high}"},)
    assert high - low == 30 and low <= number <= high


def test_guess_number_splits_share_no_number_per_range():
    sets = [
        {(p.answer["low"], p.answer["number"]) for p in map(GuessNumber(seed=s, split=split).__getitem__, range(1500))}
        for s, split in ((1, "train"), (2, "heldout"))
    ]
    assert not sets[0] & sets[1] and len(sets[1]) > 100


def turns_of(halving, problems=400):
    task = GuessNumber(seed=5, halving=halving)
    return [len(task.solution(task[i])) // 2 + 1 for i in range(problems)]


def test_guess_number_bisection_needs_at_most_five_turns():
    assert max(turns_of(1.0)) == math.floor(math.log2(31)) + 1 == TASK.max_turns
    assert max(turns_of(0.0)) > 5


def test_guess_number_solutions_equal_game_conversations():
    for index in range(50):
        problem = TASK[index]
        messages, game, answers = TASK.solution(problem), GuessNumberEnvironment(problem.answer["number"]), []
        for message in messages[::2]:
            answers.append(game.step(message))
        assert [turn.done for turn in answers] == [False] * (len(answers) - 1) + [True]
        assert [message for turn in answers for message in turn.messages] == messages[1::2]
        assert sum(turn.reward for turn in answers) == 1.0


@pytest.mark.parametrize("text", ["", "x", "12 13", "-3", "1" * 10, "12."])
def test_guess_number_non_number_ends_the_game(text):
    turn = GuessNumberEnvironment(12).step({"role": "assistant", "content": text})
    assert (turn.done, turn.reward, turn.parts["failed"]) == (True, 0.0, 1.0)


def test_answers_are_true():
    draw = random.Random(0)
    for _ in range(200):
        number, guess = draw.randint(0, 99), draw.randint(0, 99)
        turn = GuessNumberEnvironment(number).step({"role": "assistant", "content": f" {guess}\n"})
        replies = [message["content"] for message in turn.messages]
        assert replies == (["higher"] if guess < number else ["lower"] if guess > number else [])


@pytest.mark.parametrize(
    "words, message",
    [
        ({"first": -1}, "first=-1, count=None: out of range; expected first >= 0"),
        ({"size": 1}, "below=69, size=1, max_turns=5: expected at least 1, 2 and 1"),
        ({"split": "test"}, "split='test': unknown. Fix: choose one of train, heldout, all"),
        ({"halving": 2}, "halving=2: expected a fraction of the guesses"),
        ({"prompt": "?"}, r"prompt='\?' does not show the range"),
    ],
)
def test_arguments_out_of_range(words, message):
    with pytest.raises(UsageError, match=message):
        GuessNumber(**words)
