"""Agents that own their loop, with a real engine: equal to environments, failures, programs in another process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import recipe_runs as runs
from helpers.page_commands import blocks
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "agents.md"
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


def test_failing_agents_are_ungraded_and_end(workspace, served):
    """Agents that raise, die, hang with a child, or return no number; the run trains on the others."""
    args = [*task_args("WildAgent", 4), "agent.timeout_s=8", "evaluation.task=null"]
    runs.run(workspace, "grpo_full", "output_dir=wild", *args, served)
    samples = [s for step in (1, 2) for g in read_rollouts(rollout_paths(workspace / "wild")[step]) for s in g.samples]
    reasons = {sample.completion.finish_reason for sample in samples}
    assert {"agent_failed", "agent_timeout"} <= reasons
    for sample in samples:
        if sample.completion.finish_reason.startswith("agent_"):
            assert sample.score is None and not sample.in_loss
    assert any(sample.score and len(sample.completion.turns) for sample in samples)
    left = subprocess.run(["pgrep", "-f", "^sleep 600$"], capture_output=True, text=True).stdout.split()
    assert not left


COMMAND = """
import json, os, sys, urllib.request

problem = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": problem["messages"]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))
print("a line of the program")
print(json.dumps({"reward": float(answer["usage"]["completion_tokens"]), "note": str(problem["answer"])}))
"""


def test_program_and_page_agent_train_on_rows(workspace, served):
    """The page's agent, and a program in another process, on rows of a file."""
    code = next(text for _, text in blocks(PAGE) if "def run(problem, client)" in text)
    (workspace / "my_agent.py").write_text(code)
    (workspace / "agent.py").write_text(COMMAND)
    rows = [json.dumps({"question": f"{a} + {a}?", "answer": 2 * a}) for a in range(8)]
    (workspace / "rows.jsonl").write_text("\n".join(rows))
    rows_task = ["task._component_=torchtune_ext.tasks.jsonl.Jsonl", "task.path=rows.jsonl"]
    for name, agent in ("page", "agent=my_agent.run"), ("program", f"command=[{sys.executable},agent.py]"):
        words = ["evaluation.task=null", "max_steps=1", "grader.workers=2", f"output_dir={name}"]
        runs.run(workspace, "grpo_full", *rows_task, f"task.{agent}", *words, served)
        samples = [s for g in read_rollouts(rollout_paths(workspace / name)[1]) for s in g.samples]
        assert all(sample.score is not None for sample in samples)
        if name == "page":
            assert max(len(sample.completion.turns) for sample in samples) == 3
        else:
            assert all(sample.score.reward == len(sample.completion.tokens) for sample in samples)
