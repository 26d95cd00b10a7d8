"""Sampling and training at the same time, as a user runs it: a real vLLM, real graders, real processes."""

import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from helpers import flights, tiny_model
from helpers import recipe_runs as runs
from helpers.async_runs import AHEAD, GROUPS, PROBLEMS, STALENESS, require_ahead, stored
from torchtune_ext.pipeline.rollout_store import rollout_paths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAINED = ("loss/", "optim/", "mismatch/", "reward/", "pack/", "groups/")  # metrics that the rollouts decide


def drawn(completions):
    return [(c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist(), c.finish_reason) for c in completions]


def record(groups):
    """All of stored groups that does not depend on the time at which something happened."""
    return [
        (g.problem.id, drawn(s.completion for s in g.samples), [(s.score.reward, s.advantage) for s in g.samples])
        for g in groups
    ]


def weights(run):
    """The bytes of what the run has trained in the end."""
    last = max((run / "checkpoints").glob("step_*"))
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def require_replayed(run, workspace, recipe, *args):
    """Raises AssertionError where a replay of `run`, which knows only what it has stored, does not end as it did."""
    replay = workspace / f"{run.name}_replayed"
    steps = len(rollout_paths(run))
    words = [f"output_dir={replay.name}", f"replay={run.name}", f"max_steps={steps}", *args]
    output = runs.run(workspace, recipe, *words)
    assert f"replays {run.name}: {steps} of its {steps} steps" in output and "Other settings in that run" not in output
    assert weights(replay) == weights(run) != {}
    assert stored(replay).keys() == stored(run).keys()
    for (step, ours), theirs in zip(stored(replay).items(), stored(run).values(), strict=True):
        assert record(ours) == record(theirs), step
    ours, theirs = (
        [{k: v for k, v in line.items() if k.startswith(TRAINED)} for line in runs.metrics(r)[-steps:]]
        for r in (replay, run)
    )
    assert ours == theirs and "loss/total" in ours[0]
    assert not (replay / "engine.log").exists()


@pytest.mark.parametrize(
    ("workspace", "server", "recipe", "config"),
    [
        ("full_workspace", "served", "grpo_full", "run.yaml"),
        # What is trained plays no part in when groups are sampled; adapters sampled ahead: the flight below.
        pytest.param("lora_workspace", "lora_served", "grpo_lora", "lora.yaml", marks=pytest.mark.rest),
    ],
    ids=["full", "lora"],
)
def test_async_prefetch_zero_equals_synchronous_run(request, workspace, server, recipe, config):
    """Another bound of the age changes nothing where nothing is sampled ahead: no token, no loss, no weight."""
    folder, word = map(request.getfixturevalue, (workspace, server))
    runs.run(folder, recipe, "output_dir=in_turns", "staleness=1", "prefetch_steps=0", word, config=config)
    want, result = folder / "reference", folder / "in_turns"
    assert {s: record(g) for s, g in stored(result).items()} == {s: record(g) for s, g in stored(want).items()}
    assert runs.metrics(result) == runs.metrics(want)
    assert weights(result) == weights(want) != {}


def test_async_run_shorter_than_staleness_limit_completes(full_workspace, served):
    runs.run(full_workspace, "grpo_async", "output_dir=ahead", "max_steps=1", *AHEAD, served)
    require_ahead(full_workspace / "ahead", 1)


LAYERS = "model.lora_attn_modules=[q_proj,k_proj,v_proj,output_proj]"
ADAPTERS = [LAYERS, "model.apply_lora_to_mlp=True", "model.lora_rank=4", "model.lora_alpha=8"]


def by_transformers(path, base):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def by_peft(path, base):
    model = by_transformers(base, base)
    return model if path == base else PeftModel.from_pretrained(model, path)


@pytest.mark.rest
@pytest.mark.parametrize(("model", "load"), [([], by_transformers), (ADAPTERS, by_peft)], ids=["full", "lora"])
def test_in_flight_tokens_label_their_sampling_version(tmp_path, model, load):
    """Each token is of the policy that labels it: a checkpoint of that step says the same of it, to whoever loads it."""
    folder, run, steps = runs.make_workspace(tmp_path, max_position_embeddings=512), tmp_path / "flight", 6
    # The engine needs longer for the samples of a step than the trainer does, and so has some under way at each publication.
    busy = ["engine.max_concurrency=4", "sampling.max_tokens=400", "engine.max_model_len=512", "row_tokens=1024"]
    args = [*AHEAD, *busy, *model, "samples_per_prompt=2", "updates_per_step=1", "checkpoints.keep_last=6"]
    runs.run(folder, "grpo_async", f"output_dir={run.name}", f"max_steps={steps}", *args)
    require_ahead(run, steps)
    # At a depth as great as the staleness, and behind the first groups, each is due at just the step that its number names.
    assert [line["async/staleness_mean"] for line in runs.metrics(run)[4:]] == [STALENESS] * (steps - 3)

    paths = [folder / "model", *sorted((run / "checkpoints").glob("step_*"))]
    # `crossed`: versions whose publication came in the midst of a completion; `wrong`: distances to other versions.
    policies, crossed, wrong = [load(path, folder / "model") for path in paths[:steps]], set(), []
    for group, c in ((g, s.completion) for groups in stored(run).values() for g in groups for s in g.samples):
        logprobs = [tiny_model.logprobs(policy, group.prompt_tokens.tolist(), c.tokens) for policy in policies]
        apart = flights.distances(c, logprobs.__getitem__, other=lambda v: v - 1 if v else v + 1)
        assert all(own.max() < 1e-4 for own, _ in apart.values())
        wrong += [other.mean() for _, other in apart.values()]
        crossed |= set(list(apart)[1:])
    assert len(crossed) >= 3 and np.mean(wrong) > 1e-3
    require_replayed(run, folder, "grpo_async", *args)


@pytest.mark.rest
def test_replay_with_refills_and_reference_resumes_identically(full_workspace, kl_run):
    require_replayed(kl_run, full_workspace, "grpo_full", *runs.KL)
    for step, groups in stored(kl_run).items():
        versions = {int(v) for g in groups for s in g.samples for v in s.completion.versions}
        assert versions == {step - 1}, "a policy version is the step that made it"
    replay, words = full_workspace / "kl_replayed", ["output_dir=kl_replayed", "max_steps=2", *runs.KL]
    shutil.rmtree(replay / "checkpoints" / "step_000002")
    output = runs.run(full_workspace, "grpo_full", "resume_from_checkpoint=True", *words, ok=False)
    assert "this checkpoint is from a replay of run" in output
    runs.run(full_workspace, "grpo_full", "resume_from_checkpoint=True", "replay=kl", *words)
    assert weights(replay) == weights(kl_run)


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_killed_and_resumed_trains_every_problem_once(full_workspace, served, kills):
    """Each kill comes at a random moment, while groups are on their way. Nothing is left of a killed run, nothing is trained
    twice in the history that survives, and this history ends with the weights that a replay of it has."""
    steps, name = PROBLEMS // GROUPS * (1 + kills // 5), f"killed{kills}"
    args = [f"output_dir={name}", f"max_steps={steps}", *AHEAD]
    run, trained = full_workspace / name, 0
    for kill in range(kills):
        # A start is told to go on; step 0 has metrics, too. Of several kills the first one ends an engine, too.
        process = start(full_workspace, *args, *([served] if kill or kills == 1 else []))
        latest = max(trained + 1, (kill + 1) * steps // (kills + 1))
        runs.wait_for_steps(run, 1 + random.randint(trained + 1, latest), process)
        time.sleep(random.uniform(0.0, 0.3))
        end_by_kill(process)
        trained = max(rollout_paths(run))
        assert trained < steps, "the run ended before it was killed"
    first = rollout_paths(run)[1].stat().st_mtime_ns

    runs.run(full_workspace, "grpo_async", "resume_from_checkpoint=True", *args, served)
    assert rollout_paths(run)[1].stat().st_mtime_ns == first, "the run began again"
    require_ahead(run, steps)
    require_replayed(run, full_workspace, "grpo_async", *AHEAD)


def start(folder, *args):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = runs.command("grpo_async", "resume_from_checkpoint=True", *args)
    return subprocess.Popen(command, cwd=folder, env=runs.environment(), start_new_session=True, **quiet)


def end_by_kill(process):
    """Kills a run. Raises AssertionError where it leaves a process behind."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"left running: {alive}"
    process.wait(10)
