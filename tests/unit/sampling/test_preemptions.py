"""Counting preemptions: by a full cache, not by a pause for a weight sync."""

import asyncio
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling.backend import EngineStepStats  # noqa: E402
from torchtune_ext.sampling.types import EngineConfig  # noqa: E402
from torchtune_ext.sampling.vllm_backend import VLLMBackend  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer  # noqa: E402


class Core(VLLMBackend):
    is_dead = False

    async def rpc(self, method, /, **arguments):
        return True


@pytest.mark.parametrize(
    ("way", "waiting", "counted"), [("recompute", 0, [0, 2, 1]), ("recompute", 2, [0, 4, 1]), ("keep", 0, [3, 4, 1])]
)
def test_preemptions_of_a_pause_are_not_counted(way, waiting, counted):
    steps, weights = [], WeightBuffer()
    weights.write([("a", torch.zeros(2))])
    backend = Core(EngineConfig(kv_on_publish=way), lambda step: steps.append(step.preempted))
    backend.requests = dict.fromkeys("abcde")  # five requests are in flight
    step = EngineStepStats(usage=0.5, running=3, waiting=waiting, preempted=0, prefix_queries=0, prefix_hits=0)
    backend.report_step(step)
    asyncio.run(backend.load([weights], 1))
    weights.close()
    backend.report_step(replace(step, preempted=3))  # three of them were resumed
    backend.report_step(replace(step, preempted=4))  # the remaining requests, and preemptions by a full cache
    backend.report_step(replace(step, preempted=1))
    assert steps == [0, *counted]
