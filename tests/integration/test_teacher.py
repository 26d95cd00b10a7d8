"""On-policy distillation with a real second engine, and with the run's own: log-probs, learning, replays, a kill."""

import re
import subprocess

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import recipe_runs as runs
from helpers.servers import Server, free_port
from helpers.tiny_runs import write_tiny_model
from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.sampling.engine import Engine, EngineConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = {"max_model_len": 129, "kv_cache_bytes": 1 << 24, "dtype": "float32"}
# All rewards are equal, so that problems that were asked before are asked less often.
SELECTED = ["task._component_=torchtune_ext.tasks.selection.NearLevel", "task.task=letters.Generous"]
SELECTED += ["task.settings.count=12"]
DISTILL = ["preset=distill", "optimizer.lr=1e-2", "evaluation.task=null", "max_steps=10", *SELECTED]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a policy, and a teacher that has its tokenizer and other weights and sizes."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("distill"))
    write_tiny_model(folder / "teacher", hidden_size=96, num_attention_heads=3, num_hidden_layers=3)
    # Each token depends on those before it, and every fifth one is twenty times as likely as others: that can be learned.
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
        embeddings = model.get_input_embeddings().weight
        embeddings.add_(1.0)
        embeddings[::5] += 3.0 / embeddings.shape[1]
    model.save_pretrained(folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def server(workspace):
    """A server of the teacher."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHTUNE_EXT_API_KEY", runs.SERVER_KEY)
        config = EngineConfig(address=f"http://127.0.0.1:{free_port()}", **SIZES)
        server = Server(str(workspace / "teacher"), config, workspace / "server.log", forks=True)
        try:
            server.wait()
            yield config
        finally:
            server.kill()


def logprobs(folder, texts):
    """Of the tokens of texts from the second on, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = [model(torch.tensor([text])).logits[0].log_softmax(-1)[:-1] for text in texts]
    return [each.gather(1, torch.tensor(text[1:])[:, None])[:, 0] for each, text in zip(rows, texts, strict=True)]


@pytest.mark.parametrize("where", [pytest.param("own", marks=pytest.mark.rest), "server"])
def test_scores_are_those_of_transformers(workspace, server, where, tmp_path):
    texts = [np.random.default_rng(length).integers(5, 300, length).tolist() for length in (2, 17, 127)]
    texts.append(texts[2][:100] + texts[1])  # a prefix that is in the cache by then, of which vLLM has no log-probs
    config = server if where == "server" else EngineConfig(**SIZES)
    with Engine(str(workspace / "teacher"), config, str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready()
        scores = [*engine.score(texts[:3]), *engine.score(texts[3:])]
    for score, expected in zip(scores, logprobs(workspace / "teacher", texts), strict=True):
        # Rounding of float32 grows to 1e-4 in weights this large; another token or context is off by 0.1 and more.
        np.testing.assert_allclose(score, expected, atol=3e-4)


@pytest.fixture(scope="module")
def taught(served, server):
    """The words of a run that has a teacher."""
    return [*DISTILL, served, "teacher.model_dir=teacher", f"teacher.engine.address={server.address}"]


@pytest.fixture(scope="module")
def distilled(workspace, taught):
    output = runs.run(workspace, "grpo_full", "output_dir=distilled", *taught)
    assert "objective: clip 0.2/0.2 per token, TIS <= 2, 1 teacher, 0 rewards" in output
    return workspace / "distilled"


def test_teacher_kl_decreases_during_distillation(distilled):
    """All rewards are equal: what is learned comes from the teacher."""
    lines = runs.metrics(distilled)[1:]
    assert all(line["groups/no_signal"] == 4 and line["pack/labels"] == line["length/tokens"] for line in lines)
    gaps = [line["loss/kl_teacher"] for line in lines]
    assert np.mean(gaps[-2:]) < 0.8 * np.mean(gaps[:2])


def test_stored_scores_are_the_teachers(distilled, workspace):
    (group, *_) = read_rollouts(rollout_paths(distilled)[1])
    texts = [np.concatenate([group.prompt_tokens, s.completion.tokens]).tolist() for s in group.samples]
    for sample, expected in zip(group.samples, logprobs(workspace / "teacher", texts), strict=True):
        np.testing.assert_allclose(sample.teacher_logprobs, expected[-len(sample.completion.tokens) :], atol=3e-4)


def test_a_replay_needs_no_teacher(distilled, workspace):
    output = runs.run(workspace, "grpo_full", "output_dir=again", "replay=distilled", *DISTILL)
    assert "Other settings in that run" not in output
    assert weights(workspace / "again") == weights(distilled) != {}


@pytest.mark.rest
def test_teacher_killed_run_resumes_identically(distilled, workspace, taught):
    words = ["output_dir=killed", "resume_from_checkpoint=True", *taught]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = runs.command("grpo_full", *words)
    process = subprocess.Popen(command, cwd=workspace, env=runs.environment(), start_new_session=True, **quiet)
    runs.wait_for_steps(workspace / "killed", 5, process)
    process.kill()
    process.wait()
    runs.run(workspace, "grpo_full", *words)
    assert questions(workspace / "killed") == questions(distilled)
    assert weights(workspace / "killed") == weights(distilled)


def test_self_teacher_has_live_weights_and_other_prompt(workspace, served):
    names = {}
    exec(runs.TASK, names)
    words = ["preset=self_distill", "evaluation.task=null", "max_steps=2", "optimizer.lr=1e-2"]
    own = ["output_dir=self", "teacher.prompt=letters.with_feedback"]
    output = runs.run(workspace, "grpo_full", *own, *words, served)
    assert re.search("teacher: +the policy, with the prompt of letters.with_feedback", output)
    run, tokenizer = workspace / "self", ChatTokenizer(str(workspace / "model"))
    for step, weights_of in ((1, workspace / "model"), (2, run / "checkpoints" / "step_000001")):
        (group, *_) = read_rollouts(rollout_paths(run)[step])
        prompts = [tokenizer.prompt_ids(names["with_feedback"](group, sample)) for sample in group.samples]
        texts = [[*ids, *s.completion.tokens.tolist()] for ids, s in zip(prompts, group.samples, strict=True)]
        for sample, expected in zip(group.samples, logprobs(weights_of, texts), strict=True):
            np.testing.assert_allclose(sample.teacher_logprobs, expected[-len(sample.completion.tokens) :], atol=3e-4)
    runs.run(workspace, "grpo_full", "output_dir=self_again", "replay=self", *words)
    assert weights(workspace / "self_again") == weights(run) != {}


def questions(run):
    return [[group.problem.id for group in read_rollouts(path)] for path in rollout_paths(run).values()]


def weights(run):
    newest = max((run / "checkpoints").glob("step_*"))
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}
