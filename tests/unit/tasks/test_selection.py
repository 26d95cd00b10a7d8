"""Which problems are asked, by what became of the earlier ones; that nothing is forgotten, and that a resumed run asks the same."""

import pickle
from collections import Counter

import pytest

from torchtune_ext.run.errors import UsageError
from torchtune_ext.tasks.problem_stream import ProblemStream
from torchtune_ext.tasks.selection import NearLevel, level_names
from torchtune_ext.tasks.task import EpisodeTask, Score

ARITHMETIC = "torchtune_ext.tasks.arithmetic.Arithmetic"
LEVELS = [{"level": 1}, {"level": 4}, {"level": 7}]
HAS_SIGNAL = {"level=4"}


def levels(**words):
    return NearLevel(ARITHMETIC, {"seed": 2}, LEVELS, **words)


def problems(**words):
    return NearLevel(ARITHMETIC, {"seed": 2, "count": 40}, **words)


def graded(problem, signal, samples=4):
    return problem, [("", Score(float(i == 0 and signal)), "scored") for i in range(samples)]


def play(stream, steps, has_signal, count=20, folder=None):
    """The problems of some steps, in which a group has a signal where `has_signal` says so of its problem."""
    batches = []
    for step in range(steps):
        taken = stream.next_problems(count)
        values = stream.observe(step, [graded(each, has_signal(each)) for each in taken], folder)
        batches.append(taken)
    return batches, values


def level_of(problem):
    return problem.id.partition("/")[0]


def test_selection_prefers_learnable_levels_and_revisits_others():
    steps, values = play(ProblemStream(levels(), 0), 60, lambda problem: level_of(problem) in HAS_SIGNAL)
    first, late = (Counter(map(level_of, sum(part, []))) for part in (steps[:1], steps[20:]))
    assert set(first) == {"level=1", "level=4", "level=7"} and max(first.values()) < 15
    share = {name: count / 800 for name, count in late.items()}
    # The weights are 1 and the floor twice, up to what a level near the floor still remembers.
    assert share["level=4"] == pytest.approx(1 / 1.2, abs=0.06) and min(share.values()) > 0.04
    assert values == {
        "selection/level=1": pytest.approx(0, abs=0.01),
        "selection/level=4": 1.0,
        "selection/level=7": pytest.approx(0, abs=0.01),
    }
    ids = [problem.id for step in steps for problem in step]
    assert len(set(ids)) == len(ids), "an endless task asks nothing twice"


def test_selection_zero_variance_problems_repeat_every_few_epochs():
    task = problems()
    keen = {task[i].id for i in range(10)}
    steps, values = play(ProblemStream(task, 0), 100, lambda problem: problem.id in keen)
    late = Counter(problem.id for step in steps[20:] for problem in step)
    assert len(late) == 40 and min(late[name] for name in keen) > 3 * max(
        late[name] for name in late if name not in keen
    )
    assert values == {"selection/settled": 0.75}


def test_selection_problem_regaining_reward_variance_returns():
    stream = ProblemStream(levels(), 0)
    play(stream, 30, lambda problem: level_of(problem) == "level=1")
    steps, _ = play(stream, 60, lambda problem: level_of(problem) == "level=7")
    share = Counter(map(level_of, sum(steps[30:], [])))["level=7"] / 600
    assert share > 0.7


@pytest.mark.parametrize("make", [levels, problems])
def test_selection_resumed_run_asks_identical_problems(make):
    def signal(problem):
        return hash(problem.answer[-1]) % 3 == 0

    whole, _ = play(ProblemStream(make(), 0), 8, signal)
    stream = ProblemStream(make(), 0)
    play(stream, 4, signal)
    resumed = ProblemStream(make(), 0)
    resumed.load_state_dict(pickle.loads(pickle.dumps(stream.state_dict())))
    resumed.cursor = stream.cursor
    assert play(resumed, 4, signal)[0] == whole[4:]


@pytest.mark.parametrize(
    "levels, names",
    [
        ([{"level": 1}, {"level": 4}], ["level=1", "level=4"]),
        ([{"level": 1, "split": "all"}, {"split": "all"}], ["level=1", "default"]),
        (
            [{"size": {"suspects": n, "weapons": 2, "rooms": m}} for n in (2, 3) for m in (2, 3)],
            ["suspects=2,rooms=2", "suspects=2,rooms=3", "suspects=3,rooms=2", "suspects=3,rooms=3"],
        ),
        ([{"generators": {"chain_sum": {"min_terms": 2}}}, {"generators": {"gcd": None}}], ["chain_sum", "gcd"]),
    ],
)
def test_selection_level_names_show_differences(levels, names):
    assert [name or "default" for name in level_names(levels)] == names


def test_selection_wrapper_preserves_grading_and_environment():
    task = pickle.loads(pickle.dumps(levels()))
    for index in range(6):
        problem = task[index]
        assert task.grade(problem, task.solution(problem)).reward == 1.0
    assert not hasattr(task, "environment") and not hasattr(task, "grade_group")
    game = NearLevel("torchtune_ext.tasks.guess_number.GuessNumber", {"seed": 1}, [{"size": 7}, {"size": 31}])
    assert isinstance(game, EpisodeTask) and game.max_turns == 5
    problem = game[1]
    assert problem.id.startswith("size=31/") and game.environment(problem, 0).number == problem.answer["number"]


def test_selection_ignores_ungraded_samples():
    task = levels()
    failed = task[0], [("", None, "infra_failed")] * 3 + [("", Score(1.0), "scored")]
    assert set(task.observe(1, [failed], None).values()) == {1.0}


@pytest.mark.parametrize(
    "words, message",
    [
        ({"task": "torchtune_ext.tasks.arithmetic.Arithmetics"}, "did you mean 'Arithmetic'"),
        ({"task": ARITHMETIC}, "has 2,147,483,647 problems. Fix: set levels"),
        ({"task": ARITHMETIC, "settings": {"count": 1}}, "has one problem. Fix: set levels"),
        ({"task": ARITHMETIC, "levels": [{"level": 1}]}, "expected null, or two or more"),
        ({"task": ARITHMETIC, "levels": 3}, "levels=3: expected null, or two or more"),
        (
            {"task": ARITHMETIC, "levels": [1, 2]},
            r"levels=\[1, 2\]: expected null, or two or more mappings of settings",
        ),
        (
            {"task": ARITHMETIC, "levels": [{"level": 1}, {"levle": 2}]},
            "unexpected keyword argument 'levle'; expected seed, count",
        ),
        ({"task": ARITHMETIC, "levels": [{"level": 1}] * 2}, "two levels are equal"),
        ({"task": ARITHMETIC, "levels": LEVELS, "floor": 0.0}, r"floor=0.0: expected a fraction"),
        ({"task": ARITHMETIC, "levels": [{"level": 1}, {"level": 11}]}, "give a level from 1 to 10"),
        (
            {"task": "torchtune_ext.tasks.selection.NearLevel", "settings": {"task": ARITHMETIC, "levels": LEVELS}},
            "chooses its problems by itself already",
        ),
    ],
)
def test_arguments(words, message):
    with pytest.raises(UsageError, match=message):
        NearLevel(**words)


def test_a_checkpoint_of_other_levels_is_refused():
    with pytest.raises(UsageError, match="task.levels: none, but the checkpoint was written with"):
        problems().load_state_dict(levels().state_dict())
