"""A teacher's log-probs of conversations with branches. Real engine: tests/integration/test_teacher.py."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from helpers.unpacked_reference import as_branched_conversations, make_groups, paths_of
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.training.teacher import Teacher


def of_path(ids):
    """A fake log-prob that depends on token and context."""
    return np.float32(hash(tuple(map(int, ids))) % 9973)


def test_teacher_scores_each_token_in_its_own_context():
    rng = np.random.default_rng(2)
    teacher = Teacher.__new__(Teacher)
    teacher.engine = SimpleNamespace(
        score=lambda texts: [np.array([of_path(text[: n + 1]) for n in range(1, len(text))]) for text in texts]
    )
    groups = make_groups(rng, [(5, [30, 1, 12]), (3, [24])])
    groups = [*as_branched_conversations(rng, groups), *groups]
    scored = teacher.score_groups(groups)
    assert any(sample.completion.kept_prefix_lens for group in scored for sample in group.samples)
    for group in scored:
        for sample in group.samples:
            expected = [of_path(ids[: place + 1]) for ids, places in paths_of(group, sample) for place in places]
            assert sample.teacher_logprobs[sample.completion.sampled_indices].tolist() == expected


def test_branch_with_fully_replaced_context_is_scored():
    rng = np.random.default_rng(0)
    teacher = Teacher.__new__(Teacher)
    teacher.engine = SimpleNamespace(
        score=lambda texts: [np.array([of_path(text[: n + 1]) for n in range(1, len(text))]) for text in texts]
    )
    (group,) = make_groups(rng, [(3, [8])])
    (sample,) = group.samples
    completion = replace(sample.completion, turns=((0, 3), (5, 8)), kept_prefix_lens=(3, 0))
    group = replace(group, samples=(replace(sample, completion=completion),))
    (sample,) = teacher.score_groups([group])[0].samples
    later = completion.tokens[3:].tolist()
    assert sample.teacher_logprobs[5:].tolist() == [of_path(later[: place + 1]) for place in (2, 3, 4)]


def test_teacher_engine_messages_name_the_teacher(tmp_path):
    (lane,) = Teacher(SimpleNamespace(path=tmp_path), EngineConfig(), tmp_path).engine._pool.replicas
    assert lane.name == "the teacher's engine"
