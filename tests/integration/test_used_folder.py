"""A folder that another run has used, or uses now, with the real recipe and engine."""

import json
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from helpers import recipe_runs as runs
from helpers.forked_runs import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def workspace(full_workspace, tmp_path_factory):
    """A folder in which `shared` and `mine` are a run of three steps that has ended well."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("work"))
    for name in ("shared", "mine"):
        shutil.copytree(full_workspace / "reference", folder / name)
    return folder


def contents(folder):
    """Every file with its bytes, but for the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


def steps(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step_*"))


def model(run_dir, step):
    return load_file(run_dir / "checkpoints" / f"step_{step:06d}" / "model-00001-of-00001.safetensors")


@pytest.mark.rest  # in `make test`: tests/unit/run/test_folder.py, and resuming in test_grpo_full.py
def test_used_folder_second_run_resumes_own_checkpoints(workspace, served):
    """Run A has ended after three steps. Run B begins in the same folder with another seed, is killed, and resumed."""
    folder = workspace / "shared"
    before, a_id = contents(folder), json.loads((folder / "run.json").read_text())["id"]

    b = ["output_dir=shared", "max_steps=400", "seed=7", "checkpoints.keep_last=2", served]
    process = subprocess.Popen(
        runs.command("grpo_full", *b), cwd=workspace, env=runs.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while steps(folder)[:1] == ["step_000001"] or not (folder / "old-1").exists() or len(steps(folder)) < 2:
        assert time.monotonic() < deadline and process.poll() is None, "B did not come so far"
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    set_aside = contents(folder / "old-1")
    assert {
        name: data for name, data in before.items() if not name.startswith(("wandb/", "engine.log"))
    }.items() <= set_aside.items()

    reached = int(steps(folder)[-1].removeprefix("step_"))
    more = [f"max_steps={reached + 1}", "seed=7", served]
    output = runs.run(workspace, "grpo_full", "output_dir=shared", *more, "resume_from_checkpoint=True")
    lines = runs.metrics(folder)
    assert [line["step"] for line in lines] == list(range(reached + 2)), output
    run = json.loads((folder / "run.json").read_text())
    assert run["id"] != a_id and run["config"]["seed"] == 7
    runs.run(workspace, "grpo_full", "output_dir=alone", *more)
    want, result = model(workspace / "alone", reached + 1), model(folder, reached + 1)
    assert all(torch.equal(want[name], result[name]) for name in want), "B did not go on from its own weights"

    # What was set aside is a run like any other.
    runs.run(workspace, "grpo_full", "output_dir=shared/old-1", "max_steps=4", "resume_from_checkpoint=True", served)
    assert [line["step"] for line in runs.metrics(folder / "old-1")] == [0, 1, 2, 3, 4]


@pytest.mark.rest  # in `make test`: tests/mistakes/test_mistakes.py
def test_a_folder_in_use_is_refused_at_once(workspace, served):
    process = subprocess.Popen(
        runs.command("grpo_full", "output_dir=busy", "max_steps=400", served), cwd=workspace, env=runs.environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        runs.wait_for_steps(workspace / "busy", 1, process)
        for resume in ("False", "True"):
            output = refused(workspace, "grpo_full", "output_dir=busy", f"resume_from_checkpoint={resume}")
            assert f"process {process.pid} " in output and "output_dir=busy" in output, output
            assert "engine core" not in output
        steps = len(runs.metrics(workspace / "busy"))
        runs.wait_for_steps(workspace / "busy", steps + 1, process)  # the first one goes on undisturbed
    finally:
        process.kill()
        process.wait(10)
    # The lock went with its holder: what is refused now is something else.
    assert "max_steps" in refused(workspace, "grpo_full", "output_dir=busy", "max_steps=-1").splitlines()[-1]


def test_resume_with_other_model_or_base_is_refused(workspace):
    runs.make_workspace(workspace / "other", intermediate_size=96)
    output = refused(workspace, "grpo_full", "output_dir=mine", "model_dir=other/model", "resume_from_checkpoint=True")
    assert "model" in output.splitlines()[-1] and "model_dir" in output.splitlines()[-1], output[-2000:]
