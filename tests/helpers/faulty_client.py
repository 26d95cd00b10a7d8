"""A client of vLLM that plants a fault, once, whenever the file FAULT names one. Tests set `remote_core.CLIENT` to this module."""

import os
import signal
import sys
from pathlib import Path

from torchtune_ext.sampling import client_process


def planted(fault: str) -> bool:
    """Whether it is this one; it is not planted again."""
    file = Path(os.environ["FAULT"])
    if file.read_text() != fault:
        return False
    file.write_text("")
    return True


class FaultyClient(client_process.Client):
    async def launch(self):
        answer = await super().launch()
        clear, update = self._llm.reset_prefix_cache, self._llm.update_weights

        async def reset_prefix_cache(**options):
            return False if planted("the cache is not cleared") else await clear(**options)

        async def update_weights(request):
            if planted("frozen in the load"):
                os.kill(self.process.pid, signal.SIGSTOP)
            return await update(request)

        self._llm.reset_prefix_cache, self._llm.update_weights = reset_prefix_cache, update_weights
        return answer

    async def _load_adapter(self, *arguments):
        if planted("the last adapter stays"):
            await self._llm.update_weight_version(str(arguments[-1]))
            return
        await super()._load_adapter(*arguments)
        if planted("the adapter is forgotten"):
            self._lora_request = None


if __name__ == "__main__":
    client_process.Client = FaultyClient
    client_process.main(int(sys.argv[1]), int(sys.argv[2]))
