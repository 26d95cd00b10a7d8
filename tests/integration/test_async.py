"""Sampling and training at the same time, as a user runs it: a real vLLM, real graders, real processes."""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter

import psutil
import pytest
import recipe_runs as runs
from traces import phases, require_valid, spans

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
from torchtune_ext.source import step_seed
from torchtune_ext.tasks.order import problem_index
from torchtune_ext.telemetry.rollouts import read_rollouts, rollout_paths
from torchtune_ext.telemetry.timeline import read_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STALENESS, GROUPS, PROBLEMS = 2, 4, 64  # GROUPS a step and PROBLEMS of the task: as in recipe_runs
TRAINED = ("loss/", "optim/", "mismatch/", "reward/", "pack/", "groups/")  # metrics that the rollouts decide
AHEAD = [f"staleness={STALENESS}", f"depth={STALENESS}", "evaluation.task=null"]


def stored(run):
    """The groups of each step as the run has stored them."""
    return {step: read_rollouts(path) for step, path in rollout_paths(run).items()}


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


def require_replayed(run, workplace, recipe, *args, config="run.yaml"):
    """Raises AssertionError where a replay of `run`, which knows only what it has stored, does not end as it did."""
    replay = workplace / f"{run.name}_replayed"
    steps = len(rollout_paths(run))
    words = [f"output_dir={replay.name}", f"replay={run.name}", f"max_steps={steps}", *args]
    said = runs.run(workplace, recipe, *words, config=config)
    assert f"replays {run.name}: its rollouts of {steps} steps" in said and "Set otherwise" not in said
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


def require_ahead(run, steps):
    """Raises AssertionError where a run breaks what `staleness` promises."""
    lines, groups = runs.metrics(run)[1:], stored(run)
    assert [line["step"] for line in lines] == list(groups) == list(range(1, steps + 1))
    for line in lines:
        present = line["step"] - 1  # the version that the step begins with
        versions = [v for g in groups[line["step"]] for s in g.samples for v in s.completion.versions.tolist()]
        assert 0 <= line["async/age_mean"] <= line["async/age_max"] <= STALENESS
        shares = [line[f"async/age_{age}"] for age in range(STALENESS + 1)]
        assert sum(shares) == pytest.approx(1.0) and shares[int(line["async/age_max"])] > 0.0
        assert sum(age * share for age, share in enumerate(shares)) == pytest.approx(line["async/age_mean"])
        assert present - line["async/age_max"] <= min(versions) and max(versions) <= present
        assert line["async/dropped"] == line["async/dropped_tokens"] == 0.0

    # Every problem that the run has submitted is trained once, and nothing is left behind.
    want = [f"letters-{problem_index(cursor, PROBLEMS, seed=0)}" for cursor in range(GROUPS * steps)]
    assert Counter(g.problem.id for step in groups.values() for g in step) == Counter(want)
    assert lines[-1]["async/running"] == lines[-1]["async/buffer"] == 0.0
    last = json.loads((run / "checkpoints" / f"step_{steps:06d}" / "recipe.json").read_text())
    assert last["source"] == {} and last["cursor"] == GROUPS * steps


@pytest.mark.parametrize(
    ("workplace", "recipe", "config"),
    [("full_workplace", "grpo_full", "run.yaml"), ("lora_workplace", "grpo_lora", "lora.yaml")],
    ids=["full", "lora"],
)
def test_depth_0_is_the_run_that_samples_and_trains_in_turns(request, workplace, recipe, config):
    """Another bound of the age changes nothing where nothing is sampled ahead: no token, no loss, no weight."""
    folder = request.getfixturevalue(workplace)
    runs.run(folder, recipe, "output_dir=in_turns", "staleness=1", "depth=0", config=config)
    want, got = folder / "reference", folder / "in_turns"
    assert {s: record(g) for s, g in stored(got).items()} == {s: record(g) for s, g in stored(want).items()}
    lines = runs.metrics(got)
    assert all(line["async/age_max"] == line["async/running"] == 0.0 for line in lines[1:])
    ours = [{name: v for name, v in line.items() if not name.startswith("async/")} for line in lines]
    assert ours == runs.metrics(want)
    assert weights(got) == weights(want) != {}
    if recipe == "grpo_lora":
        require_replayed(got, folder, recipe, "staleness=1", "depth=0", config=config)


def test_the_groups_of_a_step_are_what_its_policy_says_to_its_problems(full_workplace, tmp_path):
    """An engine that was started with the checkpoint of step 2 draws what the run drew in step 3."""
    groups = stored(full_workplace / "reference")[3]
    config = EngineConfig(dtype="float32", max_model_len=128, kv_cache_bytes=16777216)
    tokenizer = ChatTokenizer(str(full_workplace / "model"))
    checkpoint = full_workplace / "reference" / "checkpoints" / "step_000002"
    with Engine(str(checkpoint), config, str(tmp_path), version=2) as engine:
        engine.start()
        engine.wait_ready()
        sampling = SamplingConfig(max_tokens=12, seed=step_seed(0, 3), stop_token_ids=tokenizer.stop_token_ids)
        found = engine.sample([g.prompt_tokens.tolist() for g in groups], 4, sampling)
    order = [f"letters-{problem_index(cursor, PROBLEMS, seed=0)}" for cursor in range(2 * GROUPS, 3 * GROUPS)]
    assert [g.problem.id for g in groups] == order
    assert [[c.tokens.tolist() for c in group] for group in found] == [
        [s.completion.tokens.tolist() for s in group.samples] for group in groups
    ]


@pytest.mark.parametrize("steps", [1, 5])
def test_ahead_of_the_trainer(full_workplace, steps):
    """Also in a run that is shorter than it may be ahead."""
    run = full_workplace / f"ahead{steps}"
    runs.run(full_workplace, "grpo_async", f"output_dir={run.name}", f"max_steps={steps}", *AHEAD)
    require_ahead(run, steps)
    if steps > 1:
        require_replayed(run, full_workplace, "grpo_async", *AHEAD)
    # At a depth as great as the staleness, and behind the first groups, each is due at just the step that its number names.
    assert [line["async/age_mean"] for line in runs.metrics(run)[4:]] == [STALENESS] * max(0, steps - 3)


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_killed_and_resumed_trains_every_problem_once(full_workplace, kills):
    """Each kill comes at a random moment, while groups are on their way. Nothing is left of a killed run, nothing is trained
    twice in the history that survives, and this history ends with the weights that a replay of it has."""
    steps, name = PROBLEMS // GROUPS * (1 + kills // 5), f"killed{kills}"
    args = [f"output_dir={name}", f"max_steps={steps}", *AHEAD]
    run, trained = full_workplace / name, 0
    for kill in range(kills):
        # A start is told to go on; step 0 has metrics, too.
        process = start(full_workplace, *args)
        latest = max(trained + 1, (kill + 1) * steps // (kills + 1))
        runs.wait_for_steps(run, 1 + random.randint(trained + 1, latest), process)
        time.sleep(random.uniform(0.0, 0.3))
        end_by_kill(process)
        trained = max(rollout_paths(run))
        assert trained < steps, "the run ended before it was killed"
    first = rollout_paths(run)[1].stat().st_mtime_ns

    runs.run(full_workplace, "grpo_async", "resume_from_checkpoint=True", *args)
    assert rollout_paths(run)[1].stat().st_mtime_ns == first, "the run began again"
    require_ahead(run, steps)
    require_replayed(run, full_workplace, "grpo_async", *AHEAD)

    # The timeline has all processes, and the groups of every step.
    events = read_trace(run / "trace.json")
    require_valid(events)
    assert sum(event["ph"] == "i" for event in events) == kills + 1
    taken = {args["step"] for track, _, _, args in spans(events) if track == "buffer"}
    assert taken == set(phases(events, "train")) == set(range(1, steps + 1))


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
