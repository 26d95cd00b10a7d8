"""Engines of a config, their devices, and their state after a resume."""

import ctypes
import os
import subprocess

import pytest

torch = pytest.importorskip("torch")

from helpers import fake_pools  # noqa: E402
from torchtune_ext.sampling import engine_args  # noqa: E402
from torchtune_ext.sampling.server import ServerBackend  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [None]),
        ({"devices": "4"}, ["4"]),
        ({"devices": "4,5,6,7"}, ["4", "5", "6", "7"]),
        ({"devices": "4, 5,6,7", "tensor_parallel_size": 2, "count": 2}, ["4,5", "6,7"]),
        ({"devices": "4,5", "tensor_parallel_size": 2}, ["4,5"]),
    ],
)
def test_the_engines_of_a_pool_share_the_devices(monkeypatch, settings, expected):
    monkeypatch.setattr(engine_args, "on_cpu", lambda: False)
    assert [each.devices for each in engine_args.engine_configs(EngineConfig(**settings))] == expected


def test_pool_engines_divide_cpu_cores(monkeypatch):
    monkeypatch.setattr(engine_args, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5, 7, 9})
    assert [each.devices for each in engine_args.engine_configs(EngineConfig(count=2))] == ["1,3", "5,7,9"]
    assert engine_args.engine_configs(EngineConfig(count=1)) == [EngineConfig(count=1)]
    with pytest.raises(ValueError, match="engine.count=6: .* 5 cores"):
        engine_args.engine_configs(EngineConfig(count=6))


def test_engine_uses_cpu_threads_of_waiting_trainer(monkeypatch):
    monkeypatch.setattr(engine_args, "on_cpu", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 5, 7, 9})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads, large = engine_args.engine_threads, engine_args.MIN_PARALLEL_PARAMS
    assert threads(EngineConfig(), large, concurrent=False) == 4
    assert threads(EngineConfig(), large - 1, concurrent=False) == threads(EngineConfig(), large, concurrent=True) == 1
    assert threads(EngineConfig(count=2), large, concurrent=False) == 2
    assert threads(EngineConfig(devices="1,3,5"), large, concurrent=False) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)  # OMP_NUM_THREADS of the user
    assert threads(EngineConfig(), large, concurrent=False) == 5
    assert (
        EngineConfig().with_trainer_defaults("float32", 4).threads == 4
        and EngineConfig(threads=3).with_trainer_defaults("float32", 4).threads == 3
    )
    for config in engine_args.engine_configs(EngineConfig(count=2, threads=2)):
        assert engine_args.engine_environment(config)["OMP_NUM_THREADS"] == "2"
    with pytest.raises(ValueError, match="engine.threads=6 .*set engine.threads=5"):
        engine_args.engine_configs(EngineConfig(threads=6))
    with pytest.raises(ValueError, match="engine.threads=3 .*set engine.threads=2"):
        engine_args.engine_configs(EngineConfig(count=2, threads=3))
    with pytest.raises(ValueError, match="engine.threads=0 must be"):
        EngineConfig(threads=0)
    monkeypatch.setattr(engine_args, "on_cpu", lambda: False)
    assert threads(EngineConfig(), large, concurrent=False) is None
    with pytest.raises(ValueError, match="engine.threads=2: .*null"):
        engine_args.engine_configs(EngineConfig(threads=2))


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"count": 3, "devices": "4,5"},
            "engine.count=3: engine.devices='4,5' with tensor_parallel_size=1 starts 2 replicas",
        ),
        (
            {"count": 1, "address": "http://a:1,http://b:2"},
            "engine.count=1: engine.address='http://a:1,http://b:2' starts 2 replicas",
        ),
        ({"devices": "4,5,4"}, "engine.devices='4,5,4': 4 is listed twice"),
        ({"address": "http://a:1,http://a:1"}, "http://a:1 is listed twice"),
        ({"address": "http://a:1,http://a:1/"}, "http://a:1 is listed twice"),
        ({"address": "http://"}, "expected 'http://host:port'"),
        ({"address": "http://a:99999"}, "expected 'http://host:port'"),
        ({"address": "http://a:1,b:2"}, "expected 'http://host:port', several separated by commas"),
        ({"count": 0}, "engine.count=0 must be"),
    ],
)
def test_settings_of_a_pool_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        EngineConfig(**settings)


def test_a_pool_on_gpus_needs_their_names(monkeypatch):
    monkeypatch.setattr(engine_args, "on_cpu", lambda: False)
    with pytest.raises(ValueError, match="engine.count=2 .*engine.devices='0,1,2,3'"):
        engine_args.engine_configs(EngineConfig(count=2, tensor_parallel_size=2))
    with pytest.raises(ValueError, match="3 GPUs, .*engine.tensor_parallel_size=2 .* 2 or 4"):
        engine_args.engine_configs(EngineConfig(devices="0,1,2", tensor_parallel_size=2))
    with pytest.raises(ValueError, match="1 GPU, .* 4: .*engine.devices='0,1,2,3'$"):
        engine_args.engine_configs(EngineConfig(devices="0", tensor_parallel_size=4))


def test_pool_addresses_are_one_engine_each():
    config = EngineConfig(address="http://a:1, http://b:2")
    assert EngineConfig(address=["http://a:1", " http://b:2"]) == config
    assert [each.address for each in engine_args.engine_configs(config)] == ["http://a:1", "http://b:2"]


def test_servers_of_a_pool_are_alike():
    peers = {}

    def met(address, **facts):
        backend = ServerBackend(EngineConfig(address=address), lambda step: None)
        backend.server_info = peers
        backend.require_same_setup({"model": "Qwen", "hidden_size": 64, "max_model_len": 512} | facts)

    met("http://a:1")
    met("http://b:2")
    with pytest.raises(ValueError) as caught:
        met("http://c:3", model="Llama", hidden_size=32, max_model_len=256)
    assert "http://c:3 has model=Llama, hidden_size=32, max_model_len=256, but http://a:1 had model=Qwen, " in str(
        caught.value
    )
    with pytest.raises(
        ValueError,
        match="http://b:2 .*max_model_len=256, .*max_model_len=512",
    ):
        met("http://b:2", max_model_len=256)
    met("http://b:2")


def test_the_limits_of_a_pool_survive_a_resume(monkeypatch):
    first = fake_pools.PoolHarness(monkeypatch, 2, limit=None)
    for replica, limit in zip(first.pool.replicas, (11, 22), strict=True):
        replica.throttle.controller.limit, replica.throttle.controller.is_measured = limit, True
    state = first.pool.state_dict()
    assert limits(monkeypatch, 2, state) == [11, 22] and limits(monkeypatch, 3, state) == [11, 22, 11]
    first.buffers.close()


def limits(monkeypatch, count, state):
    harness = fake_pools.PoolHarness(monkeypatch, count, limit=None)
    harness.pool.load_state_dict(state)
    harness.buffers.close()
    return [replica.throttle.limit for replica in harness.pool.replicas]


# The three functions of NVIDIA's library, with its argument types (nvml.h), and a GPU of a given size.
NVML = """
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int started, device;
int nvmlInit_v2(void) { started = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = &device; return index; }
int nvmlDeviceGetMemoryInfo(void *handle, nvmlMemory_t *memory) {
    if (!started || handle != &device) return 1;
    *memory = (nvmlMemory_t){SIZE, 5, SIZE - 5};
    return 0;
}
"""


@pytest.mark.parametrize("gib, requests", [(24, 256), (69, 256), (80, 1024), (None, 256)])
def test_engine_requests_default_follows_gpu_memory(monkeypatch, tmp_path, gib, requests):
    monkeypatch.setattr(engine_args, "on_cpu", lambda: False)
    load = ctypes.CDLL
    if gib is not None:  # None: no driver, because the GPU is on another machine
        subprocess.run(
            ["gcc", "-shared", "-fPIC", f"-DSIZE={gib << 30}ull", "-xc", "-", "-o", tmp_path / "nvml.so"],
            input=NVML,
            text=True,
            check=True,
        )
        monkeypatch.setattr(ctypes, "CDLL", lambda name: load(str(tmp_path / "nvml.so")))
    monkeypatch.setattr(engine_args, "local_gpu_bytes", engine_args.local_gpu_bytes.__wrapped__)
    assert engine_args.local_gpu_bytes() == (gib or 0) << 30
    args = engine_args.engine_args("model", EngineConfig())
    assert args["max_num_seqs"] == requests + engine_args.CANARY_REQUESTS
    assert engine_args.engine_args("model", EngineConfig(max_num_seqs=8))["max_num_seqs"] == 8 + 32
