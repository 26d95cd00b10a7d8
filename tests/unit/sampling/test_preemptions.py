"""Which preemptions of an engine are counted: those of a full cache, not those of a pause."""

import asyncio
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torchtune_ext.sampling.calls import Step  # noqa: E402
from torchtune_ext.sampling.records import EngineConfig  # noqa: E402
from torchtune_ext.sampling.vllm_core import VLLMCore  # noqa: E402
from torchtune_ext.sampling.weight_buffer import WeightBuffer  # noqa: E402


class Core(VLLMCore):
    dead = False

    async def rpc(self, method, /, **arguments):
        return True


@pytest.mark.parametrize(("way", "counted"), [("recompute", [0, 2, 1]), ("keep", [3, 4, 1])])
def test_preemptions_of_a_pause_are_not_counted(way, counted):
    steps, weights = [], WeightBuffer()
    weights.write([("a", torch.zeros(2))])
    core = Core(EngineConfig(kv_on_publish=way), lambda step: steps.append(step.preempted))
    core.calls = dict.fromkeys("abcde")  # five requests are in flight
    asyncio.run(core.load([weights], 1))
    weights.close()
    step = Step(usage=0.5, running=3, waiting=2, preempted=3, prefix_queries=0, prefix_hits=0)
    core.count(step)  # three of them run again
    core.count(replace(step, preempted=4))  # the other two, and two that a full cache has thrown out
    core.count(replace(step, preempted=1))
    assert steps == counted
