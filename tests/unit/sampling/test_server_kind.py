"""Unsuitable servers, and the command that starts a suitable one."""

import json
import sys
from importlib.metadata import PackageNotFoundError

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling import prestart  # noqa: E402
from torchtune_ext.sampling.engine_args import LOADER, on_cpu, resolve_transfer  # noqa: E402
from torchtune_ext.sampling.server import ServerBackend  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE, server_command  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402

ADDRESS = "http://node2:8000"


def report(**changes):
    """vLLM's `/server_info`, changed by "section__field"."""
    parts = {
        "model_config": {
            "model": "m",
            "logprobs_mode": "processed_logprobs",
            "max_model_len": 4096,
            "quantization": None,
            "hf_text_config": {"vocab_size": 512},
        },
        "cache_config": {"block_size": 32, "num_gpu_blocks": 10},
        "parallel_config": {"world_size": 2, "worker_extension_cls": LOADER},
        "weight_transfer_config": {"backend": "gloo"},
        "scheduler_config": {"policy": "priority"},
        "lora_config": {"max_lora_rank": 8},
        "device_config": {"device": "cpu"},
    }
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            parts[part] = value
    return parts


def check(config, **changes):
    backend = ServerBackend(config, lambda step: None)
    backend.start_command = lambda: "THE COMMAND"
    backend.check_server_info(report(**changes))
    return backend


def test_matching_server_reports_its_properties():
    backend = check(EngineConfig(address=ADDRESS, lora_rank=8))
    assert backend.server_info[ADDRESS] == dict(model="m", vocab_size=512, max_model_len=4096, dtype="auto")
    assert (backend.transfer, backend.workers, backend.cache_tokens, backend.block_size, backend.vocab_size) == (
        "gloo",
        2,
        320,
        32,
        512,
    )
    assert check(EngineConfig(address=ADDRESS, transfer="gloo")).transfer == "gloo"


FP8 = {"quantization": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    "settings, changes, fault",
    [
        ({}, {"weight_transfer_config": None}, "transfer=None, but this run needs transfer=.*"),
        ({}, {"weight_transfer_config__backend": "ipc"}, "transfer=ipc, but this run needs transfer=.*"),
        ({}, {"parallel_config__worker_extension_cls": ""}, f"worker_extension_cls=, .*={LOADER}"),
        ({}, {"parallel_config__data_parallel_size": 2}, "data_parallel_size=2, .*=1"),
        ({"dtype": "float32"}, {"model_config__dtype": "torch.bfloat16"}, "dtype=bfloat16, .*=float32"),
        ({"transfer": "nccl"}, {}, "transfer=gloo, .*=nccl"),
        ({"transfer": "gloo"}, {"weight_transfer_config__backend": "shm"}, "transfer=shm, .*=gloo"),
        ({"lora_rank": 16}, {}, "max_lora_rank=8, .*=16"),
        ({"lora_rank": 4}, {"lora_config": None}, "max_lora_rank=0, .*=4"),
        (FP8, {}, "quantization=none, .*=fp8"),
        ({}, {"model_config__quantization": "fp8"}, "quantization=fp8, .*=none"),
        ({}, {"scheduler_config__policy": "fcfs"}, "scheduling_policy=fcfs, .*=priority"),
        ({}, {"model_config__logprobs_mode": "raw_logprobs"}, "logprobs_mode=raw_logprobs, .*=processed_logprobs"),
        ({"max_model_len": 8192}, {}, "max_model_len=4096, .*=8192"),
    ],
)
def test_mismatched_server_is_refused_with_correct_command(settings, changes, fault):
    with pytest.raises(ValueError, match=f"{ADDRESS} has {fault}. Fix: start it with THE COMMAND"):
        check(EngineConfig(address=ADDRESS, **settings), **changes)


@pytest.mark.parametrize(
    ("there", "here", "place"),
    [
        ("cuda", False, "this trainer"),
        ("cpu", True, "http://node2:8000"),
        ("cpu", False, "http://node2:8000"),
    ],
)
def test_nccl_between_cpu_and_gpu_is_refused(monkeypatch, there, here, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    nccl = {"weight_transfer_config__backend": "nccl", "device_config__device": there}
    with pytest.raises(ValueError, match=f"nccl .*{place} .*engine.transfer=gloo"):
        check(EngineConfig(address=ADDRESS), **nccl)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert check(EngineConfig(address=ADDRESS), **(nccl | {"device_config__device": "cuda"})).transfer == "nccl"


def test_on_cpu_follows_vllm_build_not_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(prestart, "version", lambda name: "0.32.0")
    assert on_cpu.__wrapped__()

    def none(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(prestart, "version", none)
    assert not on_cpu.__wrapped__()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert on_cpu.__wrapped__()


def engine_on(monkeypatch, cpu):
    for module in ("engine_args", "server_command"):
        monkeypatch.setattr(f"torchtune_ext.sampling.{module}.on_cpu", lambda: cpu)


def value(command, flag):
    return command[command.index(flag) + 1]


def test_remote_server_listens_there_and_uses_network_transfer(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    engine_on(monkeypatch, cpu=True)
    config = EngineConfig(address="http://node2:9000")
    command, _environ = server_command("model", config)
    assert command[0] == sys.executable and value(command, "--host") == "0.0.0.0" and value(command, "--port") == "9000"
    assert json.loads(value(command, "--weight-transfer-config")) == {"backend": "gloo"}
    assert resolve_transfer(EngineConfig()) == resolve_transfer(EngineConfig(address="http://localhost:1")) == "shm"
    engine_on(monkeypatch, cpu=False)
    assert resolve_transfer(config) == "nccl"
    # The variable would restrict NCCL, and so the group with the sender, to loopback.
    assert "NCCL_SOCKET_IFNAME" not in server_command("model", config)[1]


def test_server_command_uses_shell_gpus_and_one_port(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    engine_on(monkeypatch, cpu=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # These GPUs are on the trainer's machine, but the server is on another one.
    assert (
        "CUDA_VISIBLE_DEVICES" not in server_command("model", EngineConfig(address="http://node2:1", devices="4,5"))[1]
    )
    assert server_command("model", EngineConfig(devices="4"))[1]["CUDA_VISIBLE_DEVICES"] == "4"
    with pytest.raises(ValueError, match="GPUs for 2 replicas"):
        server_command("model", EngineConfig(devices="4,5"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES" not in server_command("model", EngineConfig(devices="4,5"))[1]
    several = EngineConfig(address=["http://n1:8000", "http://n1:8001"])
    with pytest.raises(ValueError, match="8000, 8001, .*--port"):
        server_command("model", several)
    assert value(server_command("model", several, port=8001)[0], "--port") == "8001"
    alike = EngineConfig(address=["http://n1:8000", "http://n2:8000"])
    assert value(server_command("model", alike)[0], "--port") == "8000"


def test_server_fixed_cache_size_requests_minimal_gpu_share(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    engine_on(monkeypatch, cpu=False)
    for size, share in ((None, "0.85"), (1 << 30, "0.01")):
        command, _ = server_command("model", EngineConfig(address=ADDRESS, kv_cache_bytes=size))
        assert value(command, "--gpu-memory-utilization") == share


def test_adapters_and_fp8_have_their_flags(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "the-key")
    config = EngineConfig(
        address=ADDRESS, lora_rank=12, lora_targets=("q_proj", "v_proj"), extra_args={"swap_space": 2}
    )
    command, environ = server_command("model", config)
    begin = command.index("--lora-target-modules")
    assert command[begin + 1 : begin + 3] == ["q_proj", "v_proj"] and value(command, "--max-lora-rank") == "16"
    assert "--enable-lora" in command and value(command, "--swap-space") == "2"
    assert environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    command, environ = server_command("model", EngineConfig(address=ADDRESS, **FP8))
    assert json.loads(value(command, "--hf-overrides")) == {"quantization_config": FP8["quantization"]}
    mine = {"hf_overrides": {"rope_parameters": {"rope_theta": 5000.0}}}
    command, _ = server_command("model", EngineConfig(address=ADDRESS, **FP8, extra_args=mine))
    assert json.loads(value(command, "--hf-overrides")) == {
        **mine["hf_overrides"],
        "quantization_config": FP8["quantization"],
    }
    assert value(command, "--load-format") == "dummy" and environ["VLLM_USE_DEEP_GEMM"] == "0"
