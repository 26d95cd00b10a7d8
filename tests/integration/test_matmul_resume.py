"""A run on measured speed that is killed and resumed asks, keeps and learns what one that was not killed does."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from helpers import few_programs
from helpers import recipe_runs as runs

pytest.importorskip("tree_sitter_c")

from torchtune_ext.measured.matmul.archive import ARCHIVE_FILE, Archive
from torchtune_ext.pipeline.rollout_store import read_rollouts, rollout_paths
from torchtune_ext.telemetry.metrics import read_metrics
from torchtune_ext.training.checkpoints import RunState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

HELPERS = Path(few_programs.__file__).parent
STAGES = ["none", "loop_order", "blocking", "all"]
STEPS, EVERY = 8, 2  # of the run with recorded timings, and between its checkpoints
WARM = """
output_dir: warm
device: cpu
dtype: float32
task: {_component_: few_programs.Few}
num_problems: 48
epochs: 24
batch_problems: 12
row_tokens: 2048
tokenizer_problems: 48
shape: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, intermediate_size: 128,
        max_position_embeddings: 512, vocab_size: 512}
model: {_component_: torchtune_ext.policy.from_config}
tokenizer: {_component_: torchtune_ext.chat.ChatTokenizer}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-2, betas: [0.9, 0.98], weight_decay: 0.0}
schedule: {decay: cosine, warmup: 5}
"""
RUN = f"""
output_dir: ???
model_dir: warm/model
device: cpu
dtype: float32
model: {{_component_: torchtune_ext.policy.from_config, model_dir: "${{model_dir}}"}}
tokenizer: {{_component_: torchtune_ext.chat.ChatTokenizer, path: "${{model_dir}}"}}
task:
  _component_: few_programs.RecordedMatmul
  kernels: {{dgemm: {few_programs.SIZES}}}
  stages: {STAGES}
  show: 0.5
optimizer: {{_component_: torch.optim.AdamW, lr: 1.0e-4}}
max_steps: {STEPS}
prompts_per_step: 4
samples_per_prompt: 4
row_tokens: 1024
max_mismatch: 1.0e-4
sampling: {{max_tokens: 128}}
engine: {{dtype: float32, max_model_len: 512, kv_cache_bytes: 67108864}}
checkpoints: {{every: {EVERY}, keep_last: 10}}
"""
# The same with the benchmark service, and a kernel that a busy machine can time.
REAL = RUN.replace("few_programs.RecordedMatmul", "torchtune_ext.measured.matmul.Matmul")
REAL = REAL.replace(f"{{dgemm: {few_programs.SIZES}}}", "{calm_kernels.CalmDgemm: 48}")
REAL = REAL.replace(str(STAGES), "[blocking, all]\n  bench: {budget_s: 0.2}")
SHORT = ["max_steps=5", "prompts_per_step=2", "checkpoints.every=1"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a model that writes a handful of programs, and `reference`, a run on it that was not killed."""
    folder = tmp_path_factory.mktemp("matmul")
    for name in ("few_programs", "calm_kernels"):
        shutil.copy(HELPERS / f"{name}.py", folder)
    (folder / "warm.yaml").write_text(WARM)
    (folder / "run.yaml").write_text(RUN)
    (folder / "real.yaml").write_text(REAL)
    runs.run(folder, "warmup_sft", config="warm.yaml")
    runs.run(folder, "grpo_full", "output_dir=reference")
    return folder


def logged(run):
    """The last step in the metrics of a run that may not have begun."""
    try:
        return max((line["step"] for line in read_metrics(run / "metrics.jsonl")), default=-1)
    except FileNotFoundError:
        return -1


def killed_after(workspace, name, step, delay_s, *args, config="run.yaml"):
    """Starts a run, or goes on with it, and kills it so many seconds after the metrics of a step were written. Returns whether it
    was still there to be killed. Nothing of it may be left."""
    command = runs.command("grpo_full", f"output_dir={name}", "resume_from_checkpoint=True", *args, config=config)
    with open(workspace / f"{name}.log", "a") as log:
        process = subprocess.Popen(command, cwd=workspace, env=runs.environment(), stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    while logged(workspace / name) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(delay_s)
    alive = process.poll() is None
    if alive:
        children = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(children, timeout=15)
        assert not left, f"left running: {left}"
    process.wait(20)
    return alive


def states(run):
    """What the recipe has remembered in each checkpoint, by its step."""
    return {state.step: state for state in map(state_of, sorted((run / "checkpoints").glob("step_*")))}


def state_of(path):
    return RunState.from_recipe_state(json.loads((path / "recipe.json").read_text()))


def questions(run):
    return [(s, g.problem.id, g.problem.messages) for s, p in rollout_paths(run).items() for g in read_rollouts(p)]


def weights(run, step):
    return load_file(run / "checkpoints" / f"step_{step:06d}" / "model-00001-of-00001.safetensors")


def require_equal(run, reference):
    assert questions(run) == questions(reference)
    assert (run / ARCHIVE_FILE).read_bytes() == (reference / ARCHIVE_FILE).read_bytes()
    assert runs.metrics(run) == runs.metrics(reference)
    assert states(run)[STEPS].task == states(reference)[STEPS].task
    result, want = weights(run, STEPS), weights(reference, STEPS)
    assert result.keys() == want.keys() and all(torch.equal(result[name], want[name]) for name in want)


def test_matmul_run_advances_stages_and_keeps_programs(workspace):
    """Else the comparisons below would compare nothing."""
    run = workspace / "reference"
    lines = runs.metrics(run)
    problems = {name for _, name, _ in questions(run)}
    assert len({name.split("/")[1] for name in problems}) >= 3 and any(name.endswith("/improve") for name in problems)
    assert sum(line.get("stage/moves", 0.0) for line in lines) >= 4
    archive = Archive.loads((run / ARCHIVE_FILE).read_text())
    assert len(archive) >= 5 and {entry.machine for entry in archive} == {few_programs.MACHINE}
    assert len({entry.found for entry in archive}) > 1
    counts = few_programs.outcomes(group for path in rollout_paths(run).values() for group in read_rollouts(path))
    assert counts["ok"] > 20 and counts["wrong_result"], counts


# Killed after a step whose observations no checkpoint has, and while a checkpoint is written.
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((5,), marks=pytest.mark.rest),
        pytest.param((1, 3, 6), marks=pytest.mark.rest),
        pytest.param((0, 1, 2, 4, 5, 7), marks=pytest.mark.long),
    ],
    ids=["one", "three", "six"],
)
def test_killed_and_resumed_equals_uninterrupted(workspace, kills):
    rng, name = random.Random(len(kills)), f"killed_{len(kills)}"
    killed = [killed_after(workspace, name, step, rng.uniform(0.0, 0.5)) for step in kills]
    assert all(killed), "the run ended before it could be killed"
    runs.run(workspace, "grpo_full", f"output_dir={name}", "resume_from_checkpoint=True")
    require_equal(workspace / name, workspace / "reference")


def test_a_replay_learns_the_same(workspace):
    output = runs.run(workspace, "grpo_full", "output_dir=replayed", "replay=reference", "task.bench.budget_s=1.0")
    assert "Other settings in that run" not in output
    run, reference = workspace / "replayed", workspace / "reference"
    assert (run / ARCHIVE_FILE).read_bytes() == (reference / ARCHIVE_FILE).read_bytes()
    assert states(run)[STEPS].task == states(reference)[STEPS].task
    result, want = weights(run, STEPS), weights(reference, STEPS)
    assert all(torch.equal(result[name], want[name]) for name in want)


@pytest.mark.rest
def test_matmul_killed_run_keeps_checkpointed_state(workspace):
    run = workspace / "real"
    assert killed_after(workspace, "real", 2, 0.0, *SHORT, config="real.yaml"), (
        "the run ended before it could be killed"
    )
    before = states(run)[max(states(run))]
    kept = Archive.loads(before.task["learned"]["archive"])
    runs.run(workspace, "grpo_full", "output_dir=real", "resume_from_checkpoint=True", *SHORT, config="real.yaml")

    after = states(run)
    assert before.step < 5 == max(after) == logged(run) and after[before.step].task == before.task
    archive = Archive.loads((run / ARCHIVE_FILE).read_text())
    merged = Archive.loads((run / ARCHIVE_FILE).read_text())
    for entry in kept:
        merged.add(entry)
    # With all programs of the checkpoint once more it is the same: each of them is there, or was beaten.
    assert len(kept) > 0 and merged.dumps() == archive.dumps()
    assert after[5].task["learned"]["archive"] == archive.dumps()
    window = [
        state.task["learned"]["curriculum"]["problems"]["dgemm-48-48-48"]["window"]
        for _, state in sorted(after.items())
    ]
    assert window[-1][: 2 * before.step] == before.task["learned"]["curriculum"]["problems"]["dgemm-48-48-48"]["window"]
    counts = few_programs.outcomes(group for path in rollout_paths(run).values() for group in read_rollouts(path))
    assert counts["ok"] > 0 and sum(counts.values()) == 5 * 2 * 4, counts
    assert runs.metrics(run)[-1]["archive/cells"] == len(archive)
    assert not [line for line in ps_lines() if str(workspace) in line]


def ps_lines():
    """The command lines of all processes, with the folders where they work."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        yield f"{process.info['cwd']} {' '.join(process.info['cmdline'] or [])}"
