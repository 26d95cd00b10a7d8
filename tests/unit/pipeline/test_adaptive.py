"""Adaptive tasks: problems are made on request, from the outcomes observed so far."""

import json

import pytest

from helpers.manual_engine import wait_for_groups
from helpers.scripted_task import NumberedTask
from torchtune_ext.pipeline.groups import outcomes_for_task
from torchtune_ext.tasks.problem_stream import ProblemStream, problem_index
from torchtune_ext.tasks.task import Problem

SEED, LENGTH = 3, 5


class Adapting:
    """Makes problems from the number of observed groups."""

    def __init__(self):
        self.level, self.calls, self.visits = 0, [], []

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.ask(index, index)

    def ask(self, index, cursor):
        self.calls.append((index, cursor))
        question = ({"role": "user", "content": f"{index} {cursor} {self.level}"},)
        return Problem(f"{index}/{self.level}", question, {"level": self.level})

    def observe(self, step, groups, folder):
        self.visits.append((step, groups, folder))
        self.level += len(groups)
        return {"level": float(self.level)}

    def state_dict(self):
        return {"level": self.level} if self.level else {}

    def load_state_dict(self, state):
        if state.get("level", 0) > 100:
            raise ValueError("another task")
        self.level = state.get("level", 0)


def test_adaptive_stream_asks_lazily_with_problem_positions(tmp_path):
    task = Adapting()
    stream, places = ProblemStream(task, SEED), [(problem_index(i, LENGTH, SEED), i) for i in range(12)]
    assert task.calls == []
    first = stream.next_problems(4)
    assert task.calls == places[:4] and stream.cursor == 4
    assert [problem.id for problem in first] == [f"{index}/0" for index, _ in places[:4]]
    assert stream.observe(1, [(first[0], ())], tmp_path) == {"level": 1.0}
    assert task.visits == [(1, [(first[0], ())], tmp_path)]
    # The next epoch visits the same indices in another order.
    second = stream.next_problems(8)
    assert task.calls[4:] == places[4:] and {problem.id for problem in second} == {f"{i}/1" for i in range(LENGTH)}


def test_adaptive_stream_reasks_old_problems_keeps_stored_ones():
    task = Adapting()
    stream = ProblemStream(task, SEED)
    stored = stream.next_problems(3)[2]
    task.level = 7
    assert (
        stream.problem_at(2).messages[-1]["content"] == f"{problem_index(2, LENGTH, SEED)} 2 7" and stream.cursor == 3
    )
    assert stream.restored_problem(2, stored) is stored


def test_adaptive_resumed_stream_asks_identical_problems():
    stream = ProblemStream(Adapting(), SEED)
    stream.next_problems(3)
    stream.observe(1, [1, 2], None)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = ProblemStream(Adapting(), SEED)
    resumed.cursor = stream.cursor
    resumed.load_state_dict(state)
    assert resumed.next_problems(6) == stream.next_problems(6)


def test_adaptive_stream_without_observations_resumes():
    state = json.loads(json.dumps(ProblemStream(Adapting(), SEED).state_dict()))
    ProblemStream(Adapting(), SEED).load_state_dict(state)


def test_non_adaptive_task_observes_nothing(tmp_path):
    stream = ProblemStream(NumberedTask(), SEED)
    assert stream.observe(1, [1, 2], tmp_path) == {} == stream.state_dict()
    stream.load_state_dict({})


def test_adaptive_checkpoint_of_other_task_kind_is_refused():
    state = ProblemStream(Adapting(), SEED).state_dict()
    with pytest.raises(ValueError, match="^task: .* adapts .* does not"):
        ProblemStream(NumberedTask(), SEED).load_state_dict(state)
    with pytest.raises(ValueError, match="^task: .* does not adapt .* does"):
        ProblemStream(Adapting(), SEED).load_state_dict({})


def test_adaptive_prefetched_groups_keep_questions_across_checkpoint(make_source, tmp_path):
    """The engine has answered them, so they keep their problems, although the task would now make others."""
    task = Adapting()
    source, engine = make_source(staleness=1, task=task)
    source.on_publish(version=0)
    wait_for_groups(source._stream, 0, 1, 2, 3)
    first, _ = source.take(2)
    source._problems.observe(1, outcomes_for_task(first), tmp_path)
    state = json.loads(json.dumps([source.state_dict(), source._problems.state_dict()]))

    resumed, engine = make_source(staleness=1, cursor=4, task=Adapting())
    resumed._problems.load_state_dict(state[1])
    resumed.load_state_dict(state[0], step=1)
    second, _ = resumed.take(2)
    assert [group.problem.answer for group in second] == [{"level": 0}] * 2
    # Later groups get new problems.
    assert [call.problem.split()[2] for call in engine.requests] == ["2"] * len(engine.requests) and engine.requests
