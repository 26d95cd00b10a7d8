"""`torchtune-ext ray`: its words, and what it refuses before there is a cluster."""

import re
import shlex
import socket
import time
from importlib.util import find_spec

import pytest

from torchtune_ext.cluster.serving import engine_words, host_of
from torchtune_ext.host import on_ray, ray_server
from torchtune_ext.host.cli import main
from torchtune_ext.host.run_settings import run_settings
from torchtune_ext.sampling.records import EngineConfig

CONFIG = """
output_dir: out
model_dir: models/some
engine: {max_model_len: 256, kv_cache_bytes: "${bytes}"}
bytes: 1048576
checkpoints: {stop_grace_s: 7}
"""
GPUS = "--train-gpus 4 --engine-gpus 4"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "none.yaml").write_text("output_dir: out\nmodel_dir: model\n")
    (tmp_path / "few.yaml").write_text("output_dir: out\nmodel_dir: ???\nengine: {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--config run.yaml", "--config run.yaml: written for which recipe? Add --recipe grpo_full"),
        ("--config gone.yaml", "--config gone.yaml: no such file"),
        ("--config none.yaml", "it has no `engine:`, so it samples nothing"),
        ("--config grpo/tiny", "how many GPUs? Write --train-gpus N --engine-gpus N"),
        ("--config grpo/tiny --train-gpus 4", "how many GPUs?"),
        ("--config grpo/tiny --train-gpus 4 --engine-cpus 4", "how many GPUs?"),
        (f"--config grpo/tiny {GPUS} --train-cpus 1", "how many GPUs?"),
        ("--config grpo/tiny --train-gpus 4 --engine-gpus 0", "--engine-gpus=0: it has to be 1 or more"),
        ("--config grpo/tiny --train-cpus 0 --engine-cpus 1", "--train-cpus=0: it has to be 1 or more"),
        (f"--config grpo/tiny {GPUS} engine.tensor_parallel_size=3", "no multiple of engine.tensor_parallel_size=3"),
        ("--config grpo/tiny --train-cpus 1 --engine-cpus 2 engine.tensor_parallel_size=2", "=2 asks for GPUs"),
        (f"--config grpo/tiny {GPUS} engine.address=http://x:1", "torchtune-ext ray starts servers of its own"),
        (f"--config grpo/tiny {GPUS} engine.max_model_len=0", "engine.max_model_len is 0"),
        (f"--config grpo/tiny {GPUS} --wait 0", "--wait=0.0: it has to be a positive number"),
        (f"--config grpo/tiny {GPUS} --address ray://10.0.0.1:10001", "no ray://"),
        (f"--config grpo/tiny {GPUS} --address 10.0.0.1", "HOST:PORT of the cluster's head"),
        (f"--config grpo/tiny {GPUS} max_steps", "'max_steps' is no setting: write key=value"),
        (
            f"--config few.yaml {GPUS}",
            "--config few.yaml: model_dir has no value; set it in the YAML or on the command",
        ),
        ("--config grpo/tiny model_dir=${nothing} " + GPUS, "model_dir: Interpolation key 'nothing' not found"),
    ],
)
def test_what_is_refused(typed, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ray", *shlex.split(typed)])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and says in said, said


def test_without_ray_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main(["ray", "--config", "grpo/tiny", *GPUS.split()])
    assert "pip install 'torchtune-ext[ray]', here and on each machine" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_an_address_at_which_nobody_answers_is_refused_at_once(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began_at = time.monotonic()
    with pytest.raises(SystemExit, match="2"):
        main(["ray", "--config", "grpo/tiny", *GPUS.split(), "--address", address])
    assert time.monotonic() < began_at + 60, "Ray itself would try for minutes"
    assert f"error: --address={address}: nobody answers at {address}" in capsys.readouterr().err


def planned(typed):
    import argparse

    parser = argparse.ArgumentParser()
    on_ray.add_arguments(parser)
    args = parser.parse_args(shlex.split(typed))
    return on_ray.plan_of(args, run_settings(args.config, args.words))


def test_settings_may_stand_anywhere_and_the_config_names_the_recipe(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setenv("RANK", "1")
    plan = planned("max_steps=3 --config grpo/tiny --train-cpus 2 seed=4 --engine-cpus 1 evaluation.every=1")
    assert plan.recipe == "grpo_full" and plan.words == ("max_steps=3", "seed=4", "evaluation.every=1")
    assert (plan.asked.kind, plan.asked.ranks, plan.asked.servers, plan.asked.beside) == ("cpus", 2, 1, True)
    assert plan.file == "" and plan.wait_s == on_ray.WAIT_S and not plan.waits_for_machines
    # As under Slurm: what this shell says, but for what a machine and Ray say of themselves.
    assert plan.variables["OMP_NUM_THREADS"] == "3" and plan.variables["MY_TOKEN"] == "secret"
    assert plan.variables["CUDA_VISIBLE_DEVICES"] == "" and not {"RANK", "PATH", "HOME"} & plan.variables.keys()
    gpus = planned(
        f"--config run.yaml --recipe my.py {GPUS} --servers anywhere --wait 600 engine.tensor_parallel_size=2"
    )
    assert (gpus.recipe, gpus.file) == ("my.py", "run.yaml") and gpus.asked.servers == gpus.asked.each == 2
    assert "CUDA_VISIBLE_DEVICES" not in gpus.variables and not gpus.asked.beside
    assert gpus.wait_s == 600 and gpus.waits_for_machines and gpus.patience_s == 7 + 5 + 60
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert planned("--config grpo/tiny --train-cpus 2 --engine-cpus 1").variables["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in planned(f"--config grpo/tiny {GPUS}").variables


def test_the_server_has_the_settings_of_the_run(monkeypatch):
    monkeypatch.setenv("TORCHTUNE_EXT_API_KEY", "the-key")
    settings = run_settings("run.yaml", ["engine.max_model_len=512", "engine.tensor_parallel_size=2"])
    assert settings.engine.kv_cache_bytes == 1 << 20 and settings.own_file == "run.yaml"
    for on_cpu in (True, False):
        monkeypatch.setattr(ray_server, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        command, variables = ray_server.command_of(settings, "127.0.0.1", 4000)
        line = " ".join(command)
        assert "--model models/some --host 127.0.0.1 --port 4000" in line and "--max-model-len 512" in line
        assert ("--tensor-parallel-size 2 --gpu-memory-utilization 0.85" in line) == (not on_cpu)
        assert variables["TORCHTUNE_EXT_API_KEY"] == "the-key" and "the-key" not in line


def test_the_trainer_is_told_of_its_servers_and_of_no_gpus_of_an_engine():
    one = ["http://127.0.0.1:1"]
    assert engine_words(EngineConfig(), one) == ["engine.address=http://127.0.0.1:1"]
    assert engine_words(EngineConfig(devices="4,5"), one)[1:] == ["engine.devices=null"]
    assert engine_words(EngineConfig(sleep=True), one)[1:] == ["engine.sleep=false"]
    assert engine_words(EngineConfig(), [*one, "http://127.0.0.1:2"]) == [
        "engine.address=[http://127.0.0.1:1,http://127.0.0.1:2]"
    ]
    assert host_of("10.0.0.1", "10.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match="places a server on 10.0.0.2 and rank 0 on 10.0.0.1"):
        host_of("10.0.0.1", "10.0.0.2")


def test_the_newest_checkpoint_is_named(tmp_path):
    assert "There is no checkpoint in out yet" in on_ray.standing("out")
    for step in (5, 20):
        (tmp_path / "out" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    assert re.search(r"out/checkpoints/step_000020; go on from there with resume_", on_ray.standing("out"))
