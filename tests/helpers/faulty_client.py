"""A vLLM client that injects the fault that the file FAULT names, once. Tests set `prestart.CLIENT_MODULE` to this module."""

import os
import sys
from pathlib import Path

from torchtune_ext.sampling import client_process


def planted(fault: str) -> bool:
    """Whether FAULT names this fault. The file is cleared, so that the fault occurs once."""
    file = Path(os.environ["FAULT"])
    if file.read_text() != fault:
        return False
    file.write_text("")
    return True


class FaultyClient(client_process.Client):
    forgotten = False

    async def launch(self):
        answer = await super().launch()
        clear, rpc = self._llm.reset_prefix_cache, self._llm.collective_rpc

        async def reset_prefix_cache(**options):
            return False if planted("the cache is not cleared") else await clear(**options)

        async def collective_rpc(method, *arguments, **options):
            if method == "load_adapter":
                if planted("the last adapter stays"):
                    return None
                self.forgotten = planted("the adapter is forgotten")
            return await rpc(method, *arguments, **options)

        self._llm.reset_prefix_cache, self._llm.collective_rpc = reset_prefix_cache, collective_rpc
        return answer

    async def generate(self, call, salt, adapted):
        return await super().generate(call, salt, adapted and not self.forgotten)


if __name__ == "__main__":
    client_process.Client = FaultyClient
    client_process.main(int(sys.argv[1]), int(sys.argv[2]))
