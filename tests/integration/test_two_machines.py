"""A server that shares no memory with the trainer: in namespaces of its own, behind a virtual link, with weights by gloo."""

import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import fp8_models, second_machine, tiny_model  # noqa: E402
from helpers.servers import Server  # noqa: E402
from helpers.waiting import wait_until  # noqa: E402
from torchtune_ext.policy import from_config  # noqa: E402
from torchtune_ext.policy.builder import build_policy  # noqa: E402
from torchtune_ext.policy.fp8.plan import Fp8Config, fp8_hf_tensors  # noqa: E402
from torchtune_ext.policy.hf_model import named_hf_tensors  # noqa: E402
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig  # noqa: E402
from torchtune_ext.sampling.server_command import KEY_VARIABLE  # noqa: E402
from torchtune_ext.sampling.weight_buffer import checksum  # noqa: E402

REASON = second_machine.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.rest,
    pytest.mark.timeout(300),
    pytest.mark.skipif(REASON is not None, reason=f"no second machine: {REASON}"),
]

KEY = "test-key-two-machines"
RANK, TARGETS = 4, ("q_proj", "v_proj")
DEADLINE_S = 8.0  # of a transfer; a whole one takes 2 s over the slow link
SLOW = 2.0  # megabits a second: the tiny model, 0.43 MB, takes 1.7 s
MIDDLE = 100_000  # bytes after which a transfer is in its midst


@pytest.fixture(scope="module", autouse=True)
def key():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        yield KEY


@pytest.fixture(scope="module")
def machine():
    machine = second_machine.SecondMachine()
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def models():
    return tiny_model.build(0), tiny_model.build(1)


@pytest.fixture(scope="module")
def server(machine, models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("there")
    config = EngineConfig(
        dtype="float32",
        max_model_len=1024,
        kv_cache_bytes=64 << 20,
        address=f"http://{machine.there}:8000",
        lora_rank=RANK,
        lora_targets=TARGETS,
    )
    server = Server(tiny_model.save(models[0], folder / "model"), config, folder / "server.log", machine.inside)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def connection(server, **settings) -> EngineConfig:
    known = {"max_model_len": 1024, "lora_rank": RANK, "lora_targets": TARGETS, "probe_deadline_s": 5.0}
    return EngineConfig(address=server.address, **(known | settings))


@pytest.fixture
def engine(server, tmp_path):
    with Engine("", connection(server, rpc_deadline_s=DEADLINE_S, start_deadline_s=60.0), str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        yield engine


def sums(model) -> list[dict[str, int]]:
    return [{name: checksum(tensor) for name, tensor in model.named_parameters()}]


def worst(model, prompts, groups) -> float:
    pairs = [(prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group]
    return max(np.abs(tiny_model.logprobs(model, prompt, c.tokens) - c.logprobs).max() for prompt, c in pairs)


def test_weights_reach_a_server_that_shares_no_memory(engine, models, machine):
    """The way over memory is closed: from over there not even this process is seen."""
    own = subprocess.run([*machine.inside, "ls", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True)
    assert own.returncode != 0
    prompts, sampling = tiny_model.prompts(3, 100), SamplingConfig(max_tokens=32, seed=1)
    for version, model in enumerate((models[1], models[0], models[1]), 1):
        before = machine.sent()
        report = engine.publish(model.named_parameters(), version)
        assert machine.sent() - before > report.bytes
        assert engine.checksums() == sums(model)
        groups = engine.sample(prompts, 4, sampling)
        assert worst(model, prompts, groups) < 1e-4
        assert {v for group in groups for c in group for v in c.versions} == {version}
    sender = engine._weight_sender._sender.process_group
    engine.publish(models[0].named_parameters(), 4)
    # The group and its process stay from one publication to the next.
    assert engine._weight_sender._sender.process_group == sender and engine.stats().restarts == 0


def test_an_adapter_travels_the_same_way(engine, models):
    tensors, peft = tiny_model.adapter(RANK, TARGETS)
    merged = tiny_model.merged(0, tensors, peft)
    prompts, sampling = tiny_model.prompts(2, 40), SamplingConfig(max_tokens=24, seed=2)
    engine.publish(models[0].named_parameters(), 1)
    plain = engine.sample(prompts, 2, sampling)
    engine.publish(tensors.items(), 2, peft)
    groups = engine.sample(prompts, 2, sampling)
    assert worst(merged, prompts, groups) < 1e-4 < 1e-2 < worst(models[0], prompts, groups)
    assert worst(models[0], prompts, plain) < 1e-4
    assert {v for group in groups for c in group for v in c.versions} == {2}
    taken = {name: checksum(tensor) for name, tensor in tensors.items()}
    assert engine.checksums() == [sums(models[0])[0] | taken]


def test_remote_server_invalid_weights_are_refused(server, models, tmp_path):
    named = [(name, tensor.detach()) for name, tensor in models[1].named_parameters()]
    named = [(name, tensor[:-1] if name.endswith("down_proj.weight") else tensor) for name, tensor in named]
    with Engine("", connection(server, max_failures=1), str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        pattern = (
            r"published \S*down_proj.weight has shape \[\[63, 128\]\], but the engine's parameter has shape \[64, 128\]"
        )
        with pytest.raises(EngineFailed, match=pattern):
            engine.publish(named, 1)
    with Engine("", connection(server), str(tmp_path)) as engine:  # and the server takes what is right
        engine.start()
        engine.wait_ready(120)
        engine.publish(models[0].named_parameters(), 1)
        assert engine.checksums() == sums(models[0])


def test_severed_link_transfer_times_out_and_recovers(engine, server, models, machine):
    """The trainer gives the transfer up at its deadline. When the link is back, the server gets the current weights."""
    engine.publish(models[0].named_parameters(), 1)
    core, published = engine._pool.replicas[0].backend, []
    prompts = tiny_model.prompts(2, 20)
    drawn = [
        engine.submit(prompt, 2, SamplingConfig(max_tokens=900, seed=8), seed_index=g)
        for g, prompt in enumerate(prompts)
    ]
    wait_until(lambda: len(core.requests) == 4, 20)
    machine.slow_down(SLOW)
    try:
        before, began = machine.sent(), time.monotonic()
        publishing = threading.Thread(target=lambda: published.append(engine.publish(models[1].named_parameters(), 2)))
        publishing.start()
        wait_until(lambda: machine.sent() - before > MIDDLE, 20)
        machine.cut()
        wait_until(lambda: engine._pool.replicas[0].backend is not core, 60)
        took = time.monotonic() - began
    finally:
        machine.restore()
        machine.speed_up()
    # It is silence that ends it, and that has to last. What comes before the transfer and behind it, a pause and the end of
    # the sender, has seconds of its own.
    assert DEADLINE_S < took < DEADLINE_S + 3.0 and not published
    publishing.join(90)
    assert published and engine.version == 2
    assert engine.checksums() == sums(models[1]) and engine.stats().restarts == 1
    # What was under way was lost with the connection, and drawn again; nothing of it came from weights in between.
    groups = [future.result(timeout=60) for future in drawn]
    assert worst(models[1], prompts, groups) < 1e-4 and {v for g in groups for c in g for v in c.versions} == {2}


TRAINER = """
import sys
from helpers import tiny_model
from torchtune_ext.sampling.engine import Engine, EngineConfig
with Engine("", EngineConfig(address=sys.argv[1], max_model_len=1024), sys.argv[2]) as engine:
    engine.start()
    engine.wait_ready(120)
    model = tiny_model.build(1)
    for version in range(1, 100):
        engine.publish(model.named_parameters(), version)
        print("published", flush=True)
"""


def test_trainer_killed_in_transfer_frees_server_for_next(server, models, machine, tmp_path):
    """Long before any deadline, of which this trainer has 300 s: its connections are closed with it."""
    path = os.pathsep.join([str(Path(tiny_model.__file__).parents[1]), *sys.path])
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, server.address, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
    )
    try:
        assert trainer.stdout.readline() == b"published\n"
        machine.slow_down(SLOW)
        before = machine.sent()
        wait_until(lambda: machine.sent() - before > 2 * MIDDLE, 20)
    finally:
        trainer.kill()
        trainer.wait(10)
        trainer.stdout.close()
        machine.speed_up()
    began = time.monotonic()
    with Engine("", connection(server), str(tmp_path)) as engine:
        engine.start()
        engine.wait_ready(120)
        engine.publish(models[0].named_parameters(), 1)
        assert time.monotonic() - began < 30 and engine.checksums() == sums(models[0])
        prompts = tiny_model.prompts(2, 20)
        assert worst(models[0], prompts, engine.sample(prompts, 2, SamplingConfig(max_tokens=32, seed=1))) < 1e-4


def test_blocks_in_fp8_travel_with_their_scales(machine, tmp_path):
    """To a server that was started for them, with the very bytes and scales of the trainer."""
    source = fp8_models.write_model_dir(tmp_path / "model")
    policy = build_policy(
        partial(from_config, str(source.path)), source, torch.device("cpu"), torch.bfloat16, fp8=Fp8Config()
    )
    config = EngineConfig(
        max_model_len=256,
        kv_cache_bytes=16 << 20,
        address=f"http://{machine.there}:8001",
        quantization=policy.fp8_plan.quantization_config(),
    )
    server = Server(str(source.path), config, tmp_path / "server.log", machine.inside)
    try:
        server.wait()
        with Engine("", config, str(tmp_path)) as engine:
            engine.start()
            engine.wait_ready(120)
            for version in (1, 2):
                with torch.no_grad():
                    for i, param in enumerate(policy.model.parameters()):
                        param.mul_(1.0 + 0.03 * (i % 5)).add_(1e-3)
                whole = named_hf_tensors(policy.model, source, torch.bfloat16)
                sent = {name: t.clone() for name, t in fp8_hf_tensors(whole, policy.fp8_plan, torch.bfloat16)}
                assert sum(t.dtype == torch.float8_e4m3fn for t in sent.values()) == 14
                engine.publish(sent.items(), version)
                assert engine.checksums() == [{name: checksum(tensor) for name, tensor in sent.items()}]
                (group,) = engine.sample([[5, 17, 200]], 2, SamplingConfig(max_tokens=8, seed=2))
                assert {v for c in group for v in c.versions} == {version}
        plain = connection(server, lora_rank=None, lora_targets=(), max_model_len=256)
        with Engine("", plain, str(tmp_path)) as engine:
            engine.start()
            with pytest.raises(EngineFailed, match="quantization=fp8, .*quantization=none"):
                engine.wait_ready(120)
    finally:
        server.kill()
