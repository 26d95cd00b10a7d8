"""The stages: they go on when learned, and do not stick."""

import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.matmul.stages import (
    MIN_CORRECT_LATE,
    PATIENCE_VISITS,
    STAGES,
    WINDOW_VISITS,
    Curriculum,
    Visit,
)

NAMES = list(STAGES)
SAMPLES = 8  # of a group
VISITS = st.lists(
    st.builds(Visit, st.sampled_from([0.0, 0.05, 0.125, 0.25, 0.5, 0.75, 1.0]), st.none() | st.floats(-3.0, 6.0)),
    max_size=400,
)


def visit(rng: random.Random, right: float, speed: float) -> Visit:
    """A group of SAMPLES programs, of which each is right with this probability; speeds vary by a quarter of a doubling."""
    count = sum(rng.random() < right for _ in range(SAMPLES))
    return Visit(count / SAMPLES, speed + rng.gauss(0, 0.25 / math.sqrt(count)) if count else None)


@given(visits=VISITS)
def test_curriculum_stage_moves_by_one_after_window(visits):
    curriculum, at, count = Curriculum(), "none", 0
    for each in visits:
        reason, count = curriculum.observe("p", each), count + 1
        after = curriculum.stage_of("p")
        assert bool(reason) == (after != at)
        if reason:
            assert NAMES.index(after) == NAMES.index(at) + 1 and count >= WINDOW_VISITS
            count = 0
        at = after


@given(visits=VISITS, cut=st.integers(0, 400))
def test_curriculum_restored_state_continues_identically(visits, cut):
    whole, first = Curriculum(), Curriculum()
    moves = [whole.observe("p", each) for each in visits]
    head = [first.observe("p", each) for each in visits[:cut]]
    resumed = Curriculum()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + [resumed.observe("p", each) for each in visits[cut:]] == moves
    assert resumed.state_dict() == whole.state_dict()


@given(a=VISITS, b=VISITS, seed=st.integers(0, 99))
@settings(max_examples=50)
def test_problems_do_not_touch_each_other(a, b, seed):
    together, alone = Curriculum(), Curriculum()
    queue = [("a", len(a)), ("b", len(b))]
    names = [name for name, count in queue for _ in range(count)]
    random.Random(seed).shuffle(names)
    left = {"a": list(a), "b": list(b)}
    for name in names:
        together.observe(name, left[name].pop(0))
    for each in a:
        alone.observe("a", each)
    if a:
        assert together.state_dict()["problems"]["a"] == alone.state_dict()["problems"]["a"]
    assert len(together.state_dict()["problems"]) == bool(a) + bool(b)


class Learner:
    """Learns as GRPO runs do: what is newly permitted first costs correctness, then pays, and then nothing more comes."""

    def __init__(self, seed: int, half_life: float) -> None:
        self.rng, self.half_life = random.Random(seed), half_life
        self.practice = dict.fromkeys(NAMES, 0)

    def __call__(self, stage: str) -> Visit:
        learned = 1 - 0.5 ** (self.practice[stage] / self.half_life)
        self.practice[stage] += 1
        return visit(self.rng, 0.35 + 0.45 * learned, NAMES.index(stage) + learned)


@pytest.mark.parametrize("half_life", [3, 10, 30])
def test_a_learner_does_not_stick(half_life):
    """It is at the last stage after PATIENCE visits of each other one, since more than HALFWAY is right."""
    for seed in range(30):
        curriculum, learner, moves = Curriculum(), Learner(seed, half_life), []
        for _ in range((len(NAMES) - 1) * PATIENCE_VISITS):
            if curriculum.observe("p", learner(curriculum.stage_of("p"))):
                moves.append(curriculum.stage_of("p"))
        assert moves == NAMES[1:], (seed, moves)
        # It does not run through either: each stage had what it takes to see that it is settled.
        assert all(learner.practice[name] >= WINDOW_VISITS for name in NAMES[:-1])


def test_curriculum_slow_learner_stays_longer():
    """What still rises is not left: a stage keeps whoever learns slowly longer than whoever learns fast."""
    visits = {}
    for half_life in (3, 30):
        total = 0
        for seed in range(30):
            curriculum, learner = Curriculum(), Learner(seed, half_life)
            while curriculum.stage_of("p") != NAMES[-1]:
                curriculum.observe("p", learner(curriculum.stage_of("p")))
                total += 1
        visits[half_life] = total / 30 / (len(NAMES) - 1)
    assert WINDOW_VISITS <= visits[3] < visits[30] <= PATIENCE_VISITS


def test_curriculum_insufficient_visits_keep_stage():
    curriculum = Curriculum()
    assert not any(curriculum.observe("p", Visit(0.0)) for _ in range(300))
    assert not any(curriculum.observe("q", Visit(MIN_CORRECT_LATE - 0.01, 1.0)) for _ in range(300))
    assert {curriculum.stage_of(name) for name in ("p", "q", "never seen")} == {"none"}


def test_curriculum_rising_problem_stays_until_patience_ends():
    for speed, right in ((0.05, 0.0), (0.0, 0.004)):
        curriculum = Curriculum()
        count = 0
        while curriculum.stage_of("p") == "none":
            curriculum.observe("p", Visit(min(1.0, 0.6 + right * 4 * count), speed * count))
            count += 1
        assert count == PATIENCE_VISITS if speed else WINDOW_VISITS < count < PATIENCE_VISITS


def test_bad_arguments():
    saved = Curriculum(["none", "all"]).state_dict()
    with pytest.raises(ValueError, match="begin anew"):
        Curriculum().load_state_dict(saved)
