"""A real pretrained model, from the package index to an update, and to the last bit again."""

import hashlib
import os
import subprocess
import sys

import pytest
from tiny_runs import metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

SMALL = ("max_steps=2", "prompts_per_step=4", "samples_per_prompt=8", "evaluation.task=null", "checkpoints.every=1")


@pytest.fixture(scope="module")
def model(repo_root):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed, which needs gcc")
    env = os.environ | {"VENV": sys.prefix}
    done = subprocess.run([repo_root / "scripts" / "pretrained.sh"], env=env, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(done.stderr)
    return repo_root / "models" / "SmolLM2-135M-Instruct"


def tune(folder, recipe, *words):
    command = [sys.executable, "-m", "torchtune_ext", "run", recipe, *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def weights(run):
    digest = hashlib.sha256()
    for file in sorted((run / "checkpoints" / "step_000002").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


@pytest.mark.parametrize("way", ["full", "lora", "staleness"])
def test_it_trains_and_two_replays_have_its_bits(model, tmp_path, way):
    """Two threads, beside whatever else this machine does."""
    recipe, more = {
        "full": ("grpo_full", ()),
        "lora": (
            "grpo_lora",
            ("model.lora_attn_modules=[q_proj,v_proj]", "optimizer.lr=1e-3", "adapters.save_merged=True"),
        ),
        "staleness": ("grpo_async", ("staleness=1", "preset=decoupled_ppo")),
    }[way]
    words = ("--config", "grpo/smollm2", f"model_dir={model}", "task.reward=credit", *SMALL, *more)
    said = tune(tmp_path, recipe, *words, "output_dir=run")
    assert "llama of 30 layers, 135 million parameters" in said and "rounding:" in said
    lines = metrics(tmp_path / "run")[1:]
    assert any(line.get("optim/grad_norm", 0.0) > 0 for line in lines)  # a step may be without a signal
    for name in ("once", "twice"):
        tune(tmp_path, recipe, *words, "replay=run", f"output_dir={name}")
    assert weights(tmp_path / "run") == weights(tmp_path / "once") == weights(tmp_path / "twice")
