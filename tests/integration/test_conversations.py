"""Episodes with a real engine and real environments: the tokens, their context, killed runs, replays, the page's game."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import recipe_runs as runs
from helpers.page_commands import blocks
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "environments.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workspace(talks_workspace):
    return talks_workspace


@pytest.fixture(scope="module")
def run(workspace):
    return workspace / "run"


def weights(run):
    last = max((run / "checkpoints").glob("step_*"))
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert files
    return files


def test_conversation_logprobs_equal_transformers_on_full_context(run, workspace):
    """The log-probs that the engine reported turn by turn are those of transformers on the whole conversation."""
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    tokenizer = ChatTokenizer(workspace / "model")
    samples = [(g, s) for g in read_rollouts(rollout_paths(run)[1]) for s in g.samples]
    assert sum(len(s.completion.turns) == 3 for _, s in samples) > len(samples) / 2
    for group, sample in samples:
        completion, prompt = sample.completion, group.prompt_tokens.tolist()
        ids = [*prompt, *completion.tokens.tolist()]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        logprobs = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[len(prompt) - 1 :, 0].numpy()
        at = completion.sampled_indices
        np.testing.assert_allclose(completion.logprobs[at], logprobs[at], atol=1e-4)
        for i, ((_, end), (start, _)) in enumerate(zip(completion.turns, completion.turns[1:], strict=False)):
            answer = [{"role": "user", "content": f"Go on. {i + 1}"}]
            expected = tokenizer.turn_boundary_ids(answer, end=int(completion.tokens[end - 1]))
            assert completion.tokens[end:start].tolist() == expected
        assert sample.score.reward == pytest.approx(sum(sample.turn_rewards))


def test_conversation_run_logs_episode_metrics(run):
    """The gate of 1e-4 nats has passed in every step, on the packed rows."""
    for line in runs.metrics(run)[1:]:
        assert line["pack/labels"] <= line["length/tokens"] and line["episode/read_tokens"] > 5
        endings = (
            "completed",
            "max_turns",
            "length",
            "context_overflow",
            "early_stop",
            "step_timeout",
            "environment_failed",
        )
        assert sum(line[f"episode/{ending}"] for ending in endings) == pytest.approx(1.0)
        assert 1 < line["episode/turns"] <= 3 and line["mismatch/mean_abs"] < 1e-4


FORGETS = """\
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content.split('\ufffd')[-1] if m.role == 'assistant' else m.content) + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def test_template_history_logprobs_equal_transformers_per_turn(workspace, served):
    """What the engine reported is what transformers computes on each context and turn by itself, and, on the packed trees, the
    trainer: its gate of 1e-4 nats passes. A replay ends with the same weights."""
    (workspace / "forgets.jinja").write_text(FORGETS)
    words = [
        "tokenizer.template=forgets.jinja",
        "tokenizer.history=template",
        "evaluation.task=null",
        "max_steps=2",
        *runs.TALKS,
    ]
    runs.run(workspace, "grpo_full", "output_dir=forgets", *words, served)
    model = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    tokenizer, branches = ChatTokenizer(workspace / "model", str(workspace / "forgets.jinja"), history="template"), 0
    for group in read_rollouts(rollout_paths(workspace / "forgets")[1]):
        for sample in group.samples:
            completion, ids = sample.completion, np.concatenate([group.prompt_tokens, sample.completion.tokens])
            branches += len(completion.kept_prefix_lens) > 1
            spans = zip(completion.turn_paths(len(group.prompt_tokens)), completion.turns, strict=True)
            for number, (path, (start, stop)) in enumerate(spans):
                with torch.no_grad():
                    logprobs = model(torch.tensor(ids[path])[None]).logits[0].log_softmax(-1)[:-1]
                own = logprobs.gather(1, torch.tensor(ids[path[1:]])[:, None])[start - stop :, 0].numpy()
                np.testing.assert_allclose(completion.logprobs[start:stop], own, atol=1e-4)
                messages = [*group.problem.messages, *sample.messages[: 2 * number]]
                assert tokenizer.decode_all(ids[path][: start - stop]) == tokenizer.template.render(messages, (), True)
    assert branches
    for line in runs.metrics(workspace / "forgets")[1:]:
        assert line["mismatch/mean_abs"] < 1e-4 and line["episode/turns"] > 1
    runs.run(workspace, "grpo_full", "output_dir=forgets_again", "replay=forgets", *words)
    assert weights(workspace / "forgets_again") == weights(workspace / "forgets")


def test_conversation_replay_reaches_identical_weights(run, workspace):
    output = runs.run(workspace, "grpo_full", "output_dir=again", "replay=run", *runs.CREDITED_TALKS)
    assert "Other settings in that run" not in output, output
    assert weights(workspace / "again") == weights(run)


@pytest.mark.rest
def test_killed_between_two_turns_and_resumed_equals_uninterrupted(run, workspace, served):
    words = ["output_dir=killed", "resume_from_checkpoint=True", *runs.CREDITED_TALKS, served]
    command = runs.command("grpo_full", *words)
    process = subprocess.Popen(command, cwd=workspace, env=runs.environment(), stdout=subprocess.DEVNULL)
    runs.wait_for_steps(workspace / "killed", 2, process)
    time.sleep(random.Random(0).random() / 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    runs.run(workspace, "grpo_full", *words)
    assert weights(workspace / "killed") == weights(run)


def test_environment_faults_affect_only_own_episode(workspace, served, monkeypatch):
    """Each costs its own conversation only; what they have started ends with them."""
    words = [
        "output_dir=wild",
        "task._component_=letters.Wild",
        "grader.timeout_s=2",
        "evaluation.task=null",
        "max_steps=3",
    ]
    mark = f"WILD={workspace}"
    monkeypatch.setenv(*mark.split("=", 1))
    runs.run(workspace, "grpo_full", *runs.TALKS, *words, served)
    lines = runs.metrics(workspace / "wild")[1:]
    assert len(lines) == 3
    for ending in ("completed", "step_timeout", "environment_failed"):
        assert sum(line[f"episode/{ending}"] for line in lines) > 0, ending
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/environ") if mark.encode() in readable(path)]
    assert not left


def readable(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended meanwhile


def test_turns_of_several_versions(workspace, served):
    """A run that samples ahead publishes in the midst of conversations."""
    words = ["output_dir=ahead", "staleness=1", "max_steps=4", "evaluation.task=null"]
    runs.run(workspace, "grpo_full", *words, *runs.TALKS, served)
    lines = runs.metrics(workspace / "ahead")[1:]
    assert max(line["async/staleness_max"] for line in lines) == 1 and all(line["episode/turns"] > 1 for line in lines)


def test_the_pages_game(workspace, served):
    (game,) = [text for language, text in blocks(PAGE) if language == "python"]
    (workspace / "my_game.py").write_text(game)
    words = [
        "task._component_=my_game.Guess",
        "evaluation.task=null",
        "output_dir=guess",
        "max_steps=1",
        runs.TALKS[-1],
    ]
    runs.run(workspace, "grpo_full", *words, served)
    line = runs.metrics(workspace / "guess")[-1]
    assert line["reward/mean"] < 0 and line["episode/completed"] > 0
