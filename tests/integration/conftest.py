"""Runs that several test files share. Each run is made once, at its first use."""

import pytest

from helpers import recipe_runs as runs

FULL_MODEL = 'model: {_component_: torchtune_ext.policy.from_config, model_dir: "${model_dir}"}'
LORA_MODEL = """
model:
  _component_: torchtune_ext.policy.from_config
  model_dir: "${model_dir}"
  lora_attn_modules: [q_proj, k_proj, v_proj, output_proj]
  apply_lora_to_mlp: true
  lora_rank: 4
  lora_alpha: 8
"""


@pytest.fixture(scope="session")
def full_workspace(tmp_path_factory):
    """Return a folder with `reference`, a completed full-weight run of three steps."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("full"))
    runs.run(folder, "grpo_full", "output_dir=reference", "logging.to=[tensorboard]", typed=True)
    return folder


def word_of(server):
    """Yield the override that connects a run to a server, and stop the server afterwards."""
    try:
        server.wait()
        yield f"engine.address={server.address}"
    finally:
        server.kill()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """Yield the override for the shared server of full-weight runs."""
    yield from word_of(runs.start_server(tmp_path_factory.mktemp("server")))


@pytest.fixture(scope="session")
def lora_served(tmp_path_factory):
    """Yield the same override for runs that publish adapters."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    yield from word_of(runs.start_server(tmp_path_factory.mktemp("server"), lora_rank=4, lora_targets=targets))


@pytest.fixture(scope="session")
def kl_run(full_workspace, served):
    """Return a run of two steps, the second profiled, with a KL term, refill and several samples per held-out problem."""
    runs.run(full_workspace, "grpo_full", "output_dir=kl", "max_steps=2", "profile=[2]", *runs.KL, served)
    return full_workspace / "kl"


@pytest.fixture(scope="session")
def lora_workspace(tmp_path_factory, lora_served):
    """Return a folder with `reference`, a completed LoRA run of three steps."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("lora"))
    (folder / "lora.yaml").write_text(runs.CONFIG.replace(FULL_MODEL, LORA_MODEL))
    runs.run(folder, "grpo_lora", "output_dir=reference", lora_served, config="lora.yaml")
    return folder


@pytest.fixture(scope="session")
def talks_workspace(tmp_path_factory, served):
    """Return a folder with `run`, a completed run of three steps on conversations."""
    folder = runs.make_workspace(tmp_path_factory.mktemp("talks"))
    output = runs.run(folder, "grpo_full", "output_dir=run", *runs.CREDITED_TALKS, served)
    assert "episodes of up to 4 turns, 8 at a time" in output
    return folder
