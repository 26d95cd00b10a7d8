"""An engine that answers agents' requests with given texts.

    python -m helpers.scripted_engine MODEL_DIR MAX_OPEN_FILES

serves an endpoint with a limit of open files, and prints its URL and the key of an episode. At the end of standard input it
prints how often it could not open a file.
"""

import asyncio
import resource
import sys
import threading
from types import SimpleNamespace

import numpy as np

from torchtune_ext.chat import ChatTokenizer
from torchtune_ext.grading.agents import AgentConfig
from torchtune_ext.pipeline import endpoint as endpoint_module
from torchtune_ext.pipeline.endpoint import Endpoint
from torchtune_ext.sampling.backend import build_requests
from torchtune_ext.sampling.engine import LoopThread, Priority, SamplingConfig
from torchtune_ext.sampling.types import Completion

ASK = {"role": "user", "content": "Write about 3."}


def completion(ids, finish_reason="stop"):
    ids = np.asarray(ids, np.int32)
    return Completion(ids, 0 - np.arange(len(ids), dtype=np.float32), np.zeros(len(ids), np.int32), finish_reason)


class ScriptedEngine:
    """An engine that answers requests with the next text."""

    config = SimpleNamespace(max_model_len=600)

    def __init__(self, tokenizer):
        self.thread, self.tokenizer, self.texts, self.requests = LoopThread("scripted"), tokenizer, [], []
        self.released, self.cancelled, self.error = threading.Event(), 0, None
        self.released.set()
        self.thread.start()

    def schedule(self, work, priority=None):
        return self.thread.schedule(work)

    def call(self, function, *args):
        async def work():
            return function(*args)

        return self.schedule(work()).result(10)

    async def generate(self, request, affinity_key=None):
        self.requests.append(request)
        try:
            while not self.released.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        text = self.texts.pop(0) if self.texts else "ok"
        return completion([*self.tokenizer.encode(text), self.tokenizer.eos_id])

    def open(self, endpoint, on_response=lambda completion: None, **sampling):
        """Open an episode: sample 1 of group 2."""
        prompt, sampling = self.tokenizer.prompt_ids([ASK]), SamplingConfig(seed=5, **{"max_tokens": 64} | sampling)
        request = build_requests(prompt, 4, sampling, 2, Priority.SAMPLE, self.config.max_model_len)[1]
        return self.call(endpoint.open, prompt, sampling, request, 1, Priority.SAMPLE, on_response)


def main():
    model_dir, max_files = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    endpoint_module.FIRST_REQUEST_TIMEOUT_S = 2.0
    engine = ScriptedEngine(ChatTokenizer(model_dir))
    endpoint = Endpoint(engine, engine.tokenizer, AgentConfig())
    print(endpoint.url, engine.open(endpoint).key, flush=True)
    ended, failures = threading.Event(), 0
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.01):
        try:
            open(__file__).close()
        except OSError:
            failures += 1
    endpoint.close()
    print(failures)


if __name__ == "__main__":
    main()
