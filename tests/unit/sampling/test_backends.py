"""Custom sampler backends: a class, and an entry in the table."""

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling.backend import BackendCrashed  # noqa: E402
from torchtune_ext.sampling.engine import (  # noqa: E402
    BACKENDS,
    Engine,
    EngineConfig,
    SamplingConfig,
)


class Countdown:
    """A backend in the trainer's process. After a prompt that ends in n it samples n-1, ..., 1, up to max_tokens."""

    vocab_size, cache_tokens, block_size = 100, 4096, 32
    sleep_level, process_group, stats_error, is_dead = 0, 0, None, False
    lives: list["Countdown"] = []

    def __init__(self, model_dir, config, log_path, temp_dir, on_step):
        self.model_dir, self.requests, self.last_heartbeat = model_dir, {}, time.monotonic()
        self.version, self.loaded, self.sums, self.configured = None, [], {}, False
        self.lives.append(self)

    def configure(self):
        self.configured = True

    async def launch(self):
        self.configure()

    async def generate(self, call):
        if self.is_dead:
            raise BackendCrashed(self.describe_exit())
        with call.track_in(self.requests):
            tokens = list(range(call.prompt[-1] - 1, 0, -1))[: call.sampling.max_tokens]
            call.add(tokens, [-0.5] * len(tokens))
        spans = [] if self.version is None else [(str(self.version), 0, len(tokens))]
        return call.completion("length", spans, cached=0)

    async def load(self, buffers, version):
        self.loaded += [buffer.manifest["names"] for buffer in buffers]
        # A real engine computes checksums of loaded tensors. This one loads nothing and returns the published ones.
        for buffer in buffers:
            self.sums |= buffer.checksums
        self.version = version
        return 0.0, 0.0

    async def checksums(self):
        return [self.sums]

    async def weight_version(self):
        return self.version

    async def ping(self, deadline_s):
        pass

    async def sleep(self, level):
        pass

    def kill(self):
        self.is_dead = True

    def describe_exit(self):
        return "the countdown was killed"

    def log_tail(self):
        return ""

    async def stop(self):
        self.is_dead = True


@pytest.fixture
def engine(monkeypatch, tmp_path):
    monkeypatch.setitem(BACKENDS, "countdown", Countdown)
    monkeypatch.setattr(Countdown, "lives", [])
    config = EngineConfig(backend="countdown", probe_interval_s=0.05)
    with Engine("the model", config, str(tmp_path), version=3) as engine:
        engine.start()
        engine.wait_ready(10)
        yield engine


def test_custom_backend_samples_loads_weights_and_restarts(engine):
    sampling = SamplingConfig(max_tokens=4)
    groups = engine.sample([[9, 3], [50]], 2, sampling)
    assert [[completion.tokens.tolist() for completion in group] for group in groups] == [
        [[2, 1], [2, 1]],
        [[49, 48, 47, 46], [49, 48, 47, 46]],
    ]
    assert set(groups[0][0].versions) == {3} and groups[0][0].logprobs.dtype == np.float32
    engine.publish([("a", torch.zeros(2)), ("b", torch.zeros(3))], 4)
    Countdown.lives[0].kill()
    groups = engine.sample([[3]], 1, sampling)
    assert set(groups[0][0].versions) == {4} and engine.stats().completed == 5
    # One factory makes every backend of an engine: the second one is configured, launched and loaded like the first.
    first, second = Countdown.lives
    assert first.model_dir == second.model_dir == "the model" and first.configured and second.configured
    assert first.loaded == second.loaded == [["a", "b"]] and engine.stats().restarts == 1


def test_an_unknown_backend_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match="engine.backend.*'vlm'.*vllm"):
        Engine("the model", EngineConfig(backend="vlm"), str(tmp_path))
    with pytest.raises(ValueError, match="engine.backend=my_cores.Countdown: .*'my_cores'"):
        Engine("the model", EngineConfig(backend="my_cores.Countdown"), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
