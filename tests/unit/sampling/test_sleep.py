"""Sleep levels of an engine replica, and the order of calls that wake vLLM."""

import asyncio
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from helpers.fake_backends import CONFIG, run_scenario  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402
from torchtune_ext.sampling.vllm_backend import VLLMBackend  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer  # noqa: E402

LORA = {"r": 4}


class RecordedBackend(VLLMBackend):
    is_dead = False

    def __init__(self):
        super().__init__(EngineConfig(), print)
        self.calls = []

    async def rpc(self, method, /, **arguments):
        what = arguments.get("tags") or [arguments.get("method") or arguments.get("level")]
        self.calls.append(" ".join([method, *(str(name) for name in what if name)]))
        return True


@pytest.mark.parametrize(
    "level, contents, loads",
    [
        (1, [], []),
        (2, [], ["collective_rpc reload_base"]),
        (1, [LORA], ["collective_rpc load_adapter"]),
        (2, [LORA], ["collective_rpc reload_base", "collective_rpc load_adapter"]),
        (2, [None], ["update_weights"]),
        (2, [None, LORA], ["update_weights", "collective_rpc load_adapter"]),
    ],
)
def test_load_fills_dropped_weights_before_scheduling(level, contents, loads):
    buffers = [WeightBuffer() for _ in contents]
    for buffer, adapter in zip(buffers, contents, strict=True):
        buffer.write([("a", torch.zeros(2))])
        buffer.adapter = adapter
    backend = RecordedBackend()

    async def turn():
        await backend.sleep(level)
        await backend.load(buffers, 1)

    asyncio.run(turn())
    assert backend.sleep_level == 0
    moves = ("sleep", "wake_up", "update_weights", "collective_rpc")
    assert [call for call in backend.calls if call.split()[0] in moves] == [
        f"sleep {level}",
        "wake_up weights",
        *loads,
        "wake_up kv_cache scheduling",
    ]


@pytest.mark.parametrize("setting, level", [(True, 1), (2, 2)])
def test_sleep_level_before_first_sync_is_configured(setting, level):
    async def scenario(harness):
        await harness.pool.sleep()
        assert harness.backends[0].sleep_level == level
        # A published adapter contains no base weights.
        harness.write(1, adapter=LORA)
        await harness.pool.load(1)
        await harness.pool.sleep()
        assert harness.backends[0].sleep_level == level
        # A published model is loaded at each wake-up.
        harness.write(2)
        await harness.pool.load(2)
        await harness.pool.sleep()
        assert harness.backends[0].sleep_level == 2

    run_scenario(scenario, replace(CONFIG, sleep=setting))


@pytest.mark.parametrize("value", [3, "two"])
def test_unknown_sleep_level_is_refused(value):
    with pytest.raises(ValueError, match="sleep"):
        EngineConfig(sleep=value)
