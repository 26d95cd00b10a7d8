"""The recipe as a user runs it: a real vLLM, real torchtune, real processes."""

import base64
import gzip
import json
import os
import random
import re
import signal
import subprocess
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from helpers import recipe_runs as runs
from torchtune_ext.cli.cli import main
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.run.folder import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def workspace(full_workspace):
    return full_workspace


def weights(folder, run, step=3):
    return load_file(folder / run / "checkpoints" / f"step_{step:06d}" / "model-00001-of-00001.safetensors")


def test_grpo_full_writes_metrics_rollouts_checkpoints_report(workspace):
    lines = runs.metrics(workspace / "reference")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["groups/used"] == 4 and line["mismatch/mean_abs"] < 1e-5 for line in lines[1:])
    assert all(line["canary/mean_abs"] < 1e-5 for line in lines[1:])
    assert "eval/reward_sampled" in lines[0] and "eval/reward_greedy" in lines[2] and "eval/low" not in lines[1]
    assert lines[1]["pack/rho"] > 1.2

    paths = rollout_paths(workspace / "reference")
    assert sorted(paths) == [1, 2, 3]
    samples = [s for g in read_rollouts(paths[2]) for s in g.samples]
    assert len(samples) == 16 and {int(v) for s in samples for v in s.completion.versions} == {1}
    assert max(abs(s.advantage) for s in samples) > 0.5

    before, after = load_file(workspace / "model" / "model.safetensors"), weights(workspace, "reference")
    assert before.keys() == after.keys() and any(not torch.equal(before[n], after[n]) for n in before)
    recipe = json.loads((workspace / "reference" / "checkpoints" / "step_000003" / "recipe.json").read_text())
    assert recipe["step"] == 3 and recipe["cursor"] == 12
    assert main(["report", str(workspace / "reference")]) == 0
    page = (workspace / "reference" / "report.html").read_text()
    overview = json.loads(gzip.decompress(base64.b64decode(re.search('id="overview">([^<]+)<', page)[1])))
    assert overview["steps"] == [0, 1, 2, 3] and [entry["step"] for entry in overview["rollouts"]] == [1, 2, 3]
    assert overview["state"]["text"] == "finished, 3 steps"
    facts = {label: (value, note) for label, value, note in overview["facts"]}
    assert facts["Task"] == ("Letters", "") and facts["Device"] == ("CPU", "")
    curves = {panel["title"]: panel["lines"][0]["raw"] for panel in overview["panels"]}
    assert curves["Reward"] == [None, *(pytest.approx(line["reward/mean"], rel=1e-5) for line in lines[1:])]


def test_grpo_full_two_ranks_equal_one_rank(workspace, served):
    runs.run(workspace, "grpo_full", "output_dir=ranks", served, ranks=2)
    one, two = runs.metrics(workspace / "reference"), runs.metrics(workspace / "ranks")
    for a, b in zip(one, two, strict=True):
        assert a["step"] == b["step"] and a.get("reward/mean") == b.get("reward/mean")
        # float32 sums in another order; AdamW's first steps are sign-like, which magnifies them by lr / eps at most
        for name in ("loss/total", "optim/grad_norm", "loss/entropy"):
            if name in a:
                assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-4), (a["step"], name)


def logged(run_dir):
    """Steps in the metrics of a run that may not have begun."""
    try:  # a run that begins again sets the old file aside, at any moment
        return (run_dir / "metrics.jsonl").read_text().count("\n")
    except FileNotFoundError:
        return 0


def test_killed_and_resumed_equals_uninterrupted(workspace, served):
    """Killed while it sets up, with an engine of its own, then at a random moment after so many lines of metrics."""
    rng, kills = random.Random(0), 0
    command = runs.command("grpo_full", "output_dir=killed", "resume_from_checkpoint=True")
    run_dir = workspace / "killed"
    for lines, engine in ((0, []), (2, [served])):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(
            [*command, *engine], cwd=workspace, env=runs.environment(), start_new_session=True, **quiet
        )
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if (run_dir / "engine.log").exists() and logged(run_dir) >= lines:
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.6))
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            _, alive = psutil.wait_procs(children, timeout=30)
            assert not alive, f"left running: {alive}"
            kills += 1
        process.wait(10)
    assert kills, "the run ended before it could be killed"
    runs.run(workspace, "grpo_full", "output_dir=killed", "resume_from_checkpoint=True", served)
    assert runs.metrics(run_dir) == runs.metrics(workspace / "reference")
    want, result = weights(workspace, "reference"), weights(workspace, "killed")
    assert all(torch.equal(want[n], result[n]) for n in want)


def test_copied_recipe_trains_with_custom_loss_and_reward(workspace, served):
    main(["cp", "grpo_full", str(workspace / "my_grpo.py")])
    source = (workspace / "my_grpo.py").read_text()
    mine = """
from letters import Letters
from torchtune_ext.tasks.task import Score


class Unclipped:
    def __call__(self, t):
        return -t.advantages_L * t.logprobs_L, {"mine_max": t.advantages_L}


class Short(Letters):
    def grade(self, problem, text):
        return Score(-len(text) / 100, {"characters": len(text)})


@parse
def recipe_main"""
    (workspace / "my_grpo.py").write_text(source.replace("@parse\ndef recipe_main", mine))
    names = ["loss._component_=Unclipped", "task._component_=Short", "evaluation.task=null"]
    runs.run(workspace, "my_grpo.py", "output_dir=mine", "max_steps=1", *names, served)
    line = runs.metrics(workspace / "mine")[1]
    assert line["loss/mine_max"] > 0 and "loss/clip_fraction" not in line
    assert line["reward/mean"] == pytest.approx(-line["reward/characters"] / 100)


def test_evaluate_prints_and_writes_a_table(workspace):
    config = """
output_dir: evaluation
model_dir: reference/checkpoints/step_000003
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer, path: "${model_dir}"}
task: {_component_: letters.Letters, count: 6}
sampling: {max_tokens: 8}
samples_per_problem: 4
pass_at: [1, 4]
engine: {dtype: float32, max_model_len: 128, kv_cache_bytes: 16777216}
"""
    (workspace / "eval.yaml").write_text(config)
    output = runs.run(workspace, "evaluate", config="eval.yaml")
    assert "pass@4" in output and "greedy" in output
    written = json.loads((workspace / "evaluation" / "evaluation.json").read_text())
    assert written["greedy"]["problems"] == 6 and 0 < written["temperature 1"]["mean"] < 1


def test_the_kl_term_and_refills(kl_run):
    lines = runs.metrics(kl_run)
    # Before the first update the policy is the reference.
    assert lines[1]["loss/kl_ref"] == pytest.approx(0.0, abs=1e-9)
    assert lines[2]["loss/kl_ref"] > 1e-6


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_grpo_full_trains_with_zero_variance_groups(workspace, served, entropy_coef):
    """One group of four has a signal: the others are trained on where the loss has an entropy term, and of the two updates of a
    step one is left out where it has not, but counted by the schedule. Held-out problems are graded by a task of their own."""
    name = f"seldom_{entropy_coef}"
    args = [
        f"output_dir={name}",
        "task._component_=letters.Seldom",
        "task.count=4",
        "schedule.decay=linear",
        "max_steps=2",
        "evaluation.task._component_=letters.Generous",
        "evaluation.task.count=3",
    ]
    args += ["aggregation=constant"] + [f"loss.entropy_coef={entropy_coef}"] * (entropy_coef > 0)
    output = runs.run(workspace, "grpo_full", *args, served)
    rate = read_record(workspace / name)["config"]["optimizer"]["lr"]
    for step, line in enumerate(runs.metrics(workspace / name)[1:]):
        # Of four updates that were planned the first and the third are made, or all.
        assert line["optim/lr"] == pytest.approx(rate * (1 - step / 2 - (entropy_coef > 0) / 8))
        assert (line["groups/used"], line["groups/no_signal"]) == (1, 3)
        assert (line["pack/labels"] == line["length/tokens"]) == (entropy_coef > 0)
        assert 0.0 < line["reward/mean"] < 1.0
    assert runs.metrics(workspace / name)[0]["eval/reward_sampled"] == line["eval/reward_greedy"] == 1.0
    method = (
        "clip 0.2/0.2 per token, TIS <= 2, "
        + "entropy 0.01, " * (entropy_coef > 0)
        + "advantage (baseline mean, scale group_std)"
    )
    assert f"objective: {method}, sum over a constant; preset grpo\n" in output
    assert "checkpoints.every=1 but evaluation.every=2: " in output
    samples = [s for g in read_rollouts(rollout_paths(workspace / name)[1]) for s in g.samples]
    assert sum(s.in_loss for s in samples) == (16 if entropy_coef else 4)


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("exact_kl", ["loss.delta=1e-6"]),
        ("gspo", ["loss.clip_low=1e-6", "loss.clip_high=1e-6"]),
    ],
)
def test_presets_run(workspace, served, preset, more):
    """A trust region so narrow that the step's second update must be cut: the proximal policy's scores really arrive."""
    runs.run(workspace, "grpo_full", f"output_dir={preset}", f"preset={preset}", "max_steps=1", *more, served)
    line = runs.metrics(workspace / preset)[1]
    assert line["loss/clip_fraction"] > 0.1
    assert line["loss/masked_fraction"] == 0.0 and 0.99 < line["mismatch/ess"] <= 1.0
    # The first update cuts nothing. In the second one of the two buckets, which hold all labels, has no less than the mean.
    assert max(line["loss/clip_fraction_at_0"], line["loss/clip_fraction_at_1_15"]) >= line["loss/clip_fraction"] - 1e-6
    assert line["mismatch/mean_abs_at_1_15"] < 1e-4


@pytest.mark.rest
def test_bfloat16_trains_on_float32_masters(workspace):
    args = ["output_dir=bf16", "dtype=bfloat16", "engine.dtype=bfloat16", "max_mismatch=0.05", "max_steps=2"]
    runs.run(workspace, "grpo_full", *args)
    assert runs.metrics(workspace / "bf16")[2]["mismatch/mean_abs"] < 0.02


def test_an_update_that_cannot_be_made_is_named(workspace, served):
    words = ["output_dir=bad", "max_steps=2", "optimizer.lr=1e30", served]
    output = runs.run(workspace, "grpo_full", *words, ok=False)
    assert "lower the learning rate" in output, output[-3000:]
