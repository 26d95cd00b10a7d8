"""A real pretrained model, from the package index to an update, and to the last bit again, whoever else uses the processor."""

import hashlib
import os
import subprocess
import sys
import time

import pytest

from helpers import recipe_runs as runs

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]

SMALL = ("max_steps=3", "prompts_per_step=4", "samples_per_prompt=8", "evaluation.task=null", "checkpoints.every=1")
SMALL += ("loss.entropy_coef=0.01",)  # so that a step learns whose rewards are all equal, too


@pytest.fixture(scope="module")
def model(repo_root):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which needs gcc")
    env = os.environ | {"VENV": sys.prefix}
    done = subprocess.run([repo_root / "scripts" / "pretrained.sh"], env=env, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr)
    return repo_root / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module", autouse=True)
def rival():
    """A process that takes a core from the two threads of each run, and so changes the order in which they work."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def begin(folder, recipe, *words):
    command = [sys.executable, "-m", "torchtune_ext", "run", recipe, *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "2"}, **streams)


def tune(folder, recipe, *words):
    process = begin(folder, recipe, *words)
    output = process.communicate()[0]
    assert not process.returncode, output
    return output


def weights(run):
    digest = hashlib.sha256()
    for file in sorted((run / "checkpoints" / "step_000003").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("way", ["full", "lora", "staleness"])
def test_replayed_and_killed_runs_have_identical_weights(model, tmp_path, way):
    recipe, more = {
        "full": ("grpo_full", ()),
        "lora": (
            "grpo_lora",
            ("model.lora_attn_modules=[q_proj,v_proj]", "optimizer.lr=1e-3", "adapters.save_merged=True"),
        ),
        "staleness": ("grpo_async", ("staleness=1", "preset=decoupled_ppo")),
    }[way]
    words = ("--config", "grpo/smollm2", f"model_dir={model}", "task.reward=credit", *SMALL, *more)
    output = tune(tmp_path, recipe, *words, "output_dir=run")
    assert "llama of 30 layers, 135 million parameters" in output and "rounding:" in output
    assert all(line["optim/grad_norm"] > 0 for line in runs.metrics(tmp_path / "run")[1:])
    for name in ("once", "twice"):
        tune(tmp_path, recipe, *words, "replay=run", f"output_dir={name}")
    # What is sampled ahead at the moment of a kill is sampled again, with newer weights: only a replay has the same answers.
    again = (*words, "output_dir=killed", *(["replay=run"] if way == "staleness" else []))
    process = begin(tmp_path, recipe, *again)
    while not (tmp_path / "killed" / "checkpoints" / "step_000002").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.kill()
    process.communicate()
    output = tune(tmp_path, recipe, *again, "resume_from_checkpoint=True")
    assert "from step 2 of run" in output, output
    assert len({weights(tmp_path / name) for name in ("run", "once", "twice", "killed")}) == 1
