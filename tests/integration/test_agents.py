"""Agents that own their loop, with a real engine: equal to environments, failures, programs in another process."""

import numpy as np
import pytest

from helpers import recipe_runs as runs
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return runs.make_workspace(tmp_path_factory.mktemp("agents"))


def task_args(name, workers):
    stops = next(word for word in runs.TALKS if word.startswith("sampling.stop_token_ids"))
    tasks = [f"task._component_=letters.{name}", f"evaluation.task._component_=letters.{name}"]
    return [*tasks, stops, f"grader.workers={workers}", "advantage.credit=turn", "max_steps=2"]


def test_agent_trains_bit_equal_to_environment(workspace, served):
    """The same rows, log-probs, advantages and weights, whether the recipe or the agent owns the loop."""
    runs.run(workspace, "grpo_full", "output_dir=environment", *task_args("SeedlessTalks", 8), served)
    runs.run(workspace, "grpo_full", "output_dir=agent", *task_args("TalkAgent", 2), served)
    turns = 0
    for step in (1, 2):
        groups, expected = (read_rollouts(rollout_paths(workspace / run)[step]) for run in ("agent", "environment"))
        for group, other in zip(groups, expected, strict=True):
            assert group.problem == other.problem
            np.testing.assert_array_equal(group.prompt_tokens, other.prompt_tokens)
            for sample, reference in zip(group.samples, other.samples, strict=True):
                for name in ("tokens", "logprobs", "versions"):
                    np.testing.assert_array_equal(getattr(sample.completion, name), getattr(reference.completion, name))
                for name in ("turns", "kept_prefix_lens", "parents", "finish_reason"):
                    assert getattr(sample.completion, name) == getattr(reference.completion, name)
                assert (sample.text, sample.score.reward) == (reference.text, reference.score.reward)
                assert (sample.advantage, sample.turn_advantages) == (reference.advantage, reference.turn_advantages)
                assert sample.messages == reference.messages
                turns += len(sample.completion.turns)
    assert turns > 2 * 2 * 16
    checkpoints = [max((workspace / run / "checkpoints").glob("step_*")) for run in ("agent", "environment")]
    weights = [{path.name: path.read_bytes() for path in folder.glob("*.safetensors")} for folder in checkpoints]
    assert weights[0] and weights[0] == weights[1]
