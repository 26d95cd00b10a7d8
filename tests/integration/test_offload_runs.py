"""Runs that share their devices with sleeping engines: turns, and with offloaded weights the same bits as without."""

import re
import shutil
import signal
import subprocess
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import recipe_runs as runs
from helpers import resting_backend

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SLEEPS = ("engine.sleep=True", "engine.backend=resting_backend.RestingBackend")
# The reference policy computes with the frozen weights, and a checkpoint merges them in main memory.
KL = ("loss.kl_coef=0.1", "adapters.save_merged=True")


@pytest.fixture(scope="module")
def workspace(lora_workspace):
    shutil.copy(resting_backend.__file__, lora_workspace)
    return lora_workspace


def run(folder, name, *args):
    return runs.run(folder, "grpo_lora", f"output_dir={name}", *args, config="lora.yaml")


def require_equal(folder, name, expected, step=3):
    """Compare the metrics, and every tensor of the last checkpoint, with those of another run."""
    assert runs.metrics(folder / name) == runs.metrics(folder / expected)
    checkpoint = Path("checkpoints") / f"step_{step:06d}"
    files = sorted(
        path.relative_to(folder / expected) for path in (folder / expected / checkpoint).rglob("*.safetensors")
    )
    assert files
    for file in files:
        want, result = load_file(folder / expected / file), load_file(folder / name / file)
        assert want.keys() == result.keys() and all(torch.equal(want[key], result[key]) for key in want), file


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.rest), 2])
def test_lora_with_offload_equals_run_without(workspace, level):
    """At level 2 the engine loses its base weights in each sleep, and rereads them."""
    name = f"turns_{level}"
    run(workspace, name, *SLEEPS, f"engine.sleep={level}")
    require_equal(workspace, name, "reference")
    lines = runs.metrics(workspace / name)
    assert lines[-1]["canary/adapter_applied"] == pytest.approx(1.0, abs=1e-2)
    # The engine starts and sleeps for the trainer. It wakes up for each weight sync, sleeps while its canary is checked, and
    # wakes up for the next step; after the last one for the evaluation.
    turns = [
        (f"load {version} of {what}, sleep level {level}", f"sleep at level {level}")
        for version in range(4)
        for what in ("adapter", "nothing" if level == 1 else "adapter")
    ]
    asleep = f"sleep at level {level}"
    events = ["load 0 of nothing, sleep level 0", asleep, *(event for turn in turns for event in turn)]
    assert (workspace / name / "transitions.txt").read_text().splitlines() == events[:-1]


@pytest.mark.rest
@pytest.mark.parametrize("option", ["use_dora: true", "quantize_base: true"], ids=["dora", "qlora"])
def test_adapters_with_offload_equal_run_without(tmp_path, option):
    runs.make_workspace(tmp_path, hidden_size=128, intermediate_size=256)
    adapters = f"lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, lora_rank: 4, {option}"
    model = 'model_dir: "${model_dir}"'
    (tmp_path / "lora.yaml").write_text(
        runs.CONFIG.replace(f"{model}}}\ntokenizer", f"{model}, {adapters}}}\ntokenizer")
    )
    shutil.copy(resting_backend.__file__, tmp_path)
    run(tmp_path, "together", *KL)
    run(tmp_path, "turns", *SLEEPS, *KL)
    require_equal(tmp_path, "turns", "together")


@pytest.mark.rest
def test_offload_killed_and_resumed_equals_uninterrupted(workspace):
    args = ("output_dir=killed_in_turns", "resume_from_checkpoint=True", *SLEEPS)
    command = runs.command("grpo_lora", *args, config="lora.yaml")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=workspace, env=runs.environment(), start_new_session=True, **quiet)
    runs.wait_for_steps(workspace / "killed_in_turns", 3, process)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    run(workspace, "killed_in_turns", *args[1:])
    require_equal(workspace, "killed_in_turns", "reference")


@pytest.mark.rest
def test_ranks_and_engines_take_turns_on_devices(tmp_path):
    """Two ranks with two engines, as with `engine.devices="0,1" engine.sleep=true` on GPUs: on a CPU, devices are cores."""
    runs.make_workspace(tmp_path)
    helpers = Path(resting_backend.__file__).parent
    for name in ("resting_backend.py", "recorded_ranks.py"):
        shutil.copy(helpers / name, tmp_path)
    args = ("output_dir=colocated", "max_steps=2", "engine.count=2", "task._component_=recorded_ranks.Letters", *SLEEPS)
    runs.run(tmp_path, "grpo_full", *args, ranks=2)
    lines = (tmp_path / "colocated" / "transitions.txt").read_text().splitlines()
    # Both engines sleep before any rank allocates.
    assert sorted(lines[:4]) == 2 * ["load 0 of nothing, sleep level 0"] + 2 * ["sleep at level 1"]
    events = [re.sub(r"^rank \d", "both ranks:", line) for line in lines[4:]]
    phases = [(event, len(list(group))) for event, group in groupby(events)]
    # An engine wakes up after both ranks have freed memory, and no rank trains before both engines sleep. A step has two updates.
    turns = [
        [("both ranks: frees memory", 2), (f"load {version} of model, sleep level {level}", 2)]
        for version, level in enumerate((1, 2, 2))
    ]
    update = [("sleep at level 2", 2), ("both ranks: trains", 4)]
    assert phases == [("both ranks: allocates its weights", 2), *turns[0], *update, *turns[1], *update, *turns[2]]
    metrics = runs.metrics(tmp_path / "colocated")
    assert all(line["canary/mean_abs"] < 1e-5 and line["mismatch/mean_abs"] < 1e-5 for line in metrics[1:])


def test_sleep_with_server_is_refused_in_dry_run(workspace, lora_served):
    refused = partial(
        runs.run, workspace, "grpo_lora", "output_dir=none", "engine.sleep=True", config="lora.yaml", ok=False
    )
    assert "engine.sleep=true with engine.address=http://127.0.0.1" in refused(lora_served, "dry_run=True")
