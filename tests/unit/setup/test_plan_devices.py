"""GPUs that would both train and sample are detected before a run starts."""

from types import SimpleNamespace

import pytest
import torch

from torchtune_ext.sampling.types import EngineConfig
from torchtune_ext.setup import run_components as run_parts
from torchtune_ext.setup.machine_checks import require_disjoint_gpus, training_gpus

FIRST, SECOND = "GPU-8f6e2b1c-0d3a", "GPU-1a2b3c4d-5e6f"


@pytest.fixture
def started(monkeypatch):
    def of(visible=None, local=None, number=None, world=8):
        values = {"CUDA_VISIBLE_DEVICES": visible, "LOCAL_WORLD_SIZE": local, "LOCAL_RANK": number, "WORLD_SIZE": world}
        for name, value in values.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return of


@pytest.mark.parametrize(
    "visible, local, number, ranks, gpus",
    [
        (None, 8, 0, None, [str(i) for i in range(8)]),  # torchrun, with all GPUs of the machine or container
        (None, None, None, 4, ["0", "1", "2", "3"]),  # as in a dry run
        (None, None, None, None, ["0"]),  # without torchrun
        ("4,5, 6,7", 4, 0, None, ["4", "5", "6", "7"]),
        ("3,4,5,6,7", 2, 0, None, ["3", "4"]),  # Slurm without ConstrainDevices
        ("2,3", None, 1, None, ["3"]),  # srun does not list the other ranks
        ("0,1,-1,2", 4, 0, None, ["0", "1"]),
        ("0,1", 4, 0, None, ["0", "1"]),  # ranks without a GPU fail elsewhere
        ("", None, None, None, []),
        (f"{FIRST},{SECOND}", 1, 0, None, [FIRST]),
    ],
)
def test_training_gpus_rank_uses_gpu_of_local_rank(started, visible, local, number, ranks, gpus):
    started(visible, local, number)
    assert training_gpus(ranks) == gpus


@pytest.mark.parametrize("local", [None, 4])
def test_single_process_ignores_place_among_ranks(started, local):
    started(local=local, number=3, world=None)
    assert training_gpus() == ["0"]


@pytest.mark.parametrize(
    "engine, training",
    [
        ({"devices": "4,5,6,7"}, ["0", "1", "2", "3"]),
        ({"devices": "0"}, ["1", "2"]),
        ({"devices": "0"}, [FIRST]),
        ({"devices": "0"}, []),
        ({"devices": "0", "sleep": True}, ["0"]),  # trainer and engine alternate
        ({"gpu_memory_utilization": 0.3}, ["0"]),  # trainer and engine share the GPU on purpose
        ({"address": "http://127.0.0.1:1"}, ["0"]),
    ],
)
def test_separate_or_unknown_gpus_are_accepted(engine, training):
    require_disjoint_gpus(EngineConfig(max_model_len=64, **engine), training)


@pytest.mark.parametrize(
    ("devices", "training", "words"),
    [
        ("4,5,6,7", [str(i) for i in range(8)], "GPU 4, 5, 6, 7 of this machine would also be used for training: 8 ranks use GPU 0"),
        ("4,5,6,7", [str(i) for i in range(8)], "Fix: start 4 ranks here (--nproc_per_node 4), or set CUDA_VISIBLE_DEVICES"),
        ("0", ["0"], "1 rank uses GPU 0. Fix: set CUDA_VISIBLE_DEVICES of the trainer to GPUs that"),
        (FIRST, [SECOND, FIRST], f"GPU {FIRST} of this machine would also be used for training"),
    ],
)  # fmt: skip
def test_gpu_for_training_and_sampling_reported_with_fix(devices, training, words):
    with pytest.raises(ValueError) as error:
        require_disjoint_gpus(EngineConfig(max_model_len=64, devices=devices), training)
    assert str(error.value).startswith(f"engine.devices='{devices}': ") and words in str(error.value)


def test_check_start_overlapping_gpus_refused_before_run_folder(started, monkeypatch):
    started("0,1,2,3,4,5,6,7", 8, 0)
    monkeypatch.setattr(run_parts, "require_gpus", lambda engine: None)
    config = EngineConfig(max_model_len=64, devices="4,5,6,7")
    # Only the grading is checked before the GPUs.
    parts = SimpleNamespace(
        cfg=None,
        replay=None,
        check_grading=lambda: None,
        precision=SimpleNamespace(engine=config),
        engine_config=config,
        ranks=SimpleNamespace(device=torch.device("cuda", 0)),
    )
    with pytest.raises(ValueError, match="engine.devices='4,5,6,7': .* train"):
        run_parts.RunComponents.run_preflight_checks(parts)
