"""Runs that several files of tests look at: each is made once, when the first of them asks."""

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
def full_workplace(tmp_path_factory):
    """A folder in which `reference`, a run of three steps on all weights, has ended well."""
    folder = runs.make_workplace(tmp_path_factory.mktemp("full"))
    runs.run(folder, "grpo_full", "output_dir=reference", "logging.to=[tensorboard]")
    return folder


def word_of(server):
    """What lets a run sample with a server, which is up as long as it is asked for."""
    try:
        server.wait()
        yield f"engine.address={server.address}"
    finally:
        server.kill()


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The word with which a run on all weights samples with the server of all such runs."""
    yield from word_of(runs.start_server(tmp_path_factory.mktemp("server")))


@pytest.fixture(scope="session")
def lora_served(tmp_path_factory):
    """As `served`, for runs that publish adapters."""
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    yield from word_of(runs.start_server(tmp_path_factory.mktemp("server"), lora_rank=4, lora_targets=targets))


@pytest.fixture(scope="session")
def kl_run(full_workplace, served):
    """A run of two steps, the second profiled, with a KL term, further sampling and several samples of each held-out problem."""
    runs.run(full_workplace, "grpo_full", "output_dir=kl", "max_steps=2", "profile=[2]", *runs.KL, served)
    return full_workplace / "kl"


@pytest.fixture(scope="session")
def lora_workplace(tmp_path_factory, lora_served):
    """A folder in which `reference`, a run of three steps on adapters, has ended well."""
    folder = runs.make_workplace(tmp_path_factory.mktemp("lora"))
    (folder / "lora.yaml").write_text(runs.CONFIG.replace(FULL_MODEL, LORA_MODEL))
    runs.run(folder, "grpo_lora", "output_dir=reference", lora_served, config="lora.yaml")
    return folder


@pytest.fixture(scope="session")
def talks_workplace(tmp_path_factory, served):
    """A folder in which `run`, a run of three steps of conversations, has ended well."""
    folder = runs.make_workplace(tmp_path_factory.mktemp("talks"))
    output = runs.run(folder, "grpo_full", "output_dir=run", *runs.CREDITED_TALKS, served)
    assert "conversations of up to 4 turns, 8 at a time" in output
    return folder
