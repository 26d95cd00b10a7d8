"""The GPUs and the disk that a run needs are compared with this machine."""

import pytest

from torchtune_ext.policy.memory import GIB
from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.setup import machine_checks
from torchtune_ext.setup.machine_checks import DiskNeed


def test_disk_without_room_for_one_checkpoint_is_refused():
    rows = {"weights": 60 * GIB, "optimizer state": 40 * GIB}
    with pytest.raises(ValueError, match=r"output_dir=runs/x: .* 100.0 GiB, .* 99.0 GiB"):
        machine_checks.require_disk(DiskNeed(rows, max_checkpoints=4, free=99 * GIB), "runs/x")


@pytest.mark.parametrize(("free", "expected"), [(100, True), (399, True), (400, False)])
def test_disk_without_room_for_kept_checkpoints_is_reported(free, expected, capsys):
    machine_checks.require_disk(DiskNeed({"weights": 100 * GIB}, max_checkpoints=4, free=free * GIB), "runs/x")
    printed = capsys.readouterr().out
    assert ("a checkpoint takes 100.0 GiB, up to 4 exist at once" in printed) == expected and bool(printed) == expected


def test_gpus_that_are_not_there_are_refused(monkeypatch):
    for on_cpu, values, message in (
        (True, {"sleep": True}, "engine.sleep=True asks for GPUs"),
        (True, {"devices": "0"}, "engine.devices=0 asks for GPUs"),
        (False, {"devices": "0,9"}, "names GPU 9, but this machine has 8, from 0 to 7"),
    ):
        monkeypatch.setattr(machine_checks, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        monkeypatch.setattr(machine_checks.Path, "glob", lambda self, pattern: [f"/dev/nvidia{i}" for i in range(8)])
        with pytest.raises(ValueError, match=message):
            machine_checks.require_gpus(EngineConfig(max_model_len=64, **values))
        # A server has its own GPUs, and another backend may have what it asks for.
        if on_cpu:
            machine_checks.require_gpus(EngineConfig(max_model_len=64, backend="my_backend.MyBackend", **values))
        machine_checks.require_gpus(EngineConfig(max_model_len=64, address="http://127.0.0.1:1"))


def test_missing_engine_package_reported_before_creating_files(monkeypatch):
    monkeypatch.setattr(machine_checks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="vLLM .*`torchtune-ext install-engine`"):
        machine_checks.require_gpus(EngineConfig(max_model_len=64))
    machine_checks.require_gpus(EngineConfig(max_model_len=64, backend="my_backend.MyBackend"))
