"""Runs that are told to stop: what they say, what they keep, what they leave."""

import re
import signal
import subprocess
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file

from helpers import recipe_runs as runs
from helpers import wandb_reader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = "max_steps=4"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, served):
    """A folder in which `reference`, a run of four steps, has ended well."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("work"))
    runs.run(folder, "grpo_full", "output_dir=reference", STEPS, "checkpoints.every=100", served)
    return folder


def hear_signals():
    """Whoever was started by a shell in the background ignores SIGINT, and so would what it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def stopped(folder, number, steps, *args, ranks=1, once="metrics.jsonl"):
    """Starts a run, sends it a signal once so many steps have metrics and `once` exists; returns (status, what it
    said)."""
    log = folder / "said.txt"
    command = runs.command("grpo_full", *args, ranks=ranks)
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=runs.environment(),
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=hear_signals,
        )
    run_dir = folder / next(word.removeprefix("output_dir=") for word in args if word.startswith("output_dir="))
    runs.wait_for_steps(run_dir, steps, process)
    while not (run_dir / once).exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    status = process.wait(180)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive, f"left running: {alive}"
    return status, log.read_text()


def newest(run_dir):
    return sorted((run_dir / "checkpoints").glob("step_*"))[-1]


def same_as_reference(folder, run):
    want, result = (
        load_file(newest(folder / name) / "model-00001-of-00001.safetensors") for name in ("reference", run)
    )
    return all(torch.equal(want[name], result[name]) for name in want)


def test_ctrl_c_reports_step_and_resume_command(workspace, served):
    words = ["output_dir=at_once", "max_steps=400", "logging.to=[wandb]", served]
    status, output = stopped(workspace, signal.SIGINT, 3, *words)
    assert status == 130 and "Traceback" not in output, output
    assert re.search(
        r"Stopped by Ctrl-C\. The run was at step \d+ of 400\. The newest checkpoint is .*step_\d+; resume from there with resume_from_checkpoint=True",
        output,
    ), output
    assert "wandb sync" in output.split("Run summary")[-1], "the run was not closed for W&B"  # its last words
    assert output.index("wandb sync") < output.index("Stopped by"), "W&B was closed by the end of the interpreter"
    (start,) = wandb_reader.starts(workspace / "at_once", 1)
    assert start.whole["exit_code"] == 130


@pytest.mark.rest  # in `make test`: tests/unit/run/test_stop.py
def test_ctrl_c_while_it_sets_up(workspace):
    log, run_dir = workspace / "set_up.txt", workspace / "set_up"
    with log.open("w") as out:
        process = subprocess.Popen(
            runs.command("grpo_full", "output_dir=set_up"), cwd=workspace, env=runs.environment(), stdout=out, stderr=out,
            start_new_session=True, preexec_fn=hear_signals,
        )  # fmt: skip
    deadline = time.monotonic() + 240
    while not (run_dir / "engine.log").exists():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130
    _, alive = psutil.wait_procs(children, timeout=60)
    assert children and not alive, f"left running: {alive}"
    output = log.read_text()
    assert (
        "Stopped by Ctrl-C. The run had not started its first step, and has no checkpoint yet, so the next start begins at step 1"
        in output
    )
    assert "Traceback" not in output, output


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_sigterm_saves_step_and_resumed_run_is_identical(workspace, served, ranks):
    run = f"term_{ranks}"
    args = [f"output_dir={run}", "max_steps=400", "checkpoints.every=1000", served]
    status, output = stopped(workspace, signal.SIGTERM, 2, *args, ranks=ranks)
    assert status == 143 if ranks == 1 else status != 0, output
    assert "SIGTERM: the run stops after this step, if the step ends within 25 s (stop_grace_s)" in output
    kept = newest(workspace / run)
    assert f"The newest checkpoint is {run}/checkpoints/{kept.name}" in output, output
    step = int(kept.name.removeprefix("step_"))
    lines = runs.metrics(workspace / run)
    assert lines[-1]["step"] == step >= 1  # nothing was done in vain
    if ranks == 1:
        total = max(4, step + 1)
        runs.run(
            workspace,
            "grpo_full",
            f"output_dir={run}",
            f"max_steps={total}",
            "resume_from_checkpoint=True",
            "checkpoints.every=100",
            served,
        )
        if total == 4:
            assert runs.metrics(workspace / run) == runs.metrics(workspace / "reference")
            assert same_as_reference(workspace, run)
        else:
            assert [line["step"] for line in runs.metrics(workspace / run)] == list(range(total + 1))


@pytest.mark.rest  # in `make test`: tests/unit/run/test_stop.py
def test_stop_grace_exceeded_reports_last_checkpoint(workspace, served):
    """Half a second is less than a step takes here, with 40 samples of each prompt."""
    args = ["output_dir=late", "max_steps=400", "checkpoints={every: 1, stop_grace_s: 0.2}", "samples_per_prompt=40"]
    status, output = stopped(workspace, signal.SIGTERM, 3, *args, served, once="checkpoints/step_000002")
    assert status == 143 and "within 0.2 s (stop_grace_s)" in output, output
    match = re.search(
        r"Stopped by SIGTERM\. The run was at step (\d+) of 400\. The newest checkpoint is late/checkpoints/step_(\d+);",
        output,
    )
    assert match and int(match[1]) > int(match[2]), output
    assert not list((workspace / "late" / "checkpoints").glob(".partial_*"))
