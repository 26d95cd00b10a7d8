"""Graders that compare samples, end to end: real source, stream and processes, and a scripted engine."""

import sys

import cloudpickle
import pytest

from helpers.letter_tokens import LetterTokenizer, completion
from helpers.loop_engine import LoopEngine, sample_index
from helpers.manual_engine import SEED
from helpers.scripted_task import NumberedTask
from helpers.waiting import wait_until
from torchtune_ext.grading import Grader
from torchtune_ext.pipeline.advantages import AdvantageConfig, assign_advantages
from torchtune_ext.pipeline.rollout import sample_groups
from torchtune_ext.sampling.engine import SamplingConfig
from torchtune_ext.tasks.task import Score

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # The graders need not import PyTorch with this module.


class Longer(NumberedTask):
    """Scores the number of shorter texts. The note lists the texts that were graded together."""

    def grade_group(self, problem, texts):
        if "broken" in texts:
            raise ValueError("no judge")
        return [Score(float(sum(len(text) > len(other) for other in texts)), note="|".join(texts)) for text in texts]


@pytest.fixture(scope="module")
def judge():
    with Grader(Longer(), workers=2, timeout_s=60.0) as judge:
        yield judge


def notes(group):
    """The texts of a group that were graded together, from the notes."""
    (note,) = {sample.score.note for sample in group.samples}
    return note.split("|")


def values(group):
    return [sample.score.reward for sample in group.samples]


def test_judge_grades_prefetched_groups_once_complete(make_source, judge):
    """A group with a missing text is not graded, while a later complete group is."""
    source, engine = make_source(staleness=2, prefetch_steps=1, completes_immediately=False, grader=judge)
    source.on_publish(version=0)
    engine.requests[3].complete("aaa", "b")
    wait_until(lambda: "0 of 2 texts are not graded" in source._stream.describe_pending(3))
    call = engine.requests[0]
    call.complete_sample(1, "cc")
    wait_until(lambda: "not finished 1 of 2" in source._stream.describe_pending(0))
    assert [sample and sample.outcome for sample in source._stream._pending[0].samples] == [None, None]
    call.complete_sample(0, "")
    engine.requests[1].complete("x", "x")
    groups, _ = source.take(2)
    assert [values(group) for group in groups] == [[0.0, 1.0], [0.0, 0.0]]
    assert [notes(group) for group in groups] == [["", "cc"], ["x", "x"]]
    engine.requests[2].complete("dd", "e")
    source.on_publish(version=1)
    groups, _ = source.take(2)
    assert [notes(group) for group in groups] == [["dd", "e"], ["aaa", "b"]], "with its own texts, whenever they came"


def test_refills_are_judged_among_themselves(make_source, judge):
    source, engine = make_source(completes_immediately=False, grader=judge)
    texts = iter([("a", "a"), ("b", "bb"), ("cc", "c"), ("d", "d"), ("ee", "e")])
    schedule = engine.schedule
    engine.schedule = lambda *words: (schedule(*words), engine.requests[-1].complete(*next(texts)))[0]
    source.on_publish(version=0)
    first, _ = source.take(2)
    more, _ = source.refill(3, 1)
    assert [notes(group) for group in first + more] == [["a", "a"], ["b", "bb"], ["cc", "c"], ["d", "d"], ["ee", "e"]]


def test_judge_failure_excludes_group_from_training(make_source, judge, caplog):
    source, engine = make_source(completes_immediately=False, grader=judge)
    texts = iter([("broken", "a"), ("b", "bb")])
    schedule = engine.schedule
    engine.schedule = lambda *words: (schedule(*words), engine.requests[-1].complete(*next(texts)))[0]
    source.on_publish(version=0)
    groups, _ = source.take(2)
    assert [[sample.outcome.kind for sample in group.samples] for group in groups] == [
        ["infra_failed"] * 2,
        ["scored"] * 2,
    ]
    assert "2 of 4 texts infra_failed: 2 x ValueError: no judge (test_judges.py:" in caplog.text
    groups, stats = assign_advantages(groups, AdvantageConfig())
    assert (stats.num_nonzero_groups, stats.no_signal, stats.infra_failed) == (1, 1, 2)
    assert [[sample.in_loss for sample in group.samples] for group in groups] == [[False] * 2, [True] * 2]


class Once(LoopEngine):
    """An engine that answers at once; sample s has s + 1 characters."""

    async def generate(self, request, affinity_key=None):
        return completion("x" * (sample_index(request) + 1))


@pytest.mark.parametrize("n", [1, 3])
def test_judge_evaluates_groups_of_any_size(judge, n):
    task = Longer()
    problems = [task[i] for i in range(4)]
    groups = dict(sample_groups(problems, n, SamplingConfig(max_tokens=8, seed=SEED), Once(), LetterTokenizer(), judge))
    assert sorted(groups) == [0, 1, 2, 3]
    for group in groups.values():
        assert values(group) == [float(sample) for sample in range(n)] and len(notes(group)) == n
