"""A replay returns the stored groups, and refuses runs that do not match.

Real replays: tests/integration/test_async.py.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.letter_tokens import LetterTokenizer
from helpers.records import make_sample
from torchtune_ext.pipeline.groups import Group
from torchtune_ext.pipeline.rollout_store import RolloutStore, read_rollouts, rollout_paths
from torchtune_ext.tasks.problem_stream import ProblemStream
from torchtune_ext.tasks.task import Problem, Score
from torchtune_ext.training.manifest import Identity, Manifest
from torchtune_ext.training.replay import ReplaySource

BATCH, STEPS = 2, 3
IDENTITY = Identity("", "qwen2 of 2 layers", "0123abcd")


class Sums:
    def __init__(self, words):
        self.words = words

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return Problem(f"sum-{index}", ({"role": "user", "content": f"{self.words} {index} + 1"},), index + 1)


def settings(**own):
    loss = {"_component_": "PolicyLoss", "clip_low": 0.2}
    known = {"output_dir": "elsewhere", "model_dir": "model", "task": {"_component_": "Sums", "level": 1}, "loss": loss}
    counts = {"seed": 0, "prompts_per_step": BATCH, "samples_per_prompt": 2, "max_steps": STEPS}
    return {**known, **counts, "tokenizer": {"path": "model"}, "staleness": 0, "prefetch_steps": None, **own}


def group(problem):
    samples = [make_sample([1, 2, k], [-0.1, -0.2, -0.3], outcome=Score(k, {})) for k in range(2)]
    prompt = LetterTokenizer().prompt_ids(problem.messages)
    return Group(problem, np.array(prompt, np.int32), tuple(samples))


@pytest.fixture
def run(tmp_path):
    """The files of a run of three steps that a replay reads."""
    folder, problems = tmp_path / "run", ProblemStream(Sums("what is"), seed=0)
    store = RolloutStore(folder)
    for step in range(1, STEPS + 1):
        store.write(step, [group(problem) for problem in problems.next_problems(BATCH)])
    (folder / "run.json").write_text(json.dumps({"id": "abc", "config": settings()}))
    checkpoint = folder / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    Manifest(3, None, Identity("abc", IDENTITY.model, IDENTITY.base), {}).write(checkpoint)
    return folder


def replay(run, words="what is", identity=IDENTITY, **own):
    return ReplaySource(
        run, settings(replay=str(run), **own), identity, ProblemStream(Sums(words), seed=0), LetterTokenizer()
    )


def test_replay_yields_each_step_once_without_refills(run):
    its, problems = replay(run), ProblemStream(Sums("what is"), seed=0)
    assert str(its) == f"replays {run}: 3 of its 3 steps; no engine, no evaluation"
    for _ in range(STEPS):
        groups, values = its.take(BATCH)
        assert [g.problem.id for g in groups] == [p.id for p in problems.next_problems(BATCH)] and values == {}
        assert its.refill(BATCH, 1) == ([], {})
    its.load_state_dict({"replayed": "abc"}, step=1)
    again = ProblemStream(Sums("what is"), seed=0).next_problems(2 * BATCH)[BATCH:]
    assert [g.problem.id for g in its.take(BATCH)[0]] == [p.id for p in again]
    assert its.state_dict() == {"replayed": "abc"}


@pytest.mark.parametrize(
    ("state", "before"), [({}, "sampled its own groups"), ({"replayed": "xyz"}, "replayed run xyz")]
)
def test_replay_refuses_checkpoint_of_other_run_kind(run, state, before):
    with pytest.raises(ValueError, match=f"cannot resume from this checkpoint, whose run {before}"):
        replay(run).load_state_dict(state, step=1)


def test_replay_detects_new_run_in_its_folder(run):
    its = replay(run)
    (run / "run.json").write_text(json.dumps({"id": "new", "config": settings()}))
    with pytest.raises(ValueError, match="expected run abc in the folder, found new"):
        its.take(BATCH)


def test_replay_ignores_data_path_and_earlier_refills(run):
    assert "task.path=default (here /data)" in str(
        replay(run, task={"_component_": "Sums", "level": 1, "path": "/data"})
    )
    # Step 1 may hold problems of refills that the latest start of the run did not have.
    store = RolloutStore(run, resume_step=1)
    for step in range(1, STEPS + 1):
        store.write(step, [group(problem) for problem in ProblemStream(Sums("what is"), seed=0).next_problems(6)[4:]])
    replay(run)


def test_replay_uses_older_checkpoint_if_newest_is_damaged(run):
    (run / "checkpoints" / "step_000009").mkdir()
    (run / "checkpoints" / "step_000009" / "manifest.json").write_text("{")
    replay(run)
    with pytest.raises(ValueError, match="the replayed run has different weights"):
        replay(run, identity=Identity("", IDENTITY.model, "ffff"))


def test_settings_of_learning_that_differ_are_named(run):
    message = str(replay(run, loss={"_component_": "PolicyLoss", "clip_low": 0.1}, staleness=2, lr=0.5))
    assert message.endswith(
        "Other settings in that run, so the weights may differ: loss.clip_low=0.2 (here 0.1), lr=default (here 0.5)"
    )
    many = str(replay(run, **{f"k{i}": i for i in range(10)}))
    assert many.endswith("k7=default (here 7), and 2 more")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seed": 1}, "has seed=0. Fix: set seed=0"),
        ({"samples_per_prompt": 4}, "has samples_per_prompt=2. Fix: set samples_per_prompt=2"),
        (
            {"task": {"_component_": "Sums", "level": 2}, "words": "is it"},
            r"has rollouts of problems .* for instance 'sum-\d': other settings in that run: task\.level=1",
        ),
        ({"staleness": -1}, "up to 0 versions stale; expected at most staleness=-1. Fix: set staleness=0"),
        ({"max_steps": 5}, "has no rollouts of step 4, and max_steps=5. Fix: set max_steps=3"),
        (
            {"identity": Identity("", "llama of 2 layers", "0123abcd")},
            "the replayed run has a different model .* Fix: set model_dir=model",
        ),
        (
            {"identity": Identity("", IDENTITY.model, "ffff")},
            "the replayed run has different weights .0123abcd; expected ffff",
        ),
        ({"words": "how much is"}, "the task's data or code has changed since"),
    ],
)
def test_replay_of_other_problems_model_seed_is_refused(run, changes, message):
    with pytest.raises(ValueError, match=f"replay={run}.*{message}"):
        replay(run, **changes)


def test_replay_without_content_refuses_environment_loss(run):
    loss = {"_component_": "PolicyLoss", "environment_coef": 0.05}
    with pytest.raises(ValueError, match=f"environment_coef=0.05, but the rollouts of replay={run} do not record.*=0$"):
        replay(run, loss=loss)
    # Content in any step is enough.
    steps = {step: read_rollouts(path) for step, path in rollout_paths(run).items()}
    first, *others = steps[STEPS]
    samples = [
        replace(s, completion=replace(s.completion, turns=((0, 1), (2, 3)), content_spans=((1, 2),)))
        for s in first.samples
    ]
    steps[STEPS] = [replace(first, samples=tuple(samples)), *others]
    store = RolloutStore(run, resume_step=0)
    for step, groups in steps.items():
        store.write(step, groups)
    replay(run, loss=loss)


def test_replay_invalid_run_folder_is_refused(run, tmp_path):
    with pytest.raises(ValueError, match="is the output_dir of this run"):
        replay(run, output_dir=str(run))
    with pytest.raises(ValueError, match="run.json not found"):
        replay(tmp_path / "nowhere")
    (run / "rollouts" / "step_000002.jsonl.gz").unlink()
    with pytest.raises(ValueError, match="step 2, .*max_steps=3. Fix: set max_steps=1$"):
        replay(run)
    (run / "rollouts" / "step_000001.jsonl.gz").unlink()
    with pytest.raises(ValueError, match="holds no rollouts of step 1"):
        replay(run)
    (run / "run.json").write_text("{")
    with pytest.raises(ValueError, match="run.json is damaged"):
        replay(run)
