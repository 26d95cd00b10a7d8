"""A vLLM engine on a CPU that sleeps without freeing memory, for runs with `engine.sleep`. vLLM sleeps only on GPUs.

Runs import a copy of this file from their workspace.
"""

from torchtune_ext.sampling.vllm_backend import ProcessBackend


class RestingBackend(ProcessBackend):
    """Records each sleep and each load in `transitions.txt` of the run folder."""

    async def load(self, buffers, version):
        kinds = ["model" if buffer.adapter is None else "adapter" for buffer in buffers]
        self.record(f"load {version} of {' and '.join(kinds) or 'nothing'}, sleep level {self.sleep_level}")
        self.sleep_level = 0
        return await super().load(buffers, version)

    async def sleep(self, level):
        await self.ping(self.config.probe_deadline_s)
        assert not self.requests, "the engine sleeps while it samples"
        self.sleep_level = level
        self.record(f"sleep at level {level}")

    def record(self, event):
        with self.log.with_name("transitions.txt").open("a") as file:
            file.write(f"{event}\n")
