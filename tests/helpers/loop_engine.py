"""The part of `Engine` that a stream of groups uses, with a real loop in a thread of its own."""

import asyncio
from functools import cache
from types import SimpleNamespace

from torchtune_ext.sampling.backend import group_seeds
from torchtune_ext.sampling.engine import LoopThread


@cache
def loop_thread() -> LoopThread:
    """Return the thread of all engines of a test process, since a pool of environments belongs to one loop."""
    thread = LoopThread("test-engine")
    thread.start()
    return thread


def settle():
    """Return once the loop has run everything that is ready now."""

    async def run_ready():
        for _ in range(10):
            await asyncio.sleep(0)

    loop_thread().call(run_ready())


def sample_index(request):
    """Return the index of a seeded request in its group."""
    return group_seeds(request.sampling.seed, request.seed_index, request.n).index(request.seed)


class LoopEngine:
    """An engine whose `generate` a subclass defines. `futures` are those of the scheduled groups."""

    def __init__(self, max_model_len=64):
        self.config, self.futures = SimpleNamespace(max_model_len=max_model_len), []

    def schedule(self, work, priority):
        self.futures.append(loop_thread().schedule(work))
        settle()  # the first requests have been made, or the completions have arrived
        return self.futures[-1]


class ManualRequest:
    """A request that waits in `generate` until another thread completes it or fails it."""

    def __init__(self):
        self._future = asyncio.get_running_loop().create_future()

    async def wait(self):
        return await self._future

    def complete(self, completion):
        """Pass the completion to the waiting coroutine. A canceled request ignores it."""
        self._call(self._future.set_result, completion)

    def fail(self, error):
        self._call(self._future.set_exception, error)

    def _call(self, function, value):
        async def call():
            if not self._future.done():
                function(value)

        loop_thread().call(call())
