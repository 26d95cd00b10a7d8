"""Unusable problems are logged and skipped, and a resumed run skips the same problems."""

import json
import time

import pytest

from helpers.letter_tokens import LetterTokenizer
from helpers.scripted_task import NumberedTask
from helpers.waiting import wait_until
from torchtune_ext.pipeline.source import RolloutConfig, make_prompt_check
from torchtune_ext.tasks.problem_stream import (
    MAX_BAD_IN_A_ROW,
    MAX_BAD_NAMED,
    ProblemStream,
    TransientReason,
    UsableProblems,
    problem_index,
)
from torchtune_ext.tasks.task import Problem

SEED, LENGTH = 3, 10


class Broken:
    """Problem 2 raises, 5 is not a Problem, `long` rejects 7. Counts the requests."""

    def __init__(self, length=LENGTH, bad=(2, 5)):
        self.length, self.bad, self.indices = length, bad, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.indices.append(index)
        if index in self.bad[:1]:
            raise KeyError("a broken row")
        return {"index": index} if index in self.bad else Problem(f"p-{index}", (), index)


class Adapting(Broken):
    """Problem 2 raises until outcomes have been observed."""

    learned = 0

    def ask(self, index, cursor):
        if index == 2 and not self.learned:
            raise KeyError("not yet")
        return Problem(f"p-{index}", (), index)

    def observe(self, step, groups, folder):
        self.learned = 1
        return {}

    def state_dict(self):
        return {"learned": self.learned}

    def load_state_dict(self, state):
        self.learned = state["learned"]


def long(problem):
    return "its prompt is long" if problem.answer == 7 else ""


def answers(problems):
    return [problem.answer for problem in problems]


def usable(count):
    """The problems in order, without unusable problems."""
    places = [problem_index(place, LENGTH, SEED) for place in range(4 * count)]
    return [index for index in places if index not in (2, 5, 7)][:count]


def test_bad_problem_is_replaced_by_the_next(caplog):
    task = Broken()
    stream = ProblemStream(task, SEED, long)
    assert answers(stream.next_problems(4) + stream.next_problems(3) + stream.next_problems(14)) == usable(21)
    assert sorted(stream.skipped_indices) == [2, 5, 7]
    assert stream.observe(1, (), None) == {"problems/skipped": 3.0}
    log = caplog.text
    assert log.count("index 2: KeyError: 'a broken row' (") == 1 and "test_bad_problems.py:" in log
    assert log.count("index 5: the task returned dict, not a Problem") == 1
    assert log.count("'p-7' (index 7): its prompt is long") == 1
    stream._prefetched.result()
    # Three epochs, and problems that are made in advance.
    assert [task.indices.count(index) for index in (2, 5, 7)] == [1, 1, 1] and task.indices.count(0) >= 3


def test_stream_reports_positions_of_its_problems():
    stream = ProblemStream(Broken(), SEED, long)
    drawn = stream.next_with_positions(8)
    assert [problem_index(place, LENGTH, SEED) for place, _ in drawn] == answers([problem for _, problem in drawn])
    assert stream.problem_at(drawn[5][0]).answer == drawn[5][1].answer
    bad = next(place for place in range(LENGTH) if problem_index(place, LENGTH, SEED) == 7)
    assert stream.problem_at(bad) is None and stream.restored_problem(bad, Problem("p-7", (), 7)) is None


def test_no_two_problems_are_made_at_once():
    class Slow(Broken):
        busy, together = False, False

        def __getitem__(self, index):
            Slow.together |= Slow.busy
            Slow.busy = True
            time.sleep(0.01)
            Slow.busy = False
            return super().__getitem__(index)

    stream = ProblemStream(Slow(), SEED, long)
    first = stream.next_with_positions(3)
    stream.problem_at(first[0][0])
    stream.next_with_positions(3)
    assert not Slow.together


@pytest.mark.parametrize("stopped_after", [1, 3, 8])
def test_resumed_stream_skips_same_bad_problems(stopped_after):
    """Also problems that are usable by now, because an uninterrupted run would not request them either."""
    whole = ProblemStream(Broken(), SEED, long)
    expected = answers(whole.next_problems(stopped_after) + whole.next_problems(20))
    first = ProblemStream(Broken(), SEED, long)
    before = answers(first.next_problems(stopped_after))
    cursor, state = first.cursor, json.loads(json.dumps(first.state_dict()))
    second = ProblemStream(Broken(bad=[index for index in (2, 5) if index not in first.skipped_indices]), SEED, long)
    second.cursor = cursor
    second.load_state_dict(state)
    assert before + answers(second.next_problems(20)) == expected
    assert (
        sorted(second.skipped_indices) == [2, 5, 7]
        and second.skipped_indices[: len(state.get("skipped", []))] == first.skipped_indices
    )


def test_checkpoints_of_earlier_versions_are_read():
    stream = ProblemStream(Broken(), SEED)
    stream.load_state_dict({})
    assert stream.skipped_indices == [] and ProblemStream(NumberedTask(), SEED).state_dict() == {}


def test_skipped_positions_beyond_shorter_task_are_ignored():
    stream = ProblemStream(Broken(3, bad=(1,)), SEED)
    stream.load_state_dict({"skipped": [100, 200]})
    assert len(stream.next_problems(4)) == 4 and stream.skipped_indices == [1]
    stream = ProblemStream(Broken(1, bad=()), SEED)
    stream.load_state_dict({"skipped": [0]})
    with pytest.raises(ValueError, match="^task: the checkpoint marks all 1 problems"):
        stream.next_problems(1)


def test_task_without_valid_problem_raises():
    def bad(problem):
        return "it is bad"

    with pytest.raises(ValueError, match=r"^all 10 problems of the task are unusable; the last one is '?.*bad"):
        ProblemStream(Broken(bad=()), SEED, bad).next_problems(1)
    with pytest.raises(ValueError, match=rf"^{MAX_BAD_IN_A_ROW} consecutive problems of the task are unusable"):
        ProblemStream(Broken(1 << 30, bad=()), SEED, bad).next_problems(1)
    with pytest.raises(ValueError, match=rf"^the first {MAX_BAD_IN_A_ROW} problems of the task are unusable"):
        ProblemStream(Broken(1 << 30, bad=()), SEED, bad).first_problems(4)
    with pytest.raises(ValueError, match="^all 10 problems of the task are unusable"):
        _ = UsableProblems(Broken(bad=()), bad).problems


def test_adaptive_task_skipped_problem_is_retried(caplog):
    stream = ProblemStream(Adapting(bad=()), SEED)
    before = stream.next_problems(LENGTH - 1)
    assert 2 not in answers(before) and stream.skipped_indices == [2]
    stream.observe(1, (), None)
    assert 2 in answers(stream.next_problems(LENGTH))
    assert stream.state_dict() == {"learned": {"learned": 1}, "skipped": [2]}
    again = ProblemStream(Adapting(bad=()), SEED)
    again.cursor = stream.cursor
    again.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert again.next_problems(7) == stream.next_problems(7) and again.observe(2, (), None) == {"problems/skipped": 1.0}


def test_held_out_problems_are_looked_at_once(caplog):
    task = Broken()
    held_out = UsableProblems(task, long)
    assert task.indices == []
    assert answers(held_out.problems) == [0, 1, 3, 4, 6, 8, 9] == answers(held_out.problems)
    assert held_out.num_skipped == 3 and task.indices == list(range(LENGTH))
    assert caplog.text.count("3 problems are excluded from the 10 problems of Broken: index 2: KeyError") == 1


def test_many_bad_problems_are_one_message(caplog):
    assert answers(
        UsableProblems(Broken(40, bad=()), lambda problem: "bad" if problem.answer < 30 else "").problems
    ) == list(range(30, 40))
    assert len(caplog.messages) == 1 and caplog.text.count(": bad") == MAX_BAD_NAMED
    assert all(f"'p-{index}'" in caplog.text for index in range(30))


def test_problem_stream_useless_answers_are_skipped(caplog):
    tried = []

    def trial(problems):
        tried.extend(answers(problems))
        faults = {4: "its answer cannot be graded", 6: TransientReason("no answer within 1 s")}
        return [faults.get(problem.answer, "") for problem in problems]

    stream = ProblemStream(Broken(), SEED, long)
    stream.check_answers(trial)
    assert (
        answers(stream.next_problems(4) + stream.next_problems(14))
        == [index for index in usable(30) if index not in (4, 6)][:18]
    )
    stream._prefetched.result()
    assert sorted(stream.skipped_indices) == [2, 4, 5, 6, 7] and sorted(tried) == [0, 1, 3, 4, 6, 7, 8, 9]
    # A resumed run retries problems that failed for transient reasons.
    assert sorted(stream.state_dict()["skipped"]) == [2, 4, 5, 7]
    assert caplog.text.count("'p-4' (index 4): its answer cannot be graded") == 1
    adapting = ProblemStream(Adapting(bad=()), SEED)
    adapting.check_answers(trial)
    tried.clear()
    assert not {4, 6} & set(answers(adapting.next_problems(12) + adapting.next_problems(12)))
    assert sorted(tried) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    held_out = UsableProblems(Broken(), long)
    held_out.check_answers(trial)
    assert answers(held_out.problems) == [0, 1, 3, 8, 9] and held_out.num_skipped == 5
    assert (
        "2 problems are excluded from the 10 problems of Broken: 'p-4': its answer cannot be graded; 'p-6'"
        in caplog.text
    )
    with pytest.raises(ValueError, match="^all 5 problems .*'p-9': no"):
        held_out.check_answers(lambda problems: ["no"] * len(problems))


def test_a_prompt_that_leaves_no_room_is_bad():
    fault = make_prompt_check(LetterTokenizer(), max_model_len=12, max_tokens=8)
    problems = [Problem("p", ({"role": "user", "content": text},), None) for text in ("abcd", "abcde", "")]
    assert fault(problems[0]) == ""
    assert fault(problems[1]) == (
        "its prompt has 5 tokens; engine.max_model_len=12 minus sampling.max_tokens=8 leaves 4"
    )
    assert fault(problems[2]) == "its prompt is empty"
    assert fault(Problem("p", ({"role": "user"},), None)).startswith(
        "its messages cannot be rendered: KeyError: 'content' ("
    )


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"deadline_s": 0.0}, "rollouts.deadline_s=0.0 must be a number of seconds above 0"),
        ({"deadline_s": float("nan")}, "rollouts.deadline_s=nan must be"),
        ({"deadline_s": float("inf")}, "rollouts.deadline_s=inf must be .* at most 604800"),
    ],
)
def test_settings_out_of_range_are_named(own, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**own)
    RolloutConfig(604_800.0)


class Gaps(NumberedTask):
    """Every third problem is broken."""

    def __getitem__(self, index):
        if index % 3 == 0:
            raise ValueError("a gap")
        return super().__getitem__(index)


@pytest.mark.parametrize("staleness", [0, 2])
def test_bad_problems_same_steps_for_any_staleness(make_source, staleness):
    source, engine = make_source(staleness=staleness, task=Gaps())
    for step in range(4):
        source.on_publish(version=step)
        groups, _ = source.take(2)
        assert len(groups) == 2
    expected = [index for place in range(40) if (index := problem_index(place, 100, SEED)) % 3]
    assert [int(call.problem) for call in engine.requests] == expected[: len(engine.requests)]


def test_resampled_group_may_receive_another_problem(make_source):
    """The task makes another problem by now, and it is unusable."""

    class Later(NumberedTask):
        closed = False

        def ask(self, index, cursor):
            if self.closed and cursor == 3:
                raise ValueError("no more")
            return self[index]

        def observe(self, step, groups, folder):
            return {}

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    source, engine = make_source(staleness=1, completes_immediately=False, task=(task := Later()))
    source.on_publish(version=0)
    wait_until(lambda: len(engine.requests) == 4)
    state = json.loads(json.dumps(source.state_dict()))
    task.closed = True
    resumed, engine = make_source(staleness=1, cursor=4, task=task)
    resumed.load_state_dict(state, step=0)
    resumed.on_publish(version=0)
    expected = [str(problem_index(place, 100, SEED)) for place in (0, 1, 2, 4)]
    assert [call.problem for call in engine.requests] == expected
    assert resumed.state_dict()["problem_positions"] == [[0, 0], [1, 1], [2, 2], [3, 4]]
