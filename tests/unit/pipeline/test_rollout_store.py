"""Stored rollouts: exact round trips, atomic writes, and resume."""

import gzip
import json
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.full_disk import full_disk
from helpers.records import make_guess_conversation
from torchtune_ext.grading import Ungraded
from torchtune_ext.pipeline.groups import Group, Sample, run_length_encode
from torchtune_ext.pipeline.rollout_store import RolloutStore, encode_rollouts, read_rollouts, rollout_paths
from torchtune_ext.sampling.types import Completion
from torchtune_ext.tasks.task import Problem, Score

SCORED = Score(0.1 + 0.2, {"accuracy": 0.25, "format": 1.0}, "a note\non two lines")


def make_sample(length=5, seed=0, text="A. Mrs. Peacock", outcome=SCORED, advantage=-1 / 3, in_loss=True, **changes):
    rng = np.random.default_rng(seed)
    completion = Completion(
        tokens=rng.integers(0, 150_000, length).astype(np.int32),
        logprobs=(-rng.gamma(0.3, 1.0, length)).astype(np.float32),
        versions=np.full(length, 3, dtype=np.int32),
        finish_reason="stop",
    )
    return Sample(replace(completion, **changes), text, outcome, advantage, in_loss)


def make_group(samples, name="clue-1"):
    problem = Problem(name, ({"role": "user", "content": "Who?\u2028<b>"},), {"A": ["Mrs. Peacock", None]})
    return Group(problem, np.arange(7, dtype=np.int32), tuple(samples))


def assert_same(a: Group, b: Group):
    assert (a.problem, len(a.samples)) == (b.problem, len(b.samples))
    np.testing.assert_array_equal(a.prompt_tokens, b.prompt_tokens)
    for one, other in zip(a.samples, b.samples, strict=True):
        for name in ("tokens", "logprobs", "versions"):
            x, y = getattr(one.completion, name), getattr(other.completion, name)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        for name in ("finish_reason", "turns", "kept_prefix_lens", "parents"):
            assert getattr(one.completion, name) == getattr(other.completion, name)
        for name in ("text", "advantage", "turn_advantages", "in_loss", "outcome", "messages", "turn_rewards"):
            assert getattr(one, name) == getattr(other, name)
        np.testing.assert_equal(one.teacher_logprobs, other.teacher_logprobs)


HOSTILE = ["", "plain", "</script><script>alert(1)</script>", "line\nbreaks\r\n\u2028\x00\x1f", "🙂 我们 \ud800", '"\\']


def test_round_trip(tmp_path):
    samples = [make_sample(seed=i, text=text) for i, text in enumerate(HOSTILE)]
    samples += [
        make_sample(0),
        replace(make_sample(4), teacher_logprobs=np.array([-0.1, -2e-7, -np.inf, -30.0], dtype=np.float32)),
        make_sample(9, versions=np.array([3, 3, 3, 4, 4, 3, 7, 7, 7], dtype=np.int32), finish_reason="length"),
        make_sample(outcome=Ungraded("infra_failed", "OSError: <no>\nworker"), advantage=0.0, in_loss=False),
        make_sample(outcome=None, advantage=1.0),
        make_sample(outcome=Score(float("-inf"), {"x": float("inf")})),
        make_guess_conversation("max_turns", advantage=-0.5, in_loss=True),
        replace(
            branched := make_guess_conversation(),
            completion=replace(branched.completion, kept_prefix_lens=(7, 5, 11), parents=(-1, -1, 0)),
        ),
        make_guess_conversation(advantage=0.0, turn_advantages=(-0.25, 0.0, 0.25), in_loss=True),
    ]
    groups = [make_group(samples, "a"), make_group([], "b")]
    path = RolloutStore(tmp_path).write(12, groups)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl.gz"
    back = read_rollouts(path)
    assert len(back) == 2
    for one, other in zip(groups, back, strict=True):
        assert_same(one, other)
    assert encode_rollouts(12, back) == path.read_bytes()


@settings(max_examples=60)
@given(st.lists(st.floats(width=32), max_size=30))
def test_logprobs_are_exact(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("rollouts") / "step_000001.jsonl.gz"
    logprobs = np.array(values, dtype=np.float32)
    sample = make_sample(len(values), logprobs=logprobs)
    path.write_bytes(encode_rollouts(1, [make_group([sample])]))
    np.testing.assert_array_equal(read_rollouts(path)[0].samples[0].completion.logprobs, logprobs)


def test_every_line_is_plain_json(tmp_path):
    sample = make_sample(3, logprobs=np.array([np.nan, -np.inf, -0.5], dtype=np.float32), text="\u2028")
    path = RolloutStore(tmp_path).write(1, [make_group([sample])])

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    header, group = (json.loads(line, parse_constant=refuse) for line in lines)
    assert header == {"format": 1, "step": 1, "groups": 1}
    assert group["samples"][0]["logprobs"] == ["nan", "-inf", -0.5]


def test_rollout_record_excludes_prefix_cache_hits():
    cold, warm = (encode_rollouts(1, [make_group([make_sample(cached_prompt_tokens=n)])]) for n in (0, 32))
    assert cold == warm


def test_run_lengths():
    assert run_length_encode(np.array([7, 7, 7, 8, 7])) == [[7, 3], [8, 1], [7, 1]]
    assert run_length_encode(np.array([0])) == [[0, 1]]
    assert run_length_encode(np.array([], dtype=np.int32)) == []


def test_a_resumed_run_stores_its_steps_again(tmp_path):
    store = RolloutStore(tmp_path)
    written = [step for step in range(1, 5) if store.write(step, [make_group([make_sample()])])]
    assert written == list(rollout_paths(tmp_path)) == [1, 2, 3, 4]
    RolloutStore(tmp_path, resume_step=3)
    assert list(rollout_paths(tmp_path)) == [1, 2]
    with pytest.raises(ValueError, match="step_000001.jsonl.gz belongs to an earlier run"):
        RolloutStore(tmp_path)  # a new run does not mix with an earlier run
    assert list(rollout_paths(tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-30],
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"no gzip",
        lambda b: b[:20] + bytes(40) + b[60:],
    ],
)
def test_damaged_files_are_errors(tmp_path, damage):
    path = RolloutStore(tmp_path).write(1, [make_group([make_sample(200)])])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="step_000001"):
        read_rollouts(path)


def test_missing_groups_and_other_formats_are_errors(tmp_path):
    path = tmp_path / "step_000001.jsonl.gz"
    for text, message in (
        ('{"format": 1, "groups": 2}', "0 groups of 2"),
        ('{"format": 9}', "format 1"),
        ("[]", "format 1"),
    ):
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(ValueError, match=message):
            read_rollouts(path)


def test_a_disk_that_refuses_for_a_moment(tmp_path, caplog):
    store, groups = RolloutStore(tmp_path), [make_group([make_sample(2000)])]
    full = (4, 5, 6, 8)
    for step in range(1, 11):
        with full_disk(100) if step in full else nullcontext():
            written = store.write(step, groups)
        assert (written is None) == (step in full)
    assert list(rollout_paths(tmp_path)) == [1, 2, 3, 7, 9, 10]
    assert len(list(store.folder.iterdir())) == 6  # no partial file
    assert ["step_000004" in m for m in caplog.messages] == [True], "once is enough"
    caplog.clear()
    store.close()
    assert caplog.messages == [
        f"rollouts: 4 steps between 4 and 8 are missing in {store.folder}: they could not be written"
    ]
    caplog.clear()
    store.close()
    assert caplog.messages == []


def test_overhead(tmp_path):
    """1,024 samples of 12 to 100 tokens take well under 0.2 s on one core."""
    rng = np.random.default_rng(0)
    text = "The killer was Professor Plum, in the library, at nine. " * 6
    lengths = rng.integers(12, 101, 1024)
    samples = [make_sample(int(n), i, text[: 4 * n]) for i, n in enumerate(lengths)]
    groups = [make_group(samples[i : i + 32]) for i in range(0, 1024, 32)]
    store = RolloutStore(tmp_path)
    best = min(timed(store.write, step, groups) for step in range(3))
    assert best < 0.2
    assert rollout_paths(tmp_path)[0].stat().st_size < 12 * lengths.sum()


def timed(function, *args):
    start = time.process_time()
    function(*args)
    return time.process_time() - start
