"""Agents that own their loop, with a real engine: equal to environments, failures, programs in another process."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import openai
import pytest

from helpers import recipe_runs as runs
from helpers.newcomer import typed
from helpers.own_files import shown_commands, shown_files, write_files
from helpers.tiny_runs import write_tiny_model
from helpers.waiting import wait_until
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


@pytest.fixture(scope="module")
def agent_run(workspace, served):
    """Return a completed run of two steps with an agent."""
    runs.run(workspace, "grpo_full", "output_dir=agent", *task_args("TalkAgent", 2), served)
    return workspace / "agent"


def weights(run):
    last = max((run / "checkpoints").glob("step_*"))
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert files
    return files


def test_agent_trains_bit_equal_to_environment(workspace, agent_run, served):
    """The same rows, log-probs, advantages and weights, whether the recipe or the agent owns the loop."""
    runs.run(workspace, "grpo_full", "output_dir=environment", *task_args("SeedlessTalks", 8), served)
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
    assert weights(agent_run) == weights(workspace / "environment")
    assert all(line["episode/forks"] == line["episode/no_response"] == 0 for line in runs.metrics(agent_run)[1:])


@pytest.mark.rest
def test_killed_run_with_agents_resumes_bit_equal(workspace, agent_run, served):
    """Killed while agents of the second step run; none of them, nor their workers, is left."""
    words = ["output_dir=killed", "resume_from_checkpoint=True", *task_args("TalkAgent", 2), served]
    mark = f"AGENTS={workspace}"
    environ = runs.environment() | dict([mark.split("=", 1)])
    command = runs.command("grpo_full", *words)
    process = subprocess.Popen(command, cwd=workspace, env=environ, stdout=subprocess.DEVNULL)
    runs.wait_for_steps(workspace / "killed", 2, process)
    time.sleep(random.Random(0).random() / 4)
    assert len(processes(mark)) > 2
    process.kill()
    process.wait()
    wait_until(lambda: not processes(mark), 20)
    assert not (workspace / "killed" / "checkpoints" / "step_000002").exists()
    runs.run(workspace, "grpo_full", *words)
    assert weights(workspace / "killed") == weights(agent_run)
    assert runs.metrics(workspace / "killed") == runs.metrics(agent_run)
    for step, path in rollout_paths(agent_run).items():
        assert rollout_paths(workspace / "killed")[step].read_bytes() == path.read_bytes()


def processes(mark):
    """Return the processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended meanwhile, or belongs to another user
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


@pytest.mark.rest
def test_agent_without_package_ends_before_the_engine(workspace):
    (workspace / "late.py").write_text("def run(problem, client):\n    import no_such_package\n")
    (workspace / "few.jsonl").write_text('{"question": "1 + 1?", "answer": 2}\n' * 4)
    (workspace / "eval.yaml").write_text(EVALUATION)
    rows = ["task._component_=torchtune_ext.tasks.jsonl.Jsonl", "task.path=few.jsonl", "task.agent=late.run"]
    for recipe, config, *words in (
        ("grpo_full", "run.yaml", "evaluation.task=null"),
        ("grpo_full", "run.yaml", "evaluation.task=null", "dry_run=True"),
        ("evaluate", "eval.yaml"),
    ):
        output = runs.run(workspace, recipe, "output_dir=lacking", *rows, *words, config=config, ok=False)
        assert "the agent of Jsonl gets no response on problem" in output
        assert "No module named 'no_such_package'" in output and not (workspace / "lacking").exists()


EVALUATION = """
output_dir: ???
model_dir: model
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: letters.Letters}
sampling: {max_tokens: 8}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
"""


@pytest.mark.rest  # in `make test`: test_conversations.py, whose processes are the same, and tests/unit/grading
def test_failing_agents_are_ungraded_and_end(workspace, served):
    """Agents that raise, die, hang with a child, or return no number; the run trains on the others."""
    args = [*task_args("WildAgent", 4), "agent.timeout_s=5", "evaluation.task=null"]
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
EVALUATION = """
output_dir: ???
model_dir: model
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: model}
task:
  _component_: ???
sampling: {max_tokens: 12}
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
"""


def test_program_trains_and_evaluates_on_rows(workspace, served):
    """A program in another process; `evaluate` draws a sample and a greedy one of each row."""
    (workspace / "agent.py").write_text(COMMAND)
    rows = [json.dumps({"question": f"{a} + {a}?", "answer": 2 * a}) for a in range(8)]
    (workspace / "rows.jsonl").write_text("\n".join(rows))
    rows_task = ["task._component_=torchtune_ext.tasks.jsonl.Jsonl", "task.path=rows.jsonl"]
    rows_task += [f"task.command=[{sys.executable},agent.py]", "grader.workers=2", "output_dir=program"]
    runs.run(workspace, "grpo_full", *rows_task, "evaluation.task=null", "max_steps=1", served)
    (workspace / "eval.yaml").write_text(EVALUATION)
    output = runs.run(workspace, "evaluate", *rows_task, "output_dir=evaluated", config="eval.yaml")
    assert "temperature 1" in output
    for run, steps in (("program", (1,)), ("evaluated", (0, 1))):
        for step in steps:
            samples = [s for g in read_rollouts(rollout_paths(workspace / run)[step]) for s in g.samples]
            assert all(sample.score.reward == len(sample.completion.tokens) > 0 for sample in samples)


@pytest.mark.rest
def test_page_agent_is_trained_evaluated_and_served(tmp_path):
    """The files and commands of the page, with a tiny model in place of SmolLM2."""
    pages = [PAGE.with_name(name) for name in ("dataset.md", "reward_function.md", "agents.md")]
    write_files({name: text for page in pages for name, text in shown_files(page).items()}, tmp_path)
    # The tokenizer of the tiny model makes more tokens of a prompt.
    write_tiny_model(tmp_path / "models" / "SmolLM2-135M-Instruct", max_position_embeddings=1024)
    longer = "engine.max_model_len=1024"
    typed(tmp_path, "python", "make_rows.py")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[:8]))
    train, report = shown_commands(PAGE, "tune run grpo_full")
    typed(tmp_path, *train, longer, "prompts_per_step=2", "samples_per_prompt=4")
    typed(tmp_path, *report)
    run = tmp_path / "runs" / "my_agent"
    samples = [s for path in rollout_paths(run).values() for g in read_rollouts(path) for s in g.samples]
    assert max(len(sample.completion.turns) for sample in samples) == 3
    assert all(sample.score is not None for sample in samples) and (run / "report.html").exists()

    (evaluate,) = shown_commands(PAGE, "tune run evaluate")
    assert "temperature 1" in typed(tmp_path, *evaluate, longer)
    groups = read_rollouts(rollout_paths(run / "eval")[1])
    assert len(groups) == 8 and all(len(s.completion.turns) >= 1 for g in groups for s in g.samples)

    (words,) = shown_commands(PAGE, "torchtune-ext serve")
    command = [sys.executable, "-m", "torchtune_ext", *words[1:]]
    server = subprocess.Popen(command, cwd=tmp_path, env=runs.environment(), stdout=subprocess.PIPE, text=True)
    try:
        variables = [server.stdout.readline().removeprefix("export ").strip().partition("=") for _ in range(3)]
        url, key, model = (value for _, _, value in variables)
        client = openai.OpenAI(base_url=url, api_key=key)
        for _ in range(12):  # together more tokens than an episode may have
            response = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}])
            assert response.choices[0].finish_reason in ("stop", "length")
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
