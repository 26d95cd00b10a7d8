"""`torchtune-ext ray`: arguments, and errors before the first request to a cluster."""

import re
import shlex
import socket
import time
from importlib.util import find_spec

import pytest

from helpers import fp8_models
from torchtune_ext.cli import cli
from torchtune_ext.cli.cli import main
from torchtune_ext.cluster import ray_command
from torchtune_ext.cluster.driver import (
    PLACEMENT_TIMEOUT_S,
    ResourceRequest,
    choose_transfer,
    engine_overrides,
    server_args,
)
from torchtune_ext.run.catalog import config_files, package_folder
from torchtune_ext.settings.config import read_config

CONFIG = """
output_dir: out
model_dir: models/some
model: {_component_: a.b}
tokenizer: {_component_: a.b}
task: {_component_: a.b}
optimizer: {_component_: a.b}
max_steps: 4
sampling: {max_tokens: 8}
engine: {max_model_len: 256}
checkpoints: {stop_grace_s: 7}
"""
GPUS = "--train-gpus 4 --engine-gpus 4"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "few.yaml").write_text(CONFIG.replace("models/some", "???"))
    (tmp_path / "my.py").write_text((package_folder("recipes") / "grpo.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    "typed, says",
    [
        ("--config run.yaml", "--config run.yaml: the recipe is unknown. Fix: add --recipe grpo_full"),
        ("--config gone.yaml", "--config gone.yaml: file not found"),
        ("--config warmup/tiny", "is written for warmup_sft, which does not sample: its Config has no `engine`"),
        ("--config grpo/tiny", "the number of GPUs is missing: set --train-gpus N --engine-gpus N"),
        ("--config grpo/tiny --train-gpus 4", "the number of GPUs is missing"),
        ("--config grpo/tiny --train-gpus 4 --engine-cpus 4", "the number of GPUs is missing"),
        (f"--config grpo/tiny {GPUS} --train-cpus 1", "the number of GPUs is missing"),
        ("--config grpo/tiny --train-gpus 4 --engine-gpus 0", "--engine-gpus=0: expected at least 1"),
        ("--config grpo/tiny --train-cpus 0 --engine-cpus 1", "--train-cpus=0: expected at least 1"),
        (
            f"--config grpo/tiny {GPUS} engine.tensor_parallel_size=3",
            "must be a multiple of engine.tensor_parallel_size=3",
        ),
        ("--config grpo/tiny --train-cpus 1 --engine-cpus 2 engine.tensor_parallel_size=2", "=2 needs GPUs"),
        (f"--config grpo/tiny {GPUS} engine.address=http://x:1", "torchtune-ext ray starts its own servers"),
        (f"--config grpo/tiny {GPUS} engine.max_model_len=0", "engine.max_model_len=0 must be"),
        (f"--config grpo/tiny {GPUS} --wait 0", "--wait=0.0 must be a number of seconds"),
        (f"--config grpo/tiny {GPUS} --address ray://10.0.0.1:10001", "not ray://"),
        (f"--config grpo/tiny {GPUS} --address 10.0.0.1", "HOST:PORT of the cluster's head"),
        (f"--config grpo/tiny {GPUS} max_steps", "'max_steps' is not key=value"),
        (
            f"--config few.yaml --recipe grpo_full {GPUS}",
            "model_dir has no value. Fix: set it in the YAML",
        ),
        ("--config grpo/tiny model_dir=${nothing} " + GPUS, "model_dir: Interpolation key 'nothing' not found"),
    ],
)
def test_ray_command_invalid_arguments_are_refused(typed, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ray", *shlex.split(typed)])
    message = capsys.readouterr().err
    assert ended.value.code == 2 and message.startswith("error: ") and says in message, message


def test_ray_command_without_ray_reports_install_command(monkeypatch, capsys):
    monkeypatch.setattr(ray_command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["ray", "--config", "grpo/tiny", *GPUS.split()])
    assert "pip install 'torchtune-ext[ray]', here and on each machine" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")
def test_ray_command_unreachable_address_refused_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began_at = time.monotonic()
    with pytest.raises(SystemExit, match="2"):
        main(["ray", "--config", "grpo/tiny", *GPUS.split(), "--address", address])
    assert time.monotonic() < began_at + 60, "Ray itself would try for minutes"
    assert f"error: --address={address}: no answer at {address}" in capsys.readouterr().err


def planned(typed):
    import argparse

    parser = argparse.ArgumentParser()
    ray_command.add_arguments(parser)
    args = parser.parse_args(shlex.split(typed))
    cfg = read_config(args.config, args.words, args.recipe)
    return ray_command.build_plan(args, cfg.engine, cfg.checkpoints.stop_grace_s)


def test_ray_command_overrides_anywhere_and_config_selects_recipe(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("RANK", "1")
    plan = planned("max_steps=3 --config grpo/tiny --train-cpus 2 seed=4 --engine-cpus 1 evaluation.every=1")
    assert plan.recipe == "grpo_full" and plan.overrides == ("max_steps=3", "seed=4", "evaluation.every=1")
    assert (plan.request.kind, plan.request.ranks, plan.request.servers) == ("cpus", 2, 1)
    assert plan.required_path == plan.folder and plan.wait_s == PLACEMENT_TIMEOUT_S
    # As under Slurm: the variables of this shell, except those of a machine and of Ray.
    assert plan.variables["OMP_NUM_THREADS"] == "3" and plan.variables["MY_TOKEN"] == "secret"
    assert plan.variables["CUDA_VISIBLE_DEVICES"] == "" and not {"RANK", "PATH", "HOME"} & plan.variables.keys()
    gpus = planned(f"--config run.yaml --recipe my.py {GPUS} --wait 600 engine.tensor_parallel_size=2")
    assert (gpus.recipe, gpus.required_path) == (
        "my.py",
        f"{gpus.folder}/run.yaml",
    ) and gpus.request.servers == gpus.request.per_server == 2
    assert "CUDA_VISIBLE_DEVICES" not in gpus.variables
    assert gpus.wait_s == 600 and gpus.grace_s == 7 + 5 + 60
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert planned("--config grpo/tiny --train-cpus 2 --engine-cpus 1").variables["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned(f"--config grpo/tiny {GPUS}").variables


def test_the_trainer_and_each_server_are_a_bundle():
    request = ResourceRequest("gpus", 8, 2, per_server=4)
    assert request.bundles() == [8, 4, 4] and request.flags() == "--train-gpus 8 --engine-gpus 8"


def test_the_server_has_the_settings_of_the_run(monkeypatch, tmp_path, capsys):
    """The server gets the run's overrides; a custom recipe may have additional keys."""
    fp8_models.write_model_dir(tmp_path / "model")
    recipe = package_folder("recipes") / "grpo.py"
    (tmp_path / "my.py").write_text(
        recipe.read_text().replace("class Config:\n", "class Config:\n    mine: int = 0\n", 1)
    )
    given = ["model_dir=model", "mine=3", "engine.max_model_len=48", "engine.devices='4,5'"]
    own = engine_overrides(["http://10.0.0.2:4000"], "gloo")
    words = server_args("my.py", str(config_files(package_folder("configs"))["grpo/tiny"]), given, own, "10.0.0.2")
    assert words[:2] == ["-m", "torchtune_ext"] and cli.main([*words[2:], "--print"]) == 0
    line = capsys.readouterr().out
    assert "--model model" in line and "--host 10.0.0.2 --port 4000" in line and "--max-model-len 48" in line
    assert '"backend": "gloo"' in line and "4,5" not in line


def test_ray_command_trainer_gets_servers_without_engine_gpus():
    own = ["engine.devices=null", "engine.count=null", "engine.sleep=false"]
    one, two = "http://127.0.0.1:1", "http://127.0.0.1:2"
    assert engine_overrides([one], "shm") == [f"engine.address={one}", "engine.transfer=shm", *own]
    assert engine_overrides([one, two], "nccl")[:2] == [f"engine.address=[{one},{two}]", "engine.transfer=nccl"]


def test_ray_command_shared_memory_only_on_one_machine():
    here, there = "10.0.0.1", "10.0.0.2"
    assert choose_transfer(here, [here, here], "gpus") == (["127.0.0.1", "127.0.0.1"], "shm")
    assert choose_transfer(here, [here, there], "gpus") == ([here, there], "nccl")
    assert choose_transfer(here, [there], "cpus") == ([there], "gloo")


def test_the_newest_checkpoint_is_named(tmp_path):
    assert "out has no checkpoint yet" in ray_command.status_message("out")
    for step in (5, 20):
        (tmp_path / "out" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert re.search(r"out/checkpoints/step_000020; resume from it with resume_", ray_command.status_message("out"))
