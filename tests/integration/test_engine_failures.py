"""The engine's process is killed, stopped, killed again and again; the trainer is killed. Nothing hangs, nothing is
left."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from helpers import tiny_model
from helpers.waiting import engine_pid, wait_until
from torchtune_ext.sampling import prestart
from torchtune_ext.sampling.engine import Engine, EngineConfig, EngineFailed, SamplingConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CONFIG = EngineConfig(
    dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20, probe_interval_s=0.5, probe_deadline_s=2.0
)
LONG = SamplingConfig(max_tokens=500, seed=3)
# On a busy machine it may take so long until a silence of 2 s is noticed; rpc_deadline_s is ten times that.
BUSY_S = 30.0


@pytest.fixture(scope="module")
def models():
    return tiny_model.build(0), tiny_model.build(1)


@pytest.fixture(scope="module")
def model_dir(models, tmp_path_factory):
    return tiny_model.save(models[0], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    """The file that names the next fault of the client."""
    file = tmp_path_factory.mktemp("fault") / "fault"
    file.write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULT", str(file))
        patch.setattr(prestart, "CLIENT_MODULE", "helpers.faulty_client")
        yield file


@pytest.fixture(scope="module")
def engine(model_dir, models, tmp_path_factory, fault):
    """An engine that samples with model B, version 1, while model A is on the disk."""
    with Engine(model_dir, CONFIG, str(tmp_path_factory.mktemp("run"))) as engine:
        engine.start()
        engine.wait_ready(240)
        engine.publish(models[1].named_parameters(), 1)
        yield engine


def sample_and(engine, action, prompts=None):
    """Starts a long `sample` in a thread, runs `action` in the midst of it, returns its result or its error."""
    outcome = []

    def work():
        try:
            outcome.append(engine.sample(prompts or tiny_model.prompts(2, 20), 4, LONG))
        except EngineFailed as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: engine.stats().running)
    action()
    thread.join(240)
    assert not thread.is_alive() and outcome
    return outcome[0]


@pytest.mark.parametrize(
    ("of", "kill"),
    [
        ("engine", signal.SIGSTOP),
        # What comes when they are noticed is the same.
        pytest.param("client", signal.SIGKILL, marks=pytest.mark.rest),
        pytest.param("client", signal.SIGSTOP, marks=pytest.mark.rest),
        pytest.param("engine", signal.SIGKILL, marks=pytest.mark.rest),
    ],
)
def test_engine_crash_sampling_resumes_with_current_weights(engine, models, of, kill):
    prompts = tiny_model.prompts(2, 20)
    undisturbed = engine.sample(prompts, 4, LONG)
    core, restarts = engine._pool.replicas[0].backend, engine.stats().restarts
    pid, client = engine_pid(engine), core.process_group
    noticed = []

    def strike():
        struck = time.monotonic()
        os.kill(pid if of == "engine" else client, kill)
        wait_until(lambda: engine_pid(engine) != pid)
        noticed.append(time.monotonic() - struck)

    groups = sample_and(engine, strike, prompts)
    assert noticed[0] < BUSY_S
    # On a busy machine the client may still have held the last tokens of a frozen engine, and nobody waits for the new one.
    wait_until(lambda: engine.stats().restarts == restarts + 1, 240)
    assert engine_pid(engine) != pid
    for prompt, group, before in zip(prompts, groups, undisturbed, strict=True):
        for c, d in zip(group, before, strict=True):
            assert c.finish_reason == "length" and set(c.versions) == {1}
            assert np.array_equal(c.tokens, d.tokens)  # the same seeds
            assert np.abs(tiny_model.logprobs(models[1], prompt, c.tokens) - c.logprobs).max() < 1e-4
    assert not Path(f"/proc/{pid}").exists() and not Path(f"/proc/{client}").exists()


@pytest.mark.rest
def test_engine_crash_during_load_restarts_with_new_weights(engine, models):
    """The engine dies while it loads: after the restart it has the weights that were being published."""
    lane = engine._pool.replicas[0]
    load, pid = lane.backend.load, engine_pid(engine)

    async def die_in_load(*args):
        os.kill(pid, signal.SIGKILL)
        return await load(*args)

    lane.backend.load = die_in_load
    engine.publish(models[0].named_parameters(), 2)
    assert engine_pid(engine) != pid and engine.version == 2
    prompts = tiny_model.prompts(1, 20)
    c = engine.sample(prompts, 1, SamplingConfig(max_tokens=16, seed=1))[0][0]
    assert set(c.versions) == {2}
    assert np.abs(tiny_model.logprobs(models[0], prompts[0], c.tokens) - c.logprobs).max() < 1e-4


@pytest.mark.rest
def test_engine_frozen_at_weight_sync_fails_probe_deadline(engine, models, caplog):
    """After probe_deadline_s (2 s here), not after rpc_deadline_s (300 s)."""
    version, core, struck = engine.version + 1, engine._pool.replicas[0].backend, [time.monotonic()]
    os.kill(engine_pid(engine), signal.SIGSTOP)
    noticed = []
    watcher = threading.Thread(
        target=lambda: (
            wait_until(lambda: engine._pool.replicas[0].backend is not core),
            noticed.append(time.monotonic() - struck[0]),
        )
    )
    watcher.start()
    engine.publish(models[0].named_parameters(), version)
    watcher.join(60)
    assert 2.0 <= noticed[0] < BUSY_S
    assert engine.version == version and engine._pool.replicas[0].backend is not core
    assert "did not answer is_paused within 2 s" in caplog.text
    prompts = tiny_model.prompts(1, 20)
    c = engine.sample(prompts, 1, SamplingConfig(max_tokens=16, seed=1))[0][0]
    assert set(c.versions) == {version}
    assert np.abs(tiny_model.logprobs(models[0], prompts[0], c.tokens) - c.logprobs).max() < 1e-4


@pytest.mark.rest
def test_engine_uncleared_cache_restarts_with_new_weights(engine, models, fault, caplog):
    """Such an engine would sample on with old keys and values. The next one begins with the new weights and an empty cache."""
    restarts, version, prompts = engine.stats().restarts, engine.version + 1, tiny_model.prompts(1, 50)
    fault.write_text("the cache is not cleared")
    engine.publish(models[1].named_parameters(), version)
    assert "refused to clear its KV cache" in caplog.text and engine.stats().restarts == restarts + 1
    (c,) = engine.sample(prompts, 1, SamplingConfig(max_tokens=8, seed=1))[0]
    assert np.abs(tiny_model.logprobs(models[1], prompts[0], c.tokens) - c.logprobs).max() < 1e-4


@pytest.mark.rest
def test_reaper_crash_ends_engine_without_leaks(engine, caplog):
    """The message says how the engine ended; the lost life gives back its descriptors and threads."""
    engine.sample([[1]], 1, SamplingConfig(max_tokens=1))
    before, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    restarts = engine.stats().restarts
    os.kill(engine._reaper.pid, signal.SIGKILL)
    os.kill(engine_pid(engine), signal.SIGKILL)
    assert len(engine.sample([[1]], 1, SamplingConfig(max_tokens=1))[0]) == 1
    assert engine.stats().restarts == restarts + 1
    assert "killed by SIGKILL, perhaps by the kernel's out-of-memory killer" in caplog.text
    assert Path(f"/proc/{engine._reaper.pid}").exists() and Path(engine._reaper.folder).is_dir()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before and len(os.listdir("/proc/self/task")) <= threads)


def test_engine_failed_first_start_reports_reason(tmp_path, model_dir):
    with Engine(model_dir, replace(CONFIG, kv_cache_bytes=1000), str(tmp_path)) as engine:
        engine.start()
        with pytest.raises(EngineFailed, match="did not start(.|\n)*No available memory"):
            engine.wait_ready(240)
    with pytest.raises(ValueError, match="probe_deadline_s=0 must be"):
        EngineConfig(probe_deadline_s=0)


TRAINER = """
    import sys, threading, time
    from helpers.waiting import engine_pid
    from torchtune_ext.sampling.engine import Engine, EngineConfig, SamplingConfig
    raise_in_main = sys.argv[3] == "exception"
    config = EngineConfig(dtype="float32", max_model_len=1024, kv_cache_bytes=64 << 20)
    engine = Engine(sys.argv[1], config, sys.argv[2])
    engine.start()
    while engine._pool.replicas[0].backend is None:
        time.sleep(0.01)
    core = engine._pool.replicas[0].backend
    if sys.argv[3] != "starting":
        engine.wait_ready(240)
    print(engine_pid(engine) or core.process_group, core.process_group, engine._reaper.pid, engine._reaper.folder, flush=True)
    if sys.argv[3] != "starting":
        if raise_in_main:
            raise SystemExit(3)
        threading.Timer(0.3, lambda: print("vllm imported:", "vllm" in sys.modules, flush=True)).start()
        engine.sample([[1, 2, 3]] * 8, 8, SamplingConfig(max_tokens=1000))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "moment",
    ["sampling", *(pytest.param(moment, marks=pytest.mark.rest) for moment in ("starting", "exception"))],
)
def test_trainer_exit_leaves_no_engine_processes_or_files(model_dir, tmp_path, moment):
    script = tmp_path / "trainer.py"
    script.write_text(textwrap.dedent(TRAINER))
    (tmp_path / "tmp").mkdir()
    in_memory = set(os.listdir("/dev/shm"))
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    trainer = subprocess.Popen(
        [sys.executable, str(script), model_dir, str(tmp_path), moment], stdout=subprocess.PIPE, env=environ, text=True
    )
    core, client, janitor, temp_dir = trainer.stdout.readline().split()
    assert Path(temp_dir).is_dir() and Path(f"/proc/{core}").exists() and Path(f"/proc/{janitor}").exists()
    if moment == "sampling":
        assert trainer.stdout.readline() == "vllm imported: False\n"
        assert any(Path(temp_dir).iterdir())  # sockets
    if moment != "exception":
        time.sleep(1.0)
        trainer.kill()
    trainer.wait(60)
    assert trainer.returncode == (3 if moment == "exception" else -signal.SIGKILL)
    gone = [*(Path(f"/proc/{pid}") for pid in (core, client, janitor)), Path(temp_dir)]
    wait_until(lambda: not any(path.exists() and not is_zombie(path) for path in gone))
    wait_until(lambda: set(os.listdir("/dev/shm")) <= in_memory | mapped_memory())
    assert list((tmp_path / "tmp").iterdir()) == []


def mapped_memory() -> set[str]:
    """Names in /dev/shm that a process of this machine has mapped: those of other tests and runs."""
    names = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended
            names |= set(re.findall(r" /dev/shm/(\S+)$", maps.read_text(), re.MULTILINE))
    return names


def is_zombie(path: Path) -> bool:
    """Ended, but not yet fetched by whoever inherited it."""
    try:
        return (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return False
